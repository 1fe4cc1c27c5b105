"""Diagonal curvature: Σ_n Σ_v (per-example gradient)², the square after the sum over shared positions.

With exact vectors this is the diagonal of the GGN (docs/mathematics/curvature.md), with sampled vectors an unbiased estimate of it
(Ritter et al. 2018, eq. 5), with empirical ones the sum of squared per-example gradients that VOGN uses.

The diagonal posteriors are independent Gaussians with precision s·d + δ per entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from aftermap.batches import Batch
from aftermap.curvature.passes.backward import (
    Accumulator,
    BackwardPass,
    LayerGradients,
    PerExampleAccumulator,
    PerExampleSum,
)
from aftermap.curvature.passes.closure import ClosureReading
from aftermap.curvature.passes.plan import inputs_of_call
from aftermap.curvature.passes.record import ForwardRecord
from aftermap.curvature.passes.stream import CurvatureProblem, DataCounts
from aftermap.curvature.passes.vectors import make_vectors
from aftermap.curvature.rules.base import Layout, examples_per_chunk
from aftermap.curvature.structures.base import (
    Block,
    BlockPosterior,
    OutputNoise,
    Structure,
    register_structure,
)
from aftermap.curvature.structures.eigenbasis import Eigen
from aftermap.curvature.structures.layer_covariance import layer_covariance, layer_of
from aftermap.draws import normal_like
from aftermap.errors import NumericalError, UnsupportedError
from aftermap.likelihoods import Likelihood
from aftermap.linalg import RunningSum, all_finite, take_under
from aftermap.params import Params
from aftermap.prior import Prior

__all__ = [
    "DiagonalAccumulator",
    "DiagonalBlock",
    "DiagonalBlockPosterior",
    "DiagonalSum",
    "ggn_diagonal_of_closure",
]


@dataclass(frozen=True)
class DiagonalBlock(Block):
    """A diagonal matrix over some parameters.

    Attributes:
        label: The name of the block in tables.
        values: The entries of the diagonal, by parameter.
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
        if not all(all_finite(v) for v in self.values.values()):
            raise NumericalError(
                f"the diagonal curvature of {self.name} has entries that are not finite; check the data and the model's outputs, or "
                "compute in double precision (model.double() and data in float64)"
            )
        device = next(iter(self.values.values())).device
        precision = {n: prior.precision[n].to(device) for n in self.shapes}
        return DiagonalBlockPosterior(self, precision, scale.to(device), dtype)


class DiagonalAccumulator(Accumulator):
    """The sum that gives the diagonal of one layer by its rule.

    Args:
        layer: The layer's number.
        layout: The way in which its parameters form a block.
        dtype: The dtype of the sums.
        device: The device of the sums.
    """

    def __init__(self, layer: int, layout: Layout, dtype: torch.dtype, device: torch.device):
        self.layer, self.layout, self.layers = layer, layout, (layer,)
        self.sums = RunningSum([torch.zeros(layout.groups, layout.out, layout.in_, dtype=dtype, device=device)])
        # For scales these hold squares, by the length of their columns, that are still to be summed over the examples.
        self._columns: dict[int, RunningSum] = {}

    @staticmethod
    def of(problem: CurvatureProblem, layer: int) -> DiagonalAccumulator:
        """Makes the accumulator of a problem's layer."""
        return DiagonalAccumulator(layer, problem.plan.layers[layer].layout, problem.sums_dtype, problem.device)

    def add(self, gradients: LayerGradients) -> None:
        calls = gradients.by_layer[self.layer]
        if len(calls) == 1:
            call, arrived = calls[0]
            rows = call.rows
            columns = rows.columns(arrived)
            if columns is not None:
                self._add_columns(columns)
            else:
                rows.add_squares_(self.sums.room_for(gradients.record.size)[0], arrived)
        elif calls:
            # The gradients of several calls of one layer add up before the square.
            stride = examples_per_chunk(gradients.n_vectors * self.layout.size)
            for start in range(0, gradients.record.size, stride):
                length = min(stride, gradients.record.size - start)
                self.sums.room_for(1)[0].add_(
                    gradients.block_gradients(self.layer, start, length).square_().sum((0, 1))
                )

    def _add_columns(self, columns: list[Tensor]) -> None:
        """Adds squares of columns [b·g]; they are short, so operations count, and the sum over b is left for the end."""
        size = len(columns[0])
        if size not in self._columns:
            self._columns[size] = RunningSum([self.sums.parts[0].new_zeros(size) for _ in columns])
        for squares, column in zip(self._columns[size].room_for(1), columns, strict=True):
            squares.addcmul_(column, column)

    def state(self) -> dict[str, Tensor]:
        state = {f"sums.{name}": value for name, value in self.sums.state().items()}
        for size, columns in self._columns.items():
            state.update({f"columns.{size}.{name}": value for name, value in columns.state().items()})
        return state

    def add_state(self, state: dict[str, Tensor]) -> None:
        self.sums.add_state(take_under(state, "sums."))
        for size in {int(name.split(".")[1]) for name in state}:
            saved = take_under(state, f"columns.{size}.")
            like = self.sums.parts[0].new_zeros(size)
            features = sum(name.startswith("part.") for name in saved)
            columns = self._columns.setdefault(size, RunningSum([like.clone() for _ in range(features)]))
            columns.add_state(saved)

    def blocks(self) -> list[Block]:
        sums = self.sums.take()
        for columns in self._columns.values():
            for feature in reversed(range(len(columns.parts))):
                sums[:, 0, feature] += columns.take().view(-1, self.layout.groups).sum(0)
        self._columns.clear()
        values = {n: v.contiguous() for n, v in self.layout.split(sums).items()}
        return [DiagonalBlock(self.layout.name, values)]


