"""The network alone against its Bayesian version: evaluated side by side, as a table and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from aftermap.analysis.report import MARKS, Verdict, comparison, verdict
from aftermap.baselines import Deterministic
from aftermap.cli.console import CHECK_FAILED, GOOD, WORSE, Speaker
from aftermap.cli.sources import Source
from aftermap.cli.store import Fitted
from aftermap.errors import InputError
from aftermap.evaluation import Results, Threshold, evaluate

__all__ = ["Judgement", "against_baseline", "judge"]

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
        found[name] = evaluate(
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
