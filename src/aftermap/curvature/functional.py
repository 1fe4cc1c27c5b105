"""A forward pass as a pure function of chosen parameters: nothing of the user's model is written to."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from aftermap.batches import call_model
from aftermap.errors import InputError
from aftermap.params import Params

__all__ = ["chosen_parameters", "evaluating", "functional_outputs", "prepare_forward_mode"]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; every module gets its training flag back, whatever happens inside.

    Fused attention kernels have no forward-mode and no second derivatives, so the plain one is used
    meanwhile.

    >>> net = nn.Dropout(0.5)
    >>> with evaluating(net):
    ...     net.training
    False
    >>> net.training
    True
    """
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for module, training in flags:
            module.training = training


def chosen_parameters(model: nn.Module, names: Sequence[str] | None) -> Params:
    """The named parameters, detached, in the order of `names`; None means all that require a gradient.

    Raises:
        InputError: a name is unknown or named twice, or nothing is chosen.

    >>> list(chosen_parameters(nn.Linear(2, 3), None))
    ['weight', 'bias']
    """
    available = dict(model.named_parameters())
    if names is None:
        names = [name for name, p in available.items() if p.requires_grad]
    wrong = [name for name in names if name not in available] or [n for n in names if list(names).count(n) > 1]
    if wrong or not names:
        raise InputError(f"got parameter names {wrong or list(names)}; choose some, each once, among {list(available)}")
    return {name: available[name].detach() for name in names}


def functional_outputs(model: nn.Module, params: Params, inputs: Any) -> Tensor:
    """Outputs [N, ..., C] of the model with `params` in place; buffers are copies, so none can change."""
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}

    def call(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(model, {**buffers, **params}, args, kwargs)

    return call_model(call, inputs)


@functools.cache
def prepare_forward_mode() -> None:
    """Load torch's forward-mode rules once: torch warns of its own deprecations while it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))
