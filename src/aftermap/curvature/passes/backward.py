"""One batch as the consumers see it: rows and gradients per site, per-example gradients per parameter.

One vector on its way back: every consumer is served as soon as the gradients of its layers are there.

Holding the gradients of all layers until the pass is over would double the memory of a network's activations. So an
accumulator says which sites it needs, is called when the last of their gradients has arrived, inside the backward pass,
and the gradients are let go.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from aftermap.batches import Batch
from aftermap.curvature.passes.fallback import per_example_products
from aftermap.curvature.passes.record import ArrangedCall, Call, arrange, arriving_gradients, backpropagate, last_edges
from aftermap.curvature.rules.base import budget
from aftermap.errors import InputError, UnsupportedError
from aftermap.prior import Prior

if TYPE_CHECKING:
    from aftermap.curvature.passes.plan import Sites

__all__ = [
    "Accumulator",
    "BatchStep",
    "Block",
    "ExampleAccumulator",
    "ExampleSum",
    "VectorStep",
    "deliver",
    "same_names",
]


@dataclass
class VectorStep:
    """Some vectors of a batch, back-propagated.

    Attributes:
        vectors: how many.
        grads: site number -> one gradient [v, b, g, t, o] per call that the outputs depend on, with its rows.
        chunk: the vectors themselves [v, b, ..., c].
        identity: the vectors are all unit vectors [c, b, c] and the only site is the output itself.
    """

    batch: BatchStep
    vectors: int
    grads: dict[int, list[tuple[ArrangedCall, Tensor]]]
    chunk: Tensor
    identity: bool = False

    def outer(self, site: int, start: int, length: int) -> Tensor:
        """Per-example gradients of a site's block [v, length, g, o, i] for some examples, summed over its calls."""
        total: Tensor | None = None
        for call, grads in self.grads[site]:
            each = call.rows.narrow(start, length).outer(grads[:, start : start + length])
            total = each if total is None else total + each
        if total is None:
            layout = self.batch.sites.sites[site].layout
            return self.chunk.new_zeros(self.vectors, length, layout.groups, layout.out, layout.in_)
        return total

    def per_example(self, names: Sequence[str], start: int, length: int) -> dict[str, Tensor]:
        """Per-example gradients [v, length, *shape] of the named parameters, over every use of each."""
        found: dict[str, Tensor] = {}
        plan = self.batch.by_parameter
        wanted = set(names)
        for number in sorted({s for n in names for s in plan.get(n, ())}):
            site = self.batch.sites.sites[number]
            for name, value in site.layout.split(self.outer(number, start, length)).items():
                if name in wanted:
                    found[name] = value if name not in found else found[name] + value
        rest = [n for n in names if n not in plan]
        if rest:
            found.update(self.batch.fallback(rest, self.chunk, start, length))
        return {n: found[n] for n in names}


