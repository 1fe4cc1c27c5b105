"""The wheel that people install: everything is in it, and it works outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import aftermap

ROOT = Path(__file__).resolve().parents[1]
FIT = """
import torch, aftermap as am
x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
la = am.Laplace(torch.nn.Linear(2, 3), "classification").fit([(x, x.argmax(1))]).tune(method="evidence")
print(la.predict(x[:3])); print(am.__file__)
"""


def run(*line: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program without what the environment says about Python, as somebody else would."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}
    words = [str(word) for word in line]
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)


def build(folder: Path) -> Path:
    """Builds the wheel, with the installed build backend or with one that pip fetches."""
    isolated = [] if find_spec("hatchling") is None else ["--no-build-isolation"]
    options = ["--no-deps", *isolated, "--wheel-dir", folder, ROOT]
    done = run(sys.executable, "-m", "pip", "wheel", *options, folder=folder)
    if done.returncode and not isolated and "hatchling" in done.stderr + done.stdout:
        pytest.skip("the build backend hatchling is neither installed nor can pip fetch it")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    if find_spec("pip") is None:
        pytest.skip("pip is not installed in this environment")
    wheel = build(tmp_path)
    source = ROOT / "src"
    files = [p for p in source.rglob("*") if p.is_file() and p.suffix != ".pyc" and "__pycache__" not in p.parts]
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {p.relative_to(source).as_posix() for p in files} <= packed
    assert {name.split("/")[0] for name in packed} == {"aftermap", wheel.stem.rsplit("-", 3)[0] + ".dist-info"}

    place = tmp_path / "venv"
    assert run(sys.executable, "-m", "venv", place, folder=tmp_path).returncode == 0
    programs = place / ("Scripts" if os.name == "nt" else "bin")
    done = run(programs / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    # The dependencies are those of this environment. A folder in a .pth file is searched last, and its own .pth files,
    # one of which may name this checkout, are not read.
    paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    where = run(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path)
    Path(where.stdout.strip(), "dependencies.pth").write_text("\n".join(paths) + "\n")

    said = run(programs / "aftermap", "--version", folder=tmp_path)
    assert (said.returncode, said.stdout) == (0, f"aftermap {aftermap.__version__}\n"), said.stderr
    fitted = run(programs / "python", "-c", FIT, folder=tmp_path)
    assert fitted.returncode == 0, fitted.stderr
    assert fitted.stdout.startswith("classification of 3 inputs: 3 classes")
    assert Path(fitted.stdout.splitlines()[-1]).is_relative_to(place)
