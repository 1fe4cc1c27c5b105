"""Bad input, runaway, convergence of the weights, other ways to fine-tune, and the contract of a predictor."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.errors import DataError, InputError, NotFittedError, NumericalError, NumericalWarning, StatisticalWarning
from aftermap.hessian_free import HessianFree, PushReport
from aftermap.hessian_free.hessian_free import _positive
from aftermap.likelihoods import Gaussian
from aftermap.testing import ModelSnapshot, check_predictor, check_unchanged
from tests.hessian_free.problems import PRIOR, classification, curve, fresh
from tests.laplace.problems import generator, linear_regression, normal


def output(x: Tensor) -> Any:
    return lambda f: f(x)[1, 0]


def fitted(**options: Any) -> HessianFree:
    problem = curve()
    return HessianFree(problem.model, problem.likelihood, prior_precision=PRIOR, **options).fit(problem.data)


@pytest.mark.parametrize(("make", "params"), [(curve, "all"), (classification, "last_layer")])
def test_the_contract_of_a_predictor(make: Any, params: str) -> None:
    problem = make()
    hf = HessianFree(
        problem.model, problem.likelihood, params=params, prior_precision=PRIOR, method="newton_cg", step=0.3
    )
    check_predictor(hf.fit(problem.data), problem.asked[:3], differentiable=False)


@pytest.mark.parametrize(
    ("functional", "message"),
    [
        (lambda f: f(curve().asked), "functional 0 is not scalar: it returned shape \\(4, 1\\)"),
        (lambda f: f(curve().asked).sum().item(), "returned a float; it must return a tensor"),
        (lambda f: f(curve().asked).detach().sum(), "does not depend on the parameters 0.weight"),
        (lambda f: curve().model(curve().asked).sum(), "Compute it from what is passed in"),
        ([lambda f: f(curve().asked)[0, 0], lambda f: torch.tensor(2.0)], "functional 1 does not depend"),
        (lambda f: (f(curve().asked) * math.inf).sum(), "not finite"),
        ("the mean", "a functional is a function of the network"),
        ([], "a functional is a function of the network"),
    ],
)
def test_bad_functionals_are_named_and_nothing_is_changed(functional: Any, message: str) -> None:
    hf = fitted()
    before = ModelSnapshot.of(hf.model)
    with pytest.raises(InputError, match=message):
        hf.variance_of(functional)
    check_unchanged(hf.model, before)


@pytest.mark.parametrize("step", [0, -0.5, math.nan, math.inf, True, "1"])
def test_a_step_that_pushes_nothing_is_refused(step: Any) -> None:
    with pytest.raises(InputError, match="step=.*must be a positive and finite number.*λ"):
        HessianFree(curve().model, "regression", step=step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "newton"}, "method='newton' is not known; allowed are 'auto'"),
        ({"deviation": 0.0}, "deviation=0.0 must be a positive and finite number"),
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"queries": 2.5}, "queries=2.5 must be a whole number"),
        ({"momentum": 1.0}, "momentum=1.0 must lie in"),
        ({"lr": -1.0}, "lr=-1.0 must be a positive"),
        ({"dtype": torch.float16}, "dtype=torch.float16 must be"),
        ({"temperature": 0.0}, "temperature=0.0 must be"),
        ({"lamda": 0.0}, "no setting lamda; allowed are step"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        HessianFree(curve().model, "regression", **options)


def test_asking_before_the_fit_in_the_wrong_mode_or_after_a_change() -> None:
    problem = curve()
    hf = HessianFree(problem.model, problem.likelihood, prior_precision=PRIOR)
    with pytest.raises(NotFittedError, match="call fit"):
        hf.predict(problem.asked)
    with pytest.raises(InputError, match="torch.nn.Module"):
        HessianFree(lambda x: x, "regression")  # type: ignore[arg-type]
    noisy = nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.5), nn.Linear(3, 1)).double()
    with pytest.raises(InputError, match="Call model.eval"):
        HessianFree(noisy, "regression").fit(problem.data)
    model = fresh(problem)
    hf = HessianFree(model, problem.likelihood, prior_precision=PRIOR).fit(problem.data)
    with torch.no_grad():
        next(iter(model.parameters())).add_(1.0)
    with pytest.raises(InputError, match="weights have changed since the fit"):
        hf.variance_of(output(problem.asked))
    with pytest.raises(DataError, match="no example"):
        fitted().predict(torch.zeros(0, 1, dtype=torch.float64))
    with pytest.raises(DataError, match="no tensor of targets"):
        HessianFree(model, problem.likelihood).fit([(problem.asked, None)])


def test_weights_that_are_no_minimum_are_refused_polished_or_forced() -> None:
    problem = curve()
    model = fresh(problem)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    hf = HessianFree(model, problem.likelihood, prior_precision=PRIOR)
    before = ModelSnapshot.of(model)
    with pytest.raises(InputError, match="posterior standard deviations away from the minimum.*polish=True"):
        hf.fit(problem.data)
    assert hf.map_report is None
    with pytest.warns(StatisticalWarning, match="forced to go on"):
        hf.fit(problem.data, force=True)
    assert hf.map_report is not None
    assert hf.map_report.decrement > 1
    forced = hf.predict(problem.asked)
    assert_close(forced.mean, model(problem.asked).detach())
    hf.fit(problem.data, polish=True)
    assert hf.map_report.polished
    polished = hf.predict(problem.asked)
    assert_close(polished.mean, problem.model(problem.asked).detach(), rtol=1e-4, atol=1e-4)
    assert_close(polished.epistemic, forced.epistemic, rtol=1e-3, atol=0)  # the same minimum, at the end
    check_unchanged(model, before)
    tolerant = HessianFree(model, problem.likelihood, prior_precision=PRIOR, max_decrement=50.0).fit(problem.data)
    assert tolerant.map_report is not None
    assert tolerant.map_report.decrement == pytest.approx(hf.map_report.decrement)


class Saddle(nn.Module):
    """w₂ tanh(w₁ x) at w = 0, where the gradient vanishes and the Hessian is indefinite."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer * torch.tanh(self.inner * x)


