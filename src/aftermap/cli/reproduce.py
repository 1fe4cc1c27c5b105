"""`aftermap reproduce` and `aftermap bench`: the tables of papers and the benchmarks, from a checkout of the sources."""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import aftermap
from aftermap.cli import options as o
from aftermap.cli.console import CHECK_FAILED, GOOD, Reporter, plain_table
from aftermap.errors import InputError

__all__ = ["BUDGETS", "bench", "find_checkout", "reproduce"]

BUDGETS = ("stated", "small")


def find_checkout(folder: str) -> Path:
    """Returns the nearest folder above the working folder, or above the package, that is a checkout with ``folder`` in it.

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
        "nor beside the package: clone the repository of aftermap with git, change into it and run the command there"
    )


@o.command(without=("seed", "device", "force", "config"))
def reproduce(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="list|all|NAME", help="The word list, the word all, or an experiment such as mcinerney2024."
        ),
    ],
    budget: Annotated[
        str,
        o.option("The size of the experiment: stated is the committed one, small is just enough to see that it runs."),
        o.OneOf(BUDGETS),
    ] = "stated",
    data_dir: Annotated[
        Path | None, o.option("The folder with the data sets, instead of the one that AFTERMAP_DATA names.")
    ] = None,
    *,
    run: o.RunOptions,
) -> int:
    """Run an experiment from the literature again: its claims with verdicts, and its figures. `list` shows all, `all` runs all.

    Results of the stated budget go to the experiment's folder. Further arguments go to the experiment's run.py.
    """
    reporter = run.reporter
    root = find_checkout("experiments")
    known = {p.parent.name: p.parent for p in sorted((root / "experiments").glob("*/run.py"))}
    if name == "list":
        _list(known, reporter)
        return GOOD
    chosen = [place for place in known.values() if _has_budgets(place)] if name == "all" else [_find(name, known)]
    codes, contents = {}, {}
    for place in chosen:
        options = _options(place, budget, data_dir) + context.args
        codes[place.name] = _run(root, place, options, reporter)
        results = place / "results.json"
        if budget == BUDGETS[0] and results.is_file():  # Another budget writes elsewhere, and says where.
            contents[place.name] = json.loads(results.read_text(encoding="utf-8"))
            readme = (place / "README.md").relative_to(root)
            reporter.line(f"results: {results.relative_to(root)}; claims and figures: {readme}")
    reporter.result(contents if name == "all" else contents.get(chosen[0].name, {}))
    failed = {n: code for n, code in codes.items() if code}
    for failing, code in failed.items():
        reporter.line(f"{failing}: the experiment ended with exit code {code}", style="bold red")
    return CHECK_FAILED if failed else GOOD


def _find(name: str, known: dict[str, Path]) -> Path:
    wanted = name.strip("/").replace("/", "_")
    if wanted not in known:
        close = difflib.get_close_matches(wanted, known, n=2)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise InputError(f"there is no experiment {name!r}.{hint} `aftermap reproduce list` shows all")
    return known[wanted]


def _has_budgets(place: Path) -> bool:
    """Tells whether an experiment has the common form, with budgets and a data folder; an older one has options of its own."""
    return re.search(r"\bBUDGETS\b", (place / "run.py").read_text(encoding="utf-8")) is not None


def _options(place: Path, budget: str, data_dir: Path | None) -> list[str]:
    if _has_budgets(place):
        return ["--budget", budget, *([] if data_dir is None else ["--data-dir", str(data_dir.absolute())])]
    if budget != BUDGETS[0] or data_dir is not None:
        raise InputError(f"{place.name} has no --budget and no --data-dir: its README.md says how it is run")
    return []


def _run(root: Path, place: Path, arguments: list[str], reporter: Reporter) -> int:
    module = f"experiments.{place.name}.run"
    reporter.note(f"running python -m {' '.join([module, *arguments])}")
    # Words of the experiment belong on standard error where standard output is for machines.
    out = 2 if reporter.as_json else None
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}
    # The user asked for this script of his checkout by name; no shell reads the words.
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=root, stdout=out, env=environment, check=False)  # noqa: S603  # nosec B603
    return done.returncode


def _list(known: dict[str, Path], reporter: Reporter) -> None:
    table = plain_table("name", "what", "results")
    rows = []
    for name, place in known.items():
        readme = place / "README.md"
        lines = readme.read_text(encoding="utf-8").splitlines() if readme.is_file() else []
        title = next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), "")
        there = (place / "results.json").is_file()
        rows.append({"name": name, "title": title, "results": there, "budgets": _has_budgets(place)})
        table.add_row(name, title, "yes" if there else "no")
    if rows:
        reporter.table(table)
        reporter.line(f"run one with: aftermap reproduce {rows[0]['name']}")
    else:
        reporter.line("this checkout has no experiments")
    reporter.result(rows)


@o.command()
def bench(context: typer.Context) -> int:
    """Measure time and memory, and compare with other libraries. Arguments go to benchmarks.run: `aftermap bench --quick`.

    The other libraries live in an environment of their own: `make bench` sets it up and runs this in it.
    """
    reporter = Reporter()
    root = find_checkout("benchmarks")
    own_python = root / ".venv-bench" / "bin" / "python"
    python = str(own_python) if own_python.is_file() else sys.executable
    if not own_python.is_file():
        reporter.note(
            "there is no .venv-bench here (make bench-setup), so that libraries to compare with may be missing"
        )
    # The user asked for the benchmarks of his checkout; no shell reads the words.
    command = [python, "-m", "benchmarks.run", *context.args]
    done = subprocess.run(command, cwd=root, check=False)  # noqa: S603  # nosec B603
    if done.returncode:
        reporter.line(
            f"the benchmarks ended with exit code {done.returncode}; `make bench` sets up what they need",
            style="bold red",
        )
        return CHECK_FAILED
    return GOOD
