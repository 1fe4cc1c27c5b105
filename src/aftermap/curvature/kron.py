"""Kronecker-factored curvature (KFAC): one pair of factors per layer and group.

For the sum loss and row-major vec(W) the block of a layer is approximated by

    Σ_n Σ_v vec(G_nv) vec(G_nv)ᵀ ≈ B ⊗ A / rows,   A = Σ a aᵀ,   B = Σ g gᵀ

with the sums over data and shared positions (expand, Grosse & Martens 2016; Ritter et al. 2018, eq. 1 and 14), or over
data after summing each example's positions (reduce, Eschenhagen et al. 2023). ``rows`` is the number of rows in A: the
block is an expectation over rows of one factor times the sum of the other. Exact for one datum without sharing, for deep
linear networks with squared loss, and (reduce) for linear convolutions with mean pooling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aftermap.curvature.accumulate import Accumulator
from aftermap.curvature.factors import Block
from aftermap.curvature.gram_sum import GramSum
from aftermap.curvature.layout import Layout
from aftermap.curvature.rows import MatrixRows, budget
from aftermap.curvature.step import BatchStep, VectorStep
from aftermap.errors import InputError
from aftermap.linalg import TERMS_PER_PART, kron

__all__ = ["APPROACHES", "KronAccumulator", "KronBlock", "add_grad_gram_"]

APPROACHES = ("expand", "reduce")


@dataclass(frozen=True)
class KronBlock(Block):
    """B ⊗ A / rows for each group.

    Attributes:
        layout: how the parameters form [group, out, in].
        inputs: A [g, i, i], or its diagonal [g, i] (embeddings).
        outputs: B [g, o, o].
        rows: [g], float64.
        kind: kron or kfra.
        approach: expand or reduce: what the sums are sums of.
    """

    layout: Layout
    inputs: Tensor
    outputs: Tensor
    rows: Tensor
    kind: str = "kron"
    approach: str = "expand"

    def __add__(self, other: Block) -> Block:
        if isinstance(other, KronBlock) and other.approach != self.approach:
            raise InputError(
                f"Kronecker factors of {self.name} made with approach={self.approach!r} and with {other.approach!r} are sums "
                "of different things and cannot be added; fit both with the same approach"
            )
        return super().__add__(other)

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.layout.shapes

    def tensors(self) -> dict[str, Tensor]:
        return {"inputs": self.inputs, "outputs": self.outputs, "rows": self.rows}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> KronBlock:
        return replace(self, inputs=tensors["inputs"], outputs=tensors["outputs"], rows=tensors["rows"])

    def scaled(self, factor: float) -> KronBlock:
        # Counting every datum c times multiplies both sums and the rows.
        return replace(self, inputs=self.inputs * factor, outputs=self.outputs * factor, rows=self.rows * factor)

    def input_mean(self) -> Tensor:
        """A / rows in float64: [g, i, i] or [g, i]."""
        return self.inputs.to(torch.float64) / self.row_counts().reshape(-1, *[1] * (self.inputs.dim() - 1))

    def row_counts(self) -> Tensor:
        """What A is divided by: [g], float64; 1 for a layer that was never called, whose A is 0."""
        return torch.where(self.rows > 0, self.rows, 1.0)

    def to_dense(self) -> Tensor:
        mean, size = self.input_mean(), self.layout.out * self.layout.in_
        dense = torch.zeros(self.size, self.size, dtype=torch.float64, device=mean.device)
        for g in range(self.layout.groups):
            side = torch.diag(mean[g]) if mean.dim() == 2 else mean[g]
            part = slice(g * size, (g + 1) * size)
            dense[part, part] = kron(self.outputs[g].to(torch.float64), side)
        place = self.layout.positions()
        ordered = torch.empty_like(dense)
        ordered[place[:, None], place] = dense
        return ordered

    def diagonal(self) -> dict[str, Tensor]:
        mean = self.input_mean()
        inner = mean if mean.dim() == 2 else mean.diagonal(dim1=-2, dim2=-1)
        outer = self.outputs.to(torch.float64).diagonal(dim1=-2, dim2=-1)
        return self.layout.split(outer[:, :, None] * inner[:, None, :])


def add_grad_gram_(out: GramSum, grads: Tensor) -> None:
    """Adds Σ_vbt g gᵀ of gradients [v, b, g, t, o] to ``out`` [g, o, o]."""
    vectors, batch, groups, shared, width = grads.shape
    if shared > 1 and grads.stride(-2) == 1:
        # A convolution's gradient lies feature by feature: multiply the lines where they are.
        lines = grads.transpose(-1, -2).reshape(vectors * batch, groups, width, shared)
        step = budget(groups * width * width, 1 << 20)
        for start in range(0, len(lines), step):
            for part in lines[start : start + step].split(TERMS_PER_PART, -1):
                out.add_products((part @ part.transpose(-1, -2)).sum(0))
        return
    out.add(grads.permute(2, 0, 1, 3, 4).reshape(groups, -1, width))


class KronAccumulator(Accumulator):
    """Sums A and B of one site."""

    def __init__(
        self,
        site: int,
        layout: Layout,
        approach: str,
        dtype: torch.dtype,
        device: torch.device,
        one_hot: bool,
    ):
        self.site, self.layout, self.approach = site, layout, approach
        self.needs = (site,)
        groups, out, width = layout.groups, layout.out, layout.in_
        self.inputs = GramSum(groups, width, dtype, device, diagonal=one_hot)
        self.outputs = GramSum(groups, out, dtype, device)
        self.rows, self.device = [0.0] * groups, device

    def on_batch(self, step: BatchStep) -> None:
        weight = step.batch.weight
        rows = [r for r in (call.fresh_rows() for call in step.calls[self.site]) if isinstance(r, MatrixRows)]
        if not rows:
            return
        count = step.size if weight is None else float(weight.sum())
        lengths = [sum(each) for each in zip(*(r.lengths() for r in rows), strict=True)]  # by group
        if self.approach == "expand":
            for each in rows:
                each.add_gram_(self.inputs, weight)
            self.rows = [r + count * n for r, n in zip(self.rows, lengths, strict=True)]
            return
        total = sum((r.total() for r in rows[1:]), rows[0].total())  # [b, g, i]
        if weight is not None:
            total = total * weight.to(total.dtype).sqrt()[:, None, None]
        if self.inputs.diagonal is not None:
            self.inputs.add_diagonal(total.square().sum(0))
        else:
            self.inputs.add(total.transpose(0, 1))
        self.rows = [r + count * n**2 for r, n in zip(self.rows, lengths, strict=True)]

    def on_vectors(self, step: VectorStep) -> None:
        grads = [g for _, g in step.grads[self.site]]
        if not grads:
            return
        if self.approach == "expand":
            for each in grads:
                add_grad_gram_(self.outputs, each)
            return
        total = sum((g.sum(3) for g in grads[1:]), grads[0].sum(3))  # [v, b, g, o]
        self.outputs.add(total.flatten(0, 1).transpose(0, 1))

    def results(self) -> list[Block]:
        rows = torch.tensor(self.rows, dtype=torch.float64, device=self.device)
        return [KronBlock(self.layout, self.inputs.full(), self.outputs.full(), rows, approach=self.approach)]
