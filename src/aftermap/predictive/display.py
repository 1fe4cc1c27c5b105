"""Results as people see them: small tables, as text for `print` and as HTML for notebooks.

Whatever comes from a user (names of classes, of data sets, of networks) is escaped in HTML.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from aftermap.predictive.prediction import Prediction

__all__ = ["html_table", "prediction_html", "prediction_text", "text_table"]

_ROWS = 5  # of a prediction
_MOST_ROWS = 100  # of any table in a notebook
_UNITS = {
    "classification": "epistemic and aleatoric in nats",
    "binary": "epistemic and aleatoric in nats",
    "regression": "sd: standard deviation, with noise; epistemic: that of the function alone",
    "counts": "sd: standard deviation, with noise; epistemic: that of the rate alone",
    "custom": "sd: standard deviation, with noise; epistemic: that of the mean alone",
}


def text_table(columns: Mapping[str, Sequence[str]], left: Collection[str] = ()) -> str:
    """Returns a table as text with aligned columns; those in ``left`` begin at the same place, others end there.

    >>> print(text_table({"layer": ["0", "2"], "share": ["25.0%", "75.0%"]}, left=["layer"]))
    layer  share
    ------------
    0      25.0%
    2      75.0%
    """
    widths = {name: max(len(name), *map(len, cells), 1) for name, cells in columns.items()}
    rows = zip(*columns.values(), strict=True)

    def line(cells: Sequence[str]) -> str:
        placed = zip(columns, cells, strict=True)
        return "  ".join(c.ljust(widths[n]) if n in left else c.rjust(widths[n]) for n, c in placed).rstrip()

    head = line(list(columns))
    return "\n".join([head, "-" * len(head), *map(line, rows)])


def html_table(
    caption: str, columns: Mapping[str, Sequence[str]], *, left: Collection[str] = (), note: str = ""
) -> str:
    """Returns a table as HTML for notebooks, with everything escaped; rows after the first hundred are left out.

    >>> html_table("a < b", {"x": ["1"]})
    '<table><caption>a &lt; b</caption><thead><tr><th style="text-align: right">x</th></tr></thead><tbody><tr><td style="text-align: right">1</td></tr></tbody></table>'
    """

    def cell(tag: str, name: str, text: str) -> str:
        side = "left" if name in left else "right"
        return f'<{tag} style="text-align: {side}">{escape(text)}</{tag}>'

    rows = list(zip(*columns.values(), strict=True))
    if len(rows) > _MOST_ROWS:
        note = f"… and {len(rows) - _MOST_ROWS:,} more. {note}".rstrip()
    head = "".join(cell("th", name, name) for name in columns)
    body = "".join(
        "<tr>" + "".join(cell("td", n, c) for n, c in zip(columns, row, strict=True)) + "</tr>"
        for row in rows[:_MOST_ROWS]
    )
    below = f"<p>{escape(note)}</p>" if note else ""
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


def prediction_text(prediction: Prediction) -> str:
    """Returns what a prediction says about its first inputs, as text."""
    columns, note = _first_rows(prediction)
    return "\n".join(filter(None, [_title(prediction), text_table(columns) if len(prediction) else "", note]))


def prediction_html(prediction: Prediction) -> str:
    """Returns what a prediction says about its first inputs, as HTML."""
    columns, note = _first_rows(prediction)
    return html_table(_title(prediction), columns, note=note)


def _title(prediction: Prediction) -> str:
    n, outputs = len(prediction), prediction.mean.shape[-1]
    words = {"classification": f"{outputs} classes"}.get(prediction.kind, f"{outputs} output{'s'[: outputs > 1]}")
    positions = "".join(f" × {size}" for size in prediction.mean.shape[1:-1])
    where = f", positions{positions.replace(' ×', '', 1)}" if positions else ""
    return f"{prediction.kind} of {n:,} input{'s'[: n != 1]}: {words}{where} (link {prediction.link})"


def _first_rows(prediction: Prediction) -> tuple[dict[str, list[str]], str]:
    """Returns columns with one row for each of the first units: positions for classes, outputs for everything else."""
    has_classes = prediction.kind == "classification"
    shape = prediction.mean.shape[:-1] if has_classes else prediction.mean.shape
    count = min(_ROWS, shape.numel())
    places = torch.stack(torch.unravel_index(torch.arange(count), shape), 1).tolist() if count else []
    if not has_classes and shape[-1] == 1:
        places = [place[:-1] for place in places]
    columns = {"input": [", ".join(map(str, place)) for place in places]}

    def numbers(values: Tensor, form: str) -> list[str]:
        return [format(v, form) for v in values.detach().reshape(-1)[:count].double().tolist()]

    if prediction.kind in ("classification", "binary"):
        columns["class"] = numbers(prediction.labels, ".0f")
        columns["confidence"] = numbers(prediction.confidence, ".3f")
        columns["epistemic"] = numbers(prediction.epistemic, ".4f")
        columns["aleatoric"] = numbers(prediction.aleatoric, ".4f")
    else:
        pairs = zip(numbers(prediction.mean, ".4g"), numbers(prediction.total.sqrt(), ".2g"), strict=True)
        columns["mean ± sd"] = [f"{mean} ± {deviation}" for mean, deviation in pairs]
        columns["epistemic"] = numbers(prediction.epistemic.sqrt(), ".2g")
    more = shape.numel() - count
    return columns, (f"… and {more:,} more; " if more else "") + _UNITS[prediction.kind]
