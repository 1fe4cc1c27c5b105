"""One look for every figure: data in, Axes out, no global state.

Figures are made with `matplotlib.figure.Figure`, never with pyplot: nothing is registered, shown or left open,
and the user's rcParams are neither read for colours nor changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aftermap.errors import DataError, InputError, ShapeError
from aftermap.lazy import optional

__all__ = [
    "CATEGORIES",
    "COLUMN",
    "DIVERGING",
    "INK",
    "SEQUENTIAL",
    "Array",
    "as_array",
    "axes",
    "color_of",
    "dash_of",
    "finish",
    "legend_label",
    "named_curves",
    "save_svg",
]

# In Okabe and Ito's palette colours are told apart with any colour vision, and in grey.
CATEGORIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK = "#333333"
SEQUENTIAL = "viridis"
DIVERGING = "PuOr"
COLUMN = 3.5  # The width of a journal's column, in inches.
Array = npt.NDArray[np.float64]
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.5, 1.2, 1.5)))


def axes(ax: Any = None, *, width: float = COLUMN, height: float | None = None, polar: bool = False) -> Any:
    """Returns the Axes to draw on: the given one, or the only one of a new figure.

    Args:
        ax: A matplotlib Axes, or None for a new figure of its own.
        width: The width of the new figure, in inches.
        height: The height of the new figure, in inches; by default 0.72 of the width.
        polar: Whether a new Axes is polar.

    Returns:
        The Axes; its figure is `ax.figure`.

    >>> float(axes(width=4.0).figure.get_figwidth())
    4.0
    """
    if ax is None:
        figure = optional("matplotlib.figure", "plot", "figures").Figure(
            figsize=(width, 0.72 * width if height is None else height), layout="constrained"
        )
        ax = figure.add_subplot(projection="polar" if polar else None)
    return ax


def finish(ax: Any, *, title: str = "", x: str = "", y: str = "", legend: bool | str = False) -> Any:
    """Gives an Axes labels, thin spines and small type, the same on every figure, and returns it; `legend` may say where, as matplotlib does."""
    ax.set_title(title, fontsize=9, color=INK, loc="left")
    ax.set_xlabel(x, fontsize=8, color=INK)
    ax.set_ylabel(y, fontsize=8, color=INK)
    ax.tick_params(labelsize=7, colors=INK, width=0.6, length=2.5)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom", "polar"))
        spine.set(linewidth=0.6, color=INK)
    if legend:
        ax.legend(loc=legend if isinstance(legend, str) else "best", fontsize=7, frameon=False, labelcolor=INK)
    return ax


def save_svg(figure: Any) -> str:
    """Returns the figure as SVG text with real, selectable letters and the same bytes at every run.

    >>> save_svg(axes().figure).lstrip().startswith("<svg")
    True
    """
    from io import StringIO

    text = StringIO()
    matplotlib = optional("matplotlib", "plot", "figures")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "aftermap"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    content = text.getvalue()
    return content[content.index("<svg") :]


def as_array(name: str, values: Any, *, dims: int = 1, finite: bool = True) -> Array:
    """Returns the numbers of a figure as float64: a tensor, an array or a list; None, which JSON writes for NaN, becomes NaN.

    Args:
        name: The name of the argument, for messages.
        values: The values that were given.
        dims: The number of dimensions that the values must have.
        finite: Whether to refuse NaN and infinity.

    Raises:
        DataError: There are no values, they are text, or a number is not finite.
        ShapeError: The values have another number of dimensions.

    >>> as_array("risk", torch.ones(2))
    array([1., 1.])
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double().numpy()
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} must hold numbers: {error}") from error
    if array.ndim != dims:
        raise ShapeError(f"{name} must have {dims} dimension(s), got shape {list(array.shape)}")
    if array.size == 0:
        raise DataError(f"{name} is empty; a figure needs at least one number")
    if finite and not bool(np.isfinite(array).all()):
        raise DataError(f"{name} holds {int((~np.isfinite(array)).sum())} numbers that are not finite; leave them out")
    return array


def named_curves(
    curves: Mapping[str, Any], columns: Sequence[str], *, finite: bool = True
) -> dict[str, dict[str, Array]]:
    """Returns one curve, or several by name, each with the wanted columns of one length.

    Args:
        curves: The columns of one curve by name, or several such curves by name.
        columns: The columns that each curve must have.
        finite: Whether to refuse NaN and infinity.

    Returns:
        For each name the arrays of its columns; a single curve is called "".

    Raises:
        InputError: There is no curve, or a column is missing.
        ShapeError: The columns have different lengths.

    >>> list(named_curves({"coverage": [0.5, 1.0], "risk": [0.0, 0.1]}, ("coverage", "risk")))
    ['']
    """
    if not isinstance(curves, Mapping) or not curves:
        raise InputError(f"a figure needs a mapping with the columns {', '.join(columns)}, or several of them by name")
    several = {"": curves} if all(c in curves for c in columns) else curves
    arrays: dict[str, dict[str, Array]] = {}
    for name, curve in several.items():
        missing = [c for c in columns if not isinstance(curve, Mapping) or c not in curve]
        if missing:
            raise InputError(f"the curve {name!r} lacks {', '.join(missing)}; it needs {', '.join(columns)}")
        arrays[name] = {c: as_array(f"{name} {c}".strip(), curve[c], finite=finite) for c in columns}
        lengths = {c: len(v) for c, v in arrays[name].items()}
        if len(set(lengths.values())) > 1:
            raise ShapeError(f"the columns of the curve {name!r} must have one length, got {lengths}")
    return arrays


def color_of(index: int) -> str:
    """Returns the colour of the index-th curve."""
    return CATEGORIES[index % len(CATEGORIES)]


def dash_of(index: int) -> Any:
    """Returns the dash pattern of the index-th curve, so that curves are told apart without colour, too."""
    return _DASHES[index % len(_DASHES)]


def legend_label(name: object) -> str:
    r"""Returns a user's name as a legend shows it: no dollar starts a formula, and no underscore hides the entry.

    >>> legend_label("$x"), legend_label("_x") == "_x"
    ('\\$x', False)
    """
    text = str(name).replace("$", r"\$")
    return f"\u2009{text}" if text.startswith("_") else text
