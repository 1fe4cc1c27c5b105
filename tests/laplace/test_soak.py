"""One process for a long time: no growth of memory, the same numbers from many threads, copies that are the original."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import aftermap as am
from tests.faults.soak import (
    COPIES,
    MOST_ERROR,
    MOST_GROWTH,
    STRUCTURES,
    WAYS,
    WORKS,
    data,
    difference,
    fitted,
    memory_growth,
    network,
    objects,
    thread_error,
    worker_error,
)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("work", list(WORKS))
def test_memory_does_not_grow(work: str) -> None:
    assert memory_growth(work, WORKS[work]) < MOST_GROWTH


@pytest.mark.parametrize("structure", STRUCTURES)
def test_threads_give_the_same_numbers(structure: str) -> None:
    assert thread_error(structure) < MOST_ERROR


@pytest.mark.filterwarnings("ignore::aftermap.errors.StatisticalWarning")
def test_copies_are_the_original() -> None:
    things = objects()
    for how, make in COPIES.items():
        for name, thing in things.items():
            assert difference(thing, make(thing)) is None, f"{how} of {name}"
    # A comparison that finds nothing would prove nothing.
    one, other = fitted(), am.Laplace(network(), "classification", prior_precision=2.0).fit([data()])
    assert difference(one, other) is not None
    again = COPIES["pickle"](things["kron"])
    x = data(4)[0]
    torch.testing.assert_close(again.predict(x).latent_cov, things["kron"].predict(x).latent_cov, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("method", WAYS)
def test_workers_give_the_same_numbers(method: str) -> None:
    assert worker_error(method) < MOST_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("method", WAYS)
def test_workers_of_a_loader_change_nothing(method: str) -> None:
    x, y = data()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=8, num_workers=2, multiprocessing_context=method
    )
    found = am.Laplace(network(), "classification").fit(loader).factors.to_dense()
    expected = am.Laplace(network(), "classification").fit([(x, y)]).factors.to_dense()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
