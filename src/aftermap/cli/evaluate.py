"""`aftermap evaluate`: the network alone against its Bayesian version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from aftermap.analysis.report import MARKS, Verdict, comparison, score_notes, variance_notes, verdict
from aftermap.baselines import Deterministic
from aftermap.cli import options as o
from aftermap.cli.console import CHECK_FAILED, GOOD, WORSE, Reporter, confirmed, plain_table
from aftermap.cli.cost import say_evaluation_cost
from aftermap.cli.fit import try_model
from aftermap.cli.sources import Source, open_source, parse_ood
from aftermap.cli.store import Fitted
from aftermap.errors import DataError, InputError
from aftermap.evaluation import Results, Threshold
from aftermap.evaluation import evaluate as evaluate_predictor

__all__ = ["MapComparison", "against_baseline", "compare_with_map", "evaluate", "open_test"]

_COLOURS = {"better": "green", "worse": "red", "same": "dim", "": ""}


@dataclass(frozen=True)
class MapComparison:
    """The evaluations of the network alone and of its posterior, and what follows from them.

    Attributes:
        bayesian: The results of the posterior.
        map: The results of the network alone.
        verdict: The comparison in words.
        threshold: The threshold for flagging, if one is known.
        notes: What else is worth a sentence: how widely the outputs vary on unusual data, and whether the thresholds still hold.
    """

    bayesian: Results
    map: Results
    verdict: Verdict
    threshold: Threshold | None
    notes: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """The exit code: not 0 if the posterior is worse than the network alone."""
        return CHECK_FAILED if self.verdict.level == "worse" else GOOD

    def table(self, title: str) -> Table:
        """Prints MAP against Bayesian, number by number."""
        table = plain_table("", "MAP", "Bayesian", right=("MAP", "Bayesian"), title=title, title_justify="left")
        table.title_style = "bold"
        table.add_column("")
        for row in comparison(self.bayesian, self.map):
            mark = MARKS.get(row.mark, "")
            colour = _COLOURS.get(row.mark, "")
            text = f"[{colour}]{mark}[/]" if colour else mark
            table.add_row(row.label, row.text("map"), row.text("bayesian"), text)
        return table

    def report_to(self, reporter: Reporter, name: str) -> None:
        """Prints the table, under the name of the data, and the verdict."""
        reporter.line()
        reporter.table(self.table(f"{name}, {self.bayesian.n_data:,} examples"))
        reporter.line()
        for note in self.notes:
            reporter.line(note)
        style = {"good": "bold green", "same": "bold", "nothing": "bold yellow", "worse": "bold red"}[
            self.verdict.level
        ]
        reporter.line(str(self.verdict), style=style)

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain values for machines."""
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
            "notes": list(self.notes),
        }


def compare_with_map(
    fitted: Fitted,
    test: Source,
    ood: Mapping[str, Source],
    *,
    options: Mapping[str, Any],
    score: str = "auto",
    seed: int = 0,
    n_resamples: int = 200,
) -> MapComparison:
    """Evaluates the network alone and the posterior on the same data, which flags inputs by the given score."""
    score = fitted.score_name(score)
    reference = fitted.scores(score)
    results: dict[str, Results] = {}
    network = Deterministic(fitted.model, fitted.predictor.predictor.network_likelihood)
    pairs: list[tuple[str, Any, Mapping[str, Any]]] = [("MAP", network, {}), ("Bayesian", fitted.predictor, options)]
    for name, predictor, predict_options in pairs:
        results[name] = evaluate_predictor(
            predictor,
            test.batches.named(f"{name}: test"),
            ood={n: s.batches.named(f"{name}: {n}") for n, s in ood.items()},
            name=name,
            reference=reference if predictor is fitted.predictor else None,
            options=predict_options,
            n_resamples=n_resamples,
            seed=seed,
        )
    threshold = fitted.threshold(score)
    words = verdict(results["Bayesian"], results["MAP"], threshold=threshold)
    lost = fitted.promise_lost(options)
    notes = (
        *variance_notes(results["Bayesian"], results["MAP"]),
        *score_notes(results["Bayesian"]),
        *(() if lost is None else (f"Note: {lost}.",)),
    )
    return MapComparison(results["Bayesian"], results["MAP"], words, threshold, notes)


