from __future__ import annotations

import math

import pytest
import torch
from scipy import integrate, stats
from torch.testing import assert_close

from aftermap import metrics
from aftermap.errors import DataError, InputError, ShapeError


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gaussian_interval_against_scipy() -> None:
    mean, variance = normal(11, 3), 0.1 + normal(11, 3, seed=1).square()
    for level in (0.05, 0.68, 0.95, 0.999):
        low, high = stats.norm.interval(level, mean.numpy(), variance.sqrt().numpy())
        lower, upper = metrics.gaussian_interval(mean, variance, level=level)
        assert_close(lower, torch.as_tensor(low))
        assert_close(upper, torch.as_tensor(high))


def test_coverage_and_width_against_counting() -> None:
    lower, upper, targets = [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 2.0, 4.0], [0.0, 1.0, 2.5, -1.0]
    assert metrics.coverage(lower, upper, targets) == 0.5
    assert metrics.mean_width(lower, upper) == 2.0
    assert metrics.mean_width([-1.0, 2.0], [2.0, 3.5]) == 2.25


def test_gaussian_intervals_cover_what_they_promise() -> None:
    y = 0.5 + 2.0 * normal(40_000)
    for level in (0.5, 0.9):
        interval = metrics.gaussian_interval(torch.full_like(y, 0.5), 4.0, level=level)
        assert_close(metrics.coverage(*interval, y), level, atol=1e-2, rtol=0)


def test_interval_score_by_hand_and_smallest_at_the_true_quantiles() -> None:
    score = metrics.interval_score([0.0, 0.0, 0.0], [2.0, 2.0, 2.0], [1.0, 2.5, -1.0], level=0.8)
    assert_close(score, (2.0 + (2.0 + 10 * 0.5) + (2.0 + 10 * 1.0)) / 3)
    y = normal(40_000, seed=2)
    scores = [
        metrics.interval_score(*metrics.gaussian_interval(torch.zeros_like(y), s**2, level=0.9), y, level=0.9)
        for s in (0.7, 1.0, 1.4)
    ]
    assert scores[1] < min(scores[0], scores[2])
    # At the true quantiles the expected score is 2 phi(z) 2 / alpha for the standard Gaussian.
    z = stats.norm.ppf(0.95)
    assert_close(scores[1], float(4 * stats.norm.pdf(z) / 0.1), rtol=2e-2, atol=0)


def test_interval_calibration_agrees_with_coverage_at_each_level() -> None:
    mean, variance = normal(61, 3), 0.1 + normal(61, 3, seed=1).square()
    targets = mean + 1.3 * variance.sqrt() * normal(61, 3, seed=2)
    curve = metrics.interval_calibration(mean, variance, targets)
    assert_close(curve.levels, torch.arange(1, 20, dtype=torch.float64) / 20)
    for level, observed in zip(curve.levels.tolist(), curve.observed.tolist(), strict=True):
        interval = metrics.gaussian_interval(mean, variance, level=level)
        assert_close(metrics.coverage(*interval, targets), observed)


def test_area_is_the_integral_and_does_not_depend_on_the_grid() -> None:
    u = torch.rand(9, generator=torch.Generator().manual_seed(3), dtype=torch.float64).pow(2)
    curve = metrics.interval_calibration_from_pit(u)
    grid = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    fine = metrics.interval_calibration_from_pit(u, levels=grid)
    assert fine.area == curve.area
    assert_close(torch.trapezoid((fine.observed - grid).abs(), grid).item(), curve.area, atol=1e-5, rtol=0)


def test_area_closed_forms() -> None:
    # All targets at the mean, |2u - 1| = 0: observed is 1 at once, area 1/2; all far outside: also 1/2.
    assert metrics.interval_calibration_from_pit([0.5, 0.5]).area == 0.5
    assert metrics.interval_calibration_from_pit([0.0, 1.0, 1.0]).area == 0.5
    # Middles of n equal steps: n triangles pairs of area 1 / (4 n^2) each.
    n = 8
    u = 0.5 + (torch.arange(n, dtype=torch.float64) + 0.5) / (2 * n)
    assert_close(metrics.interval_calibration_from_pit(u).area, 1 / (4 * n))


def test_area_for_variances_that_are_too_small() -> None:
    y = normal(60_000, seed=4)
    curve = metrics.interval_calibration(torch.zeros_like(y), 0.25, y)
    exact = integrate.quad(lambda q: abs(2 * stats.norm.cdf(0.5 * stats.norm.ppf((1 + q) / 2)) - 1 - q), 0, 1)[0]
    assert_close(curve.area, float(exact), atol=6e-3, rtol=0)
    assert (curve.observed < curve.levels).all()
    calibrated = metrics.interval_calibration(torch.zeros_like(y), 1.0, y)
    assert calibrated.area < 6e-3


def test_calibration_from_samples() -> None:
    samples, y = normal(400, 500), normal(500, seed=5)
    curve = metrics.interval_calibration_from_pit(metrics.pit_samples(samples, y), levels=[0.5, 0.9])
    assert_close(curve.observed, torch.tensor([0.5, 0.9]).double(), atol=7e-2, rtol=0)


def test_bad_input() -> None:
    with pytest.raises(DataError, match=r"lower must not exceed upper, but it does in 1 place"):
        metrics.coverage([0.0, 2.0], [1.0, 1.0], [0.0, 0.0])
    with pytest.raises(ShapeError, match=r"lower \[2\], upper \[3\]"):
        metrics.mean_width([0.0, 0.0], [1.0, 1.0, 1.0])
    with pytest.raises(ShapeError, match=r"lower \[2\], targets \[1\]"):
        metrics.coverage([0.0, 0.0], [1.0, 1.0], [0.0])
    with pytest.raises(ShapeError, match=r"lower \[2\], targets \[1\]"):
        metrics.interval_score([0.0, 0.0], [1.0, 1.0], [0.0])
    with pytest.raises(DataError, match="targets holds 1 NaN"):
        metrics.coverage([0.0], [1.0], [math.nan])
    with pytest.raises(DataError, match="lower is empty"):
        metrics.coverage([], [], [])
    with pytest.raises(InputError, match=r"level=95 must lie in \(0, 1\)"):
        metrics.gaussian_interval([0.0], 1.0, level=95)
    with pytest.raises(InputError, match=r"level=1(.0)? must lie in \(0, 1\)"):
        metrics.interval_score([0.0], [1.0], [0.0], level=1.0)
    with pytest.raises(DataError, match=r"levels must lie in \[0, 1\]"):
        metrics.interval_calibration([0.0], 1.0, [0.0], levels=[50, 90])
    with pytest.raises(DataError, match=r"values must lie in \[0, 1\], got values from -0.5"):
        metrics.interval_calibration_from_pit([-0.5, 0.5])
