"""Figures of where the uncertainty sits: layers, filters, weights, classes, inputs, pixels (docs/mathematics/where.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aftermap.analysis.figures.style import CATEGORIES, COLUMN, DIVERGING, INK, SEQUENTIAL, as_array, axes, finish
from aftermap.analysis.figures.where_maps import (
    color_bar,
    filter_maps,
    legend_below,
    percent,
    saliency_maps,
    short_label,
    short_name,
    uncertain_inputs,
    weight_histograms,
)
from aftermap.analysis.weights import CONTRACTION_EDGES, SNR_EDGES
from aftermap.errors import InputError, ShapeError
from aftermap.lazy import optional

if TYPE_CHECKING:
    from aftermap.analysis.result import Where

__all__ = [
    "FIGURES",
    "class_matrix",
    "draw",
    "filter_maps",
    "layer_calibration",
    "layer_shares",
    "saliency_maps",
    "uncertain_inputs",
    "weight_histograms",
]


def layer_shares(
    names: Sequence[str],
    shares: Any,
    *,
    parameters: Any = None,
    ax: Any = None,
    title: str = "share of the predictive variance",
) -> Any:
    """Draws one bar per layer, the first on top: its share of the variance of the outputs.

    Args:
        names: The names of the layers, in the order of the network.
        shares: The shares [L], which add up to one.
        parameters: The share of all uncertain weights [L], drawn as a circle. None draws no circles.
        ax: The axes to draw on. None makes a new figure.
        title: The title above the figure.

    Returns:
        The Axes that were drawn on.

    >>> layer_shares(["0", "2"], [0.25, 0.75]).get_title(loc="left")
    'share of the predictive variance'
    """
    values = as_array("shares", shares)
    if len(names) != len(values):
        raise ShapeError(f"layer_shares got {len(names)} names, but {len(values)} shares")
    sizes = None if parameters is None else as_array("parameters", parameters)
    ax = axes(ax, height=max(1.4, 0.8 + 0.22 * len(values)))
    place = np.arange(len(values))
    ax.barh(place, values, 0.7, color=CATEGORIES[0], label="variance")
    if sizes is not None:
        ax.plot(sizes, place, "o", mfc="white", mec=INK, ms=4, mew=0.9, label="share of weights")
    for y, value in enumerate(values):
        ax.annotate(
            f"{value:.0%}" if value >= 0.095 else f"{value:.1%}",
            (value, y),
            # A number stands beside its bar, and beside a circle that lies there.
            xytext=(7 if sizes is not None and abs(value - sizes[y]) < 0.03 else 3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color=INK,
        )
    high = 1.18 * float(max(values.max(), 0.0 if sizes is None else sizes.max()))
    ax.set_xlim(0.0, high if high > 0 else 1.0)
    ax.set_yticks(place, [short_name(n) for n in names])
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter(percent)
    finish(ax, title=title)
    if sizes is not None:
        legend_below(ax, 18)
    return ax


def class_matrix(
    matrix: Any,
    labels: Sequence[str],
    *,
    ax: Any = None,
    title: str = "covariance of the outputs",
    x: str = "output",
    y: str = "output",
    signed: bool = True,
) -> Any:
    """Draws a K×K matrix as a heat map, with numbers where there is room.

    Args:
        matrix: The matrix [K, K]; NaN is left blank.
        labels: The K names of rows and columns.
        ax: The axes to draw on. None makes a new figure.
        title: The title above the figure.
        x: The name of what the columns are.
        y: The name of what the rows are.
        signed: Whether colours diverge at zero; otherwise they start at zero.

    Returns:
        The Axes that were drawn on.
    """
    values = as_array("matrix", matrix, dims=2, finite=False)
    if values.shape != (len(labels), len(labels)):
        raise ShapeError(f"class_matrix got {len(labels)} labels for a matrix of shape {list(values.shape)}")
    ax = axes(ax, height=COLUMN * 0.86)
    top = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    style = {"cmap": DIVERGING, "vmin": -top, "vmax": top} if signed else {"cmap": SEQUENTIAL, "vmin": 0.0, "vmax": top}
    picture = ax.imshow(values, interpolation="nearest", **style)
    step = max(1, len(labels) // 20)
    ticks = range(0, len(labels), step)
    words = [short_label(str(labels[i]), 12) for i in ticks]
    slanted = max(map(len, words)) > 3
    ax.set_xticks(ticks, words, rotation=45 if slanted else 0, ha="right" if slanted else "center")
    ax.set_yticks(ticks, words)
    finish(ax, title=title, x=x, y=y)
    if len(labels) <= 6:
        for i, j in np.ndindex(*values.shape):
            if np.isfinite(values[i, j]):
                dark = abs(values[i, j]) > 0.6 * top if signed else values[i, j] < 0.6 * top
                ax.text(
                    j, i, f"{values[i, j]:.2g}", ha="center", va="center", fontsize=6, color="white" if dark else INK
                )
    color_bar(picture, ax, pad=0.02, shrink=0.9)
    return ax


def layer_calibration(
    names: Sequence[str],
    measured: Any,
    errors: Any,
    linearised: Any,
    expected: Any,
    *,
    ax: Any = None,
    title: str = "rise of the training loss when one layer is drawn",
) -> Any:
    """Draws dots per layer: measured with two standard errors, linearised, and ½γ; they lie on one spot for a calibrated map.

    Args:
        names: The names of the layers.
        measured: The measured increases [L], in nats.
        errors: The standard errors of the measured increases [L].
        linearised: The increases [L] of a network that is linear in the layer.
        expected: The increases ½γ [L]; NaN where they are not known.
        ax: The axes to draw on. None makes a new figure.
        title: The title above the figure.

    Returns:
        The Axes that were drawn on.
    """
    values = as_array("measured", measured)
    ax = axes(ax, height=max(1.6, 0.9 + 0.3 * len(values)))
    place = np.arange(len(values))
    spread = 2 * np.nan_to_num(as_array("errors", errors, finite=False))
    ax.errorbar(
        values, place, xerr=np.minimum(spread, 0.999 * np.abs(values)) if (values > 0).all() else spread,
        fmt="o", color=CATEGORIES[0], ms=4, elinewidth=1.2, label="measured ± 2 s.e.",
    )  # fmt: skip
    ax.plot(
        as_array("linearised", linearised, finite=False),
        place,
        "s",
        mfc="none",
        mec=CATEGORIES[1],
        ms=6,
        label="linearised",
    )
    ax.plot(as_array("expected", expected, finite=False), place, "|", color=INK, ms=13, mew=1.6, label="½γ")
    if (values > 0).all():
        ax.set_xscale("log")
        ticker = optional("matplotlib.ticker", "plot", "figures")
        ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(ticker.NullFormatter())
    ax.set_ylim(len(values) - 0.5, -0.5)
    ax.set_yticks(place, [short_name(n) for n in names])
    finish(ax, title=title, x="nats, summed over the data")
    legend_below(ax, 32)
    return ax


# From a result of `where` to a Figure.


def _layers(where: Where, **options: Any) -> Any:
    total = sum(k.n_parameters for k in where.layers)
    return layer_shares(
        where.layer_names,
        where.own_shares,
        parameters=[k.n_parameters / total for k in where.layers],
        **options,
    ).figure


def _filters(where: Where, layer: str | None = None, **options: Any) -> Any:
    """Draws by default the first convolution, or without one the first dense layer."""
    if layer is None:
        kinds = {k.name: k.layer.kind for k in where.layers}
        layer = next((n for n, kind in kinds.items() if kind.startswith("Conv")), where.layer_names[0])
    maps = [m for m in where.weights(layer) if m.value.dim() >= 2]
    if not maps:
        raise InputError(f"layer {layer!r} has no weight of two or more dimensions, so there is no filter to draw")
    units = next((u for u in where[layer].weights.units if maps[0].name in u.parameters), None)
    contraction = None if units is None or maps[0].transposed else units.contraction
    options.setdefault("title", f"layer {layer}")
    return filter_maps(maps[0].value, maps[0].deviation, contraction=contraction, **options)


def _weights(where: Where, **options: Any) -> Any:
    contraction = {k.name: k.weights.contraction_counts for k in where.layers}
    snr = {k.name: k.weights.snr_counts for k in where.layers}
    return weight_histograms(contraction, snr, CONTRACTION_EDGES, SNR_EDGES, **options)


def _classes(where: Where, **options: Any) -> Any:
    if where.classes.covariance is None:
        raise InputError(f"covariances of {len(where.classes.labels)} outputs were not taken: there are too many")
    return class_matrix(where.classes.covariance, where.classes.labels, **options).figure


def _pairs(where: Where, **options: Any) -> Any:
    if where.classes.pairs is None:
        raise InputError("there are no pairs of true and predicted classes: this needs labels, one per input")
    options = {"title": "epistemic uncertainty (nats)", "x": "predicted", "y": "true", "signed": False, **options}
    names = where.classes.labels
    names = names if len(names) == len(where.classes.pairs) else ("0", "1")
    return class_matrix(where.classes.pairs, names, **options).figure


def _captions(where: Where) -> list[str]:
    """Returns true class → predicted class, or the answer ± its deviation, for each input."""
    inputs, names = where.inputs, where.classes.labels
    predictions = inputs.predictions
    known = [t.reshape(-1)[0].item() if getattr(t, "numel", lambda: 0)() == 1 else None for t in inputs.targets]
    if predictions.kind == "classification" and predictions.mean.dim() == 2:
        answers = [names[k] for k in predictions.labels.tolist()]
        return [a if t is None else _arrow(names[int(t)], a) for t, a in zip(known, answers, strict=True)]
    if predictions.mean.dim() == 2 and predictions.mean.shape[1] == 1:
        pairs = zip(predictions.mean, predictions.total, strict=True)
        return [f"{float(m):.2g} ± {float(v) ** 0.5:.1g}" for m, v in pairs]
    return [f"number {i}" for i in inputs.indices.tolist()]


def _arrow(true: str, answer: str) -> str:
    """Returns both on one line where they fit above a small picture."""
    gap = " " if len(true) + len(answer) <= 9 else "\n"
    return f"{short_label(true, 13)}{gap}→ {short_label(answer, 13)}"


def _inputs(where: Where, **options: Any) -> Any:
    options.setdefault("unit", "nats" if where.kind in ("classification", "binary") else "(variance)")
    inputs = where.inputs
    return uncertain_inputs(inputs.inputs, inputs.epistemic, inputs.aleatoric, _captions(where), **options)


def _saliency(where: Where, **options: Any) -> Any:
    if where.inputs.saliency is None:
        raise InputError("no saliency maps were made; ask for them: where(predictor, loader, saliency=True)")
    return saliency_maps(where.inputs.inputs, where.inputs.saliency, _captions(where), **options)


def _calibration(where: Where, **options: Any) -> Any:
    columns = where.table("calibration")
    names = ("layer", "measured", "standard error", "linearised", "½γ")
    return layer_calibration(*(columns[n] for n in names), **options).figure


_DRAWN: dict[str, Callable[..., Any]] = {
    "layers": _layers,
    "filters": _filters,
    "weights": _weights,
    "classes": _classes,
    "pairs": _pairs,
    "inputs": _inputs,
    "saliency": _saliency,
    "calibration": _calibration,
}
FIGURES = tuple(_DRAWN)


def draw(name: str, where: Where, **options: Any) -> Any:
    """Draws one of `FIGURES` from a result of `where` and returns the matplotlib Figure.

    Args:
        name: Which of `FIGURES` is drawn.
        where: The result of `where`.
        options: Further arguments of the function that draws this figure.
    """
    return _DRAWN[name](where, **options)
