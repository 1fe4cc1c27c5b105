"""`aftermap predict`: answers with their uncertainty, one row per input."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from aftermap.cli import options as o
from aftermap.cli.console import GOOD, confirmed, replaced_file
from aftermap.cli.fit import try_model
from aftermap.cli.sources import open_source
from aftermap.cli.store import Fitted
from aftermap.data import csv_rows
from aftermap.errors import InputError
from aftermap.evaluation.predictor import predict_all
from aftermap.predictive import Prediction

__all__ = ["predict"]

_LEVEL = 0.95


@o.command(without=("target",))
def predict(
    saved: o.SavedPosterior,
    inputs: Annotated[str, typer.Argument(metavar="DATA", help="The new inputs. They need no targets.")],
    output: Annotated[
        Path | None,
        o.option("The .csv or .json file to write. Without it the table goes to standard output.", "--output", "-o"),
    ] = None,
    keep: Annotated[
        str | None,
        o.option("The columns of a csv to copy in front, such as an identifier.", metavar="A,B"),
    ] = None,
    *,
    data: o.DataOptions,
    predictive: o.PredictiveOptions,
    run: o.RunOptions,
) -> int:
    """Predict new inputs: prediction, confidence, epistemic, aleatoric, score and flag, one row each.

    For a regression the confidence is an interval: lower and upper hold 95 % of new targets. A flag says that the score is
    above the threshold that fit chose on validation data; by default, for classes, that the entropy or the mutual information is
    larger than on nearly all validation inputs, and the score is the larger of the two shares. Uncertainties are in nats for classes, variances for numbers.
    """
    reporter = run.reporter
    if output is not None and output.suffix not in (".csv", ".json"):
        raise InputError(f"-o {output}: results are written as .csv or .json")
    confirmed(output, force=run.force, what="predict")
    fitted = saved.load(run.checked_device())
    score = fitted.score_name(predictive.score)
    source = open_source(inputs, "test", fitted.complete(data.format()), need_targets=False, what="DATA")
    try_model(fitted.model, source)
    copied = _copied_columns(inputs, keep, data.limit)
    options = {**fitted.predict_options(predictive.kind, predictive.samples), "generator": run.generator()}
    lost = fitted.promise_lost(options)
    if lost is not None:
        reporter.note(lost)
    predictor: Any = fitted.predictor
    prediction = predict_all(
        predictor, source.batches.named("predicting"), options=options, need_targets=False
    ).prediction
    columns = {**copied, **_columns(prediction, fitted, score)}
    if output is not None:
        with replaced_file(output) as part:
            part.write_text(
                _csv(columns) if output.suffix == ".csv" else json.dumps(columns, indent=1) + "\n", encoding="utf-8"
            )
    n, flagged, threshold = len(prediction), sum(map(bool, columns["flag"])), fitted.threshold(score)
    if threshold is None:
        summary = "no threshold is known, so nothing is flagged: fit or tune with --val"
    else:
        summary = (
            f"{flagged:,} of {n:,} flagged ({flagged / n:.1%}); {threshold.false_alarm_rate:.0%} are expected of usual data. "
            + ("There were too few validation data to flag anything" if math.isinf(threshold.value) else "")
            + ("" if math.isinf(threshold.value) else f"An input is flagged if {threshold.describe()}")
        )
    if output is not None:
        reporter.line(summary)
        reporter.line(f"written to {output}")
        reporter.result({"n_data": n, "score": score, "flagged": flagged, "output": str(output)})
        return GOOD
    if not run.as_json:
        sys.stdout.write(_csv(columns))
    reporter.note(summary)
    reporter.result({"n_data": n, "score": score, "flagged": flagged, "output": None, "rows": columns})
    return GOOD


def _copied_columns(spec: str, keep: str | None, limit: int | None) -> dict[str, list[Any]]:
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


def _columns(prediction: Prediction, fitted: Fitted, score: str) -> dict[str, list[Any]]:
    n = len(prediction)
    columns: dict[str, list[Any]] = {}
    if prediction.kind in ("classification", "binary"):
        labels, confidence = prediction.labels.reshape(n, -1), prediction.confidence.reshape(n, -1)
        names = fitted.extras.get("data", {}).get("classes")
        for i in range(labels.shape[1]):
            end = "" if labels.shape[1] == 1 else f"_{i}"
            answer = labels[:, i].tolist()
            columns[f"prediction{end}"] = [
                names[a] if names and prediction.kind == "classification" else a for a in answer
            ]
            columns[f"confidence{end}"] = confidence[:, i].tolist()
    else:
        mean = prediction.mean.reshape(n, -1)
        lower, upper = (end.reshape(n, -1) for end in prediction.interval(_LEVEL))
        for i in range(mean.shape[1]):
            end = "" if mean.shape[1] == 1 else f"_{i}"
            columns[f"prediction{end}"] = mean[:, i].tolist()
            columns[f"lower{end}"] = lower[:, i].tolist()
            columns[f"upper{end}"] = upper[:, i].tolist()
    columns["epistemic"] = prediction.epistemic.reshape(n, -1).mean(1).tolist()
    columns["aleatoric"] = prediction.aleatoric.reshape(n, -1).mean(1).tolist()
    threshold, reference = fitted.threshold(score), fitted.scores()
    values = prediction.score(score) if reference is None else reference.score_of(prediction, score)
    columns["score"] = values.tolist()
    columns["flag"] = [None] * n if threshold is None else [int(f) for f in threshold.flag(values).tolist()]
    return columns


def _csv(columns: dict[str, list[Any]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow([f"{v:.6g}" if isinstance(v, float) else "" if v is None else v for v in row])
    return stream.getvalue()
