"""Intervals for real-valued predictions: coverage, width, their score, and calibration over all levels.

Intervals for a target need the variance of the target, noise included; intervals for the true function need
the function variance alone. Say which one a coverage is about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.errors import DataError
from aftermap.metrics._check import TensorLike, check_fraction, check_gaussian, check_real, check_same_shape
from aftermap.metrics.regression import pit

__all__ = [
    "IntervalCalibration",
    "coverage",
    "gaussian_interval",
    "interval_calibration",
    "interval_calibration_from_pit",
    "interval_score",
    "mean_width",
]

_DEFAULT_LEVELS = tuple(i / 20 for i in range(1, 20))


def gaussian_interval(mean: TensorLike, variance: TensorLike, *, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Central interval mu -+ z s that holds a share ``level`` of N(mu, s^2).

    Args:
        mean: predictive mean [N] or [N, D].
        variance: predictive variance, the same shape or a single number.
        level: probability inside, in (0, 1).

    Returns:
        Lower and upper end, each of the shape of ``mean``.

    Raises:
        DataError: NaN, or a variance that is not positive.
        InputError: a level outside (0, 1).

    >>> lower, upper = gaussian_interval([0.0], 4.0)
    >>> round(upper.item(), 4)
    3.9199
    """
    z = math.sqrt(2.0) * torch.erfinv(torch.tensor(check_fraction("level", level), dtype=torch.float64)).item()
    mu, var, _ = check_gaussian(mean, variance, mean)
    half = z * var.sqrt()
    return mu - half, mu + half


def _check_interval(lower: TensorLike, upper: TensorLike, *, allow_empty: bool = False) -> tuple[Tensor, Tensor]:
    low = check_real("lower", lower, allow_empty=allow_empty)
    high = check_real("upper", upper, allow_empty=allow_empty).to(low.device)
    check_same_shape(lower=low, upper=high)
    crossed = int((low > high).sum())
    if crossed:
        raise DataError(f"lower must not exceed upper, but it does in {crossed} place(s). Swap the two ends.")
    return low, high


def _inside(low: Tensor, high: Tensor, targets: TensorLike, *, allow_empty: bool = False) -> Tensor:
    y = check_real("targets", targets, allow_empty=allow_empty).to(low.device)
    check_same_shape(lower=low, targets=y)
    return ((low <= y) & (y <= high)).to(torch.float64)


def coverage(lower: TensorLike, upper: TensorLike, targets: TensorLike) -> float:
    """Share of targets inside their interval, 1/N #{lower <= y <= upper}; compare with the level promised.

    Args:
        lower: lower ends [N] or [N, D].
        upper: upper ends, the same shape.
        targets: the same shape.

    Returns:
        A number between 0 and 1, over all examples and outputs.

    Raises:
        DataError: NaN, infinity, ends in the wrong order, or no examples.
        ShapeError: shapes that differ.

    >>> coverage([0.0, 0.0], [1.0, 1.0], [0.5, 2.0])
    0.5
    """
    return _inside(*_check_interval(lower, upper), targets).mean().item()


def mean_width(lower: TensorLike, upper: TensorLike) -> float:
    """Mean width of intervals, 1/N sum (upper - lower); only worth comparing at equal coverage.

    Args:
        lower: lower ends [N] or [N, D].
        upper: upper ends, the same shape.

    Returns:
        The mean over examples and outputs, in the units of the targets.

    Raises:
        DataError, ShapeError: as :func:`coverage`.

    >>> mean_width([0.0, 0.0], [1.0, 3.0])
    2.0
    """
    low, high = _check_interval(lower, upper)
    return (high - low).mean().item()


