"""What a fit keeps is forgotten with the fit: a changed network is seen as it is."""

from __future__ import annotations

import torch
from torch import nn

from aftermap.curvature.fit import fit_curvature
from aftermap.curvature.rules.scale import keeping, kept


def test_nothing_outlives_its_block_and_blocks_nest() -> None:
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return len(made)

    with keeping():
        assert (kept("a", make), kept("a", make)) == (1, 1)
        with keeping():
            assert kept("a", make) == 2
        assert kept("a", make) == 1
    assert kept("a", make) == 3


def test_statistics_changed_between_fits_are_seen() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    data = [(torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 1])) for _ in range(2)]
    first = fit_curvature(net, data, "classification", structure="diagonal").diagonal()["1.weight"]
    net[1].running_mean.data += 1.0  # behind the back of autograd's version counter
    net[1].running_var.data *= 3.0
    second = fit_curvature(net, data, "classification", structure="diagonal").diagonal()["1.weight"]
    expected = fit_curvature(net, data, "classification", structure="full", params=["1.weight"]).diagonal()["1.weight"]
    torch.testing.assert_close(second, expected)
    assert not torch.allclose(first, second)
