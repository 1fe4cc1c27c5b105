"""Selective prediction: what the answers cost when the most uncertain inputs are set aside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aftermap.analysis.figures.columns import color_of, dash_of, legend_label, named_curves
from aftermap.analysis.figures.style import INK, axes, finish
from aftermap.errors import InputError

__all__ = ["risk_coverage"]


def risk_coverage(
    curves: Mapping[str, Any],
    *,
    operating: float | None = None,
    loss: str = "error rate of the answers",
    percent: bool = True,
    ax: Any = None,
    title: str = "",
) -> Any:
    """Risk over coverage: the mean loss of the answered inputs when only the least uncertain share is answered.

    Args:
        curves: columns "coverage" and "risk", as `Results.curves["risk_coverage"]`; or several by name.
        operating: a coverage in (0, 1] to mark on the first curve.
        loss: what the risk is, the label of its axis.
        percent: write the risk in percent; False for a loss that is no share.
        ax: to draw on; None: a new figure.
        title: of the figure.

    Returns:
        The Axes.

    Raises:
        InputError, DataError, ShapeError: curves that lack a column or do not fit, or an operating point outside (0, 1].

    >>> ax = risk_coverage({"coverage": [0.5, 1.0], "risk": [0.0, 0.1]}, operating=0.8)
    >>> ax.get_ylabel()
    'error rate of the answers'
    """
    if operating is not None and not 0 < operating <= 1:
        raise InputError(f"operating must be a coverage in (0, 1], got {operating!r}. Write 80 % as 0.8")
    found = named_curves(curves, ("coverage", "risk"))
    ax = axes(ax)
    top = 0.0
    for i, (name, curve) in enumerate(found.items()):
        ax.plot(
            curve["coverage"],
            curve["risk"],
            color=color_of(i),
            linestyle=dash_of(i),
            linewidth=1.4,
            label=legend_label(name) or "_",
        )
        # The first few answers are too few for a mean: they must not set the scale.
        top = max(top, float(curve["risk"][curve["coverage"] >= 0.1].max(initial=0.0)))
    if operating is not None:
        curve = next(iter(found.values()))
        risk = float(np.interp(operating, curve["coverage"], curve["risk"]))
        ax.axvline(operating, color=INK, linewidth=0.6, linestyle=(0, (2, 2)))
        ax.plot([operating], [risk], "o", color=color_of(0), markersize=5, markeredgecolor="white", zorder=5)
    ax.set(xlim=(0, 1), ylim=(0, 1.12 * top if top > 0 else 1.0))
    for axis in (ax.xaxis, ax.yaxis) if percent else (ax.xaxis,):
        axis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    finish(ax, title=title, x="coverage: share of inputs answered", y=loss, legend=any(found))
    if any(found) and percent:
        ax.get_legend().set_loc("upper left")  # error rates are low where coverage is
    return ax
