"""What `import aftermap` gives: every public name, when it is used, and no other."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import aftermap

SOURCE = Path(aftermap.__file__)
ROOT = Path(__file__).resolve().parents[1]


def names_for_type_checkers() -> dict[str, str]:
    """The imports under TYPE_CHECKING: each name with its module."""
    body = ast.parse(SOURCE.read_text(encoding="utf-8")).body
    block = next(node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_type_checkers_and_python_see_the_same_names() -> None:
    seen = names_for_type_checkers()
    assert {*seen, "__version__"} == set(aftermap.__all__)
    homes = {name: module for name, module in seen.items() if module != "aftermap"}
    assert homes.keys() == aftermap._HOMES.keys()
    for name, module in homes.items():
        assert getattr(import_module(module), name) is getattr(aftermap, name)
    assert not set(aftermap._HOMES) & {path.stem for path in SOURCE.parent.iterdir()}  # no module hides a name


def test_every_public_name_is_there() -> None:
    for name in aftermap.__all__:
        assert getattr(aftermap, name) is not None
    assert set(aftermap.__all__) <= set(dir(aftermap))
    assert aftermap.Laplace.__module__ == "aftermap.laplace.laplace"
    assert aftermap.laplace.Laplace is aftermap.Laplace
    for unknown in ("Laplas", "_private", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"has no attribute '{unknown}'"):
            getattr(aftermap, unknown)


def test_the_package_alone_does_not_load_torch() -> None:
    code = (
        "import sys, aftermap\n"
        "assert 'torch' not in sys.modules\n"
        "from aftermap import *\n"
        "assert Laplace is aftermap.Laplace and metrics is aftermap.metrics and 'torch' in sys.modules"
    )
    env = {"PYTHONPATH": str(SOURCE.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_versions_agree() -> None:
    """The version stands in the package, and for those who cite it in CITATION.cff."""
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {aftermap.__version__}\n" in cited


def test_the_pythons_that_are_promised_are_those_that_are_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    classifiers = project["project"]["classifiers"]
    promised = [c.rpartition(" ")[2] for c in classifiers if re.fullmatch(r"Programming Language .* 3\.\d+", c)]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert f"python: {json.dumps(promised)}" in workflow
    assert project["project"]["requires-python"] == f">={promised[0]}"
    assert project["tool"]["ruff"]["target-version"] == "py" + promised[0].replace(".", "")
    assert f"Python {promised[0]} or later" in (ROOT / "Makefile").read_text(encoding="utf-8")
