"""What the results say, as tables: against the network, temperature scaling, and targets that were set in advance."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.quality.methods import METHODS
from benchmarks.quality.store import as_seeds

__all__ = ["PARTS", "Results", "TableOfText", "tables_of"]

PARTS = ("development", "held-out")
WITH_LABELS = ("temperature", "fit", "grid", "identity")
WITHOUT_LABELS = ("fit_unlabelled", "laplace_torch", "ensemble")
REGRESSIONS = (
    "network",
    "validation_noise",
    "fit",
    "fit_unlabelled",
    "grid",
    "full_evidence",
    "laplace_torch",
    "ensemble",
)
DETECTORS = ("energy", "gen", "knn", "mahalanobis", "relativemahalanobis", "vim")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TableOfText:
    """A table whose cells are words.

    Attributes:
        title: What it shows.
        header: Names of the columns.
        rows: The cells.
        note: How to read it.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def text(self) -> str:
        """The table for a terminal, with aligned columns."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        drawn = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        drawn.insert(1, "-" * len(drawn[0]))
        return "\n".join([self.title, *([self.note] if self.note else []), *drawn])

    def markdown(self) -> str:
        """The table in Markdown, under a heading."""
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, *self.rows)]
        lines.insert(1, "|" + "---|" * len(self.header))
        return "\n\n".join([f"## {self.title}", *([self.note] if self.note else []), "\n".join(lines)]) + "\n"


class Results:
    """The collected results, with what the tables ask of them.

    Args:
        content: What `store.collect` gave, or `quality.json`.
    """

    def __init__(self, content: Mapping[str, Any]):
        self.content = content
        self.tasks: Mapping[str, Mapping[str, Any]] = content["tasks"]
        self._place = {name: i for i, name in enumerate(content["columns"])}
        self._rows = {(row["task"], row["method"], row["n"]): _over_seeds(row) for row in content["rows"]}
        self._among: dict[tuple[str, ...], Results] = {}

    def among(self, *methods: str) -> Results:
        """The results for a comparison of some methods: of each task only the seeds that all of them have which were measured on it."""
        if methods not in self._among:
            self._among[methods] = self._comparison(methods)
        return self._among[methods]

    def _comparison(self, methods: tuple[str, ...]) -> Results:
        shared: dict[str, set[int]] = {}
        for row in self.content["rows"]:
            if row["method"] in methods:
                own = {seed for group in row["seeds"] for seed in as_seeds(group)}
                shared[row["task"]] = shared.get(row["task"], own) & own
        rows = [
            _of_seeds(row, shared.get(row["task"], set())) for row in self.content["rows"] if row["method"] in methods
        ]
        return Results({**self.content, "rows": [row for row in rows if row["seeds"]]})

    def label(self, method: str, names: Iterable[str], n: int | None = None) -> str:
        """The name of a method, with a mark where one of its rows on some tasks is of another commit."""
        sizes = self.sizes(method) if n is None else [n]
        rows = [row for t in names for size in sizes if (row := self.row(t, method, size)) is not None]
        older = any(row.get("commit", self.content["commit"]) != self.content["commit"] for row in rows)
        return METHODS[method].label + (" †" if older else "")

    def row(self, task: str, method: str, n: int = 0) -> Row | None:
        """The row of a task, a method and a size of validation sets."""
        return self._rows.get((task, method, n))

    def value(self, task: str, method: str, n: int, column: str) -> float | None:
        """One number, or None."""
        row = self.row(task, method, n)
        return None if row is None else row["values"][self._place[column]]

    def sizes(self, method: str, task: str | None = None) -> list[int]:
        """The sizes of validation sets with which a method was measured."""
        return sorted({n for t, m, n in self._rows if m == method and task in (None, t)})

    def names(self, part: str, *, regression: bool = False) -> list[str]:
        """The tasks of one half."""
        return [
            name
            for name, facts in self.tasks.items()
            if facts["part"] == part and (facts["group"] == "regression") == regression
        ]

    def gains(self, task: str, method: str, n: int, score: str = "entropy") -> dict[str, float]:
        """What a method gains in AUROC over the network's entropy on each set of unusual inputs, in points."""
        pair = self.among("network", method)
        row, network = pair.row(task, method, n), pair.row(task, "network")
        if row is None or network is None:
            return {}
        found = {}
        for name, scores in row.get("ood", {}).items():
            value, base = scores.get(score), network["ood"][name]["entropy"]
            if value is not None and base is not None:
                found[name] = 100 * (value - base)
        return found

    def over_network(self, task: str, method: str, n: int, column: str) -> float | None:
        """How much a number lies above the network's."""
        pair = self.among("network", method)
        own, network = pair.value(task, method, n, column), pair.value(task, "network", 0, column)
        return None if own is None or network is None else own - network

    def possible(self, task: str) -> float | None:
        """By how much the best temperature, chosen on the test data themselves, would lower the network's NLL."""
        return self.value(task, "network", 0, "d")

    def ece_excess(self, task: str, method: str, n: int) -> float | None:
        """The ECE over the smaller one of the network's and temperature scaling's with the same labels."""
        three = self.among("network", "temperature", method)
        own = three.value(task, method, n, "ece")
        others = [three.value(task, "network", 0, "ece"), three.value(task, "temperature", n, "ece")]
        known = [e for e in others if e is not None]
        return None if own is None or not known else own - min(known)

    def over_evidence(self, names: Sequence[str], method: str, n: int) -> float | None:
        """How much the NLL of a regression lies above that of the full matrix tuned by the evidence, on average."""
        both = self.among(method, "full_evidence")
        pairs = [(both.value(t, method, n, "nll"), both.value(t, "full_evidence", 0, "nll")) for t in names]
        return _mean(a - b for a, b in pairs if a is not None and b is not None)


