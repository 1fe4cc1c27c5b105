"""Eigenbases of Kronecker blocks: decomposed in float64, shared out over processes, with the damped eigenvalues in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aftermap.curvature.rules.base import Layout
from aftermap.distributed import shared_out
from aftermap.errors import InputError
from aftermap.linalg import psd_eigh

if TYPE_CHECKING:
    from aftermap.curvature.structures.kron import KronBlock

__all__ = ["DAMPINGS", "EigenBasis", "EigenTable", "KronEigen", "decompose", "eigenbases"]

DAMPINGS = ("exact", "factored", "pi")


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


@dataclass(frozen=True)
class EigenBasis:
    """Where a Kronecker block is diagonal: U_A [g, i, i] (None for the identity) and U_B [g, o, o] of a layout."""

    layout: Layout
    input_vectors: Tensor | None
    output_vectors: Tensor


def _matrices(block: KronBlock) -> list[tuple[Tensor, str]]:
    """What there is to decompose: B, and A where it is not diagonal, with names for messages."""
    found = [(block.outputs, f"the output factor of {block.name}")]
    return found + ([(block.inputs, f"the input factor of {block.name}")] if block.inputs.dim() == 3 else [])


def _costs(jobs: Iterable[tuple[Tensor, str]]) -> list[float]:
    return [float(m.shape[0] * m.shape[-1] ** 3) for m, _ in jobs]


def decompose(blocks: Sequence[KronBlock]) -> list[KronEigen]:
    """Eigendecompositions of Kronecker blocks; over several processes they are shared out by cost (width³)."""
    jobs = [job for block in blocks for job in _matrices(block)]
    if not jobs:
        return []
    like = torch.empty(0, dtype=torch.float64, device=jobs[0][0].device)
    done = shared_out(
        _costs(jobs),
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
            mean = input_values / block.row_counts()[:, None]
            result.append(KronEigen(mean, input_vectors, output_values, output_vectors))
        else:
            result.append(KronEigen(block.input_mean(), None, output_values, output_vectors))
    return result


def eigenbases(blocks: list[KronBlock], dtype: torch.dtype) -> list[EigenBasis]:
    """Eigenbases of Kronecker blocks, computed in float64 and kept in ``dtype``; shared out as in `decompose`.

    Args:
        blocks: the list is emptied: a factor is let go when its basis is there, so that never both exist of all layers.
        dtype: of the eigenvectors.
    """
    layouts = [(b.layout, b.inputs.dim() == 3) for b in blocks]
    jobs = dict(enumerate(job for b in blocks for job in _matrices(b)))
    del blocks[:]
    if not jobs:
        return []
    costs, shapes = _costs(jobs.values()), [[tuple(m.shape)] for m, _ in jobs.values()]
    like = torch.empty(0, dtype=dtype, device=jobs[0][0].device)

    def work(number: int) -> list[Tensor]:
        matrix, what = jobs.pop(number)
        return [psd_eigh(matrix, what=what)[1].to(dtype)]

    found = iter(each[0] for each in shared_out(costs, shapes, work, like))
    result = []
    for layout, dense in layouts:
        outer = next(found)
        result.append(EigenBasis(layout, next(found) if dense else None, outer))
    return result


@dataclass(frozen=True)
class EigenTable:
    """Curvature eigenvalues of a block: a full table E [g, o, i], or the outer product of μ [g, o] and λ [g, i].

    Attributes:
        n_data: N of eq. 9.
    """

    table: Tensor | None
    outputs: Tensor | None
    inputs: Tensor | None
    n_data: float

    def values(self) -> Tensor:
        """[g, o, i]."""
        if self.table is not None:
            return self.table
        if self.outputs is None or self.inputs is None:
            raise InputError("an eigenvalue table needs E, or both μ and λ")
        return self.outputs[:, :, None] * self.inputs[:, None, :]

    def exceed(self, least: Tensor) -> tuple[Tensor, Tensor]:
        """Where any eigenvalue of an output direction [g, o], and of an input direction [g, i], is above ``least``."""
        if self.table is None and self.outputs is not None and self.inputs is not None:
            outputs, inputs = self.outputs, self.inputs
            return outputs * inputs.amax(-1, keepdim=True) > least, inputs * outputs.amax(-1, keepdim=True) > least
        above = self.values() > least
        return above.any(-1), above.any(-2)

    def to(self, dtype: torch.dtype) -> EigenTable:
        """The same in another precision."""
        table, outputs, inputs = (None if t is None else t.to(dtype) for t in (self.table, self.outputs, self.inputs))
        return EigenTable(table, outputs, inputs, self.n_data)

    def precision(self, scale: Tensor, prior: Tensor, damping: str) -> Tensor:
        """Eigenvalues of the posterior precision [g, o, i]."""
        if damping == "exact":
            return scale * self.values() + prior
        if self.outputs is None or self.inputs is None:
            raise InputError(f"damping={damping!r} needs Kronecker factors; EKFAC has none: use damping='exact'")
        left = (scale / self.n_data).sqrt() * self.outputs
        right = (scale * self.n_data).sqrt() * self.inputs
        root = prior.sqrt()
        pi = torch.ones_like(left[:, :1])
        if damping == "pi":
            inner, outer = right.mean(1, keepdim=True), left.mean(1, keepdim=True)
            alive = (inner > 0) & (outer > 0)  # else the block is zero, and the prior stays as it is
            pi = torch.where(alive, inner / torch.where(alive, outer, 1.0), 1.0).sqrt()
            left, right = left * alive, right * alive
        return (left + root / pi)[:, :, None] * (right + root * pi)[:, None, :]  # eq. (9)
