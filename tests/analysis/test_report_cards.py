"""The cards of uncertain inputs, and the shares of layers that a reader of the report sees."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from aftermap.analysis import Where, nearest_examples, where
from aftermap.analysis.report import Features, render_report
from aftermap.analysis.report.cards import Card, most_uncertain
from aftermap.analysis.report.definitions import interval
from aftermap.baselines import Deterministic
from aftermap.errors import ShapeError
from aftermap.evaluation import evaluate
from aftermap.evaluation.results import Metric, Results
from aftermap.laplace import Laplace

NAMES = ("weight", "<b>height</b>", "age")


@pytest.fixture(scope="module")
def regression() -> tuple[Laplace, torch.Tensor, torch.Tensor, Results, Where]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    x[7] = torch.tensor([9.0, 0.0, 0.0])
    y = 1000 * x[:, :1] + 50 * torch.randn(30, 1, generator=generator, dtype=torch.float64)
    la = Laplace(net, "regression", structure="full", prior_precision=1e-3).fit([(x, y)], progress=False)
    results = evaluate(la, [(x, y)], n_resamples=0, name="Bayesian")
    return la, x, y, results, where(la, [(x, y)])


def test_a_card_has_deviations_features_layers_and_neighbours(
    regression: tuple[Laplace, torch.Tensor, torch.Tensor, Results, Where],
) -> None:
    la, x, y, results, found = regression
    near = partial(lambda data, i: nearest_examples(la.model, data, x[i], count=2), [(x, y)])
    cards = most_uncertain(results, None, None, 3, where=found, features=Features(NAMES, x), neighbours=near)
    card, index = cards[0], int(re.findall(r"\d+", cards[0].title)[0])
    prediction = la.predict(x[index : index + 1])
    deviations = [float(v.sqrt()) for v in (prediction.epistemic, prediction.aleatoric)]
    said = [float(v.replace("−", "-")) for v in re.findall(r"[\d.e+−-]*\d", card.split)]
    np.testing.assert_allclose(said, deviations, rtol=6e-3)
    # The furthest from the mean in standard deviations comes first.
    away = ((x[index] - x.mean(0)).abs() / x.std(0, unbiased=False)).argmax()
    assert card.features[0][0] == NAMES[int(away)]
    shares = [float(share.split()[0].rstrip("\u00a0%")) for _, share in card.layers]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert min(shares) >= 0
    assert card.near[0].index == index  # the training data hold the input itself
    assert card.near[0].distance.startswith("0 ×")


def test_shares_of_layers_stay_within_one_where_layers_depend_on_each_other(
    regression: tuple[Laplace, torch.Tensor, torch.Tensor, Results, Where],
) -> None:
    found = regression[-1]
    assert found.crosses
    assert sum(found.own_shares) == pytest.approx(1)
    assert min(found.own_shares) >= 0
    torch.testing.assert_close(found.inputs.layer_shares.sum(1), torch.ones(16, dtype=torch.float64))
    assert float(found.inputs.layer_shares.min()) >= 0
    text = render_report(bayesian=regression[3], where=found)
    shown = [float(p) for p in re.findall(r"<td>(-?[\d.]+)\u00a0%</td>", text)]
    assert shown
    assert all(0 <= p <= 100 for p in shown)
    assert f"add up to {1 - found.in_common:.3g} times the variance" in text


def test_the_page_escapes_names_of_features(
    regression: tuple[Laplace, torch.Tensor, torch.Tensor, Results, Where],
) -> None:
    text = render_report(bayesian=regression[3], features=Features(NAMES, regression[1]))
    assert "&lt;b&gt;height&lt;/b&gt;" in text
    assert "<b>height" not in text


def test_features_must_be_those_of_the_test_inputs(
    regression: tuple[Laplace, torch.Tensor, torch.Tensor, Results, Where],
) -> None:
    with pytest.raises(ShapeError, match="one row of features per test input: got 5 for 30"):
        render_report(bayesian=regression[3], features=Features(NAMES, regression[1][:5]))


def test_a_card_without_reasons_has_no_why() -> None:
    card = Card("Input 1", "2", "", None, 50.0, "")
    assert not card.explained
    x, y = torch.eye(3).repeat(4, 1), torch.arange(3).repeat(4)
    text = render_report(bayesian=evaluate(Deterministic(nn.Identity()), [(x, y)], n_resamples=0))
    assert "Why?" not in text


def test_an_interval_without_its_own_number_is_not_shown() -> None:
    assert interval(Metric(0.209, -0.023, 0.138), "share") == ""
    assert interval(Metric(0.1, 0.05, 0.138), "share") == "0.050–0.138"
