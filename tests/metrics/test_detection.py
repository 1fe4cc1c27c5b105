from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from sklearn import metrics as sk
from torch.testing import assert_close

from aftermap import metrics
from aftermap.errors import DataError, InputError, ShapeError


def scored(n: int, seed: int, *, ties: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    positive = torch.rand(n, generator=generator) < 0.3
    positive[0], positive[1] = True, False
    scores = torch.randn(n, generator=generator, dtype=torch.float64) + positive
    return (scores * 2).round() if ties else scores, positive


CASES = [scored(n, seed, ties=ties) for seed, n in enumerate((5, 23, 160)) for ties in (False, True)]


@pytest.mark.parametrize("case", CASES)
def test_against_scikit_learn_and_brute_force(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    scores, positive = case
    high, low = scores[positive].unsqueeze(1), scores[~positive].unsqueeze(0)
    brute = ((high > low).double() + 0.5 * (high == low).double()).mean().item()
    assert_close(metrics.auroc(scores, positive), brute)
    assert_close(metrics.auroc(scores, positive), float(sk.roc_auc_score(positive, scores)))
    assert_close(metrics.aupr(scores, positive), float(sk.average_precision_score(positive, scores)))
    assert_close(metrics.aupr(-scores, ~positive), float(sk.average_precision_score(~positive, -scores)))
    curve = metrics.roc_curve(scores, positive)
    fpr, tpr, thresholds = sk.roc_curve(positive, scores, drop_intermediate=False)
    assert_close(curve.fpr, torch.as_tensor(fpr))
    assert_close(curve.tpr, torch.as_tensor(tpr))
    assert_close(curve.thresholds, torch.as_tensor(thresholds))
    assert_close(curve.area, brute)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tpr", [0.3, 0.95, 1.0])
def test_fpr_at_tpr_against_every_threshold(case: tuple[torch.Tensor, torch.Tensor], tpr: float) -> None:
    scores, positive = case
    rates = []
    for threshold in scores.unique():
        flagged = scores >= threshold
        if flagged[positive].double().mean() >= tpr:
            rates.append(flagged[~positive].double().mean().item())
    assert_close(metrics.fpr_at_tpr(scores, positive, tpr=tpr), min(rates))


def test_closed_forms() -> None:
    scores, positive = metrics.labelled_scores([0.1, 0.2, 0.3], [0.7, 0.9])
    assert positive.tolist() == [False, False, False, True, True]
    assert metrics.auroc(scores, positive) == 1.0
    assert metrics.aupr(scores, positive) == 1.0
    assert metrics.fpr_at_tpr(scores, positive) == 0.0
    assert metrics.auroc(-scores, positive) == 0.0
    assert metrics.fpr_at_tpr(-scores, positive) == 1.0
    constant = torch.zeros(5)
    assert metrics.auroc(constant, positive) == 0.5
    assert_close(metrics.aupr(constant, positive), 0.4)


def test_gaussian_scores_have_a_known_auroc() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = torch.randn(30_000, generator=generator, dtype=torch.float64)
    outside = 1.0 + 2.0 * torch.randn(20_000, generator=generator, dtype=torch.float64)
    expected = 0.5 * (1.0 + math.erf(1.0 / math.sqrt(5.0) / math.sqrt(2.0)))
    assert_close(metrics.auroc(*metrics.labelled_scores(inside, outside)), expected, atol=8e-3, rtol=0)


def test_invariances() -> None:
    scores, positive = scored(101, 7, ties=True)
    order = torch.randperm(101, generator=torch.Generator().manual_seed(1))
    for metric in (metrics.auroc, metrics.aupr, metrics.fpr_at_tpr):
        assert_close(metric(scores[order], positive[order]), metric(scores, positive))
        assert_close(metric((scores / 4).exp(), positive), metric(scores, positive))
    assert_close(metrics.auroc(-scores, positive), 1.0 - metrics.auroc(scores, positive))
    assert_close(metrics.auroc(scores, ~positive), 1.0 - metrics.auroc(scores, positive))


def test_infinite_scores_are_ranked() -> None:
    assert metrics.auroc([-math.inf, 0.0, 1.0, math.inf], [0, 0, 1, 1]) == 1.0


def test_flags_as_integers_and_numpy() -> None:
    scores, positive = CASES[0]
    assert_close(metrics.auroc(scores.numpy(), positive.int().numpy()), metrics.auroc(scores, positive))


DETECTORS = [metrics.auroc, metrics.aupr, metrics.roc_curve, metrics.fpr_at_tpr]


@pytest.mark.parametrize("metric", DETECTORS)
def test_bad_input(metric) -> None:
    with pytest.raises(DataError, match="got 0 positive and 3 negative"):
        metric([0.1, 0.2, 0.3], [False, False, False])
    with pytest.raises(DataError, match="got 2 positive and 0 negative"):
        metric([0.1, 0.2], [1, 1])
    with pytest.raises(DataError, match="scores is empty"):
        metric([], [])
    with pytest.raises(DataError, match=r"scores holds 1 NaN value\(s\) out of 2"):
        metric([0.1, math.nan], [True, False])
    with pytest.raises(ShapeError, match=r"scores \[2\], positive \[3\]"):
        metric([0.1, 0.2], [True, False, True])
    with pytest.raises(ShapeError, match=r"scores must be a vector \[N\]"):
        metric([[0.1, 0.2]], [True, False])
    with pytest.raises(ShapeError, match=r"positive must be a vector \[N\]"):
        metric([0.1, 0.2], [[True, False]])
    with pytest.raises(DataError, match="booleans or zeros and ones, got 2"):
        metric([0.1, 0.2], [0, 2])


@pytest.mark.parametrize("tpr", [0.0, 95, math.nan])
def test_bad_rate(tpr: float) -> None:
    with pytest.raises(InputError, match=r"tpr=.* must lie in \(0, 1\].*0\.95"):
        metrics.fpr_at_tpr([0.1, 0.2], [True, False], tpr=tpr)


def test_an_empty_outside_set_is_named() -> None:
    with pytest.raises(DataError, match="outside is empty"):
        metrics.labelled_scores([0.1], [])


@pytest.mark.parametrize("levels", [2, 5, 10_000])
def test_rank_correlation_against_scipy(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    first = torch.randint(levels, (60,), generator=generator).double()
    second = first + torch.randint(levels, (60,), generator=generator)
    found = metrics.rank_correlation(first, second)
    torch.testing.assert_close(found, float(stats.spearmanr(first, second).statistic))
    torch.testing.assert_close(metrics.rank_correlation(second, first), found)
    torch.testing.assert_close(metrics.rank_correlation(first.sqrt(), second), found)  # only the order counts
    torch.testing.assert_close(metrics.rank_correlation(-first, second), -found)


def test_rank_correlation_of_equal_orders_and_bad_input() -> None:
    values = torch.tensor([0.3, -math.inf, 4.0, 4.0, math.inf])
    assert metrics.rank_correlation(values, values) == 1.0
    assert metrics.rank_correlation(values, -values) == -1.0
    with pytest.raises(DataError, match="all values of second are equal"):
        metrics.rank_correlation([1.0, 2.0], [3.0, 3.0])
    with pytest.raises(DataError, match="first holds 1 NaN"):
        metrics.rank_correlation([math.nan, 2.0], [3.0, 4.0])
    with pytest.raises(ShapeError, match="same shape"):
        metrics.rank_correlation([1.0, 2.0, 3.0], [3.0, 4.0])
