"""Ritter, Botev and Barber 2018, "A scalable Laplace approximation for neural networks", from the toy to the outlook.

    python -m experiments.ritter2018.run [--only toy --partial] [--hours 1]

README.md says what was done and what was scaled down; settings.py says how large each part is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from experiments.framework import Job, Results, Verdict, run
from experiments.ritter2018 import adversarial, notmnist, outlook, residual, toy
from experiments.ritter2018.settings import BUDGETS, Settings

__all__ = ["BUDGETS", "DATA", "TITLE", "figures", "jobs", "tables", "verdicts"]

DATA = ("mnist", "notmnist", "cifar10", "models")
TITLE = "A scalable Laplace approximation for neural networks (Ritter, Botev and Barber 2018)"


def scale(settings: Settings) -> str:
    """How much smaller everything is."""
    images, residual = settings.images, settings.residual
    return (
        f"the network on MNIST has the paper's width, but {images.epochs} epochs instead of 250, and its curvature is of {images.passes} random binarisations of {images.fit:,} images "
        f"instead of 1,000 of all; a pretrained ResNet-20 on CIFAR-10, with the curvature of {residual.fit} images, stands for wide residual networks on CIFAR-100; {images.seeds} seeds."
    )


def jobs(settings: Settings, data_dir: Path) -> Iterator[Job]:
    """All jobs, the cheap parts first; a job may use what an earlier one kept."""
    yield from toy.jobs(settings.toy)
    yield from outlook.jobs(settings.images, settings.outlook, data_dir)
    yield from notmnist.jobs(settings.images, data_dir)
    yield from outlook.cheap_jobs(settings.images, data_dir)
    yield from adversarial.jobs(settings.images, data_dir)
    yield from residual.jobs(settings.residual, data_dir)


def verdicts(results: Results) -> list[Verdict]:
    """R1 to R20."""
    return [
        *toy.verdicts(results),
        *notmnist.verdicts(results),
        *adversarial.verdicts(results),
        *residual.verdicts(results),
        *outlook.verdicts(results),
    ]


def tables(results: Results) -> str:
    """What goes below the table of claims."""
    parts = [notmnist.tables(results), adversarial.tables(results), toy.tables(results)]
    return "\n\n".join(filter(None, parts))


def figures(results: Results, folder: Path) -> dict[str, str]:
    """Figures 1 to 8, as far as their jobs are done, with their captions."""
    drawn: dict[str, str] = {}
    for part in (toy, notmnist, adversarial, residual):
        drawn |= part.figures(results, folder)
    return dict(sorted(drawn.items()))


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__], "ritter2018"))
