"""Without its package an integration says what to install; the library itself needs none of them."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from aftermap.errors import UnsupportedError

CASES = [
    ("sklearn", "sklearn", "sklearn"),
    ("huggingface", "transformers", "hf"),
    ("lightning", "lightning", "lightning"),
]


@pytest.mark.parametrize("module, package, extra", CASES)
def test_a_missing_package_is_named(module: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name == package or name.startswith((f"{package}.", "aftermap.integrations.")):
            monkeypatch.delitem(sys.modules, name)

    class Absent:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name.split(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(
        UnsupportedError, match=rf"need {package}, which is not installed: pip install 'aftermap\[{extra}\]'"
    ):
        importlib.import_module(f"aftermap.integrations.{module}")


def test_the_library_imports_none_of_them() -> None:
    code = (
        "import sys, aftermap.integrations; from aftermap import *;"
        "print([p for p in ('sklearn', 'transformers', 'peft', 'lightning', 'mapie') if p in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
