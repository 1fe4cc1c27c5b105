"""One vector on its way back: every consumer is served as soon as the gradients of its layers are there.

Holding the gradients of all layers until the pass is over would double the memory of a network's activations. So an
accumulator says which sites it needs, is called when the last of their gradients has arrived, inside the backward pass,
and the gradients are let go.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aftermap.curvature.accumulate import Accumulator
from aftermap.curvature.capture import arriving_gradients
from aftermap.curvature.step import BatchStep, VectorStep

__all__ = ["deliver"]


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
