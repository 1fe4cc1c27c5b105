from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn.metrics import root_mean_squared_error
from torch.testing import assert_close

from aftermap import metrics
from aftermap.errors import DataError, ShapeError

GENERATOR = torch.Generator().manual_seed(0)
MEAN = torch.randn(23, 3, generator=GENERATOR, dtype=torch.float64)
VARIANCE = 0.2 + torch.rand(23, 3, generator=GENERATOR, dtype=torch.float64)
TARGETS = MEAN + VARIANCE.sqrt() * torch.randn(23, 3, generator=GENERATOR, dtype=torch.float64)
SAMPLES = torch.randn(7, 23, 3, generator=GENERATOR, dtype=torch.float64)


def test_rmse_against_scikit_learn() -> None:
    assert_close(metrics.rmse(MEAN[:, 0], TARGETS[:, 0]), float(root_mean_squared_error(TARGETS[:, 0], MEAN[:, 0])))
    assert_close(metrics.rmse(MEAN, TARGETS), (MEAN - TARGETS).square().mean().sqrt().item())


def test_gaussian_nll_sums_outputs_and_averages_examples() -> None:
    normal = torch.distributions.Normal(MEAN, VARIANCE.sqrt())
    assert_close(metrics.gaussian_nll(MEAN, VARIANCE, TARGETS), -normal.log_prob(TARGETS).sum(-1).mean().item())
    single = -normal.log_prob(TARGETS)[:, 0].mean().item()
    assert_close(metrics.gaussian_nll(MEAN[:, 0], VARIANCE[:, 0], TARGETS[:, 0]), single)
    constant = metrics.gaussian_nll(MEAN, torch.full_like(MEAN, 0.7), TARGETS)
    assert_close(metrics.gaussian_nll(MEAN, 0.7, TARGETS), constant)


def test_gaussian_nll_changes_by_log_scale_with_the_units() -> None:
    scale = 4.0
    scaled = metrics.gaussian_nll(scale * MEAN, scale**2 * VARIANCE, scale * TARGETS)
    assert_close(scaled, metrics.gaussian_nll(MEAN, VARIANCE, TARGETS) + 3 * math.log(scale))


@pytest.mark.parametrize("noise", [0.4, torch.tensor([0.2, 0.5, 0.9]).double(), 0.1 + SAMPLES.square()])
def test_sample_nll_against_a_mixture(noise: float | torch.Tensor) -> None:
    scale = torch.as_tensor(noise, dtype=torch.float64).sqrt().expand_as(SAMPLES)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(probs=torch.ones(23, 7, dtype=torch.float64)),
        torch.distributions.Independent(torch.distributions.Normal(SAMPLES.transpose(0, 1), scale.transpose(0, 1)), 1),
    )
    assert_close(metrics.sample_nll(SAMPLES, noise, TARGETS), -mixture.log_prob(TARGETS).mean().item())


def test_sample_nll_of_equal_samples_is_gaussian_and_far_targets_do_not_overflow() -> None:
    assert_close(metrics.sample_nll(MEAN.expand(5, 23, 3), 0.3, TARGETS), metrics.gaussian_nll(MEAN, 0.3, TARGETS))
    far = metrics.sample_nll(torch.zeros(4, 2), 1e-4, torch.tensor([100.0, -100.0]))
    assert_close(far, 0.5 * 1e4 / 1e-4 + 0.5 * math.log(2 * math.pi * 1e-4))


def test_crps_of_a_gaussian_against_quadrature() -> None:
    values = []
    for mu, var, y in zip(MEAN[:4, 0].tolist(), VARIANCE[:4, 0].tolist(), TARGETS[:4, 0].tolist(), strict=True):
        s = math.sqrt(var)
        left = integrate.quad(lambda t, mu=mu, s=s: stats.norm.cdf(t, mu, s) ** 2, mu - 12 * s, y)[0]
        right = integrate.quad(lambda t, mu=mu, s=s: stats.norm.sf(t, mu, s) ** 2, y, mu + 12 * s)[0]
        values.append(left + right)
    got = metrics.crps_gaussian(MEAN[:4, 0], VARIANCE[:4, 0], TARGETS[:4, 0])
    assert_close(got, float(np.mean(values)), rtol=1e-7, atol=1e-9)


def test_crps_of_a_gaussian_at_its_mean_and_far_away() -> None:
    assert_close(metrics.crps_gaussian([2.0], 9.0, [2.0]), 3.0 * (math.sqrt(2) - 1) / math.sqrt(math.pi))
    # Far from the mean it is the absolute error less a constant of the spread.
    assert_close(metrics.crps_gaussian([0.0], 1.0, [50.0]), 50.0 - 1.0 / math.sqrt(math.pi))


@pytest.mark.parametrize("fair", [False, True])
def test_crps_of_samples_against_the_double_sum(fair: bool) -> None:
    s = SAMPLES.shape[0]
    pairs = (SAMPLES.unsqueeze(0) - SAMPLES.unsqueeze(1)).abs().sum((0, 1))
    brute = (SAMPLES - TARGETS).abs().mean(0) - pairs / (2 * s * (s - 1 if fair else s))
    assert_close(metrics.crps_samples(SAMPLES, TARGETS, fair=fair), brute.mean().item())
    # Far from zero the result stays the same: the sum over sorted samples is centred.
    shifted = metrics.crps_samples(SAMPLES + 1e6, TARGETS + 1e6, fair=fair)
    assert_close(shifted, brute.mean().item(), rtol=1e-8, atol=1e-8)


