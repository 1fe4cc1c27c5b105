"""Bayesian linear regression: every number in closed form, exactly, for the structures that are exact there."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from aftermap.curvature import Factors, fit_curvature
from aftermap.likelihoods import Gaussian
from aftermap.posteriors import GaussianPosterior
from tests.posteriors.cases import generator, mean_of, normal

NOISE, PRIOR, N, D = 0.6, 1.4, 13, 4
EXACT = ["kron", "ekfac", "full", "low_rank", "hessian"]


def design() -> tuple[Tensor, Tensor]:
    """Inputs with a column of ones [N, D + 1] and targets [N]: a plane with noise.

    Without a signal the evidence wants the weights to be zero, and the prior precision grows without bound.
    """
    features = torch.cat([normal(N, D, seed=1), torch.ones(N, 1, dtype=torch.float64)], 1)
    return features, features @ normal(D + 1, seed=3) + NOISE * normal(N, seed=2)


def closed_form() -> tuple[Tensor, Tensor]:
    """Mean [D + 1] and precision of the posterior."""
    features, y = design()
    precision = features.T @ features / NOISE**2 + PRIOR * torch.eye(D + 1, dtype=torch.float64)
    return torch.linalg.solve(precision, features.T @ y / NOISE**2), precision


def fitted(structure: str, *, unit_noise: bool = False, **options: object) -> tuple[GaussianPosterior, Factors]:
    features, y = design()
    net = nn.Linear(D, 1).double()
    mean, _ = closed_form()
    with torch.no_grad():
        net.weight.copy_(mean[None, :D])
        net.bias.copy_(mean[D:])
    likelihood = Gaussian(1.0 if unit_noise else NOISE)
    data = [(features[:5, :D], y[:5, None]), (features[5:, :D], y[5:, None])]
    factors = fit_curvature(net, data, likelihood, structure=structure, generator=generator(), progress=False)
    scale = 1 / NOISE**2 if unit_noise else 1.0
    return GaussianPosterior.from_factors(factors, mean_of(net), PRIOR, scale=scale, **options), factors


@pytest.mark.parametrize("unit_noise", [False, True])
@pytest.mark.parametrize("structure", EXACT)
def test_precision_and_covariance(structure: str, unit_noise: bool) -> None:
    posterior, _ = fitted(structure, unit_noise=unit_noise)
    _, precision = closed_form()
    torch.testing.assert_close(posterior.to_dense(), precision, rtol=1e-9, atol=1e-9)
    eye = torch.eye(D + 1, dtype=torch.float64)
    columns = posterior.covariance_mv({"weight": eye[:, None, :D], "bias": eye[:, D:]})
    covariance = torch.cat([columns["weight"].flatten(1), columns["bias"]], 1)
    torch.testing.assert_close(covariance, torch.linalg.inv(precision), rtol=1e-9, atol=1e-10)


def test_the_diagonal_posterior_ignores_correlations() -> None:
    posterior, _ = fitted("diagonal")
    _, precision = closed_form()
    variance = posterior.marginal_variance()
    found = torch.cat([variance["weight"].flatten(), variance["bias"]])
    torch.testing.assert_close(found, 1 / precision.diagonal())
    assert bool((found < torch.linalg.inv(precision).diagonal()).all())


@pytest.mark.parametrize("structure", EXACT)
def test_evidence(structure: str) -> None:
    posterior, factors = fitted(structure)
    features, y = design()
    marginal = NOISE**2 * torch.eye(N, dtype=torch.float64) + features @ features.T / PRIOR
    truth = torch.distributions.MultivariateNormal(torch.zeros(N, dtype=torch.float64), marginal).log_prob(y)
    evidence = -factors.loss - posterior.prior.energy(posterior.mean) - 0.5 * posterior.log_det_ratio()
    torch.testing.assert_close(evidence, truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", EXACT)
def test_predictive_variance_and_effective_parameters(structure: str) -> None:
    posterior, _ = fitted(structure)
    features, _ = design()
    _, precision = closed_form()
    covariance = torch.linalg.inv(precision)
    values = {"weight": features[:, None, :D], "bias": features[:, D:]}
    product = posterior.covariance_mv(values)
    variance = sum((values[n] * product[n]).flatten(1).sum(1) for n in values)
    torch.testing.assert_close(variance, (features @ covariance * features).sum(1), rtol=1e-9, atol=1e-10)
    gamma = sum(posterior.effective_parameters().values())
    # The trace of the hat matrix: Σ_n Λ_n V_n = γ for the exact posterior.
    assert gamma == pytest.approx(float(variance.sum()) / NOISE**2, rel=1e-9)


def test_mackay_fixed_point() -> None:
    """At a maximum of the evidence in the prior precision, τ ‖θ‖² = γ."""
    features, y = design()
    tau = previous = torch.tensor(PRIOR, dtype=torch.float64)
    for _ in range(200):
        previous = tau
        precision = features.T @ features / NOISE**2 + tau * torch.eye(D + 1, dtype=torch.float64)
        mean = torch.linalg.solve(precision, features.T @ y / NOISE**2)
        tau = (D + 1 - tau * torch.linalg.inv(precision).trace()) / mean.square().sum()
    torch.testing.assert_close(tau, previous, rtol=1e-12, atol=0)  # a fixed point, and not on the way to infinity
    _, factors = fitted("kron")
    weights = {"weight": mean[None, :D], "bias": mean[D:]}
    posterior = GaussianPosterior.from_factors(factors, weights, float(tau))
    gamma = sum(posterior.effective_parameters().values())
    assert gamma == pytest.approx(float(tau) * posterior.prior.squared_distance(weights, posterior.names), rel=1e-9)


def test_prior_mean_moves_the_energy_only() -> None:
    posterior, factors = fitted("kron")
    moved = GaussianPosterior.from_factors(factors, posterior.mean, PRIOR, prior_mean=posterior.mean)
    torch.testing.assert_close(moved.to_dense(), posterior.to_dense(), rtol=0, atol=0)
    assert float(moved.prior.energy(posterior.mean)) == 0.0
    assert float(posterior.prior.energy(posterior.mean)) > 0.0


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_several_outputs_are_independent_copies(structure: str) -> None:
    features, _ = design()
    net, targets = nn.Linear(D, 3).double(), normal(N, 3, seed=4)
    factors = fit_curvature(net, [(features[:, :D], targets)], Gaussian(NOISE), structure=structure, progress=False)
    posterior = GaussianPosterior.from_factors(factors, mean_of(net), PRIOR)
    _, precision = closed_form()
    log_det = 3 * (torch.linalg.slogdet(precision)[1] - (D + 1) * math.log(PRIOR))
    torch.testing.assert_close(posterior.log_det_ratio(), log_det, rtol=1e-9, atol=1e-9)
    variance = posterior.marginal_variance()["weight"]
    torch.testing.assert_close(variance, torch.linalg.inv(precision).diagonal()[:D].expand(3, D), rtol=1e-9, atol=1e-10)


def test_occam_data_twice_is_a_fit_on_both() -> None:
    posterior, factors = fitted("kron")
    twice = GaussianPosterior.from_factors(factors + factors, posterior.mean, PRIOR)
    torch.testing.assert_close(twice.to_dense(), posterior.with_prior(scale=2.0).to_dense(), rtol=1e-12, atol=1e-12)
