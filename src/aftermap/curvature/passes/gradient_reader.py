"""Reading a user's closure where gradients are all that is wanted, and the loss that a closure returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from aftermap.curvature.passes.block import Block
from aftermap.curvature.passes.record import ClosureRecord, hook_model
from aftermap.errors import InputError
from aftermap.models import autograd_errors_explained

__all__ = ["ClosureStatistics", "GradientReader", "Reading", "loss_of", "with_loss"]


@dataclass
class ClosureStatistics:
    """Sums over the examples of one closure, for the loss as it was returned.

    Attributes:
        sums: The sum Σ_n g_n of each parameter; a parameter that the loss does not depend on is missing.
        squares: The sum Σ_n g_n² of each parameter; empty where nobody asked for them.
        size: The number of examples.
        blocks: For each layer number the block of its own accumulator, instead of squares.
    """

    sums: dict[str, Tensor]
    squares: dict[str, Tensor]
    size: int
    blocks: dict[int, Block] = field(default_factory=dict)


class Reading(Protocol):
    """The reading of one closure as it goes by."""

    @property
    def gradients_came(self) -> bool:
        """Whether the closure ran a backward pass itself."""

    def differentiate(self, loss: Tensor, *, keep: bool = False) -> None:
        """Runs the backward pass for a closure that did not."""

    def finish(self, *, scale: float = 1.0) -> ClosureStatistics:
        """Returns the sums, for the loss divided by ``scale``."""

    def release(self) -> None:
        """Lets go of the graph that the reading holds."""


class GradientReader:
    """Reads gradients of parameters and nothing else.

    Args:
        model: The model that tells how many examples a closure saw. With None every closure counts as one.
        parameters: The parameters by name.
    """

    def __init__(self, model: nn.Module | None, parameters: Mapping[str, Tensor]):
        self.model, self.parameters = model, dict(parameters)

    @contextmanager
    def reading(self, size: int | None = None) -> Iterator[GradientReading]:
        """Counts the model's calls inside."""
        reading = GradientReading(self, size)
        record = reading.record
        handles = () if self.model is None else hook_model(self.model, record, record.model_calls.append)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield reading
        finally:
            for handle in handles:
                handle.remove()


@dataclass
class GradientReading:
    """One closure, read by a `GradientReader`."""

    reader: GradientReader
    given_size: int | None
    record: ClosureRecord = field(default_factory=ClosureRecord)
    sums: dict[str, Tensor] = field(default_factory=dict)

    @property
    def gradients_came(self) -> bool:
        """Whether the closure ran a backward pass itself."""
        return any(p.grad is not None for p in self.reader.parameters.values())

    @property
    def size(self) -> int:
        """The number of examples, over every call of the model."""
        if self.given_size is not None:
            return self.given_size
        total = 0
        for call in self.record.model_calls:
            tensors = [
                t for t in (*call.args, *call.kwargs.values(), call.output) if isinstance(t, Tensor) and t.dim() > 0
            ]
            total += tensors[0].shape[0] if tensors else 0
        return max(1, total)

    @autograd_errors_explained()
    def differentiate(self, loss: Tensor, *, keep: bool = False) -> None:
        """Takes gradients of the loss in every parameter that requires one."""
        active = {n: p for n, p in self.reader.parameters.items() if p.requires_grad}
        # This goes through .grad, which is empty here: autograd hands that over faster than what `torch.autograd.grad`
        # returns.
        torch.autograd.backward(loss, retain_graph=keep, inputs=list(active.values()))
        self.sums = {n: p.grad for n, p in active.items() if p.grad is not None}
        for p in active.values():
            p.grad = None

    def release(self) -> None:
        """Lets go of the graph that the reading holds."""
        self.record.release()

    def finish(self, *, scale: float = 1.0) -> ClosureStatistics:
        """Returns the gradients, without squares."""
        sums = self.sums
        if not sums:
            sums = {n: p.grad.detach() for n, p in self.reader.parameters.items() if p.grad is not None}
        sums = {n: g.to_dense() if g.is_sparse else g for n, g in sums.items()}
        if scale != 1.0:
            sums = {n: g / scale for n, g in sums.items()}
        return ClosureStatistics(sums, {}, self.size)


def loss_of(result: Any) -> Tensor:
    """Returns the loss in what a closure returned: a tensor, the first of a tuple or list, or the entry "loss" of a mapping.

    Raises:
        InputError: There is no loss, or it is not a single number.

    >>> float(loss_of((torch.tensor(2.0), "logits")))
    2.0
    """
    loss = result
    if isinstance(result, tuple | list) and result:
        loss = result[0]
    elif isinstance(result, Mapping):
        loss = result.get("loss")
    if not isinstance(loss, Tensor):
        raise InputError(
            f"the closure returned {type(result).__name__}, which holds no loss. Return the loss tensor, a tuple whose first "
            'entry is the loss, or a mapping with the key "loss"'
        )
    if loss.numel() != 1:
        raise InputError(
            f"the closure's loss has shape {tuple(loss.shape)}; reduce it to one number with .mean() or .sum()"
        )
    return loss


def with_loss(result: Any, loss: Tensor) -> Any:
    """Returns what a closure returned, with another loss in the place of its own."""
    if isinstance(result, tuple | list):
        return type(result)([loss, *result[1:]]) if type(result) in (tuple, list) else (loss, *result[1:])
    if isinstance(result, Mapping):
        return {**result, "loss": loss}
    return loss