@dataclass
class BatchStep:
    """A batch after its forward pass.

    Attributes:
        calls: site number -> its calls.
        by_parameter: parameter -> its sites; a parameter that is missing here has no rule.
    """

    model: nn.Module
    batch: Batch
    outputs: Tensor
    sites: Sites
    by_parameter: dict[str, list[int]]
    calls: dict[int, list[ArrangedCall]]
    edges: list[Any]

    @property
    def size(self) -> int:
        """B."""
        return self.batch.size

    @cached_property
    def last_edges(self) -> set[int]:
        """Numbers of the edges behind which there is no other; the graph is the same for every vector."""
        return last_edges(self.edges)

    @staticmethod
    def make(
        model: nn.Module,
        batch: Batch,
        outputs: Tensor,
        sites: Sites,
        by_parameter: dict[str, list[int]],
        recorded: Sequence[Call],
        axes: dict[tuple[int, int], int],
    ) -> BatchStep:
        """Arranges the recorded calls; ``axes`` holds the batch dimension by (site, module)."""
        used = {s for numbers in by_parameter.values() for s in numbers}
        size = batch.size
        calls: dict[int, list[ArrangedCall]] = {number: [] for number in sorted(used)}
        edges: list[Any] = []
        for call in recorded:
            if call.site not in used:
                continue
            axis = axes.get((call.site, id(call.module)))
            if axis is None or call.out_shape[axis] % size:
                raise UnsupportedError(
                    f"{sites.sites[call.site].name} was called on a shape {tuple(call.inputs.shape)} that does not fit a batch "
                    f"of {size} examples; the first batch had another pattern of calls. Exclude its parameters with params="
                )
            calls[call.site] += arrange(call, sites.sites[call.site], len(edges), axis, size)
            edges.append(call.edge)
        return BatchStep(model, batch, outputs, sites, by_parameter, calls, edges)

    def backpropagate(self, vectors: Tensor, *, batched: bool, keep: bool) -> Iterator[VectorStep]:
        """Back-propagates vectors [v, b, ..., c] and yields them, some at a time."""
        if not self.edges:
            yield VectorStep(self, len(vectors), {number: [] for number in self.calls}, vectors)
            return
        done = 0
        for raw in backpropagate(self.outputs, self.edges, vectors, batched=batched, keep=keep):
            count = len(vectors) if batched else 1
            moved = self.moved(raw, vectors[done : done + count])
            del raw
            yield moved
            del moved
            done += count

    def moved(self, raw: Sequence[Tensor | None], vectors: Tensor) -> VectorStep:
        """Vectors [v, b, ..., c] whose gradients [v, ...] at every edge are known."""
        grads: dict[int, list[tuple[ArrangedCall, Tensor]]] = {number: [] for number in self.calls}
        for number, calls in self.calls.items():
            for call in calls:
                value = raw[call.edge]
                if value is not None:
                    grads[number].append((call, call.grads(value)))
        return VectorStep(self, len(vectors), grads, vectors)

    def stacked(self, vectors: Tensor, *, batched: bool, keep: bool) -> VectorStep:
        """All vectors in one step, however they were back-propagated."""
        if not self.edges or (batched and len(vectors) > 1):
            return next(iter(self.backpropagate(vectors, batched=batched, keep=keep)))
        # One buffer [b, v, ...] per edge: seen as [v, b, ...], its vectors merge into one matrix without a copy.
        buffers: list[Tensor | None] = [None] * len(self.edges)
        for number, raw in enumerate(backpropagate(self.outputs, self.edges, vectors, batched=False, keep=keep)):
            for edge, value in enumerate(raw):
                buffer = buffers[edge]
                if value is not None and buffer is None:
                    buffer = buffers[edge] = value.new_empty(value.shape[1], len(vectors), *value.shape[2:])
                    buffer[:, :number] = 0.0
                if buffer is not None:
                    # An output that does not depend on this layer has a zero gradient there.
                    buffer[:, number] = 0.0 if value is None else value[0]
        stacked = [None if b is None else b.transpose(0, 1) for b in buffers]
        return self.moved(stacked, vectors)

    def fallback(self, names: Sequence[str], chunk: Tensor, start: int, length: int) -> dict[str, Tensor]:
        """Per-example gradients of parameters without a rule."""
        with torch.no_grad():
            return per_example_products(self.model, names, self.batch.inputs, self.size, chunk, start, length)


