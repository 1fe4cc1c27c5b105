"""Gradients of the sampling predictive in its inputs: the backward pass must see the sampled weights."""

from __future__ import annotations

import torch
from torch import nn

import aftermap as am


def test_gradient_in_the_inputs_of_a_convolutional_network() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(60, 4)).double()
    x, y = torch.randn(6, 2, 5, 4, dtype=torch.float64), torch.randint(0, 4, (6,))
    laplace = am.Laplace(net, "classification", prior_precision=3.0).fit([(x, y)])
    weights = laplace.ensemble(5, torch.Generator().manual_seed(1))

    def score(inputs: torch.Tensor) -> torch.Tensor:
        prediction = laplace.predict(inputs, kind="sampling", weights=weights, differentiable=True)
        return prediction.mean[:, 1].log().sum()

    inputs = x[:2].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score(inputs), inputs)
    direction = torch.randn(inputs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    step = 1e-6
    with torch.no_grad():
        difference = (score(x[:2] + step * direction) - score(x[:2] - step * direction)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), difference, rtol=1e-6, atol=1e-9)
