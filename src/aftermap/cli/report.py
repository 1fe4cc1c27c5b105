"""`aftermap report`: one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from aftermap.analysis import Where, where
from aftermap.analysis.report import write_report
from aftermap.cli import options as o
from aftermap.cli.console import Speaker, confirmed, guarded
from aftermap.cli.evaluate import Judgement, judge, open_test
from aftermap.cli.models import check_device
from aftermap.cli.sources import Batches, Source
from aftermap.cli.store import Fitted, load_fitted
from aftermap.laplace import Laplace

__all__ = ["look_where", "report", "write_for"]

_MOST = 1000  # inputs whose uncertainty is traced to layers: the shares hardly change after that


@guarded
def report(
    posterior: o.Posterior,
    test: o.Test = None,
    ood: o.Ood = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file; without it report.html in the posterior's folder.")
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Of the report.")] = "Uncertainty report",
    look: Annotated[
        bool, typer.Option("--where/--no-where", help="Say where in the network the uncertainty sits.")
    ] = True,
    score: o.Score = "entropy",
    model: o.OptionalModel = None,
    weights: o.Weights = None,
    trust_code: o.TrustCode = False,
    kind: o.Kind = "auto",
    samples: o.Samples = 100,
    target: o.Target = None,
    data_dir: o.DataDir = None,
    download: o.Download = False,
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
    """Write one HTML file: verdict, MAP against Bayesian, calibration, abstention, unusual data, and where the uncertainty sits.

    The file needs nothing else: no network, no server.
    """
    speaker = Speaker(as_json)
    if output is not None:
        confirmed(output, force=force, what="report")
    fitted = load_fitted(posterior, model=model, weights=weights, device=check_device(device), trust_code=trust_code)
    reading = fitted.data_options(
        o.data_options(
            target=target,
            data_dir=data_dir,
            download=download,
            image_size=image_size,
            channels=channels,
            limit=limit,
            batch_size=batch_size,
        )
    )
    source, others = open_test(fitted, test, ood, reading)
    options = fitted.predict_options(kind, samples)
    found = judge(fitted, source, others, options=options, score=score, seed=seed)
    looked = look_where(fitted, source, seed) if look else None
    place = output or posterior / "report.html"
    place.parent.mkdir(parents=True, exist_ok=True)
    write_for(place, fitted, found, looked, source, title=title, options=options, seed=seed)
    found.say(speaker, f"{source.name}, {found.bayesian.n_data:,} examples")
    speaker.line(f"report written to {place}")
    speaker.result({**found.to_dict(), "report": str(place)})
    return found.code


def look_where(fitted: Fitted, source: Source, seed: int) -> Where:
    """Where the uncertainty of (at most 1,000) inputs sits."""
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
    found: Judgement,
    looked: Where | None,
    source: Source,
    *,
    title: str,
    options: dict[str, Any],
    seed: int,
) -> Path:
    """Writes the report of a judgement."""
    examples = source.examples
    inputs = None if examples is None else examples.inputs
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
            "prior precision": {n: float(v.mean()) for n, v in predictor.prior_precision.items()},
        }
    else:
        settings["optimiser"] = predictor.method
    return write_report(
        place,
        bayesian=found.bayesian,
        map=found.map,
        where=looked,
        title=title,
        settings={k: v for k, v in settings.items() if v is not None},
        images=pictures,
        classes=fitted.extras.get("data", {}).get("classes"),
        threshold=found.threshold,
    )
