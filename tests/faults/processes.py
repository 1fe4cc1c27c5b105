"""One process, two and four: the same numbers from every structure, optimiser and command, and a clear end when one is lost.

`python -m tests.faults.processes` shares data out by chance (uneven parts, and processes without any), compares all that comes back with what one process
finds, and kills processes. A case is made by the seed and its number alone.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import aftermap as am
from aftermap.cli.main import main as aftermap_command
from aftermap.curvature import STRUCTURES
from aftermap.distributed import rank, world_size
from aftermap.posteriors.io import load_posterior
from tests.cli.common import Files, make_files
from tests.faults.kills import stop_clocks
from tests.optim.problems import classifier
from tests.optim.ranks import PRESETS, flat, steps
from tests.processes import free_port, from_processes

__all__ = ["COMMANDS", "OUTPUT", "WORLDS", "main", "shares"]

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "benchmarks" / "results" / "faults_processes.json"
WORLDS = (2, 4)
BOUND = 1e-6
_COMMAND_MODULES = [
    f"aftermap.cli.{name}" for name in ("app", "evaluate", "fit", "predict", "report", "train", "where")
]
PARTS = ("library", "writers", "lost", "restarted")
_DATA = 9
_EXIT_LOST = 5
_HUNG = -1000  # The exit code of a process that had not ended after so many seconds.
_SECONDS = 400

# The network kills process 1 at its twentieth batch, in the first attempt only.
DEADLY = """
import os
import signal

from torch import nn


class Deadly(nn.Sequential):
    calls = 0

    def forward(self, x):
        self.calls += 1
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and not os.environ.get("SPARED")
        if first and self.calls == 20 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def build():
    return Deadly(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
"""

# The network of `make_files` and its data in double precision: in single precision the order of a sum moves variances by 1e-6.
DOUBLES = """
from pathlib import Path

import numpy
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def part(name):
    arrays = numpy.load(Path(__file__).with_name(f"{name}.npz"))
    return torch.from_numpy(arrays["x"]).double(), torch.from_numpy(arrays["y"])


def train():
    return part("train")


def few():
    x, y = train()
    return x[:3], y[:3]


def val():
    return part("val")


def test():
    return part("test")
"""


def in_double_precision(files: Files) -> Files:
    """The same files for a network with weights in float64."""
    code = files.folder / "doubles.py"
    code.write_text(DOUBLES)
    weights = {name: value.double() for name, value in torch.load(files.weights, weights_only=True).items()}
    torch.save(weights, files.folder / "doubles.pt")
    train, val, test = (Path(f"{code}:{name}") for name in ("train", "val", "test"))
    return Files(files.folder, f"{code}:build", files.folder / "doubles.pt", train, val, test, files.ood)


def shares(seed: int, world: int, n_data: int, *, empty: bool = True) -> list[slice]:
    """Disjoint parts of the data, one for each process, cut by chance; with an odd seed at least one is empty, if it may be."""
    source = random.Random(f"{seed} {world}")
    while True:
        cuts = [0, *sorted(source.randint(0, n_data) for _ in range(world - 1)), n_data]
        parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
        nothing = any(p.start == p.stop for p in parts)
        if nothing == (seed % 2 == 1) if empty and world > 1 else not nothing:
            return parts


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(_DATA, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (_DATA,), generator=generator)


def _predicted(la: Any) -> Tensor:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    found: Tensor = la.predict(x, link="probit").latent_cov.detach()
    return found


def fits(seed: int, wrapped: bool) -> dict[str, Tensor]:
    """Variances of predictions from every structure, fitted to this process's share of the data, before and after tuning."""
    warnings.filterwarnings("ignore", message="the Hessian is indefinite")
    x, y = data(seed)
    mine = shares(seed, world_size(), _DATA)[rank()]
    batches = _split(x[mine], y[mine])
    whole = _split(x, y)  # KFRA's recursion averages inside a batch, so its batches stay whole: they are shared out.
    whole = whole[shares(seed, world_size(), len(whole))[rank()]]
    model = DistributedDataParallel(network(seed)) if wrapped else network(seed)
    found = {}
    for structure in sorted(STRUCTURES):
        la = am.Laplace(model, "classification", structure=structure, rank=12, subset_size=5, prior_precision=20.0)
        given = whole if structure == "kfra" else batches
        la.fit(given, generator=torch.Generator().manual_seed(0), progress=False)
        found[structure] = _predicted(la)
        if structure in ("kron", "ekfac", "diagonal", "full"):
            found[f"{structure}, tuned by the evidence"] = _predicted(la.tune(method="evidence"))
    for params in ("last_layer", "last_block"):
        la = am.Laplace(model, "classification", params=params).fit(batches, progress=False)
        found[f"params={params!r}"] = _predicted(la)
    return found


def _split(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(2), y.split(2), strict=True)) if len(y) else []


