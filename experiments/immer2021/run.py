"""Linearised Laplace (Immer, Korzepa and Bauer 2021) and the slides of Barbano and Antorán on it.

    python -m experiments.immer2021.run [--budget small] [--only uci --partial]

README.md says what was done and what was scaled down; settings.py says how large each part is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from experiments.framework import Job, Results, Verdict, run
from experiments.immer2021 import confidence, images, occam, pictures, uci
from experiments.immer2021.settings import BUDGETS, Settings
from experiments.immer2021.verdicts import verdicts as _verdicts

__all__ = ["BUDGETS", "DATA", "TITLE", "figures", "jobs", "tables", "verdicts"]

TITLE = "Linearised Laplace (Immer, Korzepa and Bauer 2021)"
DATA = ("uci_classification", "mnist", "fashion-mnist", "cifar10", "svhn", "models")


def scale(settings: Settings) -> str:
    """How much smaller everything is."""
    images, tables = settings.images, settings.uci
    return (
        f"networks on MNIST see {images.train:,} images for {images.epochs} epochs and choose among {len(images.precisions)} precisions, those on Fashion-MNIST {images.clothes_train:,} for {images.clothes_epochs} and "
        f"{len(images.clothes_precisions)} (the paper: 60,000, 500 and 16); "
        f"those on tables have {tables.steps:,} steps and {len(tables.precisions)} precisions (10,000 and 10); {len(tables.seeds)} seeds instead of 10."
    )


def jobs(settings: Settings, data_dir: Path) -> Iterator[Job]:
    """All jobs; those that compare images use the weights that earlier ones trained."""
    yield from confidence.jobs(settings.far, settings.svhn, data_dir)
    yield from occam.jobs(settings.occam)
    yield from uci.jobs(settings.uci, data_dir)
    yield from images.jobs(settings.images, data_dir)


def verdicts(results: Results) -> list[Verdict]:
    """L1 to L9."""
    return _verdicts(results)


def tables(results: Results) -> str:
    """The tables of the paper."""
    return pictures.tables(results)


def figures(results: Results, folder: Path) -> dict[str, str]:
    """The figures whose jobs are done, with their captions."""
    return pictures.draw(results, folder)


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__], "immer2021"))
