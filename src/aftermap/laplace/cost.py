"""What a fit will cost before it is started: time from one measured pass, memory from the shapes.

One unit u is a forward and backward pass with parameter gradients on the first batch, measured. The curvatures cost multiples
of it that follow from the layers' shapes: with F the forward flops of the layers with weight matrices,

    Kronecker:  (1 + V + r_A/2 + V r_B/2)/3 u,   r_A = Σ N T D²/F,  r_B = Σ N T O²/F,  V back-propagated vectors,
    diagonal:   (1 + 2V)/3 u,        full: V/3 u plus P² per vector and datum,

plus 10 D³ float64 operations per eigendecomposition.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aftermap.batches import Batch, Unpack, iterate
from aftermap.curvature.passes.last_block import find_last_block
from aftermap.curvature.passes.plan import find_last_layer, find_layers
from aftermap.curvature.passes.record import record_calls
from aftermap.curvature.passes.vectors import resolve_kind
from aftermap.likelihoods import Likelihood
from aftermap.models import call_model, check_device, check_modes, only_require_grad
from aftermap.params import Selection, named_parameters, select

__all__ = ["Cost", "describe_costs", "estimate_costs"]

_EIGH_FLOPS = 5e9  # float64 operations per second in an eigendecomposition on one modest machine
_CANDIDATES = (("kron", "all"), ("ekfac", "all"), ("diagonal", "all"), ("full", "all"), ("kron", "last_layer"))


@dataclass(frozen=True)
class Cost:
    """An estimate.

    Attributes:
        structure: of the curvature.
        params: "all" or "last_layer".
        n_params: how many numbers are uncertain.
        seconds: for the fit and the decompositions.
        bytes: of the factors and the posterior, beside what training needs.
    """

    structure: str
    params: str
    n_params: int
    seconds: float
    bytes: float

    def __str__(self) -> str:
        where = "" if self.params == "all" else f" of the {self.params.replace('_', ' ')}"
        return f"{self.structure}{where}, {self.n_params:,} parameters: about {_time(self.seconds)} and {_memory(self.bytes)}"


def _time(seconds: float) -> str:
    if seconds < 1:
        return "1 s"
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _memory(size: float) -> str:
    return f"{max(1.0, size / 2**20):,.0f} MB" if size < 2**30 else f"{size / 2**30:,.1f} GB"


def describe_costs(chosen: Cost, costs: Sequence[Cost]) -> str:
    """One line: the choice and its alternatives."""
    others = "; ".join(
        f"{c.structure}{'' if c.params == 'all' else ' ' + c.params} {_time(c.seconds)} {_memory(c.bytes)}"
        for c in costs
        if c is not chosen
    )
    return f"{chosen} (alternatives: {others})"


def estimate_costs(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood,
    *,
    params: Selection = "all",
    unpack: Unpack | None = None,
) -> list[Cost]:
    """Costs of the structures that are worth considering, from one measured batch.

    Where the number of batches is unknown (no ``len``), time is for one batch.
    """
    check_modes(model)  # before the first forward pass, which would move BatchNorm's statistics
    device, dtype = check_device(model)
    batch = next(iter(iterate(data, device=device, dtype=dtype, unpack=unpack)))
    batches = len(data) if isinstance(data, Sized) else 1
    names = select(model, find_last_block(model, batch) if params == "last_block" else params)
    costs = []
    for structure, which in _CANDIDATES:
        if which == "last_layer" and params != "all":
            continue
        chosen = names if which == "all" else find_last_layer(model, batch)
        costs.append(_cost(model, batch, batches, likelihood, structure, which, chosen))
    return costs


def _unit(model: nn.Module, batch: Batch, names: Sequence[str]) -> float:
    """Seconds of one forward and backward pass."""
    own = named_parameters(model)
    best = math.inf
    with only_require_grad(model, names), torch.enable_grad():
        for _ in range(2):
            start = time.perf_counter()
            total = call_model(model, batch.inputs).sum()
            torch.autograd.grad(total, [own[n] for n in names], allow_unused=True)
            best = min(best, time.perf_counter() - start)
    return best


def _cost(
    model: nn.Module,
    batch: Batch,
    batches: int,
    likelihood: Likelihood,
    structure: str,
    which: str,
    names: Sequence[str],
) -> Cost:
    plan = find_layers(model, names)
    with only_require_grad(model, names), record_calls(plan) as calls:
        outputs = call_model(model, batch.inputs)
    exact = resolve_kind("auto", outputs) == "exact"
    vectors = likelihood.columns(outputs.shape[-1]) * math.prod(outputs.shape[1:-1]) if exact else 1
    forward = inner = outer = eigh = memory = 0.0
    for call in calls:
        layout = plan.layers[call.layer].layout
        rows = math.prod(call.out_shape) / max(1, layout.out)  # examples · positions · groups
        forward += rows * layout.in_ * layout.out
        inner += rows * layout.in_**2 / 2
        outer += rows * layout.out**2 / 2
    own = named_parameters(model)
    size = sum(own[n].numel() for n in names)
    for layer in plan.layers:
        layout = layer.layout
        wide = 0 if layer.rule.one_hot else layout.in_
        eigh += layout.groups * 10 * (wide**3 + layout.out**3)
        memory += layout.groups * 20 * (wide**2 + layout.out**2)
    forward = max(forward, 1.0)
    passes = {
        "kron": 1 + vectors + inner / forward + vectors * outer / forward,
        "ekfac": 2 + 3 * vectors + inner / forward + vectors * outer / forward,
        "diagonal": 1 + 2 * vectors,
        "full": 1 + 2 * vectors + vectors * batch.size * size**2 / forward,
    }[structure]
    unit = _unit(model, batch, names)
    extra = {"kron": eigh, "ekfac": eigh, "diagonal": 0.0, "full": 10.0 * size**3}[structure]
    held = {"kron": memory, "ekfac": memory + 16.0 * size, "diagonal": 16.0 * size, "full": 28.0 * size**2}[structure]
    return Cost(structure, which, size, batches * unit * passes / 3 + extra / _EIGH_FLOPS, held)
