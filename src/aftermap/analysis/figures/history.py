"""Along a run: the evidence over a hyperparameter, and what training logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aftermap.analysis.figures.columns import as_array, color_of, dash_of, legend_label
from aftermap.analysis.figures.style import INK, axes, finish
from aftermap.errors import InputError, ShapeError

__all__ = ["evidence_curve", "training_history"]


def evidence_curve(
    values: Any,
    evidence: Any,
    *,
    x_label: str = "prior precision",
    y_label: str = "log evidence",
    log: bool = True,
    ax: Any = None,
    title: str = "",
) -> Any:
    """The log evidence, or a validation score, over a hyperparameter; the best value of each curve is marked.

    Args:
        values: of the hyperparameter [N].
        evidence: at those values [N], or name -> [N]; more is better. NaN leaves a gap.
        x_label: the hyperparameter.
        y_label: what is drawn.
        log: a logarithmic axis of values, which must then be positive.
        ax: to draw on; None: a new figure.
        title: of the figure.

    Returns:
        The Axes.

    Raises:
        InputError, DataError, ShapeError: values that are not positive on a logarithmic axis, or do not fit.

    >>> ax = evidence_curve([0.1, 1.0, 10.0], [-9.0, -4.0, -6.0])
    >>> ax.get_xscale()
    'log'
    """
    places = as_array("values", values)
    if log and bool((places <= 0).any()):
        raise InputError("values must be positive on a logarithmic axis; pass log=False")
    curves = dict(evidence) if isinstance(evidence, Mapping) else {"": evidence}
    order = np.argsort(places, kind="stable")
    ax = axes(ax)
    if log:
        ax.set_xscale("log")
    for i, (name, given) in enumerate(curves.items()):
        heights = as_array(f"evidence {name}".strip(), given, finite=False)
        if heights.shape != places.shape:
            raise ShapeError(f"evidence {name!r} must have one number per value, got {len(heights)} for {len(places)}")
        heights = np.where(np.isfinite(heights), heights, np.nan)
        ax.plot(
            places[order],
            heights[order],
            color=color_of(i),
            linestyle=dash_of(i),
            linewidth=1.3,
            label=legend_label(name) or "_",
        )
        if bool(np.isfinite(heights).any()):
            best = int(np.nanargmax(heights))
            ax.plot([places[best]], [heights[best]], "o", color=color_of(i), markersize=4.5, markeredgewidth=0)
            ax.annotate(
                f"{places[best]:.3g}",
                (places[best], heights[best]),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=INK,
            )
    ax.margins(y=0.14)
    return finish(ax, title=title, x=x_label, y=y_label, legend=any(curves))


def training_history(
    history: Mapping[str, Any],
    *,
    steps: Any = None,
    x_label: str = "epoch",
    y_label: str = "loss",
    log: bool = False,
    ax: Any = None,
    title: str = "",
) -> Any:
    """What training logged, one line per quantity.

    Args:
        history: name -> one number per step; the lengths may differ.
        steps: place of every number [N]; None: 1, 2, … .
        x_label: what a step is.
        y_label: what is drawn.
        log: a logarithmic axis of heights.
        ax: to draw on; None: a new figure.
        title: of the figure.

    Returns:
        The Axes.

    Raises:
        InputError: no history, or fewer steps than numbers.

    >>> training_history({"train": [2.0, 1.0], "validation": [2.1, 1.4]}).get_xlabel()
    'epoch'
    """
    if not isinstance(history, Mapping) or not history:
        raise InputError("history must be a mapping: name -> one number per step")
    ax = axes(ax)
    for i, (name, given) in enumerate(history.items()):
        heights = as_array(name, given, finite=False)
        places = np.arange(1, len(heights) + 1) if steps is None else as_array("steps", steps)
        if len(places) < len(heights):
            raise InputError(f"{name!r} has {len(heights)} numbers, but there are {len(places)} steps")
        ax.plot(
            places[: len(heights)],
            np.where(np.isfinite(heights), heights, np.nan),
            color=color_of(i),
            linestyle=dash_of(i),
            linewidth=1.3,
            label=legend_label(name),
        )
    if log:
        ax.set_yscale("log")
    return finish(ax, title=title, x=x_label, y=y_label, legend=True)
