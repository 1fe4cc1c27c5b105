"""Diagonal curvature: Σ_n Σ_v (per-example gradient)², the square after the sum over shared positions.

With exact vectors this is the diagonal of the GGN (MATH 1.2 b), with sampled vectors an unbiased estimate of it
(Ritter et al. 2018, eq. 5), with empirical ones the sum of squared per-example gradients that VOGN uses.

Diagonal posteriors: independent Gaussians with precision s·d + δ per entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aftermap.curvature.passes.backward import Accumulator, Block, ExampleSum, VectorStep
from aftermap.curvature.rules.base import Layout, budget
from aftermap.curvature.rules.scale import ScaleRows
from aftermap.curvature.structures.base import BlockPosterior, OutputNoise, site_covariance, site_of
from aftermap.curvature.structures.eigenbasis import Eigen
from aftermap.draws import normal_like
from aftermap.linalg import RunningSum
from aftermap.params import Params
from aftermap.prior import Prior

__all__ = ["DiagonalBlock", "DiagonalBlockPosterior", "DiagonalSum", "SiteDiagonalAccumulator"]


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

    def posterior(
        self, prior: Prior, scale: Tensor, eigen: Sequence[Eigen], *, damping: str, dtype: torch.dtype, n_data: float
    ) -> DiagonalBlockPosterior:
        device = next(iter(self.values.values())).device
        precision = {n: prior.precision[n].to(device) for n in self.shapes}
        return DiagonalBlockPosterior(self, precision, scale.to(device), dtype)


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


@dataclass(frozen=True)
class DiagonalBlockPosterior(BlockPosterior):
    """A diagonal block under a prior: the variance is 1/(s·d + δ), which is not the diagonal of a dense inverse.

    Attributes:
        source_block: the curvature d.
        prior: parameter -> δ, a number or one per entry.
        scale: s, 0-d.
        dtype: of samples.
    """

    source_block: DiagonalBlock
    prior: Params
    scale: Tensor
    dtype: torch.dtype

    @property
    def source(self) -> Block:
        return self.source_block

    def with_prior(self, prior: Prior, scale: Tensor) -> DiagonalBlockPosterior:
        device = next(iter(self.source_block.values.values())).device
        return replace(self, prior={n: prior.precision[n].to(device) for n in self.names}, scale=scale.to(device))

    @property
    def precision(self) -> Params:
        """Entries of the precision."""
        return {n: self.scale * d + self.prior[n] for n, d in self.source_block.diagonal().items()}

    def log_det_ratio(self) -> Tensor:
        parts = [torch.log1p(self.scale * d / self.prior[n]).sum() for n, d in self.source_block.diagonal().items()]
        return torch.stack(parts).sum()

    def log_det_prior(self) -> Tensor:
        parts = [self.prior[n].log().expand(s).sum() for n, s in self.shapes.items()]
        return torch.stack(parts).sum()

    def effective_parameters(self) -> Tensor:
        return torch.stack([(1 - self.prior[n] / p).sum() for n, p in self.precision.items()]).sum()

    def sample(self, count: int, generator: torch.Generator | None) -> Params:
        draws = {}
        for name, precision in self.precision.items():
            deviation = precision.detach().rsqrt().to(self.dtype)
            draws[name] = normal_like(deviation.expand(count, *deviation.shape), generator) * deviation
        return draws

    def precision_mv(self, values: Params) -> Params:
        return {n: values[n] * p.to(values[n].dtype) for n, p in self.precision.items()}

    def covariance_mv(self, values: Params) -> Params:
        return {n: values[n] / p.to(values[n].dtype) for n, p in self.precision.items()}

    def functional_covariance(
        self, step: VectorStep, variants: Sequence[BlockPosterior], diagonal: bool
    ) -> list[Tensor]:
        site = site_of(step, self.names)
        if site is None:
            return super().functional_covariance(step, variants, diagonal)
        layout = step.batch.sites.sites[site].layout
        tables = [layout.join(v.marginal_variance()) for v in variants]
        return site_covariance(step, site, tables, None, None, diagonal)

    def output_noise(self, layout: Layout) -> OutputNoise:
        return OutputNoise(layout.join(self.marginal_variance())[0], None, None)

    def marginal_variance(self) -> Params:
        return {n: 1 / p.detach() for n, p in self.precision.items()}
