"""The entry point: a sentence instead of a traceback where the command line is not installed."""

from __future__ import annotations

import io
import sys

from aftermap.cli.signals import begin_start_up
from aftermap.errors import UnsupportedError
from aftermap.lazy import optional

__all__ = ["main"]


def main() -> None:
    """Runs the command that was typed, and ends the process with its exit code.

    0: good; 2: bad input; 3: a self-check failed; 4: worse than the baseline; 130: interrupted.
    """
    begin_start_up()
    for stream in (sys.stdout, sys.stderr):
        _let_write_everything(stream)
    try:
        optional("typer", "cli", "commands")
        optional("rich", "cli", "commands")
    except UnsupportedError as error:
        sys.exit(f"aftermap: {error}")
    from aftermap.cli.app import app

    app(prog_name="aftermap")


def _let_write_everything(stream: object) -> None:
    r"""Lets a stream whose encoding lacks a character write it as an escape, such as \u2192 for an arrow, instead of failing."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
