"""Figures of weights: filters beside their uncertainty, and how the weights of layers are spread (MATH W1, W2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from aftermap.analysis.figures.columns import Array, as_array, color_of, dash_of
from aftermap.analysis.figures.style import COLUMN, DIVERGING, INK, SEQUENTIAL, finish
from aftermap.analysis.figures.where_parts import bare, color_bar, new_figure, percent, short_name
from aftermap.errors import InputError, ShapeError

__all__ = ["filter_maps", "weight_histograms"]

_LINES = 6  # more layers than this are drawn as rows of a picture instead of lines


def filter_maps(
    weight: Any, deviation: Any, *, contraction: Any = None, limit: int = 8, channel: int = 0, title: str = ""
) -> Any:
    """The weights of filters, and below them the standard deviations of the same weights.

    Args:
        weight: [O, I, kh, kw] of a convolution, or [O, I] of a dense layer, which is drawn as one picture.
        deviation: √v, of the same shape.
        contraction: by filter [O], written below it; None: none.
        limit: filters shown; the first.
        channel: the input channel shown.
        title: above.

    Returns:
        The Figure.

    Raises:
        ShapeError: shapes that do not fit.
        InputError: a channel that does not exist.
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
    """Without the minus sign of a rounding error."""
    return value if abs(value) >= 0.005 else 0.0


def _matrix_maps(weights: Array, deviations: Array, title: str) -> Any:
    """A dense layer: outputs down, inputs across."""
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
    """How the weights of each layer are spread: by contraction, and by signal-to-noise ratio.

    Args:
        contraction: layer -> counts between ``contraction_edges``.
        log_snr: layer -> counts between ``snr_edges``, of log₁₀ |w|/√v.
        contraction_edges: one more than counts.
        snr_edges: one more than counts.
        title: above.

    Returns:
        The Figure: lines for few layers, rows of a picture for many.
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
