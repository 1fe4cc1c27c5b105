"""Dense curvature over some parameters: G = Σ_n Σ_v (J_nᵀ v)(J_nᵀ v)ᵀ, cross-layer terms included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aftermap.curvature.accumulate import ExampleSum
from aftermap.curvature.factors import Block
from aftermap.curvature.gram_sum import GramSum
from aftermap.linalg import symmetrise

__all__ = ["FullBlock", "FullSum"]


@dataclass(frozen=True)
class FullBlock(Block):
    """A dense symmetric matrix.

    Attributes:
        label: a name for tables.
        sizes: parameters and shapes, in the order of the matrix.
        matrix: [p, p].
    """

    label: str
    sizes: Mapping[str, tuple[int, ...]]
    matrix: Tensor
    kind: str = "full"

    @property
    def name(self) -> str:
        return self.label

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self.sizes)

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> FullBlock:
        return replace(self, matrix=tensors["matrix"])

    def scaled(self, factor: float) -> FullBlock:
        return replace(self, matrix=self.matrix * factor)

    def to_dense(self) -> Tensor:
        return symmetrise(self.matrix.to(torch.float64))

    def diagonal(self) -> dict[str, Tensor]:
        entries = self.matrix.diagonal().to(torch.float64)
        parts = entries.split([math.prod(s) for s in self.sizes.values()])
        return {n: p.reshape(s) for (n, s), p in zip(self.sizes.items(), parts, strict=True)}


class FullSum(ExampleSum):
    """Sums the outer products of per-example gradients over all of its parameters."""

    def __init__(self, label: str, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device):
        self.label, self.shapes, self.names = label, dict(shapes), tuple(shapes)
        size = sum(math.prod(s) for s in shapes.values())
        self.sums = GramSum(1, size, dtype, device)

    def add(self, found: Mapping[str, Tensor]) -> None:
        lines = torch.cat([found[n].reshape(math.prod(found[n].shape[:2]), -1) for n in self.names], dim=1)
        self.sums.add(lines[None])

    def result(self) -> FullBlock:
        return FullBlock(self.label, self.shapes, self.sums.full()[0])
