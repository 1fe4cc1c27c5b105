"""Eigenvalue-corrected Kronecker factors (EKFAC, George et al. 2018): the right scale in KFAC's eigenbasis.

With A = U_A diag(λ) U_Aᵀ and B = U_B diag(μ) U_Bᵀ the block becomes (U_B ⊗ U_A) diag(E) (U_B ⊗ U_A)ᵀ with

    E_ij = Σ_n Σ_v [(U_Bᵀ G_nv U_A)_ij]²,

This is the closest matrix in Frobenius norm among those diagonal in that basis; its trace is the trace of the exact
block. It takes two passes over the data: factors first, then E.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aftermap.curvature.passes.backward import Accumulator, LayerGradients
from aftermap.curvature.passes.record import LayerCall
from aftermap.curvature.passes.stream import CurvatureProblem, DataCounts
from aftermap.curvature.rules.base import InputRows, Layout, examples_per_chunk
from aftermap.curvature.rules.linear import DenseRows
from aftermap.curvature.structures.assign import layer_accumulators
from aftermap.curvature.structures.base import Block, Factors, Structure, register_structure
from aftermap.curvature.structures.diagonal import DiagonalBlock
from aftermap.curvature.structures.eigenbasis import Eigen, KroneckerEigenbasis
from aftermap.curvature.structures.full import FullBlock
from aftermap.curvature.structures.kron import (
    KronAccumulator,
    KronBlock,
    KronBlockPosterior,
    KroneckerEigenvalues,
    decompose_bases,
)
from aftermap.errors import InputError
from aftermap.linalg import RunningSum
from aftermap.prior import Prior

__all__ = ["EigenAccumulator", "EkfacBlock"]


@dataclass(frozen=True)
class EkfacBlock(Block):
    """The matrix (U_B ⊗ U_A) diag(E) (U_B ⊗ U_A)ᵀ for each group; sums add up only in the same basis.

    Attributes:
        layout: The way in which the parameters form [group, out, in].
        basis: The eigenbasis of U_A and U_B.
        values: The eigenvalues E [g, o, i].
    """

    layout: Layout
    basis: KroneckerEigenbasis
    values: Tensor
    kind: str = "ekfac"
    one_precision = True

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.layout.shapes

    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> EkfacBlock:
        return replace(self, values=tensors["values"])

    def scaled(self, factor: float) -> EkfacBlock:
        return replace(self, values=self.values * factor)

    def __add__(self, other: Block) -> Block:
        if isinstance(other, EkfacBlock) and self.shapes == other.shapes:
            mine, theirs = self.basis, other.basis
            if mine.inputs is None or theirs.inputs is None:
                same_inputs = mine.inputs is theirs.inputs
            else:
                same_inputs = torch.equal(mine.inputs, theirs.inputs)
            if not (same_inputs and torch.equal(mine.outputs, theirs.outputs)):
                raise InputError(
                    f"the EKFAC blocks of {self.name} have different eigenbases and cannot be added; "
                    "fit on all data at once, or use structure='kron', whose factors add up"
                )
        return super().__add__(other)

    def to_dense(self) -> Tensor:
        layout, size = self.layout, self.layout.out * self.layout.in_
        basis = self.basis.to(torch.float64)
        dense = torch.zeros(self.size, self.size, dtype=torch.float64, device=basis.outputs.device)
        for g in range(layout.groups):
            eye = torch.eye(layout.in_, dtype=torch.float64, device=dense.device)
            inputs = eye if basis.inputs is None else basis.inputs[g]
            vectors = torch.kron(basis.outputs[g].contiguous(), inputs.contiguous())
            part = slice(g * size, (g + 1) * size)
            dense[part, part] = (vectors * self.values[g].reshape(-1).to(torch.float64)) @ vectors.T
        place = layout.positions()
        ordered = torch.empty_like(dense)
        ordered[place[:, None], place] = dense
        return ordered

    def diagonal(self) -> dict[str, Tensor]:
        return self.layout.split(self.basis.diagonal(self.values.to(torch.float64)))

    def posterior(
        self, prior: Prior, scale: Tensor, eigen: Sequence[Eigen], *, damping: str, dtype: torch.dtype, n_data: float
    ) -> KronBlockPosterior:
        if damping != "exact":
            raise InputError(f"damping={damping!r} needs Kronecker factors; EKFAC has none: use damping='exact'")
        device = self.values.device
        return KronBlockPosterior(
            self,
            self.layout,
            self.basis.to(dtype),
            KroneckerEigenvalues(self.values.to(torch.float64), None, None, n_data),
            prior.scalar(tuple(self.shapes)).to(device),
            scale.to(device),
        )


_ROTATED_NUMBERS = 1 << 19


def _pieces(batch: int, numbers: int) -> Iterator[tuple[int, int]]:
    """Yields (start, length) of pieces of nearly equal size, whose examples of ``numbers`` each fit into the working memory."""
    count = math.ceil(batch / examples_per_chunk(numbers, _ROTATED_NUMBERS))
    length = math.ceil(batch / max(1, count))
    return ((start, min(length, batch - start)) for start in range(0, batch, max(1, length)))


def _rows(call: LayerCall) -> InputRows:
    """Returns the rows of a call, kept for the next vector except where windows are small and many: those are made anew."""
    fresh = call.fresh_rows()
    return call.rows if fresh.shared <= fresh.features else fresh


class EigenAccumulator(Accumulator):
    """The sum E of one layer in a fixed basis.

    Args:
        layer: The layer's number.
        layout: The way in which its parameters form [group, out, in].
        basis: The basis in which its Kronecker factors are diagonal.
        model_dtype: The dtype of the gradients that are rotated.
        dtype: The dtype of the sums.
    """

    def __init__(
        self, layer: int, layout: Layout, basis: KroneckerEigenbasis, model_dtype: torch.dtype, dtype: torch.dtype
    ):
        self.layer, self.layout, self.basis, self.layers = layer, layout, basis, (layer,)
        rotation = basis.to(model_dtype)
        self.outer, self.inner = rotation.outputs, rotation.inputs
        shape = (layout.groups, layout.out, layout.in_)
        self.sums = RunningSum([torch.zeros(shape, dtype=dtype, device=self.outer.device)])

    def add(self, gradients: LayerGradients) -> None:
        calls = gradients.by_layer[self.layer]
        if not calls:
            return
        pairs = [(_rows(call), grads) for call, grads in calls]
        rows, grads = pairs[0]
        if len(calls) == 1 and self.inner is None:  # U_A = I
            turned = torch.einsum("vbgto,gop->vbgtp", grads, self.outer)
            rows.add_squares_(self.sums.room_for(rows.batch)[0], turned)
            return
        # U_Bᵀ (Σ_t g aᵀ) U_A = Σ_t (U_Bᵀ g)(U_Aᵀ a)ᵀ: with few positions, turn both sides of the sum instead of its
        # result.
        if (
            len(calls) == 1
            and isinstance(rows, DenseRows)
            and self.inner is not None
            and rows.shared <= self.layout.out
        ):
            self._add_turned_rows(rows, self.inner, grads)
            return
        # Otherwise turn the per-example gradients, (U_Bᵀ G U_A)², few at a time, since three tensors of their size
        # exist.
        # With a matrix instead of a batch of one, the product is one product over all examples.
        inner = self.inner[0] if self.inner is not None and self.layout.groups == 1 else self.inner
        for start, length in _pieces(gradients.record.size, gradients.n_vectors * self.layout.size):
            parts = [r.examples(start, length).per_example_gradients(g[:, start : start + length]) for r, g in pairs]
            rotated = self.outer.transpose(-1, -2) @ sum(parts[1:], parts[0])
            del parts
            rotated = rotated if inner is None else rotated @ inner
            self.sums.room_for(1)[0].add_(rotated.square_().sum((0, 1)))

    def _add_turned_rows(self, rows: DenseRows, inner: Tensor, grads: Tensor) -> None:
        # Without sharing there is no tensor per example, so all go at once.
        numbers = 1 if rows.shared == 1 else len(grads) * self.layout.size
        for start, length in _pieces(rows.batch, numbers):
            some = torch.einsum("bgti,gij->bgtj", rows.examples(start, length).dense(), inner)
            turned = torch.einsum("vbgto,gop->vbgtp", grads[:, start : start + length], self.outer)
            DenseRows(some, ones=False).add_squares_(self.sums.room_for(length)[0], turned)

    def state(self) -> dict[str, Tensor]:
        return self.sums.state()

    def add_state(self, state: dict[str, Tensor]) -> None:
        self.sums.add_state(state)

    def blocks(self) -> list[Block]:
        return [EkfacBlock(self.layout, self.basis, self.sums.take())]


def fit_ekfac(problem: CurvatureProblem) -> tuple[tuple[Block, ...], DataCounts]:
    """Fits in two passes: Kronecker factors, of which only the bases are kept, then squared gradients in these bases."""
    accumulators = layer_accumulators(problem, KronAccumulator.of)
    layers = [a.layer for a in accumulators if isinstance(a, KronAccumulator)]
    blocks, counts = problem.run(accumulators, "ekfac: Kronecker factors")
    del accumulators
    rest = [None if isinstance(b, KronBlock) else b for b in blocks]
    # The bases are those of the factors of all processes, and the factors go as their bases come.
    krons = [b for b in _over_processes(blocks, problem) if isinstance(b, KronBlock)]
    layouts = [block.layout for block in krons]
    del blocks
    # Half precision has no eigendecomposition, and its rotations would lose what the bases are for.
    basis_dtype = torch.float32 if problem.model_dtype in (torch.float16, torch.bfloat16) else problem.model_dtype
    bases = decompose_bases(krons, basis_dtype, lambda make: problem.load_or_make("bases", make))
    second: list[Accumulator] = [
        EigenAccumulator(layer, layout, basis, problem.model_dtype, problem.sums_dtype)
        for layer, layout, basis in zip(layers, layouts, bases, strict=True)
    ]
    del bases
    corrected, _ = problem.run(second, "ekfac: eigenvalues")
    following = iter(corrected)
    return tuple(next(following) if b is None else b for b in rest), counts


def _over_processes(blocks: tuple[Block, ...], problem: CurvatureProblem) -> tuple[Block, ...]:
    """Returns the Kronecker factors among the blocks, summed over all processes."""
    krons = tuple(b for b in blocks if isinstance(b, KronBlock))
    return Factors("kron", krons, tuple(problem.names), 0.0, 0.0, "", {}).all_reduced().blocks


register_structure(
    Structure(
        "ekfac",
        "Kronecker eigenbases with the exact curvature along each eigenvector.",
        fit_ekfac,
        (EkfacBlock, FullBlock, DiagonalBlock),
        streams_sums=True,
        passes=2,
        updatable=False,  # Two fits have two eigenbases.
    )
)
