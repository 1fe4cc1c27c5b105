"""What `import aftermap` gives: every public name, when it is used, and no other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import aftermap

SOURCE = Path(aftermap.__file__)


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
    assert {name: f"aftermap.{home}" for name, home in aftermap._HOMES.items()} == homes
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
