"""`aftermap report`: one HTML file."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from aftermap.analysis import Neighbours, Where, nearest_examples, where
from aftermap.analysis.report import write_report
from aftermap.analysis.report.cards import Features
from aftermap.cli import options as o
from aftermap.cli.console import confirmed
from aftermap.cli.cost import say_evaluation_cost
from aftermap.cli.evaluate import MapComparison, compare_with_map, open_test
from aftermap.cli.fit import try_model
from aftermap.cli.sources import Batches, Source, open_source
from aftermap.cli.store import Fitted
from aftermap.laplace import Laplace
from aftermap.progress import waiting

__all__ = ["report", "where_for_report", "write_for"]

_MOST = 1000  # inputs whose uncertainty is traced to layers: the shares hardly change after that


@o.command()
def report(
    saved: o.SavedPosterior,
    output: Annotated[
        Path | None,
        o.option("The file to write. Without it, it is report.html in the posterior's folder.", "--output", "-o"),
    ] = None,
    title: Annotated[str, o.option("The title of the report.")] = "Uncertainty report",
    with_where: Annotated[
        bool, o.option("Whether the report says where in the network the uncertainty sits.", "--where/--no-where")
    ] = True,
    train: Annotated[
        str | None,
        o.option(
            "The training data. The report then shows the most similar training examples of each uncertain input.",
            "--train",
            metavar="DATA",
        ),
    ] = None,
    *,
    sets: o.TestData,
    data: o.DataOptions,
    predictive: o.PredictiveOptions,
    run: o.RunOptions,
) -> int:
    """Write one HTML file: a verdict, the network alone and its Bayesian version, calibration, abstention, unusual data, and layers.

    The file needs nothing else: no network, no server.
    """
    reporter = run.reporter
    confirmed(output, force=run.force, what="report", file_name="report.html")
    fitted = saved.load(run.checked_device())
    score = fitted.score_name(predictive.score)
    source, ood = open_test(fitted, sets, data)
    training = None if train is None else open_source(train, "train", fitted.complete(data.format()), what="--train")
    if training is not None:
        try_model(fitted.model, training)
    options = fitted.predict_options(predictive.kind, predictive.samples)
    inspected = min(_MOST, source.batches.n_examples() or _MOST) if with_where else 0
    say_evaluation_cost(fitted, [source, *ood.values()], options, reporter, more=inspected)
    compared = compare_with_map(fitted, source, ood, options=options, score=score, seed=run.seed)
    shares = where_for_report(fitted, source, run.seed) if with_where else None
    place = output or saved.posterior / "report.html"
    place.parent.mkdir(parents=True, exist_ok=True)
    with waiting("writing the report"):
        write_for(place, fitted, compared, shares, source, title=title, options=options, seed=run.seed, train=training)
    compared.report_to(reporter, source.name)
    reporter.line(f"report written to {place}")
    reporter.result({**compared.to_dict(), "report": str(place)})
    return compared.code


def where_for_report(fitted: Fitted, source: Source, seed: int) -> Where:
    """Returns where the uncertainty of (at most 1,000) inputs sits."""
    examples = source.examples
    data: Any = source.batches.data
    if examples is not None and len(examples) > _MOST:
        data = examples.take(slice(0, _MOST))
    classes = fitted.extras.get("data", {}).get("classes")
    return where(
        fitted.predictor,
        Batches(data, min(source.batches.size, 100), "where"),
        classes=classes,
        generator=torch.Generator().manual_seed(seed),
    )


def write_for(
    place: Path,
    fitted: Fitted,
    compared: MapComparison,
    shares: Where | None,
    source: Source,
    *,
    title: str,
    options: dict[str, Any],
    seed: int,
    train: Source | None = None,
) -> Path:
    """Writes the report of a comparison; with training data it shows what each uncertain input is like."""
    examples = source.examples
    inputs = None if examples is None else examples.inputs
    table = None
    if examples is not None and examples.columns is not None and examples.inputs.dim() == 2:
        table = Features(examples.columns, examples.inputs)
    pictures = inputs if inputs is not None and inputs.dim() == 4 and inputs.shape[1] in (1, 3) else None
    predictor = fitted.predictor
    settings: dict[str, Any] = {
        "model": fitted.extras.get("model", {}).get("spec"),
        "task": fitted.extras.get("task"),
        "training data": fitted.extras.get("data", {}).get("train"),
        "test data": source.spec,
        "predictive": options["kind"],
        "samples": options["samples"],
        "seed": seed,
    }
    if isinstance(predictor, Laplace):
        settings |= {
            "structure": predictor.structure,
            "data scale": predictor.data_scale,
            "temperature": predictor.output_temperature,
            "prior precision": {n: float(v.mean()) for n, v in predictor.prior_precision.items()},
        }
    else:
        settings["optimiser"] = predictor.method
    return write_report(
        place,
        bayesian=compared.bayesian,
        map=compared.map,
        where=shares,
        title=title,
        settings={k: v for k, v in settings.items() if v is not None},
        images=pictures,
        classes=fitted.extras.get("data", {}).get("classes"),
        threshold=compared.threshold,
        features=table,
        neighbours=None if train is None or inputs is None else partial(_neighbours, fitted, train, inputs),
        notes=_notes(fitted),
    )


def _neighbours(fitted: Fitted, train: Source, inputs: Tensor, indices: list[int]) -> Neighbours:
    device = next(fitted.model.parameters()).device
    return nearest_examples(fitted.model, train.batches.named("neighbours"), inputs[indices].to(device))


def _notes(fitted: Fitted) -> list[str]:
    """Returns what tuning found, and how the posterior was checked then."""
    notes = []
    if fitted.extras.get("tuning"):
        notes.append(_sentence("Tuning", fitted.extras["tuning"]))
    check = fitted.extras.get("self_check") or {}
    if check.get("message"):
        notes.append(_sentence(f"Check on {check.get('on', 'data')}", check["message"]))
    return notes


def _sentence(about: str, said: str) -> str:
    """Returns what was said on a terminal as a sentence with the signs of print, and with one full stop."""
    printed = re.sub(r"(?<![\w-])-(?=\d)", "−", said.replace(" -> ", " → "))
    return f"{about}: {printed.rstrip('.')}."
