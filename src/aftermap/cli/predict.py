"""`aftermap predict`: answers with their uncertainty, one row per input."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from aftermap.cli import options as o
from aftermap.cli.console import GOOD, Speaker, confirmed, guarded
from aftermap.cli.fit import try_model
from aftermap.cli.models import check_device
from aftermap.cli.sources import Batches, open_source
from aftermap.cli.store import Fitted, load_fitted
from aftermap.data import csv_rows
from aftermap.errors import InputError
from aftermap.evaluation import Threshold
from aftermap.evaluation.predictor import predict_all
from aftermap.predictive import Prediction

__all__ = ["predict"]

_LEVEL = 0.95


@guarded
def predict(
    posterior: o.Posterior,
    inputs: Annotated[str, typer.Argument(metavar="DATA", help="New inputs; targets are not needed.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A .csv or .json file; without it the table goes to the screen."),
    ] = None,
    score: o.Score = "entropy",
    keep: Annotated[
        str | None,
        typer.Option("--keep", metavar="A,B", help="Columns of a csv to copy in front, such as an identifier."),
    ] = None,
    model: o.OptionalModel = None,
    weights: o.Weights = None,
    kind: o.Kind = "auto",
    samples: o.Samples = 100,
    data_dir: o.DataDir = None,
    image_size: o.ImageSize = None,
    channels: o.Channels = None,
    limit: o.Limit = None,
    batch_size: o.BatchSize = 256,
    seed: o.Seed = 0,
    device: o.Device = "cpu",
    force: o.Force = False,
    as_json: o.Json = False,
    config: o.Config = None,
) -> int:
    """Predict new inputs: prediction, confidence, epistemic, aleatoric, score and flag, one row each.

    For a regression the confidence is an interval: lower and upper hold 95 % of new targets. A flag says that the score is
    above the threshold that fit chose on validation data. Uncertainties are in nats for classes, variances for numbers.
    """
    speaker = Speaker(as_json)
    if output is not None:
        if output.suffix not in (".csv", ".json"):
            raise InputError(f"-o {output}: results are written as .csv or .json")
        confirmed(output, force=force, what="predict")
    fitted = load_fitted(posterior, model=model, weights=weights, device=check_device(device))
    reading = fitted.data_options(
        o.data_options(data_dir=data_dir, image_size=image_size, channels=channels, limit=limit, batch_size=batch_size)
    )
    source = open_source(inputs, "test", reading, need_targets=False, what="DATA")
    try_model(fitted.model, source)
    kept = _kept(inputs, keep, reading.limit)
    chosen = {**fitted.predict_options(kind, samples), "generator": torch.Generator().manual_seed(seed)}
    predictor: Any = fitted.predictor
    found = predict_all(
        predictor, Batches(source.batches.data, batch_size, "predicting"), options=chosen, need_targets=False
    ).prediction
    if score == "entropy" and found.kind in ("counts", "custom"):
        score = "variance"  # the only one that is defined for them
    columns = {**kept, **_columns(found, fitted, score)}
    if output is not None:
        _write(output, columns)
    flagged = [f for f in columns["flag"] if f]
    n, threshold = len(found), fitted.threshold(score)
    if threshold is None:
        said = "no threshold is known, so nothing is flagged: fit or tune with --val"
    else:
        said = f"{len(flagged):,} of {n:,} flagged ({len(flagged) / n:.1%}); {threshold.false_alarm_rate:.0%} are expected of usual data"
    if output is None and not as_json:
        sys.stdout.write(_csv(columns))
        speaker.note(said)
    else:
        speaker.line(said)
        if output is not None:
            speaker.line(f"written to {output}")
    speaker.result(
        {"n_data": n, "flagged": len(flagged), "output": None if output is None else str(output)}
        | ({"rows": columns} if output is None else {})
    )
    return GOOD


def _kept(spec: str, keep: str | None, limit: int | None) -> dict[str, list[Any]]:
    if keep is None:
        return {}
    if Path(spec).suffix not in (".csv", ".tsv", ".txt"):
        raise InputError("--keep copies columns of a .csv file; these data have none")
    header, rows, _ = csv_rows(spec)
    names = [name.strip() for name in keep.split(",")]
    missing = [n for n in names if n not in header]
    if missing:
        raise InputError(f"--keep: {spec} has no column {missing[0]!r}; it has {', '.join(header)}")
    return {n: [row[header.index(n)] for row in rows[:limit]] for n in names}


def _columns(found: Prediction, fitted: Fitted, score: str) -> dict[str, list[Any]]:
    n = len(found)
    columns: dict[str, list[Any]] = {}
    if found.kind in ("classification", "binary"):
        labels, confidence = found.labels.reshape(n, -1), found.confidence.reshape(n, -1)
        names = fitted.extras.get("data", {}).get("classes")
        for i in range(labels.shape[1]):
            end = "" if labels.shape[1] == 1 else f"_{i}"
            answer = labels[:, i].tolist()
            columns[f"prediction{end}"] = [names[a] if names and found.kind == "classification" else a for a in answer]
            columns[f"confidence{end}"] = confidence[:, i].tolist()
    else:
        mean = found.mean.reshape(n, -1)
        lower, upper = (end.reshape(n, -1) for end in found.interval(_LEVEL))
        for i in range(mean.shape[1]):
            end = "" if mean.shape[1] == 1 else f"_{i}"
            columns[f"prediction{end}"] = mean[:, i].tolist()
            columns[f"lower{end}"] = lower[:, i].tolist()
            columns[f"upper{end}"] = upper[:, i].tolist()
    columns["epistemic"] = found.epistemic.reshape(n, -1).mean(1).tolist()
    columns["aleatoric"] = found.aleatoric.reshape(n, -1).mean(1).tolist()
    values = found.score(score)
    columns["score"] = values.tolist()
    threshold: Threshold | None = fitted.threshold(score)
    columns["flag"] = [None] * n if threshold is None else [int(f) for f in threshold.flag(values).tolist()]
    return columns


def _csv(columns: dict[str, list[Any]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow([f"{v:.6g}" if isinstance(v, float) else "" if v is None else v for v in row])
    return stream.getvalue()


def _write(output: Path, columns: dict[str, list[Any]]) -> None:
    """First to a neighbour, then moved into place."""
    text = _csv(columns) if output.suffix == ".csv" else json.dumps(columns, indent=1) + "\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f".{output.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)
