"""Trying many damaged files and counting what happens: reproducible case by case, with a bound on memory, in processes that may die."""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from aftermap.errors import AftermapError

__all__ = ["RESULTS", "Outcome", "Trial", "limited_memory", "main", "run", "run_in_processes", "summary"]

# What may happen, from good to bad. "as written" is allowed only where nothing in the file can tell that it was changed.
RESULTS = (
    "clear error",
    "identical content",
    "as written",
    "unclear error",
    "other content",
    "other exception",
    "killed",
)
GOOD = RESULTS[:3]
MEMORY = 3 << 30
SECONDS = 300.0


@dataclass(frozen=True)
class Outcome:
    """What happened to one case.

    Attributes:
        number: The number of the case; with the seed it makes the case again.
        group: What is known of the damage: for folders "damaged", "forged" (the checksums were made to fit) or "earlier" (a folder
            of a version without checksums).
        subject: What was damaged.
        damage: How.
        result: One of `RESULTS`.
        detail: The error, where there was one.
    """

    number: int
    group: str
    subject: str
    damage: str
    result: str
    detail: str = ""


class Trial(ABC):
    """A seeded series of damaged things.

    Args:
        seed: With the number of a case it decides the damage.
        place: An empty folder to work in.
    """

    def __init__(self, seed: int, place: Path):
        self.seed, self.place = seed, place

    @abstractmethod
    def attempt(self, number: int) -> Outcome:
        """Makes one case, tries it, and takes it away again."""


def judged(error: BaseException, named: Iterable[str]) -> tuple[str, str]:
    """The result and the detail of an error: one of the library that names the file is clear."""
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, AftermapError):
        return "other exception", text[:300]
    clear = any(name in str(error) for name in named)
    return ("clear error" if clear else "unclear error"), text[:300]


@contextmanager
def limited_memory(more: int = MEMORY) -> Iterator[None]:
    """Lets this process have only so many bytes more than it has now, where the system knows such limits."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run(trial: Trial, numbers: Iterable[int]) -> list[Outcome]:
    """Tries cases in this process."""
    with limited_memory(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [trial.attempt(number) for number in numbers]


def _work(module: str, seed: int, numbers: range, connection: Any) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        trial = importlib.import_module(module).TRIAL(seed, Path(place))
        for number in numbers:
            connection.send(asdict(run(trial, [number])[0]))
    connection.close()


def run_in_processes(module: str, seed: int, cases: int) -> list[Outcome]:
    """Tries cases in a process of their own, and in a new one after each that was killed.

    Args:
        module: The module whose `TRIAL` is run.
        seed: The seed.
        cases: The number of cases.
    """
    context, found = multiprocessing.get_context("spawn"), list[Outcome]()
    shown = time.monotonic()
    while len(found) < cases:
        here, there = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(module, seed, range(len(found), cases), there))
        worker.start()
        there.close()
        why = "the process died"
        try:
            while len(found) < cases:
                if not here.poll(SECONDS):
                    why = f"nothing happened for {SECONDS:g} s"
                    break
                found.append(Outcome(**here.recv()))
                if time.monotonic() - shown > 30:
                    shown = time.monotonic()
                    sys.stderr.write(f"{len(found)} of {cases}\n")
        except EOFError:
            pass
        if len(found) < cases:
            found.append(Outcome(len(found), "unknown", "unknown", "unknown", "killed", why))
        worker.kill()
        worker.join()
    return found


def summary(outcomes: Iterable[Outcome], seed: int) -> dict[str, Any]:
    """The counts for JSON, with the first cases that went wrong."""
    listed = list(outcomes)

    def counts(key: str) -> dict[str, dict[str, int]]:
        names = sorted({getattr(o, key) for o in listed})
        table = {n: Counter(o.result for o in listed if getattr(o, key) == n) for n in names}
        return {n: {r: c[r] for r in RESULTS} for n, c in table.items()}

    return {
        "seed": seed,
        "cases": len(listed),
        "results": {r: sum(o.result == r for o in listed) for r in RESULTS},
        "by_group": counts("group"),
        "by_subject": counts("subject"),
        "by_damage": counts("damage"),
        "wrong": [asdict(o) for o in listed if o.result not in GOOD][:40],
    }


def main(module: str, cases: int, output: str) -> int:
    """The command line of a program of faults; the exit code is 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=f"Tries damaged files ({module}).")
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(output))
    parser.add_argument("--only", type=int, help="try this one case, in this process, and say what happened")
    options = parser.parse_args()
    if options.only is not None:
        with tempfile.TemporaryDirectory() as place:
            trial = importlib.import_module(module).TRIAL(options.seed, Path(place))
            sys.stdout.write(json.dumps(asdict(run(trial, [options.only])[0]), indent=1) + "\n")
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = summary(run_in_processes(module, options.seed, options.cases), options.seed)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(found["results"], indent=1) + "\n")
    return int(any(found["results"][r] for r in RESULTS if r not in GOOD))
