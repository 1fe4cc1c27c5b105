"""Evidence: against dense determinants, its gradients, the fixed point and what tuning reaches."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from aftermap.errors import InputError
from aftermap.laplace import Laplace, evidence
from aftermap.laplace.evidence import EvidenceResult, _secant, log_evidence, maximise_evidence
from aftermap.likelihoods import Gaussian
from tests.laplace.problems import classes, gaussian_nll, generator, mlp, normal, regression, trained

STRUCTURES = ["kron", "ekfac", "kfra", "diagonal", "full", "low_rank"]


@cache
def _classifier() -> nn.Module:
    return trained(mlp(), classes(), nn.CrossEntropyLoss(reduction="sum"))


@cache
def _regressor(noise: float, outputs: int) -> nn.Module:
    return trained(mlp(1, 6, outputs), regression(noise=noise, outputs=outputs), gaussian_nll(noise))


def classifier(structure: str, **options: object) -> Laplace:
    return Laplace(_classifier(), "classification", structure=structure, rank=9, **options).fit(
        classes(), generator=generator(), progress=False
    )


def regressor(structure: str, noise: float = 0.3, outputs: int = 1, **options: object) -> Laplace:
    data = regression(noise=noise, outputs=outputs)
    return Laplace(_regressor(noise, outputs), Gaussian(0.5), structure=structure, rank=9, **options).fit(
        data, generator=generator(), progress=False
    )


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("power", [1.0, 2.5])
def test_against_dense_determinants(structure: str, power: float) -> None:
    laplace = classifier(structure, prior_precision=[0.7, 1.9], data_scale=power)
    x, y = (torch.cat(t) for t in zip(*classes(), strict=True))
    likelihood = -torch.nn.functional.cross_entropy(laplace.model(x), y, reduction="sum").detach()
    sizes = (20, 24)
    prior = torch.cat([torch.full((n,), t, dtype=torch.float64) for n, t in zip(sizes, (0.7, 1.9), strict=True)])
    energy = 0.5 * (prior * flat(laplace.model).square()).sum()
    volume = 0.5 * (torch.linalg.slogdet(laplace.posterior.to_dense())[1] - prior.log().sum())
    torch.testing.assert_close(laplace.log_evidence(), power * likelihood - energy - volume, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_regression_against_dense_determinants(structure: str) -> None:
    laplace = regressor(structure, outputs=2, prior_precision=1.3)
    x, y = (torch.cat(t) for t in zip(*regression(outputs=2), strict=True))
    likelihood = -gaussian_nll(0.5)(laplace.model(x), y).detach()
    count = len(flat(laplace.model))
    energy = 0.5 * 1.3 * flat(laplace.model).square().sum()
    volume = 0.5 * (torch.linalg.slogdet(laplace.posterior.to_dense())[1] - count * math.log(1.3))
    torch.testing.assert_close(laplace.log_evidence(), likelihood - energy - volume, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("structure", "damping"),
    [*((s, "exact") for s in STRUCTURES), ("kron", "factored"), ("kron", "pi"), ("kfra", "factored")],
)
def test_gradients_in_prior_and_noise(structure: str, damping: str) -> None:
    laplace = regressor(structure, damping=damping)

    def value(logs: Tensor) -> Tensor:
        layers = laplace.posterior.layers.values()
        precision = {n: logs[i].exp() for i, names in enumerate(layers) for n in names}
        at = replace(
            laplace.hyperparameters,
            prior=laplace.posterior.prior.with_precision(precision),
            noise=logs[-1].exp(),
            data_scale=1.7,
        )
        posterior = at.applied_to(laplace.posterior, laplace.factors.curvature)
        return log_evidence(posterior, laplace.factors, laplace.base_likelihood, at)

    logs = torch.tensor([0.3, -0.4, -0.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(value, (logs,), eps=1e-5, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("method", ["evidence", "lbfgs"])
def test_tuning_improves_the_evidence(structure: str, method: str) -> None:
    for laplace in (classifier(structure), regressor(structure)):
        before = float(laplace.log_evidence())
        assert laplace.tune(method=method) is laplace
        assert float(laplace.log_evidence()) > before
        assert float(laplace.log_evidence()) == pytest.approx(max(laplace.tuning.history), abs=1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_fixed_point_holds_for_every_layer(structure: str) -> None:
    laplace = classifier(structure).tune(method="evidence")
    assert laplace.tuning.converged
    gammas = laplace.posterior.effective_parameters()
    for layer, names in laplace.posterior.layers.items():
        squares = laplace.posterior.prior.squared_distance(laplace.posterior.mean, names)
        assert float(laplace.prior_precision[layer]) * squares == pytest.approx(gammas[layer], rel=1e-3)


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full"])
@pytest.mark.parametrize("power", [1.0, 0.4, 3.0])
def test_the_fixed_point_of_the_noise(structure: str, power: float) -> None:
    laplace = regressor(structure, data_scale=power).tune(method="evidence")
    gamma = sum(laplace.posterior.effective_parameters().values())
    x, y = (torch.cat(t) for t in zip(*regression(), strict=True))
    squares = float((y - laplace.model(x).detach()).square().sum())
    noise = float(laplace.hyperparameters.noise)
    assert noise**2 == pytest.approx(squares / (len(y) - gamma / power), rel=1e-3)


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full", "low_rank"])
@pytest.mark.parametrize("power", [1.0, 3.0])
def test_lbfgs_agrees_with_mackay(structure: str, power: float) -> None:
    one = regressor(structure, data_scale=power).tune(method="evidence")
    other = regressor(structure, data_scale=power).tune(method="lbfgs")
    assert float(one.log_evidence()) == pytest.approx(float(other.log_evidence()), abs=1e-3)
    for layer, value in one.prior_precision.items():
        assert float(value) == pytest.approx(float(other.prior_precision[layer]), rel=0.02)
    assert float(one.hyperparameters.noise) == pytest.approx(float(other.hyperparameters.noise), rel=0.01)


def test_noise_is_recovered_from_simulated_data() -> None:
    data = regression(count=400, noise=0.25)
    model = trained(mlp(1, 8, 1), data, gaussian_nll(0.25), decay=0.3)
    laplace = Laplace(model, "regression", structure="full").fit(data, progress=False).tune(method="evidence")
    assert float(laplace.hyperparameters.noise) == pytest.approx(0.25, rel=0.1)
    found = laplace.predict(data[0][0])
    torch.testing.assert_close(found.aleatoric, torch.full_like(found.mean, float(laplace.hyperparameters.noise) ** 2))


def test_noise_can_be_left_alone_and_one_precision_for_all() -> None:
    laplace = regressor("kron").tune(method="evidence", noise=False, per_layer=False)
    assert float(laplace.hyperparameters.noise) == 0.5
    assert len({float(v) for v in laplace.prior_precision.values()}) == 1
    gamma = sum(laplace.posterior.effective_parameters().values())
    squares = float(flat(laplace.model).square().sum())
    assert float(laplace.prior_precision["0"]) * squares == pytest.approx(gamma, rel=1e-3)


def test_weights_are_copies_of_a_datum() -> None:
    (x, y), _ = regression()
    model = _regressor(0.3, 1)
    weighted = Laplace(model, "regression").fit([(x, y, torch.full((20,), 3.0))], progress=False)
    copied = Laplace(model, "regression").fit([(x, y)] * 3, progress=False)
    torch.testing.assert_close(weighted.log_evidence(), copied.log_evidence())
    for laplace in (weighted, copied):
        laplace.tune(method="evidence")
    assert float(weighted.hyperparameters.noise) == pytest.approx(float(copied.hyperparameters.noise), rel=1e-6)


def test_a_barely_determined_layer_converges_quickly() -> None:
    """The plain fixed point crawls where γ is far below the number of weights; secant steps do not."""
    model = mlp(3, 200, 4)
    laplace = Laplace(model, "classification", prior_precision=1e-3).fit(classes(), progress=False)
    laplace.tune(method="evidence")
    assert laplace.tuning.converged
    assert len(laplace.tuning.history) < 15
    gammas = laplace.posterior.effective_parameters()
    for layer, names in laplace.posterior.layers.items():
        squares = laplace.posterior.prior.squared_distance(laplace.posterior.mean, names)
        assert float(laplace.prior_precision[layer]) * squares == pytest.approx(gammas[layer], rel=1e-3)


@pytest.mark.parametrize("slope", [0.05, 0.5, 1.0, 1.7])
def test_a_secant_meets_the_zero_of_a_line(slope: float) -> None:
    """From two points of a step that falls linearly in the logarithm; where it does not fall, the step is as long as allowed."""
    zero = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    before, now = zero + 0.2, zero - torch.tensor([0.1, 0.15, -0.1], dtype=torch.float64)
    there = _secant(now, slope * (zero - now), before, slope * (zero - before))
    torch.testing.assert_close(now + there, zero)
    flat = slope * torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    longest = math.log(100)
    torch.testing.assert_close(_secant(now, flat, before, flat), torch.tensor([longest, -longest, 0.0]).double())


def test_factored_damping_is_tuned_by_gradients() -> None:
    laplace = classifier("kron", damping="factored")
    before = float(laplace.log_evidence())
    laplace.tune(method="evidence")
    assert float(laplace.log_evidence()) > before
    with pytest.raises(InputError, match="fixed point holds for damping='exact'"):
        maximise_evidence(
            laplace.posterior, laplace.factors, laplace.base_likelihood, laplace.hyperparameters, method="mackay"
        )


def test_a_frozen_layer_says_nothing_about_its_prior() -> None:
    model = mlp()
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.zero_()
    laplace = Laplace(model, "classification").fit(classes(), progress=False).tune(method="evidence")
    assert float(laplace.prior_precision["0"]) == 1.0
    assert math.isfinite(float(laplace.log_evidence()))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_effective_parameters_lie_between_nothing_and_everything(structure: str) -> None:
    laplace = classifier(structure)
    for layer, gamma in laplace.posterior.effective_parameters().items():
        size = sum(laplace.posterior.mean[n].numel() for n in laplace.posterior.layers[layer])
        assert 0 <= gamma <= size


def test_diagonal_over_penalises() -> None:
    assert float(classifier("diagonal").log_evidence()) < float(classifier("full").log_evidence())


def test_methods_are_named() -> None:
    laplace = classifier("kron")
    known = "'validation', 'self_consistent', 'leave_one_out', 'evidence', 'lbfgs', 'dimension', 'grid'"
    with pytest.raises(InputError, match=f"method='adam' is not known; allowed are {known}"):
        laplace.tune(method="adam")
    with pytest.raises(InputError, match="method='adam' is not known; allowed are 'mackay', 'lbfgs'"):
        maximise_evidence(
            laplace.posterior, laplace.factors, laplace.base_likelihood, laplace.hyperparameters, method="adam"
        )


def test_pixel_regression_counts_every_output() -> None:
    net = nn.Conv2d(2, 3, 2).double().eval()
    x, truth = normal(9, 2, 3, 4, seed=1), nn.Conv2d(2, 3, 2).double()
    class_last = nn.Sequential(net, _Last())
    with torch.no_grad():
        y = _Last()(truth(x)) + 0.2 * normal(9, 2, 3, 3, seed=2)
        features = nn.functional.unfold(x, 2).transpose(1, 2)  # [9, 6, 8]
        rows = torch.cat([features, torch.ones(9, 6, 1, dtype=torch.float64)], 2).flatten(0, 1)
        solution = torch.linalg.lstsq(rows, y.reshape(54, 3)).solution
        net.weight.copy_(solution[:8].T.reshape(3, 2, 2, 2))
        net.bias.copy_(solution[8])
    laplace = Laplace(class_last, "regression", structure="full").fit([(x, y)], progress=False)
    laplace.tune(method="evidence")
    # 162 numbers, 27 parameters: the unbiased estimate, up to the prior's small share.
    squares = float((y - class_last(x).detach()).square().sum())
    gamma = sum(laplace.posterior.effective_parameters().values())
    assert float(laplace.hyperparameters.noise) ** 2 == pytest.approx(squares / (162 - gamma), rel=1e-3)
    assert gamma == pytest.approx(27, abs=2)


class _Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


@pytest.mark.parametrize("start", [1e-3, 0.05, 30.0])
def test_the_noise_is_found_from_any_start(start: float) -> None:
    """Far below the residuals, Kronecker factors count more determined parameters than there are data."""
    seeded = torch.Generator().manual_seed(4)
    x = torch.randn(12, 3, generator=seeded, dtype=torch.float64)
    y = torch.randn(12, 2, generator=seeded, dtype=torch.float64)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 2)).double()
    found = Laplace(net, Gaussian(noise=start)).fit([(x, y)], progress=False).tune(method="evidence")
    expected = Laplace(net, Gaussian(noise=2.0)).fit([(x, y)], progress=False).tune(method="evidence")
    torch.testing.assert_close(found.log_evidence(), expected.log_evidence(), rtol=1e-5, atol=1e-4)


def test_a_result_is_told_in_words() -> None:
    found = EvidenceResult({"0": 2.0, "2": 0.51234}, 0.25, [-80.0, -57.04], converged=True)
    assert str(found) == "log evidence -57.0, at its maximum; prior precision 2 (0), 0.512 (2); noise 0.25"
    crawling = EvidenceResult({"head": 1.0}, 3.0, [-9.0], noise_bounded=True)
    assert (
        str(crawling) == "log evidence -9.0, not at its maximum yet; prior precision 1 (head); noise 3, its upper bound"
    )
    assert str(EvidenceResult({"head": 1.0}, 1.0, [-9.0], converged=True)).endswith("prior precision 1 (head)")


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_noise_of_several_blocks_leaves_a_tenth_of_the_data_to_it(outputs: int) -> None:
    laplace = regressor("kron", outputs=outputs)
    fitted = laplace.fitted
    x, y = (torch.cat(t) for t in zip(*regression(noise=0.3, outputs=outputs), strict=True))
    squares = (laplace.model(x).detach() - y).square().sum()
    groups = {"all": list(fitted.posterior.names)}
    objective = evidence._Objective(
        fitted.posterior, fitted.factors, laplace.base_likelihood, fitted.hyperparameters, groups, True, 1e-3
    )
    upper = objective.upper.exp()
    assert float(upper[-1]) == pytest.approx(float(squares / (0.1 * y.numel())) ** 0.5)
    assert float(upper[0]) == pytest.approx(1e12)
    ends = torch.tensor([99.0, 99.0], dtype=torch.float64)
    torch.testing.assert_close(objective.inside(ends).exp(), upper)
    torch.testing.assert_close(objective.inside(-ends).exp(), torch.full_like(upper, 1e-8))


@pytest.mark.parametrize("curvature", ["exact", "empirical"])
@pytest.mark.parametrize("per_layer", [True, False])
@pytest.mark.parametrize("structure", ["kron", "diagonal", "full"])
def test_slopes_by_determined_parameters_are_those_of_the_evidence(
    structure: str, per_layer: bool, curvature: str
) -> None:
    """Away from the maximum, for data that count 1.7 times at a temperature, and two outputs."""
    laplace = regressor(structure, outputs=2, curvature=curvature, data_scale=1.7, temperature=0.8, prior_mean=0.1)
    fitted = laplace.fitted
    posterior = fitted.posterior
    groups = {k: list(v) for k, v in posterior.layers.items()} if per_layer else {"all": list(posterior.names)}
    objective = evidence._Objective(
        posterior, fitted.factors, laplace.base_likelihood, fitted.hyperparameters, groups, True, 1e-3
    )
    for logs in (torch.tensor([0.4, -1.2, -0.5]), torch.tensor([2.0, 1.0, 0.3])):
        logs = (logs if per_layer else logs[1:]).double().requires_grad_()
        at, value = objective.evaluate(logs)
        (gradient,) = torch.autograd.grad(value, logs)
        found = objective.slopes(at, logs.detach())
        torch.testing.assert_close(found.gradient, gradient, rtol=1e-6, atol=1e-8)
        assert torch.equal(found.step.sign(), gradient.sign())
        # MacKay's step goes from λ to γ / ‖θ − μ₀‖².
        gammas = at.effective_parameters()
        for place, names in enumerate(groups.values()):
            gamma = sum(g for layer, g in gammas.items() if posterior.layers[layer][0] in names)
            target = gamma / posterior.prior.squared_distance(posterior.mean, names)
            assert float((logs.detach()[place] + found.step[place]).exp()) == pytest.approx(target, rel=1e-6)
            # A derivative is as large as its terms where one of them is far below the other.
            share = float(found.gradient[place].abs() / found.size[place])
            terms = sorted([gamma, float(logs.detach()[place].exp()) * gamma / target])
            assert share == pytest.approx(1 - terms[0] / terms[1], rel=1e-6)


def test_slopes_that_point_out_of_their_range_do_not_count() -> None:
    low, high = evidence._RANGE
    upper = torch.tensor([high, 1.0, high, 1.0, high], dtype=torch.float64)
    logs = torch.tensor([low, 1.0, low, 1.0, 0.0], dtype=torch.float64)
    slopes = torch.tensor([-2.0, 3.0, 4.0, -5.0, 6.0], dtype=torch.float64)
    found = evidence._Slopes(slopes, 0.1 * slopes, torch.full_like(slopes, 10.0)).within(logs, upper)
    assert found.gradient.tolist() == [0.0, 0.0, 4.0, -5.0, 6.0]
    torch.testing.assert_close(found.step, 0.1 * found.gradient)
    assert found.are_flat(0.6)
    assert not found.are_flat(0.59)
