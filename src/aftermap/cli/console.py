"""What is said, and where: results on standard output, everything else on standard error, and only one process speaks."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import tempfile
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
from tqdm import tqdm

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
    "check_writable",
    "confirmed",
    "guarded",
    "plain_table",
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
        """Says a sentence of the result."""
        if rank() == 0:
            _print(self._words, text, style)

    def note(self, text: str) -> None:
        """Says a sentence about the work, on standard error."""
        if rank() == 0:
            _print(_err, text, "dim")

    def table(self, table: Table) -> None:
        """Prints a table of the result."""
        if rank() == 0:
            self._words.print(table)

    def result(self, content: Any) -> None:
        """Prints the whole result for machines, if --json asks for it."""
        if self.as_json and rank() == 0:
            typer.echo(json.dumps(content, indent=2, allow_nan=False, default=str))


def _print(console: Console, text: str, style: str | None = None, label: str = "", label_style: str = "") -> None:
    """Prints text: on a terminal lines end between words, so that a path can be copied; elsewhere a sentence is one line."""
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
    with tqdm.external_write_mode(file=console.file):  # a progress bar makes room, and comes back below
        console.print(marked, style=style, soft_wrap=True)


def _complain(text: str, kind: str = "error") -> None:
    """Says an error, or a warning of the first process; the errors of others say whose they are, since it may be gone."""
    if rank() == 0 and (kind == "error" or launched_rank() == 0):
        colour = "red" if kind == "error" else "yellow"
        who = f"process {launched_rank()}: " if launched_rank() else ""
        _print(_err, text, None, f"{who}{kind}: ", f"bold {colour}")


def guarded(function: Callable[P, int | None]) -> Callable[P, None]:
    """Makes a command of a function: errors of its user become one message and exit code 2, warnings one line each.

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
                _complain(_with_flags(str(error)))
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
        if code in (CHECK_FAILED, WORSE) and "TORCHELASTIC_RUN_ID" in os.environ:
            _complain(
                f"torchrun would bury exit code {code} under a traceback, so this ends with 0: everything is saved, and `aftermap evaluate` on the "
                "folder gives the code",
                "warning",
            )
            code = GOOD
        if code:
            raise typer.Exit(code)

    return command


# Arguments of Python that messages of the library name, and the options that set them.
_FLAGS = {
    "memory_limit": "--memory",
    "time_limit": "--seconds",
    "likelihood": "--task",
    **{
        name: f"--{name.replace('_', '-')}"
        for name in ("structure", "params", "prior_precision", "kind", "samples", "drop", "damping", "every", "noise")
    },
}


def _with_flags(text: str) -> str:
    """Puts a message of the library into the words of the command line.

    >>> _with_flags("Raise memory_limit= or time_limit=, or params='last_layer'")
    "Raise --memory or --seconds, or --params 'last_layer'"
    """

    def flag(match: re.Match[str]) -> str:
        return _FLAGS[match[1]] + (" " if match[2] else "")

    return re.sub(rf"\b({'|'.join(_FLAGS)})=(?=(['\"\w])?)", flag, text)


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
            _complain(_with_flags(str(message)), "warning")

    with warnings.catch_warnings():
        # Under `python -W error`, as in tests, a warning stays an error.
        warnings.showwarning = show
        yield


def confirmed(
    place: Path | None, *, force: bool, what: str, state: str = "exists", file_name: str | None = None
) -> bool:
    """Makes sure that ``place`` may be written: it is not there, --force was given, or the person at the terminal says yes.

    Args:
        place: The file or folder; None means that nothing is written.
        force: Whether --force was given.
        what: The command, for messages.
        state: What is said about a place that is there.
        file_name: A name for the file that is written; None means that a folder is written.

    Returns:
        Whether something is to be replaced.

    Raises:
        InputError: It is there, and nobody allowed to replace it; it is a folder instead of a file, or a file instead of a folder; or
            nothing can be written there.
    """
    if place is None:
        return False
    if file_name is not None and place.is_dir():
        raise InputError(f"{place} is a folder; give the name of a file, such as {place / file_name}")
    if file_name is None and place.is_file():
        raise InputError(f"{place} is a file; {what} writes a folder: choose another name with -o")
    check_writable(place)
    there = place.exists() and not (place.is_dir() and not any(place.iterdir()))
    if not there or force:
        return there
    if (
        _err.is_terminal
        and _stdin_is_terminal()
        and rank() == 0
        and typer.confirm(f"{place} {state}. Replace it?", err=True)
    ):
        return True
    raise InputError(f"{place} {state}; {what} does not replace it. Choose another name with -o, or add --force")


def check_writable(place: Path) -> None:
    """Raises before any work where nothing can be written to a file or folder, which need not be there yet.

    Raises:
        InputError: A part of its path is a file, or the folder that is there does not allow it.
    """
    above = next(p for p in (place.absolute(), *place.absolute().parents) if p.exists())
    if not above.is_dir():
        if above == place.absolute():
            above = above.parent
        else:
            raise InputError(f"{place} cannot be written: {above} is a file, not a folder")
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise InputError(
            f"{place} cannot be written: the folder {above} does not allow it ({error.strerror}). Choose another place with -o"
        ) from None


def plain_table(*names: str, right: Collection[str] = (), **settings: Any) -> Table:
    """Returns a table without lines; the columns in ``right`` hold numbers and end at the same place."""
    table = Table(header_style="bold", pad_edge=False, box=None, **settings)
    for name in names:
        table.add_column(name, justify="right" if name in right else "left")
    return table


def _stdin_is_terminal() -> bool:
    stream = typer.get_text_stream("stdin")
    return bool(stream is not None and stream.isatty())
