"""The entry point: a sentence instead of a traceback where the command line is not installed."""

from __future__ import annotations

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
    try:
        optional("typer", "cli", "commands")
        optional("rich", "cli", "commands")
    except UnsupportedError as error:
        sys.exit(f"aftermap: {error}")
    from aftermap.cli.app import app

    app(prog_name="aftermap")
