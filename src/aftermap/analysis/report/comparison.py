"""The network alone against its Bayesian version, number by number, with marks that are more than chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aftermap.analysis.report.definitions import Definition, definition, interval, written
from aftermap.errors import InputError
from aftermap.evaluation.results import Metric, Results

__all__ = ["MARKS", "Row", "comparison", "paired_error", "same_data"]

MARKS = {"better": "▲", "worse": "▼", "same": "=", "": ""}
_CLASSES = ("accuracy", "nll", "ece", "brier")
_VALUES = ("rmse", "nll", "crps", "coverage_0.5", "coverage_0.9", "coverage_0.95", "width_0.95", "miscalibration_area")
_NO_INTERVAL = ("mce", "classwise_ece", "miscalibration_area", "aupr_out", "aupr_in")
_TWO_SIDED = 2.0  # standard errors


@dataclass(frozen=True)
class Row:
    """One number of both predictors.

    Attributes:
        name: as in `Results.flat`, or "seconds_per_1000".
        label: in words, with the OOD set where there is one.
        meaning: its definition.
        map: of the network alone, None without one.
        bayesian: of the Bayesian predictor.
        mark: better, worse, same, or "" where neither is or nothing is compared.
    """

    name: str
    label: str
    meaning: Definition
    map: Metric | None
    bayesian: Metric | None
    mark: str

    def text(self, which: str) -> str:
        """The number of "map" or "bayesian" as it is written."""
        metric = self.map if which == "map" else self.bayesian
        return "–" if metric is None else written(metric.value, self.meaning.form)

    def interval(self, which: str) -> str:
        """Its confidence interval as it is written, or ""."""
        metric = self.map if which == "map" else self.bayesian
        return "" if metric is None else interval(metric, self.meaning.form)


def same_data(bayesian: Results, map: Results | None) -> None:
    """Raises unless both evaluations are of one task and the same data."""
    if map is None:
        return
    if bayesian.kind != map.kind:
        raise InputError(f"one evaluation is of a {bayesian.kind}, the other of a {map.kind}; compare like with like")
    hashes = [r.provenance.get("data_hash") for r in (bayesian, map)]
    if None not in hashes and hashes[0] != hashes[1]:
        raise InputError("these results belong to different data, so that their numbers cannot be compared")


def comparison(bayesian: Results, map: Results | None = None, *, names: Sequence[str] | None = None) -> list[Row]:
    """The table of a report and of the command line.

    By default accuracy, NLL, ECE, Brier score, AUROC and FPR95 by entropy for every OOD set, accuracy at 80 % coverage and the
    time per 1,000 inputs; for regression RMSE, NLL, CRPS, coverage and width of intervals. A number is marked better or worse
    only if the difference is more than chance: two standard errors of the paired difference where every input is in both
    tables, otherwise neither number in the other's interval; shares without an interval by their binomial error. Numbers for
    which none of these is known are not marked, unless there was no bootstrap at all.

    Args:
        bayesian: the evaluation of the Bayesian predictor.
        map: that of the network alone, on the same data.
        names: of numbers, as in `Results.flat`; None: the above.

    Returns:
        One row per number that either has.

    Raises:
        InputError: evaluations of different data or tasks, or an unknown name.
    """
    same_data(bayesian, map)
    flats = [r.flat() | _time(r) for r in (bayesian, map) if r is not None]
    chosen = _default_names(bayesian) if names is None else list(names)
    unknown = [n for n in chosen if names is not None and not any(n in flat for flat in flats)]
    if unknown:
        raise InputError(f"no result has {', '.join(unknown)}; there are: {', '.join(flats[0])}")
    rows = []
    for name in chosen:
        ours = flats[0].get(name)
        theirs = flats[1].get(name) if map is not None else None
        if ours is None and theirs is None:
            continue
        meaning = definition(name)
        mark = "" if map is None or ours is None or theirs is None else _mark(name, ours, theirs, bayesian, map)
        rows.append(Row(name, _label(name, meaning), meaning, theirs, ours, mark))
    return rows


def _time(results: Results) -> dict[str, Metric]:
    seconds = results.provenance.get("seconds_per_1000")
    return {} if seconds is None else {"seconds_per_1000": Metric(float(seconds), float(seconds), float(seconds))}


def _default_names(results: Results) -> list[str]:
    detections = []
    for data, scores in results.ood.items():
        score = "entropy" if "entropy" in scores else next(iter(scores), None)
        if score is not None:
            detections += [f"{data}/{score}/auroc", f"{data}/{score}/fpr95"]
    if results.kind in ("classification", "binary"):
        return [*_CLASSES, *detections, "accuracy_at_80", "seconds_per_1000"]
    return [*_VALUES, *detections, "seconds_per_1000"]


def _label(name: str, meaning: Definition) -> str:
    data = name.rpartition("/")[0].rpartition("/")[0]
    return f"{meaning.label}, {data}" if data else meaning.label


def _badness(name: str, meaning: Definition, value: float) -> float:
    """Lower is better; the share inside an interval is best at the level that the interval promises."""
    if name.startswith("coverage_"):
        return abs(value - float(name.rpartition("_")[2]))
    return -value if meaning.better == "higher" else value


def _mark(name: str, ours: Metric, theirs: Metric, bayesian: Results, map: Results) -> str:
    meaning = definition(name)
    if not (meaning.better or name.startswith("coverage_")):
        return ""
    if math.isnan(ours.value) or math.isnan(theirs.value):
        return ""
    if written(ours.value, meaning.form) == written(theirs.value, meaning.form):
        return "same"
    chance = _by_chance(name, ours, theirs, bayesian, map)
    if chance is None:
        return ""
    gain = _badness(name, meaning, theirs.value) - _badness(name, meaning, ours.value)
    return "same" if chance or gain == 0 else "better" if gain > 0 else "worse"


def _by_chance(name: str, ours: Metric, theirs: Metric, bayesian: Results, map: Results) -> bool | None:
    """Whether a difference may be chance; None where nobody knows."""
    if name == "seconds_per_1000":
        # A clock is noisy: half a time more or less says nothing.
        return max(ours.value, theirs.value) < 1.5 * min(ours.value, theirs.value)
    error = paired_error({"accuracy": "correct", "nll": "nll"}.get(name, ""), bayesian, map)
    if error is not None:
        return abs(ours.value - theirs.value) <= _TWO_SIDED * error
    if ours.lower < ours.upper or theirs.lower < theirs.upper:
        return theirs.lower <= ours.value <= theirs.upper or ours.lower <= theirs.value <= ours.upper
    if name.rpartition("/")[2] in ("fpr95", "fpr95_errors") or name.startswith("accuracy_at_"):
        rate = min(max(0.5 * (ours.value + theirs.value), 0.0), 1.0)
        return abs(ours.value - theirs.value) <= _TWO_SIDED * math.sqrt(2 * rate * (1 - rate) / max(1, bayesian.n_data))
    # Without a bootstrap the number is all there is; with one, a number that it leaves out cannot be judged.
    return None if bayesian.provenance.get("n_resamples") and name.rpartition("/")[2] in _NO_INTERVAL else False


def paired_error(column: str, bayesian: Results, map: Results) -> float | None:
    """Standard error of the mean difference of a column over the test inputs; None where a table lacks it."""
    parts = []
    for results in (bayesian, map):
        table = results.table
        if column not in table or "set" not in table:
            return None
        parts.append([v for v, s in zip(table[column], table["set"], strict=True) if s == "test"])
    if len(parts[0]) != len(parts[1]) or len(parts[0]) < 2 or None in parts[0] or None in parts[1]:
        return None
    differences = [float(a) - float(b) for a, b in zip(*parts, strict=True)]
    n, mean = len(differences), math.fsum(differences) / len(differences)
    return math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)
