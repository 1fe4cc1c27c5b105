"""`aftermap where`: in which layer, filter, class and input the uncertainty sits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from aftermap.analysis import where as find_where
from aftermap.analysis.result import LEVELS
from aftermap.cli import options as o
from aftermap.cli.console import GOOD, confirmed
from aftermap.cli.evaluate import open_test
from aftermap.evaluation.results import to_plain

__all__ = ["where"]

_WIDE = 100  # columns of a screen with room for bars


@o.command(without=("ood",), limit=1000, batch_size=100)
def where(
    saved: o.SavedPosterior,
    output: Annotated[Path | None, o.option("The JSON file for the results of every level.", "--output", "-o")] = None,
    level: Annotated[str, o.option("How finely the uncertainty is split."), o.OneOf(LEVELS)] = "layer",
    top: Annotated[
        int,
        o.option("The number of most uncertain inputs, and of rows that --level filter shows.", min=1),
    ] = 16,
    *,
    sets: o.TestData,
    data: o.DataOptions,
    run: o.RunOptions,
) -> int:
    """Show where in the network the uncertainty arises: exact shares of the predictive variance by layer, which add up to one.

    Further levels: filters and neurons, weights, classes, the most uncertain inputs, and a calibration test of each layer.
    """
    reporter = run.reporter
    confirmed(output, force=run.force, what="where", file_name="where.json")
    fitted = saved.load(run.checked_device())
    source, _ = open_test(fitted, sets, data)
    result = find_where(
        fitted.predictor,
        source.batches.named("where"),
        top=top,
        calibration=level == "calibration",
        classes=fitted.extras.get("data", {}).get("classes"),
        generator=run.generator(),
    )
    total, count = sum(k.effective for k in result.layers), sum(k.n_parameters for k in result.layers)
    reporter.line(
        f"{result.structure} posterior, {result.n_data:,} inputs of {source.name}; the data determine {total:,.1f} of "
        f"{count:,} uncertain weights"
    )
    reporter.line()
    columns = result.table(level)
    shown = dict(result.readable_layers() if level == "layer" else columns)
    reporter.table(_table(shown, top if level == "filter" else None, reporter.width))
    hidden = [name for name in shown if name not in _fitting(shown, reporter.width)]
    if hidden:
        reporter.line(f"not shown for lack of room: {', '.join(hidden)}; widen the window, or use --json")
    if level == "layer" and result.crosses:
        reporter.line(result.in_common_in_words())
    if level == "layer" and result.certain:
        reporter.line(f"not in the posterior, so certain: {', '.join(result.certain[:6])}")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        result.to_json(output)
        reporter.line(f"written to {output}")
    reporter.result(to_plain(dict(columns)))
    return GOOD


def _table(columns: dict[str, list[Any]], most: int | None, width: int) -> Table:
    """Writes columns as a table for people; shares get a bar where there is room."""
    names = _fitting(columns, width)
    order = range(len(columns[names[0]]))
    if most is not None and "variance" in columns:
        order = sorted(order, key=lambda i: -(columns["variance"][i] or 0.0))[:most]  # type: ignore[assignment]
    table = Table(header_style="bold", pad_edge=False, box=None, padding=(0, 1, 0, 0))
    for name in names:
        left = any(isinstance(v, str) for v in columns[name])
        table.add_column(name, justify="left" if left else "right", width=_room(name, columns[name]))
    share = next((name for name in ("own share", "predictive share") if name in columns), None)
    bar = share is not None and width >= _WIDE
    if bar:
        table.add_column("")
    for i in order:
        cells = [_cell(name, columns[name][i]) for name in names]
        if share is not None and bar:
            cells.append("█" * round(20 * min(1.0, max(0.0, columns[share][i] or 0.0))))
        table.add_row(*cells)
    return table


def _fitting(columns: dict[str, list[Any]], width: int) -> list[str]:
    """Returns the first columns that the screen has room for; --json has all of them."""
    names: list[str] = []
    used = 0
    for name, values in columns.items():
        used += _room(name, values) + 1
        if names and used > width + 1:
            break
        names.append(name)
    return names


def _room(name: str, values: list[Any]) -> int:
    """Returns the number of characters of a column whose heading may be broken between words."""
    return max([len(word) for word in name.split()] + [len(_cell(name, v)) for v in values])


def _cell(name: str, value: Any) -> str:
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        return f"{value:.1%}" if name.endswith("share") else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
