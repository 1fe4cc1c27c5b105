"""What a rehearsal makes of the times that it measured, with a clock that a test sets."""

from __future__ import annotations

import pytest
import torch

from aftermap.batches import Batch
from aftermap.laplace import rehearsal


@pytest.mark.parametrize(
    ("most", "tried", "each"),
    [(1.0, [1], 1.5), (10.0, [1, 4], 0.51), (20.0, [1, 4, 16], 0.51), (1e9, [1, 4, 16, 64, 100], 0.51)],
)
def test_pieces_grow_as_long_as_there_is_time(
    most: float, tried: list[int], each: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call takes 1 s, and every example 0.5 s: the next piece is tried if the line through the last two says that it fits."""
    now, sizes = 0.0, []

    def predict(inputs: torch.Tensor, size: int) -> None:
        nonlocal now
        assert len(inputs) == size
        now += 1 + 0.5 * size
        sizes.append(size)

    monkeypatch.setattr(rehearsal.time, "perf_counter", lambda: now)
    batch = Batch(torch.zeros(100, 2), None, None, 100)
    assert rehearsal._grown(predict, batch, most) == pytest.approx(each)
    assert sizes == [1, *tried]  # The network is looked at once, before the clock counts.


def test_a_whole_batch_lies_on_the_line_through_the_last_two_pieces() -> None:
    assert rehearsal._for_batch([(4, 6.0)], 10) == pytest.approx(15.0)
    assert rehearsal._for_batch([(1, 2.0), (4, 5.0)], 10) == pytest.approx(11.0)
    assert rehearsal._for_batch([(9, 1.0), (1, 2.0), (4, 5.0)], 10) == pytest.approx(11.0)
    assert rehearsal._for_batch([(1, 2.0), (4, 5.0)], 4) == pytest.approx(5.0)
    # Examples cost something, whatever a noisy clock says: a quarter of their share at least.
    assert rehearsal._for_batch([(1, 8.0), (4, 4.0)], 12) == pytest.approx(4.0 + 0.25 * 8)
