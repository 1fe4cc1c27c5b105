"""Osawa et al. 2019, "Practical deep learning with Bayesian principles": VOGN against Adam and others, from the toy to processes.

    python -m experiments.osawa2019.run [--only lenet --partial] [--hours 1]

README.md says what was done and what was scaled down; settings.py says how large each part is and what each method may choose from.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from experiments.framework import Job, Results, Verdict, run
from experiments.osawa2019 import continual, images, parallel, toy
from experiments.osawa2019 import figures as drawings
from experiments.osawa2019 import verdicts as judging
from experiments.osawa2019.settings import BUDGETS, Settings
from experiments.osawa2019.training import NAMES

__all__ = ["BUDGETS", "DATA", "TITLE", "figures", "jobs", "tables", "verdicts"]

TITLE = "Practical deep learning with Bayesian principles (Osawa et al. 2019)"
DATA = ("cifar10", "svhn", "mnist")
COLUMNS = {
    "accuracy": "test accuracy",
    "train_accuracy": "training",
    "nll": "NLL",
    "ece": "ECE",
    "auroc": "AUROC of errors",
}


def scale(settings: Settings) -> str:
    """How much smaller everything is."""
    lenet, wide, residual = settings.pictures()
    return (
        f"LeNet-5 is trained on {lenet.train:,} images and on {settings.large.train:,} for {lenet.epochs} epochs (the paper: 50,000 for about 210), a wide convolutional network on {wide.train:,} and a small residual "
        f"network on {residual.train:,}, with one draw of the weights in a step and {lenet.seeds} seeds; these networks are far from trained."
    )


def jobs(settings: Settings, data_dir: Path) -> Iterator[Job]:
    """All jobs, the cheap parts first."""
    yield from toy.jobs(settings.toy)
    yield from parallel.jobs(settings.parallel, settings.lenet, data_dir)
    yield from continual.jobs(settings.continual, data_dir)
    yield from images.jobs(settings, data_dir)


def verdicts(results: Results) -> list[Verdict]:
    """V1 to V16."""
    return [
        *judging.verdicts(results),
        *continual.verdicts(results),
        *toy.verdicts(results),
        *parallel.verdicts(results),
    ]


def tables(results: Results) -> str:
    """The poster's table with our numbers, and what each method chose."""
    head = ["network", "method", *COLUMNS.values(), "SVHN AUROC", "chosen"]
    lines = ["### The poster's table with our numbers", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for part in results.settings.all_pictures():
        for method in part.methods:
            pattern = f"{part.network}/{method}/*"
            cells = [results.text(pattern, name) for name in (*COLUMNS, "auroc_svhn")]
            tuned = results.values.get(f"{part.network}/tune_{method}", {}).get("settings", {})
            chosen = ", ".join(f"{k} {v:g}" for k, v in tuned.items())
            lines.append(f"| {judging.LABELS[part.network]} | {NAMES[method]} | " + " | ".join([*cells, chosen]) + " |")
    return "\n".join(lines)


def figures(results: Results, folder: Path) -> dict[str, str]:
    """Every figure whose jobs are done."""
    return {
        **toy.figures(results, folder),
        **drawings.draw(results, folder),
        **continual.figures(results, folder),
        **parallel.figures(results, folder),
    }


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__], "osawa2019"))
