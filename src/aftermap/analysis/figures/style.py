"""One look for every figure: data in, Axes out, no global state.

Figures are made with `matplotlib.figure.Figure`, never with pyplot: nothing is registered, shown or left open,
and the user's rcParams are neither read for colours nor changed.
"""

from __future__ import annotations

from typing import Any

from aftermap.late import optional

__all__ = ["CATEGORIES", "COLUMN", "DIVERGING", "INK", "SEQUENTIAL", "axes", "finish", "save_svg"]

# Okabe and Ito's palette: told apart with any colour vision, and in grey.
CATEGORIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK = "#333333"
SEQUENTIAL = "viridis"
DIVERGING = "PuOr"
COLUMN = 3.5  # inches: the width of a journal's column


def axes(ax: Any = None, *, width: float = COLUMN, height: float | None = None, polar: bool = False) -> Any:
    """The Axes to draw on: the given one, or the only one of a new figure.

    Args:
        ax: a matplotlib Axes, or None for a new figure of its own.
        width: of the new figure, inches.
        height: of the new figure, inches; by default 0.72 of the width.
        polar: whether a new Axes is polar.

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


def finish(ax: Any, *, title: str = "", x: str = "", y: str = "", legend: bool = False) -> Any:
    """Labels, thin spines and small type, the same on every figure; returns the Axes."""
    ax.set_title(title, fontsize=9, color=INK, loc="left")
    ax.set_xlabel(x, fontsize=8, color=INK)
    ax.set_ylabel(y, fontsize=8, color=INK)
    ax.tick_params(labelsize=7, colors=INK, width=0.6, length=2.5)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom", "polar"))
        spine.set(linewidth=0.6, color=INK)
    if legend:
        ax.legend(fontsize=7, frameon=False, labelcolor=INK)
    return ax


def save_svg(figure: Any) -> str:
    """The figure as SVG text with real, selectable letters and the same bytes at every run.

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
