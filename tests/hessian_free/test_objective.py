"""The batches of an objective: small ones are joined, and nothing of their data is lost, repeated or put in another order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from aftermap.batches import Batch
from aftermap.hessian_free import objective
from tests.laplace.problems import normal


def cut(sizes: list[int], weighted: bool = False) -> list[Batch]:
    """Batches of these sizes, of numbered examples."""
    x, y = normal(sum(sizes), 3), torch.arange(sum(sizes), dtype=torch.float64)[:, None]
    parts = zip(x.split(sizes), y.split(sizes), strict=True)
    return [Batch(a, b, 1 + b[:, 0] if weighted else None, len(a)) for a, b in parts]


def joined(batches: list[Batch], name: str) -> Tensor:
    return torch.cat([getattr(b, name) for b in batches])


@pytest.mark.parametrize("weighted", [False, True])
def test_small_batches_are_joined_up_to_a_size(weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "_MERGED", 10)
    batches = cut([4, 6, 1, 3, 7, 10, 12, 2], weighted)
    merged = objective._merged(batches)
    # 4 + 6 are ten, 1 + 3 + 7 would be eleven, and what is larger from the start stays as it is.
    assert [b.size for b in merged] == [10, 4, 7, 10, 12, 2]
    assert [len(b.inputs) for b in merged] == [10, 4, 7, 10, 12, 2]
    for name in ("inputs", "targets", *(("weight",) if weighted else ())):
        assert_close(joined(merged, name), joined(batches, name), rtol=0, atol=0)
    assert weighted or all(b.weight is None for b in merged)


def test_only_batches_that_are_alike_are_joined() -> None:
    one, two = cut([2, 3])
    (weighted,) = cut([4], weighted=True)
    wide = Batch(normal(2, 5), one.targets, None, 2)
    long = Batch(one.inputs, normal(2, 4), None, 2)
    nested = Batch({"x": one.inputs}, one.targets, None, 2)
    for other in (weighted, wide, long, nested):
        assert [b.size for b in objective._merged([one, other, two])] == [2, other.size, 3]
        assert [b.size for b in objective._merged([one, two, other])] == [5, other.size]
    assert objective._merged([]) == []
