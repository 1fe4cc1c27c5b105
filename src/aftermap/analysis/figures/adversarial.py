"""What an attack does as it grows stronger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aftermap.analysis.figures.columns import color_of, dash_of, legend_label, named_curves
from aftermap.analysis.figures.style import axes, finish
from aftermap.errors import InputError

__all__ = ["ATTACK_QUANTITIES", "attack_curves"]

ATTACK_QUANTITIES = {
    "accuracy": "accuracy under attack",
    "entropy": "mean entropy (nats)",
    "kept": "share of answers kept",
    "target": "share moved to the target",
}
_MARKERS = ("o", "s", "^", "D")


def attack_curves(
    curves: Mapping[str, Any],
    *,
    quantity: str = "accuracy",
    strength: str = "strength of the attack",
    ax: Any = None,
    title: str = "",
) -> Any:
    """One quantity along the strength of an attack, for one method or several.

    Args:
        curves: "steps" and the quantity, as `AttackCurve.to_dict` or an entry of `Results.attacks`; or several by name.
        quantity: accuracy, entropy, kept or target.
        strength: what the steps are, with unit.
        ax: to draw on; None: a new figure.
        title: of the figure.

    Returns:
        The Axes.

    Raises:
        InputError, DataError, ShapeError: an unknown quantity, or curves that lack a column.

    >>> attack_curves({"steps": [0.0, 0.1], "accuracy": [0.9, 0.2]}).get_ylabel()
    'accuracy under attack'
    """
    if quantity not in ATTACK_QUANTITIES:
        raise InputError(f"quantity is {quantity!r}, but must be one of {', '.join(map(repr, ATTACK_QUANTITIES))}")
    found = named_curves(curves, ("steps", quantity))
    ax = axes(ax)
    for i, (name, curve) in enumerate(found.items()):
        ax.plot(
            curve["steps"],
            curve[quantity],
            color=color_of(i),
            linestyle=dash_of(i),
            linewidth=1.3,
            marker=_MARKERS[i % len(_MARKERS)],
            markersize=3.2,
            markeredgewidth=0,
            label=legend_label(name) or "_",
        )
    ax.set_ylim(bottom=0, top=None if quantity == "entropy" else 1.02)
    return finish(ax, title=title, x=strength, y=ATTACK_QUANTITIES[quantity], legend=any(found))
