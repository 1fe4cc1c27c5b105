"""Where results are kept: one file for each task, seed and method, by the state of the library's code; and their summary as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import aftermap as am
from benchmarks.quality.measure import LEVELS, Numbers
from benchmarks.quality.tasks import Task
from benchmarks.timing import machine

__all__ = [
    "COLUMNS",
    "as_seeds",
    "carry_over",
    "collect",
    "library_commit",
    "library_source",
    "read_result",
    "result_path",
    "write_result",
]

VERSION = 2  # raise it when what is measured changes: results are then taken anew
COLUMNS = (
    "accuracy",
    "nll",
    "d",
    "ece",
    "error_auroc",
    "rmse",
    *(f"cover{level}" for level in LEVELS),
    "seconds",
    "ms_per_input",
)
LIBRARY = Path(am.__file__).resolve().parent


@lru_cache(maxsize=1)
def library_source() -> str:
    """A short hash of the source of the library that is imported, as it was when it was first asked for."""
    digest = hashlib.sha256()
    for path in sorted(LIBRARY.rglob("*.py")):
        digest.update(path.relative_to(LIBRARY).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def library_commit() -> str:
    """The commit of the library that is imported, with a plus where files were changed since."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=LIBRARY, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", ".")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("+" if changed else "")


def result_path(cache: Path, task: Task, seed: int, method: str) -> Path:
    """The file of a task, a seed and a method, for the present code and settings.

    It says itself how many validation sets were drawn: fewer than are asked for are drawn anew.
    """
    measured = repr((VERSION, task.data, task.network, task.training, task.sizes, task.trained_on))
    settings = hashlib.sha256(measured.encode()).hexdigest()[:8]
    return cache / "results" / library_source() / f"{task.name}-{settings}" / f"{seed}-{method}.json"


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(result) + "\n")
    unfinished.replace(path)


def read_result(path: Path) -> dict[str, Any] | None:
    """What a file holds; None where there is none."""
    return json.loads(path.read_text()) if path.is_file() else None


