from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from aftermap import metrics
from aftermap.errors import DataError, InputError, ShapeError


def test_curve_without_ties_against_brute_force() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(31, generator=generator, dtype=torch.float64)
    losses = torch.rand(31, generator=generator, dtype=torch.float64)
    curve = metrics.risk_coverage(scores, losses)
    order = scores.argsort()
    for k in range(1, 32):
        assert_close(curve.risk[k - 1], losses[order[:k]].mean())
        assert_close(curve.coverage[k - 1].item(), k / 31)
        answered = scores <= curve.thresholds[k - 1]
        assert int(answered.sum()) == k
    assert_close(metrics.aurc(scores, losses), curve.risk.mean().item())


def test_ties_are_the_mean_over_all_orders() -> None:
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    errors = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    total = torch.zeros(5, dtype=torch.float64)
    orders = list(itertools.permutations([0, 2, 3]))
    for middle in orders:
        taken = errors[[1, *middle, 4]]
        total += taken.cumsum(0) / torch.arange(1, 6)
    assert_close(metrics.risk_coverage(scores, errors).risk, total / len(orders))


def test_order_of_the_data_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(4, (40,), generator=generator).double()
    errors = torch.rand(40, generator=generator) < 0.4
    order = torch.randperm(40, generator=generator)
    assert_close(metrics.risk_coverage(scores[order], errors[order]).risk, metrics.risk_coverage(scores, errors).risk)


def test_closed_forms() -> None:
    # k errors, perfectly ranked last among n: risk (j - (n - k)) / j beyond n - k.
    n, k = 10, 3
    scores = torch.arange(n)
    errors = scores >= n - k
    expected = sum((j - (n - k)) / j for j in range(n - k + 1, n + 1)) / n
    assert_close(metrics.aurc(scores, errors), expected)
    assert_close(metrics.aurc(torch.zeros(n), errors), k / n)
    assert metrics.accuracy_at_coverage(scores, errors, coverage=0.7) == 1.0
    assert_close(metrics.accuracy_at_coverage(scores, errors), 7 / 8)
    assert_close(metrics.accuracy_at_coverage(scores, errors, coverage=1.0), 0.7)
    assert metrics.aurc(scores, errors) < metrics.aurc(torch.zeros(n), errors) < metrics.aurc(-scores, errors)


def test_coverage_that_rounds_above_a_whole_number_takes_no_extra_example() -> None:
    assert math.ceil(0.55 * 100) == 56
    errors = torch.arange(100) >= 55
    assert metrics.accuracy_at_coverage(torch.arange(100), errors, coverage=0.55) == 1.0
    assert metrics.accuracy_at_coverage(torch.arange(100), errors, coverage=1e-6) == 1.0


def brute_augrc(scores: torch.Tensor, losses: torch.Tensor) -> float:
    """Every threshold between distinct scores: the loss of what is answered over all N, joined by straight lines."""
    points = [(0.0, 0.0)]
    for threshold in sorted(set(scores.tolist())):
        answered = scores <= threshold
        points.append((answered.double().mean().item(), losses[answered].sum().item() / len(scores)))
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))


@pytest.mark.parametrize("levels", [3, 7, 10_000])
def test_augrc_against_brute_force(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    scores = torch.randint(levels, (41,), generator=generator).double()
    losses = torch.rand(41, generator=generator, dtype=torch.float64)
    wrong = losses < 0.3
    assert_close(metrics.augrc(scores, losses), brute_augrc(scores, losses))
    assert_close(metrics.augrc(scores, wrong), brute_augrc(scores, wrong.double()))
    order = torch.randperm(41, generator=generator)
    assert_close(metrics.augrc(scores[order], losses[order]), metrics.augrc(scores, losses))
    rate = wrong.double().mean().item()
    expected = (1 - metrics.auroc(scores, wrong)) * rate * (1 - rate) + rate**2 / 2
    assert_close(metrics.augrc(scores, wrong), expected)


def test_augrc_with_ties_is_the_mean_over_all_orders() -> None:
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    errors = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    orders = list(itertools.permutations([0, 2, 3]))
    distinct = torch.arange(5.0, dtype=torch.float64)
    areas = [brute_augrc(distinct, errors[[1, *middle, 4]]) for middle in orders]
    assert_close(metrics.augrc(scores, errors), sum(areas) / len(areas))


def test_augrc_closed_forms() -> None:
    n, k = 10, 3
    scores = torch.arange(n)
    errors = scores >= n - k
    assert_close(metrics.augrc(scores, errors), (k / n) ** 2 / 2)  # perfect
    assert_close(metrics.augrc(torch.zeros(n), errors), k / n / 2)  # no order at all
    assert metrics.augrc(scores, torch.zeros(n)) == 0.0
    curve = metrics.risk_coverage(scores, errors)
    assert_close(curve.generalised_risk[-1].item(), k / n)
    assert_close(curve.generalised_area, metrics.augrc(scores, errors))


def test_bad_input() -> None:
    with pytest.raises(DataError, match="scores is empty"):
        metrics.risk_coverage([], [])
    with pytest.raises(DataError, match="scores holds 1 NaN"):
        metrics.aurc([math.nan, 0.0], [True, False])
    with pytest.raises(DataError, match="scores holds 1 NaN"):
        metrics.augrc([math.nan, 0.0], [True, False])
    with pytest.raises(DataError, match="errors holds 1 NaN or infinite"):
        metrics.aurc([0.0, 1.0], [math.inf, 0.0])
    with pytest.raises(ShapeError, match=r"scores \[2\], errors \[3\]"):
        metrics.aurc([0.0, 1.0], [True, False, True])
    with pytest.raises(DataError, match=r"errors must be booleans .* got 0\.5"):
        metrics.accuracy_at_coverage([0.0, 1.0], [0.5, 0.0])
    with pytest.raises(InputError, match=r"coverage=80 must lie in \(0, 1\]"):
        metrics.accuracy_at_coverage([0.0, 1.0], [True, False], coverage=80)
