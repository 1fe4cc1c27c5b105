"""Regression: the band of the predictive, and predictions beside what was observed."""

from __future__ import annotations

from typing import Any

import numpy as np

from aftermap.analysis.figures.columns import as_array, color_of
from aftermap.analysis.figures.style import INK, axes, finish
from aftermap.errors import DataError, InputError, ShapeError

__all__ = ["observed_against_predicted", "regression_band"]

_POINTS = 600  # more points than this make a figure heavy and no clearer


def _deviation(name: str, values: Any, like: Any) -> Any:
    found = as_array(name, values)
    if found.shape != like.shape:
        raise ShapeError(f"{name} must have one number per point, got {len(found)} for {len(like)}")
    if bool((found < 0).any()):
        raise DataError(f"{name} holds a negative number; pass standard deviations, the roots of variances")
    return found


def regression_band(
    x: Any,
    mean: Any,
    deviation: Any,
    *,
    epistemic: Any = None,
    data: tuple[Any, Any] | None = None,
    truth: Any = None,
    deviations: int = 3,
    ax: Any = None,
    title: str = "",
    x_label: str = "x",
    y_label: str = "y",
) -> Any:
    """The predictive over a line of inputs, with one shade per standard deviation.

    The k-th shade fills mean ± k·deviation; shades lie on each other, so that the middle is darkest.

    Args:
        x: inputs [N], in any order.
        mean: of the predictive [N].
        deviation: standard deviation of a new target [N], noise included: `prediction.total.sqrt()`.
        epistemic: standard deviation of the function alone [N]; drawn as a pair of thin lines at one deviation.
        data: inputs and targets of training data, as points.
        truth: the true function at x [N], where it is known.
        deviations: number of shades.
        ax: to draw on; None: a new figure.
        title: of the figure.
        x_label: of the inputs.
        y_label: of the targets.

    Returns:
        The Axes.

    Raises:
        InputError, DataError, ShapeError: less than one shade, a negative deviation, or lengths that do not fit.

    >>> ax = regression_band([0.0, 1.0], [0.0, 1.0], [0.1, 0.2], deviations=2)
    >>> len(ax.collections)
    2
    """
    if isinstance(deviations, bool) or not isinstance(deviations, int) or deviations < 1:
        raise InputError(f"deviations must be a whole number of at least 1, got {deviations!r}")
    points = as_array("x", x)
    order = np.argsort(points, kind="stable")
    points = points[order]
    middle = as_array("mean", mean)
    if middle.shape != points.shape:
        raise ShapeError(f"mean must have one number per x, got {len(middle)} for {len(points)}")
    middle, spread = middle[order], _deviation("deviation", deviation, points)[order]
    ax = axes(ax)
    blue = color_of(0)
    for k in range(deviations, 0, -1):
        ax.fill_between(
            points, middle - k * spread, middle + k * spread, color=blue, alpha=0.45 / deviations, linewidth=0
        )
    if epistemic is not None:
        inner = _deviation("epistemic", epistemic, points)[order]
        for sign, label in ((-1, "_"), (1, "± 1 sd of the function")):
            ax.plot(points, middle + sign * inner, color=blue, linewidth=0.7, linestyle=(0, (3, 2)), label=label)
    ax.plot(points, middle, color=blue, linewidth=1.4, label="mean")
    if truth is not None:
        ax.plot(points, as_array("truth", truth)[order], color=INK, linewidth=0.9, linestyle=":", label="truth")
    if data is not None:
        ax.plot(
            as_array("data x", data[0]),
            as_array("data y", data[1]),
            "o",
            color=INK,
            markersize=2.4,
            markeredgewidth=0,
            alpha=0.75,
            label="data",
            zorder=4,
        )
    return finish(ax, title=title, x=x_label, y=y_label, legend=True)


def observed_against_predicted(
    mean: Any,
    deviation: Any,
    targets: Any,
    *,
    deviations: float = 2.0,
    ax: Any = None,
    title: str = "",
) -> Any:
    """What was observed over what was predicted, with a bar of the given number of deviations around each prediction.

    Points whose bar misses the diagonal are drawn as crosses: for a calibrated Gaussian predictive 4.6 % of them at two
    deviations. Of more than 600 points every k-th is drawn.

    Args:
        mean: of the predictive [N].
        deviation: standard deviation of a new target [N].
        targets: what was observed [N].
        deviations: length of a bar to each side.
        ax: to draw on; None: a new figure.
        title: of the figure.

    Returns:
        The Axes.

    >>> observed_against_predicted([0.0, 1.0], [0.1, 0.1], [0.1, 2.0]).get_ylabel()
    'observed'
    """
    middle, seen = as_array("mean", mean), as_array("targets", targets)
    if middle.shape != seen.shape:
        raise ShapeError(f"targets must have one number per prediction, got {len(seen)} for {len(middle)}")
    spread = _deviation("deviation", deviation, middle)
    step = -(-len(middle) // _POINTS)
    middle, seen, spread = middle[::step], seen[::step], spread[::step]
    missed = np.abs(seen - middle) > deviations * spread
    ax = axes(ax)
    low, high = min(middle.min(), seen.min()), max(middle.max(), seen.max())
    ax.plot([low, high], [low, high], color=INK, linewidth=0.7, linestyle=(0, (3, 2)))
    ax.vlines(
        middle,
        seen - deviations * spread,
        seen + deviations * spread,
        color=color_of(0),
        alpha=0.25,
        linewidth=0.9,
    )
    for rows, marker, color, label in (
        (~missed, "o", color_of(0), f"within {deviations:g} sd"),
        (missed, "x", color_of(1), f"outside ({missed.mean():.1%})"),
    ):
        if bool(rows.any()):
            ax.plot(
                middle[rows],
                seen[rows],
                marker,
                color=color,
                markersize=2.6 if marker == "o" else 4.0,
                markeredgewidth=0 if marker == "o" else 1.1,
                label=label,
            )
    finish(ax, title=title, x="predicted mean", y="observed", legend=True)
    ax.get_legend().set_loc("upper left")  # far from the diagonal
    return ax