@pytest.mark.parametrize("method", ["lbfgs", "newton_cg"])
def test_runaway_from_a_saddle_is_detected(method: str) -> None:
    model, x = Saddle().double(), normal(9, 1, seed=2)
    data = [(x, 2 * x)]
    hf = HessianFree(model, "regression", prior_precision=0.5, method=method).fit(data)
    assert hf.map_report is not None
    assert hf.map_report.decrement < 1e-6  # a stationary point: only a push shows what kind
    before = ModelSnapshot.of(model)
    with pytest.raises(NumericalError, match="runs away.*indefinite Hessian"):
        hf.variance_of(lambda f: f.params["inner"].sum())
    check_unchanged(model, before)
    loose = HessianFree(model, "regression", prior_precision=0.5, method=method, strict=False).fit(data)
    with pytest.warns(NumericalWarning, match="runs away"):
        found = loose.variance_of(lambda f: f.params["inner"].sum())
    assert bool(found.isnan())
    assert loose.report is not None
    assert loose.report.functionals[0].status == "runaway"
    assert not loose.report.ok


def test_a_step_that_is_too_large_is_halved_until_it_is_not() -> None:
    problem = curve()
    gradient = problem.jacobian()[3]
    truth = float(problem.truth(gradient))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf = fitted(step=5.0, curvature_limit=0.05)
        found = float(hf.variance_of(lambda f: f(problem.asked)[3, 0]))
    assert hf.report is not None
    report = hf.report.functionals[0]
    assert report.halvings >= 2
    assert report.step == pytest.approx(5.0 / 2**report.halvings)
    assert report.curvature <= 0.05
    assert found == pytest.approx(truth, rel=0.1)
    hf = fitted(step=1.0, curvature_limit=1e-6, max_halvings=1)
    with pytest.warns(NumericalWarning, match="curved even at"):
        hf.variance_of(lambda f: f(problem.asked)[3, 0])


def test_fine_tuning_that_stops_early_is_told() -> None:
    problem = curve()
    model = fresh(problem)
    with torch.no_grad():
        model[0].bias.add_(0.02)  # type: ignore[index, operator]
    hf = HessianFree(model, problem.likelihood, prior_precision=PRIOR, max_steps=4)
    with pytest.warns(NumericalWarning, match="stopped after 4 steps.*Raise max_steps"):
        hf.fit(problem.data)
    hf = fitted(max_steps=4, step=0.1)  # at the minimum nothing is left to do; a push needs more
    with pytest.warns(NumericalWarning, match="has not converged.*Allow more steps"):
        hf.variance_of(lambda f: f(problem.asked)[1, 0])
    assert hf.report is not None
    assert hf.report.functionals[0].status == "not converged"


