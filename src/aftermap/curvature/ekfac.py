"""Eigenvalue-corrected Kronecker factors (EKFAC, George et al. 2018): the right scale in KFAC's eigenbasis.

With A = U_A diag(λ) U_Aᵀ and B = U_B diag(μ) U_Bᵀ the block becomes (U_B ⊗ U_A) diag(E) (U_B ⊗ U_A)ᵀ with

    E_ij = Σ_n Σ_v [(U_Bᵀ G_nv U_A)_ij]²,

the closest matrix in Frobenius norm among those diagonal in that basis; its trace is the trace of the exact block. Two
passes over the data: factors first, then E.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aftermap.curvature.accumulate import Accumulator
from aftermap.curvature.factors import Block
from aftermap.curvature.kron import KronBlock
from aftermap.curvature.layout import Layout
from aftermap.curvature.rows import DenseRows, OneHotRows, budget
from aftermap.curvature.step import VectorStep
from aftermap.distributed import shared_out
from aftermap.errors import InputError
from aftermap.linalg import psd_eigh

__all__ = ["EigenAccumulator", "EigenBlock", "KronEigen", "decompose"]


@dataclass(frozen=True)
class KronEigen:
    """Eigendecomposition of a Kronecker block, in float64.

    Attributes:
        input_values: λ [g, i] of A / rows; input_vectors: U_A [g, i, i], None where A is diagonal (U_A = I).
        output_values: μ [g, o] of B; output_vectors: U_B [g, o, o].
    """

    input_values: Tensor
    input_vectors: Tensor | None
    output_values: Tensor
    output_vectors: Tensor

    def values(self) -> Tensor:
        """Eigenvalues μ_i λ_j of the block: [g, o, i]."""
        return self.output_values[:, :, None] * self.input_values[:, None, :]


def decompose(blocks: Sequence[KronBlock]) -> list[KronEigen]:
    """Eigendecompositions of Kronecker blocks; over several processes they are shared out by cost (width³)."""
    jobs: list[tuple[Tensor, str]] = []
    for block in blocks:
        jobs.append((block.outputs, f"the output factor of {block.name}"))
        if block.inputs.dim() == 3:
            jobs.append((block.input_mean(), f"the input factor of {block.name}"))
    if not jobs:
        return []
    like = torch.empty(0, dtype=torch.float64, device=jobs[0][0].device)
    done = shared_out(
        [float(m.shape[0] * m.shape[-1] ** 3) for m, _ in jobs],
        [[tuple(m.shape[:-1]), tuple(m.shape)] for m, _ in jobs],
        lambda job: psd_eigh(jobs[job][0], what=jobs[job][1]),
        like,
    )
    found = iter(done)
    result = []
    for block in blocks:
        output_values, output_vectors = next(found)
        if block.inputs.dim() == 3:
            input_values, input_vectors = next(found)
            result.append(KronEigen(input_values, input_vectors, output_values, output_vectors))
        else:
            result.append(KronEigen(block.input_mean(), None, output_values, output_vectors))
    return result


@dataclass(frozen=True)
class EigenBlock(Block):
    """(U_B ⊗ U_A) diag(E) (U_B ⊗ U_A)ᵀ for each group; sums add up only in the same basis.

    Attributes:
        layout: how the parameters form [group, out, in].
        input_vectors: U_A [g, i, i], or None for the identity.
        output_vectors: U_B [g, o, o].
        values: E [g, o, i].
    """

    layout: Layout
    input_vectors: Tensor | None
    output_vectors: Tensor
    values: Tensor
    kind: str = "ekfac"

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.layout.shapes

    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> EigenBlock:
        return replace(self, values=tensors["values"])

    def scaled(self, factor: float) -> EigenBlock:
        return replace(self, values=self.values * factor)

    def __add__(self, other: Block) -> Block:
        if isinstance(other, EigenBlock) and self.shapes == other.shapes:
            same = torch.equal(self.output_vectors, other.output_vectors) and (
                self.input_vectors is None
                or (other.input_vectors is not None and torch.equal(self.input_vectors, other.input_vectors))
            )
            if not same:
                raise InputError(
                    f"the EKFAC blocks of {self.name} have different eigenbases and cannot be added; "
                    "fit on all data at once, or use structure='kron', whose factors add up"
                )
        return super().__add__(other)

    def to_dense(self) -> Tensor:
        layout, size = self.layout, self.layout.out * self.layout.in_
        outer = self.output_vectors.to(torch.float64)
        dense = torch.zeros(self.size, self.size, dtype=torch.float64, device=outer.device)
        for g in range(layout.groups):
            eye = torch.eye(layout.in_, dtype=torch.float64, device=outer.device)
            inner = eye if self.input_vectors is None else self.input_vectors[g].to(torch.float64)
            basis = torch.kron(outer[g].contiguous(), inner.contiguous())
            part = slice(g * size, (g + 1) * size)
            dense[part, part] = (basis * self.values[g].reshape(-1).to(torch.float64)) @ basis.T
        place = layout.positions()
        ordered = torch.empty_like(dense)
        ordered[place[:, None], place] = dense
        return ordered

    def diagonal(self) -> dict[str, Tensor]:
        outer = self.output_vectors.to(torch.float64).square()
        found = outer @ self.values.to(torch.float64)
        if self.input_vectors is not None:
            found = found @ self.input_vectors.to(torch.float64).square().transpose(-1, -2)
        return self.layout.split(found)


_ROTATED_NUMBERS = 1 << 19


class EigenAccumulator(Accumulator):
    """Sums E of one site in a fixed basis."""

    def __init__(self, site: int, layout: Layout, eigen: KronEigen, model_dtype: torch.dtype, dtype: torch.dtype):
        self.site, self.layout, self.eigen = site, layout, eigen
        self.needs = (site,)
        self.outer = eigen.output_vectors.to(model_dtype)
        self.inner = None if eigen.input_vectors is None else eigen.input_vectors.to(model_dtype)
        shape = (layout.groups, layout.out, layout.in_)
        self.sums = torch.zeros(shape, dtype=dtype, device=self.outer.device)

    def on_vectors(self, step: VectorStep) -> None:
        calls = step.grads[self.site]
        if not calls:
            return
        call, grads = calls[0]
        rows = call.rows
        if len(calls) == 1 and isinstance(rows, OneHotRows):  # U_A = I
            rows.add_outer_squared_(self.sums, torch.einsum("vbgto,gop->vbgtp", grads, self.outer))
            return
        if len(calls) == 1 and isinstance(rows, DenseRows) and rows.shared == 1 and self.inner is not None:
            turned = DenseRows(torch.einsum("bgti,gij->bgtj", rows.dense(), self.inner), ones=False)
            turned.add_outer_squared_(self.sums, torch.einsum("vbgto,gop->vbgtp", grads, self.outer))
            return
        # With sharing, rotate the per-example gradients: (U_Bᵀ G U_A)², few at a time: three tensors of their size exist.
        stride = budget(step.vectors * self.layout.size, _ROTATED_NUMBERS)
        for start in range(0, step.batch.size, stride):
            length = min(stride, step.batch.size - start)
            each = self.outer.transpose(-1, -2) @ step.outer(self.site, start, length)
            each = each if self.inner is None else each @ self.inner
            self.sums += each.square_().sum((0, 1))

    def results(self) -> list[Block]:
        return [EigenBlock(self.layout, self.eigen.input_vectors, self.eigen.output_vectors, self.sums)]
