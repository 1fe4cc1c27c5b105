"""`python -m benchmarks.quality`: measures every method on every task, and writes results/quality.json and docs/quality.md.

What was measured is kept in the cache folder, a file for each task, seed and method: a run that was interrupted goes on where it
stopped, and a change of the library's code is measured anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.datasets import MissingData
from benchmarks.quality.methods import METHODS, Skip
from benchmarks.quality.page import write_page
from benchmarks.quality.plan import plan_of
from benchmarks.quality.store import carry_over, collect, read_result, result_path, write_result
from benchmarks.quality.summary import Results, tables_of
from benchmarks.quality.targets import targets_table
from benchmarks.quality.tasks import QUICK, TASKS, Task
from benchmarks.quality.training import CACHE, DATA, ROOT, Prepared, prepare

__all__ = ["main", "measure_task"]

SEEDS = (0, 1, 2)
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "quality.md"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--tasks", help=f"some of {', '.join(TASKS)} (default: all)")
    parser.add_argument("--part", choices=("development", "held-out"), help="one half of the tasks")
    parser.add_argument("--methods", help=f"some of {', '.join(METHODS)} (default: all)")
    parser.add_argument("--seeds", help="which seeds, such as 0,1,2 (default: those of the plan, see quality/plan.py)")
    parser.add_argument("--resplits", type=int, help="validation sets of each size, at most (default: the plan's)")
    parser.add_argument(
        "--all", action="store_true", help="everything, whatever it costs: three seeds and all validation sets"
    )
    parser.add_argument("--data-dir", type=Path, default=DATA, help="the data folder (default: AFTERMAP_DATA)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="the folder for trained weights and results")
    parser.add_argument(
        "--output", type=Path, help="the folder for quality.json (default: benchmarks/results; none for --quick)"
    )
    parser.add_argument(
        "--page", type=Path, help="the page to write (default: docs/quality.md; none for --quick or --output)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="three tiny tasks that need no data folder: to see that all runs"
    )
    parser.add_argument(
        "--carry-over", action="store_true", help="keep stored rows of an older commit where nothing is measured anew"
    )
    parser.add_argument("--train-only", action="store_true", help="only train the networks")
    parser.add_argument("--again", action="store_true", help="measure anew what failed")
    found = parser.parse_args(arguments)
    known = QUICK if found.quick else TASKS
    found.tasks = _chosen(parser, "tasks", found.tasks, known)
    found.methods = _chosen(parser, "methods", found.methods, METHODS)
    if found.part:
        found.tasks = [name for name in found.tasks if known[name].part == found.part]
    try:
        found.seeds = None if found.seeds is None else [int(seed) for seed in found.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds {found.seeds!r} must be whole numbers with commas, such as 0,1,2")
    if found.all and found.seeds is None:
        found.seeds = list(SEEDS)
    if found.resplits is not None and found.resplits < 1:
        parser.error(f"--resplits {found.resplits} must be at least 1")
    return found


def _chosen(parser: argparse.ArgumentParser, what: str, given: str | None, known: Any) -> list[str]:
    names = list(known) if given is None else given.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown {what} {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def _facts(prepared: Prepared) -> dict[str, Any]:
    splits = prepared.splits
    return {
        "train": len(splits.train[0]),
        "pool": len(splits.pool[0]),
        "test": len(splits.test[0]),
        "outputs": splits.outputs,
        "parameters": sum(p.numel() for p in prepared.model.parameters()),
        "ood": {name: len(x) for name, x in splits.ood.items()},
        "training_seconds": round(prepared.seconds, 1),
    }


def _run_method(prepared: Prepared, method: str, resplits: int) -> dict[str, Any]:
    """The result of a method on a task: rows, why it does not apply, or its error."""
    facts: dict[str, Any] = {"task": _facts(prepared), "resplits": resplits}
    try:
        return facts | {"rows": list(METHODS[method].run(prepared, resplits))}
    except Skip as reason:
        return facts | {"skipped": str(reason)}
    except Exception as error:  # one method's failure is a result, and must not end a long run
        return facts | {"error": f"{type(error).__name__}: {error}"[:300]}


def measure_task(
    task: Task,
    seed: int,
    methods: Sequence[str],
    *,
    data_dir: Path,
    cache: Path,
    resplits: int | None = None,
    again: bool = False,
    planned: bool = False,
) -> None:
    """Measures some methods on a task, where the cache does not hold their results already.

    Args:
        task: The task.
        seed: The seed.
        methods: The methods.
        data_dir: The data folder.
        cache: The cache folder.
        resplits: The largest number of validation sets of each size.
        again: Whether to measure anew what failed.
        planned: Whether to leave out what the plan leaves out.
    """
    prepared: Prepared | None = None
    for method in [m for m in methods if task.likelihood in METHODS[m].likelihoods]:
        plan = plan_of(task, method)
        if planned and seed not in plan.seeds:
            continue
        wanted = min(resplits or task.resplits, plan.resplits if planned else task.resplits)
        path = result_path(cache, task, seed, method)
        known = read_result(path)
        enough = known is not None and known["resplits"] >= wanted
        if known is not None and enough and not (again and "error" in known):
            continue
        if prepared is None:
            prepared = prepare(task, seed, data_dir, cache)
        start = time.process_time()
        result = _run_method(prepared, method, wanted)
        write_result(path, result)
        words = result.get("error") or result.get("skipped") or f"{len(result['rows'])} predictors"
        print(f"{task.name:20} seed {seed} {method:16} {time.process_time() - start:6.1f} s  {words[:90]}", flush=True)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs what was asked for, prints the tables, and returns the collected results."""
    asked = _parse(arguments)
    torch.set_num_threads(1)  # so that processor seconds are comparable
    known = QUICK if asked.quick else TASKS
    planned = asked.seeds is None and not asked.quick
    seeds = SEEDS if asked.seeds is None else asked.seeds
    for seed in seeds:
        for name in asked.tasks:
            try:
                if asked.train_only and planned and seed not in plan_of(known[name], "network").seeds:
                    continue
                if asked.train_only:
                    prepared = prepare(known[name], seed, asked.data_dir, asked.cache)
                    print(f"{name:20} seed {seed} trained in {prepared.seconds:.1f} s", flush=True)
                    continue
                measure_task(
                    known[name],
                    seed,
                    asked.methods,
                    data_dir=asked.data_dir,
                    cache=asked.cache,
                    resplits=asked.resplits,
                    again=asked.again,
                    planned=planned,
                )
            except MissingData as missing:
                sys.exit(str(missing))
    results = collect(asked.cache, known, seeds, METHODS)
    stored = (asked.output or RESULTS) / "quality.json"
    if asked.carry_over and stored.is_file():
        results = carry_over(results, json.loads(stored.read_text()))
    for table in [targets_table(Results(results)), *tables_of(results)]:
        print(f"\n{table.text()}")
    output = asked.output or (None if asked.quick else RESULTS)
    if output is not None and not asked.train_only:
        output.mkdir(parents=True, exist_ok=True)
        (output / "quality.json").write_text(_compact(results))
        page = asked.page or (PAGE if output == RESULTS else None)
        if page is not None:
            write_page(results, page)
    return results


def _compact(results: dict[str, Any]) -> str:
    """JSON with one line for each row, so that a new run shows what changed."""
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in results["rows"])
    rest = {key: value for key, value in results.items() if key != "rows"}
    text = json.dumps(rest, separators=(",", ":"))
    return f'{text[:-1]},"rows":[\n{rows}\n]}}\n'
