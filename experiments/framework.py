"""What every experiment shares: jobs that are done once, verdicts on claims, results that come from files and never from hands.

An experiment is a module ``experiments/NAME/run.py`` with

- ``TITLE``: what is tried, in a few words;
- ``BUDGETS``: settings by name, at least "small" (everything at a tiny size, for the tests) and "stated" (what is committed);
- ``jobs(settings, data_dir)``: yields a `Job` for each part, method and seed; a job returns plain numbers;
- ``verdicts(results)``: a `Verdict` for every claim of `claims.toml` that names this experiment; with --partial it may leave out
  claims whose jobs are not done, which then count as not run yet;
- ``figures(results, folder)``: draws into a folder, and may return captions by file name;
- optionally ``tables(results)``: Markdown that goes below the table of claims;
- optionally ``scale(settings)``: a sentence that says how much smaller everything is than in the document;
- optionally ``DATA``: the folders or files that it needs in the data folder.

The result of every job is a file of its own in a work folder, so that a run which was interrupted goes on where it was; jobs that are done
are not repeated when a setting or the code changes, so delete their files where it matters (a run says which settings changed). A run of the
stated budget writes results.json, the figures and the table of claims in README.md; ``python -m experiments.page`` then brings the page
on reproduction up to date. With --partial it writes what there is, and claims whose jobs are not done get the verdict "not run yet"
(`judged` sees to it). results.json has the numbers of every job, with its commit: --resume goes on from there on another machine, and
--partial without it refuses to write over jobs that are only there. Long
lists belong under the key "curves", which is written with four digits. Seconds are those of the processor, which other work on the
machine does not change.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import aftermap as am

__all__ = [
    "Claim",
    "Experiment",
    "Job",
    "Paired",
    "Results",
    "Verdict",
    "claim_table",
    "default_data_dir",
    "judged",
    "labelled",
    "mean_and_error",
    "missing_data",
    "not_met",
    "paired",
    "read_claims",
    "result_of",
    "run",
    "work_folder",
]

ROOT = Path(__file__).resolve().parents[1]
HOLDS, IN_PART, FAILS, NOT_TESTABLE = "holds", "holds in part", "does not hold", "not testable here"
NOT_RUN = "not run yet"
_BEGIN, _END = "<!-- claims: written by run.py -->", "<!-- end of claims -->"
Numbers = dict[str, Any]
_work: list[Path] = []  # the folder of the run that is under way
_done: dict[str, Numbers] = {}  # the numbers of its jobs so far


@dataclass(frozen=True)
class Job:
    """One piece of work.

    Attributes:
        key: Its name: part, method and seed with slashes between, such as "toy/kron/seed0".
        run: What does it, and returns plain numbers, lists and words.
    """

    key: str
    run: Callable[[], Numbers]


@dataclass(frozen=True)
class Claim:
    """A row of the register.

    Attributes:
        id: Its number, such as R1.
        document: Who claims it.
        place: Where in the document.
        claim: The claim, in our words.
        criterion: What must be measured for it to hold; fixed before anything was run.
        experiment: The folder that judges it.
        published: The number of the document, where it gives one.
    """

    id: str
    document: str
    place: str
    claim: str
    criterion: str
    experiment: str
    published: str = ""


@dataclass(frozen=True)
class Verdict:
    """What came out for a claim.

    Attributes:
        id: The claim.
        verdict: "holds", "holds in part", "does not hold" or "not testable here"; "not run yet" while jobs are missing.
        ours: Our numbers in a few words, made from the results.
        reason: Why, where it does not simply hold.
        seeds: The number of seeds behind it.
    """

    id: str
    verdict: str
    ours: str
    reason: str = ""
    seeds: int = 0

    def __post_init__(self) -> None:
        if self.verdict not in (HOLDS, IN_PART, FAILS, NOT_TESTABLE, NOT_RUN):
            raise ValueError(f"{self.id}: a verdict is one of four, or {NOT_RUN!r}, but not {self.verdict!r}")
        if self.verdict != HOLDS and not self.reason:
            raise ValueError(f"{self.id}: {self.verdict!r} needs a reason")

    @staticmethod
    def of(id: str, holds: bool | Sequence[bool], ours: str, reason: str = "", seeds: int = 0) -> Verdict:
        """The verdict of one or several conditions: all, some or none of them hold."""
        conditions = [holds] if isinstance(holds, bool) else list(holds)
        verdict = HOLDS if all(conditions) else IN_PART if any(conditions) else FAILS
        return Verdict(id, verdict, ours, "" if verdict == HOLDS else reason or "see the numbers", seeds)


@dataclass(frozen=True)
class Results:
    """The numbers of all jobs that were done.

    Attributes:
        values: The numbers by the key of their job.
        settings: The settings of the budget.
    """

    values: Mapping[str, Numbers]
    settings: Any = None

    def among(self, pattern: str) -> dict[str, Numbers]:
        """The jobs whose whole key matches a pattern with * for anything between slashes."""
        wanted = re.compile(re.escape(pattern).replace(r"\*", "[^/]*"))
        return {key: value for key, value in self.values.items() if wanted.fullmatch(key)}

    def numbers(self, pattern: str, name: str) -> list[float]:
        """One number of each job that matches, in the order of their keys."""
        return [float(value[name]) for _, value in sorted(self.among(pattern).items()) if name in value]

    def text(self, pattern: str, name: str, digits: int = 3) -> str:
        """Mean ± standard error of a number over the jobs that match."""
        return mean_and_error(self.numbers(pattern, name), digits)


def judged(
    results: Results, needs: Mapping[str, int], ids: Sequence[str], judge: Callable[[Results], Sequence[Verdict]]
) -> list[Verdict]:
    """The verdicts of some claims, or "not run yet" for each of them while jobs that they need are missing.

    Args:
        results: The results there are.
        needs: How many jobs of each pattern the claims need.
        ids: The claims.
        judge: What gives their verdicts from complete results.
    """
    missing = {pattern: count - len(results.among(pattern)) for pattern, count in needs.items()}
    absent = sum(count for count in missing.values() if count > 0)
    if absent:
        return [Verdict(id, NOT_RUN, "–", f"{absent} of {sum(needs.values())} jobs are missing") for id in ids]
    return list(judge(results))


def not_met(conditions: Mapping[str, bool]) -> str:
    """Which conditions do not hold, in words."""
    return "not met: " + "; ".join(name for name, held in conditions.items() if not held)


class Experiment(Protocol):
    """What a module run.py has."""

    TITLE: str
    BUDGETS: Mapping[str, Any]

    def jobs(self, settings: Any, data_dir: Path) -> Iterator[Job]: ...

    def verdicts(self, results: Results) -> list[Verdict]: ...

    def figures(self, results: Results, folder: Path) -> Mapping[str, str] | None: ...


def mean_and_error(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± standard error in words; a single value stands alone."""
    if not values:
        return "–"
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {_error(values):.{digits}f}"


