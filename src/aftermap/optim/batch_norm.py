"""Running statistics of BatchNorm layers for the mean or for a draw of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from aftermap.batches import Unpack, call_model, check_device, iterate

__all__ = ["update_bn"]


@torch.no_grad()
def update_bn(model: nn.Module, data: Iterable[Any], *, unpack: Unpack | None = None) -> None:
    """Sets the running statistics of every BatchNorm layer to those of ``data`` under the present weights.

    While training with drawn weights, running statistics are averages over draws. They serve the posterior's average well;
    for the mean alone, or for one draw that is to be kept, they should be made anew: each layer's mean and variance become the
    plain averages over the batches.

    Args:
        model: any network; modes and momenta are as before afterwards.
        data: batches: a DataLoader or a list of (x, y).
        unpack: turns a batch of another form into (inputs, targets).

    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    >>> update_bn(net, [(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.zeros(2))])
    >>> net[0].running_mean
    tensor([2., 4.])
    """
    norms = [
        m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
    ]
    if not norms:
        return
    device, dtype = check_device(model)
    with _averaging(model, norms):
        for batch in iterate(data, device=device, dtype=dtype, unpack=unpack):
            call_model(model, batch.inputs)


@contextmanager
def _averaging(model: nn.Module, norms: list[nn.modules.batchnorm._BatchNorm]) -> Iterator[None]:
    """Inside, only the BatchNorm layers train, with a cumulative average from zero."""
    modes = [(m, m.training) for m in model.modules()]
    momenta = [m.momentum for m in norms]
    try:
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
            norm.train()
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, mode in modes:
            module.training = mode