def test_fair_crps_is_unbiased_and_the_other_is_not() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 60_000, generator=generator, dtype=torch.float64)
    y = torch.full((60_000,), 0.5, dtype=torch.float64)
    exact = metrics.crps_gaussian([0.0], 1.0, [0.5])
    assert_close(metrics.crps_samples(x, y, fair=True), exact, atol=6e-3, rtol=0)
    # E|X - X'| = 2 / sqrt(pi), so the bias at S = 3 is (1/S) / sqrt(pi).
    assert_close(metrics.crps_samples(x, y), exact + 1 / (3 * math.sqrt(math.pi)), atol=6e-3, rtol=0)


def test_crps_of_one_sample_is_the_absolute_error() -> None:
    assert_close(metrics.crps_samples(SAMPLES[:1], TARGETS), (SAMPLES[0] - TARGETS).abs().mean().item())


def test_pit_against_scipy_and_uniform_when_right() -> None:
    expected = stats.norm.cdf(TARGETS.numpy(), MEAN.numpy(), VARIANCE.sqrt().numpy())
    assert_close(metrics.pit(MEAN, VARIANCE, TARGETS), torch.as_tensor(expected))
    y = torch.randn(20_000, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    u = metrics.pit(torch.zeros(20_000), 1.0, y)
    assert_close(u.mean().item(), 0.5, atol=8e-3, rtol=0)
    assert_close(u.var().item(), 1 / 12, atol=2e-3, rtol=0)


def test_pit_of_samples_counts_ties_half() -> None:
    samples = torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]).double()
    assert_close(metrics.pit_samples(samples, [1.0, 1.0]), torch.tensor([0.5, 0.5]).double())
    assert_close(metrics.pit_samples(samples, [-1.0, 3.0]), torch.tensor([0.0, 1.0]).double())
    many = torch.randn(40_000, 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    exact = metrics.pit([0.0, 0.0], 1.0, [0.3, -1.2])
    assert_close(metrics.pit_samples(many, [0.3, -1.2]), exact, atol=1e-2, rtol=0)


def test_chi_square_is_one_when_right_and_scales_inversely() -> None:
    y = 3.0 * torch.randn(40_000, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    assert_close(metrics.chi_square(torch.zeros(40_000), 9.0, y), 1.0, atol=3e-2, rtol=0)
    assert_close(metrics.chi_square(MEAN, VARIANCE / 4, TARGETS), 4 * metrics.chi_square(MEAN, VARIANCE, TARGETS))


GAUSSIAN = [
    metrics.gaussian_nll,
    metrics.crps_gaussian,
    metrics.pit,
    metrics.chi_square,
    metrics.interval_calibration,
    lambda m, v, y: metrics.StreamingGaussianNLL().update(m, v, y),
]


@pytest.mark.parametrize("metric", GAUSSIAN)
def test_bad_gaussian_input(metric) -> None:
    with pytest.raises(DataError, match=r"variance must be positive, got 0 at index \[1\].*noise"):
        metric([0.0, 0.0], [1.0, 0.0], [0.0, 0.0])
    with pytest.raises(DataError, match="variance must be positive, got -1"):
        metric([0.0, 0.0], -1.0, [0.0, 0.0])
    with pytest.raises(DataError, match="targets holds 1 NaN"):
        metric([0.0, 0.0], 1.0, [0.0, math.nan])
    with pytest.raises(ShapeError, match=r"mean \[2\], variance \[2\], targets \[2, 1\].*Squeeze"):
        metric([0.0, 0.0], 1.0, [[0.0], [0.0]])
    with pytest.raises(ShapeError, match="single number"):
        metric(0.0, 1.0, 0.0)


def test_no_examples() -> None:
    for metric in GAUSSIAN[:-1]:
        with pytest.raises(DataError, match="mean is empty"):
            metric([], 1.0, [])
    with pytest.raises(DataError, match="mean is empty"):
        metrics.rmse([], [])


def test_other_bad_input() -> None:
    with pytest.raises(ShapeError, match=r"mean \[2\], targets \[2, 1\]"):
        metrics.rmse([0.0, 0.0], [[0.0], [0.0]])
    with pytest.raises(ShapeError, match=r"samples must have shape \[S, \*targets.shape\] = \[S, 23, 3\]"):
        metrics.crps_samples(SAMPLES.transpose(0, 1), TARGETS)
    with pytest.raises(ShapeError, match=r"noise_variance must broadcast .*\[7, 23, 3\], got \[4\]"):
        metrics.sample_nll(SAMPLES, torch.ones(4), TARGETS)
    with pytest.raises(DataError, match="noise_variance must be positive"):
        metrics.sample_nll(SAMPLES, 0.0, TARGETS)
    with pytest.raises(DataError, match="fair CRPS needs at least 2 samples"):
        metrics.crps_samples(SAMPLES[:1], TARGETS, fair=True)
    with pytest.raises(DataError, match="samples holds 1 NaN"):
        metrics.pit_samples([[math.nan], [0.0]], [0.0])
