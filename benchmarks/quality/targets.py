"""The targets that were set before anything was measured, and how far the default call is from each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from benchmarks.quality.methods import METHODS
from benchmarks.quality.summary import PARTS, Results, TableOfText

__all__ = ["TARGETS", "Target", "targets_table"]

Values = dict[str, float]  # by task, or by task and set


@dataclass(frozen=True)
class Target:
    """A number to reach on unseen tasks.

    Attributes:
        what: What is measured.
        values: Its values on the tasks of one half.
        joined: How they become one number: their mean, or the worst one.
        limit: What the number is compared with.
        above: Whether it must be above the limit, not below.
        digits: How many digits are shown.
    """

    what: str
    values: Callable[[Results, str], Values]
    joined: str
    limit: float
    above: bool = False
    digits: int = 3

    def cell(self, results: Results, part: str) -> str:
        """The number with "yes" or "no", and a mark where rows of another commit are in it; a dash where nothing was measured."""
        values = self.values(results, part)
        if not values:
            return "–"
        if self.joined == "mean":
            number, where = statistics.fmean(values.values()), ""
        else:
            worst = min if self.above else max
            name = worst(values, key=values.__getitem__)
            number, where = values[name], f" ({name})"
        met = number >= self.limit if self.above else number <= self.limit
        mark = " †" if _is_older(results, values) else ""
        return f"{'yes' if met else '**no**'}: {number:+.{self.digits}f}{where}{mark}".replace("-", "−")

    @property
    def words(self) -> str:
        """The target as a sentence."""
        side, kind = "at least" if self.above else "at most", "on average" if self.joined == "mean" else "everywhere"
        return f"{self.what}: {side} {self.limit:+g} {kind}".replace("-", "−")


def _is_older(results: Results, values: Values) -> bool:
    """Whether a row of another commit is behind values that are named by task, by task and set, or by the set that tasks begin with."""
    tasks = [t for t in results.tasks if any(n == t or n.startswith(f"{t}, ") or t.startswith(f"{n}_") for n in values)]
    shown = ("network", "fit", "fit_unlabelled")
    return any(results.label(method, tasks) != METHODS[method].label for method in shown)


def _known(values: Mapping[str, float | None]) -> Values:
    return {name: v for name, v in values.items() if v is not None}


def _mean(values: Iterable[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return statistics.fmean(present) if present else None


def _differences(*sizes: int) -> Callable[[Results, str], Values]:
    """d of the default call with labels, in thousandths of a nat."""

    def values(results: Results, part: str) -> Values:
        found = {t: _mean(results.value(t, "fit", n, "d") for n in sizes) for t in results.names(part)}
        return {t: 1000 * d for t, d in _known(found).items()}

    return values


def _gains(method: str, group: str | None = None) -> Callable[[Results, str], Values]:
    """Gains in AUROC by entropy over the network, in points, for every set; with labels as a mean over their numbers."""

    def values(results: Results, part: str) -> Values:
        found: Values = {}
        for task in results.names(part):
            if group is not None and results.tasks[task]["group"] != group:
                continue
            by_size = [results.gains(task, method, n) for n in results.sizes(method, task)]
            for name in results.tasks[task]["ood"]:
                present = [gains[name] for gains in by_size if name in gains]
                if present:
                    found[f"{task}, {name}"] = statistics.fmean(present)
        return found

    return values


def _ece_with_labels(results: Results, part: str) -> Values:
    found = {t: _mean(results.ece_excess(t, "fit", n) for n in results.sizes("fit", t)) for t in results.names(part)}
    return _known(found)


def _over_network(column: str) -> Callable[[Results, str], Values]:
    def values(results: Results, part: str) -> Values:
        return _known({t: results.over_network(t, "fit_unlabelled", 0, column) for t in results.names(part)})

    return values


def _regressions(column: str) -> Callable[[Results, str], Values]:
    def values(results: Results, part: str) -> Values:
        names = results.names(part, regression=True)
        return _known({t: results.value(t, "fit_unlabelled", 0, column) for t in names})

    return values


def _by_set(column: str) -> Callable[[Results, str], Values]:
    """The mean over the networks of a set."""

    def values(results: Results, part: str) -> Values:
        sets: dict[str, list[float]] = {}
        for task, value in _regressions(column)(results, part).items():
            sets.setdefault(task.rpartition("_")[0], []).append(value)
        return {name: statistics.fmean(found) for name, found in sets.items()}

    return values


def _over_evidence(results: Results, part: str) -> Values:
    names = results.names(part, regression=True)
    return _known({t: results.over_evidence([t], "fit_unlabelled", 0) for t in names})


TARGETS = (
    Target("30 labels, d", _differences(30), "mean", 0, digits=1),
    Target("30 labels, d", _differences(30), "worst", 20, digits=1),
    Target("100 labels, d", _differences(100), "mean", 2, digits=1),
    Target("100 labels, d", _differences(100), "worst", 10, digits=1),
    Target("300 and 1,000 labels, d", _differences(300, 1000), "mean", 1, digits=1),
    Target("300 and 1,000 labels, d", _differences(300, 1000), "worst", 5, digits=1),
    Target("labels, OOD on tables", _gains("fit", "table"), "mean", 10, True, 1),
    Target("labels, OOD on images", _gains("fit", "image"), "mean", 2, True, 1),
    Target("labels, OOD", _gains("fit"), "worst", -5, True, 1),
    Target("labels, ECE over the better of network and temperature", _ece_with_labels, "mean", 0.005),
    Target("no labels, NLL over the network", _over_network("nll"), "mean", -0.05),
    Target("no labels, NLL over the network", _over_network("nll"), "worst", 0.015),
    Target("no labels, ECE over the network", _over_network("ece"), "mean", 0),
    Target("no labels, ECE over the network", _over_network("ece"), "worst", 0.03),
    Target("no labels, OOD", _gains("fit_unlabelled"), "mean", 20, True, 1),
    Target("no labels, OOD", _gains("fit_unlabelled"), "worst", -1, True, 1),
    Target("regression without labels, NLL over full evidence", _over_evidence, "mean", -0.08),
    Target("regression without labels, d", _regressions("d"), "mean", 0),
    Target("regression without labels, d", _regressions("d"), "worst", 0.3),
    Target("regression without labels, cover of 95 % intervals", _regressions("cover95"), "mean", 0.93, True),
    Target("regression without labels, cover of 95 % intervals", _regressions("cover95"), "mean", 0.97),
    Target("regression without labels, cover of 95 % intervals, each set", _by_set("cover95"), "worst", 0.83, True),
)


def targets_table(results: Results) -> TableOfText:
    """Every target with what was measured on development and on held-out tasks."""
    rows = [(target.words, *(target.cell(results, part) for part in PARTS)) for target in TARGETS]
    return TableOfText("Targets of the default call", ("target", *PARTS), tuple(r for r in rows if set(r[1:]) != {"–"}))