def interval_score(lower: TensorLike, upper: TensorLike, targets: TensorLike, *, level: float = 0.95) -> float:
    """Winkler's interval score: width plus 2 / (1 - level) times the distance of a target outside.

    A proper score: with alpha = 1 - level its mean is smallest at the true quantiles alpha/2 and 1 - alpha/2.

    Args:
        lower: lower ends [N] or [N, D].
        upper: upper ends, the same shape.
        targets: the same shape.
        level: the level that the intervals promise, in (0, 1).

    Returns:
        The mean over examples and outputs; lower is better.

    Raises:
        DataError, ShapeError: as :func:`coverage`.
        InputError: a level outside (0, 1).

    References:
        Gneiting, Raftery (2007), Strictly proper scoring rules, section 6.2.

    >>> round(interval_score([0.0], [1.0], [2.0], level=0.9), 6)
    21.0
    """
    alpha = 1.0 - check_fraction("level", level)
    low, high = _check_interval(lower, upper)
    y = check_real("targets", targets).to(low.device)
    check_same_shape(lower=low, targets=y)
    outside = (low - y).clamp_min(0.0) + (y - high).clamp_min(0.0)
    return (high - low + 2.0 / alpha * outside).mean().item()


@dataclass(frozen=True)
class IntervalCalibration:
    """Observed share of targets in the central interval of each level, float64 [M], and the area between.

    ``area`` is the exact integral over levels in [0, 1] of |observed - level|, whatever the grid.
    """

    levels: Tensor
    observed: Tensor
    area: float


def interval_calibration(
    mean: TensorLike, variance: TensorLike, targets: TensorLike, *, levels: TensorLike | None = None
) -> IntervalCalibration:
    """Calibration curve of the central intervals of N(mu, s^2), with its miscalibration area.

    Args:
        mean: predictive mean [N] or [N, D].
        variance: predictive variance with noise, the same shape or a single number.
        targets: the same shape as ``mean``.
        levels: levels in [0, 1], [M]; 0.05, 0.10, ..., 0.95 by default.

    Returns:
        The curve, as :class:`IntervalCalibration`.

    Raises:
        DataError, ShapeError: as :func:`gaussian_nll`; levels outside [0, 1].

    References:
        Kuleshov, Fenner, Ermon (2018), Accurate uncertainties for deep learning using calibrated regression.

    >>> interval_calibration([0.0, 0.0], 1.0, [0.5, 1.0], levels=[0.5, 0.9]).observed
    tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    return interval_calibration_from_pit(pit(mean, variance, targets), levels=levels)


def interval_calibration_from_pit(values: TensorLike, *, levels: TensorLike | None = None) -> IntervalCalibration:
    """Calibration curve from PIT values u: the interval of level l holds the target if |2 u - 1| <= l.

    Args:
        values: PIT values in [0, 1], any shape, from :func:`pit` or :func:`pit_samples`.
        levels: levels in [0, 1], [M]; 0.05, 0.10, ..., 0.95 by default.

    Returns:
        The curve, as :class:`IntervalCalibration`.

    Raises:
        DataError: NaN, no values, values or levels outside [0, 1].

    >>> interval_calibration_from_pit([0.5, 0.75]).area
    0.25
    """
    u = check_real("values", values).reshape(-1).detach()
    grid = check_real("levels", _DEFAULT_LEVELS if levels is None else levels).reshape(-1).to(u.device)
    for name, tensor in (("values", u), ("levels", grid)):
        if ((tensor < 0) | (tensor > 1)).any():
            raise DataError(
                f"{name} must lie in [0, 1], got values from {tensor.min().item():.6g} to "
                f"{tensor.max().item():.6g}. Write 95 % as 0.95; PIT values come from pit or pit_samples."
            )
    needed = (2.0 * u - 1.0).abs().sort().values
    observed = torch.searchsorted(needed, grid, right=True).to(torch.float64) / needed.numel()
    return IntervalCalibration(grid, observed, _area_to_diagonal(needed))


def _area_to_diagonal(ordered: Tensor) -> float:
    """Integral over [0, 1] of |F(l) - l| for the empirical distribution function F of sorted values."""
    ends = torch.cat([ordered.new_zeros(1), ordered, ordered.new_ones(1)])
    step = torch.arange(ordered.numel() + 1, dtype=torch.float64, device=ordered.device) / ordered.numel()
    # F is constant between neighbours, where |step - l| has the antiderivative (l - step)|l - step| / 2.
    right, left = ends[1:] - step, ends[:-1] - step
    return (0.5 * (right * right.abs() - left * left.abs())).sum().item()
