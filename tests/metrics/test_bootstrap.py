from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch.testing import assert_close

from aftermap import metrics
from aftermap.errors import DataError, InputError, ShapeError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mean(x: torch.Tensor) -> torch.Tensor:
    return x.mean()


DATA = torch.randn(80, generator=generator(), dtype=torch.float64).exp()


def test_replicates_of_a_mean_have_the_right_mean_and_variance() -> None:
    interval = metrics.bootstrap_interval(mean, DATA, n_resamples=4000, generator=generator(1))
    assert_close(interval.estimate, DATA.mean().item())
    error = DATA.std(correction=0).item() / math.sqrt(80)
    assert_close(interval.replicates.mean().item(), interval.estimate, atol=4 * error / math.sqrt(4000), rtol=0)
    assert_close(interval.standard_error, error, rtol=6e-2, atol=0)


@pytest.mark.parametrize("method", ["percentile", "basic"])
def test_ends_against_scipy(method: str) -> None:
    interval = metrics.bootstrap_interval(
        mean, DATA, n_resamples=4000, method=method, level=0.9, generator=generator(2)
    )
    peer = stats.bootstrap(
        (DATA.numpy(),),
        lambda x, axis: x.mean(axis),
        n_resamples=4000,
        method=method,
        confidence_level=0.9,
        rng=0,
    ).confidence_interval
    width = peer.high - peer.low
    assert_close(interval.lower, float(peer.low), atol=0.06 * width, rtol=0)
    assert_close(interval.upper, float(peer.high), atol=0.06 * width, rtol=0)


def test_basic_is_percentile_mirrored_at_the_estimate() -> None:
    percentile = metrics.bootstrap_interval(mean, DATA, n_resamples=50, generator=generator(3))
    basic = metrics.bootstrap_interval(mean, DATA, n_resamples=50, method="basic", generator=generator(3))
    assert_close(percentile.replicates, basic.replicates)
    assert_close(basic.lower, 2 * basic.estimate - percentile.upper)
    assert_close(basic.upper, 2 * basic.estimate - percentile.lower)


def test_intervals_cover_the_truth_about_as_often_as_promised() -> None:
    draws = torch.randn(120, 50, generator=generator(4), dtype=torch.float64)
    hits = 0
    for i, x in enumerate(draws):
        interval = metrics.bootstrap_interval(mean, x, n_resamples=120, level=0.9, generator=generator(i))
        hits += interval.lower <= 0.0 <= interval.upper
    assert 0.8 < hits / 120 < 0.97


def test_rows_stay_together_and_the_generator_decides() -> None:
    x = torch.arange(19, dtype=torch.float64)
    pair = metrics.bootstrap_interval(metrics.rmse, x, x, n_resamples=20, generator=generator(5))
    assert (pair.replicates == 0).all()
    again = [metrics.bootstrap_interval(mean, DATA, n_resamples=20, generator=generator(6)) for _ in range(2)]
    assert_close(again[0].replicates, again[1].replicates, rtol=0, atol=0)
    other = metrics.bootstrap_interval(mean, DATA, n_resamples=20, generator=generator(7))
    assert not torch.equal(other.replicates, again[0].replicates)


def test_the_global_seed_is_left_alone_when_a_generator_is_given() -> None:
    before = torch.get_rng_state()
    metrics.bootstrap_interval(mean, DATA, n_resamples=5, generator=generator(8))
    assert torch.equal(torch.get_rng_state(), before)


def test_metrics_of_classes_and_strata_for_auroc() -> None:
    probs = torch.randn(60, 3, generator=generator(9), dtype=torch.float64).softmax(-1)
    labels = torch.randint(3, (60,), generator=generator(10))
    interval = metrics.bootstrap_interval(metrics.ece, probs.numpy(), labels.numpy(), n_resamples=30)
    assert_close(interval.estimate, metrics.ece(probs, labels))
    scores, positive = torch.arange(40.0), torch.arange(40) == 39
    with pytest.raises(DataError, match=r"the metric refused resample \d+: .*strata="):
        metrics.bootstrap_interval(metrics.auroc, scores, positive, n_resamples=200, generator=generator(11))
    kept = metrics.bootstrap_interval(metrics.auroc, scores, positive, n_resamples=50, strata=positive)
    assert (kept.replicates == 1.0).all()


def test_strata_keep_their_sizes() -> None:
    groups = torch.tensor([2] * 5 + [7] * 9)

    def share(group: torch.Tensor) -> float:
        return (group == 7).double().mean().item()

    interval = metrics.bootstrap_interval(share, groups, n_resamples=20, strata=groups)
    assert_close(interval.replicates, torch.full((20,), 9 / 14, dtype=torch.float64))


def test_bad_input() -> None:
    with pytest.raises(InputError, match="data is missing"):
        metrics.bootstrap_interval(mean)
    with pytest.raises(DataError, match="data is empty"):
        metrics.bootstrap_interval(mean, torch.zeros(0))
    with pytest.raises(ShapeError, match=r"share their first dimension, got lengths \[3, 4\]"):
        metrics.bootstrap_interval(metrics.rmse, torch.zeros(3), torch.zeros(4))
    with pytest.raises(ShapeError, match=r"strata must have shape \[80\].*got \[3\]"):
        metrics.bootstrap_interval(mean, DATA, strata=[0, 1, 1])
    with pytest.raises(InputError, match="method='bca' is not known; allowed are 'percentile', 'basic'"):
        metrics.bootstrap_interval(mean, DATA, method="bca")
    with pytest.raises(InputError, match="n_resamples=1 must be a whole number of at least 2"):
        metrics.bootstrap_interval(mean, DATA, n_resamples=1)
    with pytest.raises(InputError, match=r"level=95 must lie in \(0, 1\)"):
        metrics.bootstrap_interval(mean, DATA, level=95)
    with pytest.raises(InputError, match="the metric must return one finite number"):
        metrics.bootstrap_interval(lambda x: x, DATA)
    with pytest.raises(InputError, match="the metric must return one finite number, got nan"):
        metrics.bootstrap_interval(lambda x: math.nan, DATA)
