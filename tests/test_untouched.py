"""Whatever a user calls: nothing of the network changes, and random numbers of others stay the same.

Modes, parameters, buffers, gradients, flags, attributes and hooks of the network, and the state of PyTorch's and Python's generators.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.baselines import KNN, Deterministic, Energy, MCDropout, Particles
from aftermap.errors import AftermapError
from aftermap.evaluation import evaluate
from aftermap.hessian_free import HessianFree
from aftermap.laplace import Laplace
from aftermap.optim import IVON, VOGN
from aftermap.testing import ModelSnapshot, check_unchanged


class Signs(nn.Module):
    """Multiplies by a tensor that is made anew in every call, which torch.fx keeps in the network that it traces."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)


def network() -> nn.Module:
    """With BatchNorm statistics that have moved, dropout, a layer that has two names, a frozen weight, a hook and a gradient of the user's own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, twice, last = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        net = nn.Sequential(first, nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), twice, Signs(), twice, last).double()
        net(torch.randn(20, 3, dtype=torch.float64)).square().sum().backward()
    net[0].bias.requires_grad_(False)  # type: ignore[union-attr]
    net[2].register_forward_hook(lambda module, inputs, output: None)
    return net


def data() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [(x[:16], torch.arange(16) % 4), (x[16:], torch.arange(8) % 4)]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def fitted(net: nn.Module, **options: Any) -> Laplace:
    return Laplace(net, "classification", **options).fit(data(), progress=False, generator=seeded())


X = data()[0][0]
# What the network must be in before the call, and the call itself.
ENTRIES: dict[str, Callable[[nn.Module], object]] = {
    "am.fit with validation data": lambda net: am.fit(net, data(), data()[1:] * 3, verbose=False),
    "am.fit without": lambda net: am.fit(net, "classification", data(), verbose=False),
    **{
        f"Laplace.fit {s}": lambda net, s=s: fitted(net, structure=s, prior_precision=1e3)
        for s in ("kron", "ekfac", "kfra", "diagonal", "full", "low_rank", "subset", "hessian", "matrix_free")
    },
    "Laplace.fit of the last layer": lambda net: fitted(net, params="last_layer"),
    "Laplace.tune with labels": lambda net: fitted(net).tune(data(), generator=seeded()),
    "Laplace.tune without": lambda net: fitted(net).tune(generator=seeded()),
    "Laplace.tune by a grid": lambda net: fitted(net).tune(data(), method="grid", generator=seeded()),
    **{
        f"Laplace.predict {k}": lambda net, k=k: fitted(net).predict(X, kind=k, samples=3, generator=seeded())
        for k in ("linearised", "margin", "sampling")
    },
    "Laplace.predict of a list": lambda net: fitted(net).predict(data(), generator=seeded(), progress=False),
    "Laplace.where": lambda net: fitted(net).where(data()),
    "Laplace.sample": lambda net: fitted(net).sample(3, seeded()),
    "Laplace.joint": lambda net: fitted(net).joint(X),
    "Laplace.function_samples": lambda net: fitted(net).function_samples(X, 3, seeded()),
    "Laplace.variance_by_layer": lambda net: fitted(net).variance_by_layer(X),
    "Laplace.log_evidence": lambda net: fitted(net).log_evidence(),
    "Deterministic": lambda net: Deterministic(net).predict(X),
    "MCDropout": lambda net: MCDropout(net).predict(X, samples=3, generator=seeded()),
    "Particles": lambda net: Particles(net, fitted(net).ensemble(3, seeded())).predict(X),
    "Energy": lambda net: Energy(net).score(X),
    "KNN": lambda net: KNN(net, k=3).fit(data()).score(X),
    "evaluate": lambda net: evaluate(
        fitted(net), data(), ood={"far": [(9 * X, None)]}, options={"generator": seeded()}, n_resamples=3
    ),
    "posterior of VOGN": lambda net: (
        VOGN(net, n_data=24, initial_curvature=1.0, generator=seeded())
        .posterior("classification")
        .predict(X, samples=2, generator=seeded())
    ),
    "posterior of IVON": lambda net: (
        IVON(net, n_data=24, generator=seeded()).posterior("classification").predict(X, samples=2, generator=seeded())
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # the network is not trained, and the data are few
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_nothing_of_the_users_changes(entry: str, mode: str) -> None:
    net = network().train(mode == "train")
    before = ModelSnapshot.of(net)
    torch.manual_seed(5)
    states = torch.get_rng_state(), random.getstate()
    refusal = ""
    try:
        ENTRIES[entry](net)
    except AftermapError as error:
        refusal = str(error)
    # A network in training mode may be refused, and nothing else.
    assert not refusal or (mode == "train" and "training mode" in refusal), refusal
    check_unchanged(net, before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_hessian_free_works_on_copies() -> None:
    net = network().eval()
    before, state = ModelSnapshot.of(net), torch.get_rng_state()
    HessianFree(net, "classification", params="last_layer", prior_precision=5.0).fit(data(), force=True)
    check_unchanged(net, before)
    assert torch.equal(state, torch.get_rng_state())
