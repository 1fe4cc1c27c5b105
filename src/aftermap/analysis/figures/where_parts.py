"""What the figures of `where` share: a figure of several Axes, short names, pictures without ticks."""

from __future__ import annotations

from typing import Any

from aftermap.analysis.figures.style import INK
from aftermap.late import optional

__all__ = ["bare", "color_bar", "legend_below", "new_figure", "percent", "short_name"]


def new_figure(width: float, height: float) -> Any:
    """A figure that holds several Axes; inches."""
    return optional("matplotlib.figure", "plot", "figures").Figure(figsize=(width, height), layout="constrained")


def short_name(name: str, limit: int = 22) -> str:
    """A path with shorter words, numbers kept: they tell layers apart.

    >>> short_name("encoder.block.11.attention.projection")
    'enco.bloc.11.atte.proj'
    """
    parts = name.split(".")
    for letters in range(8, 0, -1):
        if len(name) <= limit:
            break
        name = ".".join(p if p.isdigit() else p[:letters] for p in parts)
    return name if len(name) <= limit else "…" + name[-(limit - 1) :]


def percent(value: float, _: object = None) -> str:
    """A share as a tick label.

    >>> percent(0.025), percent(0.4)
    ('2.5%', '40%')
    """
    return f"{100 * value:.3g}%"


def legend_below(ax: Any, points: float, columns: int = 3) -> None:
    """A legend below the Axes, ``points`` under its edge: below ticks and labels, whatever the height."""
    transforms = optional("matplotlib.transforms", "plot", "figures")
    shift = transforms.ScaledTranslation(0.0, -points / 72, ax.figure.dpi_scale_trans)
    ax.legend(
        fontsize=7,
        frameon=False,
        labelcolor=INK,
        loc="upper center",
        bbox_to_anchor=(0.45, 0.0),
        bbox_transform=ax.transAxes + shift,
        ncols=columns,
        borderpad=0.0,
        columnspacing=1.2,
        handletextpad=0.5,
    )


def bare(ax: Any) -> None:
    """A picture: a thin frame, no ticks."""
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set(linewidth=0.4, color=INK)


def color_bar(picture: Any, ax: Any, label: str = "", **options: Any) -> Any:
    """A small colour bar beside one Axes, or a list of them."""
    first = ax[0] if isinstance(ax, list) else ax
    bar = first.figure.colorbar(picture, ax=ax, **options)
    bar.ax.tick_params(labelsize=6, colors=INK, width=0.5, length=2)
    bar.outline.set_visible(False)
    if label:
        bar.set_label(label, fontsize=7, color=INK)
    return bar
