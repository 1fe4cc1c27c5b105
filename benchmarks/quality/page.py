"""Writes docs/quality.md from the results; no number on it is typed by hand."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.methods import METHODS
from benchmarks.quality.plan import plan_of
from benchmarks.quality.store import as_seeds
from benchmarks.quality.summary import Results, tables_of
from benchmarks.quality.targets import targets_table
from benchmarks.quality.tasks import TASKS

__all__ = ["page_of", "write_page"]

ROOT = Path(__file__).resolve().parents[2]

HEAD = """# Does the default call help?

What do you gain, or lose, if you call `am.fit` with its defaults? This page measures it on many networks, and shows wins and losses side by side. `make bench-quality` writes it from `benchmarks/results/quality.json`.
The numbers belong to commit {commit}; a † marks numbers that also contain rows measured at another commit, which the last section names. There are {classifications} classifications and {regressions} regressions, with seeds {seeds}.

Every task is a data set together with a network that was trained on it in the usual way. Some of these networks are well calibrated already, others know their training data by heart. It was fixed before anything was measured which
tasks are for development and which are held out; settings of the library are chosen on the development tasks only.

The numbers are made as follows:

- Validation sets of 30, 100, 300 and 1,000 labels are drawn from a pool, several times for each size and seed, and are the same for every method. Numbers
  are means over these sets and over seeds. Within one table, methods are compared under the same seeds of each task.
- **d** tells how much worse a method is than the best simple answer. It is the negative log-likelihood (NLL) on the test data, minus the smaller of two others: the NLL of the network, and that of temperature scaling *with hindsight*, whose temperature was
  chosen on the test data themselves. Its unit is a thousandth of a nat. For a regression it is the NLL minus that of the network with a constant noise, which is estimated from all validation data; its unit is a
  nat.
- **OOD** tells how much better unusual ("out-of-distribution") inputs are noticed: the AUROC of the predictive entropy, minus that of the network's entropy, in points (× 100). For images, the unusual inputs are other sets of images. For tables they are
  test rows times three ("scaled"), test rows with every column permuted by itself ("shuffled"), classes that were left out of the training ("unseen"), uniform
  draws from a box that is 1.5 times as large as the data ("box"), or other images of the same size.
- **ECE** is the calibration error with 15 bins. With labels, the smaller of two others is subtracted: that of the network, and that of temperature scaling with the same labels. **Error AUROC** is the AUROC of the largest probability at finding wrong answers.
- "Minimum over a grid" takes the smallest validation NLL over prior precision and data scale, with the full matrix for up to 1,500 weights and Kronecker factors above. "Identity curvature" is tuned
  like `am.fit`, but its curvature knows nothing about the data.
- Bold numbers reach the targets, which were set in advance. With labels: a mean d of at most 0 for 30 labels, 2 for 100 and 1 for more, and at most 20, 10 and 5 on
  every single task; an OOD of at least +10 on tables and +2 on images, and nowhere below −5; an ECE within .005. Without labels: an NLL of −.05 on average and nowhere above +.015; an ECE not
  above the network's on average, and nowhere by .03; an OOD of +20 on average, and nowhere below −1. For regressions: 95 % intervals that cover 93 to 97 % on average and 83 % on every task, and a d of at most
  .3 everywhere.

"""


def page_of(results: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    groups = [facts["group"] for facts in results["tasks"].values()]
    head = HEAD.format(
        commit=results["commit"],
        seeds=", ".join(map(str, results["seeds"])) or "none",
        classifications=sum(g != "regression" for g in groups),
        regressions=groups.count("regression"),
    )
    return head + "\n".join(
        [*(table.markdown() for table in [targets_table(Results(results)), *tables_of(results)]), *_left_out(results)]
    )


def _left_out(results: Mapping[str, Any]) -> list[str]:
    """What was not measured, and why: tasks and methods without a result, few validation sets, methods that do not apply, failures."""
    measured = {(row["task"], row["method"]) for row in results["rows"]}
    lines = []
    by_seeds: dict[str, dict[str, set[str]]] = {}
    for row in results["rows"]:
        own = ", ".join(str(seed) for group in row["seeds"] for seed in as_seeds(group))
        by_seeds.setdefault(own, {}).setdefault(row["method"], set()).add(row["task"])
    for own, found in sorted(by_seeds.items()):
        which = ", ".join(f"{METHODS[method].label} ({len(names)})" for method, names in found.items())
        lines.append(f"- measured under seed {own} alone (tasks): {which}")
    missing = [name for name in TASKS if name not in results["tasks"]]
    if missing:
        lines.append(f"- {len(missing)} of {len(TASKS)} tasks: {', '.join(missing)}")
    for method, facts in METHODS.items():
        reasons = results["skipped"].get(method, {})
        lines += [f"- {facts.label}: {why} ({len(names)} tasks)" for why, names in reasons.items()]
        known = {name for names in reasons.values() for name in names}
        without = [
            name
            for name, task in results["tasks"].items()
            if task["likelihood"] in facts.likelihoods and (name, method) not in measured and name not in known
        ]
        by_plan = [name for name in without if name in TASKS and plan_of(TASKS[name], method).reason]
        for why in sorted({plan_of(TASKS[name], method).reason for name in by_plan}):
            count = sum(plan_of(TASKS[name], method).reason == why for name in by_plan)
            lines.append(f"- {facts.label}: {why} ({count} tasks)")
        without = [name for name in without if name not in by_plan]
        if without:
            which = "any task" if not any(m == method for _, m in measured) and not known else ", ".join(without)
            lines.append(f"- {facts.label}: not run on {which}")
    older: dict[tuple[str, str], set[str]] = {}
    for row in results["rows"]:
        if row.get("commit", results["commit"]) != results["commit"]:
            older.setdefault((row["method"], row["commit"]), set()).add(row["task"])
    lines += [
        f"- {METHODS[method].label}: measured at another commit ({commit}) on {', '.join(sorted(names))}"
        for (method, commit), names in older.items()
    ]
    few = sorted({sum(row["sets"]) for row in results["rows"] if row["n"]})
    if few and few[0] < 5:
        lines.append(
            f"- validation sets behind a number, over all seeds: {few[0]} to {few[-1]}; with fewer than 5 it is noisy"
        )
    lines += [f"- failed: {what}: {error}" for what, error in results["failed"].items()]
    return ["## Not measured\n\n" + "\n".join(lines) + "\n"] if lines else []


def write_page(results: Mapping[str, Any], path: Path) -> None:
    """Writes the page."""
    path.write_text(page_of(results), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m benchmarks.quality.page`: the page anew from the stored results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "quality.json")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "quality.md")
    asked = parser.parse_args(arguments)
    write_page(json.loads(asked.results.read_text()), asked.output)


if __name__ == "__main__":
    main()
