"""The cost estimate: sizes that follow from the shapes, an order that makes sense, words that people read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aftermap.curvature import fit_curvature
from aftermap.laplace import Cost, estimate_costs
from aftermap.laplace.cost import describe_costs
from aftermap.likelihoods import Categorical
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import classes, mlp, normal, seeded


def by_name(model: nn.Module, data: object) -> dict[tuple[str, str], Cost]:
    return {(c.structure, c.params): c for c in estimate_costs(model, data, Categorical())}  # type: ignore[arg-type]


def test_bytes_hold_the_factors_and_not_much_more() -> None:
    model = mlp(3, 40, 4)
    costs = by_name(model, classes())
    for structure in ("kron", "diagonal", "full"):
        factors = fit_curvature(model, classes(), "classification", structure=structure, progress=False)
        held = sum(t.numel() * t.element_size() for b in factors.blocks for t in b.tensors().values())
        assert held <= costs[structure, "all"].bytes <= 6 * held
        assert costs[structure, "all"].n_params == factors.n_params


def test_the_order_of_costs() -> None:
    costs = by_name(mlp(3, 300, 4), classes())
    assert costs["diagonal", "all"].bytes < costs["kron", "all"].bytes < costs["full", "all"].bytes
    assert costs["kron", "all"].seconds < costs["full", "all"].seconds
    assert costs["kron", "last_layer"].n_params == 300 * 4 + 4
    assert all(c.seconds > 0 for c in costs.values())


def test_time_grows_with_the_number_of_batches() -> None:
    model, (x, y) = mlp(3, 64, 4), classes()[0]
    one, many = (by_name(model, [(x, y)] * n)["diagonal", "all"].seconds for n in (1, 1000))
    assert many > 50 * one


def test_the_model_is_unchanged() -> None:
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 2, groups=1), nn.BatchNorm2d(3), nn.ReLU(True), nn.Flatten(), nn.Linear(18, 4)
        )
    )
    model[0].weight.requires_grad_(False)
    before = ModelSnapshot.of(model)
    costs = by_name(model, [(normal(5, 2, 3, 4), torch.arange(5) % 4)])
    check_unchanged(model, before)
    assert costs["kron", "all"].n_params == sum(p.numel() for p in model.parameters()) - model[0].weight.numel()


@pytest.mark.parametrize(
    ("seconds", "size", "words"),
    [
        (0.2, 3e6, "about 1 s and 3 MB"),
        (75.0, 5e9, "about 75 s and 4.7 GB"),
        (600.0, 2**20, "about 10 min and 1 MB"),
        (20_000.0, 2**31, "about 5.6 h and 2.0 GB"),
    ],
)
def test_words(seconds: float, size: float, words: str) -> None:
    cost = Cost("kron", "all", 61_706, seconds, size)
    assert str(cost) == f"kron, 61,706 parameters: {words}"
    other = Cost("kron", "last_layer", 85, 1.0, 2**20)
    assert str(other).startswith("kron of the last layer, 85 parameters")
    assert describe_costs(cost, [cost, other]).endswith("(alternatives: kron last_layer 1 s 1 MB)")
