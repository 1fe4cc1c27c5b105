"""What the spawned processes of test_distributed.py run: a module that they can import by name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aftermap.curvature import fit_curvature
from aftermap.metrics.streaming import StreamingAccuracy, StreamingBrier, StreamingECE, StreamingNLL
from tests.curvature.layer_cases import normal

__all__ = ["STRUCTURES", "data", "fit_all", "network", "run"]

STRUCTURES = ("kron", "ekfac", "diagonal", "full", "low_rank", "subset", "hessian")
SHARDS = ((0, 5), (5, 7))


class Network(nn.Module):
    """A grouped convolution, a norm, a parameter without a rule, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 2, groups=2), nn.GroupNorm(2, 4)
        self.gain, self.head = nn.Parameter(torch.linspace(0.5, 1.5, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.conv(x))).mean((2, 3)) * self.gain)


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Network().to(dtype)


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return normal(7, 2, 3, 4).to(dtype), torch.arange(7) % 3


def fit_all(batches: list[Any], dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    found = {}
    for structure in STRUCTURES:
        factors = fit_curvature(
            network(dtype), batches, "classification", structure=structure, curvature="exact", progress=False,
            subset_size=4, generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        found[structure] = {
            "dense": factors.to_dense(), "n_data": factors.n_data, "loss": factors.loss,
            "n_outputs": factors.n_outputs, "curvature": factors.curvature,
        }  # fmt: skip
    return found


def run(rank: int, port: int, folder: str) -> None:
    """Does every job in a group of two and writes what came of them."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="the Hessian is indefinite")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.save({name: job(rank) for name, job in JOBS.items()}, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()  # neither leaves while the other still speaks
    dist.destroy_process_group()


def _fit(dtype: torch.dtype) -> Callable[[int], Any]:
    def job(rank: int) -> Any:
        x, y = data(dtype)
        start, stop = SHARDS[rank]
        batches = [(x[start : start + 2], y[start : start + 2]), (x[start + 2 : stop], y[start + 2 : stop])]
        return fit_all([b for b in batches if len(b[1])], dtype)

    return job


def _message(make: Callable[[int], list[Any]], structures: tuple[str, ...] = STRUCTURES) -> Callable[[int], Any]:
    def job(rank: int) -> dict[str, str]:
        told = {}
        for structure in structures:
            try:
                fit_curvature(network(torch.float64), make(rank), "classification", structure=structure, progress=False)
            except Exception as error:
                told[structure] = f"{type(error).__name__}: {error}"
        return told

    return job


def _all_on_one(rank: int) -> Any:
    """All data are on process 1, so that process 0 has to plan with what it borrows; a batch without examples is no data either."""
    x, y = data(torch.float64)
    return fit_all([(x[:3], y[:3]), (x[3:], y[3:])] if rank == 1 else [(x[:0], y[:0])], torch.float64)


def _no_data(rank: int) -> list[Any]:
    return []


def _bad_later(rank: int) -> list[Any]:
    x, y = data(torch.float64)
    second = x.clone()
    second[1, 0, 0, 0] = torch.nan if rank == 1 else 0.0
    return [(x, y), (second, y)]


class Switching(nn.Module):
    """Uses its first layer as a bare tensor where the inputs are negative: only one process sees that."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) if bool((x > 0).all()) else nn.functional.linear(x, self.a.weight, self.a.bias)
        return self.out(torch.tanh(h))


def switching() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = normal(6, 3).abs()
    x[3:] *= -1
    return Switching().double(), x, torch.arange(6) % 2


def _disagree(rank: int) -> Any:
    model, x, y = switching()
    part = slice(0, 3) if rank == 0 else slice(3, 6)
    factors = fit_curvature(model, [(x[part], y[part])], "classification", structure="full", progress=False)
    return {"dense": factors.to_dense(), "notes": {n: t.note for n, t in factors.treatment.items()}}


def scores() -> tuple[Tensor, Tensor]:
    """Probabilities [7, 3] and labels."""
    return torch.softmax(2 * normal(7, 3), -1), torch.tensor([0, 2, 1, 1, 0, 2, 2])


def _metrics(rank: int) -> Any:
    """The first process sees two examples, the second five; of a third metric, only the second sees anything."""
    probs, labels = scores()
    part = slice(0, 2) if rank == 0 else slice(2, 7)
    found = {}
    for kind in (StreamingNLL, StreamingECE, StreamingAccuracy):
        found[kind.__name__] = kind().update(probs[part], labels[part]).all_reduced().result()
    alone = StreamingBrier()
    if rank == 1:
        alone.update(probs, labels)
    found["StreamingBrier"] = alone.all_reduced().result()
    return found


JOBS: dict[str, Callable[[int], Any]] = {
    "float32": _fit(torch.float32),
    "float64": _fit(torch.float64),
    "all_on_one": _all_on_one,
    "no_data": _message(_no_data),
    "bad_later": _message(_bad_later),
    "disagree": _disagree,
    "metrics": _metrics,
}
