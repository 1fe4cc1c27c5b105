"""Two inputs, some classes: where the network decides, and how far samples of its weights disagree about it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from aftermap.analysis.figures.columns import Array, as_array, color_of, legend_label
from aftermap.analysis.figures.style import INK, axes, finish
from aftermap.errors import InputError, ShapeError

__all__ = ["decision_grid", "decision_map"]

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def decision_grid(
    low: tuple[float, float], high: tuple[float, float], n: int = 100
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A regular grid of inputs: its two axes [n] and the inputs [n·n, 2], row by row from the bottom.

    >>> x, y, inputs = decision_grid((0.0, 0.0), (1.0, 2.0), n=3)
    >>> inputs.shape, inputs[1]
    (torch.Size([9, 2]), tensor([0.5000, 0.0000]))
    """
    x, y = (torch.linspace(a, b, n) for a, b in zip(low, high, strict=True))
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    return x, y, torch.stack([columns.reshape(-1), rows.reshape(-1)], -1)


def _on_grid(name: str, values: Any, shape: tuple[int, int], lead: int) -> Array:
    """[..., n_y·n_x, C] or [..., n_y, n_x, C] -> [..., n_y, n_x, C], with `lead` leading dimensions."""
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
    """Per class its probability minus the largest other one: the boundary of the class is where it is zero.

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
    """The plane of two inputs: shade = class and confidence, thick line = the decision, thin lines = sampled decisions.

    Args:
        x: first input along the grid [n_x] (`decision_grid`).
        y: second input along the grid [n_y].
        probabilities: predictive at the grid [n_y·n_x, C]: `predict(inputs).mean`.
        samples: of the probabilities [S, n_y·n_x, C]: `predict(inputs, link="mc").samples`; one boundary each.
        points: data to show [N, 2].
        labels: their classes [N], told apart by marker and colour.
        names: of the classes.
        max_samples: boundaries drawn at most.
        ax: to draw on; None: a new figure.
        title: of the figure.

    Returns:
        The Axes.

    Raises:
        ShapeError, InputError: what does not fit the grid, or labels without points.

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
        if margin.min() < 0 < margin.max():  # a class that never or always wins has no boundary
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
