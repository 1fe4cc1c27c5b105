"""Figures of a whole method: regression bands, decisions in the plane, runs, attacks and selective prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from aftermap import checks
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
from aftermap.errors import DataError, InputError, ShapeError

__all__ = [
    "ATTACK_QUANTITIES",
    "attack_curves",
    "decision_grid",
    "decision_map",
    "evidence_curve",
    "observed_against_predicted",
    "regression_band",
    "risk_coverage",
    "training_history",
]

_POINTS = 600  # More points than this make a figure heavy and no clearer.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
ATTACK_QUANTITIES = {
    "accuracy": "accuracy under attack",
    "entropy": "mean entropy (nats)",
    "kept": "share of answers kept",
    "target": "share moved to the target",
}
_ATTACK_MARKERS = ("o", "s", "^", "D")


def _deviation(name: str, values: Any, like: Any) -> Any:
    array = as_array(name, values)
    if array.shape != like.shape:
        raise ShapeError(f"{name} must have one number per point, got {len(array)} for {len(like)}")
    if bool((array < 0).any()):
        raise DataError(f"{name} holds a negative number; pass standard deviations, the roots of variances")
    return array


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
    """Draws the predictive over a line of inputs, with one shade per standard deviation.

    The k-th shade fills mean ± k·deviation; shades lie on each other, so that the middle is darkest.

    Args:
        x: The inputs [N], in any order.
        mean: The mean of the predictive [N].
        deviation: The standard deviation of a new target [N], noise included: `prediction.total.sqrt()`.
        epistemic: The standard deviation of the function alone [N], drawn as a pair of thin lines at one deviation.
        data: The inputs and targets of training data, drawn as points.
        truth: The true function at x [N], where it is known.
        deviations: The number of shades.
        ax: The axes to draw on. None makes a new figure.
        title: The title of the figure.
        x_label: The label of the inputs' axis.
        y_label: The label of the targets' axis.

    Returns:
        The Axes that were drawn on.

    Raises:
        InputError, DataError, ShapeError: There is less than one shade, a deviation is negative, or lengths do not fit.

    >>> ax = regression_band([0.0, 1.0], [0.0, 1.0], [0.1, 0.2], deviations=2)
    >>> len(ax.collections)
    2
    """
    deviations = checks.count("deviations", deviations)
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
    """Draws what was observed over what was predicted, with a bar of the given number of deviations around each prediction.

    Points whose bar misses the diagonal are drawn as crosses; for a calibrated Gaussian predictive these are 4.6 % at
    two deviations. Of more than 600 points every k-th is drawn.

    Args:
        mean: The mean of the predictive [N].
        deviation: The standard deviation of a new target [N].
        targets: The targets that were observed [N].
        deviations: The length of a bar to each side, in deviations.
        ax: The axes to draw on. None makes a new figure.
        title: The title of the figure.

    Returns:
        The Axes that were drawn on.

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
    ax.get_legend().set_loc("upper left")  # This corner is far from the diagonal.
    return ax


