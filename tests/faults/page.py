"""Writes docs/reliability.md from what the programs of faults have counted; no number on it is typed by hand.

`python -m tests.faults.page` after `make test-faults`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from aftermap.curvature.structures.rounding import digits_tolerance
from aftermap.posteriors.files import MAX_DEPTH, MAX_JSON_BYTES
from aftermap.posteriors.io import SCHEMA
from aftermap.predictive.latent import LOST_CONTRASTS
from tests.faults.digits import OUTPUT as DIGITS
from tests.faults.harness import MEMORY, RESULTS
from tests.faults.kills import JOBS, MOST_IN_A_ROW
from tests.faults.processes import PARTS
from tests.faults.soak import OUTPUT as SOAK
from tests.mutants.__main__ import TESTS, summary
from tests.mutants.mutations import BY_HAND

__all__ = ["PAGE", "RUN", "page_of", "results", "write_page"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
FOLDERS = ROOT / "benchmarks" / "results" / "faults_folders.json"
DATA = ROOT / "benchmarks" / "results" / "faults_data.json"
CHECKPOINTS = ROOT / "benchmarks" / "results" / "faults_checkpoints.json"
KILLS = ROOT / "benchmarks" / "results" / "faults_kills.json"
PROCESSES = ROOT / "benchmarks" / "results" / "faults_processes.json"
MUTANTS = ROOT / "benchmarks" / "results" / "mutants.json"
RUN = ROOT / "benchmarks" / "results" / "faults_run.json"

TEXT = """# Reliability

What was tried to break the library, how often, and what happened.

A file that was cut short, swapped or written by somebody who means harm leads to a clear error, or to exactly what was saved; never to another
answer, to a crash, or to code that runs. This page says what is done for it, what is tried, and what happened. It is written by
`python -m tests.faults.page` from what `make test-faults` counted.

## Posterior folders

What `save` writes, `load` checks in this order:

1. The files lie in the folder itself. Links, devices and names with a path are refused, and so is `config.json` above {json_size} MiB.
2. `config.json` is JSON within bounds: at most {depth} levels deep, finite numbers of 64 bits, no name twice in an object.
3. Its `checksum` is that of its content (SHA-256; spaces and line breaks do not count). Who wants to change what a folder says loads it, and saves it again.
4. Every entry has its type: what is missing, unknown, of the wrong type or out of range is named with its place, such as
   `posterior.blocks.0.basis.outputs`.
5. The shapes of all tensors fit together and to the network, before any of them is read.
6. Each tensor file has the size and then the checksum that `config.json` says. A file that is larger than the memory is refused by its size.
7. The header of a tensor file lists the tensors that `config.json` lists.
8. Numbers are finite, precisions and scales are positive, and the posterior's precision is positive definite.

All refusals are a `DataError` that names the folder or file, and an `InputError` where the network is another one.

Folders have had the checksum of `config.json` since schema {schema}. Folders of earlier versions load as before, through the same reader; a digit
that was changed in the `config.json` of such a folder cannot be told from one that was saved. `load` it and `save` it again to give it a checksum.

A checksum is no signature. Who writes a whole folder writes its checksums, too, and may then say what he likes about a network, as the author of any model can.
What he cannot do is to have code run, or to have the reader fail in another way than with a clear error.

### What is tried

`python -m tests.faults.folders` saves a posterior of every structure with its network, extras and reference, changes one thing about it, and compares all that comes
back with what was saved: predictions, draws, variances, evidence, hyperparameters, extras. A case is made by the seed and its number alone (`--only` makes it again).
Each runs with {memory} GiB of memory at most, in a process whose death is counted.

- **damaged**: bits flipped, parts zeroed, cut out or repeated, files truncated, extended, emptied, deleted, exchanged with others, replaced by links, folders
  or sparse giants, and any value of `config.json` changed;
- **forged**: values, tensors and headers changed, and all checksums made to fit;
- **earlier**: values changed in a folder of the version before, which has no checksum of `config.json`.