class DiagonalSum(PerExampleSum):
    """The sum that gives the diagonal of parameters without a rule of their own, from per-example gradients."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device):
        self.names = tuple(shapes)
        self.sums = RunningSum([torch.zeros(s, dtype=dtype, device=device) for s in shapes.values()])

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        for name, total in zip(self.names, self.sums.room_for(1), strict=True):
            total += gradients[name].square().sum((0, 1))

    def block(self) -> DiagonalBlock:
        values = {name: self.sums.take() for name in reversed(self.names)}
        return DiagonalBlock(self.names[0], {name: values[name] for name in self.names})


def fit_diagonal(problem: CurvatureProblem) -> tuple[tuple[Block, ...], DataCounts]:
    """Fits the diagonal of every layer by its rule, and of all other parameters by per-example gradients."""
    plan = problem.plan
    accumulators: list[Accumulator] = [DiagonalAccumulator.of(problem, k) for k in plan.whole_layers]
    covered = {n for k in plan.whole_layers for n in plan.layers[k].layout.names}
    rest = {n: s for n, s in problem.shapes.items() if n not in covered}
    if rest:
        sums = [DiagonalSum({n: s}, problem.sums_dtype, problem.device) for n, s in rest.items()]
        layers = tuple(sorted({k for n in rest for k in plan.layers_of_parameter.get(n, ())}))
        accumulators.append(PerExampleAccumulator(sums, sum(math.prod(s) for s in rest.values()), layers))
    return problem.run(accumulators, "diagonal curvature")


def ggn_diagonal_of_closure(
    reading: ClosureReading, likelihood: Likelihood, kind: str, samples: int, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Returns the diagonal of Σ_n J_nᵀ Λ_n J_n at the outputs of a closure: the curvature of the sum loss.

    It must run while the graph is alive and the parameters are those of the closure.

    Args:
        reading: The reading of the closure.
        likelihood: The likelihood, which gives Λ.
        kind: The kind of vectors: exact, rademacher, sampled or auto.
        samples: The number of draws for the random kinds.
        generator: The source of the random vectors.

    Returns:
        For each parameter its diagonal [*shape].
    """
    reading.closed = True
    reader = reading.reader
    plan, call = reader.plan or reader.make_plan(reading), reading.model_call()
    inputs = None if call is None else inputs_of_call(reader.model, call)
    if call is None or call.output is None or inputs is None:
        raise UnsupportedError(
            "curvature='ggn' needs a closure that calls the whole model once, with one output tensor"
        )
    batch = plan.marked(Batch(inputs, None, None, reading.size))
    record = ForwardRecord.make(reader.model, batch, call.output, plan, reading.record.calls)
    shapes = {n: tuple(p.shape) for n, p in reader.parameters.items() if p.requires_grad}
    like = next(iter(reader.parameters.values()))
    accumulators: list[Accumulator] = [
        DiagonalAccumulator(k, plan.layers[k].layout, like.dtype, like.device) for k in plan.whole_layers
    ]
    covered = {n for k in plan.whole_layers for n in plan.layers[k].layout.names}
    rest = [DiagonalSum({n: s}, like.dtype, like.device) for n, s in shapes.items() if n not in covered]
    if rest:
        numbers = sum(math.prod(s) for n, s in shapes.items() if n not in covered)
        accumulators.append(PerExampleAccumulator(rest, numbers))
    backward = BackwardPass(record, accumulators)
    for part in make_vectors(kind, likelihood, call.output.detach(), None, samples=samples, generator=generator).chunks(
        1
    ):
        with torch.no_grad():
            backward.run(part, together=False, keep_graph=True)
    tensors = [block.tensors() for accumulator in accumulators for block in accumulator.blocks()]
    squares = {n: value for values in tensors for n, value in values.items()}
    return {n: squares[n] for n in shapes}


@dataclass(frozen=True)
class DiagonalBlockPosterior(BlockPosterior):
    """A diagonal block under a prior: the variance is 1/(s·d + δ), which is not the diagonal of a dense inverse.

    Attributes:
        source_block: The curvature d.
        prior: The precision δ of each parameter, a number or one per entry.
        scale: The factor s of the curvature, 0-d.
        dtype: The dtype of samples.
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
        """The entries of the precision."""
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
        self, gradients: LayerGradients, variants: Sequence[Self], diagonal: bool
    ) -> list[Tensor]:
        layer = layer_of(gradients, self.names)
        if layer is None:
            return super().functional_covariance(gradients, variants, diagonal)
        layout = gradients.record.plan.layers[layer].layout
        tables = [layout.join(v.marginal_variance()) for v in variants]
        return layer_covariance(gradients, layer, tables, None, None, diagonal)

    def output_noise(self, layout: Layout) -> OutputNoise:
        return OutputNoise(layout.join(self.marginal_variance())[0], None, None)

    def marginal_variance(self) -> Params:
        return {n: 1 / p.detach() for n, p in self.precision.items()}


register_structure(
    Structure("diagonal", "One number for each weight.", fit_diagonal, (DiagonalBlock,), streams_sums=True)
)
