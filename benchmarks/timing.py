"""How time and memory are measured.

Time: all functions in one process, one after another, round after round; the minimum of each. Interleaving shares
out the machine's slow phases, the minimum removes what other processes added.

Memory: each function in a fresh process, the largest resident set while it runs minus the resident set just before.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
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

__all__ = ["compare", "machine", "peak_memory", "source", "unit"]

ROOT = Path(__file__).resolve().parent.parent


def unit(model: nn.Module, batch: Batch) -> Callable[[], Any]:
    """u: one forward and backward pass with the gradients of all parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    x, y = batch
    return lambda: torch.autograd.grad(F.cross_entropy(model(x), y), parameters)


def compare(
    functions: Mapping[str, Callable[[], Any]], repeats: int, *, budget: float = math.inf, often: str | None = None
) -> dict[str, float]:
    """Minimum seconds of each function over interleaved repeats, after one call of each to warm up.

    Args:
        functions: by name.
        repeats: rounds; at least 1.
        budget: seconds that one function may use in total; a slow one sits out the later rounds, never the first.
        often: a function that runs again before each of the others: the unit that all are divided by must be as sure
            of a quiet moment as they are together.
    """
    best = dict.fromkeys(functions, math.inf)
    spent = dict.fromkeys(functions, 0.0)
    order = list(functions)
    if often is not None:
        order = [n for name in functions if name != often for n in (often, name)]
    for number in range(repeats + 1):
        for name in order:
            if number > 1 and spent[name] > budget and name != often:
                continue
            start = time.perf_counter()
            functions[name]()
            taken = time.perf_counter() - start
            spent[name] += taken
            if number > 0:
                best[name] = min(best[name], taken)
    return best


def peak_memory(model: str, method: str, *, threads: int | None = None, timeout: float = 300) -> dict[str, float]:
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
