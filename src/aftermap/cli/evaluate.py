"""`aftermap evaluate`: the network alone against its Bayesian version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from aftermap.cli import options as o
from aftermap.cli.console import Speaker, confirmed, guarded
from aftermap.cli.fitting import try_model
from aftermap.cli.judging import against_baseline, judge
from aftermap.cli.models import check_device
from aftermap.cli.sources import DataOptions, Source, open_source, parse_ood
from aftermap.cli.store import Fitted, load_fitted
from aftermap.errors import InputError

__all__ = ["evaluate", "open_test"]


@guarded
def evaluate(
    posterior: o.Posterior,
    test: o.Test = None,
    ood: o.Ood = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the results of the posterior as JSON.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline", help="map, or a file of results: exit code 4 if the posterior is worse beyond chance."
        ),
    ] = None,
    score: o.Score = "entropy",
    model: o.OptionalModel = None,
    weights: o.Weights = None,
    kind: o.Kind = "auto",
    samples: o.Samples = 100,
    resamples: Annotated[int, typer.Option("--resamples", min=0, help="Of the bootstrap intervals; 0: none.")] = 200,
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
    """Evaluate a posterior beside the network alone: accuracy, calibration, detection of unusual data, and a verdict.

    Exit code 3 if the posterior is worse than the network alone beyond tolerance, 4 if it is worse than --baseline.
    """
    speaker = Speaker(as_json)
    if output is not None:
        confirmed(output, force=force, what="evaluate")
    fitted = load_fitted(posterior, model=model, weights=weights, device=check_device(device))
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
    found = judge(
        fitted,
        source,
        others,
        options=fitted.predict_options(kind, samples),
        score=score,
        seed=seed,
        n_resamples=resamples,
    )
    found.say(speaker, f"{source.name}, {found.bayesian.n_data:,} examples")
    code = found.code
    content = found.to_dict()
    if baseline is not None:
        worse, said = against_baseline(found.bayesian, baseline, found.map)
        speaker.line(said, style="bold red" if worse else None)
        content["baseline"] = said
        code = code or worse
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        found.bayesian.to_json(output)
        speaker.line(f"results written to {output}")
    speaker.result(content)
    return code


def open_test(
    fitted: Fitted, test: str | None, ood: list[str] | None, reading: DataOptions
) -> tuple[Source, dict[str, Source]]:
    """Test data, by default the test part of the set that was trained on, and data that should look unusual."""
    train = str(fitted.extras.get("data", {}).get("train") or "")
    chosen = test
    if chosen is None:
        if (
            not train
            or Path(train).expanduser().exists()
            or (":" in train and not train.startswith(("builtin:", "toy:")))
        ):
            raise InputError("say which data to test on: --test DATA")
        chosen = train.removesuffix(":train")
    source = open_source(chosen, "test", reading, what="--test")
    try_model(fitted.model, source)
    # Unusual data may have other classes, or none.
    foreign = replace(reading, classes=None, target=None)
    others = {
        name: open_source(spec, "test", foreign, need_targets=False, what=f"--ood {name}")
        for name, spec in parse_ood(ood or []).items()
    }
    return source, others
