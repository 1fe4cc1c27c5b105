"""A noise for each output of a regression, from the residuals of the network, before there is a fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Unpack, iterate
from aftermap.distributed import all_reduce_, fail_together, world_size
from aftermap.models import call_model, check_device, explain_model_errors

__all__ = ["residual_noise"]

_EXAMPLES = 1000
_FEW = 20  # examples below which residuals say little of each output
_LEAST = 1e-3  # the least noise as a share of the targets' deviation: a network may reproduce an output exactly


def residual_noise(
    model: nn.Module,
    outputs: int,
    held_out: Iterable[Any] | None,
    training: Iterable[Any] | None,
    *,
    unpack: Unpack | None = None,
) -> Tensor | None:
    """Returns the root mean square residual of each output [C], on held-out data or, if these are too few, on training data.

    At most the first 1,000 examples of either are looked at, by each process; processes agree. Neither random numbers nor data
    that can be read only once are used up.

    Args:
        model: The network.
        outputs: The number C of outputs.
        held_out: Batches with targets, the same on every process; None for none.
        training: Batches with targets, of which every process has its part; None for none.
        unpack: What turns a batch of an unusual form into (inputs, targets).

    Returns:
        Positive numbers in float64; None where residuals cannot tell: targets of another form, too few examples, or a network that
        reproduces all of them.
    """
    for source, copies in ((held_out, world_size()), (training, 1)):
        count, noise = _of_source(model, source, outputs, unpack)
        count /= copies
        if count >= _FEW:
            # For an output that never changes and is reproduced exactly any noise will do that is not too large.
            return torch.where(noise > 0, noise, noise[noise > 0].min()) if bool((noise > 0).any()) else None
    return None


def _of_source(
    model: nn.Module, source: Iterable[Any] | None, width: int, unpack: Unpack | None
) -> tuple[float, Tensor]:
    """Returns the number of examples whose targets have the form of the outputs, and the root mean square residual of each output."""
    device, dtype = check_device(model)
    sums = torch.zeros(3, width, dtype=torch.float64)  # residuals squared, targets and targets squared
    counts = torch.zeros(2, dtype=torch.float64)  # examples and numbers of an output
    with fail_together("looking at residuals"), torch.random.fork_rng(), torch.no_grad():
        batches: Iterable[Any] = [] if source is None or isinstance(source, Iterator) else source
        for batch in iterate(batches, device=device, dtype=dtype, unpack=unpack, may_be_empty=True):
            with explain_model_errors(model, lambda given=batch.inputs: given):  # type: ignore[misc]
                outputs = call_model(model, batch.inputs)
            forms = (outputs.shape, outputs.shape[:-1]) if width == 1 else (outputs.shape,)
            if not isinstance(batch.targets, Tensor) or batch.targets.shape not in forms:
                break  # the fit says what is wrong
            y, f = (v.double().cpu().reshape(batch.size, -1, width) for v in (batch.targets, outputs))
            weight = y.new_ones(batch.size) if batch.weight is None else batch.weight.double().cpu()
            finite = (y - f).isfinite().all(-1).all(-1) & (weight > 0)
            y, f, weight = y[finite], f[finite], weight[finite]
            sums += torch.stack([torch.einsum("n,npc->c", weight, v) for v in ((y - f).square(), y, y.square())])
            counts += torch.stack([finite.sum(), weight.sum() * y.shape[1]])
            if counts[0] >= _EXAMPLES:
                break
    all_reduce_([sums, counts])
    squares, mean, second = sums / counts[1].clamp_min(torch.finfo(torch.float64).tiny)
    deviation = (second - mean.square()).clamp_min(0).sqrt()
    return float(counts[0]), torch.maximum(squares.sqrt(), _LEAST * deviation)
