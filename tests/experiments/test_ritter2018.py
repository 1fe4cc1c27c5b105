"""The sampler of the toy: against automatic differentiation, and against densities with known moments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from experiments.ritter2018.tempering import Perceptron, sample


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_gradient_of_the_perceptron_is_that_of_automatic_differentiation() -> None:
    x, y = (torch.randn(6, 1, dtype=torch.float64, generator=seeded(k)) for k in (1, 2))
    weights = torch.randn(3, 22, dtype=torch.float64, generator=seeded())
    nll, gradient = Perceptron(x, y, 0.7, 3)(weights)
    for row, value, slope in zip(weights, nll, gradient, strict=True):
        net = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)).double()
        vector_to_parameters(row, net.parameters())
        expected = (net(x) - y).square().sum() / (2 * 0.7**2)
        expected.backward()
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(slope, torch.cat([p.grad.flatten() for p in net.parameters()]))


def test_two_modes_that_are_far_apart_get_their_weights_from_both_sides() -> None:
    """A mixture of two narrow Gaussians: 0.8 at +2 and 0.2 at −2, whose density between them is e⁻¹²⁸ of that at a mode."""
    deviation = 0.25
    centres = torch.tensor([[2.0, 0.0], [-2.0, 0.0]], dtype=torch.float64)
    logits = torch.tensor([0.8, 0.2], dtype=torch.float64).log()
    precision = 0.01  # The potential is the negative log-density without the prior, so that the target is the mixture.

    def potential(theta: Tensor) -> tuple[Tensor, Tensor]:
        parts = logits - (theta[:, None] - centres).square().sum(-1) / (2 * deviation**2)
        value = -parts.logsumexp(1) - 0.5 * precision * theta.square().sum(1)
        return value, (theta - parts.softmax(1) @ centres) / deviation**2 - precision * theta

    starts = torch.zeros(64, 5, 2, dtype=torch.float64)
    starts[:32, :, 0], starts[32:, :, 0] = 2.0, -2.0
    found = sample(
        potential,
        starts,
        precision=precision,
        hottest=5e-3,
        warmup=240,
        draws=480,
        thin=1,
        leapfrogs=4,
        generator=seeded(3),
    )
    for part in found.draws.split(
        32
    ):  # Both halves forget where they started; the standard error of a half is about 0.015.
        assert float((part[..., 0] > 0).double().mean()) == pytest.approx(0.8, abs=0.05)
    right = found.draws[found.draws[..., 0] > 0]
    torch.testing.assert_close(right.mean(0), centres[0], atol=0.02, rtol=0)
    torch.testing.assert_close(torch.cov(right.T), deviation**2 * torch.eye(2).double(), atol=0.008, rtol=0)
    assert float(found.exchanges.min()) > 0.2
    assert float(found.acceptance.min()) > 0.6
