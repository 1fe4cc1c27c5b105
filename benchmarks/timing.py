"""How time and memory are measured.

Time: all functions in one process, one after another, round after round; of ratios the median and the minimum over rounds,
each against its neighbours in time, of seconds the minimum.

Memory: each function in a fresh process, the largest resident set while it runs minus the resident set just before.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models import Batch

__all__ = ["compare", "least_processor_times", "machine", "peak_memory", "ratios", "source", "unit"]

ROOT = Path(__file__).resolve().parent.parent


def unit(model: nn.Module, batch: Batch) -> Callable[[], Any]:
    """u: one forward and backward pass with the gradients of all parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    x, y = batch
    return lambda: torch.autograd.grad(F.cross_entropy(model(x), y), parameters)


def _seconds(function: Callable[[], Any]) -> float:
    """Of one call, without Python's garbage collector (as `timeit`): the peers' libraries alone hold a million objects,
    and whoever happens to set off a collection would pay for them."""
    gc.disable()
    try:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    finally:
        gc.enable()


def compare(functions: Mapping[str, Callable[[], Any]], repeats: int, *, budget: float = math.inf) -> dict[str, float]:
    """Minimum seconds of each function over interleaved repeats, after one call of each to warm up.

    Args:
        functions: by name.
        repeats: rounds; at least 1.
        budget: seconds that one function may use in total; a slow one sits out the later rounds, never the first.
    """
    best = dict.fromkeys(functions, math.inf)
    spent = dict.fromkeys(functions, 0.0)
    for number in range(repeats + 1):
        for name, function in functions.items():
            if number > 1 and spent[name] > budget:
                continue
            taken = _seconds(function)
            spent[name] += taken
            if number > 0:
                best[name] = min(best[name], taken)
    return best


def least_processor_times(functions: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The least processor seconds of each function over interleaved repeats, after one call of each to warm up."""
    best = dict.fromkeys(functions, math.inf)
    for _ in range(repeats + 1):
        for name, function in functions.items():
            start = time.process_time()
            function()
            best[name] = min(best[name], time.process_time() - start)
    return best


def ratios(
    functions: Mapping[str, Callable[[], Any]], unit: Callable[[], Any], repeats: int, *, budget: float = math.inf
) -> tuple[dict[str, tuple[float, float]], float]:
    """How many units each function takes: median and minimum over rounds of its time against the units before and after it.

    A machine that is shared has slow phases, longer than a run. Neighbours share them; minima of a long run and of a short
    one do not, as the short one finds a quiet moment sooner.

    Args:
        functions: by name.
        unit: what they are measured in.
        repeats: rounds; at least 1.
        budget: seconds that one function may use in total; a slow one sits out the later rounds, never the first.

    Returns:
        name -> (median, minimum), and the least seconds of the unit.
    """
    found: dict[str, list[float]] = {name: [] for name in functions}
    spent = dict.fromkeys(functions, 0.0)
    for function in (unit, *functions.values()):
        function()
    before = best = _seconds(unit)
    for number in range(repeats):
        for name, function in functions.items():
            if number > 0 and spent[name] > budget:
                continue
            taken, after = _seconds(function), _seconds(unit)
            found[name].append(2 * taken / (before + after))
            spent[name] += taken
            before, best = after, min(best, after)
    return {name: (statistics.median(each), min(each)) for name, each in found.items()}, best


def peak_memory(model: str, method: str, *, threads: int | None = None, timeout: float = 300) -> dict[str, Any]:
    """Megabytes that a method needs on top of the network and the batch, in a fresh process.

    Returns:
        "extra" and "held" (network and batch) in MB, or "error" with the reason.
    """
    command = [sys.executable, "-m", "benchmarks.memory", model, method]
    # Freed memory goes back to the system at once, so that the resident set is what is in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"more than {timeout:g} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1][:200] if lines else f"ended with code {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def source() -> str:
    """A short hash of the library's source: which code the numbers belong to."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src" / "aftermap").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def machine() -> dict[str, Any]:
    """Facts that a reader needs to judge the numbers."""
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "load": round(os.getloadavg()[0], 1),
    }
