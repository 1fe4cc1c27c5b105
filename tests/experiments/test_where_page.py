"""The parts of the experiments on where the uncertainty sits and on UCI regressions, and the page that tells the findings."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from aftermap.predictive import Prediction
from experiments.framework import ROOT, Results
from experiments.kniebel2020 import moves, page
from experiments.kniebel2020.iris import pushed_losses
from experiments.kniebel2020.layers import by_layer, centre, fitted
from experiments.kniebel2020.settings import BUDGETS
from experiments.uci_regression.methods import _best_noise, _measured

FILE = ROOT / "experiments" / "kniebel2020" / "results.json"


@pytest.mark.skipif(not FILE.is_file(), reason="the experiment has no results yet")
def test_the_committed_page_is_the_generated_one() -> None:
    content = json.loads(FILE.read_text(encoding="utf-8"))
    assert page.PAGE.read_text(encoding="utf-8") == page.page_of(content), "python -m experiments.kniebel2020.page"
    assert page.PAGE.name in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_centre_is_the_mean_place() -> None:
    assert centre([1.0, 0.0, 0.0]) == 0
    assert centre([0.0, 0.0, 1.0]) == 1
    assert centre([0.2, 0.6, 0.2]) == pytest.approx(0.5)
    assert centre([0.25, 0.75]) == 0.75


def test_shares_add_up_and_agree_with_the_variance_by_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double().eval()
    x, y = torch.randn(20, 4).double(), torch.arange(20) % 3
    la = fitted(model, (x, y), 2.0)
    found = by_layer(la, x)
    assert sum(found["shares"]) == pytest.approx(1)
    parts = [v.sum(-1).mean() for v in la.variance_by_layer(x).values()]
    assert found["logit_shares"] == pytest.approx([float(p / sum(parts)) for p in parts])
    assert found["centre"] == pytest.approx(found["shares"][1])
    assert found["kinds"] == ["Linear", "Linear"]


def test_pushing_a_weight_raises_the_loss_as_by_hand_and_leaves_the_network_alone() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 3).double()
    x, y = torch.randn(6, 2).double(), torch.arange(6) % 3
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    rises = pushed_losses(model, (x, y), {"weight": torch.tensor([3]), "bias": torch.tensor([1])}, 0.1)

    def loss(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(x @ weight.T + bias, y, reduction="sum")

    for place, (name, index) in enumerate((("weight", (1, 1)), ("bias", (1,)))):
        total = -2 * loss(**before)
        for sign in (-1, 1):
            moved = {n: v.clone() for n, v in before.items()}
            moved[name][index] += 0.1 * sign
            total = total + loss(**moved)
        assert float(rises[place]) == pytest.approx(float(total) / 2, rel=1e-9)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def _moving(centres: list[float]) -> Results:
    """Results in which only the centre over depth is told, the same for every set, seed and prior."""
    settings = BUDGETS["stated"]
    depth = list(settings.moves.depth)
    job = {"value": depth, "centre_trained": centres, "centre_tuned": centres}
    keys = [f"moves/depth/{s}/seed{k}" for s in settings.moves.sets for k in range(settings.moves.seeds)]
    return Results(dict.fromkeys(keys, job), settings)


def test_a_direction_is_a_finding_and_none_is_not() -> None:
    rising = {v.id: v for v in moves.verdicts(_moving([0.1, 0.2, 0.3, 0.4]))}
    assert rising["W8"].verdict == "holds"
    assert "towards the output" in rising["W8"].ours
    assert rising["W9"].verdict == "not run yet"
    falling = moves.verdicts(_moving([0.4, 0.3, 0.2, 0.1]))[0]
    assert "towards the input" in falling.ours
    assert moves.verdicts(_moving([0.1, 0.5, 0.5, 0.1]))[0].verdict == "does not hold"


def test_the_best_noise_of_one_network_is_its_root_mean_square_error() -> None:
    torch.manual_seed(0)
    outputs, y = torch.randn(1, 50, 1), torch.randn(50, 1)
    assert _best_noise(outputs, y) == pytest.approx(float((outputs[0] - y).square().mean().sqrt()), rel=1e-5)
    # Copies of a network are the network.
    assert _best_noise(outputs.expand(4, 50, 1), y) == pytest.approx(_best_noise(outputs, y), rel=1e-6)


def test_numbers_are_in_the_units_of_the_data() -> None:
    mean, y = torch.zeros(40, 1), torch.linspace(-2, 2, 40)[:, None]
    one = torch.ones(40, 1)
    plain, scaled = (_measured(Prediction("regression", mean, 0 * one, one, one), y, unit) for unit in (1.0, 5.0))
    assert scaled["rmse"] == pytest.approx(5 * plain["rmse"])
    assert scaled["log_likelihood"] == pytest.approx(plain["log_likelihood"] - math.log(5))
    assert plain["cover50"] == pytest.approx(float((y.abs() < 0.6744898).double().mean()))
    assert scaled["cover95"] == plain["cover95"]
