"""One process for a long time: no growth of memory, the same numbers from many threads, copies that are the original."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftermap as am

STRUCTURES = ("kron", "ekfac", "diagonal", "full", "low_rank", "subset")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)).eval()


def data(count: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.arange(count) % 3


def fitted(structure: str = "kron") -> am.Laplace:
    la = am.Laplace(network(), "classification", structure=structure, subset_size=20)
    return la.fit([data()], generator=torch.Generator().manual_seed(0))


def resident() -> int:
    """The bytes that the process holds in memory now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize(("work", "count"), [("predict", 10_000), ("fit", 200)])
def test_memory_does_not_grow(work: str, count: int) -> None:
    la, (x, _) = fitted(), data(8)

    def once() -> None:
        if work == "predict":
            la.predict(x, link="probit")
        else:
            fitted().tune(method="evidence").predict(x, link="probit")

    for _ in range(count // 10):
        once()
    before = resident()
    for _ in range(count - count // 10):
        once()
    # One thousand bytes per prediction would be 9 MB; the allocator itself moves by a few.
    assert resident() - before < 6 << 20


@pytest.mark.parametrize("structure", STRUCTURES)
def test_threads_give_the_same_numbers(structure: str) -> None:
    la, (x, _) = fitted(structure), data(64)
    parts = x.split(8)
    expected = [la.predict(part, link="probit") for part in parts]
    fresh = fitted(structure)  # Its first predictions, which plan and remember, happen at once.
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda part: fresh.predict(part, link="probit"), list(parts) * 4))
    for number, prediction in enumerate(found):
        torch.testing.assert_close(prediction.latent_cov, expected[number % 8].latent_cov, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(prediction.mean, expected[number % 8].mean, rtol=1e-6, atol=1e-8)


def things() -> dict[str, Any]:
    """Objects that users hold."""
    la = fitted()
    net = network()
    opt = am.optim.VOGN(net, lr=0.1, n_data=40)
    x, y = data()
    opt.step(lambda: nn.functional.cross_entropy(net(x), y))
    return {
        "Laplace": la,
        "prediction": la.predict(x[:4]),
        "factors": la.factors,
        "posterior": la.posterior,
        "hyperparameters": la.hyperparameters,
        "tuning": fitted().tune(method="evidence").tuning,
        "likelihood": am.likelihoods.Categorical(ignore_index=-1),
        "trained": opt.posterior("classification"),
        "ensemble": am.Ensemble([network(), network()], "classification"),
    }


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_the_original(how: str) -> None:
    x = data(4)[0]
    for name, thing in things().items():
        again = copy.deepcopy(thing) if how == "deepcopy" else pickle.loads(pickle.dumps(thing))
        assert type(again) is type(thing), name
        if isinstance(thing, am.Laplace):
            torch.testing.assert_close(again.predict(x).latent_cov, thing.predict(x).latent_cov, rtol=0, atol=0)
        elif name == "factors":
            assert torch.equal(again.to_dense(), thing.to_dense())
        elif name == "prediction":
            assert torch.equal(again.mean, thing.mean)
        elif name in ("trained", "ensemble"):
            one, two = (
                p.predict(x, generator=torch.Generator().manual_seed(0)) if name == "trained" else p.predict(x)
                for p in (again, thing)
            )
            assert torch.equal(one.mean, two.mean)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_loader_change_nothing(method: str) -> None:
    x, y = data()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=8, num_workers=2, multiprocessing_context=method
    )
    found = am.Laplace(network(), "classification").fit(loader).factors.to_dense()
    expected = am.Laplace(network(), "classification").fit([(x, y)]).factors.to_dense()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
