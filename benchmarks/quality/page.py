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

This page is written by `make bench-quality` from `benchmarks/results/quality.json`; wins and losses stand side by side. Rows are of commit {commit}; where a number is made of rows of another one, which the
last section names, it stands beside a †. Seeds {seeds}, {classifications} classifications and {regressions} regressions.

Every task is a data set with a network that was trained on it in the usual way; some networks are calibrated already, others know their training data by heart. Which
tasks are for development and which are held out was fixed before anything was measured: settings of the library are chosen on development
tasks only.

How the numbers are made:

- Validation sets of 30, 100, 300 and 1,000 labels are drawn from a pool, several times for each size and seed, the same for every method. Numbers
  are means over these sets and over seeds. One table compares methods under the same seeds of a task: those that all of them have which were measured on it.
- **d** is the NLL on the test data minus the smaller one of the network's and that of temperature scaling *with hindsight*, whose temperature was
  chosen on the test data themselves; in thousandths of a nat. For a regression it is the NLL minus that of the network with a constant noise from all validation data, in
  nats.
- **OOD** is the AUROC of unusual inputs by predictive entropy, minus the network's, in points (× 100). For images these are other image sets. For tables they are
  test rows times three ("scaled"), test rows with every column permuted by itself ("shuffled"), classes that were left out of the training ("unseen"), uniform
  draws from a box that is 1.5 times as large as the data ("box"), or other images at the same size.
- **ECE** has 15 bins; with labels it is minus the smaller one of the network's and temperature scaling's with the same labels. **Error AUROC** is that of wrong answers by the largest probability.
- "Minimum over a grid" takes the smallest validation NLL over prior precision and data scale, with the full matrix for up to 1,500 weights, else Kronecker factors. "Identity curvature" is tuned
  like `am.fit`, with a curvature that knows nothing of the data.
- Bold numbers reach the targets that were set in advance: with labels a mean d of at most 0, 2 and 1 with 30, 100 and more labels and at most 20, 10 and 5 on
  every task, OOD of +10 on tables and +2 on images and nowhere below −5, ECE within .005; without labels NLL −.05 on average and nowhere above +.015, ECE not
  above the network's and nowhere by .03, OOD +20 on average and nowhere below −1; for regressions 95 % intervals that cover 93 to 97 % on average and 83 % on every task, and a d of at most
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
