"""Kniebel 2020, "Where is the uncertainty in Bayesian neural networks": the questions of the thesis, and answers to them.

    python -m experiments.kniebel2020.run [--only iris --partial] [--budget small]

README.md says what was done and what was scaled down; settings.py says how large each part is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from experiments.framework import Job, Results, Verdict, run
from experiments.kniebel2020 import figures as drawings
from experiments.kniebel2020 import images, iris, moves, weak
from experiments.kniebel2020.settings import BUDGETS, Settings

__all__ = ["BUDGETS", "DATA", "TITLE", "figures", "jobs", "tables", "verdicts"]

TITLE = "Where is the uncertainty in Bayesian neural networks (Kniebel 2020)"
DATA = ("mnist", "fashion-mnist", "kmnist", "notmnist", "cifar10", "svhn")


def scale(settings: Settings) -> str:
    """How much smaller everything is."""
    images = settings.images
    return f"networks see {images.train:,} images of a set for {images.epochs} epochs; {images.seeds} seeds. The thesis has no results to compare with."


def jobs(settings: Settings, data_dir: Path) -> Iterator[Job]:
    """All jobs, the cheap parts first."""
    yield from iris.jobs(settings.iris)
    yield from weak.jobs(settings, data_dir)
    yield from moves.jobs(settings.moves, data_dir)
    yield from images.jobs(settings.images, data_dir)


def verdicts(results: Results) -> list[Verdict]:
    """W1 to W13, in order."""
    found = [
        *iris.verdicts(results),
        *weak.verdicts(results),
        *moves.verdicts(results),
        *images.verdicts(results),
    ]
    return sorted(found, key=lambda v: int(v.id[1:]))


def tables(results: Results) -> str:
    """What goes below the table of claims."""
    parts = [iris.tables(results), weak.tables(results), images.tables(results)]
    return "\n\n".join(part for part in parts if part)


def figures(results: Results, folder: Path) -> dict[str, str]:
    """Draws what the docs page shows, and returns the captions."""
    return drawings.draw(results, folder)


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__], "kniebel2020"))
