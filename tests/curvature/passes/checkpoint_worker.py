"""What the processes of test_checkpoint.py run, and the network and the data that they share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.curvature import fit_curvature
from aftermap.curvature.structures.base import Factors
from aftermap.distributed import rank, world_size

__all__ = ["STREAMING", "Broken", "examples", "fit", "fit_in_group", "network", "sums"]

STREAMING = ("kron", "ekfac", "kfra", "diagonal", "full")
BATCH = 4


class Broken(RuntimeError):
    """What a loader raises in the place of a kill."""


class Network(nn.Module):
    """A grouped convolution, a norm, a parameter without a rule (too large for a full block), and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 2, groups=2), nn.GroupNorm(2, 4)
        self.gain, self.head = nn.Parameter(torch.linspace(0.5, 1.5, 24).view(4, 2, 3)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((torch.tanh(self.norm(self.conv(x))) * self.gain).mean((2, 3)))


class Chain(nn.Module):
    """A network that KFRA can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(torch.flatten(x, 1))))


def network(structure: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return (Chain() if structure == "kfra" else Network()).to(dtype).eval()


def examples(count: int = 26, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 2, 3, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[5] = x[2]  # An example that comes twice counts twice.
    y = torch.arange(count) % 3
    y[5] = y[2]
    return x, y


class Batches:
    """Batches of some examples that end in an error, or a kill, after so many batches of all passes together."""

    def __init__(self, x: Tensor, y: Tensor, stop: int | None = None, kill: bool = False, size: int = BATCH):
        self.pairs = list(zip(x.split(size), y.split(size), strict=True))
        self.left, self.kill = stop, kill

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for pair in self.pairs:
            if self.left is not None:
                if self.left == 0:
                    if self.kill:
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise Broken("the loader broke")
                self.left -= 1
            yield pair


def fit(structure: str, batches: Any, checkpoint: Path | None, **options: Any) -> Factors:
    dtype = options.pop("dtype", torch.float32)
    settings = {"structure": structure, "small_block": 20, "every": 2, "progress": False, **options}
    return fit_curvature(
        options.pop("model", None) or network(structure, dtype),
        batches,
        "classification",
        checkpoint=checkpoint,
        **{k: v for k, v in settings.items() if k != "model"},
    )


def sums(factors: Factors) -> dict[str, Any]:
    """Everything that a fit found, as plain tensors and numbers."""
    tensors = {f"{k}.{n}": t for k, block in enumerate(factors.blocks) for n, t in block.tensors().items()}
    return {**tensors, "dense": factors.to_dense(), "n_data": factors.n_data, "loss": factors.loss}


def fit_in_group(folder: str, stops: dict[str, int | None]) -> dict[str, Any]:
    """For each structure a fit of every ``world``-th example; process 0 breaks after so many batches."""
    x, y = examples(dtype=torch.float64)
    part = slice(rank(), None, world_size())
    told: dict[str, Any] = {}
    for structure, stop in stops.items():
        batches = Batches(x[part], y[part], stop if rank() == 0 else None, size=2)
        try:
            told[structure] = sums(fit(structure, batches, Path(folder) / structure, every=1, dtype=torch.float64))
        except Exception as error:
            told[structure] = f"{type(error).__name__}: {error}"
    return told


if __name__ == "__main__":
    torch.set_num_threads(1)
    fit(sys.argv[1], Batches(*examples(), stop=int(sys.argv[3]), kill=True), Path(sys.argv[2]))
