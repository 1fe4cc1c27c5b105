"""Sampling predictive: the network itself under weights drawn from the posterior.

The average is over probabilities, never over logits (MATH 1.7). The samples are a fixed ensemble when asked for, so that
predictions for different inputs, grid points or attacks are comparable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import call_model
from aftermap.curvature.functional import functional_outputs
from aftermap.errors import InputError
from aftermap.params import Params, swapped
from aftermap.posteriors import Posterior

__all__ = ["draw_weights", "outputs_under", "sampled_outputs", "weight_samples"]

# Weight samples that are alive at once (256 MB in float32).
_NUMBERS = 1 << 26


def draw_weights(posterior: Posterior, count: int, generator: torch.Generator | None = None) -> list[Params]:
    """A fixed set of weight samples, one dict each."""
    weights = posterior.sample(count, generator)
    return [{n: v[i] for n, v in weights.items()} for i in range(count)]


def weight_samples(posterior: Posterior, count: int, generator: torch.Generator | None = None) -> Iterator[Params]:
    """Weight samples one by one; they are drawn some at a time, so that memory does not grow with ``count``."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InputError(f"the number of weight samples must be a whole number of at least 1, got {count!r}")
    step = max(1, _NUMBERS // max(1, posterior.n_params))
    for start in range(0, count, step):
        yield from draw_weights(posterior, min(step, count - start), generator)


def sampled_outputs(
    model: nn.Module,
    posterior: Posterior,
    inputs: Any,
    count: int,
    generator: torch.Generator | None = None,
    weights: list[Params] | None = None,
) -> Tensor:
    """Outputs under weight samples: [S, N, ..., C]; the model's own weights come back, whatever happens.

    Args:
        model: in eval mode.
        posterior: to draw from.
        inputs: as the model takes them.
        count: S, if ``weights`` is None.
        generator: for the draws.
        weights: a fixed set from :func:`draw_weights`, used as it is.
    """
    if weights is not None:
        if not weights:
            raise InputError("weights= holds no sample; draw some with ensemble(count), or leave it at None")
        return torch.stack([outputs_under(model, each, inputs) for each in weights])
    return torch.stack([outputs_under(model, each, inputs) for each in weight_samples(posterior, count, generator)])


def outputs_under(model: nn.Module, weights: Params, inputs: Any) -> Tensor:
    """Outputs with other weights in place; with gradients on, they can be differentiated in the inputs."""
    if torch.is_grad_enabled():
        # A backward pass reads the weights late: the graph must hold these tensors, not a parameter that changes back.
        return functional_outputs(model, weights, inputs)
    with swapped(model, weights):
        return call_model(model, inputs)