def test_the_automatic_step_moves_by_the_wanted_deviation() -> None:
    problem = curve()
    hf = fitted(deviation=0.05)
    hf.joint(problem.asked)
    assert hf.report is not None
    for report in hf.report.functionals:
        assert isinstance(report, PushReport)
        assert report.deviation == pytest.approx(0.05, rel=0.1)
        assert report.step * math.sqrt(report.variance) == pytest.approx(report.deviation)
        assert report.energy == pytest.approx(1.0, abs=0.02)
        assert report.residual < 1e-6


class Branching(nn.Module):
    """Control flow that depends on the weights: nothing can vectorise it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if float(next(iter(self.inner.parameters())).sum()) > 1e9:
            return x
        return self.inner(x)


@pytest.mark.parametrize("method", ["lbfgs", "newton_cg"])
def test_what_cannot_be_vectorised_is_looped_over(method: str) -> None:
    problem = curve()
    model = Branching(problem.model)
    plain = fitted(method=method)
    hf = HessianFree(model, problem.likelihood, prior_precision=PRIOR, method=method).fit(problem.data)
    x = problem.asked[:1]
    assert_close(hf.joint(x)[1], plain.joint(x)[1], rtol=1e-6, atol=1e-10)
    assert hf._objective is not None
    assert not hf._objective._vectorised


def test_single_precision_networks_are_worked_on_in_double() -> None:
    problem = curve()
    model = fresh(problem).float()
    data = [(x.float(), y.float()) for x, y in problem.data]
    hf = HessianFree(model, problem.likelihood, prior_precision=PRIOR).fit(data)
    found = hf.predict(problem.asked.float())
    truth = fitted().predict(problem.asked)
    assert found.mean.dtype == torch.float32
    assert_close(found.epistemic.double(), truth.epistemic, rtol=1e-3, atol=0)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    single = HessianFree(model, problem.likelihood, prior_precision=PRIOR, dtype=torch.float32, deviation=0.3).fit(data)
    assert_close(single.predict(problem.asked[1:3].float()).epistemic.double(), truth.epistemic[1:3], rtol=0.05, atol=0)


@pytest.mark.parametrize(("method", "options"), [("sgd", {}), ("adam", {"lr": 0.02})])
def test_batches_that_are_shuffled_give_the_same_variance(method: str, options: dict[str, Any]) -> None:
    model, data, _, _, precision = linear_regression(count=39)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=10, shuffle=True, generator=generator(3)
    )
    row = normal(2, 4, seed=5)
    features = torch.cat([row, torch.ones(2, 1, dtype=torch.float64)], 1)
    truth = features @ torch.linalg.solve(precision, features.T)
    hf = HessianFree(model, Gaussian(0.6), prior_precision=1.4, method=method, steps=300, **options).fit(loader)
    found = hf.joint(row)[1].reshape(2, 2)
    sd = truth.diagonal().sqrt()
    # Steps on batches have a bias of the order of the learning rate: the curvature changes from batch to batch.
    assert float(((found - truth) / sd / sd[:, None]).abs().max()) < 0.05
    assert hf.report is not None
    assert hf.report.ok


@pytest.mark.parametrize("symmetric", [True, False])
def test_steps_that_end_early_are_told_of(symmetric: bool) -> None:
    """Inputs of very different sizes: the slow directions hold most of the variance and hardly any of the gradient."""
    x = normal(39, 4, seed=1) * torch.tensor([4.0, 2.0, 0.5, 0.3], dtype=torch.float64)
    prior = 0.05
    precision = x.T @ x + prior * torch.eye(4, dtype=torch.float64)
    y = normal(39, 1, seed=2)
    model = nn.Linear(4, 1, bias=False).double().eval()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(precision, x.T @ y).T)
    row = torch.tensor([[4.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    truth = float(row[0] @ torch.linalg.solve(precision, row[0]))

    def found(steps: int) -> tuple[float, Any]:
        hf = HessianFree(
            model, Gaussian(1.0), prior_precision=prior, method="sgd", steps=steps, average=0.0, symmetric=symmetric
        ).fit([(x, y)])
        value = float(hf.variance_of(lambda f: f(row).sum()))
        assert hf.report is not None
        return value, hf.report.functionals[0]

    with pytest.warns(NumericalWarning, match=r"has not converged .* too small, by up to \d+%. Allow more steps"):
        early, report = found(25)
    assert report.residual < 0.5  # by itself it looks well
    assert early < 0.8 * truth <= 0.8 * early * (1 + report.missing)
    late, report = found(600)
    assert report.status == "ok"
    assert late == pytest.approx(truth, rel=0.02)
    assert report.missing < 0.05


def test_batches_that_come_once_or_steps_that_diverge_are_refused() -> None:
    model, data, _, _, _ = linear_regression()
    with pytest.raises(DataError, match="more than once"):
        HessianFree(model, Gaussian(0.6), prior_precision=1.4, method="adam", steps=5).fit(iter(data))
    with pytest.raises(NumericalError, match="sgd does not settle. Lower lr"):
        HessianFree(model, Gaussian(0.6), prior_precision=1.4, method="sgd", steps=40, lr=5.0).fit(data)


def test_inputs_of_any_form_and_frozen_batch_norm() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.head(torch.tanh(self.norm(self.first(left + right))))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Two().double()
    left, right = normal(20, 3, seed=1), normal(20, 3, seed=2)
    model(left, right)  # gives the running statistics
    model.eval()
    before = ModelSnapshot.of(model)
    data = [({"left": left, "right": right, "labels": normal(20, 2, seed=3)})]
    hf = HessianFree(model, Gaussian(0.5), prior_precision=5.0).fit(data, polish=True)
    one = hf.variance_of(lambda f: f({"left": left[:1], "right": right[:1]})[0, 1])
    prediction = hf.predict((left[:1], right[:1]))
    assert prediction.latent_cov is not None
    assert_close(prediction.latent_cov[0, 1, 1], one, rtol=1e-4, atol=0)
    check_unchanged(model, before)


@pytest.mark.parametrize("settings", [{"params": "last_layer"}, {"method": "sgd", "steps": 3}])
def test_data_that_can_be_read_once_are_refused_where_they_are_needed_twice(settings: dict[str, Any]) -> None:
    """The search for the last layer would take the first batch, and the fit would go on without it."""
    problem = curve()
    hf = HessianFree(problem.model, problem.likelihood, prior_precision=PRIOR, **settings)
    with pytest.raises(DataError, match="reads data more than once, but generator can be read only once"):
        hf.fit(batch for batch in problem.data)
    once = HessianFree(problem.model, problem.likelihood, prior_precision=PRIOR).fit(batch for batch in problem.data)
    assert once.map_report is not None
    assert once.map_report.n_data == 40


@pytest.mark.filterwarnings("ignore:.*runs away")
def test_a_prediction_without_strictness_is_nan_only_where_a_functional_ran_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = nn.Linear(2, 3).double(), normal(12, 2, seed=3)
    hf = HessianFree(model, "classification", strict=False).fit([(x, x.sum(1).gt(0).long())], polish=True)
    whole = hf.predict(x[:4], generator=torch.Generator().manual_seed(0))
    measured = HessianFree._covariances

    def lost(self: HessianFree, sets: Any, *, allow_zero: bool) -> list[torch.Tensor]:
        covariances = measured(self, sets, allow_zero=allow_zero)
        covariances[0][3:6], covariances[0][:, 3:6] = float("nan"), float("nan")  # the second input
        return covariances

    monkeypatch.setattr(HessianFree, "_covariances", lost)
    found = hf.predict(x[:4], generator=torch.Generator().manual_seed(0))
    for name in ("mean", "epistemic", "aleatoric", "total"):
        assert bool(getattr(found, name)[1].isnan().all())
        assert torch.equal(getattr(found, name)[[0, 2, 3]], getattr(whole, name)[[0, 2, 3]])
    assert found.samples is None or bool(found.samples[:, 1].isnan().all())
    assert torch.equal(found.latent_mean, whole.latent_mean)


def test_the_covariance_of_what_did_not_run_away_is_made_positive() -> None:
    matrix = torch.tensor([[1.0, float("nan"), 2.0], [float("nan")] * 3, [2.0, float("nan"), 1.0]], dtype=torch.float64)
    found, cut = _positive(matrix)
    assert float(torch.linalg.eigvalsh(found[[0, 2]][:, [0, 2]]).min()) >= -1e-12
    assert cut == pytest.approx(0.25)
    assert bool(found[1].isnan().all())
    assert bool(found[:, 1].isnan().all())