def _error(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return (
        math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
        if len(values) > 1
        else math.inf
    )


@dataclass(frozen=True)
class Paired:
    """The difference of two methods over the same seeds.

    Attributes:
        mean: The mean difference, first less second.
        error: Its standard error.
    """

    mean: float
    error: float

    @property
    def higher(self) -> bool:
        """Whether the first is higher by more than two standard errors."""
        return self.mean > 2 * self.error

    @property
    def lower(self) -> bool:
        """Whether the first is lower by more than two standard errors."""
        return self.mean < -2 * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.3g} ± {self.error:.2g}"


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """The paired difference of the numbers of two methods, seed by seed."""
    if len(first) != len(second) or not first:
        raise ValueError(f"paired numbers must be as many of one as of the other, got {len(first)} and {len(second)}")
    differences = [a - b for a, b in zip(first, second, strict=True)]
    return Paired(sum(differences) / len(differences), _error(differences))


def read_claims(path: Path = ROOT / "experiments" / "claims.toml") -> list[Claim]:
    """The register."""
    return [Claim(**row) for row in tomllib.loads(path.read_text(encoding="utf-8"))["claim"]]


def claim_table(claims: Sequence[Claim], verdicts: Sequence[Verdict]) -> str:
    """The claims of an experiment as a Markdown table: claim, paper, ours, verdict."""
    found = {v.id: v for v in verdicts}
    lines = ["| | claim | criterion | paper | ours | verdict |", "|---|---|---|---|---|---|"]
    for claim in claims:
        verdict = found.get(claim.id)
        ours = "–" if verdict is None else verdict.ours
        said = (
            "not run yet"
            if verdict is None
            else f"**{verdict.verdict}**" + (f": {verdict.reason}" if verdict.reason else "")
        )
        cells = (claim.id, claim.claim, claim.criterion, claim.published or "–", ours, said)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def run(experiment: Any, name: str, arguments: Sequence[str] | None = None) -> int:
    """The command line of an experiment: ``run(sys.modules[__name__], "ritter2018")``."""
    parser = argparse.ArgumentParser(description=experiment.TITLE)
    parser.add_argument("--budget", default="stated", choices=sorted(experiment.BUDGETS), help="how large")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(), help="the folder with the data sets")
    parser.add_argument(
        "--only",
        default="",
        help="only jobs whose key begins so, with * for anything ('*/seed1' is a seed); nothing is written to the folder then, but with --partial",
    )
    parser.add_argument(
        "--partial", action="store_true", help="write results, figures and table although jobs are missing"
    )
    parser.add_argument("--work", type=Path, help="where the results of jobs are kept [a cache folder of the user]")
    parser.add_argument(
        "--output",
        type=Path,
        help="where results, figures and table go [the experiment's folder, for the stated budget]",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="count jobs as done whose numbers are in the results.json that was written last",
    )
    parser.add_argument("--hours", type=float, default=math.inf, help="begin no further job after so many hours")
    options = parser.parse_args(arguments)
    settings = experiment.BUDGETS[options.budget]
    missing_files = missing_data(experiment, options.data_dir)
    if missing_files:
        print(
            f"error: {name} needs {', '.join(missing_files)} in {options.data_dir}, and there is none: pass --data-dir, or set AFTERMAP_DATA",
            file=sys.stderr,
        )
        return 2
    work = options.work or _cache() / name / options.budget
    folder = options.output or (ROOT / "experiments" / name if options.budget == "stated" else work / "output")
    _work[:] = [work]
    last = work / "settings.json"
    _tell_changes(last, _plain(asdict(settings)), json.loads(last.read_text("utf-8")) if last.is_file() else None)
    _write(last, json.dumps(_plain(asdict(settings))) + "\n")
    before = _written_values(folder / "results.json") if options.resume else {}
    if before:
        _tell_changes(folder / "results.json", _plain(asdict(settings)), _written_settings(folder / "results.json"))
    began, done, missing, commit = time.monotonic(), 0, 0, _commit()
    values = _done
    values.clear()
    for job in experiment.jobs(settings, options.data_dir):
        wanted = fnmatchcase(job.key, f"{options.only}*")
        path = work / f"{job.key.replace('/', '--')}.json"
        if path.is_file() or job.key in before:
            values[job.key] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else before[job.key]
            continue
        if not wanted:
            continue
        if time.monotonic() - began > 3600 * options.hours:
            missing += 1
            continue
        start = time.process_time()
        result = _plain(job.run())
        result |= {"seconds": round(time.process_time() - start, 1), "commit": commit}
        _write(path, json.dumps(result) + "\n")
        values[job.key] = result
        done += 1
        print(f"{job.key}: {result['seconds']:.0f} s", flush=True)
    if missing:
        print(f"{missing} jobs are left; run the same command again to go on", flush=True)
    if (missing or options.only) and not options.partial:
        return 0
    lost = sorted(set(_written_values(folder / "results.json")) - set(values)) if options.partial else []
    if lost:
        print(
            f"error: {folder / 'results.json'} has {len(lost)} jobs that this run has not ({lost[0]} is one), and writing would lose them: pass --resume to keep them",
            file=sys.stderr,
        )
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    values = {key: _shortened(value) for key, value in values.items()}
    results = Results(values, settings)
    verdicts = experiment.verdicts(results)
    claims = [claim for claim in read_claims() if claim.experiment == name]
    _check_ids(claims, verdicts, partial=options.partial)
    captions = experiment.figures(results, folder) or {}
    for file in captions:
        if file.endswith(".svg"):
            _write(folder / file, _smaller((folder / file).read_text(encoding="utf-8")))
    content = {
        "experiment": name,
        "budget": {"name": options.budget, **_plain(asdict(settings))},
        "commit": commit,
        "torch": torch.__version__,
        "seconds": round(sum(v.get("seconds", 0.0) for v in values.values())),
        "verdicts": [asdict(v) for v in verdicts],
        "figures": dict(captions),
        "scale": experiment.scale(settings) if hasattr(experiment, "scale") else "",
    }
    _write(folder / "results.json", _results_text(content, values))
    table = claim_table(claims, verdicts)
    more = experiment.tables(results) if hasattr(experiment, "tables") else ""
    _write_table(folder / "README.md", experiment.TITLE, "\n\n".join(filter(None, [table, more])))
    print(table)
    print(f"{done} jobs done, {len(values) - done} from before; written to {folder}")
    return 0


