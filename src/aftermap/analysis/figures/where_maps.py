"""Figures of weights and inputs: filters beside their uncertainty, and where in the most uncertain inputs it sits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aftermap.analysis.figures.style import (
    CATEGORIES,
    COLUMN,
    DIVERGING,
    INK,
    SEQUENTIAL,
    Array,
    as_array,
    color_of,
    dash_of,
    finish,
)
from aftermap.errors import InputError, ShapeError
from aftermap.lazy import optional

__all__ = [
    "bare",
    "color_bar",
    "filter_maps",
    "legend_below",
    "new_figure",
    "percent",
    "saliency_maps",
    "short_label",
    "short_name",
    "uncertain_inputs",
    "weight_histograms",
]

_LINES = 6  # More layers than this are drawn as rows of a picture instead of lines.
_EPISTEMIC, _ALEATORIC = CATEGORIES[0], CATEGORIES[4]


def new_figure(width: float, height: float) -> Any:
    """Returns a figure that can hold several Axes, with its size in inches."""
    return optional("matplotlib.figure", "plot", "figures").Figure(figsize=(width, height), layout="constrained")


def short_name(name: str, limit: int = 22) -> str:
    """Returns a path with shorter words; numbers are kept, since they tell layers apart.

    >>> short_name("encoder.block.11.attention.projection")
    'enco.bloc.11.atte.proj'
    """
    parts = name.split(".")
    for letters in range(8, 0, -1):
        if len(name) <= limit:
            break
        name = ".".join(p if p.isdigit() else p[:letters] for p in parts)
    return name if len(name) <= limit else "…" + name[-(limit - 1) :]


def short_label(label: str, limit: int) -> str:
    """Returns the name of a class, cut where it is long.

    >>> short_label("ankle boot", 10), short_label("lace-up boots", 10)
    ('ankle boot', 'lace-up b…')
    """
    return label if len(label) <= limit else f"{label[: limit - 1].rstrip()}…"


def percent(value: float, _: object = None) -> str:
    """Returns a share as a tick label.

    >>> percent(0.025), percent(0.4)
    ('2.5%', '40%')
    """
    return f"{100 * value:.3g}%"


def legend_below(ax: Any, points: float) -> None:
    """Puts a legend below the Axes, ``points`` under its edge: below ticks and labels, whatever the height."""
    transforms = optional("matplotlib.transforms", "plot", "figures")
    shift = transforms.ScaledTranslation(0.0, -points / 72, ax.figure.dpi_scale_trans)
    ax.legend(
        fontsize=7,
        frameon=False,
        labelcolor=INK,
        loc="upper center",
        bbox_to_anchor=(0.45, 0.0),
        bbox_transform=ax.transAxes + shift,
        ncols=3,
        borderpad=0.0,
        columnspacing=1.2,
        handletextpad=0.5,
    )


def bare(ax: Any) -> None:
    """Gives the Axes of a picture a thin frame and no ticks."""
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set(linewidth=0.4, color=INK)


def color_bar(picture: Any, ax: Any, label: str = "", **options: Any) -> Any:
    """Puts a small colour bar beside one Axes, or a list of them."""
    first = ax[0] if isinstance(ax, list) else ax
    bar = first.figure.colorbar(picture, ax=ax, **options)
    bar.ax.tick_params(labelsize=6, colors=INK, width=0.5, length=2)
    bar.outline.set_visible(False)
    if label:
        bar.set_label(label, fontsize=7, color=INK)
    return bar


def filter_maps(
    weight: Any, deviation: Any, *, contraction: Any = None, limit: int = 8, channel: int = 0, title: str = ""
) -> Any:
    """Draws the weights of filters, and below them the standard deviations of the same weights.

    Args:
        weight: The weights [O, I, kh, kw] of a convolution, or [O, I] of a dense layer, which is drawn as one picture.
        deviation: The standard deviations √v, of the same shape.
        contraction: The contraction of each filter [O], written below it. None writes nothing.
        limit: The number of filters shown, from the first on.
        channel: The input channel that is shown.
        title: The title above the figure.

    Returns:
        The matplotlib Figure.

    Raises:
        ShapeError: The shapes do not fit together.
        InputError: The channel does not exist.
    """
    weights, deviations = (torch.as_tensor(v).detach().cpu().double() for v in (weight, deviation))
    if weights.shape != deviations.shape or weights.dim() not in (2, 3, 4):
        raise ShapeError(
            f"filter_maps draws weights [O, I], [O, I, k] or [O, I, kh, kw] with deviations of the same shape, got "
            f"{list(weights.shape)} and {list(deviations.shape)}"
        )
    if weights.dim() == 2:
        return _matrix_maps(weights.numpy(), deviations.numpy(), title)
    if not 0 <= channel < weights.shape[1]:
        raise InputError(f"channel={channel} does not exist; the filters have {weights.shape[1]} input channels")
    shown = min(limit, len(weights))
    rows = [v[:shown, channel].reshape(shown, -1, v.shape[-1]).numpy() for v in (weights, deviations)]
    tall = rows[0].shape[1] / rows[0].shape[2]
    width = max(COLUMN, 0.5 * shown + 0.9)
    figure = new_figure(width, 0.85 + 2 * max(0.35, min(1.2, (width - 0.9) / shown * tall)) + 0.15)
    grid = figure.subplots(2, shown, squeeze=False)
    top = float(np.abs(rows[0]).max()) or 1.0
    styles = (
        {"cmap": DIVERGING, "vmin": -top, "vmax": top},
        {"cmap": SEQUENTIAL, "vmin": rows[1].min(), "vmax": rows[1].max()},
    )
    for line, (values, style, label) in enumerate(zip(rows, styles, ("weight", "posterior sd"), strict=True)):
        for column in range(shown):
            ax = grid[line, column]
            picture = ax.imshow(values[column], interpolation="nearest", **style)
            bare(ax)
            if line == 0:
                ax.set_title(str(column), fontsize=7, color=INK, pad=2)
            elif contraction is not None:
                ax.set_xlabel(f"{_positive(float(contraction[column])):.2f}", fontsize=7, color=INK, labelpad=2)
        color_bar(picture, list(grid[line]), label, shrink=0.9, pad=0.01, aspect=12)
    words = [title] if title else []
    words += [f"{shown} of {len(weights)} filters"] if shown < len(weights) else []
    words += [f"input channel {channel} of {weights.shape[1]}"] if weights.shape[1] > 1 else []
    figure.suptitle(", ".join(words), fontsize=9, color=INK, x=0.01, ha="left")
    if contraction is not None:
        figure.supxlabel("contraction of the filter (0: prior, 1: data)", fontsize=7, color=INK)
    return figure


def _positive(value: float) -> float:
    """Returns the value without the minus sign of a rounding error."""
    return value if abs(value) >= 0.005 else 0.0


def _matrix_maps(weights: Array, deviations: Array, title: str) -> Any:
    """Draws a dense layer, with outputs down and inputs across."""
    wide = weights.shape[1] > 2 * weights.shape[0]
    figure = new_figure(COLUMN, 3.0 if wide else 2.3)
    grid = figure.subplots(2, 1, sharex=True) if wide else figure.subplots(1, 2, sharey=True)
    top = float(np.abs(weights).max()) or 1.0
    styles: tuple[dict[str, Any], ...] = ({"cmap": DIVERGING, "vmin": -top, "vmax": top}, {"cmap": SEQUENTIAL})
    for ax, values, style, label in zip(grid, (weights, deviations), styles, ("weight", "posterior sd"), strict=True):
        picture = ax.imshow(values, aspect="auto", interpolation="nearest", **style)
        for axis in (ax.xaxis, ax.yaxis):
            axis.get_major_locator().set_params(integer=True)
        finish(
            ax, title=label, x="" if wide and ax is grid[0] else "input", y="output" if wide or ax is grid[0] else ""
        )
        color_bar(picture, ax, pad=0.02, shrink=0.95, location="right" if wide else "bottom").ax.locator_params(nbins=4)
    figure.suptitle(title, fontsize=9, color=INK, x=0.01, ha="left")
    return figure


def weight_histograms(
    contraction: Mapping[str, Sequence[int]],
    log_snr: Mapping[str, Sequence[int]],
    contraction_edges: Sequence[float],
    snr_edges: Sequence[float],
    *,
    title: str = "",
) -> Any:
    """Draws how the weights of each layer are spread: by contraction, and by signal-to-noise ratio.

    Args:
        contraction: For each layer the counts between ``contraction_edges``.
        log_snr: For each layer the counts between ``snr_edges``, of log₁₀ |w|/√v.
        contraction_edges: The edges of the bins, one more than counts.
        snr_edges: The edges of the bins, one more than counts.
        title: The title above the figure.

    Returns:
        The Figure, with lines for few layers and rows of a picture for many.
    """
    names = list(contraction)
    few = len(names) <= _LINES
    figure = new_figure(2 * COLUMN, 2.3 if few else max(2.0, 0.9 + 0.14 * len(names)))
    grid = figure.subplots(1, 2)
    words = ("contraction (0: prior, 1: data)", "signal-to-noise ratio |w| / sd")
    for ax, counts, edges, label in zip(
        grid, (contraction, log_snr), (contraction_edges, snr_edges), words, strict=True
    ):
        table = np.stack([as_array("counts", counts[n]) for n in names])
        share = table / np.maximum(table.sum(1, keepdims=True), 1)
        bins = as_array("edges", edges)
        if few:
            for i, name in enumerate(names):
                ax.stairs(
                    share[i], bins, color=color_of(i), linestyle=dash_of(i), linewidth=1.2, label=short_name(name)
                )
            ax.set_ylim(0, None)
            ax.yaxis.set_major_formatter(percent)
        else:
            extent = (float(bins[0]), float(bins[-1]), len(names) - 0.5, -0.5)
            picture = ax.imshow(share, aspect="auto", interpolation="nearest", cmap=SEQUENTIAL, extent=extent)
            ax.set_yticks(range(len(names)), [short_name(n, 16) for n in names] if ax is grid[0] else [])
        finish(ax, x=label, y="share of the weights" if few and ax is grid[0] else "")
        if ax is grid[1]:
            ticks = [t for t in range(-3, 4) if bins[0] <= t <= bins[-1]]
            ax.set_xticks(ticks, [f"{10.0**t:g}" for t in ticks])
            ax.axvline(0.0, color=INK if few else "white", linewidth=0.7, linestyle=(0, (2, 2)))
    if few:
        grid[1].legend(fontsize=7, frameon=False, labelcolor=INK, title="layer", title_fontsize=7)
    else:
        color_bar(picture, list(grid), "share of the layer's weights", pad=0.01, format=percent)
    if title:
        figure.suptitle(title, fontsize=9, color=INK, x=0.01, ha="left")
    return figure


def _picture(values: Tensor) -> Array | None:
    """Returns one input [1, C, H, W] or [1, H, W] as [H, W] or [H, W, 3] in 0 to 1, or None if it is no picture."""
    value = values.detach().cpu().double()[0]
    if value.dim() == 3 and value.shape[0] in (1, 3):
        value = value[0] if value.shape[0] == 1 else value.permute(1, 2, 0)
    elif value.dim() != 2 or min(value.shape) < 4:
        return None
    low, high = float(value.min()), float(value.max())
    return ((value - low) / (high - low if high > low else 1.0)).numpy()


def _draw_input(ax: Any, value: Any) -> None:
    picture = _picture(value) if isinstance(value, Tensor) else None
    if picture is not None:
        ax.imshow(picture, cmap="gray_r" if picture.ndim == 2 else None, interpolation="nearest", vmin=0.0, vmax=1.0)
        bare(ax)
    elif isinstance(value, Tensor) and value.is_floating_point():
        flat = value.detach().cpu().double().flatten().numpy()
        if len(flat) <= 40:
            ax.barh(np.arange(len(flat)), flat, color=INK, height=0.7)
            ax.axvline(0.0, color=INK, linewidth=0.5)
            ax.invert_yaxis()
        else:
            ax.plot(flat, color=INK, linewidth=0.7)
        ax.tick_params(labelsize=5, colors=INK, width=0.4, length=1.5)
        for side, spine in ax.spines.items():
            spine.set(linewidth=0.4, color=INK, visible=side in ("left", "bottom"))
    else:
        bare(ax)
        ax.text(0.5, 0.5, "no picture", ha="center", va="center", fontsize=6, color=INK, transform=ax.transAxes)


def uncertain_inputs(
    inputs: Sequence[Any],
    epistemic: Any,
    aleatoric: Any,
    captions: Sequence[str],
    *,
    columns: int = 8,
    unit: str = "nats",
    title: str = "most uncertain inputs",
) -> Any:
    """Draws inputs in a grid; below each stands what was expected and answered, and its uncertainty in two parts.

    Args:
        inputs: Batches of one: pictures [1, C, H, W] or [1, H, W], or vectors [1, D].
        epistemic: The epistemic uncertainties [T].
        aleatoric: The aleatoric uncertainties [T].
        captions: The T short lines to write below the inputs.
        columns: The number of columns of the grid.
        unit: The unit of the uncertainty.
        title: The title above the figure.

    Returns:
        The matplotlib Figure.
    """
    model, data = as_array("epistemic", epistemic), as_array("aleatoric", aleatoric)
    if not len(inputs) == len(model) == len(data) == len(captions):
        raise ShapeError(
            f"uncertain_inputs got {len(inputs)} inputs, but {len(captions)} captions and {len(model)} numbers"
        )
    columns = min(columns, len(inputs))
    rows = -(-len(inputs) // columns)
    width = max(COLUMN, 0.86 * columns)
    lines = 1 + max(c.count("\n") for c in captions)
    figure = new_figure(width, 0.55 + rows * (width / columns + 0.2 + 0.12 * lines))
    grid = figure.subplots(2 * rows, columns, squeeze=False, gridspec_kw={"height_ratios": [8, 1] * rows})
    top = float((model + data).max()) or 1.0
    for i in range(rows * columns):
        upper, lower = grid[2 * (i // columns), i % columns], grid[2 * (i // columns) + 1, i % columns]
        lower.axis("off")
        if i >= len(inputs):
            upper.axis("off")
            continue
        _draw_input(upper, inputs[i])
        upper.set_title(captions[i], fontsize=7, color=INK, pad=2)
        lower.set_xlim(0, top)
        lower.set_ylim(-0.5, 0.5)
        lower.barh(0, model[i], 1.0, color=_EPISTEMIC)
        lower.barh(0, data[i], 1.0, left=model[i], color=_ALEATORIC)
    handles = [
        optional("matplotlib.patches", "plot", "figures").Patch(color=color, label=label)
        for color, label in ((_EPISTEMIC, "epistemic"), (_ALEATORIC, "aleatoric"))
    ]
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=2,
        fontsize=7,
        frameon=False,
        labelcolor=INK,
        title=f"full width: {top:.2g} {unit}",
        title_fontsize=7,
        alignment="left",
    )
    figure.suptitle(title, fontsize=9, color=INK, x=0.01, ha="left")
    return figure


def saliency_maps(
    inputs: Sequence[Any], gradients: Any, captions: Sequence[str], *, columns: int = 8, title: str = ""
) -> Any:
    """Draws inputs, and below each how strongly its epistemic uncertainty hangs on every pixel or feature.

    Args:
        inputs: The inputs, as batches of one.
        gradients: The gradients, of the same shapes [T, ...]; pictures show their size (summed over colours), vectors
            their sign too.
        captions: The T short lines to write below the inputs.
        columns: The number of columns of the grid.
        title: The title above the figure; "" means a default.

    Returns:
        The matplotlib Figure.
    """
    slopes = torch.as_tensor(gradients).detach().cpu().double()
    if not len(inputs) == len(slopes) == len(captions):
        raise ShapeError(f"saliency_maps got {len(inputs)} inputs, but {len(captions)} captions and {len(slopes)} maps")
    columns = min(columns, len(inputs))
    rows = -(-len(inputs) // columns)
    width = max(COLUMN, 0.86 * columns)
    lines = 1 + max(c.count("\n") for c in captions)
    figure = new_figure(width, 0.45 + rows * (2 * width / columns + 0.08 + 0.12 * lines))
    grid = figure.subplots(2 * rows, columns, squeeze=False)
    for i in range(rows * columns):
        upper, lower = grid[2 * (i // columns), i % columns], grid[2 * (i // columns) + 1, i % columns]
        if i >= len(inputs):
            upper.axis("off")
            lower.axis("off")
            continue
        _draw_input(upper, inputs[i])
        upper.set_title(captions[i], fontsize=7, color=INK, pad=2)
        if isinstance(inputs[i], Tensor) and _picture(inputs[i]) is not None:
            size = slopes[i].abs()
            size = size.sum(0) if size.dim() == 3 else size
            lower.imshow(size.numpy(), cmap=SEQUENTIAL, interpolation="nearest", vmin=0.0)
            bare(lower)
        else:
            _draw_input(lower, slopes[i][None])
    default = "input, and below it the gradient of its epistemic uncertainty"
    figure.suptitle(title or default, fontsize=9 if columns > 4 else 7, color=INK, x=0.01, ha="left")
    return figure
