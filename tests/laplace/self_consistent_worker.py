"""What each of two processes does with its part of the data, for tuning without held-out labels."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aftermap.errors import DataError
from aftermap.laplace import Laplace, SelfConsistentResult
from tests.laplace.problems import Data, classes, mlp, trained

__all__ = ["results", "run"]

COUNT = 150


def results(data: Data) -> dict[str, Tensor]:
    """What tuning gives for the full matrix, in which no draw of a process's own enters, and for Kronecker factors."""
    model = trained(mlp(), classes(COUNT), nn.CrossEntropyLoss(reduction="sum"), decay=0.1, steps=60)
    found = {}
    for structure in ("full", "kron"):
        la = Laplace(model, "classification", structure=structure).fit(data, progress=False)
        result = la.tune(method="self_consistent").tuning
        assert isinstance(result, SelfConsistentResult)
        check = result.check
        numbers = [result.curvature, result.output_temperature, check.difference, check.standard_error, check.invalid]
        found[structure] = torch.tensor([*numbers, check.n_data, la.data_scale], dtype=torch.float64)
        found[f"{structure} posterior"] = la.posterior.to_dense()
    return found


def message_of_bad_data(rank: int) -> str:
    """What a process is told when the labels of the other one are wrong."""
    model = trained(mlp(), classes(COUNT), nn.CrossEntropyLoss(reduction="sum"), decay=0.1, steps=60)
    la = Laplace(model, "classification", structure="full").fit([classes(COUNT)[rank]], progress=False)
    x, y = classes(COUNT)[rank]
    if rank:
        y = y + 100  # no class has these numbers
    try:
        la.tune([(x, y)], method="self_consistent")
    except DataError as error:
        return str(error)
    return ""


def run(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = results([classes(COUNT)[rank]])
    message = message_of_bad_data(rank).encode()
    found["message"] = torch.tensor(list(message), dtype=torch.uint8)
    torch.save(found, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()  # neither leaves while the other still speaks
    dist.destroy_process_group()
