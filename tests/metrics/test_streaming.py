from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close

from aftermap import metrics
from aftermap.errors import DataError, InputError, NotFittedError
from aftermap.metrics import Streaming

GENERATOR = torch.Generator().manual_seed(0)
N = 97
PROBS = torch.randn(N, 5, generator=GENERATOR, dtype=torch.float64).mul(2).softmax(-1)
LABELS = torch.randint(5, (N,), generator=GENERATOR)
MEAN = torch.randn(N, 3, generator=GENERATOR, dtype=torch.float64)
VARIANCE = 0.1 + torch.rand(N, 3, generator=GENERATOR, dtype=torch.float64)
TARGETS = MEAN + torch.randn(N, 3, generator=GENERATOR, dtype=torch.float64)
LOWER, UPPER = metrics.gaussian_interval(MEAN, VARIANCE, level=0.8)
SCORES = torch.randint(9, (N,), generator=GENERATOR).double()
POSITIVE = SCORES + 3 * torch.randn(N, generator=GENERATOR, dtype=torch.float64) > 5

CASES: dict[str, tuple[Callable[[], Streaming], Callable[..., float], tuple[torch.Tensor, ...]]] = {
    "accuracy": (metrics.StreamingAccuracy, metrics.accuracy, (PROBS, LABELS)),
    "nll": (metrics.StreamingNLL, metrics.nll, (PROBS, LABELS)),
    "brier": (metrics.StreamingBrier, metrics.brier, (PROBS, LABELS)),
    "ece": (metrics.StreamingECE, metrics.ece, (PROBS, LABELS)),
    "rmse": (metrics.StreamingRMSE, metrics.rmse, (MEAN, TARGETS)),
    "gaussian_nll": (metrics.StreamingGaussianNLL, metrics.gaussian_nll, (MEAN, VARIANCE, TARGETS)),
    "coverage": (metrics.StreamingCoverage, metrics.coverage, (LOWER, UPPER, TARGETS)),
    # Whole scores with a bin for each: binning loses nothing, so the result is exact.
    "auroc": (lambda: metrics.StreamingAUROC(-0.5, 8.5, 9), metrics.auroc, (SCORES, POSITIVE)),
}


def batches(data: tuple[torch.Tensor, ...], sizes: list[int]) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(tensor.split(sizes) for tensor in data), strict=True))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sizes", [[97], [1, 40, 0, 53, 3], [1] * 97])
def test_any_split_gives_the_metric_of_the_whole(name: str, sizes: list[int]) -> None:
    make, metric, data = CASES[name]
    stream = make()
    for batch in batches(data, sizes):
        assert stream.update(*batch) is stream
    assert_close(stream.result(), metric(*data), rtol=1e-12, atol=1e-12)
    assert stream.count == (N * 3 if name in ("rmse", "coverage") else N)


