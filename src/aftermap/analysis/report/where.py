"""The section on where in the network the uncertainty sits, from the result of `la.where(loader)`."""

from __future__ import annotations

import math
from typing import Any

from aftermap.analysis.report.definitions import written
from aftermap.analysis.report.sections import Picture, Section, picture
from aftermap.analysis.result import Where
from aftermap.errors import InputError

__all__ = ["check_where", "where_section"]

_COLUMNS = {
    "layer": ("Layer", "text"),
    "kind": ("Kind", "text"),
    "parameters": ("Weights", "count"),
    "effective": ("Set by the data", "number"),
    "information": ("Information, nats", "number"),
    "predictive share": ("Predictive variance", "percent"),
    "cross share": ("With other layers", "points"),
    "epistemic share": ("Epistemic", "percent"),
}
_MOST_LAYERS = 24  # a longer table belongs in a file


def check_where(where: Any) -> None:
    """Raises unless it is the result of `where`, or None."""
    if where is not None and not isinstance(where, Where):
        raise InputError(f"where must be the result of where(predictor, loader), got {type(where).__name__}")


def where_section(where: Where) -> Section:
    """Layer shares as picture and table, the classes that are taken for each other, and what the most uncertain inputs look at."""
    return Section(
        notes=_notes(where),
        pictures=_pictures(where),
        header=[label for key, (label, _) in _COLUMNS.items() if key in where.table("layer")],
        rows=_rows(where),
        caption="Layers in the order of the network",
    )


def _notes(where: Where) -> list[str]:
    total = math.fsum(layer.effective for layer in where.layers)
    count = sum(layer.n_parameters for layer in where.layers)
    largest = max(where.layers, key=lambda layer: layer.predictive_share)
    notes = [
        f"The layer {largest.name} holds {written(largest.predictive_share, 'percent')} of the variance of the outputs. "
        f"The data determine {total:,.1f} of {count:,} uncertain weights and gave {where.information:,.1f} nats of information "
        f"about them ({where.structure} posterior, {where.n_data:,} inputs)."
    ]
    if len(where.layers) > _MOST_LAYERS:
        notes.append(f"The table shows the {_MOST_LAYERS} layers with the largest shares of {len(where.layers)}.")
    if where.certain:
        names = ", ".join(where.certain[:6]) + (f" and {len(where.certain) - 6} more" if len(where.certain) > 6 else "")
        notes.append(f"Not in the posterior, so certain: {names}.")
    return notes


def _rows(where: Where) -> list[list[str]]:
    table = where.table("layer")
    order = list(range(len(where.layers)))
    if len(order) > _MOST_LAYERS:
        largest = sorted(order, key=lambda i: -where.layers[i].predictive_share)[:_MOST_LAYERS]
        order = sorted(largest)
    shown = {key: form for key, (_, form) in _COLUMNS.items() if key in table}
    return [[_cell(table[key][i], form) for key, form in shown.items()] for i in order]


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "–"
    if form == "text":
        return str(value)
    return f"{value:,}" if form == "count" else f"{value:,.1f}" if form == "number" else written(float(value), form)


def _pictures(where: Where) -> list[Picture]:
    found = [
        picture(
            where.figure("layers", title=""),
            "layers",
            "Share of each layer in the variance of the network's outputs; the shares add to one. Circles: share of the weights.",
            "Bars: " + ", ".join(f"{k.name} {k.predictive_share:.1%}" for k in where.layers[:_MOST_LAYERS]) + ".",
        )
    ]
    if where.kind == "classification" and where.classes.pairs is not None:
        caption = "Mean epistemic uncertainty of the test inputs by true and predicted class: off the diagonal, the confusions."
        found.append(picture(where.figure("pairs", title=""), "pairs", caption, caption))
    if where.weights_of is not None and any(layer.layer.kind.startswith("Conv") for layer in where.layers):
        caption = "Filters of the first convolution: their weights, and the standard deviation that the posterior leaves them."
        found.append(picture(where.figure("filters", title=""), "filters", caption, caption))
    if where.inputs.saliency is not None and _are_images(where):
        caption = "The most uncertain inputs, and the pixels on which their epistemic uncertainty hangs."
        found.append(picture(where.figure("saliency", title=""), "saliency", caption, caption))
    return found


def _are_images(where: Where) -> bool:
    """Whether the inputs have a height and a width, so that a map over them can be looked at."""
    shape = getattr(where.inputs.inputs[0], "shape", ()) if len(where.inputs.inputs) else ()
    return len(shape) >= 2 and min(shape[-2:]) > 1
