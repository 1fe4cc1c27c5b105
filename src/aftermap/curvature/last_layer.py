"""Finds the last layer of a network by running it: the module whose output is the network's output."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from aftermap.batches import Batch, call_model, take
from aftermap.curvature.capture import capture, gradients_for
from aftermap.curvature.sites import find_sites
from aftermap.errors import UnsupportedError
from aftermap.params import named_parameters

__all__ = ["find_last_layer"]


def find_last_layer(model: nn.Module, batch: Batch) -> list[str]:
    """Names of the parameters of the last layer with a weight matrix.

    It is the layer whose output is returned as it is; failing that (a reshape or a scale follows), the last one called.

    Raises:
        UnsupportedError: no layer with a weight matrix was called.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> find_last_layer(net, Batch(torch.zeros(1, 2), None, None, 1))
    ['2.weight', '2.bias']
    """
    names = [n for n, p in named_parameters(model).items() if p.is_floating_point()]
    sites = find_sites(model, names)
    with gradients_for(model, names), capture(sites) as calls:
        outputs = call_model(model, take(batch.inputs, torch.arange(1), batch.size))
    matrix = [c for c in calls if sites.sites[c.site].rule.matrix]
    if not matrix:
        raise UnsupportedError(
            "params='last_layer' found no layer with a weight matrix in the forward pass; name the parameters with params=[...]"
        )
    edge = get_gradient_edge(outputs)
    last = next((c for c in matrix if c.edge == edge), matrix[-1])
    return list(sites.sites[last.site].layout.names)
