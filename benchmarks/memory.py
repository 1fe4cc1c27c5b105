"""`python -m benchmarks.memory model method`: the peak memory of one method, as a line of JSON."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.methods import METHODS, Skip
from benchmarks.models import Batch, make
from benchmarks.timing import unit

__all__ = ["main"]


def resident(field: str) -> float:
    """VmRSS (now) or VmHWM (the largest so far) of this process in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory is measured on Linux only")


def _training(model: nn.Module, batch: Batch) -> Callable[[], object]:
    """Two steps of Adam: in the second its state is there beside activations and gradients, as in all later ones."""

    def step() -> torch.optim.Optimizer:
        optimiser = torch.optim.Adam(model.parameters())
        for _ in range(2):
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return optimiser

    return step


def main(model_name: str, method: str) -> dict[str, float]:
    """Measures one call of a method on one batch.

    getrusage's ru_maxrss is not used: a new process inherits the peak of the one that started it.
    """
    warnings.simplefilter("ignore")
    model, batches = make(model_name)
    tiny = [(x[:2], y[:2]) for x, y in batches]
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers(), *batches[0])) / 2**20
    if method in ("u", "training"):
        step = unit if method == "u" else _training
        step(model, tiny[0])()
        function = step(model, batches[0])
    else:
        # Two examples first: libraries, threads and kernels are loaded before the baseline is taken.
        METHODS[method].make(model, tiny)()
        function = METHODS[method].make(model, batches)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the warm-up left in the heap would hide what the method needs
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = resident("VmRSS")
    kept = function()
    extra = max(0.0, resident("VmHWM") - before)
    del kept
    return {"extra": round(extra, 1), "held": round(held, 1)}


if __name__ == "__main__":
    try:
        print(json.dumps(main(*sys.argv[1:3])))
    except Skip as reason:
        sys.exit(str(reason))
