"""The lowest versions that pyproject.toml allows, as constraints for pip: `python -m tests.lowest > constraints-lowest.txt`.

PyTorch is the release of constraints.txt, because only one build of it is tested here.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

__all__ = ["EXTRAS", "lowest", "ranges"]

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = (
    "cli",
    "plot",
    "sklearn",
    "hf",
    "lightning",
    "hmc",
)  # What users install; tools of development are not lowered.
_RANGE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)>=(?P<lowest>[0-9.]+)")


def ranges() -> dict[str, str]:
    """The lowest version of every dependency that users install, by its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(r for extra in EXTRAS for r in project["optional-dependencies"][extra])]
    found = [_RANGE.fullmatch(requirement) for requirement in asked]
    if None in found:
        raise ValueError(f"every dependency must state its lowest version as name>=version, got {asked}")
    return {match["name"]: match["lowest"] for match in found if match}


def lowest() -> list[str]:
    """One constraint per dependency; PyTorch stays at the tested release."""
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    torch = next(line for line in pinned if line.startswith("torch=="))
    return [torch, *(f"{name}=={version}" for name, version in ranges().items() if name != "torch")]


if __name__ == "__main__":
    sys.stdout.write("\n".join(lowest()) + "\n")
