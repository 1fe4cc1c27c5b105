"""Several processes, and how steady steps are (claim V16).

Started with an argument, this module is one of the processes: torchrun's variables say which.

Parallel data: every process has its part of the batch, and all draw the same weights. Parallel samples: every process has the
whole batch, and its own draw. Both must take the steps that one process takes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftermap as am
from aftermap.analysis.figures import CATEGORIES, finish, save_svg
from aftermap.distributed import process_group, rank, world_size
from examples.train_vogn import lenet
from experiments.framework import ROOT, Job, Results, Verdict, judged, mean_and_error, not_met
from experiments.osawa2019.settings import Parallel, Pictures
from experiments.osawa2019.training import Batches, Data

__all__ = ["figures", "jobs", "verdicts"]

OPTIONS: dict[str, Any] = {"lr": 5e-3, "damping": 0.1, "prior_precision": 16.0}
N_DATA = 8000
SINGLE, DOUBLE = "float32", "float64"
# Sums of parts are rounded otherwise than sums of the whole: a few digits of the last place after some steps.
ROUNDING = {SINGLE: 1e-4, DOUBLE: 1e-12}


def _batch(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, 32, 32, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(10, (count,), generator=generator)


def _start(dtype: torch.dtype, n_data: int, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = lenet(3, 32).to(dtype)
    return net, am.optim.VOGN(net, n_data=n_data, **OPTIONS, **options)


def _steps(net: nn.Module, opt: Any, x: Tensor, y: Tensor, count: int) -> float:
    """Takes steps, and returns the processor seconds of one."""
    start = time.process_time()
    for _ in range(count):
        opt.step(lambda: F.cross_entropy(net(x), y))
    return (time.process_time() - start) / count


def _process(asked: dict[str, Any]) -> dict[str, Any]:
    """What one of the processes finds: weights after some steps and the time of a step, by kind and precision."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for kind in ("data", "samples"):
        for name in (SINGLE, DOUBLE):
            x, y = _batch(asked["batch"], getattr(torch, name))
            groups = world_size() if kind == "samples" else 1
            draws = asked["most"] // groups
            if kind == "data":
                x, y = x[rank() :: world_size()], y[rank() :: world_size()]
            net, opt = _start(getattr(torch, name), N_DATA, mc_samples=draws, sample_groups=groups)
            _steps(net, opt, x, y, asked["steps"])
            found[f"{kind} {name}"] = torch.cat([p.detach().flatten() for p in net.parameters()])
    for kind in ("data", "samples"):
        x, y = _batch(asked["batch"], torch.float32)
        x, y = (x[rank() :: world_size()], y[rank() :: world_size()]) if kind == "data" else (x, y)
        groups = world_size() if kind == "samples" else 1
        for draws in asked["draws"]:
            if draws % groups == 0:
                net, opt = _start(torch.float32, N_DATA, mc_samples=draws // groups, sample_groups=groups)
                _steps(net, opt, x, y, 2)
                found[f"seconds {kind} {draws}"] = _steps(net, opt, x, y, asked["timed"])
    return found


def _together(settings: Parallel, world: int, folder: Path) -> list[dict[str, Any]]:
    """What each of some processes found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = {
        "batch": settings.batch,
        "steps": settings.steps,
        "timed": settings.timed,
        "draws": settings.draws,
        "most": max(settings.ranks),
        "folder": str(folder),
    }
    line = [sys.executable, "-m", "experiments.osawa2019.parallel", json.dumps(asked)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    same = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    started = [
        subprocess.Popen(
            line, cwd=ROOT, env={**same, "MASTER_PORT": str(port), "RANK": str(r), "WORLD_SIZE": str(world)}
        )
        for r in range(world)
    ]
    codes = [process.wait(timeout=600) for process in started]
    if any(codes):
        raise RuntimeError(f"processes ended with {codes}")
    return [torch.load(folder / f"{r}.pt", weights_only=True) for r in range(world)]


def _compare(settings: Parallel) -> dict[str, Any]:
    """The largest difference of any weight, relative to how far weights moved, and seconds of a step of a process."""
    from tempfile import TemporaryDirectory

    found = {}
    for world in settings.ranks:
        with TemporaryDirectory() as folder:
            found[world] = _together(settings, world, Path(folder))
    alone = found[1][0]
    numbers: dict[str, Any] = {"differences": {}, "times": {}}
    for name in (SINGLE, DOUBLE):
        net, _ = _start(getattr(torch, name), N_DATA)
        first = torch.cat([p.detach().flatten() for p in net.parameters()])
        for world, parts in found.items():
            for kind in ("data", "samples"):
                key = f"{kind} {name}"
                far = max(float((p[key] - alone[key]).abs().max()) for p in parts)
                numbers["differences"][f"{key} {world}"] = far / float((alone[key] - first).abs().max())
    for world, parts in found.items():
        for key in parts[0]:
            if key.startswith("seconds"):
                numbers["times"][f"{key.removeprefix('seconds ')} {world}"] = mean(p[key] for p in parts)
    return numbers


def _variance(settings: Parallel, pictures: Pictures, data_dir: Path, seed: int) -> dict[str, Any]:
    """The variance of the step α m / (s + c + γ) at a posterior that does not move, summed over weights, for some K.

    With the momentum and the rate at 0 and the weight of new curvature next to 0, each step's momentum is its gradient.
    """
    torch.manual_seed(seed)
    data, generator = Data(data_dir, pictures), torch.Generator().manual_seed(seed)
    batches = Batches(*data.train, min(settings.batch, pictures.train), generator)
    net = lenet(3, 32)
    opt = am.optim.VOGN(net, n_data=pictures.train, **OPTIONS)
    stream = _endless(batches)
    for _ in range(settings.warm):
        x, y = next(stream)
        opt.step(lambda x=x, y=y: F.cross_entropy(net(x), y))  # type: ignore[misc]
    state, fixed = opt.state_dict(), next(stream)
    numbers: dict[str, Any] = {"fixed": [], "new": []}
    for kind in numbers:
        for draws in settings.draws:
            still = am.optim.VOGN(net, n_data=pictures.train, mc_samples=draws, **OPTIONS)
            still.load_state_dict(state)
            for group in still.param_groups:
                group |= {"lr": 0.0, "momentum": 0.0, "new_curvature_weight": 1e-12}
            taken = []
            for _ in range(settings.repeats):
                x, y = fixed if kind == "fixed" else next(stream)
                still.step(lambda x=x, y=y: F.cross_entropy(net(x), y))  # type: ignore[misc]
                taken.append(_step(still, pictures.train))
            numbers[kind].append(float(torch.stack(taken).var(0).sum()))
    return numbers


def _endless(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        for batch in batches:
            if len(batch[0]) == batches.size:
                yield batch


def _step(opt: Any, n_data: int) -> Tensor:
    added = OPTIONS["prior_precision"] / n_data + OPTIONS["damping"]
    states = [opt.state[p] for group in opt.param_groups for p in group["params"]]
    return torch.cat([(s["momentum"] / (s["curvature"] + added)).flatten() for s in states]) * OPTIONS["lr"]


def jobs(settings: Parallel, pictures: Pictures, data_dir: Path) -> Iterator[Job]:
    """Processes compared, and the variance of steps by seed."""
    yield Job("parallel/processes", partial(_compare, settings))
    for seed in range(settings.seeds):
        yield Job(f"parallel/variance/seed{seed}", partial(_variance, settings, pictures, data_dir, seed))


def verdicts(results: Results) -> list[Verdict]:
    """V16."""
    needs = {"parallel/processes": 1, "parallel/variance/*": results.settings.parallel.seeds}
    return judged(results, needs, ("V16",), lambda r: [_verdict(r)])


def _drops(results: Results, kind: str) -> dict[int, list[float]]:
    """The variance with one draw over that with K, seed by seed."""
    values = [v[kind] for v in results.among("parallel/variance/*").values()]
    return {k: [v[0] / v[i] for v in values] for i, k in enumerate(results.settings.parallel.draws)}


def _verdict(results: Results) -> Verdict:
    differences = results.values["parallel/processes"]["differences"]
    worst = {
        (kind, name): max(v for key, v in differences.items() if key.startswith(f"{kind} {name}"))
        for kind in ("data", "samples")
        for name in ROUNDING
    }
    conditions = {f"parallel {kind} equal in {name}": v <= ROUNDING[name] for (kind, name), v in worst.items()}
    drops = {k: v for k, v in _drops(results, "fixed").items() if k > 1}
    means = [mean(v) for v in drops.values()]
    conditions["more draws, less variance"] = means == sorted(means) and means[0] > 1
    ranks = ", ".join(map(str, results.settings.parallel.ranks))
    equal = "; ".join(f"{kind}, {name}: {v:.1g}" for (kind, name), v in worst.items())
    told = ", ".join(f"{mean_and_error(v, 2)} with {k}" for k, v in drops.items())
    most = max(drops)
    whole = mean_and_error(_drops(results, "new")[most], 2)
    ours = (
        f"{ranks} processes differ by this share of the way that weights went, at most: {equal}. The variance of a step on one batch "
        f"falls by {told} draws; over batches, by {whole} with {most}"
    )
    reason = not_met(conditions)
    return Verdict.of("V16", list(conditions.values()), ours, reason, results.settings.parallel.seeds)


def figures(results: Results, folder: Path) -> dict[str, str]:
    """Time of a step by processes and draws, and its variance."""
    value = results.values.get("parallel/processes")
    if value is None or not results.among("parallel/variance/*"):
        return {}
    from matplotlib.figure import Figure

    settings = results.settings.parallel
    figure = Figure(figsize=(7.6, 2.5), layout="constrained")
    times = value["times"]
    for place, (kind, title) in enumerate((("data", "parallel data"), ("samples", "parallel samples"))):
        ax = figure.add_subplot(1, 3, place + 1)
        for colour, draws in zip(CATEGORIES, settings.draws, strict=False):
            there = [w for w in settings.ranks if f"{kind} {draws} {w}" in times]
            label = f"K = {draws}"
            ax.plot(
                there, [1e3 * times[f"{kind} {draws} {w}"] for w in there], "o-", ms=3, lw=1, color=colour, label=label
            )
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(settings.ranks, [str(w) for w in settings.ranks])
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")
        finish(
            ax,
            title=title,
            x="processes",
            y="ms of each process, per step" if place == 0 else "",
            legend="upper right" if place else False,
        )
    ax = figure.add_subplot(1, 3, 3)
    for colour, (kind, label) in zip(CATEGORIES, (("fixed", "one batch"), ("new", "new batches")), strict=False):
        drops = _drops(results, kind)
        ax.plot(list(drops), [1 / mean(v) for v in drops.values()], "o-", ms=3, lw=1, color=colour, label=label)
    ax.plot(settings.draws, [1 / k for k in settings.draws], color="0.6", lw=0.8, ls="--", label="1/K")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(settings.draws, [str(k) for k in settings.draws])
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")
    finish(ax, title="variance of a step", x="draws K", y="relative to one draw", legend=True)
    (folder / "parallel.svg").write_text(save_svg(figure), encoding="utf-8")
    return {
        "parallel.svg": "LeNet-5: processor time that each process needs for a step with K draws in all, and the variance of a step."
    }


if __name__ == "__main__":
    orders = json.loads(sys.argv[1])
    with process_group("cpu"):
        torch.save(_process(orders), Path(orders["folder"]) / f"{rank()}.pt")
