"""Experiments and benchmarks are no part of the package: they run from a checkout of the sources."""

from __future__ import annotations

from pathlib import Path

import aftermap
from aftermap.errors import InputError

__all__ = ["find_checkout"]


def find_checkout(folder: str) -> Path:
    """The nearest folder above the working folder, or above the package, that is a checkout with ``folder`` in it.

    Raises:
        InputError: there is none.
    """
    starts = [Path.cwd(), Path(aftermap.__file__).resolve().parent]
    for start in starts:
        for place in (start, *start.parents):
            if (place / folder).is_dir() and (place / "pyproject.toml").is_file():
                return place
    raise InputError(
        f"{folder}/ is part of the sources of aftermap, not of the installed package, and was found neither above {Path.cwd()} "
        "nor beside the package. Change into a checkout of the sources and run the command there"
    )
