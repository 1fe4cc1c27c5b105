from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from torch.testing import assert_close

from aftermap import metrics
from aftermap.errors import InputError

GENERATOR = torch.Generator().manual_seed(0)
PROBS = (2.0 * torch.randn(211, 4, generator=GENERATOR, dtype=torch.float64)).softmax(-1)
LABELS = torch.randint(4, (211,), generator=GENERATOR)


def binary(confidence: list[float]) -> torch.Tensor:
    top = torch.tensor(confidence, dtype=torch.float64)
    return torch.stack([top, 1.0 - top], -1)


def brute_ece(values: np.ndarray, hits: np.ndarray, n_bins: int) -> float:
    total = 0.0
    for b in range(n_bins):
        low, high = b / n_bins, (b + 1) / n_bins
        inside = (values > low) & (values <= high) if b else values <= high
        if inside.any():
            total += inside.sum() * abs(hits[inside].mean() - values[inside].mean())
    return total / len(values)


@pytest.mark.parametrize("n_bins", [1, 7, 15, 40])
def test_ece_and_classwise_ece_against_brute_force(n_bins: int) -> None:
    p, y = PROBS.numpy(), LABELS.numpy()
    expected = brute_ece(p.max(1), p.argmax(1) == y, n_bins)
    assert_close(metrics.ece(PROBS, LABELS, n_bins=n_bins), float(expected))
    classwise = np.mean([brute_ece(p[:, k], y == k, n_bins) for k in range(4)])
    assert_close(metrics.classwise_ece(PROBS, LABELS, n_bins=n_bins), float(classwise))


def test_bins_against_scikit_learn() -> None:
    bins = metrics.reliability_bins(PROBS, LABELS, n_bins=8)
    correct = ~metrics.misclassified(PROBS, LABELS)
    accuracy, confidence = calibration_curve(correct, PROBS.max(-1).values, n_bins=8)
    used = bins.count > 0
    assert_close(bins.accuracy[used], torch.as_tensor(accuracy))
    assert_close(bins.confidence[used], torch.as_tensor(confidence))
    assert bins.accuracy[~used].isnan().all()
    assert bins.count.sum() == 211
    assert_close(bins.weight.sum().item(), 1.0)


def test_the_top_bin_is_closed_at_one_and_not_an_extra_bin() -> None:
    # 0.98 right and 1.0 wrong share the last bin: their errors partly cancel, which an extra bin would hide.
    bins = metrics.reliability_bins(binary([0.98, 1.0]), [0, 1])
    assert bins.count.shape == (15,)
    assert bins.count[-1] == 2
    assert_close(bins.ece, 0.99 - 0.5)
    # Alone, a confidence of one is counted too, not dropped.
    assert metrics.ece(binary([1.0]), [1]) == 1.0
    # A sum that rounds above one stays in the last bin.
    assert metrics.reliability_bins([[1.00005, 0.0]], [0]).count[-1] == 1


def test_bins_are_open_left_and_closed_right() -> None:
    bins = metrics.reliability_bins(binary([0.5, 0.75, 0.75, 1.0]), [0, 0, 1, 0], n_bins=4)
    assert_close(bins.count, torch.tensor([0, 1, 2, 1], dtype=torch.float64))
    assert_close(bins.lower, torch.tensor([0, 0.25, 0.5, 0.75], dtype=torch.float64))
    assert_close(bins.upper, torch.tensor([0.25, 0.5, 0.75, 1.0], dtype=torch.float64))


def test_a_probability_of_zero_belongs_to_the_first_bin_of_its_class() -> None:
    # Class 1 is always given 0 and always true: its error and that of class 0 are both 1.
    assert metrics.classwise_ece([[1.0, 0.0], [1.0, 0.0]], [1, 1]) == 1.0


def test_mce_and_signed_error() -> None:
    probs, labels = binary([0.95, 0.95, 0.55, 0.55]), [0, 0, 0, 1]
    assert_close(metrics.ece(probs, labels), 0.5 * (0.05 + 0.05))
    assert_close(metrics.mce(probs, labels), 0.05)
    assert_close(metrics.signed_calibration_error(probs, labels), 0.75 - 0.75, atol=1e-15, rtol=0)
    assert_close(metrics.mce(binary([0.9, 0.6]), [1, 0]), 0.9)


