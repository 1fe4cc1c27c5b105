"""What is measured: a quantity, the library that computes it, and how it is called.

Every method is a function of (network, list of batches) that returns a function without arguments: one fit over the
batches, from the network to summed factors, without any decomposition (EKFAC apart, which needs its eigenbases).
Peers work on a copy of the network, since some leave hooks on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.curvature import fit_curvature
from benchmarks.models import Batch

__all__ = ["METHODS", "QUANTITIES", "Method", "Skip"]

QUANTITIES = {
    "kron_exact": "Kronecker factors, exact",
    "kron_random": "Kronecker factors, one random vector",
    "diagonal_exact": "diagonal of the GGN, exact",
    "diagonal_random": "diagonal of the GGN, one random vector",
    "squared_gradients": "sum of squared gradients",
    "ekfac": "EKFAC, exact (with eigenbases)",
}

Fit = Callable[[], Any]


class Skip(Exception):
    """This method cannot run on this network; the message says why."""


@dataclass(frozen=True)
class Method:
    """A way to compute a quantity.

    Attributes:
        quantity: a key of `QUANTITIES`.
        library: whose.
        make: (network, batches) -> one fit.
        examples: None, or how many examples it is timed on (its cost is then scaled up): for very slow ones.
        note: what a reader should know about the number.
    """

    quantity: str
    library: str
    make: Callable[[nn.Module, Sequence[Batch]], Fit]
    examples: int | None = None
    note: str = ""


class Loader(list[Batch]):
    """Batches with the `dataset` that laplace-torch asks for its length; no collation is timed."""

    @property
    def dataset(self) -> range:
        return range(sum(len(y) for _, y in self))


def _ours(**options: Any) -> Callable[[nn.Module, Sequence[Batch]], Fit]:
    def make(model: nn.Module, batches: Sequence[Batch]) -> Fit:
        generator = torch.Generator().manual_seed(0)
        return lambda: fit_curvature(model, batches, "classification", generator=generator, progress=False, **options)

    return make


def _laplace(kind: str, backend: str, stochastic: bool) -> Callable[[nn.Module, Sequence[Batch]], Fit]:
    """laplace-torch's fit up to the summed factors: KronLaplace would decompose them at the end of each fit."""

    def make(model: nn.Module, batches: Sequence[Batch]) -> Fit:
        import laplace
        from laplace import curvature

        model = deepcopy(model)
        made = getattr(laplace, kind)(
            model,
            "classification",
            backend=getattr(curvature, backend),
            backend_kwargs={"stochastic": stochastic} if backend.endswith("GGN") else {},
        )

        def fit() -> Any:
            laplace.ParametricLaplace.fit(made, Loader(batches))
            return made.H

        return fit

    return make


def _jacobian_diagonal(model: nn.Module, batches: Sequence[Batch]) -> Fit:
    """laplace-torch's default diagonal: it forms J [batch, C, P].

    Batches of 4 were its fastest per example among 2, 4, 8, 14 and 28; whole ones would take 19 GB for the MLP.
    """
    small = [pair for x, y in batches for pair in zip(x.split(4), y.split(4), strict=True)]
    return _laplace("DiagLaplace", "CurvlinopsGGN", False)(model, small)


