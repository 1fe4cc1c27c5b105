"""Figures draw what they are given, on the Axes they are given, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from aftermap.analysis import figures
from aftermap.analysis.figures.calibration import _wilson
from aftermap.errors import DataError, InputError, ShapeError
from aftermap.metrics import auroc, labelled_scores, reliability_bins, risk_coverage

X, Y, INPUTS = figures.decision_grid((-2.0, -1.0), (2.0, 1.0), n=21)


def _two_classes(shift: float = 0.0) -> torch.Tensor:
    p = torch.sigmoid(3 * (INPUTS[:, :1] - shift))
    return torch.cat([1 - p, p], -1)


BINS = {"confidence": [None, 0.6, 0.9], "accuracy": [None, 0.5, 0.95], "count": [0.0, 20.0, 80.0]}
DRAWN = {
    "band": lambda **o: figures.regression_band(
        [1.0, 0.0], [1.0, 0.0], [0.2, 0.1], epistemic=[0.1, 0.05], data=([0.5], [0.4]), truth=[1.0, 0.0], **o
    ),
    "observed": lambda **o: figures.observed_against_predicted([0.0, 1.0], [0.1, 0.2], [0.05, 2.0], **o),
    "decision": lambda **o: figures.decision_map(X, Y, _two_classes(), points=INPUTS[::50], **o),
    "reliability": lambda **o: figures.reliability({"a": BINS, "b": BINS}, **o),
    "intervals": lambda **o: figures.interval_calibration({"level": [0.0, 0.5, 1.0], "coverage": [0.0, 0.6, 1.0]}, **o),
    "selective": lambda **o: figures.risk_coverage({"coverage": [0.5, 1.0], "risk": [0.0, 0.1]}, operating=0.75, **o),
    "ecdf": lambda **o: figures.inverse_ecdf({"threshold": [0.0, 1.0], "share_above": [0.5, 0.0]}, **o),
    "histograms": lambda **o: figures.score_histograms([0.1, 0.3], {"other": [0.7]}, threshold=0.5, **o),
    "roc": lambda **o: figures.roc([0.1, 0.3], {"other": [0.2, 0.7]}, **o),
    "attack": lambda **o: figures.attack_curves({"steps": [0.0, 0.1], "accuracy": [0.9, 0.2]}, **o),
    "evidence": lambda **o: figures.evidence_curve([0.1, 1.0, 10.0], [-9.0, -4.0, -6.0], **o),
    "history": lambda **o: figures.training_history({"train": [2.0, 1.0], "validation": [2.5]}, **o),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_returns_its_axes_and_draws_on_a_given_one(name):
    assert isinstance(DRAWN[name](title="a title"), Axes)
    given = figures.axes(width=4.5)
    drawn = DRAWN[name](ax=given, title="a title")
    assert drawn is given
    assert drawn.get_title(loc="left") == "a title"
    assert drawn.get_xlabel()
    assert drawn.get_ylabel()


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_is_the_same_svg_every_time_and_changes_no_settings(name):
    before = dict(matplotlib.rcParams)
    texts = [figures.save_svg(DRAWN[name]().figure) for _ in range(2)]
    assert texts[0] == texts[1]
    assert ElementTree.fromstring(texts[0]).tag.endswith("svg")
    assert dict(matplotlib.rcParams) == before


def test_no_pyplot_and_no_matplotlib_before_it_is_needed():
    program = (
        "import sys, aftermap.analysis.figures as f\n"
        "assert 'matplotlib' not in sys.modules, 'importing figures imports matplotlib'\n"
        "f.save_svg(f.risk_coverage({'coverage': [0.5, 1.0], 'risk': [0.0, 0.1]}).figure)\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_one_shade_per_deviation():
    ax = figures.regression_band([0.0, 1.0, 2.0], [1.0, 2.0, 4.0], [0.1, 0.2, 0.3], deviations=4)
    assert len(ax.collections) == 4
    for shade, k in zip(ax.collections, (4, 3, 2, 1), strict=True):
        outline = shade.get_paths()[0].vertices
        np.testing.assert_allclose(outline[:, 1].max(), 4.0 + k * 0.3)
        np.testing.assert_allclose(outline[:, 1].min(), 1.0 - k * 0.1)


def test_points_outside_the_bars_are_counted():
    mean, target = np.zeros(50), np.r_[np.zeros(45), np.full(5, 3.0)]
    ax = figures.observed_against_predicted(mean, np.ones(50), target)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["within 2 sd", "outside (10.0%)"]


def test_the_decision_lies_where_the_classes_are_equal():
    samples = torch.stack([_two_classes(s) for s in (-0.5, 0.5)])
    ax = figures.decision_map(X, Y, _two_classes(0.25), samples=samples)
    places = [float(c.get_paths()[0].vertices[:, 0].mean()) for c in ax.collections]
    # Linear interpolation between grid points 0.2 apart.
    np.testing.assert_allclose(places, [-0.5, 0.5, 0.25], atol=0.02)


def test_three_classes_have_three_boundaries_and_no_boundary_is_drawn_for_a_class_that_never_wins():
    logits = torch.stack([INPUTS[:, 0], -INPUTS[:, 0], 2 * INPUTS[:, 1]], -1)
    assert len(figures.decision_map(X, Y, logits.softmax(-1)).collections) == 3
    logits[:, 2] = -10.0
    assert len(figures.decision_map(X, Y, logits.softmax(-1)).collections) == 2


def test_reliability_draws_the_bins_of_the_metric():
    generator = torch.Generator().manual_seed(1)
    probs = torch.randn(200, 4, generator=generator).softmax(-1)
    labels = torch.randint(4, (200,), generator=generator)
    bins = reliability_bins(probs, labels)
    ax = figures.reliability({"confidence": bins.confidence, "accuracy": bins.accuracy, "count": bins.count})
    full = bins.count > 0
    points = ax.collections[-1].get_offsets()
    np.testing.assert_allclose(points[:, 0], bins.confidence[full])
    np.testing.assert_allclose(points[:, 1], bins.accuracy[full])
    heights = [bar.get_height() for bar in ax.child_axes[0].patches]
    np.testing.assert_allclose(heights, bins.count)
    assert figures.reliability(BINS, counts=False).child_axes == []


def test_wilson_ends_solve_its_quadratic():
    rate, count = np.array([0.0, 0.3, 1.0]), np.array([7.0, 20.0, 3.0])
    for end in _wilson(rate, count):
        inside = (end > 1e-12) & (end < 1 - 1e-12)
        left = (rate - end) ** 2
        right = 1.959964**2 * end * (1 - end) / count
        np.testing.assert_allclose(left[inside], right[inside], rtol=1e-9)


def test_risk_coverage_draws_the_curve_of_the_metric():
    curve = risk_coverage([0.1, 0.9, 0.2, 0.4], [False, True, False, True])
    ax = figures.risk_coverage({"coverage": curve.coverage, "risk": curve.risk})
    np.testing.assert_allclose(ax.lines[0].get_xydata(), np.stack([curve.coverage, curve.risk], -1))
    assert ax.get_ylim()[1] >= float(curve.risk.max())


def test_roc_has_the_area_of_the_metric():
    generator = torch.Generator().manual_seed(2)
    usual, other = torch.randn(40, generator=generator), torch.randn(30, generator=generator) + 1
    ax = figures.roc(usual, {"other": other})
    x, y = ax.lines[1].get_xydata().T
    area = auroc(*labelled_scores(usual, other))
    np.testing.assert_allclose((np.diff(x) * (y[1:] + y[:-1]) / 2).sum(), area)
    assert f"{area:.3f}" in ax.get_legend().get_texts()[0].get_text()


def test_histograms_are_shares_of_their_own_set():
    ax = figures.score_histograms(np.linspace(0, 1, 40), {"other": np.linspace(1, 2, 7)}, bins=10)
    for patch in ax.patches:
        np.testing.assert_allclose(patch.get_data().values.sum(), 1.0)


def test_the_best_evidence_is_marked_and_gaps_are_left():
    ax = figures.evidence_curve([0.1, 1.0, 10.0, 100.0], {"layers": [-9.0, -4.0, float("nan"), -6.0]})
    np.testing.assert_allclose(ax.lines[1].get_xydata(), [[1.0, -4.0]])
    assert ax.texts[0].get_text() == "1"


def test_curves_are_told_apart_without_colour():
    curve = {"coverage": [0.5, 1.0], "risk": [0.0, 0.1]}
    ax = figures.risk_coverage(dict.fromkeys("abcd", curve))
    assert len({str(line._unscaled_dash_pattern) for line in ax.lines}) == 4
    assert len({to_hex(line.get_color()) for line in ax.lines}) == 4


def test_names_are_shown_as_they_are():
    curve = {"coverage": [0.5, 1.0], "risk": [0.0, 0.1]}
    ax = figures.risk_coverage({"_hidden": curve, r"cost in $ and $\nonsense$": curve, "<b>": curve})
    text = figures.save_svg(ax.figure)
    words = "".join(ElementTree.fromstring(text).itertext())
    assert "_hidden" in words
    assert r"cost in $ and $\nonsense$" in words
    assert "<b>" in words


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: figures.risk_coverage({"a": {"coverage": [1.0]}}), InputError, "the curve 'a' lacks risk"),
        (lambda: figures.risk_coverage({}), InputError, "needs a mapping with the columns coverage, risk"),
        (lambda: figures.risk_coverage({"coverage": [1.0], "risk": [0.0, 1.0]}), ShapeError, "one length"),
        (
            lambda: figures.risk_coverage({"coverage": [1.0], "risk": [0.1]}, operating=80),
            InputError,
            "Write a coverage of 80 % as 0.8",
        ),
        (lambda: figures.risk_coverage({"coverage": [1.0], "risk": [float("nan")]}), DataError, "not finite"),
        (lambda: figures.inverse_ecdf({"threshold": [], "share_above": []}), DataError, "is empty"),
        (lambda: figures.inverse_ecdf({"threshold": ["x"], "share_above": [1.0]}), DataError, "must hold numbers"),
        (lambda: figures.regression_band([0.0], [0.0], [-1.0]), DataError, "negative number"),
        (
            lambda: figures.regression_band([0.0], [0.0], [1.0], deviations=0),
            InputError,
            "deviations=0 must be a whole number of at least 1",
        ),
        (lambda: figures.regression_band([[0.0]], [0.0], [1.0]), ShapeError, r"x must have 1 dimension\(s\)"),
        (lambda: figures.regression_band([0.0, 1.0], [0.0], [1.0]), ShapeError, "one number per x"),
        (lambda: figures.observed_against_predicted([0.0], [1.0], [1.0, 2.0]), ShapeError, "one number per prediction"),
        (lambda: figures.decision_map(X, Y, _two_classes()[1:]), ShapeError, "a grid of 21 by 21"),
        (lambda: figures.decision_map(X, Y, _two_classes(), labels=[0]), InputError, "without points"),
        (
            lambda: figures.decision_map(X, Y, _two_classes(), points=INPUTS[:3], labels=[0]),
            ShapeError,
            "class per point",
        ),
        (lambda: figures.score_histograms([0.1], [0.2]), InputError, "outside must be a mapping"),
        (
            lambda: figures.attack_curves({}, quantity="speed"),
            InputError,
            "quantity='speed' is not known; allowed are 'accuracy'",
        ),
        (lambda: figures.evidence_curve([0.0, 1.0], [1.0, 2.0]), InputError, "positive on a logarithmic axis"),
        (lambda: figures.evidence_curve([0.5, 1.0], [1.0]), ShapeError, "one number per value, got 1 for 2"),
        (lambda: figures.training_history({}), InputError, "history must be a mapping"),
        (lambda: figures.training_history({"a": [1.0, 2.0]}, steps=[1]), InputError, "has 2 numbers, but there are 1"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