def _mean(values: Iterable[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return statistics.fmean(present) if present else None


def _of_seeds(row: Row, allowed: set[int]) -> dict[str, Any]:
    """A row with some of its seeds."""
    places = [i for i, group in enumerate(row["seeds"]) if set(as_seeds(group)) <= allowed]

    def some(values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in places]

    found = {**row, **{key: some(row[key]) for key in ("seeds", "sets", "values")}}
    if "ood" in row:
        found["ood"] = {name: {s: some(v) for s, v in scores.items()} for name, scores in row["ood"].items()}
    return found


def _over_seeds(row: Row) -> dict[str, Any]:
    """A row with the means over its seeds."""
    counts = [len(as_seeds(group)) for group in row["seeds"]]

    def mean(values: Sequence[float | None]) -> float | None:
        return _mean(v for v, count in zip(values, counts, strict=True) for _ in range(count))

    ood = {name: {s: mean(v) for s, v in scores.items()} for name, scores in row.get("ood", {}).items()}
    means = [mean(column) for column in zip(*row["values"], strict=True)]
    return {**row, "values": means, "sets": sum(row["sets"]), "ood": ood}


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _signed(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:+.{digits}f}".replace("-", "−")


def _plain(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def _judged(value: float | None, met: Callable[[float], bool], words: str) -> str:
    if value is None:
        return words
    return f"**{words}**" if met(value) else words


def _short(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


# Tables.


def tables_of(content: Mapping[str, Any]) -> list[TableOfText]:
    """All tables of the results."""
    results = Results(content)
    if not results.tasks:
        return []
    found = [_task_table(results, regression=False), _task_table(results, regression=True)]
    for part in PARTS:
        found += [_labels_table(results, part), _no_labels_table(results, part), _regression_table(results, part)]
    found += [_detection_table(results), _each_task_table(results), _seconds_table(results)]
    return [table for table in found if table.rows]


def _task_table(results: Results, *, regression: bool) -> TableOfText:
    rows = []
    for part in PARTS:
        for name in results.names(part, regression=regression):
            facts = results.tasks[name]
            rows.append(
                (
                    name,
                    part,
                    facts["about"] + (", overfitted" if facts["overfitted"] else ""),
                    f"{facts['parameters']:,}",
                    f"{facts['train']:,} / {facts['pool']:,} / {facts['test']:,}",
                    *(() if regression else (", ".join(facts["ood"]),)),
                    _plain(results.value(name, "network", 0, "rmse" if regression else "accuracy")),
                    _plain(results.value(name, "network", 0, "nll")),
                    _short(_mean(facts["training_seconds"])),
                )
            )
    measured = ("RMSE",) if regression else ("unusual inputs", "accuracy")
    header = ("task", "part", "network", "weights", "training / pool / test", *measured, "NLL", "seconds of training")
    return TableOfText("The regressions" if regression else "The classifications", header, tuple(rows))


def _labels_table(results: Results, part: str) -> TableOfText:
    """d, gains in OOD and ECE by the number of labels; bold is what reaches its target."""
    results, rows = results.among("network", *WITH_LABELS), []
    for n in sorted({n for method in WITH_LABELS for n in results.sizes(method) if n}):
        for method in WITH_LABELS:
            names = [t for t in results.names(part) if results.row(t, method, n) and results.row(t, "network")]
            if names:
                label = results.label(method, names, n)
                rows.append((str(n), label, str(len(names)), *_labels_cells(results, names, method, n)))
    header = (
        "labels",
        "method",
        "tasks",
        "d mean",
        "d worst task",
        "OOD, tables",
        "OOD, images",
        "OOD, worst set",
        "ECE",
    )
    return TableOfText(f"With validation labels: {part} tasks", header, tuple(rows))


def _labels_cells(results: Results, names: Sequence[str], method: str, n: int) -> tuple[str, ...]:
    mean_limit, worst_limit = {30: (0, 20), 100: (2, 10)}.get(n, (1, 5))
    differences = {t: 1000 * d for t in names if (d := results.value(t, method, n, "d")) is not None}
    mean, worst = _mean(differences.values()), max(differences, key=differences.__getitem__)
    gains = {
        g: _mean(x for t in names if results.tasks[t]["group"] == g for x in results.gains(t, method, n).values())
        for g in ("table", "image")
    }
    sets = [(x, t) for t in names for x in results.gains(t, method, n).values()]
    lowest = min(sets, default=None)
    excess = _mean(results.ece_excess(t, method, n) for t in names)
    return (
        _judged(mean, lambda v: v <= mean_limit, _signed(mean)),
        _judged(differences[worst], lambda v: v <= worst_limit, f"{_signed(differences[worst])} ({worst})"),
        _judged(gains["table"], lambda v: v >= 10, _signed(gains["table"])),
        _judged(gains["image"], lambda v: v >= 2, _signed(gains["image"])),
        "–" if lowest is None else _judged(lowest[0], lambda v: v >= -5, f"{_signed(lowest[0])} ({lowest[1]})"),
        _judged(excess, lambda v: v <= 0.005, _signed(excess, 3)),
    )


def _no_labels_table(results: Results, part: str) -> TableOfText:
    results, rows = results.among("network", *WITHOUT_LABELS), []
    for method in WITHOUT_LABELS:
        names = [t for t in results.names(part) if results.row(t, method) and results.row(t, "network")]
        if not names:
            continue
        nll = {t: v for t in names if (v := results.over_network(t, method, 0, "nll")) is not None}
        ece = {t: v for t in names if (v := results.over_network(t, method, 0, "ece")) is not None}
        gains = [x for t in names for x in results.gains(t, method, 0).values()]
        worst, widest = max(nll, key=nll.__getitem__), max(ece, key=ece.__getitem__)
        mean_nll, mean_ece, gain = _mean(nll.values()), _mean(ece.values()), _mean(gains)
        lowest = min(((x, t) for t in names for x in results.gains(t, method, 0).values()), default=None)
        rows.append(
            (
                results.label(method, names),
                str(len(names)),
                _judged(mean_nll, lambda v: v <= -0.05, _signed(mean_nll, 3)),
                _judged(nll[worst], lambda v: v <= 0.015, f"{_signed(nll[worst], 3)} ({worst})"),
                _judged(mean_ece, lambda v: v <= 0, _signed(mean_ece, 3)),
                _judged(ece[widest], lambda v: v <= 0.03, f"{_signed(ece[widest], 3)} ({widest})"),
                _judged(gain, lambda v: v >= 20, _signed(gain)),
                "–" if lowest is None else _judged(lowest[0], lambda v: v >= -1, f"{_signed(lowest[0])} ({lowest[1]})"),
            )
        )
    header = (
        "method",
        "tasks",
        "NLL mean",
        "NLL worst task",
        "ECE mean",
        "ECE worst task",
        "OOD mean",
        "OOD, worst set",
    )
    possible = _mean(results.possible(t) for t in results.names(part))
    note = (
        ""
        if possible is None
        else (
            f"For comparison: the best temperature, chosen with all test labels, lowers the network's NLL by {_plain(possible)} on average over "
            "these tasks; where a network is calibrated there is little to gain."
        )
    )
    return TableOfText(f"Without labels, against the network: {part} tasks", header, tuple(rows), note)


def _regression_table(results: Results, part: str) -> TableOfText:
    results, rows = results.among(*REGRESSIONS), []
    for method in REGRESSIONS:
        for n in results.sizes(method):
            names = [t for t in results.names(part, regression=True) if results.row(t, method, n)]
            if names:
                label = results.label(method, names, n) + (f", {n} labels" if n else "")
                rows.append((label, str(len(names)), *_regression_cells(results, names, method, n)))
    header = ("method", "tasks", "NLL mean", "median", "d mean", "d worst task", "over full evidence")
    cover = ("covers 50 %", "90 %", "95 %", "95 % on the worst task")
    return TableOfText(f"Regression: {part} tasks", header + cover, tuple(rows))


def _regression_cells(results: Results, names: Sequence[str], method: str, n: int) -> tuple[str, ...]:
    def values(column: str) -> dict[str, float]:
        found = {t: results.value(t, method, n, column) for t in names}
        return {t: v for t, v in found.items() if v is not None}

    nll, cover, over = values("nll"), {level: values(f"cover{level}") for level in (50, 90, 95)}, values("d")
    least, most = min(cover[95], key=cover[95].__getitem__), max(over, key=over.__getitem__)
    mean95, mean_d, evidence = _mean(cover[95].values()), _mean(over.values()), results.over_evidence(names, method, n)
    return (
        _plain(_mean(nll.values())),
        _plain(statistics.median(nll.values())),
        _judged(mean_d, lambda v: v <= 0, _signed(mean_d, 3)),
        _judged(over[most], lambda v: v <= 0.3, f"{_signed(over[most], 2)} ({most})"),
        _judged(evidence, lambda v: v <= -0.08, _signed(evidence, 3)),
        _plain(_mean(cover[50].values())),
        _plain(_mean(cover[90].values())),
        _judged(mean95, lambda v: 0.93 <= v <= 0.97, _plain(mean95)),
        _judged(cover[95][least], lambda v: v >= 0.83, f"{_plain(cover[95][least])} ({least})"),
    )


def _detection_table(results: Results) -> TableOfText:
    """AUROC of unusual inputs and of errors, over the classifications on which every listed method is there."""
    candidates: list[tuple[str, str, str]] = [
        ("network", "entropy", "network, entropy"),
        ("ensemble", "entropy", "ensemble of 5, entropy"),
    ]
    for method in ("fit", "fit_unlabelled", "identity"):
        candidates += [
            (method, s, f"{METHODS[method].label}, {s.replace('_', ' ')}")
            for s in ("entropy", "mutual_information", "either")
        ]
    candidates += [(method, "own", METHODS[method].label) for method in DETECTORS]
    results, rows = results.among(*{method for method, _, _ in candidates}), []
    for method, score, label in candidates:
        cells = []
        marked = results.label(method, results.tasks).removeprefix(METHODS[method].label)
        for part in PARTS:
            for group in ("table", "image"):
                names = [t for t in results.names(part) if results.tasks[t]["group"] == group]
                found = [x for t in names for x in _areas(results, t, method, score)]
                cells.append(_plain(_mean(found)) + (f" ({len(found)})" if found else ""))
        if any(cell != "–" for cell in cells):
            rows.append((label + marked, *cells))
    header = ("method and score", *(f"{part}, {group}s" for part in PARTS for group in ("table", "image")))
    return TableOfText("Unusual inputs: mean AUROC", header, tuple(rows))


def _areas(results: Results, task: str, method: str, score: str) -> list[float]:
    """The AUROC of every set, with the largest number of labels that a task allows."""
    sizes = results.sizes(method, task)
    row = results.row(task, method, sizes[-1]) if sizes else None
    found = [scores.get(score) for scores in row.get("ood", {}).values()] if row else []
    return [a for a in found if a is not None]


def _each_task_table(results: Results) -> TableOfText:
    shown = ("network", "temperature", "fit", "fit_unlabelled")
    results, rows = results.among(*shown), []
    for part in PARTS:
        for name in results.names(part):
            network = results.row(name, "network")
            sizes = results.sizes("fit", name)
            if network is None or not sizes:
                continue
            n = sizes[-1]
            older = any(results.label(method, [name]) != METHODS[method].label for method in shown)
            rows.append(
                (
                    name + (" †" if older else ""),
                    str(n),
                    *(_plain(results.value(name, m, k, "accuracy")) for m, k in (("network", 0), ("fit", n))),
                    *(
                        _plain(results.value(name, m, k, "nll"))
                        for m, k in (("network", 0), ("temperature", n), ("fit", n), ("fit_unlabelled", 0))
                    ),
                    _plain(_difference(results.value(name, "network", 0, "nll"), results.possible(name))),
                    *(
                        _plain(results.value(name, m, k, "ece"))
                        for m, k in (("network", 0), ("temperature", n), ("fit", n), ("fit_unlabelled", 0))
                    ),
                    *(_plain(results.value(name, m, k, "error_auroc")) for m, k in (("network", 0), ("fit", n))),
                    *(_plain(_mean(_areas(results, name, m, "entropy"))) for m in ("network", "fit", "fit_unlabelled")),
                )
            )
    header = ["task", "labels", "accuracy: network", "fit", "NLL: network", "temperature", "fit", "fit, no labels"]
    header += ["best temperature in hindsight"]
    header += ["ECE: network", "temperature", "fit", "fit, no labels", "error AUROC: network", "fit"]
    header += ["OOD AUROC: network", "fit", "fit, no labels"]
    return TableOfText("Each classification", tuple(header), tuple(rows))


def _seconds_table(results: Results) -> TableOfText:
    rows = []
    for method in METHODS:
        cells = []
        for group in ("image", "table", "regression"):
            names = [t for t, facts in results.tasks.items() if facts["group"] == group]
            making = _mean(results.value(t, method, n, "seconds") for t in names for n in results.sizes(method, t)[-1:])
            # The outputs of these are kept from one validation set to the next, so that asking again costs nothing.
            kept = method in ("fit", "identity") and group != "regression"
            asking = (
                None
                if kept
                else _mean(
                    results.value(t, method, n, "ms_per_input") for t in names for n in results.sizes(method, t)[-1:]
                )
            )
            cells += [_short(making), _short(asking)]
        if any(cell != "–" for cell in cells):
            rows.append((results.label(method, results.tasks), *cells))
    header = ("method", *(f"{g}: {what}" for g in ("image", "table", "regression") for what in ("s", "ms per input")))
    return TableOfText("Processor seconds to make a predictor, milliseconds to ask it", header, tuple(rows))
