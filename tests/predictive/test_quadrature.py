"""Integrals against dense numerical integration, quantiles against brute force."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from aftermap.errors import NumericalError
from aftermap.predictive.latent import normal_points
from aftermap.predictive.quadrature import (
    bernoulli_entropy,
    bernoulli_gaussian,
    poisson_lognormal_log_prob,
    poisson_lognormal_rates,
    poisson_mixture_quantile,
    weighted_quantile,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def dense(function, mean: Tensor, variance: Tensor) -> Tensor:
    """E function(f) for f ~ N(m, v), on a fine grid in both scales."""
    z = torch.linspace(-12, 12, 400_001, dtype=torch.float64)
    f = mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * z
    return torch.trapezoid(function(f) * (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi), z)


@pytest.mark.parametrize("variance", [0.01, 0.7, 3.9, 4.1, 25.0, 400.0])
def test_bernoulli_gaussian_equals_dense_integration(variance: float) -> None:
    mean = f64(-30.0, -3.0, -0.2, 0.0, 1.5, 8.0)
    probability, entropy = bernoulli_gaussian(mean, torch.full_like(mean, variance))
    wanted = torch.full_like(mean, variance)
    assert_close(probability, dense(torch.sigmoid, mean, wanted), rtol=0, atol=1e-10)
    assert_close(entropy, dense(bernoulli_entropy, mean, wanted), rtol=0, atol=1e-10)


def test_bernoulli_gaussian_without_variance_is_the_sigmoid() -> None:
    mean = f64(-1e4, -2.0, 0.0, 0.3, 1e4)
    probability, entropy = bernoulli_gaussian(mean, torch.zeros_like(mean))
    assert_close(probability, mean.sigmoid(), rtol=0, atol=1e-12)
    assert_close(entropy, bernoulli_entropy(mean), rtol=0, atol=1e-11)


def test_bernoulli_gaussian_mirrors() -> None:
    mean, variance = f64(0.3, 2.0, 5.0), f64(0.5, 4.0, 60.0)
    up, down = bernoulli_gaussian(mean, variance), bernoulli_gaussian(-mean, variance)
    assert_close(up[0] + down[0], torch.ones_like(mean), rtol=0, atol=1e-12)
    assert_close(up[1], down[1])


def test_bernoulli_gaussian_gradients() -> None:
    mean = f64(-1.0, 0.4, 3.0, 0.7).requires_grad_()
    variance = f64(0.5, 2.0, 9.0, 30.0).requires_grad_()
    assert torch.autograd.gradcheck(bernoulli_gaussian, (mean, variance))


def test_bernoulli_gaussian_gradient_at_zero_variance() -> None:
    mean, variance = f64(0.8, -2.0), f64(0.0, 0.0).requires_grad_()
    (slope,) = torch.autograd.grad(bernoulli_gaussian(mean, variance)[0].sum(), variance)
    p = mean.sigmoid()
    assert_close(slope, 0.5 * p * (1 - p) * (1 - 2 * p), rtol=1e-5, atol=1e-9)


def test_bernoulli_gaussian_over_several_chunks_keeps_the_shape() -> None:
    mean = torch.randn(7, 5000, 2, generator=seeded(), dtype=torch.float64)
    probability, _ = bernoulli_gaussian(mean, mean.square())
    assert_close(probability[3, 17:19], bernoulli_gaussian(mean[3, 17:19], mean[3, 17:19].square())[0])
    assert probability.shape == mean.shape


def test_normal_points_have_the_moments_of_a_normal() -> None:
    points = normal_points(4096, 3, seeded())
    assert_close(points.mean(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=5e-3)
    assert_close(points.T @ points / 4096, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-2)


def test_normal_points_are_centres_of_cells() -> None:
    share = 2**31 * torch.special.ndtr(normal_points(64, 3, seeded()))
    assert_close(share, 2 * (share / 2).floor() + 1, rtol=0, atol=1e-3)  # Odd numbers: halves of cells of 2⁻³⁰.


def test_normal_points_follow_the_generator() -> None:
    assert_close(normal_points(9, 4, seeded(3)), normal_points(9, 4, seeded(3)), rtol=0, atol=0)
    assert not torch.equal(normal_points(9, 4, seeded(3)), normal_points(9, 4, seeded(4)))


def test_fixed_normal_points_leave_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    first = normal_points(9, 4, fixed=True)
    assert_close(first, normal_points(9, 4, fixed=True), rtol=0, atol=0)
    assert torch.equal(before, torch.get_rng_state())


def test_normal_points_in_very_many_dimensions() -> None:
    points = normal_points(5, 21_300, seeded())
    assert points.shape == (5, 21_300)
    assert_close(points[0], -points[3])


@pytest.mark.parametrize("variance", [0.0, 0.04, 1.0, 6.0])
def test_poisson_lognormal_equals_dense_integration(variance: float) -> None:
    counts, mean = f64(0.0, 1.0, 4.0, 60.0, 900.0), f64(-1.0, 0.5, 2.0, 3.5, 2.0)
    spread = torch.full_like(mean, variance)
    got = poisson_lognormal_log_prob(counts, mean, spread)

    def pmf(log_rate: Tensor) -> Tensor:
        y = counts.unsqueeze(-1)
        return (y * log_rate - log_rate.exp() - torch.lgamma(y + 1)).exp()

    wanted = dense(pmf, mean, spread)
    seen = wanted > 1e-30  # what the grid can resolve
    assert int(seen.sum()) >= 4
    assert_close(got.exp()[seen], wanted[seen], rtol=1e-5, atol=0)
    assert bool(got.isfinite().all())


def test_poisson_lognormal_sums_to_one() -> None:
    counts = torch.arange(3000, dtype=torch.float64)
    log_p = poisson_lognormal_log_prob(counts, torch.full_like(counts, 1.2), torch.full_like(counts, 0.8))
    assert_close(log_p.exp().sum(), torch.tensor(1.0, dtype=torch.float64), rtol=1e-6, atol=0)


def test_poisson_lognormal_gradients() -> None:
    counts, mean, variance = f64(0.0, 3.0, 20.0), f64(0.5, 1.0, 2.0), f64(0.3, 1.0, 2.0)
    function = lambda m, v: poisson_lognormal_log_prob(counts, m, v)  # noqa: E731
    assert torch.autograd.gradcheck(function, (mean.requires_grad_(), variance.requires_grad_()), atol=1e-4)


@pytest.mark.parametrize("level", [0.025, 0.5, 0.8, 0.975])
def test_poisson_mixture_quantile_equals_summing(level: float) -> None:
    rates = torch.tensor([[0.0, 0.3, 5.0], [0.0, 40.0, 5.5], [0.0, 2.0, 300.0], [0.0, 1.0, 6.0]], dtype=torch.float64)
    weights = f64(0.1, 0.2, 0.3, 0.4)
    k = torch.arange(600, dtype=torch.float64)
    pmf = (torch.xlogy(k, rates.unsqueeze(-1)) - rates.unsqueeze(-1) - torch.lgamma(k + 1)).exp()
    cumulative = (weights[:, None, None] * pmf).sum(0).cumsum(-1)
    wanted = (cumulative >= level - 1e-12).to(torch.int8).argmax(-1).double()
    assert_close(poisson_mixture_quantile(rates, weights, level), wanted, rtol=0, atol=0)


def test_poisson_mixture_quantile_refuses_infinite_rates() -> None:
    with pytest.raises(NumericalError, match="a sampled rate is not finite"):
        poisson_mixture_quantile(torch.tensor([[1.0], [torch.inf]]), None, 0.5)


def test_poisson_lognormal_rates_have_the_median_and_mean() -> None:
    rates = poisson_lognormal_rates(f64(0.3, 1.0), f64(0.2, 0.0), points=501)
    assert_close(rates[250], f64(0.3, 1.0).exp())
    assert_close(rates.mean(0), f64(0.4, 1.0).exp(), rtol=2e-3, atol=0)


def test_weighted_quantile() -> None:
    samples = torch.tensor([[3.0, 30.0], [1.0, 10.0], [2.0, 20.0]], dtype=torch.float64)
    assert_close(weighted_quantile(samples, f64(0.1, 0.2, 0.7), 0.25), f64(2.0, 20.0))
    assert_close(weighted_quantile(samples, f64(0.8, 0.1, 0.1), 0.25), f64(3.0, 30.0))
    assert_close(weighted_quantile(samples, None, 1 / 3), f64(1.0, 10.0))


def test_equal_weights_are_no_weights() -> None:
    samples = torch.randn(11, 3, 2, generator=seeded(), dtype=torch.float64)
    for level in (0.1, 0.5, 0.9):
        equal = weighted_quantile(samples, torch.full((11,), 1 / 11, dtype=torch.float64), level)
        assert_close(weighted_quantile(samples, None, level), equal)


def test_a_level_that_is_reached_exactly_gives_that_sample() -> None:
    for count in range(2, 60):
        samples = torch.arange(count, dtype=torch.float64).unsqueeze(-1)
        for k in range(1, count):
            assert weighted_quantile(samples, None, k / count).item() == k - 1