def _supported(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that curvlinops has a rule for: those of Linear and Conv2d."""
    if any(isinstance(m, nn.MultiheadAttention) for m in model.modules()):
        raise Skip("curvlinops has no rule for MultiheadAttention, LayerNorm and Embedding")
    return [p for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d) for p in m.parameters()]


def _curvlinops(operator: str, fisher: str) -> Callable[[nn.Module, Sequence[Batch]], Fit]:
    def make(model: nn.Module, batches: Sequence[Batch]) -> Fit:
        import curvlinops

        model = deepcopy(model)
        parameters = _supported(model)
        count = sum(len(y) for _, y in batches)

        def fit() -> Any:
            made = getattr(curvlinops, operator)(
                model,
                nn.CrossEntropyLoss(reduction="sum"),
                parameters,
                list(batches),
                check_deterministic=False,
                fisher_type=fisher,
                num_per_example_loss_terms=1,
                num_data=count,
                separate_weight_and_bias=False,
            )
            made.compute_kronecker_factors()
            if operator == "EKFACLinearOperator":
                made.compute_eigenvalue_correction()
            return made

        return fit

    return make


def _backpack(extension: str, field: str) -> Callable[[nn.Module, Sequence[Batch]], Fit]:
    def make(model: nn.Module, batches: Sequence[Batch]) -> Fit:
        import backpack
        from backpack import extensions

        plain = isinstance(model, nn.Sequential) and not any(type(m).__name__ == "Block" for m in model)
        try:
            # Residual networks go through BackPACK's converter, which turns the sums into modules.
            extended = backpack.extend(deepcopy(model), use_converter=not plain).eval()
        except Exception as reason:
            raise Skip(f"BackPACK cannot convert the network: {type(reason).__name__}: {reason}") from reason
        loss = backpack.extend(nn.CrossEntropyLoss(reduction="sum"))
        parameters = [p for p in extended.parameters() if p.requires_grad]

        def read(parameter: nn.Parameter) -> list[Tensor]:
            found = getattr(parameter, field)
            delattr(parameter, field)
            if field == "grad_batch":
                found = found.square().sum(0)
            return found if isinstance(found, list) else [found]

        def fit() -> Any:
            sums: list[list[Tensor]] = []
            for x, y in batches:
                extended.zero_grad()
                with backpack.backpack(getattr(extensions, extension)()):
                    loss(extended(x), y).backward()
                found = [read(p) for p in parameters]
                sums = (
                    found
                    if not sums
                    else [[a + b for a, b in zip(s, f, strict=True)] for s, f in zip(sums, found, strict=True)]
                )
            return sums

        return fit

    return make


MIXED = "convolutions: sums gradients over positions first, another and cheaper approximation"
ONLY = "Linear and Conv2d only: norm layers are left out"

METHODS: dict[str, Method] = {
    "aftermap kron": Method("kron_exact", "aftermap", _ours(structure="kron", curvature="exact")),
    "laplace-torch kron curvlinops": Method(
        "kron_exact", "laplace-torch", _laplace("KronLaplace", "CurvlinopsGGN", False)
    ),
    "laplace-torch kron backpack": Method(
        "kron_exact", "laplace-torch", _laplace("KronLaplace", "BackPackGGN", False), note=MIXED
    ),
    "curvlinops kfac": Method("kron_exact", "curvlinops", _curvlinops("KFACLinearOperator", "type-2"), note=ONLY),
    "backpack kflr": Method("kron_exact", "BackPACK", _backpack("KFLR", "kflr"), note=MIXED),
    "aftermap kron rademacher": Method("kron_random", "aftermap", _ours(structure="kron", curvature="rademacher")),
    "laplace-torch kron mc": Method("kron_random", "laplace-torch", _laplace("KronLaplace", "CurvlinopsGGN", True)),
    "curvlinops kfac mc": Method("kron_random", "curvlinops", _curvlinops("KFACLinearOperator", "mc"), note=ONLY),
    "backpack kfac": Method("kron_random", "BackPACK", _backpack("KFAC", "kfac"), note=MIXED),
    "aftermap diagonal": Method("diagonal_exact", "aftermap", _ours(structure="diagonal", curvature="exact")),
    "laplace-torch diagonal": Method(
        "diagonal_exact", "laplace-torch", _jacobian_diagonal, 16, "scaled up from 16 examples in batches of 4"
    ),
    "laplace-torch diagonal backpack": Method(
        "diagonal_exact", "laplace-torch", _laplace("DiagLaplace", "BackPackGGN", False)
    ),
    "backpack diag_ggn": Method("diagonal_exact", "BackPACK", _backpack("DiagGGNExact", "diag_ggn_exact")),
    "aftermap diagonal rademacher": Method(
        "diagonal_random", "aftermap", _ours(structure="diagonal", curvature="rademacher")
    ),
    "backpack diag_ggn_mc": Method("diagonal_random", "BackPACK", _backpack("DiagGGNMC", "diag_ggn_mc")),
    "aftermap squared gradients": Method(
        "squared_gradients", "aftermap", _ours(structure="diagonal", curvature="empirical")
    ),
    "laplace-torch diagonal ef backpack": Method(
        "squared_gradients", "laplace-torch", _laplace("DiagLaplace", "BackPackEF", False)
    ),
    "backpack sum_grad_squared": Method(
        "squared_gradients", "BackPACK", _backpack("SumGradSquared", "sum_grad_squared")
    ),
    "backpack grad_batch": Method("squared_gradients", "BackPACK", _backpack("BatchGrad", "grad_batch")),
    "aftermap ekfac": Method("ekfac", "aftermap", _ours(structure="ekfac", curvature="exact")),
    "curvlinops ekfac": Method("ekfac", "curvlinops", _curvlinops("EKFACLinearOperator", "type-2"), note=ONLY),
}
