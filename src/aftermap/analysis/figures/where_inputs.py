"""Figures of inputs: the most uncertain ones, and where in them it sits (MATH W6, W7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aftermap.analysis.figures.columns import Array, as_array
from aftermap.analysis.figures.style import CATEGORIES, COLUMN, INK, SEQUENTIAL
from aftermap.analysis.figures.where_parts import bare, new_figure
from aftermap.errors import ShapeError
from aftermap.late import optional

__all__ = ["saliency_maps", "uncertain_inputs"]

_EPISTEMIC, _ALEATORIC = CATEGORIES[0], CATEGORIES[4]


def _picture(values: Tensor) -> Array | None:
    """[1, C, H, W] or [1, H, W] of one input as [H, W] or [H, W, 3] in 0 to 1; None if it is no picture."""
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
    """Inputs in a grid; below each what was expected and answered, and its uncertainty in two parts.

    Args:
        inputs: batches of one: pictures [1, C, H, W] or [1, H, W], or vectors [1, D].
        epistemic: [T].
        aleatoric: [T].
        captions: T short lines.
        columns: of the grid.
        unit: of the uncertainty.
        title: above.

    Returns:
        The Figure.
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
    """Inputs, and below each how strongly its epistemic uncertainty hangs on every pixel or feature.

    Args:
        inputs: batches of one.
        gradients: of the same shapes [T, ...]; pictures show their size (summed over colours), vectors their sign too.
        captions: T short lines.
        columns: of the grid.
        title: above; "" for a default.

    Returns:
        The Figure.
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
