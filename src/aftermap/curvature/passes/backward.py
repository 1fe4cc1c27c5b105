"""The backward pass: vectors set off from the outputs, and every consumer is served as soon as its gradients are there.

Holding the gradients of all layers until the pass is over would double the memory of a network's activations. So an
accumulator says which layers it needs, is called when the last of their gradients has arrived, inside the backward pass,
and the gradients are let go.

Index legend: v vector, b example, g group, t shared position, i feature in, o feature out, c output of the network.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import CheckpointError

from aftermap.batches import Batch
from aftermap.curvature.passes.block import Block
from aftermap.curvature.passes.fallback import per_example_products
from aftermap.curvature.passes.record import ForwardRecord, LayerCall
from aftermap.curvature.rules.base import examples_per_chunk
from aftermap.errors import UnsupportedError
from aftermap.linalg import differing, norms, take_under

__all__ = [
    "Accumulator",
    "BackwardPass",
    "LayerGradients",
    "PerExampleAccumulator",
    "PerExampleSum",
    "contradictions",
    "vectors_agree",
]


@dataclass(frozen=True)
class LayerGradients:
    """The gradients of one batch at the outputs of some layers, for one or several vectors.

    Attributes:
        record: The forward pass that the gradients belong to.
        vectors: The vectors that were back-propagated from the network's outputs [v, b, ..., c].
        by_layer: For each layer number, every call of that layer with its gradient [v, b, g, t, o]. A call that the
            outputs do not depend on is missing.
        unit_vectors: Whether `vectors` is the identity and the only layer is the last one, which makes covariances cheap.
    """

    record: ForwardRecord
    vectors: Tensor
    by_layer: Mapping[int, Sequence[tuple[LayerCall, Tensor]]]
    unit_vectors: bool = False

    @property
    def n_vectors(self) -> int:
        """The number of vectors."""
        return len(self.vectors)

    @property
    def batch(self) -> Batch:
        """The batch that went through the network."""
        return self.record.batch

    def block_gradients(self, layer: int, start: int, length: int) -> Tensor:
        """Returns per-example gradients of a layer's block [v, length, g, o, i] for some examples, summed over its calls."""
        total: Tensor | None = None
        for call, gradients in self.by_layer[layer]:
            part = call.rows.examples(start, length).per_example_gradients(gradients[:, start : start + length])
            total = part if total is None else total + part
        if total is None:
            layout = self.record.plan.layers[layer].layout
            return self.vectors.new_zeros(self.n_vectors, length, layout.groups, layout.out, layout.in_)
        return total

    def per_example(self, names: Sequence[str], start: int, length: int) -> dict[str, Tensor]:
        """Returns per-example gradients [v, length, *shape] of the named parameters, over every use of each."""
        gradients: dict[str, Tensor] = {}
        plan, wanted = self.record.plan, set(names)
        for number in sorted({k for n in names for k in plan.layers_of_parameter.get(n, ())}):
            layout = plan.layers[number].layout
            for name, value in layout.split(self.block_gradients(number, start, length)).items():
                if name in wanted:
                    gradients[name] = value if name not in gradients else gradients[name] + value
        rest = [n for n in names if n not in plan.layers_of_parameter]
        if rest:
            with torch.no_grad():
                record = self.record
                gradients.update(per_example_products(record.model, rest, record.batch, self.vectors, start, length))
        return {n: gradients[n] for n in names}


class Accumulator(ABC):
    """Sums something while batches and gradients pass by.

    Attributes:
        layers: The layers whose gradients it waits for; None for all.
        stacks_vectors: Whether it is served once per pass with all vectors together (predictions), instead of once for
            each vector, or each group of vectors that are back-propagated together.
    """

    layers: tuple[int, ...] | None = None
    stacks_vectors: bool = False

    def start_batch(self, record: ForwardRecord) -> None:  # noqa: B027
        """Is called once for each batch, before any gradient."""

    @abstractmethod
    def add(self, gradients: LayerGradients) -> None:
        """Is called when the last gradient that it waits for has arrived."""

    def blocks(self) -> list[Block]:
        """Returns the blocks of a fit; an accumulator of something else has none."""
        return []

    def state(self) -> dict[str, Tensor]:
        """Returns all that was summed, by name, for a checkpoint."""
        raise UnsupportedError(
            f"{type(self).__name__} has no methods state and add_state, so its sums cannot be kept: fit without checkpoint="
        )

    def add_state(self, state: dict[str, Tensor]) -> None:
        """Adds what `state` gave, and takes it out of it; an empty accumulator takes it over bit by bit."""
        raise UnsupportedError(f"{type(self).__name__} has no method add_state")


