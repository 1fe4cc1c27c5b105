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
    """The mean of rows, over validation sets or seeds."""
    joined: Numbers = {c: _mean(row.get(c) for row in rows) for c in COLUMNS if any(c in row for row in rows)}
    sets = rows[0].get("ood", {})
    joined["ood"] = {
        name: {s: _mean(row["ood"].get(name, {}).get(s) for row in rows) for s in scores}
        for name, scores in sets.items()
    }
    return joined


def collect(cache: Path, tasks: Mapping[str, Task], seeds: Iterable[int], methods: Iterable[str]) -> dict[str, Any]:
    """All that the cache holds for the present code, as a table: a row for each task, method and size of validation sets.

    Numbers are means over validation sets, then over seeds; "d" is also given for each seed. Every row names the commit that it is of.
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
    """The results with rows of an older run for what this one has not measured, each with the commit that it is of.

    A task's rows are taken over only if its network is the same: its NLL agrees to four digits.
    """
    place = results["columns"].index("nll")

    def networks(content: Mapping[str, Any]) -> dict[str, float]:
        return {row["task"]: row["values"][place] for row in content["rows"] if row["method"] == "network"}

    if older["columns"] != results["columns"]:
        return results
    now, before = networks(results), networks(older)
    same = {task for task in now if task in before and abs(now[task] - before[task]) <= 1e-3 * abs(now[task])}
    measured = {(row["task"], row["method"]) for row in results["rows"]}
    kept = [row for row in older["rows"] if row["task"] in same and (row["task"], row["method"]) not in measured]
    dated = [{**row, "commit": row.get("commit", older["commit"])} for row in kept]
    return {**results, "rows": [*results["rows"], *dated]}


def _rows_of(task: str, method: str, by_seed: Mapping[int, list[Numbers]]) -> list[dict[str, Any]]:
    rows = []
    sizes = sorted({row["n"] for found in by_seed.values() for row in found})
    for n in sizes:
        per_seed = [[row for row in found if row["n"] == n] for found in by_seed.values()]
        per_seed = [found for found in per_seed if found]
        joined = [_joined(found) for found in per_seed]
        mean = _joined(joined)
        row: dict[str, Any] = {"task": task, "method": method, "n": n, "sets": sum(map(len, per_seed))}
        row["values"] = [_rounded(mean.get(c)) for c in COLUMNS]
        if "d" in mean:
            row["d_by_seed"] = [_rounded(j["d"]) for j in joined]
        row["ood"] = {name: {s: _rounded(v) for s, v in scores.items()} for name, scores in mean["ood"].items()}
        warned = sum(1 for found in per_seed for r in found if r["note"].get("warnings"))
        if warned:
            row["warned"] = warned
        if not row["ood"]:
            del row["ood"]
        rows.append(row)
    return rows


def _task_facts(task: Task, by_seed: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    facts = dict(next(iter(by_seed.values())))
    facts["training_seconds"] = [f["training_seconds"] for f in by_seed.values()]
    own = {"part": task.part, "group": task.group, "likelihood": task.likelihood, "about": task.about}
    return own | {"overfitted": task.overfitted} | facts
