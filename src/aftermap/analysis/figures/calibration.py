"""Figures of calibration: whether a confidence of 80 % is right in 80 % of cases, and a 90 % interval holds 90 % of targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aftermap.analysis.figures.style import INK, Array, axes, color_of, dash_of, finish, legend_label, named_curves

__all__ = ["interval_calibration", "reliability"]

_Z = 1.959964  # The normal distribution holds 95 % between −Z and Z.
_MARKERS = ("o", "s", "^", "D")


def _wilson(rate: Array, count: Array) -> tuple[Array, Array]:
    """Returns the ends of the 95 % Wilson interval of a rate, exact enough at any count and in closed form (Wilson 1927)."""
    shrink = 1 + _Z**2 / count
    centre = (rate + _Z**2 / (2 * count)) / shrink
    half = _Z / shrink * np.sqrt(rate * (1 - rate) / count + _Z**2 / (4 * count**2))
    return np.clip(centre - half, 0, 1), np.clip(centre + half, 0, 1)


def _diagonal(ax: Any) -> None:
    ax.plot([0, 1], [0, 1], color=INK, linewidth=0.7, linestyle=(0, (3, 2)), zorder=1)
    ax.set(xlim=(0, 1), ylim=(0, 1.02))


def reliability(curves: Mapping[str, Any], *, counts: bool = True, ax: Any = None, title: str = "") -> Any:
    """Draws a reliability diagram: the share of right answers over mean confidence, bin by bin, with the number of answers above.

    A point under the diagonal is overconfident. The bars are 95 % Wilson intervals of the bin's accuracy; bins without
    answers are left out, and markers grow with the number of answers.

    Args:
        curves: The columns "confidence", "accuracy" and "count", as in `Results.curves["reliability"]`, or several such
            curves by name.
        counts: Whether to draw the strip of counts above the diagram.
        ax: The axes to draw on. None makes a new figure.
        title: The title of the figure.

    Returns:
        The Axes of the diagram; the strip is its only child Axes.

    Raises:
        InputError, DataError, ShapeError: A curve lacks a column or does not fit.

    >>> ax = reliability({"confidence": [0.6, 0.9], "accuracy": [0.5, 0.95], "count": [20, 80]})
    >>> ax.get_xlabel(), len(ax.child_axes)
    ('confidence', 1)
    """
    columns = named_curves(curves, ("confidence", "accuracy", "count"), finite=False)
    ax = axes(ax, height=3.1 if ax is None else None)
    _diagonal(ax)
    ax.set_xlim(0, 1.02)  # This leaves room for the last bin's marker.
    strip = ax.inset_axes([0.0, 1.03, 1.0, 0.17]) if counts else None
    width = 0.8 / (len(next(iter(columns.values()))["count"]) * len(columns))
    top = 1.0
    for i, (name, curve) in enumerate(columns.items()):
        full = (curve["count"] > 0) & np.isfinite(curve["accuracy"])
        place, rate, count = (curve[c][full] for c in ("confidence", "accuracy", "count"))
        low, high = _wilson(rate, count)
        ax.vlines(place, low, high, color=color_of(i), linewidth=0.7, alpha=0.4)
        ax.plot(place, rate, color=color_of(i), linestyle=dash_of(i), linewidth=0.9, alpha=0.6)
        # Markers grow with the count: a bin of two answers must not look like one of two hundred.
        ax.scatter(
            place,
            rate,
            s=6 + 30 * np.sqrt(count / count.max()),
            color=color_of(i),
            marker=_MARKERS[i % len(_MARKERS)],
            linewidth=0,
            label=legend_label(name) or "_",
            zorder=3,
        )
        if strip is not None:
            bins = (np.arange(len(curve["count"])) + 0.5) / len(curve["count"])
            offset = (i - (len(columns) - 1) / 2) * width
            strip.bar(bins + offset, np.nan_to_num(curve["count"]), width, color=color_of(i), linewidth=0)
            top = max(top, float(np.nanmax(curve["count"])))
    finish(ax, title=title, x="confidence", y="share of right answers", legend=len(columns) > 1)
    if strip is not None:
        strip.set(xlim=(0, 1.02), ylim=(0, top), xticks=[], yticks=[top], yticklabels=[f"{top:,.0f}"])
        finish(strip, y="count")
        strip.spines["left"].set_visible(False)
        strip.spines["bottom"].set_visible(False)
        ax.set_title(title, fontsize=9, color=INK, loc="left", y=1.22)
    return ax


def interval_calibration(curves: Mapping[str, Any], *, ax: Any = None, title: str = "") -> Any:
    """Draws the share of targets inside the central interval over the level that the interval promises.

    Above the diagonal intervals are too wide, under it too narrow. The shaded area is the miscalibration.

    Args:
        curves: The columns "level" and "coverage", as in `Results.curves["interval_calibration"]`, or several such
            curves by name.
        ax: The axes to draw on. None makes a new figure.
        title: The title of the figure.

    Returns:
        The Axes that were drawn on.

    >>> interval_calibration({"level": [0.0, 0.5, 1.0], "coverage": [0.0, 0.6, 1.0]}).get_xlabel()
    'promised share'
    """
    columns = named_curves(curves, ("level", "coverage"))
    ax = axes(ax, height=3.0 if ax is None else None)
    _diagonal(ax)
    for i, (name, curve) in enumerate(columns.items()):
        level, inside = curve["level"], curve["coverage"]
        ax.fill_between(level, level, inside, color=color_of(i), alpha=0.12, linewidth=0)
        ax.plot(level, inside, color=color_of(i), linestyle=dash_of(i), linewidth=1.4, label=legend_label(name) or "_")
    return finish(ax, title=title, x="promised share", y="share of targets inside", legend=any(columns))