class PerExampleSum(ABC):
    """A sum over per-example gradients of some parameters.

    Attributes:
        names: The parameters.
        sums: A `RunningSum` or a `GramSum`, which a checkpoint keeps.
    """

    names: tuple[str, ...]
    sums: Any

    @abstractmethod
    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Adds gradients [v, b, *shape] by name."""

    @abstractmethod
    def block(self) -> Block:
        """Returns the block that the sums make."""


class PerExampleAccumulator(Accumulator):
    """Hands per-example gradients, some examples at a time, to sums that share one pass over them.

    Args:
        sums: The sums that share the pass.
        numbers: The number of numbers in the gradients of one example and one vector.
        layers: The layers whose gradients are needed; None for all.
    """

    def __init__(self, sums: Sequence[PerExampleSum], numbers: int, layers: tuple[int, ...] | None = None):
        self.sums, self.layers = list(sums), layers
        self.numbers = numbers

    def add(self, gradients: LayerGradients) -> None:
        names = [n for part in self.sums for n in part.names]
        size = gradients.record.size
        stride = examples_per_chunk(gradients.n_vectors * self.numbers)
        for start in range(0, size, stride):
            some = gradients.per_example(names, start, min(stride, size - start))
            for part in self.sums:
                part.add({n: some[n] for n in part.names})

    def state(self) -> dict[str, Tensor]:
        return {f"{k}.{name}": value for k, part in enumerate(self.sums) for name, value in part.sums.state().items()}

    def add_state(self, state: dict[str, Tensor]) -> None:
        for k, part in enumerate(self.sums):
            part.sums.add_state(take_under(state, f"{k}."))

    def blocks(self) -> list[Block]:
        return [part.block() for part in self.sums]


class BackwardPass:
    """Hands arriving gradients to accumulators, and lets go of a gradient when its last reader has been served.

    Args:
        record: A batch after its forward pass.
        accumulators: The readers of the gradients.
    """

    def __init__(self, record: ForwardRecord, accumulators: Sequence[Accumulator]):
        self.record = record
        self._accumulators = list(accumulators)
        self._layers: list[tuple[int, ...]] = []
        self._edges: list[set[int]] = []
        self._readers: dict[int, list[int]] = {}  # By edge, these are the accumulators that wait for it.
        for number, accumulator in enumerate(self._accumulators):
            layers = tuple(record.calls) if accumulator.layers is None else accumulator.layers
            layers = tuple(k for k in layers if k in record.calls)
            edges = {call.edge for k in layers for call in record.calls[k]}
            self._layers.append(layers)
            self._edges.append(edges)
            for edge in edges:
                self._readers.setdefault(edge, []).append(number)

    def run(
        self, vectors: Tensor, *, together: bool, keep_graph: bool = False, also: Sequence[Tensor] = ()
    ) -> list[Tensor | None]:
        """Back-propagates vectors from the outputs.

        Args:
            vectors: The vectors [v, b, ..., c] at the outputs.
            together: Whether all vectors go in one vectorised pass (faster for matrix products, slower for
                convolutions), instead of one by one.
            keep_graph: Whether the graph is needed again afterwards.
            also: The parameters whose gradients are wanted too, for the only vector of this pass.

        Returns:
            The gradients of ``also``; None where the outputs do not depend on a parameter.
        """
        if not together or len(vectors) == 1:
            return self._run_one_by_one(vectors, keep_graph, also)
        gradients = _gradients_together(self.record, vectors, keep_graph) if self.record.edges else []
        self.start_vectors(vectors)
        for edge, gradient in enumerate(gradients):
            if gradient is not None:
                self.receive(edge, gradient)
        self.end_vectors()
        return []

    def _run_one_by_one(self, vectors: Tensor, keep_graph: bool, also: Sequence[Tensor]) -> list[Tensor | None]:
        """Hands out the gradient at each edge as soon as it is complete.

        Autograd holds the gradients that are asked of it until the pass is over. So it is asked only for the deepest edges;
        autograd does not run the nodes that it is asked for, so their gradients are what it returns. At the other edges a
        hook on the node looks at what passes by.
        """
        record, several = self.record, len(vectors) > 1
        stacking = [n for n, a in enumerate(self._accumulators) if several and a.stacks_vectors]
        waiting = [n for n in range(len(self._accumulators)) if n not in stacking]
        stacked_edges = {e for n in stacking for e in self._edges[n]}
        # There is one buffer [b, v, ...] for each edge: seen as [v, b, ...], its vectors merge into one matrix without
        # a copy.
        buffers: dict[int, Tensor] = {}
        deepest = record.deepest_edges
        asked: list[Any] = [*(record.edges[n] for n in deepest), *also]
        place = 0

        def arrived(edge: int, output: int, gradients: Sequence[Tensor | None]) -> None:
            gradient = gradients[output]
            if gradient is None:
                return
            if edge in stacked_edges:
                if edge not in buffers:  # An output that does not depend on a layer has a zero gradient there.
                    buffers[edge] = gradient.new_zeros(gradient.shape[0], len(vectors), *gradient.shape[1:])
                buffers[edge][:, place] = gradient
            self.receive(edge, gradient[None])

        wanted: list[Tensor | None] = []
        with ExitStack() as stack:
            for number, edge in enumerate(record.edges):
                if number not in deepest and number in self._readers:
                    stack.callback(edge.node.register_prehook(partial(arrived, number, edge.output_nr)).remove)
            for place, vector in enumerate(vectors):
                self.start_vectors(vectors[place : place + 1], waiting)
                if asked:
                    keep = keep_graph or place < len(vectors) - 1
                    gradients: list[Tensor | None] = list(
                        torch.autograd.grad(record.outputs, asked, vector, retain_graph=keep, allow_unused=True)
                    )
                    wanted = gradients[len(deepest) :]
                    for number in reversed(range(len(deepest))):
                        arrived(deepest[number], 0, [gradients.pop(number)])  # It is let go: the next needs its memory.
                    del gradients
                self.end_vectors()
        for number in stacking:
            stacked = {edge: buffer.transpose(0, 1) for edge, buffer in buffers.items()}
            self._accumulators[number].add(self._gradients(number, vectors, stacked))
        return wanted

    def start_vectors(
        self, vectors: Tensor, waiting: Sequence[int] | None = None, *, for_the_last_time: bool = False
    ) -> None:
        """Begins a pass in which vectors set off from the outputs.

        Args:
            vectors: The vectors [v, b, ..., c] at the outputs.
            waiting: The accumulators that wait for their gradients; None for all.
            for_the_last_time: Whether the inputs of a layer are let go with its gradients.
        """
        self._vectors, self._for_the_last_time = vectors, for_the_last_time
        self._arrived: dict[int, Tensor] = {}
        numbers = range(len(self._accumulators)) if waiting is None else waiting
        self._missing = {number: set(self._edges[number]) for number in numbers}
        self._unread = {e: sum(n in self._missing for n in readers) for e, readers in self._readers.items()}

    def receive(self, edge: int, gradient: Tensor) -> None:
        """Takes a gradient [v, ...] that has arrived at an edge."""
        if not self._unread.get(edge):
            return
        self._arrived[edge] = gradient
        del gradient
        for number in self._readers[edge]:
            if number in self._missing:
                self._missing[number].discard(edge)
                if not self._missing[number]:
                    self._serve(number)

    def end_vectors(self) -> None:
        """Ends the pass, and serves those who wait for a gradient that does not exist."""
        for number in list(self._missing):
            self._serve(number)

    def _serve(self, number: int) -> None:
        """Calls an accumulator with what has arrived for it, and lets go of what nobody else waits for."""
        del self._missing[number]
        self._accumulators[number].add(self._gradients(number, self._vectors, self._arrived))
        for edge in self._edges[number]:
            self._unread[edge] -= 1
            if not self._unread[edge]:
                self._arrived.pop(edge, None)
        if self._for_the_last_time:
            self.record.calls.update({k: [] for k in self._layers[number]})

    def _gradients(self, number: int, vectors: Tensor, arrived: Mapping[int, Tensor]) -> LayerGradients:
        """Returns what an accumulator reads: the gradients of its layers among those that have arrived."""
        by_layer = {
            k: [(c, c.gradients(arrived[c.edge])) for c in self.record.calls[k] if c.edge in arrived]
            for k in self._layers[number]
        }
        return LayerGradients(self.record, vectors, by_layer)

    def serve_outputs(self, vectors: Tensor, *, unit_vectors: bool) -> None:
        """Serves all accumulators with vectors that need no pass, since the only edge is that of the outputs."""
        for number, accumulator in enumerate(self._accumulators):
            gradients = self._gradients(number, vectors, {0: vectors})
            accumulator.add(LayerGradients(self.record, vectors, gradients.by_layer, unit_vectors))

    @property
    def ends_at_outputs(self) -> bool:
        """Whether the only recorded call is the one that made the outputs (a last-layer posterior)."""
        edges, calls = self.record.edges, [c for calls in self.record.calls.values() for c in calls]
        return len(calls) == 1 and len(edges) == 1 and edges[0] == get_gradient_edge(self.record.outputs)


def _gradients_together(record: ForwardRecord, vectors: Tensor, keep_graph: bool) -> Sequence[Tensor | None]:
    """Returns the gradients [v, ...] of several vectors at all edges, by PyTorch's vectorised autograd."""
    with warnings.catch_warnings():
        # A missing batching rule makes PyTorch loop inside, which is slower.
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        return torch.autograd.grad(
            record.outputs, record.edges, vectors, is_grads_batched=True, retain_graph=keep_graph, allow_unused=True
        )


