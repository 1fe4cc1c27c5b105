"""The state of a Laplace approximation: refits, failures, tempered posteriors and what cannot be assigned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.errors import DataError, InputError, NotFittedError, StatisticalWarning
from aftermap.laplace import DimensionResult, Laplace, Mixture, check_stationarity, refined_evidence
from aftermap.laplace.fitted import data_if_repeatable
from aftermap.likelihoods import Gaussian
from tests.laplace.problems import classes, gaussian_nll, mlp, normal, regression, seeded, trained

by_heart = pytest.mark.filterwarnings("ignore:matched to the effective dimension:aftermap.errors.StatisticalWarning")


def normalised(seed: int = 0) -> nn.Module:
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4)), seed)
    return trained(net, classes(), nn.CrossEntropyLoss(reduction="sum"), steps=30)


def regressor(**options: Any) -> Laplace:
    model = trained(mlp(1, 6, 1), regression(), gaussian_nll(0.3))
    return Laplace(model, Gaussian(0.7), **options).fit(regression(), progress=False)


def numbers(la: Laplace) -> list[float]:
    """Every public number of a fit."""
    return [
        la.data_scale,
        la.temperature,
        la.likelihood_weight,
        la.n_data,
        float(la.hyperparameters.noise),
        float(la.posterior.scale),
        float(la.posterior.log_det_precision()),
        float(la.log_evidence()),
        *(float(v) for v in la.prior_precision.values()),
    ]


@pytest.mark.parametrize("method", ["evidence", "lbfgs", "dimension", "validation"])
def test_a_refit_starts_from_the_constructor_and_leaves_nothing_of_the_old_fit(method: str) -> None:
    la = regressor(data_scale=2.0)
    fresh = numbers(la)
    la.tune(regression(seed=9) if method == "validation" else None, method=method)
    assert numbers(la) != fresh
    assert la.tuning is not None
    la.report = "of the old fit"
    la.fit(regression(), progress=False)
    assert numbers(la) == fresh
    assert la.tuning is None
    assert la.report is None
    assert la.likelihood.noise == 0.7


def test_an_update_keeps_what_was_tuned() -> None:
    first, second = regression()
    la = Laplace(trained(mlp(1, 6, 1), regression(), gaussian_nll(0.3)), Gaussian(0.7)).fit([first], progress=False)
    la.tune(method="evidence")
    noise, precision = float(la.hyperparameters.noise), {k: float(v) for k, v in la.prior_precision.items()}
    la.fit([second], update=True, progress=False)
    assert float(la.hyperparameters.noise) == noise
    assert {k: float(v) for k, v in la.prior_precision.items()} == precision
    assert la.n_data == len(first[0]) + len(second[0])
    assert [len(x) for x, _ in la.data] == [len(first[0]), len(second[0])]
    with pytest.raises(NotFittedError, match="has not been fitted"):
        Laplace(la.model, "regression").fit([first], update=True, progress=False)


def test_data_that_are_gone_stay_gone() -> None:
    la = regressor()
    assert data_if_repeatable(iter([1]), la.fitted) is None
    assert data_if_repeatable([1]) == [1]


@by_heart
def test_a_failed_tuning_or_fit_leaves_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    la = Laplace(normalised(), "classification").fit(classes(), progress=False).tune(method="dimension")
    before, tuning = numbers(la), la.tuning

    def broken(*_: object, **__: object) -> DimensionResult:
        raise DataError("no")

    monkeypatch.setattr("aftermap.laplace.tune.match_dimension", broken)
    with pytest.raises(DataError, match="no"):
        la.tune(method="dimension")
    assert la.tuning is tuning
    assert numbers(la) == before
    with pytest.raises(InputError):
        la.fit([(normal(2, 7), torch.tensor([0, 1]))], progress=False)
    with pytest.raises(InputError):
        la.tune([], method="validation")
    with pytest.raises(InputError):
        la.with_prior({"nothing": 1.0})
    with pytest.raises(InputError, match="must be positive and finite"):
        la.narrow(0.0)
    assert la.tuning is tuning
    assert numbers(la) == before


def test_a_warning_that_is_an_error_leaves_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    la = Laplace(normalised(), "classification").fit(classes(), progress=False)
    before = numbers(la)
    collapsed = am.laplace.SelfCheck(9, 0.1, 2.0, 1.0, 0.2, 0.9, 0.3, True, "it collapsed")
    monkeypatch.setattr("aftermap.laplace.tune.check_predictive", lambda *_, **__: collapsed)
    with pytest.raises(StatisticalWarning, match="it collapsed"):  # pytest makes errors of warnings
        la.tune(method="dimension")
    assert numbers(la) == before
    assert la.tuning is None


@by_heart
def test_the_evidence_of_a_matched_posterior_is_that_before_matching(tmp_path: Path) -> None:
    la = Laplace(normalised(), "classification").fit(classes(), progress=False).tune(method="evidence")
    evidence, refined, gain = la.log_evidence(), refined_evidence(la), check_stationarity(la).gain
    la.tune(method="dimension")
    assert isinstance(la.tuning, DimensionResult)
    assert la.data_scale == pytest.approx(la.tuning.factor)
    torch.testing.assert_close(la.log_evidence(), evidence, rtol=1e-6, atol=1e-4)
    # So are the gain of moving to a mode, and the evidence of the linear model there.
    after = refined_evidence(la)
    torch.testing.assert_close(
        (after.log_evidence, after.gain), (refined.log_evidence, refined.gain), rtol=1e-5, atol=1e-4
    )
    assert check_stationarity(la).gain == pytest.approx(gain, rel=1e-5)
    again = am.load(la.save(tmp_path / "matched"), la.model)
    torch.testing.assert_close(again.log_evidence(), la.log_evidence())
    # Matching again starts from the data as they are.
    scale = la.data_scale
    assert la.tune(method="dimension").data_scale == pytest.approx(scale, rel=1e-2)
    assert la.tune(method="evidence").data_scale == pytest.approx(1.0)


def test_narrowing_divides_the_covariance_and_keeps_the_evidence() -> None:
    la = regressor()
    variance, evidence = la.posterior.marginal_variance(), la.log_evidence()
    assert la.narrow(4.0) is la
    for name, value in la.posterior.marginal_variance().items():
        torch.testing.assert_close(4 * value, variance[name])
    assert la.data_scale == 4.0
    torch.testing.assert_close(la.log_evidence(), evidence)


@by_heart
def test_a_mixture_by_evidence_of_matched_posteriors() -> None:
    parts = [
        Laplace(normalised(seed), "classification").fit(classes(), progress=False).tune(method="dimension")
        for seed in (0, 1)
    ]
    assert parts[0].data_scale != parts[1].data_scale
    mixture = Mixture(parts, "evidence")
    expected = torch.stack([part.log_evidence() for part in parts]).softmax(0)
    torch.testing.assert_close(mixture.weights, expected.detach())
    scaled = Laplace(normalised(), "classification", data_scale=2.0).fit(classes(), progress=False)
    with pytest.raises(InputError, match="different data scales / temperatures: 1, 2"):
        Mixture([parts[0], scaled.tune(method="dimension")])


@pytest.mark.parametrize("name", ["data_scale", "temperature", "tuning", "likelihood", "posterior", "prior_precision"])
def test_fitted_values_are_read_only(name: str) -> None:
    la = regressor()
    with pytest.raises(AttributeError, match=f"'{name}' of 'Laplace' object has no setter"):
        setattr(la, name, 2.0)


def test_old_names_are_told_of_their_new_ones() -> None:
    la = regressor().tune(method="evidence")
    with pytest.warns(DeprecationWarning, match="likelihood_weight"):
        assert la.power == 1.0
    with pytest.warns(DeprecationWarning, match="base_likelihood"):
        old = la.observation
    assert (old.base.noise, float(old.level), old.tunable) == (1.0, float(la.hyperparameters.noise), True)
    with pytest.warns(DeprecationWarning, match="EvidenceResult.noise"):
        assert la.tuning.level == la.tuning.noise
    with pytest.warns(DeprecationWarning, match="CheckReport is now called SelfCheck"):
        assert am.laplace.CheckReport is am.laplace.SelfCheck
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = am.laplace.Nothing


def test_unknown_arguments_of_predict_are_named_by_python() -> None:
    la = regressor()
    for predictor in (la, Mixture([la], "uniform")):
        with pytest.raises(TypeError, match="unexpected keyword argument 'smaples'"):
            predictor.predict(normal(2, 1), smaples=3)


# The empirical Fisher matrix of a regression


def squared_gradients(model: nn.Module, likelihood: Gaussian, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    total = torch.zeros(())
    for x, y in data:
        for i in range(len(x)):
            loss = likelihood.nll(model(x[i : i + 1]), y[i : i + 1]).sum()
            gradient = torch.autograd.grad(loss, list(model.parameters()))
            flat = torch.cat([g.reshape(-1) for g in gradient])
            total = total + torch.outer(flat, flat)
    return total


@pytest.mark.parametrize("noise", [1.0, 0.5, 0.1, torch.tensor([0.2, 0.6], dtype=torch.float64)])
def test_the_empirical_fisher_matrix_has_the_fourth_power_of_the_noise(noise: Any, tmp_path: Path) -> None:
    data = regression(outputs=2)
    model = trained(mlp(1, 4, 2), data, gaussian_nll(0.3))
    la = Laplace(model, Gaussian(noise), structure="full", curvature="empirical").fit(data, progress=False)
    truth = squared_gradients(model, Gaussian(noise), data)
    torch.testing.assert_close(la.posterior.to_dense() - torch.eye(len(truth)), truth, rtol=1e-8, atol=1e-8)
    la.tune(method="evidence")
    assert la.tuning.converged
    prior = torch.diag(la.posterior.prior.vector(la.posterior.names))
    truth = squared_gradients(model, la.likelihood, data)
    torch.testing.assert_close(la.posterior.to_dense() - prior, truth, rtol=1e-7, atol=1e-7)
    again = am.load(la.save(tmp_path / "fisher"), model)
    assert torch.equal(again.posterior.to_dense(), la.posterior.to_dense())
    torch.testing.assert_close(again.with_prior(2.0).log_evidence(), la.with_prior(2.0).log_evidence())


def test_the_tuned_noise_of_an_empirical_fisher_matrix_is_stationary() -> None:
    la = regressor(structure="full", curvature="empirical").tune(method="evidence")
    best = float(la.log_evidence())
    for factor in (0.97, 1.03):
        noise = factor * float(la.hyperparameters.noise)
        precision = {k: float(v) for k, v in la.prior_precision.items()}
        other = Laplace(
            la.model, Gaussian(noise), structure="full", curvature="empirical", prior_precision=precision
        ).fit(regression(), progress=False)
        assert float(other.log_evidence()) < best


def test_a_folder_with_the_old_scale_is_mended(tmp_path: Path) -> None:
    la = regressor(structure="full", curvature="empirical")
    right = la.posterior.to_dense()
    wrong = la.posterior.with_prior(scale=1 / 0.7**2)
    la.restore(la.factors, wrong, la.hyperparameters)
    la.save(tmp_path / "old")
    with pytest.warns(UserWarning, match="scaled the empirical Fisher matrix of a regression by 2.04 .* asks for 4.16"):
        again = am.load(tmp_path / "old", la.model)
    torch.testing.assert_close(again.posterior.to_dense(), right)


def test_a_loaded_posterior_is_refitted_from_its_own_values(tmp_path: Path) -> None:
    la = regressor().tune(method="evidence")
    la.save(tmp_path / "saved")
    again = am.load(tmp_path / "saved", la.model)
    before = numbers(again)
    assert numbers(again.fit(regression(), progress=False)) == pytest.approx(before, rel=1e-12)


# Fewer data than blocks count as determined


def overparametrised() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 3, generator=generator, dtype=torch.float64) * 4 - 2
    y = (2 * x[:, :1]).sin() + x[:, 1:2] * x[:, 2:] + 0.05 * torch.randn(60, 1, generator=generator).double()
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)))
    return trained(net, [(x, y)], nn.MSELoss(), decay=0.0, steps=60), [(x, y)]


@pytest.mark.parametrize("start", [0.01, 1.0, 30.0])
def test_the_noise_of_few_data_stays_near_their_residuals(start: float) -> None:
    """Kronecker blocks count more parameters than data, and their evidence rises with the noise without end in sight."""
    model, data = overparametrised()
    (x, y) = data[0]
    la = Laplace(model, Gaussian(start)).fit(data, progress=False)
    with pytest.warns(StatisticalWarning, match="the 3 blocks of structure='kron' count as many .* as the 60 numbers"):
        la.tune(method="evidence")
    residuals = float((y - model(x).detach()).square().mean().sqrt())
    assert la.tuning.converged
    assert la.tuning.noise_bounded
    assert float(la.hyperparameters.noise) == pytest.approx(10**0.5 * residuals, rel=1e-6)
    gammas = la.posterior.effective_parameters()
    for layer, names in la.posterior.layers.items():
        squares = la.posterior.prior.squared_distance(la.posterior.mean, names)
        assert float(la.prior_precision[layer]) * squares == pytest.approx(gammas[layer], rel=3e-3)


def test_a_tuning_that_was_cut_short_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    la = regressor()
    real = am.laplace.evidence.maximise_evidence
    monkeypatch.setattr("aftermap.laplace.tune.maximise_evidence", lambda *a, **o: real(*a, **{**o, "iterations": 1}))
    with pytest.warns(StatisticalWarning, match="at a point that is not stationary: the log evidence still changes by"):
        la.tune(method="evidence")
    assert not la.tuning.converged


def test_values_at_the_end_of_their_range_are_those_that_were_evaluated() -> None:
    """Weights at the prior mean ask for an infinite precision; L-BFGS must return what it evaluated."""
    model = mlp(1, 6, 1)
    with torch.no_grad():
        model[2].weight.mul_(1e-9)
        model[2].bias.zero_()
    la = Laplace(model, "regression", damping="factored").fit(regression(), progress=False)
    la.tune(method="evidence")
    assert all(1e-8 <= float(v) <= 1.0000001e12 for v in la.prior_precision.values())
    assert float(la.log_evidence()) == pytest.approx(max(la.tuning.history), abs=1e-6)