{folder_cases} cases with seed {folder_seed}:

{folder_groups}

"As written" counts folders that load as what they say now; it is possible only where nothing tells that they were changed, so never for the first row.
"Unclear error" counts errors of the library that do not say which file is meant.

By what was saved:

{folder_subjects}

By the kind of damage:

{folder_damages}

## Code in a folder

`tests/faults/test_hostile_specs.py` puts names such as `evil.py:build`, `os:system`, `builtin:../x`, absolute paths, and names with line breaks and control signs, into
the places where a folder says how its network is built and what it was trained on, in a working folder that has code under each of these names. `predict`, `evaluate`,
`report`, `tune` and `where` refuse them, and nothing runs; the slow test tries every name with every command. [What may run, and when](how_to/command_line.md#folders-from-somebody-else).

## Data files

Tables, arrays and images are files of other programs. The checksums that their formats have (`.npz`, `.gz` and `.png`) are compared; what a header says about
sizes (`.npz`, idx) is judged before memory is taken for it, and so is a file that would not fit into memory at all. A format without checksums cannot
tell a digit that was changed: such files are read as what they say now.

`python -m tests.faults.data_files` damages files of every format in the ways above, and in their own: cells that are no numbers, headers of arrays that claim other shapes
or hold Python objects, archives with bombs, idx headers. {data_cases} cases with seed {data_seed}:

{data_subjects}
"""

CHECKPOINTS_TEXT = """
## Checkpoints and weights

`aftermap train` goes on from `checkpoint.pt`, `aftermap fit --checkpoint` from its sums, and `--weights` reads files of PyTorch, NumPy and safetensors. PyTorch and NumPy write
a checksum of each part of a file, and safetensors writes none; PyTorch does not compare its own when it reads, so aftermap does. Sums of fits have a checksum of their own. What goes on ends with the bits of work that nobody
interrupted, also in its history.

`python -m tests.faults.checkpoints` damages them in the ways above, and puts files of other work in their place. "Forged" files have other content and
checksums that fit; "no checksum" are those of safetensors, and whole weights of something else. {cases:,} cases with seed {seed}:

{groups}

{subjects}
"""

KILLS_TEXT = """
## Kills

`python -m tests.faults.kills` starts a job, kills it by SIGKILL after a random part of the time that it takes, and looks at what is there. What replaces an
artefact (`save`, `tune`, `predict`, `report`) must leave the old one or the new one, whole: folders are loaded, which compares all checksums, and files are compared
byte by byte. What can go on (`fit --checkpoint`, `train`) is started again and killed again, {in_a_row} at most, then runs to its end, and must end with the same bits
as a run that nobody killed. {kill_count} kills with seed {kill_seed}:

{kill_table}

{kill_missing}"Looked at" counts artefacts: of what is replaced one after every attempt, killed or not, of what goes on one at the end of every run; and one of each after a last write.
"Litter" counts temporary folders and files that are left beside the artefact after the next write that ends, which takes away what kills have left.

A [fit that is killed](how_to/distributed.md#a-fit-that-is-killed-goes-on) goes on with the same bits if the data come in the same order, and with the same sums if they
come in another one or are shared out among another number of processes (`tests/curvature/passes/test_checkpoint.py`).
"""

PROCESSES_TEXT = """
## Processes

`python -m tests.faults.processes` shares data out over 2 and 4 processes (gloo) by chance, {cases} times: uneven parts, and {empty} processes without any. What every process finds is compared with
what one process finds with all data, relative to the largest number; KFRA, whose recursion averages inside a batch, gets the same batches, which are shared out whole. All numbers are float64:
in float32 the order of a sum alone moves variances by 1e-6, in one process, too.

| what | of which | compared | equal to {bound:g} | largest difference |
|---|---|---|---|---|
{compared}

{facts}"""

MUTANTS_TEXT = """
## Errors that the tests must find

`make mutants` changes one thing in one file of the numerical core: a sign, a factor, a number, a limit, a transposed matrix, a term or a root that is left out. Then it runs the
tests that belong to the file, until one fails. Of {all:,} such mutants in all {core} files of the core, {tried} in {tried_files} files have been tried so far, each as likely as any other, some in an
earlier state of the code. {equivalent} of them cannot be told from the original{deleted}. The tests found {found_at_first} at first, {share_at_first:.1%} of those that can be found, and {found}
({share:.1%}) after tests had been written for what they had missed. Errors that the program does not make itself are written out in `tests/mutants/by_hand.json`.

The mutants were drawn in {draws}, one after the other. What the tests found of a sample at first says what to expect of mutants that were not drawn, with the tests of that time:

{samples}

{table}

{survivors}
"""


FEW_MUTANTS_TEXT = """
## Errors that the tests must find

`make mutants` changes one thing in one file of the numerical core: a sign, a factor, a number, a limit, a transposed matrix, a term or a root that is left out. Then it runs the
tests that belong to the file, until one fails. Of {all:,} such mutants in all {core} files of the core {tried} have been tried so far: too few to say which share is found (this page says it from {enough} on).
Of {by_hand} errors that are written out in `tests/mutants/by_hand.json` the tests find {by_hand_found}.
"""
ENOUGH = 100

SOAK_TEXT = """
## A long time, many threads, copies

`python -m tests.faults.soak` works with one small network; a leak of a kilobyte per prediction would be 9 MB.

{soak_rows}
"""

DIGITS_TEXT = """
## Digits

A variance that has lost more than half of the digits of single precision (a relative error above {tolerance:.1e}) comes with a `NumericalWarning`. The estimate behind it follows from the
arithmetic (`aftermap.curvature.structures.rounding`): gradients are rounded to the network's precision, a decomposition is that of a matrix off by rounding, and products
with the curvature have residuals. `python -m tests.faults.digits` compares variances of inputs near and far from the data with exact ones, from a QR decomposition of
the data's gradients in float64. The largest relative error for each prior precision, **bold** where there was a warning:

{digits_table}

"low_rank" is compared with the exact posterior of as many directions as it found. Kronecker factors are compared with the same factors in double precision. They hold small
eigenvalues only to the rounding of the largest one, so that they lose digits under much stronger priors than the other structures. An estimate for each of their variances that is sharp enough was
not found. Where classes are predicted by draws there is a warning of what matters to probabilities: beside the variance that all logits have in common, which grows as the prior gets weaker, the
variances of their differences are known to {lost_share:.0%} or worse. `aftermap doctor` says which priors rounding may drown. `ekfac`, whose eigenvalues are measured one by one, does not have the limit of
small eigenvalues.
"""

# What else is tried, each with the tests that do it; `test_page.py` looks whether they are there.
BESIDES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Edges",
        "one datum, batches of one, constant labels, duplicated rows, dead units, many more weights than data, inputs of 1e-20 and 1e20, priors of 1e-12 and 1e12, float16 and bfloat16, "
        "channels_last and expanded tensors, `inference_mode`, `no_grad`, autocast, `torch.compile` (inductor, too), buffers that change in `forward`, experts without examples, outputs in "
        "dicts, dataclasses and `ModelOutput`: the right numbers, most of them by the dense computation in float64. One class and several heads are refused with what to do.",
        ("tests/laplace/test_edges.py",),
    ),
    (
        "Fits that are killed",
        "go on with the same sums, with the same and with another number of processes.",
        ("tests/curvature/passes/test_checkpoint.py",),
    ),
    (
        "What is sent",
        "the bytes of a fit and of a step of VOGN equal the formula of [scaling](scaling.md), where the model of a cluster stands beside measured processes, and how costs grow.",
        ("tests/test_communication.py", "tests/test_cluster_benchmark.py", "tests/test_growth_benchmark.py"),
    ),
    (
        "Reports",
        "names of classes, columns, files and sets are text and nothing else, in Chromium, whatever they hold.",
        ("tests/analysis/test_report_hostile.py", "tests/analysis/test_report_cards.py"),
    ),
    (
        "Files of users",
        "have the permissions that the umask or the file before them says, and are private while they grow; what kills have left goes with the next write.",
        ("tests/test_writing.py",),
    ),
    (
        "Releases",
        "`make release` writes a bill of materials and SHA-256 sums; the wheel is built, installed in an environment of its own, and used there as users would. `make test-lowest` runs tests with the lowest "
        "versions of the dependencies that are allowed, `make audit` reads the source with bandit and asks pip-audit about the dependencies.",
        ("tests/wheel/test_release.py", "tests/wheel/test_wheel.py", "tests/wheel/test_journeys.py"),
    ),
    (
        "Risks that are known before a fit",
        "`aftermap doctor` lists them: half precision, priors that rounding may drown, fewer data than weights.",
        ("tests/cli/test_fit.py",),
    ),
)

BESIDES_TEXT = """
## What else is tried

{besides_rows}
"""

RUN_TEXT = """
## What it costs

The last run of `make test-faults` (mutants are tried by `make mutants`) took {minutes} minutes with {at_once} programs at a time on a machine with {processors} processors, which other work may have shared:

{run_table}
"""


def _soak(counted: Mapping[str, Any]) -> str:
    growth = [
        f"{entry['count']:,} {'predictions' if work == 'predict' else 'fits with tuning and a prediction'} change the memory it holds by {entry['megabytes']:+.1f} MB (after the first tenth)"
        for work, entry in counted.get("growth", {}).items()
    ]
    rows = [*growth]
    if "threads" in counted:
        worst, names = max(counted["threads"].values()), ", ".join(counted["threads"])
        rows.append(
            f"eight threads that predict at once with one object differ from one thread by at most {worst:.0e} ({names})"
        )
    if "workers" in counted:
        errors = " and ".join(f"{error:.0e} ({way})" for way, error in counted["workers"].items())
        rows.append(f"a posterior that is sent to worker processes gives there what it gives here, to {errors}")
    for how, entry in counted.get("copies", {}).items():
        other = f", but for {', '.join(entry['other'])}" if entry["other"] else ""
        rows.append(f"{how}: {entry['objects']} kinds of objects equal the original in every number{other}")
    return SOAK_TEXT.format(soak_rows="\n".join(f"- {row}" for row in rows))


def _digits(counted: Mapping[str, Any]) -> str:
    lines = [
        f"| data | structure | {' | '.join(f'{prior:.0e}' for prior in counted['priors'])} |",
        "|---" * (len(counted["priors"]) + 2) + "|",
    ]
    for row in counted["rows"]:
        errors = [f"**{error:.0e}**" if warned else f"{error:.0e}" for _, error, warned in row["found"]]
        name = f"{row['structure']}, {row['dtype'].removeprefix('torch.')}"
        lines.append(f"| {row['count']}, {row['task']} | {name} | {' | '.join(errors)} |")
    return DIGITS_TEXT.format(
        tolerance=digits_tolerance(torch.float32), digits_table="\n".join(lines), lost_share=LOST_CONTRASTS
    )


def _table(first: str, rows: Mapping[str, Mapping[str, int]]) -> str:
    lines = [f"| {first} | cases | {' | '.join(RESULTS)} |", "|---" * (len(RESULTS) + 2) + "|"]
    total = {r: sum(counts[r] for counts in rows.values()) for r in RESULTS}
    for name, counts in {**rows, "**all**": total}.items():
        numbers = " | ".join(f"{counts[r]:,}" for r in RESULTS)
        lines.append(f"| {name} | {sum(counts.values()):,} | {numbers} |")
    return "\n".join(lines)


def _kills(counted: Mapping[str, Any]) -> str:
    rows = {**counted["by_job"], "**all**": counted}
    lines = [f"| {n} | {e['kills']} | {e['looked']} | {e['whole']} | {e['litter']} |" for n, e in rows.items()]
    return "\n".join(["| job | kills | looked at | whole and right | litter |", "|---|---|---|---|---|", *lines])


def _mutants(results: dict[str, Any]) -> str:
    counted = summary(results)
    rows = [
        f"| {operator} | {tried} | {found} | {equal} |"
        for operator, (found, tried, equal) in counted["by_operator"].items()
    ]
    left = "".join(f"- `{name}`: {_change(results, name)}.\n" for name in counted["survivors"])
    text = f"Not found, and not explained:\n\n{left}" if left else "No other was left over.\n"
    if counted["explained"]:
        text += "\nWhy some cannot be told from the original (`tests/mutants/equivalent.json`):\n\n"
        text += "".join(f"- `{n}`: {_change(results, n)}. {why}\n" for n, why in counted["explained"].items())
    table = "\n".join(["| kind of error | tried | found | equivalent or deleted |", "|---|---|---|---|", *rows])
    samples = [
        f"| {seed} | {e['tried']} | {e['equivalent'] + e['deleted']} | {e['found_at_first']} ({e['share_at_first']:.1%}) | {e['found']} ({e['share']:.1%}) |"
        for seed, e in counted["samples"].items()
    ]
    head = ["| seed | tried | equivalent or deleted | found at first | found |", "|---|---|---|---|---|"]
    shown = {
        "table": table,
        "samples": "\n".join([*head, *samples]),
        "draws": f"{len(samples)} random {'sample' if len(samples) == 1 else 'samples'}",
        "survivors": text.rstrip(),
        "all": results["of"],
        "core": len(TESTS),
    }
    gone = counted["deleted"]
    shown["deleted"] = f"; {gone} were in code that did nothing, which was deleted" if gone else ""
    shown["tried_files"] = len(counted["files"])
    if counted["tried"] < ENOUGH:
        found, tried, _ = counted["by_operator"].get(BY_HAND, (0, 0, 0))
        few = {"all": results["of"], "core": len(TESTS), "tried": counted["tried"], "enough": ENOUGH}
        return FEW_MUTANTS_TEXT.format(**few, by_hand=tried, by_hand_found=found)
    return MUTANTS_TEXT.format(**{**counted, **shown})


def _processes(told: Mapping[str, Any]) -> str:
    rows = [
        f"| {name} | {len(row['names'])} | {row['compared']} | {row['equal']} | {row['largest']:.1e} |"
        for name, row in told["compared"].items()
    ]
    library, writers, lost, again = (told.get(key) for key in PARTS)
    facts, missing = (
        [],
        [name for name, part in (("commands", writers), ("kills", lost), ("restarts", again)) if not part],
    )
    if library:
        sharded = library["sharded"]
        facts.append(
            f"**Weights that are cut into parts** (FSDP2): {sharded['refused']} of {sharded['asked']} ways in refuse them with a clear error."
        )
    if writers:
        facts.append(
            f"**Only process 0 writes**: {writers['only_process_0']} of {writers['runs']} runs of commands; the others, each in a folder of its own, wrote no file and said nothing."
        )
    if lost:
        facts.append(
            f"**A process that is killed** while `train` and `fit --checkpoint` run: in {lost['one_line']} of {lost['runs']} runs the others ended with one line and exit code 5; "
            f"the same command, started again, ended with the same bits in {lost['went_on']}."
        )
    if again:
        facts.append(
            f"**Started again by torchrun** (`--max-restarts=1`, with nothing to remember): {again['equal']} of {again['runs']} runs ended with the same bits."
        )
    facts += [
        f"**Failed**: {' '.join(str(text).split())}"
        for part in (writers, lost, again)
        if part
        for text in part["failed"]
    ]
    if missing:
        facts.append(
            f"Not counted by this program yet: {', '.join(missing)}; slow tests try some of them (`tests/cli/test_processes.py`, `tests/optim/test_distributed.py`)."
        )
    return PROCESSES_TEXT.format(
        cases=told["cases"], empty=library["empty"] if library else 0, bound=told["bound"], compared="\n".join(rows),
        facts="".join(f"- {fact}\n" for fact in facts),
    )  # fmt: skip


def _change(results: dict[str, Any], name: str) -> str:
    """What a mutant changes, on one line."""
    before, after = (" ".join(results["mutants"][name][key].split()) for key in ("before", "after"))
    return f"`{before}` → `{after}`"


def results() -> tuple[Any, ...]:
    """What was counted for folders, data, checkpoints, kills, processes, mutants, soak, digits and the run of all; None for a program that was not run yet."""
    files = (FOLDERS, DATA, CHECKPOINTS, KILLS, PROCESSES, MUTANTS, SOAK, DIGITS, RUN)
    return tuple(json.loads(f.read_text(encoding="utf-8")) if f.exists() else None for f in files)


def page_of(
    folders: Mapping[str, Any],
    data: Mapping[str, Any],
    checkpoints: Mapping[str, Any] | None,
    kills: Mapping[str, Any] | None,
    processes: Mapping[str, Any] | None,
    mutants: dict[str, Any] | None,
    soak: Mapping[str, Any] | None,
    digits: Mapping[str, Any] | None,
    run: Mapping[str, Any] | None,
) -> str:
    """The page as Markdown."""
    parts = [_files_text(folders, data)]
    if checkpoints is not None:
        groups, subjects = (
            _table(*t) for t in (("files", checkpoints["by_group"]), ("what", checkpoints["by_subject"]))
        )
        parts.append(CHECKPOINTS_TEXT.format(**checkpoints, groups=groups, subjects=subjects))
    if kills is not None:
        missing = ", ".join(f"`{job.name}`" for job in JOBS if job.name not in kills["by_job"])
        parts.append(
            KILLS_TEXT.format(
                kill_count=kills["kills"],
                kill_seed=kills["seed"],
                in_a_row={1: "once", 2: "twice", 3: "three times"}[MOST_IN_A_ROW],
                kill_table=_kills(kills),
                kill_missing=f"Not counted yet: {missing}.\n\n" if missing else "",
            )
        )
    if processes is not None:
        parts.append(_processes(processes))
    if mutants is not None:
        parts.append(_mutants(mutants))
    if soak is not None:
        parts.append(_soak(soak))
    if digits is not None:
        parts.append(_digits(digits))
    rows = (f"- **{what}**: {how} ({', '.join(f'`{f}`' for f in files)})" for what, how, files in BESIDES)
    parts.append(BESIDES_TEXT.format(besides_rows="\n".join(rows)))
    if run is not None:
        parts.append(_run(run))
    return "".join(parts)


def _run(told: Mapping[str, Any]) -> str:
    lines = ["| program | minutes | processor minutes | ended |", "|---|---|---|---|"]
    for name, entry in told["programs"].items():
        ended = "nothing wrong" if entry["exit_code"] == 0 else f"exit code {entry['exit_code']}"
        lines.append(f"| `{name}` | {entry['minutes']} | {entry['processor_minutes']} | {ended} |")
    return RUN_TEXT.format(
        minutes=told["minutes"], at_once=told["at_once"], processors=told["processors"], run_table="\n".join(lines)
    )


def write_page() -> None:
    """Writes the page from the counts that are there."""
    PAGE.write_text(page_of(*results()), encoding="utf-8")


def _files_text(folders: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    return TEXT.format(
        json_size=MAX_JSON_BYTES >> 20,
        depth=MAX_DEPTH,
        schema=SCHEMA,
        memory=MEMORY >> 30,
        folder_cases=f"{folders['cases']:,}",
        folder_seed=folders["seed"],
        folder_groups=_table("folders", folders["by_group"]),
        folder_subjects=_table("what was saved", folders["by_subject"]),
        folder_damages=_table("damage", folders["by_damage"]),
        data_cases=f"{data['cases']:,}",
        data_seed=data["seed"],
        data_subjects=_table("format", data["by_subject"]),
    )


if __name__ == "__main__":
    write_page()
