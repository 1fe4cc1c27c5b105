"""The cost model of a cluster: it shares work out as the library does, and the page says what was measured."""

from __future__ import annotations

import json

import pytest
import torch

from aftermap import distributed
from benchmarks.cluster import PAGE, RESULTS, extrapolated, predicted, shared, written


def test_the_page_says_what_was_measured() -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    assert written(page, found) == page, "write it with: python -m benchmarks.cluster --page-only"
    for world in ("2", "4"):
        assert found["processes"][world]["sent"] == found["formula"]


def test_the_model_shares_out_as_the_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = [5.0, 1.0, 3.0, 4.0, 2.0, 2.5, 7.0]
    done: dict[int, float] = {}
    for rank in range(3):
        fakes = {
            "is_initialized": lambda: True, "get_world_size": lambda: 3, "get_rank": lambda rank=rank: rank,
            "get_backend": lambda: "gloo", "all_reduce": lambda tensor: None, "broadcast": lambda tensor, src: None,
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(distributed.dist, name, fake)
        mine: list[int] = []

        def work(job: int, mine: list[int] = mine) -> list[torch.Tensor]:
            mine.append(job)
            return [torch.zeros(1)]

        distributed.distribute_work(costs, [[(1,)]] * len(costs), work, torch.zeros(1))
        done[rank] = sum(costs[job] for job in mine)
    assert sum(done.values()) == sum(costs)
    assert shared(costs, 3) == pytest.approx(max(done.values()) / sum(costs))


def test_one_process_is_the_measurement_and_more_are_never_slower() -> None:
    alone = {"passes": 2.0, "decompositions": 3.0}
    assert predicted(alone, 1) == alone
    assert predicted(alone, 4)["passes"] == pytest.approx(0.5)
    for by_world in extrapolated().values():
        assert by_world["1"]["sending"] == 0.0
        times = [sum(by_world[w].values()) for w in ("1", "8", "128")]
        assert times == sorted(times, reverse=True)