def trained(seed: int, wrapped: bool) -> dict[str, Tensor]:
    """Weights after three steps of every optimiser, each on this process's share of the batch."""
    found = {}
    for name, make in PRESETS.items():
        net, x, y = classifier()
        mine = shares(seed, world_size(), len(y), empty=False)[rank()]
        seen = DistributedDataParallel(net) if wrapped else net
        steps(make(seen), seen, x[mine], y[mine], 3)
        found[name] = flat(net)
    return found


def refusals() -> dict[str, str]:
    """What is said about a network whose weights are cut into parts."""
    sharded = fully_shard(network(0))
    told = {}
    makers: dict[str, Callable[[], Any]] = {
        "Laplace": lambda: am.Laplace(sharded, "classification"),
        "fit_curvature": lambda: am.curvature.fit_curvature(sharded, [data(0)], "classification"),
        "VOGN": lambda: am.optim.VOGN(sharded, lr=0.1, n_data=9),
        "IVON": lambda: am.optim.IVON(sharded, lr=0.1, n_data=9),
        "KFAC": lambda: am.optim.KFAC(sharded, lr=0.1, n_data=9),
    }
    for name, make in makers.items():
        try:
            make()
            told[name] = "no error"
        except am.errors.UnsupportedError as error:
            told[name] = str(error)
    return told


def work(cases: int) -> dict[str, Any]:
    """What one of several processes finds in all cases; a start of a process takes longer than a case."""
    found = [
        {
            "fits": fits(seed, False),
            "fits, DistributedDataParallel": fits(seed, True),
            "optimisers": trained(seed, False),
            "optimisers, DistributedDataParallel": trained(seed, True),
        }
        for seed in range(cases)
    ]
    return {"cases": found, "refused": refusals()}


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


class Counted:
    """Rows of the table: what was compared, how often, how far off at most."""

    def __init__(self, rows: dict[str, dict[str, Any]]) -> None:
        self.rows = rows

    def begin(self, groups: Collection[str]) -> None:
        """Forgets what an earlier run counted for some groups."""
        for group in groups:
            self.rows.pop(group, None)

    def add(self, group: str, name: str, world: int, off: float) -> None:
        row = self.rows.setdefault(group, {"compared": 0, "equal": 0, "largest": 0.0, "names": [], "processes": []})
        row["compared"] += 1
        row["equal"] += off <= BOUND
        row["largest"] = max(row["largest"], off) if math.isfinite(off) else off
        for key, value in (("names", name), ("processes", world)):
            if value not in row[key]:
                row[key].append(value)


def compare_library(cases: int, counted: Counted, folder: Path) -> dict[str, Any]:
    """Fits and steps on 2 and 4 processes against one."""
    counted.begin([g + w for g in ("fits", "optimisers") for w in ("", ", DistributedDataParallel")])
    alone = [{"fits": fits(seed, False), "optimisers": trained(seed, False)} for seed in range(cases)]
    empty, refused = 0, {}
    for world in WORLDS:
        empty += sum(p.start == p.stop for seed in range(cases) for p in shares(seed, world, _DATA))
        for found in from_processes(work, world, folder / str(world), cases, method="fork"):
            for seed, group in itertools.product(range(cases), ("fits", "optimisers")):
                for wrapped in ("", ", DistributedDataParallel"):
                    for name, value in found["cases"][seed][group + wrapped].items():
                        off = distance(value, alone[seed][group][name])
                        counted.add(group + wrapped, name, world, off)
                        if not off <= BOUND:
                            sys.stderr.write(f"case {seed}, {world} processes: {group}{wrapped}, {name}: {off:.1e}\n")
            refused.update(found["refused"])
        sys.stderr.write(f"{world} processes: {counted.rows}\n")
    clear = sum("FSDP2 or tensor parallelism" in text for text in refused.values())
    return {"empty": empty, "sharded": {"asked": len(refused), "refused": clear}}