def _mean(values: Iterable[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return statistics.fmean(present) if present else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _joined(rows: list[Numbers]) -> Numbers:
    """The mean of rows, over validation sets."""
    joined: Numbers = {c: _mean(row.get(c) for row in rows) for c in COLUMNS if any(c in row for row in rows)}
    sets = rows[0].get("ood", {})
    joined["ood"] = {
        name: {s: _mean(row["ood"].get(name, {}).get(s) for row in rows) for s in scores}
        for name, scores in sets.items()
    }
    return joined


def collect(cache: Path, tasks: Mapping[str, Task], seeds: Iterable[int], methods: Iterable[str]) -> dict[str, Any]:
    """All that the cache holds for the present code, as a table: a row for each task, method and size of validation sets.

    Numbers are means over validation sets, one for each seed. Every row names the commit that it is of.
    """
    commit = library_commit()
    rows: list[dict[str, Any]] = []
    skipped: dict[str, dict[str, set[str]]] = {}
    described: dict[str, dict[int, dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    for name, task in tasks.items():
        found: dict[str, dict[int, list[Numbers]]] = {}
        for method in methods:
            for seed in seeds:
                result = read_result(result_path(cache, task, seed, method))
                if result is None:
                    continue
                if "error" in result:
                    failed[f"{name} {seed} {method}"] = result["error"]
                elif "skipped" in result:
                    skipped.setdefault(method, {}).setdefault(result["skipped"], set()).add(name)
                else:
                    found.setdefault(method, {})[seed] = result["rows"]
                    described.setdefault(name, {}).setdefault(seed, result["task"])
        for method, by_seed in found.items():
            rows += [{**row, "commit": commit} for row in _rows_of(name, method, by_seed)]
    return {
        "commit": commit,
        "source": library_source(),
        "machine": machine(),
        "seeds": sorted({seed for by_seed in described.values() for seed in by_seed}),
        "columns": list(COLUMNS),
        "tasks": {name: _task_facts(tasks[name], by_seed) for name, by_seed in described.items()},
        "rows": rows,
        "skipped": {m: {why: sorted(names) for why, names in r.items()} for m, r in skipped.items()},
        "failed": failed,
    }


def carry_over(results: dict[str, Any], older: Mapping[str, Any]) -> dict[str, Any]:
    """The results with what an older run has measured and this one has not, each row with the commit that it is of.

    A task that was not measured again keeps all its rows. Of one that was, the rows of other methods are taken over if its network is the
    same one: its d agrees to four digits under the same seeds.
    """
    if older["columns"] != results["columns"]:
        return results
    place = results["columns"].index("d")
    rows = [_by_seed(row) for row in older["rows"]]
    now, before = _networks(results["rows"], place), _networks(rows, place)
    same = {key for key in now if key in before and abs(now[key] - before[key]) <= 1e-3 * abs(now[key]) + 1e-6}
    measured = {(row["task"], row["method"]) for row in results["rows"]}

    def is_kept(row: Mapping[str, Any]) -> bool:
        if row["task"] not in results["tasks"]:
            return True
        return (row["task"], row["method"]) not in measured and all((row["task"], str(s)) in same for s in row["seeds"])

    dated = [{**row, "commit": row.get("commit", older["commit"])} for row in rows if is_kept(row)]
    tasks = {name: results["tasks"].get(name, facts) for name, facts in {**results["tasks"], **older["tasks"]}.items()}
    kept = {row["task"] for row in (*results["rows"], *dated)}
    seeds = sorted({seed for row in (*results["rows"], *dated) for group in row["seeds"] for seed in as_seeds(group)})
    return {
        **results,
        "seeds": seeds,
        "tasks": {name: facts for name, facts in tasks.items() if name in kept},
        "rows": [*results["rows"], *dated],
        "skipped": _joined_reasons(results["skipped"], older["skipped"], results["tasks"]),
    }


def _networks(rows: Iterable[Mapping[str, Any]], place: int) -> dict[tuple[str, str], float]:
    """The d of the network of each task and seed, and of all seeds together where older results have no more."""
    found = {}
    for row in rows:
        if row["method"] == "network":
            for seeds, values in zip(row["seeds"], row["values"], strict=True):
                found[row["task"], str(seeds)] = values[place]
            for seed, value in enumerate(row.get("d_by_seed", ())):
                found[row["task"], str(seed)] = value
    return found


def _joined_reasons(
    now: Mapping[str, Mapping[str, list[str]]], before: Mapping[str, Mapping[str, list[str]]], measured: Iterable[str]
) -> dict[str, dict[str, list[str]]]:
    """Why methods were left out, with what an older run says of the tasks that were not measured again."""
    known, joined = set(measured), {method: {why: list(names) for why, names in r.items()} for method, r in now.items()}
    for method, reasons in before.items():
        for why, names in reasons.items():
            others = [name for name in names if name not in known]
            if others:
                listed = joined.setdefault(method, {}).setdefault(why, [])
                listed += [name for name in others if name not in listed]
    return joined


def as_seeds(group: int | list[int]) -> tuple[int, ...]:
    """The seeds of a group: one, or those that older results were averaged over."""
    return (group,) if isinstance(group, int) else tuple(group)


def _by_seed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its numbers by seed; one from before they were kept apart has those of all its seeds together."""
    if "seeds" in row:
        return dict(row)
    count = len(row.get("d_by_seed", ())) or row["sets"]
    group: int | list[int] = 0 if count == 1 else list(range(count))
    found = dict(row) if count > 1 else {key: value for key, value in row.items() if key != "d_by_seed"}
    found |= {"seeds": [group], "sets": [row["sets"]], "values": [row["values"]]}
    if "ood" in row:
        found["ood"] = {name: {s: [v] for s, v in scores.items()} for name, scores in row["ood"].items()}
    return found


def _rows_of(task: str, method: str, by_seed: Mapping[int, list[Numbers]]) -> list[dict[str, Any]]:
    """A row for each size of validation sets, with a list entry for each seed."""
    rows = []
    for n in sorted({row["n"] for found in by_seed.values() for row in found}):
        found = {seed: [row for row in rows_of if row["n"] == n] for seed, rows_of in by_seed.items()}
        found = {seed: sets for seed, sets in found.items() if sets}
        joined = [_joined(sets) for sets in found.values()]
        row: dict[str, Any] = {"task": task, "method": method, "n": n, "seeds": list(found)}
        row["sets"] = [len(sets) for sets in found.values()]
        row["values"] = [[_rounded(mean.get(c)) for c in COLUMNS] for mean in joined]
        ood = {
            name: {s: [_rounded(mean["ood"].get(name, {}).get(s)) for mean in joined] for s in scores}
            for name, scores in joined[0]["ood"].items()
        }
        if ood:
            row["ood"] = ood
        warned = sum(1 for sets in found.values() for r in sets if r["note"].get("warnings"))
        if warned:
            row["warned"] = warned
        rows.append(row)
    return rows


def _task_facts(task: Task, by_seed: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    facts = dict(next(iter(by_seed.values())))
    facts["training_seconds"] = [f["training_seconds"] for f in by_seed.values()]
    own = {"part": task.part, "group": task.group, "likelihood": task.likelihood, "about": task.about}
    return own | {"overfitted": task.overfitted} | facts
