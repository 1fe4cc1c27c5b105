"""The sampler of the toy: against automatic differentiation, and against a density with known moments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aftermap as am
from experiments.ritter2018.notmnist import tuned_in_stages
from experiments.ritter2018.tempering import Perceptron, sample


def test_the_gradient_of_the_perceptron_is_that_of_automatic_differentiation() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 1, generator=generator), torch.randn(6, 1, generator=generator)
    potential = Perceptron(x, y, 0.7, 3)
    nets = [nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)) for _ in range(3)]
    for net in nets:
        for p in net.parameters():
            nn.init.normal_(p, generator=generator)
    nll, gradient = potential(np.stack([potential.flat(list(net.parameters())) for net in nets]))
    for net, value, slope in zip(nets, nll, gradient, strict=True):
        expected = (net(x) - y).square().sum() / (2 * 0.7**2)
        expected.backward()
        assert value == pytest.approx(float(expected.detach()), rel=1e-5)
        wanted = potential.flat([p.grad for p in net.parameters() if p.grad is not None])
        np.testing.assert_allclose(slope, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def test_two_modes_that_are_far_apart_get_their_weights_from_both_sides() -> None:
    """A mixture of two narrow Gaussians: 0.8 at +2 and 0.2 at −2, whose density between them is e⁻³² of that at a mode."""
    deviation, precision = 0.25, 0.01
    centres, logits = np.array([[2.0, 0.0], [-2.0, 0.0]]), np.log([0.8, 0.2])

    def potential(theta: Any) -> tuple[Any, Any]:
        """The negative log-density without the prior, so that the target is the mixture."""
        parts = logits - np.square(theta[:, None] - centres).sum(-1) / (2 * deviation**2)
        top = parts.max(1, keepdims=True)
        total = np.log(np.exp(parts - top).sum(1, keepdims=True)) + top
        value = -total[:, 0] - 0.5 * precision * np.square(theta).sum(1)
        return value, (theta - np.exp(parts - total) @ centres) / deviation**2 - precision * theta

    starts = np.zeros((64, 5, 2))
    starts[:32, :, 0], starts[32:, :, 0] = 2.0, -2.0
    found = sample(
        potential, starts, precision=precision, hottest=5e-3, warmup=240, draws=480, thin=1, leapfrogs=4, seed=3
    )
    for part in np.split(
        found.draws, 2
    ):  # Both halves forget where they started; a half has a standard error of about 0.015.
        assert float((part[..., 0] > 0).mean()) == pytest.approx(0.8, abs=0.05)
    right = found.draws[found.draws[..., 0] > 0]
    np.testing.assert_allclose(right.mean(0), centres[0], atol=0.02)
    np.testing.assert_allclose(np.cov(right.T), deviation**2 * np.eye(2), atol=0.008)
    assert float(found.exchanges.min()) > 0.2
    assert float(found.acceptance.min()) > 0.6


def test_the_grid_by_stages_ends_at_the_best_point_of_its_last_stage() -> None:
    """The last stage looks only at the points that were best before, and the posterior has the likelihood that its table says."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 4, generator=generator)
    y = (x[:, 0] + 0.5 * torch.randn(120, generator=generator) > 0).long()
    la = am.Laplace(nn.Linear(4, 2), "classification", structure="kron", damping="factored")
    la.fit([(x[:40], y[:40])], progress=False)
    stages = [[(x[40:60], y[40:60])], [(x[40:80], y[40:80]), (x[80:], y[80:])]]
    first, last = tuned_in_stages(la, stages, (8, 16), (3,), precisions=(0.1, 1.0, 10.0), scales=(0.5, 2.0))
    assert len(first) == 6
    best = sorted(first, key=lambda row: row[2])[:3]
    assert {row[:2] for row in last} == {row[:2] for row in best}
    scale, precision, nll = min(last, key=lambda row: row[2])
    assert la.data_scale == pytest.approx(scale)
    again = la.tune(
        stages[1], method="grid", kind="sampling", samples=16, precisions=[precision / scale], scales=[scale]
    )
    assert again.tuning is not None
    assert again.tuning.nll == pytest.approx(nll, rel=1e-4)
    wanted = {n: v.clone() for n, v in la.posterior.marginal_variance().items()}
    fresh = am.Laplace(la.model, "classification", structure="kron", damping="factored", prior_precision=precision)
    fresh.fit([(x[:40], y[:40])], progress=False)
    for name, variance in fresh.posterior.with_prior(precision, scale=scale).marginal_variance().items():
        torch.testing.assert_close(wanted[name], variance, rtol=1e-4, atol=1e-7)
