"""SIGKILL at any moment: an artefact is the old one or the new one, whole, and what was interrupted goes on to the same bits.

`python -m tests.faults.kills --kills 200 --seed 0`. Every job runs in a process of its own, which is killed after a time that the seed
draws between zero and the time that the job takes. Then another process looks at what is there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["JOBS", "OUTPUT", "Job", "main", "stop_clocks", "try_job"]

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "benchmarks" / "results" / "faults_kills.json"
MOST_IN_A_ROW = 3  # So many kills at most hit one run that goes on.


def _in_child(work: Callable[[], Any], answer: Path, kill_after: float | None = None) -> tuple[bool, Any, float]:
    """Runs work in a process of its own.

    Returns:
        Whether it was killed, what the work returned (JSON), and the seconds that it took.
    """
    answer.unlink(missing_ok=True)
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            result = work()
            answer.write_text(json.dumps(result))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    ended, status, seconds = 0, 0, 0.0
    try:
        while not ended:
            if kill_after is not None and seconds >= kill_after:
                return True, None, seconds
            time.sleep(0.001)
            ended, status = os.waitpid(child, os.WNOHANG)
            seconds = time.monotonic() - started
    finally:  # Also where this program itself is ended.
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError("the work failed without a kill; its traceback is above")
    return False, json.loads(answer.read_text()), seconds


class Job(ABC):
    """Something that writes, and how to see whether it is whole.

    Args:
        place: An empty folder.
        files: The files of a small trained network; see `tests.cli.common`.
    """

    name: str
    goes_on: bool  # Whether the same call, started again, must end with the same bits.

    def __init__(self, place: Path, files: Any):
        self.place, self.files = place, files

    @abstractmethod
    def work(self) -> Any:
        """Does the work once, in a child."""

    @abstractmethod
    def state(self) -> str:
        """Returns in a child what is there: a digest of the artefact; raises where it is not whole."""

    def prepare(self) -> None:  # noqa: B027
        """Makes what the work needs, once, in a child."""

    def reset(self) -> None:  # noqa: B027
        """Takes away what the work made, before it is done for the first time."""


def _hash(*parts: bytes) -> str:
    import hashlib

    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _folder_digest(folder: Path) -> str:
    """What a posterior folder holds: it is loaded, so every checksum is compared, and then its tensors are hashed."""
    from aftermap.params import weights_hash
    from aftermap.posteriors.io import load_posterior, read_reference

    loaded = load_posterior(folder)
    tensors = {f"{k}.{n}": t for k, b in enumerate(loaded.factors.blocks) for n, t in b.tensors().items()}
    prior = {f"prior.{n}": p for n, p in loaded.posterior.prior.precision.items()}
    reference = read_reference(folder) or {}
    return weights_hash({**tensors, **prior, **{f"reference.{n}": t for n, t in reference.items()}})


def stop_clocks() -> None:
    """Stops the clocks that a report shows, in a child: two reports of the same numbers have the same bytes."""
    from datetime import UTC, datetime

    from aftermap.evaluation import results

    class Noon(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2000, 1, 1, 12, tzinfo=tz or UTC)

    ticks = itertools.count()
    time.perf_counter = lambda: float(next(ticks))
    results.datetime = Noon  # type: ignore[misc, attr-defined]


class _Replacing(Job):
    """Replaces an artefact again and again by one of two; at any time it is one of them."""

    goes_on = False

    def work(self) -> Any:
        for variant in (0, 1):
            self.write(variant)
        return None

    @abstractmethod
    def write(self, variant: int) -> None:
        """Writes the first or the second artefact over what is there."""


class Save(_Replacing):
    """`Laplace.save(folder, overwrite=True)`."""

    name = "save"

    def write(self, variant: int) -> None:
        import torch

        import aftermap as am

        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3))
        x = torch.randn(40, 4)
        la = am.Laplace(net, "classification", prior_precision=1.0 + variant).fit([(x, torch.arange(40) % 3)])
        la.save(self.place / "posterior", overwrite=True)

    def state(self) -> str:
        return _folder_digest(self.place / "posterior")


class Tune(_Replacing):
    """`aftermap tune posterior/`, which replaces the folder."""

    name = "tune"

    def prepare(self) -> None:
        from tests.cli.common import invoke

        invoke(*self.files.fit(self.place / "posterior", "--structure", "diagonal", "--no-tune"))

    def write(self, variant: int) -> None:
        from tests.cli.common import invoke

        chosen = ["--prior-precision", str(2 + variant), "--force"]  # In place of what validation data chose.
        invoke("tune", str(self.place / "posterior"), *chosen, "--model", self.files.model)

    def state(self) -> str:
        return _folder_digest(self.place / "posterior")


class Predict(Tune):
    """`aftermap predict posterior/ data -o table.csv --force`."""

    name = "predict"

    def write(self, variant: int) -> None:
        from tests.cli.common import invoke

        data = (self.files.test, self.files.val)[variant]
        target = str(self.place / "scored.csv")
        invoke(
            "predict", str(self.place / "posterior"), str(data), "-o", target, "--force", "--model", self.files.model
        )

    def state(self) -> str:
        return _hash((self.place / "scored.csv").read_bytes())


class Report(Tune):
    """`aftermap report posterior/ --test data -o report.html --force`."""

    name = "report"

    def write(self, variant: int) -> None:
        from typer.testing import CliRunner

        from aftermap.cli.app import app

        stop_clocks()
        data = (self.files.test, self.files.val)[variant]
        options = ["--no-where", "--force", "--model", self.files.model]
        target = str(self.place / "report.html")
        found = CliRunner().invoke(
            app, ["report", str(self.place / "posterior"), "--test", str(data), "-o", target, *options]
        )
        if found.exit_code not in (0, 3):  # 3: the posterior, which was not tuned, may be worse than the network.
            raise RuntimeError(f"exit code {found.exit_code}: {found.output}")

    def state(self) -> str:
        text = (self.place / "report.html").read_text()
        if not text.rstrip().endswith("</html>"):
            raise RuntimeError("the report is cut short")
        return _hash(text.encode())


class Fit(Job):
    """`aftermap fit --checkpoint`, killed and started again."""

    name, goes_on = "fit", True
    structure = "ekfac"

    def work(self) -> Any:
        from tests.cli.common import invoke

        more = [
            "--structure",
            self.structure,
            "--batch-size",
            "4",
            "--checkpoint",
            str(self.place / "sums"),
            "--every",
            "3",
        ]
        if not (self.place / "posterior").exists():
            invoke(*self.files.fit(self.place / "posterior", *more))
        return None

    def state(self) -> str:
        return _folder_digest(self.place / "posterior")

    def reset(self) -> None:
        for name in ("posterior", "sums"):
            shutil.rmtree(self.place / name, ignore_errors=True)


class Train(Job):
    """`aftermap train`, killed and started again."""

    name, goes_on = "train", True
    optimizer = "vogn"

    def work(self) -> Any:
        from tests.cli.common import invoke

        invoke(
            *("train", "--model", self.files.model, "--train", str(self.files.train), "--optimizer", self.optimizer),
            *("--epochs", "12", "--batch-size", "20", "--checkpoint-seconds", "0", "--samples", "2"),
            *("-o", str(self.place / "run")),
        )
        return None

    def state(self) -> str:
        return _hash(*((self.place / "run" / name).read_bytes() for name in ("model.safetensors", "history.json")))

    def reset(self) -> None:
        shutil.rmtree(self.place / "run", ignore_errors=True)


class TrainKfac(Train):
    """The same with K-FAC."""

    name, optimizer = "train (K-FAC)", "kfac"


class TrainOgn(Train):
    """The same with OGN."""

    name, optimizer = "train (OGN)", "ogn"


class TrainAdam(Train):
    """The same with Adam."""

    name, optimizer = "train (Adam)", "adam"


class FitKron(Fit):
    """The same with Kronecker factors."""

    name, structure = "fit (kron)", "kron"


JOBS: tuple[type[Job], ...] = (
    Save,
    Tune,
    Predict,
    Report,
    Fit,
    FitKron,
    Train,
    TrainKfac,
    TrainOgn,
    TrainAdam,
)


def try_job(job: Job, kills: int, source: random.Random, answer: Path) -> dict[str, Any]:
    """Kills a job so many times, and counts what was there afterwards."""
    _in_child(job.prepare, answer)
    allowed, seconds = set(), 0.0
    if isinstance(job, _Replacing):
        for variant in (0, 1):
            _in_child(lambda variant=variant: job.write(variant), answer)  # type: ignore[misc]
            allowed.add(_in_child(job.state, answer)[1])
    _, _, seconds = _in_child(job.work, answer)
    if job.goes_on:
        allowed.add(_in_child(job.state, answer)[1])
        job.reset()
    done, looked, wrong, litter = 0, 0, list[str](), set[str]()

    def look() -> None:
        nonlocal looked
        looked += 1
        try:
            found = _in_child(job.state, answer)[1]
        except RuntimeError as error:
            found = str(error)
        if found not in allowed:
            wrong.append(found)

    while done < kills:
        # What goes on is started again until this many kills have hit it, and then runs to its end: near its end it has little left to do but
        # what every start costs, so that kills alone would hardly ever let it come there.
        several = source.randint(1, MOST_IN_A_ROW) if job.goes_on else 1
        ended = False
        for _ in range(min(several, kills - done)):
            killed, _, _ = _in_child(job.work, answer, source.uniform(0.0, seconds))
            done += killed
            ended |= not killed
            if ended:
                break
        if job.goes_on and not ended:
            _in_child(job.work, answer)
            ended = True
        look()
        litter |= _litter(job.place) if ended else set()
        job.reset()
    _in_child(job.work, answer)  # Whoever writes next ends what was interrupted, and takes away what a kill has left.
    look()
    litter |= _litter(job.place)
    told = {"kills": done, "looked": looked, "whole": looked - len(wrong), "wrong": wrong}
    return {**told, "litter": len(litter), "left": sorted(litter)}


def _litter(place: Path) -> set[str]:
    """The temporary files and folders below a place, which are hidden, whoever names them."""
    return {p.relative_to(place).as_posix() for p in place.rglob(".*")}


def main(arguments: list[str] | None = None) -> int:
    """Runs every job; the exit code is 1 if an artefact was anything but the old or the new one."""
    parser = argparse.ArgumentParser(description="Kills jobs at random moments and looks at what they leave.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--jobs", nargs="*", choices=[kind.name for kind in JOBS], help="these again; others keep what is known"
    )
    parser.add_argument("--again", action="store_true", help="forget what an earlier run with the same numbers counted")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    import torch

    import aftermap.cli.report  # noqa: F401 (imported once, for all children)
    import tests.cli.common

    torch.set_num_threads(1)  # Threads do not survive a fork.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    found: dict[str, Any] = {}
    if (
        options.output.exists() and not options.again
    ):  # Jobs of an earlier run with the same numbers are not done again.
        kept = json.loads(options.output.read_text(encoding="utf-8"))
        found = kept["by_job"] if (kept["seed"], kept["asked"]) == (options.seed, options.kills) else {}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        answer = base / "answer.json"
        os.environ["AFTERMAP_STATE"] = str(base / "state")
        (base / "files").mkdir()
        _in_child(lambda: tests.cli.common.make_files(base / "files") and None, answer)
        parts = {name: base / "files" / f"{name}.npz" for name in ("train", "val", "test", "ood")}
        files = tests.cli.common.Files(
            base / "files", f"{base / 'files' / 'somebodys_nets.py'}:build", base / "files" / "model.pt", **parts
        )
        for number, kind in enumerate(JOBS):
            if not (kind.name in options.jobs if options.jobs else kind.name not in found):
                continue
            place = base / kind.name.replace(" ", "_")
            place.mkdir()
            kills = options.kills // len(JOBS) + (number < options.kills % len(JOBS))
            found[kind.name] = try_job(kind(place, files), kills, random.Random(f"{options.seed} {kind.name}"), answer)
            sys.stderr.write(f"{kind.name}: {found[kind.name]}\n")
            total = {key: sum(entry[key] for entry in found.values()) for key in ("kills", "looked", "whole", "litter")}
            content = {"seed": options.seed, "asked": options.kills, **total, "by_job": found}
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(any(entry["looked"] != entry["whole"] or entry["litter"] for entry in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
