"""log |P| − log |P₀| is differentiable in the prior and the scale, for every structure and form of prior; variances of outputs are, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from aftermap.batches import Batch
from aftermap.curvature import fit_curvature
from aftermap.curvature.passes.plan import CheckedPlan
from aftermap.posteriors import GaussianPosterior
from aftermap.predictive import latent_gaussians
from tests.posteriors.cases import CASES, made, mean_of, normal, posterior_of

FEW = ["kron", "kron grouped expand", "kron embedding", "kron mixed with full", "ekfac", "kfra", "diagonal odd"]
ALL = [*FEW, "full", "full odd", "low_rank", "low_rank odd"]
PER_ENTRY = ["diagonal odd", "full", "full odd", "low_rank", "low_rank odd"]


def positive(*shape: int, seed: int) -> Tensor:
    return (0.4 + normal(*shape, seed=seed).square()).requires_grad_()


def scale_of(value: float = 1.3) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def built(case: str, damping: str) -> Callable[[Tensor, Tensor], Tensor]:
    model, factors = made(case)

    def ratio(prior: Tensor, scale: Tensor) -> Tensor:
        posterior = GaussianPosterior.from_factors(factors, mean_of(model), prior, scale=scale, damping=damping)
        return posterior.log_det_ratio()

    return ratio


def changed(case: str, damping: str, start: float) -> Callable[[Tensor, Tensor], Tensor]:
    posterior = posterior_of(case, start, damping=damping)
    return lambda prior, scale: posterior.with_prior(prior, scale=scale).log_det_ratio()


@pytest.mark.parametrize("case", ALL)
def test_in_one_precision_and_the_scale(case: str) -> None:
    for ratio in (built(case, "exact"), changed(case, "exact", 0.7)):
        assert torch.autograd.gradcheck(ratio, (positive(seed=1), scale_of()))


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("case", ALL)
def test_in_a_precision_per_layer(case: str, equal: bool) -> None:
    count = len(posterior_of(case).layers)
    # Equal numbers are the trap: the prior looks like one number, but each layer has its own gradient.
    prior = torch.full((count,), 0.7, dtype=torch.float64, requires_grad=True) if equal else positive(count, seed=2)
    for ratio in (built(case, "exact"), changed(case, "exact", 0.7), changed(case, "exact", 1.9)):
        assert torch.autograd.gradcheck(ratio, (prior, scale_of()))


@pytest.mark.parametrize("damping", ["factored", "pi"])
@pytest.mark.parametrize("case", ["kron", "kron grouped reduce", "kron embedding", "kron dead", "kron mixed with full"])
def test_under_factored_damping(case: str, damping: str) -> None:
    count = len(posterior_of(case).layers)
    for ratio in (built(case, damping), changed(case, damping, 0.7)):
        assert torch.autograd.gradcheck(ratio, (positive(count, seed=2), scale_of()))


@pytest.mark.parametrize("case", PER_ENTRY)
def test_in_a_precision_per_entry(case: str) -> None:
    model, factors = made(case)
    names = list(factors.names)
    leaves = tuple(positive(*factors.shapes[n], seed=i) for i, n in enumerate(names))
    start = posterior_of(case, 0.7)

    def ratio(scale: Tensor, *priors: Tensor) -> Tensor:
        given = dict(zip(names, priors, strict=True))
        fresh = GaussianPosterior.from_factors(factors, mean_of(model), given, scale=scale)
        return fresh.log_det_ratio() + 3 * start.with_prior(given, scale=scale).log_det_ratio()

    assert torch.autograd.gradcheck(ratio, (scale_of(), *leaves))


@pytest.mark.parametrize("case", CASES)
def test_mackay_identity(case: str) -> None:
    """∂/∂log τ of ½ log |P|/|P₀| is −γ/2 per layer, and ∂/∂log s is γ/2 in all (docs/mathematics/tuning.md)."""
    count = len(posterior_of(case).layers)
    logs = torch.linspace(-1.0, 1.0, count, dtype=torch.float64).requires_grad_()
    log_scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    posterior = posterior_of(case, 0.7).with_prior(logs.exp(), scale=log_scale.exp())
    by_log, by_scale = torch.autograd.grad(0.5 * posterior.log_det_ratio(), (logs, log_scale))
    gamma = torch.tensor(list(posterior.effective_parameters().values()), dtype=torch.float64)
    torch.testing.assert_close(by_log, -gamma / 2, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(by_scale, gamma.sum() / 2, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("case", ["full", "low_rank", "kron", "diagonal"])
def test_a_weak_curvature_is_not_lost_to_rounding(case: str) -> None:
    weak = posterior_of(case, 1.0, scale=1e-18).log_det_ratio()
    torch.testing.assert_close(
        weak, torch.tensor(1e-18 * made(case)[1].trace(), dtype=torch.float64), rtol=1e-9, atol=0
    )


def test_samples_and_variances_carry_no_gradient() -> None:
    prior = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    for case in ("kron", "diagonal", "full", "low_rank"):
        posterior = posterior_of(case, prior, scale=scale_of())
        drawn, variance = posterior.sample(2), posterior.marginal_variance()
        assert not any(v.requires_grad for v in [*drawn.values(), *variance.values()])


@pytest.mark.parametrize("structure", ["kron", "ekfac", "full"])
def test_the_variance_of_outputs_is_differentiable_in_the_prior_where_a_layer_sees_nothing_but_zeros(
    structure: str,
) -> None:
    model = nn.Sequential(nn.Linear(3, 6, bias=False), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    model = model.double().eval()
    data = [(normal(20, 3, seed=1), torch.arange(20) % 2)]
    factors = fit_curvature(model, data, "classification", structure=structure, progress=False)
    posterior = GaussianPosterior.from_factors(factors, mean_of(model), 1.0)
    batch = Batch(torch.stack([torch.zeros(3, dtype=torch.float64), data[0][0][0]]), None, None, 2)
    plan = CheckedPlan(model, posterior.names, batch)

    def covariance(prior: Tensor) -> Tensor:
        found = latent_gaussians(plan, posterior.with_prior(prior), batch)[0].cov
        assert found is not None
        return found

    assert torch.autograd.gradcheck(covariance, (scale_of(),))
