"""Sums of outer products in strips against whole matrices."""

from __future__ import annotations

import pytest
import torch

from aftermap import linalg
from aftermap.linalg import GramSum

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(autouse=True)
def narrow_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "_STRIP", 4)
    monkeypatch.setattr(linalg, "_ALIGNED", 2)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("width", [1, 3, 7, 16])
def test_everything_that_is_added_adds_up(groups: int, width: int) -> None:
    sums = GramSum(groups, width + 1, torch.float64, CPU)
    rows, one, whole = normal(groups, 5, width), normal(6, width, seed=1), normal(groups, width + 1, 2, seed=2)
    expected = torch.zeros(groups, width + 1, width + 1, dtype=torch.float64)
    sums.add(rows)
    expected[:, :width, :width] += rows.transpose(-1, -2) @ rows
    strided = normal(groups, width, 5, seed=3).transpose(-1, -2)
    sums.add(strided)
    expected[:, :width, :width] += strided.transpose(-1, -2) @ strided
    sums.add(one, groups - 1)
    expected[-1, :width, :width] += one.T @ one
    sums.add_products(whole @ whole.transpose(-1, -2))
    expected += whole @ whole.transpose(-1, -2)
    sums.add_ones(rows.sum(1), 5)
    expected[:, :width, -1] += rows.sum(1)
    expected[:, -1, :width] += rows.sum(1)
    expected[:, -1, -1] += 5
    found = sums.full()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(found, found.transpose(-1, -2))


def test_sums_in_another_dtype() -> None:
    rows = normal(1, 5, 9).float()
    sums = GramSum(1, 9, torch.float64, CPU)
    sums.add(rows)
    torch.testing.assert_close(sums.full(), (rows.transpose(-1, -2) @ rows).double())


def test_a_diagonal_is_held_as_one() -> None:
    sums = GramSum(2, 5, torch.float64, CPU, diagonal=True)
    sums.add_diagonal(normal(2, 5))
    sums.add_diagonal(normal(2, 5))
    assert not sums.strips.parts
    torch.testing.assert_close(sums.full(), 2 * normal(2, 5))


def test_little_more_than_half_is_held() -> None:
    sums = GramSum(1, 40, torch.float64, CPU)
    assert sum(s.numel() for s in sums.strips.parts) == 40 * 44 / 2
