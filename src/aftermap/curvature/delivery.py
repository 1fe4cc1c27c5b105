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
    """Gradients that have arrived and are still waited for, and who waits for which."""

    def __init__(self, step: BatchStep, vector: Tensor, accumulators: Sequence[Accumulator]):
        self.step, self.vector = step, vector
        self.arrived: dict[int, Tensor] = {}
        self.waiting: list[tuple[Accumulator, tuple[int, ...], set[int]]] = []
        self.readers: dict[int, int] = {}
        for each in accumulators:
            sites = tuple(step.calls) if each.needs is None else tuple(s for s in each.needs if s in step.calls)
            edges = {call.edge for s in sites for call in step.calls[s]}
            self.waiting.append((each, sites, edges))
            for edge in edges:
                self.readers[edge] = self.readers.get(edge, 0) + 1
        self.missing = [set(edges) for _, _, edges in self.waiting]
        self.served = [False] * len(self.waiting)
        self.interested: dict[int, list[int]] = {}
        for number, (_, _, edges) in enumerate(self.waiting):
            for edge in edges:
                self.interested.setdefault(edge, []).append(number)

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


def deliver(step: BatchStep, vector: Tensor, accumulators: Sequence[Accumulator], *, keep: bool) -> None:
    """Back-propagates one vector and serves the accumulators on the way.

    Args:
        step: the batch after its forward pass.
        vector: [1, b, ..., c].
        accumulators: called once each, in the order in which the backward pass reaches their layers.
        keep: the graph is needed again afterwards.
    """
    desk = _Desk(step, vector, accumulators)
    if step.edges:
        arriving_gradients(step.outputs, step.edges, vector[0], desk.receive, last=step.last_edges, keep=keep)
    desk.close()