def against_baseline(bayesian: Results, baseline: str, network: Results) -> tuple[int, str]:
    """Tells whether results are worse than a baseline beyond chance, in the scores that both have.

    Args:
        bayesian: The results of the posterior.
        baseline: "map", or a file of results.
        network: The results of the network alone, for "map".

    Returns:
        Exit code 0 or 4, and a sentence.

    Raises:
        InputError: The baseline has results of other data, or nothing in common with these.
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
    try:
        return Results.from_json(file)
    except DataError as error:
        raise InputError(
            f"--baseline {baseline}: {error}; write one with `aftermap evaluate … -o results.json`, or say map"
        ) from None


@o.command()
def evaluate(
    saved: o.SavedPosterior,
    output: Annotated[
        Path | None, o.option("The JSON file for the results of the posterior.", "--output", "-o")
    ] = None,
    baseline: Annotated[
        str | None,
        o.option(
            "What to compare with: map, or a file of results. The exit code is 4 if the posterior is worse by more than chance."
        ),
    ] = None,
    resamples: Annotated[
        int,
        o.option("The number of bootstrap resamples from which intervals are computed; 0 gives no intervals.", min=0),
    ] = 200,
    *,
    sets: o.TestData,
    data: o.DataOptions,
    predictive: o.PredictiveOptions,
    run: o.RunOptions,
) -> int:
    """Compare a posterior with the network alone: accuracy, calibration, detection of unusual data, and a verdict.

    Exit code 3 if the posterior is worse than the network alone beyond tolerance, 4 if it is worse than --baseline.
    """
    reporter = run.reporter
    confirmed(output, force=run.force, what="evaluate", file_name="results.json")
    if baseline not in (None, "map"):
        _read(str(baseline))  # it is missing or damaged before the work, not after it
    fitted = saved.load(run.checked_device())
    score = fitted.score_name(predictive.score)
    source, ood = open_test(fitted, sets, data)
    options = fitted.predict_options(predictive.kind, predictive.samples)
    say_evaluation_cost(fitted, [source, *ood.values()], options, reporter, n_resamples=resamples)
    compared = compare_with_map(
        fitted,
        source,
        ood,
        options=options,
        score=score,
        seed=run.seed,
        n_resamples=resamples,
    )
    compared.report_to(reporter, source.name)
    code, content = compared.code, compared.to_dict()
    if baseline is not None:
        worse, words = against_baseline(compared.bayesian, baseline, compared.map)
        reporter.line(words, style="bold red" if worse else None)
        content["baseline"] = words
        code = code or worse
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        compared.bayesian.to_json(output)
        reporter.line(f"results written to {output}")
    reporter.result(content)
    return code


def open_test(fitted: Fitted, sets: o.TestData, data: o.DataOptions) -> tuple[Source, dict[str, Source]]:
    """Returns the test data, by default the test part of the set that was trained on, and data that should look unusual."""
    data_format, spec = fitted.complete(data.format()), sets.test
    if spec is None:
        train = str(fitted.extras.get("data", {}).get("train") or "")
        stem = train.removesuffix(":train")
        was_cut = stem != train and Path(stem).expanduser().exists()
        of_the_library = train.startswith(("builtin:", "toy:")) or ":" not in train
        if not was_cut and (not train or Path(train).expanduser().exists() or not of_the_library):
            raise InputError("say which data to test on: --test DATA")
        spec = f"{stem}:test" if was_cut else stem
    source = open_source(spec, "test", data_format, what="--test")
    outputs = try_model(fitted.model, source)[1]
    if fitted.extras.get("task") == "classification":
        source.check_labels(outputs.shape[-1])
    foreign = replace(data_format, classes=None, target=None)  # unusual data may have other classes, or none
    ood = {
        name: open_source(spec, "test", foreign, need_targets=False, what="--ood")
        for name, spec in parse_ood(sets.ood or []).items()
    }
    for unusual in ood.values():
        try_model(fitted.model, unusual)
    return source, ood