class Block(ABC):
    """A symmetric matrix over some parameters, in the order of `shapes`, each parameter row-major.

    Attributes:
        kind: A word for tables and saved folders.
        dampings: The ways in which a posterior may add the prior to the block.
        joins_layers: Whether a block may hold several layers with the terms between them.
    """

    kind: str
    dampings: ClassVar[tuple[str, ...]] = ("exact",)
    joins_layers: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """A name for tables: the layer's path, or the first parameter."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters and their shapes."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Everything that adds up over data."""

    @abstractmethod
    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Block:
        """The same block with other sums."""

    @abstractmethod
    def scaled(self, factor: float) -> Block:
        """The block times a number."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """[p, p] in float64."""

    @abstractmethod
    def diagonal(self) -> dict[str, Tensor]:
        """The diagonal, by parameter, in float64."""

    def matrices_to_decompose(self, prior: Prior) -> list[tuple[str, Tensor]]:
        """The positive semi-definite matrices [g, D, D] whose eigendecompositions `posterior` needs, with names for messages.

        They are collected over all blocks and shared out over processes.
        """
        return []

    @abstractmethod
    def posterior(
        self,
        prior: Prior,
        scale: Tensor,
        eigen: Sequence[tuple[Tensor, Tensor]],
        *,
        damping: str,
        dtype: torch.dtype,
        n_data: float,
    ) -> Any:
        """The `BlockPosterior` with precision s·H + P₀ of this block H.

        Args:
            prior: P₀, at least over the parameters of the block.
            scale: s, 0-d float64.
            eigen: Eigenvalues and eigenvectors of `matrices_to_decompose`, in its order, in float64.
            damping: How a Kronecker product and the prior are added: one of `dampings`, or "exact".
            dtype: The precision of samples and of gradients that the posterior will meet: the network's own.
            n_data: How many data the block is a sum over.
        """

    @property
    def size(self) -> int:
        """P."""
        return sum(math.prod(s) for s in self.shapes.values())

    def trace(self) -> float:
        """Σ of the diagonal."""
        return float(sum(d.sum() for d in self.diagonal().values()))

    def __add__(self, other: Block) -> Block:
        same_names(self, other)
        mine, theirs = self.tensors(), other.tensors()
        return self.with_tensors({k: mine[k] + theirs[k] for k in mine})


def same_names(left: Block, right: Block) -> None:
    """Raises unless two blocks are of one kind and over the same parameters."""
    if type(left) is not type(right) or left.shapes != right.shapes:
        raise InputError(
            f"a {left.kind} block over {list(left.shapes)} and a {right.kind} block over {list(right.shapes)} cannot be added; "
            "fit both with the same structure and parameters"
        )


class Accumulator(ABC):
    """Sums blocks over a stream of batches.

    Attributes:
        needs: the sites whose gradients it looks at; None for all. It is called once these are there.
    """

    needs: tuple[int, ...] | None = None

    def on_batch(self, step: BatchStep) -> None:  # noqa: B027
        """Once per batch, before any vector."""

    @abstractmethod
    def on_vectors(self, step: VectorStep) -> None:
        """For each group of back-propagated vectors."""

    @abstractmethod
    def results(self) -> list[Block]:
        """The blocks."""


class ExampleSum(ABC):
    """A sum over per-example gradients of some parameters."""

    names: tuple[str, ...]

    @abstractmethod
    def add(self, found: Mapping[str, Tensor]) -> None:
        """Adds gradients [v, b, *shape] by name."""

    @abstractmethod
    def result(self) -> Block:
        """The block."""


class ExampleAccumulator(Accumulator):
    """Hands per-example gradients, some examples at a time, to sums that share one pass over them."""

    def __init__(self, sums: Sequence[ExampleSum], numbers: int, needs: tuple[int, ...] | None = None):
        self.sums, self.needs = list(sums), needs
        self.numbers = numbers  # per example and vector

    def on_vectors(self, step: VectorStep) -> None:
        names = [n for each in self.sums for n in each.names]
        stride = budget(step.vectors * self.numbers)
        for start in range(0, step.batch.size, stride):
            found = step.per_example(names, start, min(stride, step.batch.size - start))
            for each in self.sums:
                each.add({n: found[n] for n in each.names})

    def results(self) -> list[Block]:
        return [each.result() for each in self.sums]


class _Desk:
    """Who waits for which gradients of a batch; of one vector at a time, what has arrived and is still waited for."""

    def __init__(self, step: BatchStep, accumulators: Sequence[Accumulator]):
        self.step = step
        self.waiting: list[tuple[Accumulator, tuple[int, ...], set[int]]] = []
        self.interested: dict[int, list[int]] = {}
        for number, each in enumerate(accumulators):
            sites = tuple(step.calls) if each.needs is None else tuple(s for s in each.needs if s in step.calls)
            edges = {call.edge for s in sites for call in step.calls[s]}
            self.waiting.append((each, sites, edges))
            for edge in edges:
                self.interested.setdefault(edge, []).append(number)

    def open(self, vector: Tensor) -> None:
        """A vector [1, b, ..., c] sets off."""
        self.vector = vector
        self.arrived: dict[int, Tensor] = {}
        self.missing = [set(edges) for _, _, edges in self.waiting]
        self.served = [False] * len(self.waiting)
        self.readers = {edge: len(numbers) for edge, numbers in self.interested.items()}

    def receive(self, edge: int, grad: Tensor) -> None:
        """A gradient has arrived."""
        if edge not in self.interested:
            return
        self.arrived[edge] = grad[None]
        del grad
        for number in self.interested[edge]:
            self.missing[number].discard(edge)
            if not self.missing[number]:
                self.serve(number)

    def serve(self, number: int) -> None:
        """Calls an accumulator with what has arrived for it, and lets go of what nobody else waits for."""
        each, sites, edges = self.waiting[number]
        self.served[number] = True
        grads = {
            s: [(c, c.grads(self.arrived[c.edge])) for c in self.step.calls[s] if c.edge in self.arrived] for s in sites
        }
        each.on_vectors(VectorStep(self.step, 1, grads, self.vector))
        for edge in edges:
            self.readers[edge] -= 1
            if not self.readers[edge]:
                self.arrived.pop(edge, None)

    def close(self) -> None:
        """The pass is over: serves those who wait for a gradient that does not exist."""
        for number, served in enumerate(self.served):
            if not served:
                self.serve(number)


def deliver(step: BatchStep, vectors: Tensor, accumulators: Sequence[Accumulator], *, keep: bool) -> None:
    """Back-propagates vectors one by one and serves the accumulators on the way.

    Args:
        step: the batch after its forward pass.
        vectors: [v, b, ..., c].
        accumulators: called once per vector each, in the order in which the backward pass reaches their layers.
        keep: the graph is needed again afterwards.
    """
    desk = _Desk(step, accumulators)
    ahead = iter(vectors.split(1))
    desk.open(next(ahead))

    def passed() -> None:
        desk.close()
        following = next(ahead, None)
        if following is not None:
            desk.open(following)

    if step.edges:
        arriving_gradients(step.outputs, step.edges, vectors, desk.receive, passed, keep=keep, last=step.last_edges)
    else:
        for _ in vectors:
            passed()
