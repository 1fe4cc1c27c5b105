"""The same numbers as torchmetrics and netcal, and where they differ and why: the top bin."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from aftermap import metrics

pytestmark = pytest.mark.peers

GENERATOR = torch.Generator().manual_seed(0)
PROBS = torch.randn(307, 4, generator=GENERATOR, dtype=torch.float64).mul(2).softmax(-1)
LABELS = torch.randint(4, (307,), generator=GENERATOR)
SCORES = torch.rand(307, generator=GENERATOR, dtype=torch.float64)
POSITIVE = torch.rand(307, generator=GENERATOR, dtype=torch.float64) < 0.2 + 0.6 * SCORES


@pytest.mark.parametrize("n_bins", [10, 15])
def test_calibration_against_torchmetrics(n_bins: int) -> None:
    peer = pytest.importorskip("torchmetrics.functional.classification")
    for norm, ours in (("l1", metrics.ece), ("max", metrics.mce)):
        theirs = peer.multiclass_calibration_error(PROBS, LABELS, num_classes=4, n_bins=n_bins, norm=norm)
        assert_close(ours(PROBS, LABELS, n_bins=n_bins), theirs.item(), rtol=1e-5, atol=1e-6)


def test_torchmetrics_puts_confidence_one_in_a_bin_of_its_own() -> None:
    peer = pytest.importorskip("torchmetrics.functional.classification")
    probs = torch.tensor([[0.98, 0.02], [1.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([0, 1])
    theirs = peer.multiclass_calibration_error(probs, labels, num_classes=2, n_bins=15, norm="l1").item()
    # Theirs: |1 - 0.98| / 2 + |0 - 1| / 2. Ours: one closed bin, |1/2 - 0.99|.
    assert_close(theirs, 0.51, rtol=1e-5, atol=1e-6)
    assert_close(metrics.ece(probs, labels), 0.49)


def test_ranking_against_torchmetrics() -> None:
    peer = pytest.importorskip("torchmetrics.functional.classification")
    tied = (SCORES * 20).round() / 20
    for scores in (SCORES, tied):
        target = POSITIVE.long()
        assert_close(metrics.auroc(scores, POSITIVE), peer.binary_auroc(scores, target).item(), rtol=1e-5, atol=1e-6)
        theirs = peer.binary_average_precision(scores, target).item()
        assert_close(metrics.aupr(scores, POSITIVE), theirs, rtol=1e-5, atol=1e-6)


def test_accuracy_and_crps_against_torchmetrics() -> None:
    peer = pytest.importorskip("torchmetrics.functional.classification")
    theirs = peer.multiclass_accuracy(PROBS, LABELS, num_classes=4, average="micro").item()
    assert_close(metrics.accuracy(PROBS, LABELS), theirs, rtol=1e-6, atol=1e-6)
    regression = pytest.importorskip("torchmetrics.functional.regression")
    if not hasattr(regression, "continuous_ranked_probability_score"):
        pytest.skip("this torchmetrics has no CRPS")
    samples = torch.randn(11, 29, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = samples.mean(0) + 0.3
    crps = regression.continuous_ranked_probability_score(samples.T.contiguous(), targets).mean().item()
    assert_close(metrics.crps_samples(samples, targets), crps, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_calibration_against_netcal() -> None:
    peer = pytest.importorskip("netcal.metrics")
    theirs = peer.ECE(15).measure(PROBS.numpy(), LABELS.numpy())
    assert_close(metrics.ece(PROBS, LABELS), float(theirs), rtol=1e-6, atol=1e-8)
    theirs = peer.MCE(15).measure(PROBS.numpy(), LABELS.numpy())
    assert_close(metrics.mce(PROBS, LABELS), float(theirs), rtol=1e-6, atol=1e-8)
