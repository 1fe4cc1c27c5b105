"""Samples: their covariance, their generator; exact Hessians as precisions."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from aftermap.curvature import Factors, fit_curvature
from aftermap.errors import NumericalError, NumericalWarning
from aftermap.posteriors import GaussianPosterior
from aftermap.testing import check_posterior
from tests.posteriors.cases import build, generator, mean_of, normal, posterior_of

STRUCTURES = ["kron", "kron grouped expand", "kron embedding", "ekfac", "diagonal", "full", "low_rank"]


def flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([v.flatten(1) for v in values.values()], 1)


@pytest.mark.parametrize("case", STRUCTURES)
def test_covariance_of_many_samples(case: str) -> None:
    posterior = posterior_of(case, 0.7, scale=3.0)
    drawn = torch.cat([flat(posterior.sample(20_000, generator(seed))) for seed in range(5)])
    covariance = torch.linalg.inv(posterior.to_dense())
    mean = torch.cat([v.flatten() for v in posterior.mean.values()])
    found = torch.cov(drawn.T)
    error = torch.linalg.matrix_norm(found - covariance) / torch.linalg.matrix_norm(covariance)
    # Of 1e5 samples the expected relative error is about √(P/1e5): 2 % for P = 40.
    assert float(error) < 0.02 * max(1.0, (posterior.n_params / 40) ** 0.5)
    variance = found.diagonal() / covariance.diagonal() - 1
    assert float(variance.abs().max()) < 0.02
    assert float(((drawn.mean(0) - mean) / covariance.diagonal().sqrt()).abs().max()) < 0.02


@pytest.mark.parametrize("case", STRUCTURES)
def test_the_generator_decides_and_the_global_one_is_left_alone(case: str) -> None:
    posterior = posterior_of(case)
    state = torch.get_rng_state()
    one, same, other = (posterior.sample(3, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    for name in posterior.names:
        torch.testing.assert_close(one[name], same[name], rtol=0, atol=0)
    assert not torch.equal(flat(one), flat(other))


def test_the_mean_is_a_copy() -> None:
    model, data = build("mlp")
    factors = fit_curvature(model, data, "classification", progress=False)
    posterior = GaussianPosterior.from_factors(factors, dict(model.named_parameters()))
    before = {n: v.clone() for n, v in posterior.mean.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    for name, value in before.items():
        torch.testing.assert_close(posterior.mean[name], value, rtol=0, atol=0)
        assert not posterior.mean[name].requires_grad


# The exact Hessian.


def hessian_factors(targets_noise: float) -> tuple[nn.Module, Factors]:
    model, data = build("mlp")
    pairs = []
    for x, _ in data:
        outputs = model(x).detach()
        pairs.append((x, outputs + targets_noise * normal(*outputs.shape, seed=9)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        factors = fit_curvature(model, pairs, "regression", structure="hessian", progress=False)
    return model, factors


def test_a_positive_definite_hessian() -> None:
    model, factors = hessian_factors(1e-3)  # residuals almost vanish: Hessian ≈ GGN
    posterior = GaussianPosterior.from_factors(factors, mean_of(model), 0.7)
    assert factors.blocks[0].kind == "hessian"
    check_posterior(posterior, generator())


def test_an_indefinite_hessian_is_no_precision() -> None:
    model, factors = hessian_factors(5.0)
    smallest = float(torch.linalg.eigvalsh(factors.to_dense()).min())
    assert smallest < -0.1
    with pytest.raises(NumericalError, match=r"not positive definite \(smallest eigenvalue relative to the prior: -"):
        GaussianPosterior.from_factors(factors, mean_of(model), -0.5 * smallest)
    GaussianPosterior.from_factors(factors, mean_of(model), -1.5 * smallest)


def test_an_indefinite_hessian_is_seen_after_a_change_of_prior_or_scale() -> None:
    model, factors = hessian_factors(5.0)
    smallest = -float(torch.linalg.eigvalsh(factors.to_dense()).min())
    posterior = GaussianPosterior.from_factors(factors, mean_of(model), 2 * smallest)
    assert bool(torch.isfinite(posterior.log_det_ratio()))
    for change in ({"precision": 0.9 * smallest}, {"scale": 2.1}, {"precision": [0.5 * smallest, 0.1 * smallest]}):
        with pytest.raises(NumericalError, match="Train longer, use a larger prior precision, or structure='full'"):
            posterior.with_prior(**change)