@pytest.mark.parametrize("name", CASES)
def test_merge_and_summed_states_of_ranks(name: str) -> None:
    make, metric, data = CASES[name]
    first, second, idle = make(), make(), make()
    part_a, part_b = batches(data, [60, 37])
    first.update(*part_a)
    second.update(*part_b)
    alone = first.result()
    merged = first.merge(second).merge(idle)
    assert_close(merged.result(), metric(*data), rtol=1e-12, atol=1e-12)
    assert first.result() == alone
    states = [stream.state() for stream in (first, second, idle)]
    assert all(value.dtype == torch.float64 for state in states for value in state.values())
    total = {key: sum(state[key] for state in states) for key in states[0]}
    assert_close(make().with_state(total).result(), merged.result(), rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_states_are_copies_and_reset_forgets(name: str) -> None:
    make, metric, data = CASES[name]
    stream = make().update(*data)
    state = stream.state()
    resumed = make().with_state(state)
    for value in state.values():
        value.fill_(7.0)
    assert_close(stream.result(), metric(*data), rtol=1e-12, atol=1e-12)
    assert_close(resumed.result(), metric(*data), rtol=1e-12, atol=1e-12)
    resumed.update(*data)
    assert resumed.count == 2 * stream.count
    # A metric reused without reset drifts; after it, nothing is left.
    assert stream.reset().count == 0
    with pytest.raises(NotFittedError, match=r"has seen no data. Call update"):
        stream.result()


def test_a_refused_batch_leaves_the_sums_as_they_were() -> None:
    stream = metrics.StreamingNLL().update(PROBS, LABELS)
    before = stream.state()
    with pytest.raises(DataError, match="sum to one"):
        stream.update(2 * PROBS, LABELS)
    assert_close(stream.state(), before, rtol=0, atol=0)


def test_ece_gives_its_bins() -> None:
    stream = metrics.StreamingECE(n_bins=7).update(PROBS[:50], LABELS[:50]).update(PROBS[50:], LABELS[50:])
    bins, whole = stream.bins(), metrics.reliability_bins(PROBS, LABELS, n_bins=7)
    assert_close(bins.count, whole.count)
    assert_close(bins.accuracy, whole.accuracy, equal_nan=True)
    assert_close(bins.confidence, whole.confidence, equal_nan=True)


@pytest.mark.parametrize("n_bins", [1, 3, 20, 500])
def test_binned_auroc_is_within_its_bound(n_bins: int) -> None:
    generator = torch.Generator().manual_seed(n_bins)
    positive = torch.rand(301, generator=generator) < 0.4
    scores = torch.randn(301, generator=generator, dtype=torch.float64) + positive
    stream = metrics.StreamingAUROC(-2.0, 2.0, n_bins).update(scores, positive)
    assert abs(stream.result() - metrics.auroc(scores, positive)) <= stream.error_bound() + 1e-12
    assert_close(stream.resolution, 4.0 / n_bins)
    if n_bins == 1:
        assert stream.result() == 0.5
        assert stream.error_bound() == 0.5


def test_a_range_that_is_too_small_shows_in_the_bound() -> None:
    positive = torch.arange(400) % 3 == 0
    scores = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + positive
    wide, narrow = metrics.StreamingAUROC(-6.0, 6.0), metrics.StreamingAUROC(-0.2, 0.2)
    exact = metrics.auroc(scores, positive)
    assert wide.update(scores, positive).error_bound() < 1e-3
    assert narrow.update(scores, positive).error_bound() > 0.1
    assert abs(narrow.result() - exact) <= narrow.error_bound()
    assert_close(wide.result(), exact, atol=1e-3, rtol=0)


def test_binned_auroc_bound_is_reached() -> None:
    stream = metrics.StreamingAUROC(0.0, 1.0, 2).update([0.1, 0.2], [False, True])
    assert stream.result() == 0.5
    assert abs(metrics.auroc([0.1, 0.2], [False, True]) - stream.result()) == stream.error_bound()


def test_bad_input() -> None:
    with pytest.raises(DataError, match="got 0 positive and 2 negative"):
        metrics.StreamingAUROC(0.0, 1.0).update([0.1, 0.2], [0, 0]).result()
    with pytest.raises(DataError, match="scores holds 1 NaN"):
        metrics.StreamingAUROC(0.0, 1.0).update([math.nan], [0])
    for low, high in ((1.0, 1.0), (math.nan, 1.0), (0.0, math.inf)):
        with pytest.raises(InputError, match="low must be below high and both finite"):
            metrics.StreamingAUROC(low, high)
    with pytest.raises(InputError, match="n_bins=0 must be a whole number"):
        metrics.StreamingECE(0)
    with pytest.raises(InputError, match=r"same class and settings .* StreamingECE\(15,\) and StreamingECE\(10,\)"):
        metrics.StreamingECE().merge(metrics.StreamingECE(10))
    with pytest.raises(InputError, match="same class and settings"):
        metrics.StreamingNLL().merge(metrics.StreamingBrier())
    with pytest.raises(InputError, match=r"the state does not fit StreamingECE: expected .*\[15\].* got .*\[10\]"):
        metrics.StreamingECE().with_state(metrics.StreamingECE(10).state())
    with pytest.raises(NotFittedError, match="StreamingNLL has seen no data"):
        metrics.StreamingNLL().result()
