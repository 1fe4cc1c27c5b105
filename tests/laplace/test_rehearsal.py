"""What a rehearsal makes of the times that it measured, with a clock that a test sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from aftermap.batches import Batch
from aftermap.curvature.structures.base import find_structure
from aftermap.krylov import TraceEstimate
from aftermap.laplace import rehearsal
from aftermap.laplace.dimension import draws_for
from aftermap.likelihoods import Categorical
from aftermap.linalg import DenseWork


@pytest.mark.parametrize(
    ("most", "tried", "each"),
    [(1.0, [1, 1], 1.5), (10.0, [1, 4], 0.51), (20.0, [1, 4, 16], 0.51), (1e9, [1, 4, 16, 64, 100], 0.51)],
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


def test_a_busy_moment_does_not_decide_what_predictions_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, 0

    def predict(inputs: torch.Tensor, size: int) -> None:
        nonlocal now, calls
        calls += 1
        now += 100.0 if calls == 2 else 0.6

    monkeypatch.setattr(rehearsal.time, "perf_counter", lambda: now)
    assert rehearsal._grown(predict, Batch(torch.zeros(100, 2), None, None, 100), 0.5) == pytest.approx(0.6)


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


def test_decompositions_cost_squares_and_cubes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_eigh_seconds", lambda n: 3e-6 * n**2 + 2e-9 * n**3)
    rehearsal._decomposition_costs.cache_clear()
    try:
        assert rehearsal._decomposition_costs() == (pytest.approx(3e-6), pytest.approx(2e-9))
        expected = 3e-6 * (10**2 + 200**2) + 2e-9 * (10**3 + 200**3)
        assert rehearsal.decomposition_seconds([10, 200]) == pytest.approx(expected)
        assert rehearsal.decomposition_seconds([]) == 0.0
        # A noisy clock may say that large ones are cheaper than their squares: then no cube is taken off.
        monkeypatch.setattr(rehearsal, "_eigh_seconds", lambda n: 1.0)
        rehearsal._decomposition_costs.cache_clear()
        assert rehearsal._decomposition_costs() == (pytest.approx(1.0 / rehearsal._SMALL_MATRIX**2), 0.0)
    finally:
        rehearsal._decomposition_costs.cache_clear()


def test_a_fit_is_its_passes_and_what_is_done_once() -> None:
    """Two passes, of 1 s and 2 s for four examples and 2.5 s and 5 s for sixteen: 12.75 s on the average for a batch of 64."""
    points = [(4, rehearsal._Spent([1.0, 2.0], 0.9, 0.1)), (16, rehearsal._Spent([2.5, 5.0], 0.5, 0.25))]
    laplace = SimpleNamespace(structure="kron")
    assert points[-1][1].total == 8.0
    assert rehearsal._fit_seconds(laplace, points, 64, 640) == pytest.approx(0.75 + 2 * 12.75 * 10)  # type: ignore[arg-type]


@pytest.mark.parametrize("drawn", [100, 1000])
def test_the_last_pass_of_a_drawn_structure_goes_over_its_examples(drawn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass goes over all 640 data, the last over those that were drawn; dense work is on all of their directions."""
    work = []
    monkeypatch.setattr(rehearsal, "dense_seconds", lambda asked: work.append(asked) or 7.0)
    points = [(16, rehearsal._Spent([2.0, 4.0], 0.5, 0.25))]
    factors = SimpleNamespace(n_params=5000, n_outputs=3, curvature="exact")
    laplace = SimpleNamespace(
        structure="subset", subset_size=drawn, rank=None, factors=factors, base_likelihood=Categorical()
    )
    seconds = rehearsal._fit_seconds(laplace, points, 64, 640)  # type: ignore[arg-type]
    count = min(drawn, 640)
    assert seconds == pytest.approx(0.5 + 2.0 / 16 * 640 + 4.0 / 16 * count + 7.0)
    vectors = Categorical().columns(3)
    assert work == [find_structure("subset").drawn_work(5000, count * vectors, None)]
    # A prediction looks at directions that the rehearsal did not have: two products with each.
    assert rehearsal._missing_directions(laplace, 16, 640) == 7.0  # type: ignore[arg-type]
    assert work[-1] == DenseWork(3.0 * 5000 * (count - 16) * vectors)
    laplace.rank = 20
    rehearsal._missing_directions(laplace, 4, 640)  # type: ignore[arg-type]
    assert work[-1] == DenseWork(3.0 * 5000 * (20 - 4 * vectors))
    assert rehearsal._missing_directions(SimpleNamespace(structure="kron"), 4, 640) == 0.0  # type: ignore[arg-type]


@pytest.mark.parametrize(("gamma", "searches"), [(1e6, 1.0), (3.0, 1.0 + 3.0)])
def test_passes_for_the_effective_dimension_grow_with_the_root_of_the_data(
    gamma: float, searches: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fifty examples a search has eight passes of one second, and noise before them; a small dimension is looked for again, by more draws."""
    now, asked = [0.0], []

    def search(operator: object, *_: object, draws: int = 2, steps: int = 25, **__: object) -> tuple[object, ...]:
        asked.append((draws, steps))
        now[0] += 9.0 if draws == 2 else 27.0
        return TraceEstimate(gamma, 0.1), (gamma, gamma), 8

    monkeypatch.setattr(rehearsal, "effective_dimension", search)
    monkeypatch.setattr(rehearsal, "GGNOperator", lambda model, data, *_: data)
    monkeypatch.setattr(rehearsal.time, "perf_counter", lambda: now[0])
    posterior = SimpleNamespace(
        names=["w"], scale=torch.ones(()), prior=SimpleNamespace(vector=lambda _: torch.ones(1))
    )
    laplace = SimpleNamespace(model=None, base_likelihood=None)
    batch = Batch(torch.zeros(80, 2), torch.zeros(80), None, 80)
    seconds = rehearsal._matching_seconds(laplace, posterior, batch, 200)  # type: ignore[arg-type]
    # Two hundred data are four such batches: twice the passes, each four times as long, and five more.
    assert seconds == pytest.approx((16 * searches + 5) * 4)
    assert asked[:2] == [(2, 1), (2, 25)]
    assert [draws for draws, _ in asked[2:]] == ([] if gamma > 1e3 else [draws_for(2 * gamma)])
    # More than three hundred are not looked at, nor are there more than 25 passes.
    seconds = rehearsal._matching_seconds(laplace, posterior, batch, 10**6)  # type: ignore[arg-type]
    assert seconds == pytest.approx((min(25, 8 * 6**0.5) * searches + 5) * 6)


def test_passes_over_the_data_that_a_prediction_needs_grow_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction passes once over the data, which takes 2 s of its 3 s for each input, here and for thirty times as many data."""
    now, data = [0.0], SimpleNamespace(passes=[9.0, 9.0])

    def predict(inputs: torch.Tensor) -> None:
        now[0] += 3.0 * len(inputs)
        data.passes.append(2.0 * len(inputs))

    monkeypatch.setattr(rehearsal.time, "perf_counter", lambda: now[0])
    batch = Batch(torch.zeros(6, 2), None, None, 6)
    laplace = SimpleNamespace(predict=predict)
    found = rehearsal._seconds_per_prediction(laplace, batch, data, 30.0, 1e9)  # type: ignore[arg-type]
    assert found == pytest.approx(1.0 + 30 * 2.0)
    assert data.passes[:2] == [9.0, 9.0]  # those of the fit