class _RuleGradient(Accumulator):
    """The gradient of one layer's block as its rule gives it for every second example, and what the others received."""

    def __init__(self, layer: int):
        self.layers = (layer,)
        self.layer = layer
        self.total: Tensor | None = None
        self.others: list[Tensor] = []

    def add(self, gradients: LayerGradients) -> None:
        for call, arrived in gradients.by_layer[self.layer]:
            self.others.append(arrived[:, 1::2].abs().sum())
            total, _ = replace(call, inputs=call.inputs[::2]).fresh_rows().moments(arrived[:, ::2])
            self.total = total if self.total is None else self.total + total


def contradictions(record: ForwardRecord) -> dict[str, str]:
    """Compares the layer rules with autograd on a batch; the graph is still there afterwards.

    One random vector is back-propagated that only every second example has. The sum of an example's gradients over the
    batch must equal autograd's gradient for every parameter, and the rows of the other examples must receive nothing.

    Returns:
        The parameters whose rule does not hold, with the reason.
    """
    outputs, plan = record.outputs, record.plan
    names = list(plan.layers_of_parameter)
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(outputs.shape, generator=generator, dtype=torch.float32).to(outputs)
    vector[1::2] = 0.0
    checks = [_RuleGradient(k) for k in record.calls]
    try:
        with torch.no_grad():
            truth = BackwardPass(record, checks).run(
                vector[None], together=False, keep_graph=True, also=[plan.selected[n] for n in names]
            )
    except CheckpointError as mismatch:
        raise UnsupportedError(
            "a checkpointed segment of the model holds a layer whose forward pass is observed step by step "
            "(nn.MultiheadAttention), and cannot be computed again. Switch checkpointing off for the fit"
        ) from mismatch
    sums: dict[str, Tensor] = {}
    for check in checks:
        by_name = {} if check.total is None else plan.layers[check.layer].layout.split(check.total)
        for name, value in by_name.items():
            sums[name] = value if name not in sums else sums[name] + value
    others = [(check.layer, other) for check in checks for other in check.others]
    mixing = {k for (k, _), size in zip(others, norms([o for _, o in others]), strict=True) if size != 0}
    wrong = differing(sums, dict(zip(names, truth, strict=True)), outputs.dtype)
    wrong |= {n for n in names if mixing.intersection(plan.layers_of_parameter[n])}
    reason = "it is also used outside its layer's call (or the layer mixes examples)"
    return {n: reason for n in names if n in wrong}


def vectors_agree(record: ForwardRecord) -> bool:
    """Tells whether vectors that go back together give what each gives alone; the graph is still there afterwards.

    PyTorch's vectorised autograd is silently wrong for some operations, and raises for others.
    """
    outputs, edges = record.outputs, record.edges
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, *outputs.shape, generator=generator, dtype=torch.float32).to(outputs)
    try:
        together = _gradients_together(record, vectors, keep_graph=True)
    except (RuntimeError, NotImplementedError):
        return False
    alone = [torch.autograd.grad(outputs, edges, v, retain_graph=True, allow_unused=True) for v in vectors]
    in_one_pass = {f"{v}.{e}": g[v] for v in range(2) for e, g in enumerate(together) if g is not None}
    truth = {f"{v}.{e}": g for v, gradients in enumerate(alone) for e, g in enumerate(gradients)}
    return not differing(in_one_pass, truth, outputs.dtype)