def start(arguments: list[str], world: int, folder: Path, **environment: str) -> list[tuple[int, str, str, float]]:
    """Runs a command on several processes, each in a folder of its own: exit code, standard output, standard error and seconds.

    They are forked from this process, which has imported everything: with an interpreter of their own, imports would take nearly all of the time.
    """
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    begun, children = time.monotonic(), list[int]()
    for number in range(world):
        place = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)} if world > 1 else {}
        _made(folder / str(number))
        child = os.fork()
        if child == 0:
            _be_command(arguments, folder, number, {**place, **environment})
        children.append(child)
    codes: dict[int, int] = {}
    try:
        while len(codes) < world and time.monotonic() - begun < _SECONDS:
            for child in set(children) - codes.keys():
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
    finally:
        for child in set(children) - codes.keys():  # It hangs, or this program is ended.
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            codes[child] = _HUNG
    seconds = time.monotonic() - begun
    said = [[(folder / f"{number}.{way}").read_text() for way in ("out", "err")] for number in range(world)]
    return [(codes[child], out, err, seconds) for child, (out, err) in zip(children, said, strict=True)]


def _be_command(arguments: list[str], folder: Path, number: int, environment: dict[str, str]) -> NoReturn:
    """In a child: becomes `aftermap` with these arguments."""
    code: Any = 1
    try:
        for descriptor, way in ((1, "out"), (2, "err")):
            with (folder / f"{number}.{way}").open("w") as stream:
                os.dup2(stream.fileno(), descriptor)
        os.chdir(folder / str(number))
        os.environ.update(environment)
        sys.path.insert(0, str(folder))
        sys.argv = ["aftermap", *arguments]
        if arguments[0] == "report":
            stop_clocks()
        aftermap_command()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _numbers(text: str) -> list[float]:
    """Every finite number of a text of JSON, in its order."""

    def walk(value: Any) -> list[float]:
        if isinstance(value, dict):
            return [n for key in sorted(value) if "second" not in key for n in walk(value[key])]
        if isinstance(value, list):
            return [n for item in value for n in walk(item)]
        return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []

    return walk(json.loads(text))


def _of_table(file: Path) -> list[float]:
    found = []
    for row in csv.reader(file.read_text(encoding="utf-8").splitlines()):
        for cell in row:
            try:
                found.append(float(cell))
            except ValueError:
                found.append(float(sum(cell.encode())))  # Words are compared, too.
    return found


def _of_report(file: Path) -> list[float]:
    """Every byte of a report but for the name of the folder that it is in."""
    return [float(byte) for byte in file.read_text(encoding="utf-8").replace(str(file.parents[1]), "").encode()]


def _of_posterior(folder: Path) -> list[float]:
    """The sums over data, and the diagonal of the posterior's covariance, which depends on what was tuned."""
    loaded = load_posterior(folder)
    scale = float(loaded.factors.to_dense().abs().max())
    variances = torch.cat([v.flatten() for v in loaded.posterior.marginal_variance().values()])
    return [
        *(loaded.factors.to_dense().flatten() / scale).tolist(),
        *(variances / float(variances.abs().max())).tolist(),
    ]


def _of_weights(folder: Path) -> list[float]:
    from safetensors.torch import load_file

    return [v for _, t in sorted(load_file(folder / "model.safetensors").items()) for v in t.flatten().tolist()]


def _commands(files: Files) -> dict[str, tuple[list[str], Callable[[Path], list[float]]]]:
    """Every command that computes: its arguments, in a folder that has `posterior`; and the numbers that it wrote."""
    model = ["--model", files.model]
    test = ["--test", str(files.test)]
    train = [
        "train",
        *model,
        "--train",
        str(files.train),
        "--val",
        str(files.val),
        "--epochs",
        "6",
        "--batch-size",
        "40",
    ]
    few = ["--resamples", "0"]
    three = replace(files, train=Path(f"{files.model.rpartition(':')[0]}:few"))  # Of four processes one has none.
    return {
        "fit, three examples": (three.fit(Path("out"), "--structure", "kron", "--no-tune"), lambda p: _of_posterior(p / "out")),
        "fit": (files.fit(Path("out"), "--structure", "kron", "--no-tune"), lambda p: _of_posterior(p / "out")),
        "fit and tune": (files.fit(Path("out"), "--structure", "kron"), lambda p: _of_posterior(p / "out")),
        "tune": (["tune", "POSTERIOR", *model, "--val", str(files.val), "-o", "out"], lambda p: _of_posterior(p / "out")),
        "predict": (["predict", "POSTERIOR", str(files.test), *model, "-o", "out.csv"], lambda p: _of_table(p / "out.csv")),
        "evaluate": (["evaluate", "POSTERIOR", *test, *few, *model, "-o", "out.json"], lambda p: _numbers((p / "out.json").read_text())),
        "where": (["where", "POSTERIOR", *test, *model, "--json"], lambda p: _numbers((p / "stdout").read_text())),
        "report": (["report", "POSTERIOR", *test, "--no-where", *model, "-o", "out.html"], lambda p: _of_report(p / "out.html")),
        "train, vogn": ([*train, "--optimizer", "vogn", "-o", "out"], lambda p: _of_weights(p / "out")),
        "train, kfac": ([*train, "--optimizer", "kfac", "-o", "out"], lambda p: _of_weights(p / "out")),
        "train, adam": ([*train, "--optimizer", "adam", "-o", "out"], lambda p: _of_weights(p / "out")),
    }  # fmt: skip


