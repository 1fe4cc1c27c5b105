"""Diagonal curvature: Σ_n Σ_v (per-example gradient)², the square after the sum over shared positions.

With exact vectors this is the diagonal of the GGN (MATH 1.2 b), with sampled vectors an unbiased estimate of it
(Ritter et al. 2018, eq. 5), with empirical ones the sum of squared per-example gradients that VOGN uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aftermap.curvature.accumulate import Accumulator, ExampleSum
from aftermap.curvature.factors import Block
from aftermap.curvature.layout import Layout
from aftermap.curvature.rows import ScaleRows, budget
from aftermap.curvature.step import VectorStep
from aftermap.linalg import RunningSum

__all__ = ["DiagonalBlock", "DiagonalSum", "SiteDiagonalAccumulator"]


@dataclass(frozen=True)
class DiagonalBlock(Block):
    """A diagonal matrix.

    Attributes:
        label: a name for tables.
        values: parameter -> its entries of the diagonal.
    """

    label: str
    values: Mapping[str, Tensor]
    kind: str = "diagonal"

    @property
    def name(self) -> str:
        return self.label

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {n: tuple(v.shape) for n, v in self.values.items()}

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.values)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> DiagonalBlock:
        return replace(self, values=dict(tensors))

    def scaled(self, factor: float) -> DiagonalBlock:
        return self.with_tensors({n: v * factor for n, v in self.values.items()})

    def to_dense(self) -> Tensor:
        return torch.diag(torch.cat([v.reshape(-1) for v in self.values.values()]).to(torch.float64))

    def diagonal(self) -> dict[str, Tensor]:
        return {n: v.to(torch.float64) for n, v in self.values.items()}


class SiteDiagonalAccumulator(Accumulator):
    """The diagonal of one site by its rule."""

    def __init__(self, site: int, layout: Layout, dtype: torch.dtype, device: torch.device):
        self.site, self.layout, self.needs = site, layout, (site,)
        self.sums = RunningSum([torch.zeros(layout.groups, layout.out, layout.in_, dtype=dtype, device=device)])
        # Of scales: by the length of their columns, squares that are still to be summed over the examples.
        self._columns: dict[int, RunningSum] = {}

    def on_vectors(self, step: VectorStep) -> None:
        calls = step.grads[self.site]
        if len(calls) == 1:
            call, grads = calls[0]
            rows = call.rows
            columns = rows.columns(grads) if isinstance(rows, ScaleRows) else None
            if columns is not None:
                self._add_columns(columns)
            else:
                rows.add_outer_squared_(self.sums.room_for(step.batch.size)[0], grads)
        elif calls:
            # Several calls of one layer: their gradients add up before the square.
            stride = budget(step.vectors * self.layout.size)
            for start in range(0, step.batch.size, stride):
                length = min(stride, step.batch.size - start)
                self.sums.room_for(1)[0].add_(step.outer(self.site, start, length).square_().sum((0, 1)))

    def _add_columns(self, columns: list[Tensor]) -> None:
        """Adds squares of columns [b·g]. They are short, so operations count: the sum over b is left for the end."""
        size = len(columns[0])
        if size not in self._columns:
            self._columns[size] = RunningSum([self.sums.parts[0].new_zeros(size) for _ in columns])
        for squares, column in zip(self._columns[size].room_for(1), columns, strict=True):
            squares.addcmul_(column, column)

    def results(self) -> list[Block]:
        sums = self.sums.take()
        for columns in self._columns.values():
            for feature in reversed(range(len(columns.parts))):
                sums[:, 0, feature] += columns.take().view(-1, self.layout.groups).sum(0)
        self._columns.clear()
        values = {n: v.contiguous() for n, v in self.layout.split(sums).items()}
        return [DiagonalBlock(self.layout.name, values)]


class DiagonalSum(ExampleSum):
    """The diagonal of parameters without a rule of their own, from per-example gradients."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device):
        self.names = tuple(shapes)
        self.sums = RunningSum([torch.zeros(s, dtype=dtype, device=device) for s in shapes.values()])

    def add(self, found: Mapping[str, Tensor]) -> None:
        for name, total in zip(self.names, self.sums.room_for(1), strict=True):
            total += found[name].square().sum((0, 1))

    def result(self) -> DiagonalBlock:
        values = {name: self.sums.take() for name in reversed(self.names)}
        return DiagonalBlock(self.names[0], {name: values[name] for name in self.names})
