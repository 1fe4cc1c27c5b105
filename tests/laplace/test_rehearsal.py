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


def test_the_next_piece_fills_the_time_that_is_left() -> None:
    """Every example takes 1 s on two passes, and 3 s are spent beside them: 17 examples take 20 s."""
    one = rehearsal._Spent([0.5, 0.5], 3.0, 0.0)
    four = rehearsal._Spent([2.0, 2.0], 3.0, 0.0)
    assert rehearsal._next_size([(1, one), (4, four)], 100, 20.0) == 17
    assert rehearsal._next_size([(1, one), (4, four)], 9, 20.0) == 9
    assert rehearsal._next_size([(1, one), (4, four), (9, four)], 100, 20.0) == 9
    assert rehearsal._next_size([(1, one)], 100, 20.0) == 1  # the first took longer than a rehearsal should
    assert rehearsal._next_size([(1, rehearsal._Spent([0.1], 0.2, 5.0))], 100, 20.0) == 4
    assert rehearsal._next_size([(1, rehearsal._Spent([0.1], 0.2, 5.0))], 3, 20.0) == 3
