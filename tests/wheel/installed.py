"""An environment of somebody who installed the wheel and has no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

__all__ = ["ROOT", "Installed", "build", "install", "run"]

ROOT = Path(__file__).resolve().parents[2]


def run(*line: object, folder: Path, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Runs a program without what the environment says about Python, as somebody else would."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "AFTERMAP"))}
    env |= {"OMP_NUM_THREADS": "1", "AFTERMAP_STATE": str(folder / ".state"), "COLUMNS": "100"}
    words = [str(word) for word in line]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert code is None or done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def build(folder: Path) -> Path:
    """Builds the wheel, with the installed build backend or with one that pip fetches."""
    if find_spec("pip") is None:
        pytest.skip("pip is not installed in this environment")
    isolated = [] if find_spec("hatchling") is None else ["--no-build-isolation"]
    options = ["--no-deps", *isolated, "--wheel-dir", folder, ROOT]
    done = run(sys.executable, "-m", "pip", "wheel", *options, folder=folder, code=None)
    if done.returncode and not isolated and "hatchling" in done.stderr + done.stdout:
        pytest.skip("the build backend hatchling is neither installed nor can pip fetch it")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@dataclass(frozen=True)
class Installed:
    """The wheel and the environment that it is installed in."""

    wheel: Path
    place: Path

    @property
    def python(self) -> Path:
        return self._programs / "python"

    @property
    def aftermap(self) -> Path:
        return self._programs / "aftermap"

    @property
    def _programs(self) -> Path:
        return self.place / ("Scripts" if os.name == "nt" else "bin")


def install(folder: Path) -> Installed:
    """Builds the wheel and installs it alone; the dependencies are those of the running environment.

    A folder in a .pth file is searched last, and its own .pth files, one of which may name this checkout, are not read.
    """
    made = Installed(build(folder), folder / "venv")
    run(sys.executable, "-m", "venv", "--without-pip", made.place, folder=folder)
    pip = [sys.executable, "-m", "pip", "--python", made.python]
    run(*pip, "install", "--no-deps", "--no-index", made.wheel, folder=folder)
    paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    where = run(made.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder)
    Path(where.stdout.strip(), "dependencies.pth").write_text("\n".join(paths) + "\n")
    return made