COMMANDS = ("fit", "tune", "predict", "evaluate", "where", "report", "train")


def compare_commands(counted: Counted, folder: Path, files: Files) -> dict[str, Any]:
    """Every command on 1, 2 and 4 processes: equal numbers, and only process 0 writes or speaks."""
    counted.begin(["commands"])
    (folder / "base" / "0").mkdir(parents=True)
    ((code, _, error, _),) = start(
        files.fit(Path("posterior"), "--structure", "kron", "--prior-precision", "3"), 1, folder / "base"
    )
    if code:
        raise SystemExit(f"the posterior could not be fitted: {error}")
    posterior = folder / "base" / "0" / "posterior"
    writers = {"runs": 0, "only_process_0": 0, "failed": []}
    for name, (arguments, read) in _commands(files).items():
        expected: Tensor | None = None
        for world in (1, *WORLDS):
            place = folder / f"{name} {world}"
            own = place / "posterior"
            subprocess.run(["cp", "-r", str(posterior), str(_made(place))], check=True)
            told = start([str(own) if a == "POSTERIOR" else a for a in arguments], world, place)
            codes = [code for code, *_ in told]
            (place / "0" / "stdout").write_text(told[0][1])
            if set(codes) - {0, 3}:  # 3: a self-check failed, which says something of the network only.
                writers["failed"].append(f"{name}, {world} processes: {codes} {told[0][2][-300:]}")
                continue
            found = torch.tensor(read(place / "0"), dtype=torch.float64)
            if expected is None:
                expected = found
                continue
            off = distance(found, expected) if found.shape == expected.shape else math.inf
            counted.add("commands", name, world, off)
            silent = all(out == "" and err == "" for _, out, err, _ in told[1:])
            nothing = all(not list((place / str(r)).iterdir()) for r in range(1, world))
            writers["runs"] += 1
            writers["only_process_0"] += silent and nothing
            if not (silent and nothing):
                writers["failed"].append(f"{name}, {world} processes: another process wrote or spoke")
            sys.stderr.write(f"{name}, {world} processes: off by {off:.2g}, others silent: {silent and nothing}\n")
    return writers


