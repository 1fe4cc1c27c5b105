"""`aftermap bench`: the benchmarks, from a checkout."""

from __future__ import annotations

import subprocess
import sys

import typer

from aftermap.cli.checkout import find_checkout
from aftermap.cli.console import CHECK_FAILED, GOOD, Speaker, guarded

__all__ = ["bench"]


@guarded
def bench(context: typer.Context) -> int:
    """Measure time and memory beside other libraries. Arguments go to benchmarks.run: `aftermap bench --quick`.

    The other libraries live in an environment of their own: `make bench` sets it up and runs this in it.
    """
    speaker = Speaker()
    root = find_checkout("benchmarks")
    own = root / ".venv-bench" / "bin" / "python"
    python = str(own) if own.is_file() else sys.executable
    if not own.is_file():
        speaker.note(
            "there is no .venv-bench here (make bench-setup), so that libraries to compare with may be missing"
        )
    done = subprocess.run([python, "-m", "benchmarks.run", *context.args], cwd=root, check=False)
    if done.returncode:
        speaker.line(
            f"the benchmarks ended with exit code {done.returncode}; `make bench` sets up what they need",
            style="bold red",
        )
        return CHECK_FAILED
    return GOOD
