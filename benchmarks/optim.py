"""`python -m benchmarks.optim`: one training step of each optimiser against Adam, interleaved in one process.

Peers: ivon-opt (if installed), and Adam with squared per-example gradients by torch.func.vmap, which is what VOGN costs
without layer rules.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from aftermap.optim import IVON, KFAC, OGN, VOGN, NoisyKFAC
from benchmarks.memory import resident
from benchmarks.models import Batch, make
from benchmarks.timing import compare, machine, source

__all__ = ["MODELS", "TARGETS", "measure", "memory", "peak", "run", "steps", "table", "thread_counts"]

RESULTS = Path(__file__).resolve().parent / "results"
N_DATA = 50_000
MODELS = ("mlp", "lenet", "wrn16_2")
TARGETS = {
    "vogn": {"mlp": 2.2, "lenet": 1.7, "wrn16_2": 1.7},
    "ivon": {"mlp": 2.0, "lenet": 1.1, "wrn16_2": 1.2},
}


def adam(model: nn.Module, batch: Batch) -> Callable[[], Any]:
    optimizer, (x, y) = torch.optim.Adam(model.parameters(), lr=1e-5), batch

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def ours(model: nn.Module, batch: Batch, build: Callable[..., Any], **options: Any) -> Callable[[], Any]:
    optimizer, (x, y) = build(model, n_data=N_DATA, **options), batch
    return lambda: optimizer.step(lambda: F.cross_entropy(model(x), y))


def vmap_squares(model: nn.Module, batch: Batch) -> Callable[[], Any]:
    """Adam's step, and Σ g² the general way."""
    step, (x, y) = adam(model, batch), batch

    def loss(params: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (a[None],)), b[None])

    def both() -> None:
        step()
        params = {n: p.detach() for n, p in model.named_parameters()}
        each = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
        for value in each.values():
            value.square_().sum(0)

    return both


def ivon_opt(model: nn.Module, batch: Batch) -> Callable[[], Any] | None:
    try:
        peer = import_module("ivon")
    except ImportError:
        return None
    optimizer, (x, y) = peer.IVON(model.parameters(), lr=1e-3, ess=N_DATA), batch

    def step() -> None:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def one(model: nn.Module, batch: Batch, method: str) -> Callable[[], Any]:
    """A training step of Adam, VOGN or IVON."""
    if method == "adam":
        return adam(model, batch)
    build = {"vogn": VOGN, "ivon": IVON}[method]
    return ours(model, batch, build, lr=1e-6, generator=torch.Generator().manual_seed(0))


def steps(name: str, *, slow: bool = True) -> dict[str, Callable[[], Any]]:
    """One training step of each, on copies of one network in evaluation mode (so that all do the same work)."""
    model, (batch,) = make(name)
    small = {"lr": 1e-6, "generator": torch.Generator().manual_seed(0)}
    found: dict[str, Callable[[], Any] | None] = {
        "adam": adam(copy.deepcopy(model), batch),
        "vogn": ours(copy.deepcopy(model), batch, VOGN, **small),
        "ivon": ours(copy.deepcopy(model), batch, IVON, **small),
        "ogn": ours(copy.deepcopy(model), batch, OGN, lr=1e-6),
        "ivon-opt": ivon_opt(copy.deepcopy(model), batch),
    }
    if slow:
        found["kfac"] = ours(copy.deepcopy(model), batch, KFAC, lr=1e-6, factor_every=5, inverse_every=50)
        found["noisy kfac"] = ours(copy.deepcopy(model), batch, NoisyKFAC, factor_every=5, inverse_every=50, **small)
        found["vmap squares"] = vmap_squares(copy.deepcopy(model), batch)
    return {n: f for n, f in found.items() if f is not None}


def measure(name: str, repeats: int, *, slow: bool = True) -> dict[str, Any]:
    """Seconds of each and ratios to Adam."""
    functions = steps(name, slow=slow)
    for _ in range(2):  # the first step verifies and initialises
        for function in functions.values():
            function()
    seconds = compare(functions, repeats, budget=60)
    return {"seconds": seconds, "ratio": {n: s / seconds["adam"] for n, s in seconds.items()}, "machine": machine()}


def peak(name: str, method: str) -> float:
    """Megabytes that a step needs on top of network, batch and the optimiser's state, in this (fresh) process."""
    model, (batch,) = make(name)
    step = one(model, batch, method)
    step()  # libraries, threads and kernels are loaded before the baseline is taken; the state is there
    model.zero_grad()  # the gradients that Adam leaves are its step's memory, not its state
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = resident("VmRSS")
    for _ in range(3):
        step()
    return resident("VmHWM") - before


def memory(name: str, methods: Sequence[str]) -> dict[str, float]:
    """`peak` of each method, each in a process of its own."""
    code = "import sys; from benchmarks.optim import peak; print(peak(sys.argv[1], sys.argv[2]))"
    # Freed memory goes back to the system at once, so that the resident set is what is in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    found = {}
    for method in methods:
        done = subprocess.run(
            [sys.executable, "-c", code, name, method], env=environment, capture_output=True, text=True, check=True
        )
        found[method] = float(done.stdout.strip().splitlines()[-1])
    return found


def table(name: str, found: dict[str, Any]) -> str:
    """One network's results for people."""
    threads = found["machine"]["threads"]
    lines = [f"{name}, {threads} thread{'s' * (threads > 1)}: Adam {1000 * found['seconds']['adam']:.1f} ms"]
    for method, ratio in found["ratio"].items():
        target = TARGETS.get(method, {}).get(name)
        note = "" if target is None else f"  (to reach: {target}x)"
        lines.append(f"  {method:14s} {ratio:6.2f}x{note}")
    return "\n".join(lines)


def run(models: Sequence[str], repeats: int, *, threads: Sequence[int], slow: bool, peaks: bool, output: Path) -> None:
    """Measures, prints and writes optim.json: network -> threads -> numbers; what was not asked for is kept."""
    path = output / "optim.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    code = source()
    for name in models:
        for count in threads:
            torch.set_num_threads(count)
            found = measure(name, repeats, slow=slow) | {"source": code}
            if peaks:
                found["memory"] = memory(name, ("adam", "vogn", "ivon"))
                print(f"{name} memory in MB: {found['memory']}")
            print(table(name, found), flush=True)
            results.setdefault(name, {})[str(count)] = found
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def thread_counts(asked: int | None) -> list[int]:
    """What was asked for; else one thread, and as many as PyTorch would take."""
    return [asked] if asked else sorted({1, torch.get_num_threads()})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optim", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--fast", action="store_true", help="without K-FAC and vmap")
    parser.add_argument("--memory", action="store_true", help="also the peak memory of a step")
    parser.add_argument("--threads", type=int, default=None, help="default: one, and as many as PyTorch would take")
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    run(
        asked.models.split(","),
        asked.repeats,
        threads=thread_counts(asked.threads),
        slow=not asked.fast,
        peaks=asked.memory,
        output=asked.output,
    )


if __name__ == "__main__":
    main()