@pytest.mark.parametrize("strategy", ["width", "mass"])
def test_signed_error_does_not_depend_on_bins_and_is_below_ece(strategy: str) -> None:
    signed = metrics.signed_calibration_error(PROBS, LABELS)
    expected = PROBS.max(-1).values.mean().item() - metrics.accuracy(PROBS, LABELS)
    assert_close(signed, expected)
    bins = metrics.reliability_bins(PROBS, LABELS, n_bins=11, strategy=strategy)
    assert_close(bins.signed, expected)
    assert abs(signed) - 1e-12 <= bins.ece <= bins.mce


def test_perfectly_calibrated_predictions_have_no_error() -> None:
    probs = binary([0.75] * 4 + [1.0] * 3)
    labels = [0, 0, 0, 1, 0, 0, 0]
    for metric in (metrics.ece, metrics.adaptive_ece, metrics.classwise_ece, metrics.mce):
        assert_close(metric(probs, labels), 0.0, atol=1e-15, rtol=0)


def test_calibrated_labels_give_a_small_error() -> None:
    generator = torch.Generator().manual_seed(3)
    probs = torch.randn(40_000, 3, generator=generator, dtype=torch.float64).softmax(-1)
    labels = torch.multinomial(probs, 1, generator=generator).squeeze(-1)
    assert metrics.ece(probs, labels) < 0.015
    assert metrics.adaptive_ece(probs, labels) < 0.015
    assert metrics.classwise_ece(probs, labels) < 0.015
    sharper = probs.pow(3)
    sharper = sharper / sharper.sum(-1, keepdim=True)
    assert metrics.signed_calibration_error(sharper, labels) > 0.1
    assert metrics.ece(sharper, labels) > 0.1


def test_equal_mass_bins_against_sorted_chunks() -> None:
    probs, labels = PROBS[:210], LABELS[:210]
    bins = metrics.reliability_bins(probs, labels, n_bins=14, strategy="mass")
    assert_close(bins.count, torch.full((14,), 15.0, dtype=torch.float64))
    order = probs.max(-1).values.argsort()
    confidence = probs.max(-1).values[order].reshape(14, 15)
    correct = (~metrics.misclassified(probs, labels)).double()[order].reshape(14, 15)
    assert_close(bins.ece, (confidence.mean(1) - correct.mean(1)).abs().mean().item())
    assert_close(bins.lower, confidence[:, 0])
    assert_close(bins.upper, confidence[:, -1])


def test_equal_mass_bins_differ_by_one_at_most_without_ties() -> None:
    count = metrics.reliability_bins(PROBS, LABELS, n_bins=15, strategy="mass").count
    assert count.numel() == 15
    assert count.max() - count.min() <= 1


def test_ties_stay_together_and_order_does_not_matter() -> None:
    probs = binary([0.7] * 9 + [0.8] * 2 + [0.9])
    labels = torch.tensor([0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0])
    bins = metrics.reliability_bins(probs, labels, n_bins=4, strategy="mass")
    assert (bins.count > 0).all()
    assert bins.count.sum() == 12
    assert bins.count[0] == 9
    for seed in range(5):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        assert_close(metrics.adaptive_ece(probs[order], labels[order], n_bins=4), bins.ece)
    # A group goes where its middle falls: ranks 2 to 5 of 8 to the lower half.
    halves = metrics.reliability_bins(binary([0.6] + [0.7] * 4 + [0.8] * 3), [0] * 8, n_bins=2, strategy="mass")
    assert halves.count.tolist() == [5.0, 3.0]
    # And ranks 4 to 7 to the upper one, although their first is in the lower.
    halves = metrics.reliability_bins(binary([0.6] * 3 + [0.7] * 4 + [0.8]), [0] * 8, n_bins=2, strategy="mass")
    assert halves.count.tolist() == [3.0, 5.0]
    # All tied: one bin, and the error is |accuracy - confidence|.
    assert_close(metrics.adaptive_ece(probs[:9], labels[:9]), abs(7 / 9 - 0.7))


@pytest.mark.parametrize("bad", [0, -3, 2.5, True, "15"])
def test_bad_number_of_bins(bad: object) -> None:
    for metric in (metrics.ece, metrics.classwise_ece, metrics.adaptive_ece):
        with pytest.raises(InputError, match="n_bins=.* must be a whole number of at least 1"):
            metric(PROBS, LABELS, n_bins=bad)


def test_bad_strategy() -> None:
    with pytest.raises(InputError, match="strategy='quantile' is not known; allowed are 'width', 'mass'"):
        metrics.reliability_bins(PROBS, LABELS, strategy="quantile")
