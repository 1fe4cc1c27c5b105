"""Thresholds: what they promise, checked by simulation and against scipy; corruptions and detection."""

import math

import pytest
import torch
from scipy import stats

from aftermap import metrics as m
from aftermap.errors import DataError, InputError, ShapeError
from aftermap.evaluation import (
    CORRUPTIONS,
    Corrupted,
    Threshold,
    choose_threshold,
    clopper_pearson,
    corrupt,
    detection,
    rotate,
    selective_report,
)
from tests.baselines.test_contract import seeded


@pytest.mark.parametrize("events, trials", [(0, 7), (3, 20), (11, 11), (40, 1000)])
def test_clopper_pearson_against_scipy(events, trials):
    expected = stats.binomtest(events, trials).proportion_ci(0.9, method="exact")
    assert clopper_pearson(events, trials, level=0.9) == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.mark.parametrize("n", [19, 57, 200])
def test_conformal_rate_holds_on_average(n):
    scores = torch.rand(4000, n, dtype=torch.float64, generator=seeded())
    rates = torch.tensor([1 - choose_threshold(row, false_alarm_rate=0.05).value for row in scores])
    expected = 1 - math.ceil((n + 1) * 0.95) / (n + 1)
    assert rates.mean().item() == pytest.approx(expected, abs=0.003)
    assert expected <= 0.05 + 1e-12


def test_confident_rate_holds_for_nearly_every_set():
    scores = torch.rand(3000, 150, dtype=torch.float64, generator=seeded())
    rates = torch.tensor([1 - min(1.0, choose_threshold(row, confidence=0.9).value) for row in scores])
    share = (rates <= 0.05).double().mean().item()
    assert share >= 0.88
    assert share < 0.97  # not needlessly careful


def test_confident_rank_against_scipy():
    scores = torch.arange(1.0, 301.0)
    found = choose_threshold(scores, false_alarm_rate=0.1, confidence=0.95).value
    ranks = torch.arange(1, 301)
    enough = stats.binom.cdf(ranks.numpy() - 1, 300, 0.9) >= 0.95
    assert found == ranks[torch.from_numpy(enough)][0].item()


def test_too_few_data_flag_nothing():
    threshold = choose_threshold(torch.rand(10), false_alarm_rate=0.05)
    assert threshold.value == math.inf
    assert not threshold.flag(torch.tensor([1e9])).any()
    assert Threshold.from_dict(threshold.to_dict()) == threshold
    assert choose_threshold(torch.rand(20), confidence=0.99).value == math.inf


def test_threshold_round_trip_and_report():
    threshold = choose_threshold(torch.arange(200.0), false_alarm_rate=0.1, score="variance")
    assert Threshold.from_dict(threshold.to_dict()) == threshold
    scores, errors = torch.tensor([1.0, 500.0, 2.0, 600.0]), torch.tensor([True, True, False, False])
    report = selective_report(threshold, scores, errors)
    assert (report.flagged, report.errors_answered, report.errors_flagged) == (0.5, 0.5, 0.5)
    assert report.flagged_interval == pytest.approx(clopper_pearson(2, 4))
    empty = selective_report(threshold, torch.tensor([900.0]), torch.tensor([False]))
    assert math.isnan(empty.errors_answered)
    assert math.isnan(empty.errors_flagged)


def test_threshold_bad_input():
    with pytest.raises(InputError, match="Write 5 % as 0.05"):
        choose_threshold(torch.rand(5), false_alarm_rate=5)
    with pytest.raises(InputError, match="confidence=1.0 must lie"):
        choose_threshold(torch.rand(5), confidence=1.0)
    with pytest.raises(DataError, match="no NaN"):
        choose_threshold(torch.tensor([1.0, math.nan]))
    with pytest.raises(DataError, match="at least one number"):
        choose_threshold(torch.empty(0))
    with pytest.raises(ShapeError, match="must be a vector"):
        choose_threshold(torch.rand(5, 2))
    with pytest.raises(InputError, match="events=3 must be a whole number from 0 to 2"):
        clopper_pearson(3, 2)
    with pytest.raises(ShapeError, match="one length"):
        selective_report(choose_threshold(torch.rand(50)), torch.rand(3), torch.ones(2))


def test_detection_numbers():
    inside, outside = torch.rand(70, generator=seeded()), torch.rand(40, generator=seeded(1)) + 0.4
    found = detection(inside, outside, n_resamples=50, generator=seeded())
    scores, flags = m.labelled_scores(inside, outside)
    assert found.auroc[0] == pytest.approx(m.auroc(scores, flags))
    assert found.auroc[1] < found.auroc[0] < found.auroc[2]
    assert found.aupr_in == pytest.approx(m.aupr(-scores, ~flags))
    with pytest.raises(DataError, match="empty"):
        detection(inside, torch.empty(0))


IMAGES = torch.rand(3, 2, 12, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_corruptions_grow_with_severity(kind):
    sizes = []
    for severity in range(6):
        found = corrupt(IMAGES, kind, severity, generator=seeded())
        assert found.shape == IMAGES.shape
        assert found.dtype == IMAGES.dtype
        assert bool(found.isfinite().all())
        sizes.append((found - IMAGES).square().mean().item())
    assert sizes[0] == 0
    assert sizes[5] > sizes[1] > 0


def test_rotations():
    square = IMAGES[..., :10, :]
    torch.testing.assert_close(rotate(rotate(square, 90), -90), square)
    torch.testing.assert_close(rotate(square, 90), torch.rot90(square, 1, (2, 3)))
    torch.testing.assert_close(rotate(IMAGES, 180.0), IMAGES.flip(2, 3), atol=1e-9, rtol=0)
    # Just off a quarter turn interpolates to nearly the quarter turn: the direction agrees.
    torch.testing.assert_close(rotate(square, 89.999), torch.rot90(square, 1, (2, 3)), atol=1e-3, rtol=0)


def test_blur_keeps_constant_images_and_contrast_the_mean():
    flat = torch.full((2, 3, 9, 8), 0.3, dtype=torch.float64)
    torch.testing.assert_close(corrupt(flat, "gaussian_blur", 3), flat)
    torch.testing.assert_close(corrupt(IMAGES, "contrast", 4).mean((2, 3)), IMAGES.mean((2, 3)))


def test_corrupted_data_are_the_same_at_every_pass():
    data = Corrupted([(IMAGES, torch.arange(3))], "gaussian_noise", 3, seed=5)
    first, again = list(data), list(data)
    assert torch.equal(first[0][0], again[0][0])
    assert torch.equal(first[0][1], torch.arange(3))


def test_corruption_bad_input():
    with pytest.raises(InputError, match="allowed are 'gaussian_noise'"):
        corrupt(IMAGES, "rain", 1)
    with pytest.raises(InputError, match="severity=.* must be"):
        corrupt(IMAGES, "contrast", 6)
    with pytest.raises(ShapeError, match="channels, height, width"):
        corrupt(IMAGES[0], "contrast", 1)
