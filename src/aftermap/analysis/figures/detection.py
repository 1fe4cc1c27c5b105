"""Figures of telling other data from usual data by a score: shares above a threshold, histograms, ROC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aftermap.analysis.figures.style import (
    INK,
    Array,
    as_array,
    axes,
    color_of,
    dash_of,
    finish,
    legend_label,
    named_curves,
)
from aftermap.errors import InputError
from aftermap.metrics import labelled_scores, roc_curve

__all__ = ["inverse_ecdf", "roc", "score_histograms"]


def inverse_ecdf(curves: Mapping[str, Any], *, score: str = "entropy (nats)", ax: Any = None, title: str = "") -> Any:
    """Draws the share of inputs whose score lies above each threshold.

    Usual data should fall early, other data late: the further apart the curves, the better a threshold separates them.

    Args:
        curves: The columns "threshold" and "share_above", as in `Results.curves["entropy/test"]`, or several such
            curves by name.
        score: The name of the score, with its unit.
        ax: The axes to draw on. None makes a new figure.
        title: The title of the figure.

    Returns:
        The Axes that were drawn on.

    >>> inverse_ecdf({"threshold": [0.0, 1.0], "share_above": [0.5, 0.0]}).get_xlabel()
    'entropy (nats)'
    """
    columns = named_curves(curves, ("threshold", "share_above"))
    ax = axes(ax)
    for i, (name, curve) in enumerate(columns.items()):
        ax.plot(
            curve["threshold"],
            curve["share_above"],
            drawstyle="steps-post",
            color=color_of(i),
            linestyle=dash_of(i),
            linewidth=1.4,
            label=legend_label(name) or "_",
        )
    ax.set(ylim=(0, 1.02))
    ax.set_xlim(left=min(0.0, *(float(c["threshold"].min()) for c in columns.values())))
    return finish(ax, title=title, x=score, y="share of inputs above", legend=any(columns))


def _outside(outside: Mapping[str, Any]) -> dict[str, Array]:
    if not isinstance(outside, Mapping) or not outside:
        raise InputError("outside must be a mapping: name of a set -> its scores [M]")
    return {name: as_array(f"scores of {name}", values) for name, values in outside.items()}


def score_histograms(
    inside: Any,
    outside: Mapping[str, Any],
    *,
    score: str = "entropy (nats)",
    name: str = "test",
    bins: int = 30,
    threshold: float | None = None,
    ax: Any = None,
    title: str = "",
) -> Any:
    """Draws the scores of usual data beside those of other sets, each as shares of its own set in common bins.

    Args:
        inside: The scores of usual data [N].
        outside: The scores [M] of each other set, by its name.
        score: The name of the score, with its unit.
        name: The name of the usual data.
        bins: The number of bins.
        threshold: A threshold to draw as a line; inputs to its right are flagged.
        ax: The axes to draw on. None makes a new figure.
        title: The title of the figure.

    Returns:
        The Axes that were drawn on.

    >>> score_histograms([0.1, 0.2], {"other": [0.8, 0.9]}).get_ylabel()
    'share of the set'
    """
    groups = {name: as_array("inside", inside), **_outside(outside)}
    together = np.concatenate(list(groups.values()))
    edges = np.histogram_bin_edges(together, bins=bins)
    ax = axes(ax)
    for i, (label, values) in enumerate(groups.items()):
        share = np.histogram(values, edges)[0] / len(values)
        ax.stairs(share, edges, color=color_of(i), fill=True, alpha=0.25, linewidth=0)
        ax.stairs(share, edges, color=color_of(i), linestyle=dash_of(i), linewidth=1.1, label=legend_label(label))
    if threshold is not None:
        ax.axvline(threshold, color=INK, linewidth=0.7, linestyle=(0, (2, 2)), label=f"flag above {threshold:.3g}")
    ax.set_ylim(bottom=0)
    return finish(ax, title=title, x=score, y="share of the set", legend=True)


def roc(inside: Any, outside: Mapping[str, Any], *, ax: Any = None, title: str = "") -> Any:
    """Draws ROC curves: the share of each other set that is found over the share of usual data that raises a false alarm.

    Args:
        inside: The scores of usual data [N], higher for the more unusual.
        outside: The scores [M] of each other set, by its name.
        ax: The axes to draw on. None makes a new figure.
        title: The title of the figure.

    Returns:
        The Axes; the legend has the area under each curve.

    >>> roc([0.1, 0.2], {"other": [0.8, 0.9]}).get_legend().get_texts()[0].get_text()
    'other (AUROC 1.000)'
    """
    usual = as_array("inside", inside)
    ax = axes(ax, height=3.0 if ax is None else None)
    ax.plot([0, 1], [0, 1], color=INK, linewidth=0.7, linestyle=(0, (3, 2)))
    for i, (name, values) in enumerate(_outside(outside).items()):
        scores, flags = labelled_scores(usual, values)
        curve = roc_curve(scores, flags)
        ax.plot(
            curve.fpr.numpy(),
            curve.tpr.numpy(),
            color=color_of(i + 1),
            linestyle=dash_of(i),
            linewidth=1.4,
            label=f"{legend_label(name)} (AUROC {curve.area:.3f})",
        )
    ax.set(xlim=(0, 1), ylim=(0, 1.02))
    return finish(ax, title=title, x="false alarms on usual data", y="share of the other set found", legend=True)
