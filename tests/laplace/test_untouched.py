"""Every way into a Laplace approximation leaves the user's network as it was, also where it refuses or the data fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aftermap.errors import InputError
from aftermap.laplace import Laplace, estimate_costs, fit
from aftermap.likelihoods import Categorical
from aftermap.testing.predictor import ModelSnapshot, check_unchanged
from tests.laplace.problems import Data, normal, seeded


def network() -> nn.Module:
    """With BatchNorm statistics, a frozen weight, and a gradient that belongs to the user."""
    net = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(48, 4)
        )
    )
    net.train()
    with torch.random.fork_rng(devices=[]):
        net(normal(20, 1, 6, 6, seed=5)).square().sum().backward()
    net[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    return net


def batches() -> Data:
    x = normal(12, 1, 6, 6, seed=6)
    return [(x[:7], torch.arange(7) % 4), (x[7:], torch.arange(5) % 4)]


class BrokenLoader:
    """Gives one batch, then fails."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield batches()[0]
        raise OSError("the disk is gone")


ENTRIES: dict[str, Callable[[nn.Module, Any], object]] = {
    "fit": lambda net, data: fit(net, data, batches(), verbose=False),
    "fit without validation": lambda net, data: fit(net, data, verbose=False),
    "estimate_costs": lambda net, data: [estimate_costs(net, data, Categorical()), list(data)],
    "Laplace": lambda net, data: Laplace(net, "classification").fit(data),
    "Laplace of the last layer": lambda net, data: Laplace(net, "classification", params="last_layer").fit(data),
    "a low-rank Laplace": lambda net, data: Laplace(net, "classification", structure="low_rank").fit(data),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_network_in_training_mode_is_refused_before_it_is_called(entry: str) -> None:
    net = network()
    before, state = ModelSnapshot.of(net), torch.get_rng_state()
    with pytest.raises(InputError, match="in training mode.*model.eval"):
        ENTRIES[entry](net, batches())
    check_unchanged(net, before)
    assert torch.equal(state, torch.get_rng_state())  # dropout drew nothing


@pytest.mark.parametrize("entry", ENTRIES)
def test_data_that_fail_leave_the_network_alone(entry: str) -> None:
    net = network().eval()
    before = ModelSnapshot.of(net)
    with pytest.raises(OSError, match="the disk is gone"):
        ENTRIES[entry](net, BrokenLoader())
    check_unchanged(net, before)


@pytest.mark.filterwarnings("ignore::aftermap.errors.StatisticalWarning")  # the network is not trained
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_fit_leaves_the_network_alone(entry: str) -> None:
    net = network().eval()
    before = ModelSnapshot.of(net)
    ENTRIES[entry](net, batches())
    check_unchanged(net, before)
    assert net[5].weight.grad is not None  # type: ignore[index, union-attr]
