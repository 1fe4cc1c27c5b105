"""How much of the library one call goes through: files, functions, and how deeply they are nested."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import aftermap

__all__ = ["Trace", "trace"]

_PACKAGE = f"{Path(aftermap.__file__).parent}{os.sep}"
# Frames of their own only before Python 3.12, or parts of the function around them.
_INLINE = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"})


class Trace(NamedTuple):
    """What a call went through inside the package.

    Attributes:
        files: distinct files.
        functions: distinct functions; comprehensions belong to the function around them.
        depth: the largest number of the package's functions that were active at once.
    """

    files: int
    functions: int
    depth: int


def trace(call: Callable[[], Any]) -> Trace:
    """Runs a call under `sys.setprofile` and counts; what it returns is dropped."""
    seen: set[CodeType] = set()
    depth = deepest = 0

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth, deepest
        code = frame.f_code
        if event not in ("call", "return") or code.co_name in _INLINE or not code.co_filename.startswith(_PACKAGE):
            return
        if event == "return":
            depth -= 1
            return
        seen.add(code)
        depth += 1
        deepest = max(deepest, depth)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(before)
    return Trace(len({c.co_filename for c in seen}), len(seen), deepest)
