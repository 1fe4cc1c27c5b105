"""`aftermap where`: in which layer, filter, class and input the uncertainty sits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from aftermap.analysis import where as look
from aftermap.analysis.result import LEVELS
from aftermap.cli import options as o
from aftermap.cli.console import GOOD, Speaker, confirmed, guarded
from aftermap.cli.evaluate import open_test
from aftermap.cli.models import check_device
from aftermap.cli.store import load_fitted
from aftermap.evaluation.results import to_plain

__all__ = ["where"]

_WIDE = 100  # columns of a screen with room for bars


@guarded
def where(
    posterior: o.Posterior,
    test: o.Test = None,
    level: Annotated[str, typer.Option("--level", help=f"{', '.join(LEVELS)}.")] = "layer",
    top: Annotated[
        int, typer.Option("--top", min=1, help="How many of the most uncertain inputs; rows of --level filter.")
    ] = 16,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write every level as JSON.")] = None,
    model: o.OptionalModel = None,
    weights: o.Weights = None,
    target: o.Target = None,
    data_dir: o.DataDir = None,
    image_size: o.ImageSize = None,
    channels: o.Channels = None,
    limit: o.Limit = 1000,
    batch_size: o.BatchSize = 100,
    seed: o.Seed = 0,
    device: o.Device = "cpu",
    force: o.Force = False,
    as_json: o.Json = False,
    config: o.Config = None,
) -> int:
    """Say where in the network the uncertainty sits: exact shares of the predictive variance by layer, which add up to one.

    Further levels: filters and neurons, weights, classes, the most uncertain inputs, and a calibration test of each layer.
    """
    speaker = Speaker(as_json)
    o.one_of("--level", level, LEVELS)
    if output is not None:
        confirmed(output, force=force, what="where")
    fitted = load_fitted(posterior, model=model, weights=weights, device=check_device(device))
    reading = fitted.data_options(
        o.data_options(
            target=target,
            data_dir=data_dir,
            image_size=image_size,
            channels=channels,
            limit=limit,
            batch_size=batch_size,
        )
    )
    source, _ = open_test(fitted, test, None, reading)
    found = look(
        fitted.predictor,
        source.batches.named("where"),
        top=top,
        calibration=level == "calibration",
        classes=fitted.extras.get("data", {}).get("classes"),
        generator=torch.Generator().manual_seed(seed),
    )
    total, count = sum(k.effective for k in found.layers), sum(k.n_parameters for k in found.layers)
    speaker.line(
        f"{found.structure} posterior, {found.n_data:,} inputs of {source.name}; the data determine {total:,.1f} of {count:,} "
        "uncertain weights"
    )
    speaker.line()
    speaker.table(_table(found.table(level), top if level == "filter" else None, speaker.width))
    hidden = len(found.table(level)) - len(_fitting(found.table(level), speaker.width))
    if hidden:
        speaker.line(f"{hidden} more columns: widen the window, or use --json")
    if level == "layer" and found.certain:
        speaker.line(f"not in the posterior, so certain: {', '.join(found.certain[:6])}")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        found.to_json(output)
        speaker.line(f"written to {output}")
    speaker.result(to_plain(dict(found.table(level))))
    return GOOD


def _table(columns: dict[str, list[Any]], most: int | None, width: int) -> Table:
    """Columns as a table for people; shares get a bar where there is room."""
    names = _fitting(columns, width)
    order = range(len(columns[names[0]]))
    if most is not None and "variance" in columns:
        order = sorted(order, key=lambda i: -(columns["variance"][i] or 0.0))[:most]  # type: ignore[assignment]
    table = Table(header_style="bold", pad_edge=False, box=None, padding=(0, 1, 0, 0))
    for name in names:
        left = any(isinstance(v, str) for v in columns[name])
        table.add_column(name, justify="left" if left else "right", width=_room(name, columns[name]))
    bar = "predictive share" in columns and width >= _WIDE
    if bar:
        table.add_column("")
    for i in order:
        cells = [_cell(name, columns[name][i]) for name in names]
        if bar:
            cells.append("█" * round(20 * min(1.0, max(0.0, columns["predictive share"][i] or 0.0))))
        table.add_row(*cells)
    return table


def _fitting(columns: dict[str, list[Any]], width: int) -> list[str]:
    """The first columns that the screen has room for; --json has all of them."""
    names: list[str] = []
    used = 0
    for name, values in columns.items():
        used += _room(name, values) + 1
        if names and used > width + 1:
            break
        names.append(name)
    return names


def _room(name: str, values: list[Any]) -> int:
    """Characters of a column whose heading may be broken between words."""
    return max([len(word) for word in name.split()] + [len(_cell(name, v)) for v in values])


def _cell(name: str, value: Any) -> str:
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        return f"{value:.1%}" if name.endswith("share") else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
