"""What the brute-force functions share: one example at a time, and a forward pass that changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.errors import InputError, ShapeError

__all__ = ["Inputs", "Params", "count_examples", "example", "example_weights", "forward", "select"]

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
Params = dict[str, Tensor]


def example(inputs: Inputs, n: int) -> Inputs:
    """Example n of `inputs` as a batch of one; what is not a tensor with N rows is passed on as it is.

    >>> example((torch.arange(3), "mode"), 1)
    (tensor([1]), 'mode')
    """
    count = count_examples(inputs)

    def cut(value: Any) -> Any:
        is_batched = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == count
        return value[n : n + 1] if is_batched else value

    if isinstance(inputs, Tensor):
        return inputs[n : n + 1]
    if isinstance(inputs, Mapping):
        return {key: cut(value) for key, value in inputs.items()}
    return tuple(cut(value) for value in inputs)


def count_examples(inputs: Inputs) -> int:
    """The number of examples: the first dimension of the first tensor."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0]
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    for value in values:
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0]
    raise InputError(f"got inputs of type {type(inputs).__name__} without a tensor; pass a tensor, a tuple or a dict")


def select(model: nn.Module, names: Sequence[str] | None) -> Params:
    """The chosen parameters, detached, in the order of `names`."""
    available = dict(model.named_parameters())
    if names is None:
        names = [name for name, p in available.items() if p.requires_grad]
    missing = [name for name in names if name not in available]
    if missing or not names:
        raise InputError(f"got parameter names {missing or list(names)}; the model has {list(available)}")
    return {name: available[name].detach() for name in names}


def forward(model: nn.Module, params: Params, inputs: Inputs) -> Tensor:
    """The model's output with `params` in place; buffers are copied so that nothing of the model changes."""
    state = {name: b.detach().clone() for name, b in model.named_buffers()}
    state.update(params)
    if isinstance(inputs, Mapping):
        outputs = torch.func.functional_call(model, state, (), dict(inputs))
    else:
        args = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        outputs = torch.func.functional_call(model, state, args)
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def example_weights(weight: Tensor | None, count: int, like: Tensor) -> Tensor:
    """Per-example weights [N]; ones when there are none."""
    if weight is None:
        return torch.ones(count, dtype=like.dtype, device=like.device)
    if weight.shape != (count,):
        raise ShapeError(f"got weight of shape {tuple(weight.shape)}; pass one weight per example, shape ({count},)")
    return weight.to(like)
