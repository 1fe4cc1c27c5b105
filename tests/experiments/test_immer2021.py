"""The parts of experiments/immer2021 that its results rest on: the split, the stack of networks, the choice of a precision."""

from __future__ import annotations

import copy

import pytest
import torch

from experiments.immer2021.contest import contest
from experiments.immer2021.uci import multilayer, split, train_stack


def test_a_split_is_stratified_standardised_and_without_overlap() -> None:
    y = torch.tensor([0] * 100 + [1] * 40 + [2] * 20)
    x = torch.stack([torch.arange(160.0), torch.ones(160)], 1).double()
    parts = split(x, y, seed=3, rows=1000)
    assert [[int((part[1] == c).sum()) for c in range(3)] for part in parts] == [[70, 28, 14], [15, 6, 3], [15, 6, 3]]
    assert len(torch.cat([part[0][:, 0] for part in parts]).unique()) == 160
    torch.testing.assert_close(parts[0][0].mean(0), torch.zeros(2, dtype=torch.float64), atol=1e-12, rtol=0)
    assert float(parts[0][0][:, 0].std()) == pytest.approx(1.0)
    assert bool(torch.isfinite(parts[2][0]).all())  # The second feature is constant.
    assert not torch.equal(parts[0][0], split(x, y, seed=4, rows=1000)[0][0])
    assert sum(len(part[0]) for part in split(x, y, seed=3, rows=50)) == 50


@pytest.mark.parametrize("likelihood", ["classification", "binary"])
def test_each_network_of_a_stack_is_trained_as_it_would_be_alone(likelihood: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 3, generator=generator), torch.arange(30) % 2
    model = multilayer(3, 4, 2, 2 if likelihood == "classification" else 1)
    start = copy.deepcopy(model.state_dict())
    together = train_stack(model, (x, y), likelihood, (0.5, 20.0), steps=30)
    for weights, precision in zip(together, (0.5, 20.0), strict=True):
        (alone,) = train_stack(model, (x, y), likelihood, (precision,), steps=30)
        for name, value in weights.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-4, atol=1e-5)
            assert not torch.equal(value, start[name])
    small, large = (sum(float(v.square().sum()) for v in weights.values()) for weights in together)
    assert large < small


def test_the_stack_descends_the_log_joint() -> None:
    """A linear model with one logit and few data: the gradient of NLL + ½δ‖θ‖² vanishes at the end."""
    x, y = torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([0, 1, 0, 1])
    (weights,) = train_stack(torch.nn.Linear(1, 1), (x, y), "binary", (2.0,), steps=2000, lr=0.05)
    theta = {n: v.clone().requires_grad_() for n, v in weights.items()}
    logits = x @ theta["weight"].T + theta["bias"]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0], y.float(), reduction="sum")
    energy = sum(v.square().sum() for v in theta.values())
    for slope in torch.autograd.grad(loss + energy, list(theta.values())):
        torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-3, rtol=0)


def test_every_scorer_gets_its_own_least_candidate() -> None:
    found = contest([(0.1, 3.0), (1.0, -1.0), (10.0, 2.0)], {"value": float, "size": abs})
    assert (found["value"].precision, found["value"].scores) == (1.0, (3.0, -1.0, 2.0))
    assert (found["size"].precision, found["size"].predictor) == (1.0, -1.0)
    assert contest([(0.1, 3.0), (1.0, -4.0)], {"size": abs})["size"].precision == 0.1
