"""What the processes of test_wrapped.py run: networks inside wrappers, and more processes than data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import aftermap as am
from aftermap.distributed import rank, world_size

__all__ = ["data", "everything", "network"]

STRUCTURES = ("kron", "ekfac", "diagonal", "full", "low_rank", "subset", "matrix_free")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64), torch.arange(3)


def _prediction(la: Any) -> torch.Tensor:
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    return la.predict(x, link="probit").latent_cov


def fit_all(batches: list[Any], model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for structure in STRUCTURES:
        la = am.Laplace(model, "classification", structure=structure, rank=12, subset_size=3)
        la.fit(batches, generator=torch.Generator().manual_seed(0), progress=False)
        found[structure] = _prediction(la).detach()
        if structure in ("kron", "diagonal", "full"):
            la.tune(method="evidence")
            found[f"{structure} tuned"] = _prediction(la).detach()
    for name in ("last_layer", "last_block"):
        la = am.Laplace(model, "classification", params=name).fit(batches, progress=False)
        found[name] = _prediction(la).detach()
    return found


def everything() -> dict[str, Any]:
    x, y = data()
    mine = slice(rank(), None, world_size())  # With four processes the last one has nothing.
    batches = [(x[mine], y[mine])] if len(y[mine]) else []
    found: dict[str, Any] = {"plain": fit_all(batches, network())}
    if world_size() > len(y):
        try:
            am.Laplace(network(), "classification").fit(batches, progress=False).tune()
        except am.errors.DataError as error:
            found["tune"] = str(error)
    wrapped = DistributedDataParallel(network())
    found["ddp"] = _prediction(am.Laplace(wrapped, "classification").fit(batches, progress=False)).detach()
    sharded = fully_shard(network())
    for name, make in {
        "laplace": lambda: am.Laplace(sharded, "classification"),
        "curvature": lambda: am.curvature.fit_curvature(sharded, batches, "classification"),
        "vogn": lambda: am.optim.VOGN(sharded, n_data=3),
    }.items():
        try:
            make()
            found[f"fsdp {name}"] = "no error"
        except am.errors.UnsupportedError as error:
            found[f"fsdp {name}"] = str(error)
    return found
