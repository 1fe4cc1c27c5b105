"""How a report speaks of the default flag: by which score inputs are set aside, compared and found, and what it means."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from aftermap.analysis.report import comparison, render_report, variance_notes, verdict
from aftermap.analysis.report.comparison import main_score
from aftermap.analysis.report.selective import column, operating_points
from aftermap.evaluation import Metric, Reference, Results, evaluate
from aftermap.metrics import risk_coverage
from tests.analysis.report_cases import classification, images, regression


@lru_cache
def flagged() -> tuple[Results, Results, Reference]:
    """The results of a posterior with a reference, those of its network alone, and the reference."""
    _, plain, laplace = classification()
    generator = torch.Generator().manual_seed(8)
    test = images().reshape(-1, 6)
    labels = torch.tensor(plain.table["target"][: len(test)])
    usual = test + 0.3 * torch.randn(test.shape, generator=generator)
    reference = Reference.from_predictions(laplace.predict(usual, generator=torch.Generator().manual_seed(0)))
    far = {"far": [(6 * torch.randn(70, 6, generator=generator), None)]}
    bayes = evaluate(laplace, [(test, labels)], ood=far, reference=reference, name="Bayesian", n_resamples=10)
    network = replace(plain, ood={"far": next(iter(plain.ood.values()))})
    return bayes, network, reference


def test_operating_points_set_aside_what_is_flagged_first():
    bayes, network, _ = flagged()
    points = operating_points(bayes, {"MAP": network})
    assert points is not None
    assert points.score == "either"
    curve = risk_coverage(column(bayes, "either"), 1 - column(bayes, "correct"))
    k = points.answered[79]
    assert points.risk[79] == pytest.approx(float(curve.risk[k - 1]))
    assert points.threshold[79] == float(curve.thresholds[k - 1])
    assert points.outside["far"][79] == pytest.approx(
        float((column(bayes, "either", "far") > points.threshold[79]).mean())
    )
    by_entropy = operating_points(classification()[0], {"MAP": network})
    assert by_entropy is not None
    assert by_entropy.score == "entropy"
    assert points.others == by_entropy.others  # the network alone goes by its entropy


def test_numbers_are_set_aside_by_their_entropy():
    bayes = replace(regression()[0], provenance={"flagged_by": "variance"})
    points = operating_points(bayes)
    assert points is not None
    assert points.score == "entropy"
    assert main_score(bayes) == "variance"


def test_the_network_alone_is_compared_by_its_entropy():
    bayes, network, _ = flagged()
    rows = {row.name: row for row in comparison(bayes, network)}
    row = rows["far/either/auroc"]
    assert row.bayesian == bayes.ood["far"]["either"]["auroc"]
    assert row.map == network.ood["far"]["entropy"]["auroc"]
    assert rows["far/either/detected"].bayesian == bayes.ood["far"]["either"]["detected"]
    assert rows["far/either/detected"].map is None
    by_entropy = replace(bayes, provenance={**bayes.provenance, "flagged_by": "entropy"})
    assert "far/entropy/auroc" in {row.name for row in comparison(by_entropy, network)}
    only = replace(bayes, provenance={}, ood={"far": {"mutual_information": bayes.ood["far"]["mutual_information"]}})
    assert main_score(only) == "mutual_information"


def test_a_report_explains_the_flag():
    bayes, network, reference = flagged()
    text = render_report(bayesian=bayes, map=network, threshold=reference.threshold())
    for phrase in (
        "An input is flagged if its entropy or its mutual information is larger than on",
        "Inputs are ordered by the larger of two ranks",
        "The score is the larger rank of entropy and mutual information; for the network alone it is the entropy.",
        "Threshold of the larger rank",
        "Share of the validation inputs with a smaller entropy, or with a smaller mutual information",
        "more here than on the test inputs (ratio of the median variances:",
        "Flagged of the test data",
    ):
        assert phrase in text
    assert f"flag above {reference.threshold().value:.3g}" in text.replace("&#160;", " ")
    plain = render_report(bayesian=classification()[0], map=classification()[1])
    assert "larger rank" not in plain
    said = verdict(bayes, network, threshold=reference.threshold("entropy")).text
    assert "An input is flagged if its entropy is above" in said


def _with_far(name: str, area: float, ratio: float | None = None) -> Results:
    scores = {"entropy": {"auroc": Metric(area, area, area)}}
    if ratio is not None:
        scores["variance"] = {"median_ratio": Metric(ratio, ratio, ratio)}
    return Results(name, "classification", 9, {}, {"far": scores})


@pytest.mark.parametrize(
    "ratio, network, meaning",
    [
        (
            2.0,
            None,
            "more here than on the test inputs (ratio of the median variances: 2), so the posterior should help",
        ),
        (
            1.2,
            None,
            "hardly more here than on the test inputs (ratio of the median variances: 1.2), so it is open whether",
        ),
        (
            0.7,
            None,
            "no more here than on the test inputs (ratio of the median variances: 0.700), so the posterior is not likely",
        ),
        (2.0, 0.6, "more here than on the test inputs (ratio of the median variances: 2), and the posterior helps"),
        (
            2.0,
            0.79,
            "more here than on the test inputs (ratio of the median variances: 2), yet the posterior does not help",
        ),
        (
            0.7,
            0.79,
            "no more here than on the test inputs (ratio of the median variances: 0.700), and the posterior does not",
        ),
        (
            0.7,
            0.6,
            "no more here than on the test inputs (ratio of the median variances: 0.700), yet the posterior helps",
        ),
    ],
)
def test_what_a_ratio_of_variances_means(ratio, network, meaning):
    (note,) = variance_notes(_with_far("la", 0.8, ratio), None if network is None else _with_far("map", network))
    assert note.startswith(f"far: the outputs vary {meaning}")
    assert note.endswith(" to find them.")


def test_no_ratio_no_note():
    assert variance_notes(_with_far("la", 0.8)) == []
    assert variance_notes(_with_far("la", 0.8, math.nan)) == []
