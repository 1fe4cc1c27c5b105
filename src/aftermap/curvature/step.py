"""One batch as the consumers see it: rows and gradients per site, per-example gradients per parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Batch
from aftermap.curvature.attention import PackedProjectionRule
from aftermap.curvature.capture import Call, backpropagate, last_edges
from aftermap.curvature.fallback import per_example_products
from aftermap.curvature.rows import Rows
from aftermap.curvature.sites import Site, Sites
from aftermap.errors import UnsupportedError

__all__ = ["ArrangedCall", "BatchStep", "VectorStep", "arrange"]


@dataclass
class ArrangedCall:
    """A call whose input has the batch as its first dimension; rows are made when first asked for.

    Attributes:
        pick: takes the gradient [v, *output] at the call's edge to [v, b, ...].
        edge: number of the edge.
        reused: several vectors will meet the rows.
    """

    site: Site
    call: Call
    inputs: Tensor
    space: tuple[int, ...]
    pick: Callable[[Tensor], Tensor]
    edge: int
    reused: bool = False
    _rows: Rows | None = field(default=None, repr=False)

    @property
    def rows(self) -> Rows:
        """Input rows, kept for the next vector."""
        if self._rows is None:
            rows = self.fresh_rows()
            self._rows = rows.for_reuse() if self.reused else rows
        return self._rows

    def fresh_rows(self) -> Rows:
        """Input rows, not kept: for what is done once per batch."""
        if self.site.reads_inputs:
            self.call.check_unchanged()
        rule, group = self.site.rule, self.call.group
        if group is not None and isinstance(rule, PackedProjectionRule):
            return rule.rows_of_group(self.inputs, group, self.site.named)
        return rule.rows(self.call.module, self.inputs, self.space, self.site.named)

    def grads(self, raw: Tensor) -> Tensor:
        """Gradient at the edge as [v, b, g, t, o]."""
        rule, group = self.site.rule, self.call.group
        picked = self.pick(raw)
        if group is not None and isinstance(rule, PackedProjectionRule):
            return rule.grads_of_group(picked, group)
        return rule.grads(self.call.module, picked)


def arrange(call: Call, site: Site, edge: int, axis: int, batch: int) -> Iterator[ArrangedCall]:
    """Brings a call to batch-first form.

    Args:
        call: as it was recorded.
        site: its site.
        edge: number of its edge.
        batch: how many examples there are.
        axis: which dimension of input and output holds the batch. Along axis 0 an example may own several consecutive
            rows (tokens or frames folded into the batch): they become shared positions, or calls of their own.
    """
    inputs, shape = call.inputs, call.out_shape
    if axis == 1:
        space = (shape[0], *shape[2:])
        yield ArrangedCall(site, call, inputs.movedim(1, 0), space, lambda raw: raw.movedim(2, 1), edge)
        return
    fold = shape[0] // batch
    if fold == 1:
        yield ArrangedCall(site, call, inputs, shape[1:], lambda raw: raw, edge)
        return
    unfolded = inputs.unflatten(0, (batch, fold))
    if site.rule.leading:
        pick = lambda raw: raw.unflatten(1, (batch, fold))  # noqa: E731
        yield ArrangedCall(site, call, unfolded, (fold, *shape[1:]), pick, edge)
        return
    for part in range(fold):

        def pick_part(raw: Tensor, part: int = part) -> Tensor:
            return raw.unflatten(1, (batch, fold))[:, :, part]

        yield ArrangedCall(site, call, unfolded[:, part], shape[1:], pick_part, edge)


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
