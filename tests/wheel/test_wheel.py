"""The wheel that people install: everything is in it, and it works outside the checkout."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import aftermap
from tests.wheel.installed import ROOT, Installed, run

FIT = """
import torch, aftermap as am
x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
la = am.Laplace(torch.nn.Linear(2, 3), "classification").fit([(x, x.argmax(1))]).tune(method="evidence")
print(la.predict(x[:3]))
"""
WHERE = """
import importlib.util, json, sys, aftermap
print(json.dumps({"file": aftermap.__file__, "path": sys.path, "experiments": importlib.util.find_spec("experiments") is not None}))
"""


def test_everything_is_in_the_wheel(installed: Installed) -> None:
    source = ROOT / "src"
    files = [p for p in source.rglob("*") if p.is_file() and p.suffix != ".pyc" and "__pycache__" not in p.parts]
    packed = set(zipfile.ZipFile(installed.wheel).namelist())
    assert {p.relative_to(source).as_posix() for p in files} <= packed
    name = installed.wheel.stem.rsplit("-", 3)[0]
    assert {entry.split("/")[0] for entry in packed} == {"aftermap", f"{name}.dist-info"}


def test_the_environment_knows_nothing_of_the_checkout(installed: Installed, tmp_path: Path) -> None:
    found = json.loads(run(installed.python, "-c", WHERE, folder=tmp_path).stdout)
    assert Path(found["file"]).is_relative_to(installed.place)
    assert not any(Path(place).resolve() in (ROOT, ROOT / "src") for place in found["path"] if place)
    assert not found["experiments"]


def test_the_wheel_works_outside_the_checkout(installed: Installed, tmp_path: Path) -> None:
    said = run(installed.aftermap, "--version", folder=tmp_path)
    assert said.stdout == f"aftermap {aftermap.__version__}\n"
    fitted = run(installed.python, "-c", FIT, folder=tmp_path)
    assert fitted.stdout.startswith("classification of 3 inputs: 3 classes")
