"""Scores and intervals of real-valued predictions: errors, densities, CRPS, PIT, coverage, width and calibration.

Every ``variance`` is that of the target: function uncertainty **plus** observation noise. To judge the
function itself against a known truth, pass the function variance alone and say so.

Intervals for a target need the variance of the target, noise included; intervals for the true function need
the function variance alone. Say which one a coverage is about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap import checks
from aftermap.errors import DataError, ShapeError
from aftermap.metrics.tensors import (
    TensorLike,
    check_gaussian,
    check_real,
    check_same_shape,
    check_samples,
    check_variance,
)

__all__ = [
    "IntervalCalibration",
    "chi_square",
    "coverage",
    "crps_gaussian",
    "crps_samples",
    "gaussian_interval",
    "gaussian_nll",
    "interval_calibration",
    "interval_calibration_from_pit",
    "interval_score",
    "mean_width",
    "pit",
    "pit_samples",
    "rmse",
    "sample_nll",
]

_LOG_2PI = math.log(2.0 * math.pi)
_DEFAULT_LEVELS = tuple(i / 20 for i in range(1, 20))


def _gaussian_terms(mu: Tensor, var: Tensor, y: Tensor) -> Tensor:
    """Returns the negative log-density of each example [N], summed over its outputs."""
    terms = 0.5 * (_LOG_2PI + var.log() + (y - mu).square() / var)
    return terms.reshape(mu.shape[0], -1).sum(-1) if mu.numel() else terms.new_zeros(0)


def rmse(mean: TensorLike, targets: TensorLike) -> float:
    """Returns the root mean squared error of the predictive mean, over all examples and outputs.

    Args:
        mean: The predictive mean [N] or [N, D].
        targets: The targets, of the same shape.

    Returns:
        The error sqrt(mean (y - mu)^2), in the units of the targets.

    Raises:
        DataError: There is a NaN or an infinity, or there are no examples.
        ShapeError: The shapes differ.

    >>> rmse([0.0, 0.0], [3.0, 3.0])
    3.0
    """
    mu = check_real("mean", mean)
    y = check_real("targets", targets).to(mu.device)
    check_same_shape(mean=mu, targets=y)
    return (y - mu).square().mean().sqrt().item()


def gaussian_nll(mean: TensorLike, variance: TensorLike, targets: TensorLike) -> float:
    """Returns the mean negative log-density of N(mu, s^2), 1/N sum_n sum_d 1/2 [log 2 pi s^2 + (y - mu)^2 / s^2].

    It is summed over outputs and averaged over examples: the density of the whole target vector. If targets were
    standardised, add the log of their scale (for each output) to come back to the original units.

    Args:
        mean: The predictive mean [N] or [N, D].
        variance: The predictive variance with noise, of the same shape or a single number.
        targets: The targets, of the same shape as ``mean``.

    Returns:
        The mean negative log-density of an example, in nats.

    Raises:
        DataError: There is a NaN or an infinity, a variance is not positive, or there are no examples.
        ShapeError: The shapes differ.

    >>> round(gaussian_nll([0.0, 1.0], 1.0, [0.0, 1.0]), 4)
    0.9189
    """
    return _gaussian_terms(*check_gaussian(mean, variance, targets)).mean().item()


def sample_nll(samples: TensorLike, noise_variance: TensorLike, targets: TensorLike) -> float:
    """Returns the mean negative log-density of the mixture 1/S sum_s N(f_s, noise), by log-sum-exp.

    It is -1/N sum_n log 1/S sum_s prod_d N(y_nd; f_snd, v): the log of the mean density, not the mean of the logs.

    Args:
        samples: The sampled means [S, N] or [S, N, D].
        noise_variance: The variance of the noise: a number, or a shape that broadcasts to ``samples``, such as [D] for
            one per output or [S, N, D] for members that predict their own noise.
        targets: The targets [N] or [N, D].

    Returns:
        The mean negative log-density of an example, in nats.

    Raises:
        DataError: There is a NaN or an infinity, a variance is not positive, or there are no examples.
        ShapeError: The shapes do not match.

    >>> round(sample_nll([[-1.0], [1.0]], 1.0, [0.0]), 4)
    1.4189
    """
    f, y = check_samples("samples", samples, targets)
    var = check_variance("noise_variance", noise_variance, f.shape).to(f.device)
    try:
        var = var.broadcast_to(f.shape)
    except RuntimeError as error:
        raise ShapeError(
            f"noise_variance must broadcast to the samples, {list(f.shape)}, got {list(var.shape)}. "
            "Pass a number, one value per output [D], or the full shape."
        ) from error
    n_samples, n = f.shape[:2]
    log_density = -0.5 * (_LOG_2PI + var.log() + (y - f).square() / var)
    joint = log_density.reshape(n_samples, n, -1).sum(-1)
    return (math.log(n_samples) - joint.logsumexp(0)).mean().item()


def crps_gaussian(mean: TensorLike, variance: TensorLike, targets: TensorLike) -> float:
    """Returns the continuous ranked probability score of N(mu, s^2).

    It is s [z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi)] with z = (y - mu) / s.

    Args:
        mean: The predictive mean [N] or [N, D].
        variance: The predictive variance with noise, of the same shape or a single number.
        targets: The targets, of the same shape as ``mean``.

    Returns:
        The mean over examples and outputs, in the units of the targets; lower is better.

    Raises:
        DataError, ShapeError: The same as for :func:`gaussian_nll`.

    References:
        Gneiting, Raftery (2007), Strictly proper scoring rules, section 4.2.

    >>> round(crps_gaussian([0.0], 1.0, [0.0]), 4)
    0.2337
    """
    mu, var, y = check_gaussian(mean, variance, targets)
    s = var.sqrt()
    z = (y - mu) / s
    density = (-0.5 * (z.square() + _LOG_2PI)).exp()
    return (s * (z * torch.erf(z / math.sqrt(2.0)) + 2.0 * density - 1.0 / math.sqrt(math.pi))).mean().item()


def crps_samples(samples: TensorLike, targets: TensorLike, *, fair: bool = False) -> float:
    """Returns the CRPS of the empirical distribution of samples, 1/S sum |x_i - y| - 1/(2 S^2) sum_ij |x_i - x_j|.

    The double sum is 2 sum_i (2 i - S - 1) x_(i) over sorted samples, so the work is S log S. ``fair`` divides by
    S (S - 1) instead of S^2, which makes it an unbiased estimate of the score of the distribution that the samples come
    from.

    Args:
        samples: Samples of the **target** [S, N] or [S, N, D], noise included.
        targets: The targets [N] or [N, D].
        fair: Whether to remove the bias of few samples, which needs two or more.

    Returns:
        The mean over examples and outputs, in the units of the targets; lower is better.

    Raises:
        DataError: There is a NaN or an infinity, there are no examples, or a fair score is asked for with one sample.
        ShapeError: The shapes do not match.

    References:
        Ferro (2014), Fair scores for ensemble forecasts.

    >>> crps_samples([[0.0], [2.0]], [1.0]), crps_samples([[0.0], [2.0]], [1.0], fair=True)
    (0.5, 0.0)
    """
    x, y = check_samples("samples", samples, targets)
    n_samples = x.shape[0]
    if fair and n_samples < 2:
        raise DataError("a fair CRPS needs at least 2 samples, got 1. Draw more, or pass fair=False.")
    # Samples are centred on the target, since the sum over sorted samples cancels for values far from zero.
    centred = (x - y).sort(0).values
    coefficient = 2.0 * torch.arange(1, n_samples + 1, dtype=torch.float64, device=x.device) - n_samples - 1.0
    spread = torch.tensordot(coefficient, centred, dims=1) / (n_samples * (n_samples - 1 if fair else n_samples))
    return (centred.abs().mean(0) - spread).mean().item()


def pit(mean: TensorLike, variance: TensorLike, targets: TensorLike) -> Tensor:
    """Returns the probability integral transform Phi((y - mu) / s), which is uniform on [0, 1] if the predictions are right.

    Args:
        mean: The predictive mean [N] or [N, D].
        variance: The predictive variance with noise, of the same shape or a single number.
        targets: The targets, of the same shape as ``mean``.

    Returns:
        A float64 tensor of the shape of ``mean``.

    Raises:
        DataError, ShapeError: The same as for :func:`gaussian_nll`.

    >>> pit([0.0, 0.0], 1.0, [0.0, 1.96])
    tensor([0.5000, 0.9750], dtype=torch.float64)
    """
    mu, var, y = check_gaussian(mean, variance, targets)
    return torch.special.ndtr((y - mu) / var.sqrt())


def pit_samples(samples: TensorLike, targets: TensorLike) -> Tensor:
    """Returns the probability integral transform from samples, (#{x < y} + 1/2 #{x = y}) / S.

    Args:
        samples: Samples of the **target** [S, N] or [S, N, D], noise included.
        targets: The targets [N] or [N, D].

    Returns:
        A float64 tensor of the shape of ``targets``, with values in steps of 1/(2 S).

    Raises:
        DataError, ShapeError: The same as for :func:`crps_samples`.

    >>> pit_samples([[0.0], [1.0], [2.0], [3.0]], [1.0])
    tensor([0.3750], dtype=torch.float64)
    """
    x, y = check_samples("samples", samples, targets)
    return (x < y).to(torch.float64).mean(0) + 0.5 * (x == y).to(torch.float64).mean(0)


def chi_square(mean: TensorLike, variance: TensorLike, targets: TensorLike) -> float:
    """Returns the mean squared standardised residual, 1/N sum (y - mu)^2 / s^2.

    It is about 1 if the variances are right, and above 1 if they are too small.

    Args:
        mean: The predictive mean [N] or [N, D].
        variance: The predictive variance with noise, of the same shape or a single number.
        targets: The targets, of the same shape as ``mean``.

    Returns:
        The mean over examples and outputs.

    Raises:
        DataError, ShapeError: The same as for :func:`gaussian_nll`.

    >>> chi_square([0.0, 0.0], 4.0, [2.0, 4.0])
    2.5
    """
    mu, var, y = check_gaussian(mean, variance, targets)
    return ((y - mu).square() / var).mean().item()


def gaussian_interval(mean: TensorLike, variance: TensorLike, *, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Returns the central interval mu -+ z s that holds a share ``level`` of N(mu, s^2).

    Args:
        mean: The predictive mean [N] or [N, D].
        variance: The predictive variance, of the same shape or a single number.
        level: The probability inside the interval, in (0, 1).

    Returns:
        The lower and the upper end, each of the shape of ``mean``.

    Raises:
        DataError: There is a NaN, or a variance is not positive.
        InputError: The level lies outside (0, 1).

    >>> lower, upper = gaussian_interval([0.0], 4.0)
    >>> round(upper.item(), 4)
    3.9199
    """
    z = math.sqrt(2.0) * torch.erfinv(torch.tensor(checks.fraction("level", level), dtype=torch.float64)).item()
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
    """Returns the share of targets inside their interval, 1/N #{lower <= y <= upper}; compare it with the promised level.

    Args:
        lower: The lower ends [N] or [N, D].
        upper: The upper ends, of the same shape.
        targets: The targets, of the same shape.

    Returns:
        A number between 0 and 1, over all examples and outputs.

    Raises:
        DataError: There is a NaN or an infinity, two ends are in the wrong order, or there are no examples.
        ShapeError: The shapes differ.

    >>> coverage([0.0, 0.0], [1.0, 1.0], [0.5, 2.0])
    0.5
    """
    return _inside(*_check_interval(lower, upper), targets).mean().item()


def mean_width(lower: TensorLike, upper: TensorLike) -> float:
    """Returns the mean width of intervals, 1/N sum (upper - lower), which is only worth comparing at equal coverage.

    Args:
        lower: The lower ends [N] or [N, D].
        upper: The upper ends, of the same shape.

    Returns:
        The mean over examples and outputs, in the units of the targets.

    Raises:
        DataError, ShapeError: The same as for :func:`coverage`.

    >>> mean_width([0.0, 0.0], [1.0, 3.0])
    2.0
    """
    low, high = _check_interval(lower, upper)
    return (high - low).mean().item()


def interval_score(lower: TensorLike, upper: TensorLike, targets: TensorLike, *, level: float = 0.95) -> float:
    """Returns Winkler's interval score: the width plus 2 / (1 - level) times the distance of a target outside.

    It is a proper score: with alpha = 1 - level its mean is smallest at the true quantiles alpha/2 and 1 - alpha/2.

    Args:
        lower: The lower ends [N] or [N, D].
        upper: The upper ends, of the same shape.
        targets: The targets, of the same shape.
        level: The level that the intervals promise, in (0, 1).

    Returns:
        The mean over examples and outputs; lower is better.

    Raises:
        DataError, ShapeError: The same as for :func:`coverage`.
        InputError: The level lies outside (0, 1).

    References:
        Gneiting, Raftery (2007), Strictly proper scoring rules, section 6.2.

    >>> round(interval_score([0.0], [1.0], [2.0], level=0.9), 6)
    21.0
    """
    alpha = 1.0 - checks.fraction("level", level)
    low, high = _check_interval(lower, upper)
    y = check_real("targets", targets).to(low.device)
    check_same_shape(lower=low, targets=y)
    outside = (low - y).clamp_min(0.0) + (y - high).clamp_min(0.0)
    return (high - low + 2.0 / alpha * outside).mean().item()


@dataclass(frozen=True)
class IntervalCalibration:
    """The observed share of targets in the central interval of each level, float64 [M], and the area between the two.

    ``area`` is the exact integral over levels in [0, 1] of |observed - level|, whatever the grid.
    """

    levels: Tensor
    observed: Tensor
    area: float


def interval_calibration(
    mean: TensorLike, variance: TensorLike, targets: TensorLike, *, levels: TensorLike | None = None
) -> IntervalCalibration:
    """Returns the calibration curve of the central intervals of N(mu, s^2), with its miscalibration area.

    Args:
        mean: The predictive mean [N] or [N, D].
        variance: The predictive variance with noise, of the same shape or a single number.
        targets: The targets, of the same shape as ``mean``.
        levels: The M levels in [0, 1]; by default 0.05, 0.10, ..., 0.95.

    Returns:
        The curve, as :class:`IntervalCalibration`.

    Raises:
        DataError, ShapeError: The same as for :func:`gaussian_nll`, or a level lies outside [0, 1].

    References:
        Kuleshov, Fenner, Ermon (2018), Accurate uncertainties for deep learning using calibrated regression.

    >>> interval_calibration([0.0, 0.0], 1.0, [0.5, 1.0], levels=[0.5, 0.9]).observed
    tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    return interval_calibration_from_pit(pit(mean, variance, targets), levels=levels)


def interval_calibration_from_pit(values: TensorLike, *, levels: TensorLike | None = None) -> IntervalCalibration:
    """Returns the calibration curve from PIT values u: the interval of level l holds the target if |2 u - 1| <= l.

    Args:
        values: The PIT values in [0, 1], of any shape, from :func:`pit` or :func:`pit_samples`.
        levels: The M levels in [0, 1]; by default 0.05, 0.10, ..., 0.95.

    Returns:
        The curve, as :class:`IntervalCalibration`.

    Raises:
        DataError: There is a NaN, there are no values, or a value or level lies outside [0, 1].

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
    """Integrates |F(l) - l| over [0, 1] for the empirical distribution function F of sorted values."""
    ends = torch.cat([ordered.new_zeros(1), ordered, ordered.new_ones(1)])
    step = torch.arange(ordered.numel() + 1, dtype=torch.float64, device=ordered.device) / ordered.numel()
    # F is constant between neighbours, where |step - l| has the antiderivative (l - step)|l - step| / 2.
    right, left = ends[1:] - step, ends[:-1] - step
    return (0.5 * (right * right.abs() - left * left.abs())).sum().item()
