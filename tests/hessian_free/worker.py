"""What each of two processes does: the same data, functionals shared out."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from aftermap.errors import DataError
from aftermap.hessian_free import HessianFree
from tests.hessian_free.problems import PRIOR, curve
from tests.laplace.problems import generator

__all__ = ["results", "run"]


def results() -> dict[str, torch.Tensor]:
    problem = curve()
    hf = HessianFree(problem.model, problem.likelihood, prior_precision=PRIOR, queries=1).fit(problem.data)
    joint = hf.joint(problem.asked)[1]
    assert hf.report is not None
    steps = torch.tensor([r.step for r in hf.report.functionals])
    probes = hf.probe_variances(problem.asked, 3, generator(1)).variance
    return {"joint": joint, "steps": steps, "probes": probes}


def run(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = results()
    problem = curve()
    try:
        HessianFree(problem.model, problem.likelihood, prior_precision=PRIOR).fit([problem.data[rank]], force=True)
    except DataError as error:
        found["refused"] = torch.tensor("different data" in str(error))
    torch.save(found, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()  # neither leaves while the other still speaks
    dist.destroy_process_group()
