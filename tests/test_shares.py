"""How work and samples are shared out over processes, without starting any: who does what is arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aftermap import distributed
from aftermap.errors import InputError


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process believe that it is one of four, which send nothing."""

    def become(rank: int) -> None:
        monkeypatch.setattr(distributed, "is_distributed", lambda: True)
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: 4)
        monkeypatch.setattr(distributed.dist, "all_reduce", lambda tensor: None)
        monkeypatch.setattr(distributed.dist, "broadcast", lambda tensor, src: sources.append(src))
        monkeypatch.setattr(distributed.dist, "get_backend", lambda: "gloo")

    sources: list[int] = []
    become.sources = sources  # type: ignore[attr-defined]
    return become


def test_a_mesh_has_consecutive_ranks_in_a_group(four: Any) -> None:
    places = []
    for rank in range(4):
        four(rank)
        mesh = distributed.make_mesh(2)
        places.append((mesh.sample_rank, mesh.data_rank))
        assert (mesh.sample_size, mesh.data_size) == (2, 2)
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    with pytest.raises(InputError, match="sample_groups=3 does not divide the 4 processes; allowed: 1, 2, 4"):
        distributed.make_mesh(3)


def test_jobs_go_to_the_least_loaded_process(four: Any) -> None:
    costs = [8.0, 1.0, 5.0, 5.0, 2.0, 7.0]  # dearest first: 8 -> 0, 7 -> 1, 5 -> 2, 5 -> 3, 2 -> 2 (or 3), 1 -> 3
    done = {}
    for rank in range(4):
        four(rank)
        mine: list[int] = []
        distributed.distribute_work(
            costs, [[(1,)]] * 6, lambda i, mine=mine: mine.append(i) or [torch.ones(1)], torch.ones(1)
        )
        done[rank] = sorted(mine)
    assert done == {0: [0], 1: [5], 2: [2, 4], 3: [1, 3]}
    assert four.sources[:6] == [0, 3, 2, 3, 2, 1]


def test_the_number_that_torchrun_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert distributed.launched_rank() == 3
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert distributed.launched_rank() == 0
    monkeypatch.delenv("WORLD_SIZE")
    assert distributed.launched_rank() == 0
