"""`aftermap evaluate`: the network alone against its Bayesian version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from aftermap.analysis.report import MARKS, Verdict, comparison, verdict
from aftermap.baselines import Deterministic
from aftermap.cli import options as o
from aftermap.cli.console import CHECK_FAILED, GOOD, WORSE, Speaker, confirmed, guarded
from aftermap.cli.fit import try_model
from aftermap.cli.models import check_device
from aftermap.cli.sources import DataOptions, Source, open_source, parse_ood
from aftermap.cli.store import Fitted, load_fitted
from aftermap.errors import InputError
from aftermap.evaluation import Results, Threshold
from aftermap.evaluation import evaluate as evaluate_predictor

__all__ = ["Judgement", "against_baseline", "evaluate", "judge", "open_test"]

_COLOURS = {"better": "green", "worse": "red", "same": "dim", "": ""}


@dataclass(frozen=True)
class Judgement:
    """Both evaluations and what follows from them.

    Attributes:
        bayesian: of the posterior.
        map: of the network alone.
        verdict: in words.
        threshold: for flagging, if one is known.
    """

    bayesian: Results
    map: Results
    verdict: Verdict
    threshold: Threshold | None

    @property
    def code(self) -> int:
        """The exit code: not 0 if the posterior is worse than the network alone."""
        return CHECK_FAILED if self.verdict.level == "worse" else GOOD

    def table(self, title: str) -> Table:
        """MAP against Bayesian, number by number."""
        table = Table(
            title=title, title_justify="left", title_style="bold", header_style="bold", pad_edge=False, box=None
        )
        table.add_column("")
        table.add_column("MAP", justify="right")
        table.add_column("Bayesian", justify="right")
        table.add_column("")
        for row in comparison(self.bayesian, self.map):
            mark = MARKS.get(row.mark, "")
            colour = _COLOURS.get(row.mark, "")
            said = f"[{colour}]{mark}[/]" if colour else mark
            table.add_row(row.label, row.text("map"), row.text("bayesian"), said)
        return table

    def say(self, speaker: Speaker, title: str) -> None:
        """Prints the table and the verdict."""
        speaker.line()
        speaker.table(self.table(title))
        speaker.line()
        good = self.verdict.level != "worse"
        speaker.line(str(self.verdict), style="bold green" if good else "bold red")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {
            "verdict": {
                "level": self.verdict.level,
                "headline": self.verdict.headline,
                "text": self.verdict.text,
                "problems": list(self.verdict.problems),
            },
            "map": self.map.to_dict(table=False),
            "bayesian": self.bayesian.to_dict(table=False),
            "threshold": None if self.threshold is None else self.threshold.to_dict(),
        }


def judge(
    fitted: Fitted,
    test: Source,
    ood: Mapping[str, Source],
    *,
    options: Mapping[str, Any],
    score: str = "entropy",
    seed: int = 0,
    n_resamples: int = 200,
) -> Judgement:
    """Evaluates the network alone and the posterior on the same data."""
    found: dict[str, Results] = {}
    network = Deterministic(fitted.model, fitted.predictor.likelihood)
    pairs: list[tuple[str, Any, Mapping[str, Any]]] = [("MAP", network, {}), ("Bayesian", fitted.predictor, options)]
    for name, predictor, own in pairs:
        found[name] = evaluate_predictor(
            predictor,
            test.batches.named(f"{name}: test"),
            ood={n: s.batches.named(f"{name}: {n}") for n, s in ood.items()},
            name=name,
            options=own,
            n_resamples=n_resamples,
            seed=seed,
        )
    threshold = fitted.threshold(score)
    said = verdict(found["Bayesian"], found["MAP"], threshold=threshold)
    return Judgement(found["Bayesian"], found["MAP"], said, threshold)


def against_baseline(bayesian: Results, baseline: str, network: Results) -> tuple[int, str]:
    """Whether results are worse than a baseline beyond chance, in the scores that both have.

    Args:
        bayesian: the results.
        baseline: "map", or a file of results.
        network: of the network alone, for "map".

    Returns:
        Exit code 0 or 4, and a sentence.

    Raises:
        InputError: results of other data, or nothing in common.
    """
    other = network if baseline == "map" else _read(baseline)
    hashes = [r.provenance.get("data_hash") for r in (bayesian, other)]
    if hashes[0] != hashes[1]:
        raise InputError(f"--baseline {baseline} was evaluated on other data, so that its numbers cannot be compared")
    worse, seen = [], 0
    for name in ("accuracy", "rmse", "nll"):
        if name in bayesian.metrics and name in other.metrics:
            seen += 1
            ours, theirs = bayesian.metrics[name], other.metrics[name]
            bad = ours.upper < theirs.lower if name == "accuracy" else ours.lower > theirs.upper
            if bad:
                worse.append(f"{name} {theirs.value:.4g} → {ours.value:.4g}")
    if not seen:
        raise InputError(f"--baseline {baseline} has no number in common with these results")
    if worse:
        return WORSE, f"worse than the baseline {baseline}: {', '.join(worse)}"
    return GOOD, f"not worse than the baseline {baseline}"


def _read(baseline: str) -> Results:
    file = Path(baseline).expanduser()
    if not file.is_file():
        raise InputError(
            f"--baseline {baseline}: there is no such file; write one with `aftermap evaluate … -o results.json`, or say map"
        )
    return Results.from_json(file)


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
    trust_code: o.TrustCode = False,
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
