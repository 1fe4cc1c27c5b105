"""The command line: `aftermap`, or `python -m aftermap`."""

from aftermap.cli.main import main

__all__ = ["main"]