def _made(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    return place


@dataclass(frozen=True)
class Interrupted:
    """A command that goes on where it was.

    Attributes:
        arguments: Its arguments, in a folder that all processes see; each process works in one of its own.
        read: The numbers that it writes to its own folder.
    """

    arguments: Callable[[Path], list[str]]
    read: Callable[[Path], list[float]]


def _interrupted(files: Files) -> dict[str, Interrupted]:
    files = replace(files, model="deadly:build")
    train = ["train", "--model", files.model, "--train", str(files.train), "--val", str(files.val), "-o", "out"]
    train += ["--optimizer", "vogn", "--epochs", "12", "--batch-size", "40", "--checkpoint-seconds", "0"]
    fit = files.fit(Path("out"), "--structure", "kron", "--no-tune", "--batch-size", "2", "--every", "3")
    return {
        "train": Interrupted(lambda place: train, lambda own: _of_weights(own / "out")),
        "fit": Interrupted(
            lambda place: [*fit, "--checkpoint", str(place / "sums")], lambda own: _of_posterior(own / "out")
        ),
    }


def lose(folder: Path, commands: Mapping[str, Interrupted]) -> dict[str, Any]:
    """Kills a process: the others end with one line; started again, the command ends as if nothing had been."""
    found: dict[str, Any] = {"runs": 0, "one_line": 0, "exit_codes": [], "went_on": 0, "seconds": [], "failed": []}
    for name, world in itertools.product(commands, WORLDS):
        place = _made(folder / f"lost {name} {world}")
        (place / "deadly.py").write_text(DEADLY)
        command = commands[name]
        expected = _uninterrupted(folder, world, name, command)
        told = start(command.arguments(place), world, place)
        found["runs"] += 1
        codes = [code for code, *_ in told]
        found["exit_codes"].append(codes)
        found["seconds"].append(round(told[0][3], 1))
        others = [told[r] for r in range(world) if r != 1]
        lines = [[line for line in err.splitlines() if line.startswith("error:")] for _, _, err, _ in others]
        clear = all(code == _EXIT_LOST for code, *_ in others) and codes[1] == -signal.SIGKILL
        clear = clear and len(lines[0]) == 1 and all("Traceback" not in err for _, _, err, _ in others)
        found["one_line"] += clear
        again = start(command.arguments(place), world, place, SPARED="1")
        same = {code for code, *_ in again} <= {0, 3} and command.read(place / "0") == expected
        found["went_on"] += same
        if not clear or not same:
            found["failed"].append([f"{code}: {err[-300:]}" for code, _, err, _ in (*told, *again)])
        sys.stderr.write(f"lost, {name}, {world} processes: {codes}, one line: {clear}, went on: {same}\n")
    return found


def _uninterrupted(folder: Path, world: int, name: str, command: Interrupted) -> list[float]:
    """What a run finds that nobody killed, which is made once."""
    place = _made(folder / f"whole {name} {world}")
    if not (place / "0" / "out").exists():
        (place / "deadly.py").write_text(DEADLY)
        told = start(command.arguments(place), world, place, SPARED="1")
        if {code for code, *_ in told} - {0, 3}:
            raise SystemExit(f"a run that nobody killed failed: {told}")
    return command.read(place / "0")


def restart(folder: Path, command: Interrupted) -> dict[str, Any]:
    """torchrun starts the processes again by itself, without a variable to remember; the run ends as if nothing had been."""
    found: dict[str, Any] = {"runs": 0, "equal": 0, "failed": []}
    for world in WORLDS:
        place = _made(folder / f"elastic {world}")
        (place / "deadly.py").write_text(DEADLY)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(place)])}
        launch = [
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={world}",
            "--max-restarts=1",
            "--monitor-interval=0.2",
        ]
        launched = [sys.executable, "-m", *launch, "-m", "aftermap", *command.arguments(place)]
        done = subprocess.run(
            launched, cwd=place, env=environ, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        expected = _uninterrupted(folder, world, "train", command)
        same = done.returncode in (0, 3) and command.read(place) == expected
        found["runs"] += 1
        found["equal"] += same
        if not same:
            found["failed"].append(f"{world} processes: {done.returncode} {done.stderr[-600:]}")
        sys.stderr.write(f"restarted, {world} processes: exit code {done.returncode}, equal: {same}\n")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs everything; the exit code is 1 if something differs, hangs or is unclear."""
    parser = argparse.ArgumentParser(description="Compares 1, 2 and 4 processes, and kills some.")
    parser.add_argument("--cases", type=int, default=4, help="how many ways to share out the data")
    parser.add_argument("--parts", nargs="*", choices=PARTS, help="only these; others keep what is known of them")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # Threads do not survive a fork.
    for module in _COMMAND_MODULES:
        importlib.import_module(module)
    told: dict[str, Any] = {"cases": options.cases, "bound": BOUND, "compared": {}}
    if options.output.exists() and options.parts:  # Other parts keep what is known of them.
        told = json.loads(options.output.read_text(encoding="utf-8"))
    counted = Counted(told["compared"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = make_files(_made(folder / "files"))
        deadly = _interrupted(files)
        parts: dict[str, Callable[[], Any]] = {
            "library": lambda: compare_library(options.cases, counted, folder / "library"),
            "writers": lambda: compare_commands(counted, folder / "commands", in_double_precision(files)),
            "lost": lambda: lose(folder / "lost", deadly),
            "restarted": lambda: restart(folder / "lost", deadly["train"]),
        }
        for part in options.parts or PARTS:
            told[part] = parts[part]()
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    equal = all(row["equal"] == row["compared"] for row in counted.rows.values())
    failed = [text for part in PARTS[1:] for text in told.get(part, {}).get("failed", [])]
    sys.stderr.write(json.dumps(told, indent=1) + "\n")
    return int(not equal or bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
