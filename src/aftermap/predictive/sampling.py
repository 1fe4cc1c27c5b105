"""Sampling predictive: the network itself under weights drawn from the posterior.

The average is over probabilities, never over logits (docs/mathematics/predictive.md). The samples are a fixed ensemble when asked for, so that
predictions for different inputs, grid points or attacks are comparable.

Local reparametrisation: where a layer acts linearly on one row per example, its *output* is drawn instead of its weights.

With W = W* + U_B (Z ∘ √R) U_Aᵀ, Z standard normal, the output for an input a (with a trailing 1 for the bias) is exactly

    h = W* a + U_B (√(R ã²) ∘ ε),   ã = U_Aᵀ a,  ε ~ N(0, I)                       (Kingma, Salimans & Welling 2015, eq. 6)

with R = 1/precision in the eigenbasis [o, i] (U = I for a diagonal posterior). Every example gets noise of its own, so that
averages over a batch have a smaller variance; outputs of different examples are then independent, while each alone has the
distribution that weight samples give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.batches import Batch
from aftermap.curvature.passes.plan import CheckedPlan, Layer
from aftermap.curvature.passes.record import outputs_replaced
from aftermap.curvature.rules.base import append_ones
from aftermap.curvature.structures.base import BlockPosterior, OutputNoise
from aftermap.errors import InputError, UnsupportedError
from aftermap.models import call_model, functional_outputs, only_require_grad
from aftermap.params import Params, named_parameters, swapped
from aftermap.posteriors import GaussianPosterior, Posterior

__all__ = [
    "draw_weights",
    "locally_sampled_outputs",
    "outputs_under",
    "sampled_outputs",
    "weight_samples",
    "with_padding",
]

# This many numbers of weight samples are alive at once (256 MB in float32).
_NUMBERS = 1 << 26
_Change = Callable[[Tensor, Tensor], Tensor]


def draw_weights(posterior: Posterior, count: int, generator: torch.Generator | None = None) -> list[Params]:
    """Returns a fixed set of weight samples, one dict each."""
    weights = posterior.sample(count, generator)
    return [{n: v[i] for n, v in weights.items()} for i in range(count)]


def weight_samples(posterior: Posterior, count: int, generator: torch.Generator | None = None) -> Iterator[Params]:
    """Yields weight samples one by one; they are drawn some at a time, so that memory does not grow with ``count``."""
    count = checks.count("count", count)
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
    """Returns outputs under weight samples [S, N, ..., C]; the model's own weights come back, whatever happens.

    Args:
        model: The network in eval mode.
        posterior: The posterior to draw from.
        inputs: The inputs as the model takes them.
        count: The number S of samples, if ``weights`` is None.
        generator: The source of the random draws.
        weights: A fixed set from :func:`draw_weights`, which is used as it is.
    """
    if weights is not None:
        if not weights:
            raise InputError("weights= holds no sample; draw some with ensemble(count), or leave it at None")
        return torch.stack([outputs_under(model, draw, inputs) for draw in weights])
    return torch.stack([outputs_under(model, draw, inputs) for draw in weight_samples(posterior, count, generator)])


def outputs_under(model: nn.Module, weights: Params, inputs: Any) -> Tensor:
    """Returns outputs with other weights in place; with gradients on, they can be differentiated in the inputs.

    The padding of an embedding stays what it is in the model: it has no gradient, so that it is no random variable.
    """
    weights = with_padding(model, weights)
    if torch.is_grad_enabled():
        # A backward pass reads the weights late: the graph must hold these tensors, not a parameter that changes back.
        return functional_outputs(model, weights, inputs)
    with swapped(model, weights):
        return call_model(model, inputs)


def with_padding(model: nn.Module, weights: Params) -> Params:
    """Returns the weights with the model's own rows for padding, in a copy where there are any.

    A weight that another module shares is left as it was drawn: there the row has a gradient.
    """
    names = {id(p): n for n, p in named_parameters(model).items()}
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    changed = dict(weights)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.padding_idx is not None:
            name = names.get(id(module.weight))  # There is none for a weight that is computed from others.
            if name in changed and owners[id(module.weight)] == 1:
                padding = torch.arange(module.num_embeddings, device=module.weight.device) == module.padding_idx
                changed[name] = torch.where(padding[:, None], module.weight.detach(), changed[name])
    return changed


def locally_sampled_outputs(
    checked: CheckedPlan,
    posterior: Posterior,
    batch: Batch,
    count: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns outputs with fresh noise for every example: [S, N, ..., C].

    Linear layers with a Kronecker or diagonal block that are called once, on one row per example, draw their outputs; all other
    parameters of the posterior are drawn as weights, once per sample.

    Args:
        checked: The plan of the model, in eval mode, and of the posterior's parameters.
        posterior: A Gaussian posterior in blocks.
        batch: The batch of inputs.
        count: The number S of samples.
        generator: The source of the random draws.

    Raises:
        UnsupportedError: No layer can draw its outputs.
    """
    count = checks.count("count", count)
    if not isinstance(posterior, GaussianPosterior):
        raise UnsupportedError(
            f"local=True needs a Gaussian posterior in blocks, got a {type(posterior).__name__}; use local=False"
        )
    local = _local_layers(checked, posterior, batch)
    if not local:
        raise UnsupportedError(
            "local=True draws the outputs of Linear layers that have a Kronecker or diagonal block and are called once, on one row "
            "per example; this posterior has none. Use local=False, or structure='kron', 'ekfac' or 'diagonal'"
        )
    rest = [b for b in posterior.blocks if all(b is not block for block, _, _ in local.values())]
    changes = {module: _change(noise, layer, generator) for module, (_, layer, noise) in local.items()}
    drawn = []
    for _ in range(count):
        weights: Params = {}
        for block in rest:
            deviation = block.sample(1, generator)
            weights.update({n: posterior.mean[n] + v[0].to(posterior.mean[n].dtype) for n, v in deviation.items()})
        with outputs_replaced(changes):
            drawn.append(outputs_under(checked.model, weights, batch.inputs))
    return torch.stack(drawn)


def _local_layers(
    checked: CheckedPlan, posterior: GaussianPosterior, batch: Batch
) -> dict[nn.Module, tuple[BlockPosterior, Layer, OutputNoise]]:
    """Returns the modules whose outputs can be drawn, with their blocks."""
    with only_require_grad(checked.model, posterior.names):
        record = checked.record(batch)
    blocks = {frozenset(b.names): b for b in posterior.blocks}
    local: dict[nn.Module, tuple[BlockPosterior, Layer, OutputNoise]] = {}
    for number in record.plan.whole_layers:
        layer, calls = record.plan.layers[number], record.calls[number]
        block = blocks.get(frozenset(layer.layout.names))
        if len(calls) != 1 or "weight" not in layer.named:
            continue
        call = calls[0].call
        plain = type(call.module) is nn.Linear and call.inputs.dim() == 2 and len(call.inputs) == batch.size
        noise = block.output_noise(layer.layout) if plain and block is not None else None
        if block is not None and noise is not None:
            local[call.module] = (block, layer, noise)
    return local


def _change(noise: OutputNoise, layer: Layer, generator: torch.Generator | None) -> _Change:
    """Returns a change that adds the noise of a layer's weights to its output."""

    def change(inputs: Tensor, output: Tensor) -> Tensor:
        rows = append_ones(inputs) if "bias" in layer.named else inputs  # [b, i]
        return output + noise.draw(rows, generator)

    return change
