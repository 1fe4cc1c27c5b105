"""`aftermap reproduce` and `aftermap bench`: the tables of papers and the benchmarks, from a checkout of the sources."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import aftermap
from aftermap.cli import options as o
from aftermap.cli.console import CHECK_FAILED, GOOD, Reporter, plain_table
from aftermap.errors import InputError

__all__ = ["bench", "find_checkout", "reproduce"]


def find_checkout(folder: str) -> Path:
    """The nearest folder above the working folder, or above the package, that is a checkout with ``folder`` in it.

    Raises:
        InputError: There is none.
    """
    starts = [Path.cwd(), Path(aftermap.__file__).resolve().parent]
    for start in starts:
        for place in (start, *start.parents):
            if (place / folder).is_dir() and (place / "pyproject.toml").is_file():
                return place
    raise InputError(
        f"{folder}/ is part of the sources of aftermap, not of the installed package, and was found neither above {Path.cwd()} "
        "nor beside the package. Change into a checkout of the sources and run the command there"
    )


@o.command(without=("seed", "device", "force", "config"))
def reproduce(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="list|NAME", help="The word list, or an experiment such as ritter2018/toy.")
    ],
    run: o.RunOptions,
) -> int:
    """Run an experiment of a paper again: a table paper | ours | tolerance, and its figures. `list` shows all.

    Further arguments go to the experiment's run.py.
    """
    reporter = run.reporter
    root = find_checkout("experiments")
    known = {p.parent.name: p.parent for p in sorted((root / "experiments").glob("*/run.py"))}
    if name == "list":
        _list(known, reporter)
        return GOOD
    place = known.get(name.strip("/").replace("/", "_"))
    if place is None:
        close = difflib.get_close_matches(name.replace("/", "_"), known, n=2)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise InputError(f"there is no experiment {name!r}.{hint} `aftermap reproduce list` shows all")
    reporter.note(f"running {place.relative_to(root) / 'run.py'}")
    # Words of the experiment belong on standard error where standard output is for machines.
    out = 2 if run.as_json else None
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(
        [sys.executable, str(place / "run.py"), *context.args], cwd=root, stdout=out, env=environment, check=False
    )
    results = place / "results.json"
    if results.is_file():
        reporter.line(
            f"results: {results.relative_to(root)}; claims and figures: {(place / 'README.md').relative_to(root)}"
        )
        reporter.result(json.loads(results.read_text(encoding="utf-8")))
    if done.returncode:
        reporter.line(f"the experiment ended with exit code {done.returncode}", style="bold red")
        return CHECK_FAILED
    return GOOD


def _list(known: dict[str, Path], reporter: Reporter) -> None:
    table = plain_table("name", "what", "results")
    rows = []
    for name, place in known.items():
        readme = place / "README.md"
        lines = readme.read_text(encoding="utf-8").splitlines() if readme.is_file() else []
        title = next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), "")
        there = (place / "results.json").is_file()
        rows.append({"name": name, "title": title, "results": there})
        table.add_row(name, title, "there" if there else "–")
    if rows:
        reporter.table(table)
        reporter.line(f"run one with: aftermap reproduce {rows[0]['name']}")
    else:
        reporter.line("this checkout has no experiments")
    reporter.result(rows)


@o.command()
def bench(context: typer.Context) -> int:
    """Measure time and memory beside other libraries. Arguments go to benchmarks.run: `aftermap bench --quick`.

    The other libraries live in an environment of their own: `make bench` sets it up and runs this in it.
    """
    reporter = Reporter()
    root = find_checkout("benchmarks")
    own = root / ".venv-bench" / "bin" / "python"
    python = str(own) if own.is_file() else sys.executable
    if not own.is_file():
        reporter.note(
            "there is no .venv-bench here (make bench-setup), so that libraries to compare with may be missing"
        )
    done = subprocess.run([python, "-m", "benchmarks.run", *context.args], cwd=root, check=False)
    if done.returncode:
        reporter.line(
            f"the benchmarks ended with exit code {done.returncode}; `make bench` sets up what they need",
            style="bold red",
        )
        return CHECK_FAILED
    return GOOD
