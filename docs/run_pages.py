"""Runs the Python of the documentation: every block of a page, in order, in one namespace.

A ``python`` block is run; a ``text`` block right after it is what it printed. Blocks in other languages are only shown.

    python docs/run_pages.py [PAGE ...]           # run, compare the words of what is printed
    python docs/run_pages.py --write [PAGE ...]   # run, and put what is printed into the pages

Numbers are not compared: they depend a little on the machine. Words are, so that a page cannot drift from the code.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["DOCS", "FENCE", "Block", "blocks_of", "masked", "pages", "run_page", "with_outputs"]

DOCS = Path(__file__).resolve().parent
FENCE = re.compile(
    r"^```python[^\n]*\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE
)
_NUMBER = re.compile(r"[-+−]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?\*?")  # with the star of a table's best


@dataclass(frozen=True)
class Block:
    """One piece of code on a page.

    Attributes:
        line: where it starts, for tracebacks.
        code: the Python.
        output: what the page says that it prints; None where the page says nothing.
    """

    line: int
    code: str
    output: str | None


def pages() -> list[Path]:
    """Every page with Python that is run."""
    return [p for p in sorted(DOCS.rglob("*.md")) if blocks_of(p.read_text(encoding="utf-8"))]


def blocks_of(text: str) -> list[Block]:
    r"""The blocks of a page, in order.

    >>> blocks_of("Look:\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n")
    [Block(line=4, code='print(1)\n', output='1\n')]
    """
    return [Block(text.count("\n", 0, m.start("code")) + 1, m["code"], m["output"]) for m in FENCE.finditer(text)]


def masked(text: str) -> list[str]:
    """The words of an output, without its numbers and the space around them.

    >>> masked("accuracy  0.97")
    ['accuracy #']
    """
    lines = (" ".join(_NUMBER.sub("#", line).split()) for line in text.splitlines())
    words = (re.sub(r"[█─-]+", "", line).strip() for line in lines)
    return [line for line in words if line]


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """A temporary working folder, and torch's own generator as it was afterwards."""
    before, state = Path.cwd(), torch.random.get_rng_state()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            torch.random.set_rng_state(state)


def run_page(page: Path) -> list[str]:
    """Runs a page in a temporary folder.

    Args:
        page: a Markdown file.

    Returns:
        What each block printed.
    """
    names: dict[str, object] = {"__name__": page.stem}
    printed = []
    with _elsewhere():
        for block in blocks_of(page.read_text(encoding="utf-8")):
            # Empty lines in front, so that a traceback names the line of the page.
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, names)
            printed.append(out.getvalue())
    return printed


def with_outputs(text: str, printed: list[str]) -> str:
    r"""The text of a page with the given outputs in place of those that it has.

    >>> with_outputs("```python\nprint(2)\n```\n\n```text\n1\n```\n", ["2\n"])
    '```python\nprint(2)\n```\n\n```text\n2\n```\n'
    """
    outputs = iter(printed)

    def renew(match: re.Match[str]) -> str:
        new = "\n".join(line.rstrip() for line in next(outputs).strip("\n").splitlines()) + "\n"
        if match["output"] is None:
            return match[0]
        start, end = (place - match.start() for place in match.span("output"))
        return match[0][:start] + new + match[0][end:]

    return FENCE.sub(renew, text)


def main(arguments: list[str] | None = None) -> int:
    """Runs pages; the number of pages whose output differs in words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true", help="put what is printed into the pages")
    options = parser.parse_args(arguments)
    wrong = 0
    for page in [p.resolve() for p in options.pages] or pages():
        start = time.process_time()
        printed = run_page(page)
        text = page.read_text(encoding="utf-8")
        differs = [
            b.line
            for b, out in zip(blocks_of(text), printed, strict=True)
            if b.output is not None and masked(b.output) != masked(out)
        ]
        if options.write:
            page.write_text(with_outputs(text, printed), encoding="utf-8")
        wrong += bool(differs) and not options.write
        state = f"other words after the block in line {differs}" if differs else "ok"
        sys.stdout.write(f"{page.relative_to(DOCS)}: {time.process_time() - start:.1f} s of computing, {state}\n")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
