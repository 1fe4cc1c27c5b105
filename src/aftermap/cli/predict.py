"""`aftermap predict`: answers with their uncertainty, one row per input."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from aftermap.cli import options as o
from aftermap.cli.console import GOOD, confirmed
from aftermap.cli.cost import say_prediction_cost
from aftermap.cli.fit import try_model
from aftermap.cli.sources import Source, open_source
from aftermap.cli.store import Fitted
from aftermap.data import csv_rows
from aftermap.errors import InputError
from aftermap.evaluation.predictor import predict_all
from aftermap.predictive import Prediction
from aftermap.writing import replaced_file

__all__ = ["predict"]

_LEVEL = 0.95
_DIGITS = 7  # of predictions, uncertainties and scores; standard deviations have 4


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
        o.option(
            "More columns of a csv to copy in front of the answers. Columns that are not inputs are copied anyway.",
            metavar="A,B",
        ),
    ] = None,
    *,
    data: o.DataOptions,
    predictive: o.PredictiveOptions,
    run: o.RunOptions,
) -> int:
    """Predict new inputs, one row for each: prediction, confidence, epistemic, aleatoric, score and flag.

    In front stand the file names of images, and the columns of a csv that are no inputs. For classes the uncertainties are in
    nats. For a regression all numbers are in the units of the target: sd is the standard deviation of a new target, which lies
    between lower_95 and upper_95 in 95 % of cases; epistemic_sd is the part that more data would lower, noise_sd the rest. A flag
    says that the score is above the threshold that fit chose on validation data; by default, for classes, that the entropy or the
    mutual information is larger than on nearly all validation inputs, and the score is the larger of the two shares.
    """
    reporter = run.reporter
    if output is not None and output.suffix not in (".csv", ".json"):
        raise InputError(f"-o {output}: results are written as .csv or .json")
    confirmed(output, force=run.force, what="predict", file_name="scored.csv")
    fitted = saved.load(run.checked_device())
    score = fitted.score_name(predictive.score)
    source = open_source(inputs, "test", fitted.complete(data.format()), need_targets=False, what="DATA")
    try_model(fitted.model, source)
    for note in source.note_of_bytes():
        reporter.note(note)
    copied = {**_identifiers(source), **_copied_columns(inputs, keep, data.limit)}
    options = {**fitted.predict_options(predictive.kind, predictive.samples), "generator": run.generator()}
    lost = fitted.promise_lost(options)
    if lost is not None:
        reporter.note(lost)
    say_prediction_cost(fitted, source, options, reporter)
    predictor: Any = fitted.predictor
    prediction = predict_all(
        predictor, source.batches.named("predicting"), options=options, need_targets=False
    ).prediction
    answers = _columns(prediction, fitted, score)
    columns = {**{f"{n}_of_data" if n in answers else n: texts for n, texts in copied.items()}, **answers}
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
            + ("" if math.isinf(threshold.value) else f"An input is flagged if {threshold.describe(digits=_DIGITS)}")
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


def _identifiers(source: Source) -> dict[str, list[Any]]:
    """Returns what says which row is which: file names, and the columns of a table that are no inputs."""
    return {} if source.examples is None else {n: list(texts) for n, texts in source.examples.identifiers.items()}


def _columns(prediction: Prediction, fitted: Fitted, score: str) -> dict[str, list[Any]]:
    """Returns the answers, rounded to what is written; flags compare the rounded score with the rounded threshold."""
    n = len(prediction)
    if prediction.kind in ("classification", "binary"):
        columns = _class_columns(prediction, fitted.extras.get("data", {}).get("classes"))
    else:
        columns = _number_columns(prediction)
    threshold, reference = fitted.threshold(score), fitted.scores()
    values = prediction.score(score) if reference is None else reference.score_of(prediction, score)
    columns["score"] = _rounded(values, _DIGITS)
    if threshold is None:
        return {**columns, "flag": [None] * n}
    limit = float(f"{threshold.value:.{_DIGITS}g}")
    return {**columns, "flag": [int(value > limit) for value in columns["score"]]}


def _class_columns(prediction: Prediction, names: Sequence[str] | None) -> dict[str, list[Any]]:
    n, columns = len(prediction), {}
    labels, confidence = prediction.labels.reshape(n, -1), prediction.confidence.reshape(n, -1)
    for i, end in enumerate(_endings(labels.shape[1])):
        answer = labels[:, i].tolist()
        named = names and prediction.kind == "classification"
        columns[f"prediction{end}"] = [names[a] for a in answer] if names and named else answer
        columns[f"confidence{end}"] = [round(c, 5) for c in confidence[:, i].tolist()]
    columns["epistemic"] = _rounded(prediction.epistemic.reshape(n, -1).mean(1), _DIGITS)
    columns["aleatoric"] = _rounded(prediction.aleatoric.reshape(n, -1).mean(1), _DIGITS)
    return columns


def _number_columns(prediction: Prediction) -> dict[str, list[Any]]:
    n, columns = len(prediction), {}
    lower, upper = prediction.interval(_LEVEL)
    deviations = [v.clamp_min(0).sqrt() for v in (prediction.total, prediction.epistemic, prediction.aleatoric)]
    shown = {
        "prediction": prediction.mean,
        "sd": deviations[0],
        f"lower_{100 * _LEVEL:.0f}": lower,
        f"upper_{100 * _LEVEL:.0f}": upper,
        "epistemic_sd": deviations[1],
        "noise_sd": deviations[2],
    }
    flat = {name: values.reshape(n, -1) for name, values in shown.items()}
    for i, end in enumerate(_endings(flat["prediction"].shape[1])):
        for name, values in flat.items():
            columns[f"{name}{end}"] = _rounded(values[:, i], 4 if name.endswith("sd") else _DIGITS)
    return columns


def _endings(count: int) -> list[str]:
    return [""] if count == 1 else [f"_{i}" for i in range(count)]


def _rounded(values: Tensor, digits: int) -> list[float]:
    """Rounds numbers to so many significant digits."""
    return [float(f"{v:.{digits}g}") for v in values.double().tolist()]


def _csv(columns: dict[str, list[Any]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow(["" if v is None else f"{v:.{_DIGITS}g}" if isinstance(v, float) else v for v in row])
    return stream.getvalue()
