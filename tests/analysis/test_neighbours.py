"""Neighbours in the features before the last layer, against distances by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aftermap.analysis import nearest_examples
from aftermap.errors import DataError


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def data(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, generator=generator, dtype=torch.float64), torch.arange(n) % 2


def test_neighbours_are_the_nearest_in_the_features() -> None:
    net, (x, y) = network(), data(40)
    asked = x[:4] + 0.3
    found = nearest_examples(net, [(x[:25], y[:25]), (x[25:], y[25:])], asked, count=3)
    features = net[:2]
    distances = (features(asked)[:, None] - features(x)[None]).norm(dim=2).detach()
    nearest = distances.sort(1)
    torch.testing.assert_close(found.indices, nearest.indices[:, :3])
    torch.testing.assert_close(found.distances, nearest.values[:, :3], rtol=1e-6, atol=1e-7)
    assert found.inputs is not None
    assert found.targets is not None
    torch.testing.assert_close(found.inputs, x[nearest.indices[:, :3]])
    torch.testing.assert_close(found.targets, y[nearest.indices[:, :3]])
    between = (features(x)[:, None] - features(x)[None]).norm(dim=2).detach()
    between.fill_diagonal_(torch.inf)
    assert found.typical == pytest.approx(float(between.min(1).values.median()), rel=1e-6)


def test_neighbours_leave_the_network_alone() -> None:
    net, (x, y) = network().train(), data(10)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    nearest_examples(net, [(x, y)], x[:2])
    assert net.training
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks for m in net.modules())
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_too_few_training_examples_are_refused() -> None:
    x, y = data(2)
    with pytest.raises(DataError, match="hold 2 examples, fewer than the 3 neighbours"):
        nearest_examples(network(), [(x, y)], x)