def decision_grid(
    low: tuple[float, float], high: tuple[float, float], n: int = 100
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a regular grid of inputs: its two axes [n] and the inputs [n·n, 2], row by row from the bottom.

    >>> x, y, inputs = decision_grid((0.0, 0.0), (1.0, 2.0), n=3)
    >>> inputs.shape, inputs[1]
    (torch.Size([9, 2]), tensor([0.5000, 0.0000]))
    """
    x, y = (torch.linspace(a, b, n) for a, b in zip(low, high, strict=True))
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    return x, y, torch.stack([columns.reshape(-1), rows.reshape(-1)], -1)


def _on_grid(name: str, values: Any, shape: tuple[int, int], lead: int) -> Array:
    """Brings [..., n_y·n_x, C] or [..., n_y, n_x, C] to [..., n_y, n_x, C], with `lead` leading dimensions."""
    array = values.detach().cpu().double().numpy() if isinstance(values, torch.Tensor) else np.asarray(values, float)
    if array.ndim == lead + 2 and array.shape[lead] == shape[0] * shape[1]:
        array = array.reshape(*array.shape[:lead], *shape, array.shape[-1])
    if array.ndim != lead + 3 or array.shape[lead : lead + 2] != shape or array.shape[-1] < 2:
        raise ShapeError(
            f"{name} must have shape [{'S, ' if lead else ''}{shape[0] * shape[1]}, C] with at least two classes C for a grid of "
            f"{shape[1]} by {shape[0]} inputs, got {list(array.shape)}"
        )
    return array


def _margins(probabilities: Array) -> list[Array]:
    """Returns for each class its probability minus the largest other one; the boundary of the class is where it is zero.

    Two classes share one boundary, which is drawn once.
    """
    classes = range(probabilities.shape[-1] if probabilities.shape[-1] > 2 else 1)
    return [probabilities[..., c] - np.delete(probabilities, c, -1).max(-1) for c in classes]


def decision_map(
    x: Any,
    y: Any,
    probabilities: Any,
    *,
    samples: Any = None,
    points: Any = None,
    labels: Any = None,
    names: Any = None,
    max_samples: int = 30,
    ax: Any = None,
    title: str = "",
) -> Any:
    """Draws the plane of two inputs: shades show class and confidence, a thick line the decision, thin lines sampled decisions.

    Args:
        x: The values of the first input along the grid [n_x] (`decision_grid`).
        y: The values of the second input along the grid [n_y].
        probabilities: The predictive at the grid [n_y·n_x, C]: `predict(inputs).mean`.
        samples: The samples of the probabilities [S, n_y·n_x, C]: `predict(inputs, link="mc").samples`; each gives one
            boundary.
        points: The data to show [N, 2].
        labels: The classes of the points [N], told apart by marker and colour.
        names: The names of the classes.
        max_samples: The greatest number of boundaries to draw.
        ax: The axes to draw on. None makes a new figure.
        title: The title of the figure.

    Returns:
        The Axes that were drawn on.

    Raises:
        ShapeError, InputError: An argument does not fit the grid, or there are labels without points.

    >>> x, y, inputs = decision_grid((-1.0, -1.0), (1.0, 1.0), n=5)
    >>> p = torch.sigmoid(4 * inputs[:, :1])
    >>> decision_map(x, y, torch.cat([1 - p, p], -1)).get_ylabel()
    'second input'
    """
    across, up = as_array("x", x), as_array("y", y)
    shape = (len(up), len(across))
    mean = _on_grid("probabilities", probabilities, shape, 0)
    ax = axes(ax, height=3.0 if ax is None else None)
    winner = mean.argmax(-1)
    # The least confidence of C classes is 1/C: from there the shade grows to the full tone of the class.
    strength = (mean.max(-1) - 1 / mean.shape[-1]) / (1 - 1 / mean.shape[-1])
    colors = np.array([_rgb(color_of(c)) for c in range(mean.shape[-1])])
    picture = np.concatenate([colors[winner], 0.05 + 0.45 * strength[..., None]], -1)
    extent = (across[0], across[-1], up[0], up[-1])
    ax.imshow(picture, origin="lower", extent=extent, aspect="auto", interpolation="bilinear")
    if samples is not None:
        for sample in _on_grid("samples", samples, shape, 1)[:max_samples]:
            _boundaries(ax, across, up, sample, color=INK, linewidths=0.4, alpha=0.35)
    _boundaries(ax, across, up, mean, color=INK, linewidths=1.3, alpha=1.0)
    if points is not None:
        _points(ax, points, labels, names)
    elif labels is not None:
        raise InputError("labels were given without points to put them on")
    ax.set(xlim=(across[0], across[-1]), ylim=(up[0], up[-1]))
    return finish(ax, title=title, x="first input", y="second input", legend=points is not None and labels is not None)


def _rgb(color: str) -> tuple[float, ...]:
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


def _boundaries(ax: Any, x: Array, y: Array, probabilities: Array, **style: Any) -> None:
    for margin in _margins(probabilities):
        if margin.min() < 0 < margin.max():  # A class that never or always wins has no boundary.
            ax.contour(
                x, y, margin, levels=[0.0], colors=style["color"], linewidths=style["linewidths"], alpha=style["alpha"]
            )


def _points(ax: Any, points: Any, labels: Any, names: Any) -> None:
    places = as_array("points", points, dims=2)
    if places.shape[1] != 2:
        raise ShapeError(f"points must have shape [N, 2], got {list(places.shape)}")
    groups = np.zeros(len(places)) if labels is None else as_array("labels", labels)
    if len(groups) != len(places):
        raise ShapeError(f"labels must have one class per point, got {len(groups)} for {len(places)}")
    for c in np.unique(groups).astype(int):
        rows = groups == c
        ax.plot(
            places[rows, 0],
            places[rows, 1],
            _MARKERS[c % len(_MARKERS)],
            color=color_of(c) if labels is not None else INK,
            markersize=3.2,
            markeredgecolor="white",
            markeredgewidth=0.5,
            linestyle="none",
            label=legend_label(names[c]) if names is not None else f"class {c}",
        )


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
    """Draws the log evidence, or a validation score, over a hyperparameter, and marks the best value of each curve.

    Args:
        values: The values of the hyperparameter [N].
        evidence: The evidence at those values [N], or several such curves by name; more is better. NaN leaves a gap.
        x_label: The name of the hyperparameter.
        y_label: The name of what is drawn.
        log: Whether the axis of values is logarithmic; they must then be positive.
        ax: The axes to draw on. None makes a new figure.
        title: The title of the figure.

    Returns:
        The Axes that were drawn on.

    Raises:
        InputError, DataError, ShapeError: A value is not positive on a logarithmic axis, or lengths do not fit.

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
    for i, (name, numbers) in enumerate(curves.items()):
        heights = as_array(f"evidence {name}".strip(), numbers, finite=False)
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
    """Draws what training logged, one line per quantity.

    Args:
        history: For each name one number per step; the lengths may differ.
        steps: The place of every number [N]. None means 1, 2, … .
        x_label: The name of a step.
        y_label: The name of what is drawn.
        log: Whether the axis of heights is logarithmic.
        ax: The axes to draw on. None makes a new figure.
        title: The title of the figure.

    Returns:
        The Axes that were drawn on.

    Raises:
        InputError: There is no history, or there are fewer steps than numbers.

    >>> training_history({"train": [2.0, 1.0], "validation": [2.1, 1.4]}).get_xlabel()
    'epoch'
    """
    if not isinstance(history, Mapping) or not history:
        raise InputError("history must be a mapping: name -> one number per step")
    ax = axes(ax)
    for i, (name, numbers) in enumerate(history.items()):
        heights = as_array(name, numbers, finite=False)
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


def attack_curves(
    curves: Mapping[str, Any],
    *,
    quantity: str = "accuracy",
    strength: str = "strength of the attack",
    ax: Any = None,
    title: str = "",
) -> Any:
    """Draws one quantity along the strength of an attack, for one method or several.

    Args:
        curves: The columns "steps" and the quantity, as in `AttackCurve.to_dict` or an entry of `Results.attacks`, or
            several such curves by name.
        quantity: The quantity to draw: accuracy, entropy, kept or target.
        strength: The name of the steps, with their unit.
        ax: The axes to draw on. None makes a new figure.
        title: The title of the figure.

    Returns:
        The Axes that were drawn on.

    Raises:
        InputError, DataError, ShapeError: The quantity is unknown, or a curve lacks a column.

    >>> attack_curves({"steps": [0.0, 0.1], "accuracy": [0.9, 0.2]}).get_ylabel()
    'accuracy under attack'
    """
    checks.choice("quantity", quantity, ATTACK_QUANTITIES)
    columns = named_curves(curves, ("steps", quantity))
    ax = axes(ax)
    for i, (name, curve) in enumerate(columns.items()):
        ax.plot(
            curve["steps"],
            curve[quantity],
            color=color_of(i),
            linestyle=dash_of(i),
            linewidth=1.3,
            marker=_ATTACK_MARKERS[i % len(_ATTACK_MARKERS)],
            markersize=3.2,
            markeredgewidth=0,
            label=legend_label(name) or "_",
        )
    ax.set_ylim(bottom=0, top=None if quantity == "entropy" else 1.02)
    return finish(ax, title=title, x=strength, y=ATTACK_QUANTITIES[quantity], legend=any(columns))


def risk_coverage(
    curves: Mapping[str, Any],
    *,
    operating: float | None = None,
    loss: str = "error rate of the answers",
    percent: bool = True,
    ax: Any = None,
    title: str = "",
) -> Any:
    """Draws risk over coverage: the mean loss of the answered inputs when only the least uncertain share is answered.

    Args:
        curves: The columns "coverage" and "risk", as in `Results.curves["risk_coverage"]`, or several such curves by
            name.
        operating: A coverage in (0, 1] to mark on the first curve.
        loss: The name of the risk, which labels its axis.
        percent: Whether to write the risk in percent; False for a loss that is no share.
        ax: The axes to draw on. None makes a new figure.
        title: The title of the figure.

    Returns:
        The Axes that were drawn on.

    Raises:
        InputError, DataError, ShapeError: A curve lacks a column or does not fit, or the operating point lies outside
            (0, 1].

    >>> ax = risk_coverage({"coverage": [0.5, 1.0], "risk": [0.0, 0.1]}, operating=0.8)
    >>> ax.get_ylabel()
    'error rate of the answers'
    """
    if operating is not None:
        operating = checks.fraction("operating", operating, one=True, advice="Write a coverage of 80 % as 0.8")
    columns = named_curves(curves, ("coverage", "risk"))
    ax = axes(ax)
    top = 0.0
    for i, (name, curve) in enumerate(columns.items()):
        ax.plot(
            curve["coverage"],
            curve["risk"],
            color=color_of(i),
            linestyle=dash_of(i),
            linewidth=1.4,
            label=legend_label(name) or "_",
        )
        # The first few answers are too few for a mean, so they must not set the scale.
        top = max(top, float(curve["risk"][curve["coverage"] >= 0.1].max(initial=0.0)))
    if operating is not None:
        curve = next(iter(columns.values()))
        risk = float(np.interp(operating, curve["coverage"], curve["risk"]))
        ax.axvline(operating, color=INK, linewidth=0.6, linestyle=(0, (2, 2)))
        ax.plot([operating], [risk], "o", color=color_of(0), markersize=5, markeredgecolor="white", zorder=5)
    ax.set(xlim=(0, 1), ylim=(0, 1.12 * top if top > 0 else 1.0))
    for axis in (ax.xaxis, ax.yaxis) if percent else (ax.xaxis,):
        axis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    finish(ax, title=title, x="coverage: share of inputs answered", y=loss, legend=any(columns))
    if any(columns) and percent:
        ax.get_legend().set_loc("upper left")  # Error rates are low where coverage is, so this corner is free.
    return ax
