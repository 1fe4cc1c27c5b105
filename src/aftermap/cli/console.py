"""What is said, and where: results on standard output, everything else on standard error, and only one process speaks."""

from __future__ import annotations

import errno
import functools
import json
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aftermap.distributed import launched_rank, rank
from aftermap.errors import AftermapError, InputError, ProcessError

__all__ = [
    "BAD_INPUT",
    "CHECK_FAILED",
    "GOOD",
    "INTERRUPTED",
    "PROCESS_LOST",
    "WORSE",
    "Reporter",
    "confirmed",
    "guarded",
    "plain_table",
    "replaced_file",
]

GOOD, BAD_INPUT, CHECK_FAILED, WORSE, PROCESS_LOST, INTERRUPTED = 0, 2, 3, 4, 5, 130
P = ParamSpec("P")

_out, _err = Console(highlight=False), Console(stderr=True, highlight=False)


class Reporter:
    """Says what a command has to say.

    Args:
        as_json: Whether standard output gets one JSON value and nothing else; then words go to standard error.
    """

    def __init__(self, as_json: bool = False):
        self.as_json = as_json

    @property
    def _words(self) -> Console:
        return _err if self.as_json else _out

    @property
    def width(self) -> int:
        """Columns of the screen."""
        return self._words.width

    def line(self, text: str = "", style: str | None = None) -> None:
        """A sentence of the result."""
        if rank() == 0:
            _print(self._words, text, style)

    def note(self, text: str) -> None:
        """A sentence about the work, on standard error."""
        if rank() == 0:
            _print(_err, text, "dim")

    def table(self, table: Table) -> None:
        """A table of the result."""
        if rank() == 0:
            self._words.print(table)

    def result(self, content: Any) -> None:
        """The whole result for machines, said only if --json asks for it."""
        if self.as_json and rank() == 0:
            typer.echo(json.dumps(content, indent=2, allow_nan=False, default=str))


def _print(console: Console, text: str, style: str | None = None, label: str = "", label_style: str = "") -> None:
    """On a terminal lines end between words, so that a path can be copied; elsewhere a sentence is one line."""
    shown = label + text
    if console.is_terminal:
        lines = [
            textwrap.wrap(line, console.width, break_long_words=False, break_on_hyphens=False) or [""]
            for line in shown.split("\n")
        ]
        shown = "\n".join(part for line in lines for part in line)
    marked = escape(shown)
    if label:
        marked = f"[{label_style}]{marked[: len(label)].rstrip()}[/] {marked[len(label) :]}"
    console.print(marked, style=style, soft_wrap=True)


def _complain(text: str, kind: str = "error") -> None:
    """Says an error, or a warning of the first process; the errors of others say whose they are, since it may be gone."""
    if rank() == 0 and (kind == "error" or launched_rank() == 0):
        colour = "red" if kind == "error" else "yellow"
        who = f"process {launched_rank()}: " if launched_rank() else ""
        _print(_err, text, None, f"{who}{kind}: ", f"bold {colour}")


def guarded(function: Callable[P, int | None]) -> Callable[P, None]:
    """A command: errors of its user become one message and exit code 2, warnings one line each.

    Random numbers of torch's default generator are put back afterwards.
    """

    @functools.wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        code: int | None = GOOD
        with torch.random.fork_rng(), _warnings_in_words():
            try:
                code = function(*args, **kwargs)
            except ProcessError as error:
                _complain(str(error))
                code = PROCESS_LOST
            except AftermapError as error:
                _complain(str(error))
                code = BAD_INPUT
            except KeyboardInterrupt:
                _complain("interrupted; nothing half-written is left behind")
                code = INTERRUPTED
            except (MemoryError, torch.OutOfMemoryError) as error:
                _complain(
                    f"out of memory ({error}). Try a smaller --batch-size, --structure diagonal, or --params last_layer; "
                    "`aftermap doctor` shows what each costs"
                )
                code = BAD_INPUT
            except OSError as error:
                _complain(_about_file(error))
                code = BAD_INPUT
        if code:
            raise typer.Exit(code)

    return command


def _about_file(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    text = f"{where}{error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return f"{text}. The disk is full: what was there before is unchanged, and nothing half-written is left behind"
    return text


@contextmanager
def _warnings_in_words() -> Iterator[None]:
    seen: set[str] = set()

    def show(message: Any, category: Any, *rest: Any, **more: Any) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            _complain(str(message), "warning")

    with warnings.catch_warnings():
        # Under `python -W error`, as in tests, a warning stays an error.
        warnings.showwarning = show
        yield


def confirmed(place: Path | None, *, force: bool, what: str) -> bool:
    """Makes sure that ``place`` may be written: it is not there, --force was given, or the person at the terminal says yes.

    Returns:
        Whether something is to be replaced.

    Raises:
        InputError: It is there, and nobody allowed to replace it.
    """
    if place is None:
        return False
    there = place.exists() and not (place.is_dir() and not any(place.iterdir()))
    if not there or force:
        return there
    if (
        _err.is_terminal
        and _stdin_is_terminal()
        and rank() == 0
        and typer.confirm(f"{place} exists. Replace it?", err=True)
    ):
        return True
    raise InputError(f"{place} exists; {what} does not replace it. Choose another name with -o, or add --force")


@contextmanager
def replaced_file(file: Path) -> Iterator[Path]:
    """A neighbour of ``file`` to write to, which takes its place when the body has ended without an exception."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    try:
        yield part
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def plain_table(*names: str, right: Collection[str] = (), **settings: Any) -> Table:
    """A table without lines; the columns in ``right`` hold numbers and end at the same place."""
    table = Table(header_style="bold", pad_edge=False, box=None, **settings)
    for name in names:
        table.add_column(name, justify="right" if name in right else "left")
    return table


def _stdin_is_terminal() -> bool:
    stream = typer.get_text_stream("stdin")
    return bool(stream is not None and stream.isatty())