def work_folder(name: str) -> Path:
    """A folder of this name beside the results of the jobs, for what is large and can be made again: trained weights, factors.

    Raises:
        RuntimeError: No run is under way.
    """
    if not _work:
        raise RuntimeError("work_folder is for jobs: there is no run under way")
    folder = _work[0] / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def result_of(key: str) -> Numbers:
    """The numbers of a job that the run under way has done, or found done: what a later job builds on, such as the settings chosen.

    Raises:
        RuntimeError: There are no numbers of this job.
    """
    if key not in _done:
        raise RuntimeError(f"a job needs the numbers of {key}, which is not done: run it first (--only {key})")
    return _done[key]


def default_data_dir() -> Path:
    """The folder that AFTERMAP_DATA names, or the one beside the checkout."""
    return Path(os.environ.get("AFTERMAP_DATA", ROOT.parent / "shared" / "data"))


@cache
def labelled(data_dir: Path, name: str, part: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a part of a data set by its name, read once."""
    examples = am.data.named(name, part, folder=data_dir)
    assert examples.targets is not None
    return examples.inputs, examples.targets


def missing_data(experiment: Any, data_dir: Path) -> list[str]:
    """What the experiment needs of the data folder and does not find there."""
    return [name for name in getattr(experiment, "DATA", ()) if not (data_dir / name).exists()]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "aftermap-experiments"


def _check_ids(claims: Sequence[Claim], verdicts: Sequence[Verdict], *, partial: bool) -> None:
    wanted, got = {c.id for c in claims}, {v.id for v in verdicts}
    if got - wanted or (wanted - got and not partial) or len(got) != len(verdicts):
        raise ValueError(f"verdicts and register differ: {sorted(wanted ^ got)}")


def _commit() -> str:
    """The commit of the code, with a plus sign where library or experiments have changes that it does not know."""

    def git(*arguments: str) -> str:
        found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return found.stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    changes = git("status", "--porcelain", "--", "src/*.py", "experiments/*.py")
    return f"{commit}+" if commit and changes else commit or "unknown"


def _written_values(path: Path) -> dict[str, Numbers]:
    """The numbers of jobs in a results.json, if there is one."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return {key: {"commit": content["commit"], **value} for key, value in content["values"].items()}


def _written_settings(path: Path) -> Numbers:
    """The settings in a results.json."""
    budget: Numbers = json.loads(path.read_text(encoding="utf-8"))["budget"]
    return {key: value for key, value in budget.items() if key != "name"}


def _shortened(value: Numbers) -> Numbers:
    """The numbers of a job as results.json has them, with four digits of its curves: figures are the same before and after --resume."""
    return {k: _plain(v, 4) if k == "curves" else v for k, v in value.items()}


def _smaller(svg: str) -> str:
    """The same drawing in fewer bytes.

    Coordinates have two decimals, since a hundredth of a point is not seen; marks in a row that look alike have their style once, on a
    group around them; the font that most words have is named once; words that are turned by nothing say nothing of it; and lines are not
    indented.
    """

    def two_decimals(found: re.Match[str]) -> str:
        return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", found[0])

    def grouped(found: re.Match[str]) -> str:
        style = found["style"]
        if re.search(r"(?<!-)\bopacity", style):  # the opacity of a group is not that of its members
            return found[0]
        return f'<g style="{style}">\n' + found[0].replace(f' style="{style}"', "") + "</g>\n"

    svg = re.sub(r"^[ \t]+(?=<)", "", svg, flags=re.MULTILINE)
    svg = re.sub(r' transform="rotate\(-?0 [^"]*\)"', "", svg)
    fonts, rule = Counter(re.findall(r"font-family: [^;\"]*; ", svg)).most_common(1), '<style type="text/css">'
    if fonts and rule in svg and f"{rule}text" not in svg:
        font = fonts[0][0]
        svg = svg.replace(font, "").replace(rule, f"{rule}text{{{font.strip()}}} ", 1)
    svg = re.sub(r'\b(?:d|x|y)="[^"]*"', two_decimals, svg)
    alike = r'<use [^<>]*? style="(?P<style>[^"]*)"/>\n(?:<use [^<>]*? style="(?P=style)"/>\n)+'
    return re.sub(alike, grouped, svg)


def _results_text(content: Mapping[str, Any], values: Mapping[str, Numbers]) -> str:
    """JSON with one line for every job, whose numbers stay in their order: tables and figures after --resume are those before."""
    rows = [f"  {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in sorted(values.items())]
    head = json.dumps(content, indent=1, sort_keys=True).removesuffix("\n}")
    return head + ',\n "values": {\n' + ",\n".join(rows) + "\n }\n}\n"


def _tell_changes(path: Path, settings: Numbers, last: Numbers | None) -> None:
    """Says which settings are not those of an earlier run, whose jobs are not repeated."""
    old, new = _flat(settings if last is None else last), _flat(settings)
    changed = [f"{k}: {old.get(k)} to {new.get(k)}" for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
    if changed:
        print(
            f"settings changed ({'; '.join(changed)}); jobs that are done are not repeated: {path.parent}", flush=True
        )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Numbers:
    """Settings with the names of those inside others joined by dots."""
    found: Numbers = {}
    for key, value in settings.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _plain(value: Any, digits: int = 6) -> Any:
    """Numbers, lists and words that JSON knows, with six digits."""
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist(), digits)
    if isinstance(value, Mapping):
        return {str(k): _plain(v, digits) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, digits) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if hasattr(value, "item"):
        return _plain(value.item(), digits)
    return value


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".part{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _write_table(path: Path, title: str, table: str) -> None:
    """Puts the table between its marks in README.md; what stands around it is written by people and stays."""
    old = path.read_text(encoding="utf-8") if path.is_file() else f"# {title}\n\n{_BEGIN}\n{_END}\n"
    if _BEGIN not in old or _END not in old:
        old = f"{old.rstrip()}\n\n{_BEGIN}\n{_END}\n"
    before, rest = old.split(_BEGIN, 1)
    after = rest.split(_END, 1)[1]
    _write(path, f"{before}{_BEGIN}\n\n{table}\n\n{_END}{after}")


if __name__ == "__main__":
    sys.exit("run an experiment: aftermap reproduce NAME, or python -m experiments.NAME.run")
