"""Jacobians of the outputs, example by example and site by site: what the linearised predictive contracts.

Never a tensor [b, c, P]: outputs are back-propagated to the layers, and a consumer contracts each layer at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from aftermap.batches import Batch, call_model, take
from aftermap.curvature.capture import capture, gradients_for
from aftermap.curvature.probe import Probe, check_outputs
from aftermap.curvature.step import BatchStep, VectorStep
from aftermap.curvature.stream import is_convolutional
from aftermap.errors import InputError

__all__ = ["check_chosen", "jacobian_steps"]

# Gradients of all outputs at all layers that are alive at once (128 MB in float32).
_NUMBERS = 1 << 25


def jacobian_steps(
    model: nn.Module,
    names: Sequence[str],
    batch: Batch,
    found: Probe,
    *,
    chosen: Sequence[int] | None = None,
    numbers: int = _NUMBERS,
) -> Iterator[tuple[slice, int, Tensor, VectorStep]]:
    """Back-propagates the outputs of some examples at a time, one output position after another.

    Args:
        model: a network with outputs [N, ..., C]; unchanged afterwards.
        names: parameters of the Jacobian.
        batch: the inputs.
        found: the probe of this model and these parameters.
        chosen: which of the C outputs; None for all.
        numbers: how many gradient numbers may be alive at once: a memory knob.

    Yields:
        (examples, position, outputs [b, ..., C], step), where the step holds the gradients of the chosen outputs at that
        position: v = len(chosen) or C.
    """
    slow = is_convolutional(model)
    per_example: int | None = None
    start = 0
    with gradients_for(model, names):
        while start < batch.size:
            length = 1 if per_example is None else max(1, min(numbers // per_example, batch.size - start))
            part = slice(start, start + length)
            index = torch.arange(start, start + length)
            inputs = take(batch.inputs, index, batch.size)
            with capture(found.sites) as calls:
                outputs = call_model(model, inputs)
            check_outputs(outputs, length)
            if per_example is None:
                check_chosen(chosen, outputs.shape[-1])
                width = outputs.shape[-1] if chosen is None else len(chosen)
                alive = sum(math.prod(c.out_shape) for c in calls) + outputs[0].numel()
                per_example = max(1, width * alive)
                if batch.size > 1:
                    continue  # now the size of a chunk is known: begin again with it
            some = Batch(inputs, None, None, length)
            step = BatchStep.make(model, some, outputs, found.sites, found.by_parameter, calls, found.axes)
            for position, moved in _positions(step, chosen, batched=not slow):
                yield part, position, outputs.detach(), moved
            start += length


def check_chosen(chosen: Sequence[int] | None, width: int) -> None:
    """Raises unless the chosen outputs exist."""
    if chosen is None:
        return
    wrong = [k for k in chosen if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k < width]
    if wrong or not len(chosen):
        raise InputError(f"outputs={list(chosen)!r} must name some of the {width} outputs, 0 to {width - 1}")


def _positions(step: BatchStep, chosen: Sequence[int] | None, *, batched: bool) -> Iterator[tuple[int, VectorStep]]:
    outputs = step.outputs
    size, width = outputs.shape[0], outputs.shape[-1]
    positions = math.prod(outputs.shape[1:-1])
    index = torch.arange(width) if chosen is None else torch.as_tensor(list(chosen))
    if _is_output(step) and positions == 1 and outputs.dim() == 2:
        units = torch.eye(width, dtype=outputs.dtype, device=outputs.device)[index]
        chunk = units[:, None].expand(len(index), size, width)
        site = next(n for n, calls in step.calls.items() if calls)
        grads: dict[int, list[Any]] = {n: [] for n in step.calls}
        call = step.calls[site][0]
        grads[site] = [(call, call.grads(chunk))]
        yield 0, VectorStep(step, len(index), grads, chunk, identity=chosen is None)
        return
    for position in range(positions):
        chunk = outputs.new_zeros(len(index), size, positions, width)
        chunk[torch.arange(len(index)), :, position, index] = 1.0
        chunk = chunk.reshape(len(index), *outputs.shape)
        yield position, step.stacked(chunk, batched=batched, keep=position < positions - 1)


def _is_output(step: BatchStep) -> bool:
    """Whether the only recorded call is the one that made the outputs (a last-layer posterior)."""
    calls = [c for each in step.calls.values() for c in each]
    return len(calls) == 1 and len(step.edges) == 1 and step.edges[0] == get_gradient_edge(step.outputs)
