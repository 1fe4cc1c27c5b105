"""Bayesian linear regression, whose posterior is known, and small networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Regression", "classifier", "make_regression", "run"]


@dataclass(frozen=True)
class Regression:
    """y = W x + noise with prior N(0, 1/δ) on W [outputs, inputs]; the rows of W are independent."""

    x: Tensor
    y: Tensor
    noise: float
    prior: float

    @property
    def n_data(self) -> int:
        return len(self.x)

    def model(self) -> nn.Linear:
        net = nn.Linear(self.x.shape[1], self.y.shape[1], bias=False, dtype=torch.float64)
        nn.init.zeros_(net.weight)
        return net

    def loss(self, net: nn.Module, index: Tensor | None = None) -> Tensor:
        """Mean over examples of ½ ‖y − f‖² / noise²."""
        x, y = (self.x, self.y) if index is None else (self.x[index], self.y[index])
        return (net(x) - y).square().sum(1).mean() / (2 * self.noise**2)

    def precision(self, temperature: float = 1.0) -> Tensor:
        """Of one row of W: [inputs, inputs]."""
        eye = torch.eye(self.x.shape[1], dtype=torch.float64)
        return self.x.T @ self.x / (self.noise**2 * temperature) + self.prior * eye

    def mean(self, temperature: float = 1.0) -> Tensor:
        """[outputs, inputs]."""
        rhs = self.x.T @ self.y / (self.noise**2 * temperature)
        return torch.linalg.solve(self.precision(temperature), rhs).T


def make_regression(*, orthogonal: bool, seed: int = 0, n: int = 60, prior: float = 2.0) -> Regression:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    if orthogonal:
        x = torch.linalg.qr(x)[0] * torch.tensor([3.0, 5.0, 7.0, 9.0], dtype=torch.float64)
    else:
        x = x @ (torch.eye(4, dtype=torch.float64) + 0.3 * torch.randn(4, 4, generator=generator, dtype=torch.float64))
    true = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    y = x @ true + 0.5 * torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return Regression(x, y, 0.5, prior)


def run(
    opt: torch.optim.Optimizer, closure: Callable[[], Tensor], steps: int, *, average_last: int = 0
) -> list[Tensor]:
    """Steps with a rate that falls to zero; returns the means averaged over the last steps."""
    params = [p for g in opt.param_groups for p in g["params"]]
    rates = [g["lr"] for g in opt.param_groups]
    total = [torch.zeros_like(p) for p in params]
    for step in range(steps):
        for group, rate in zip(opt.param_groups, rates, strict=True):
            group["lr"] = rate / (1 + 20 * step / steps)
        opt.step(closure)
        if step >= steps - average_last:
            total = [t + p.detach() / average_last for t, p in zip(total, params, strict=True)]
    return total


def classifier(*, norm: bool = False, seed: int = 0) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A small network in float64 with a batch of 11 examples of 4 classes."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(5, 6)]
    layers += [nn.BatchNorm1d(6)] if norm else []
    net = nn.Sequential(*layers, nn.Tanh(), nn.Linear(6, 4)).to(torch.float64)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5)
    x = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    return net, x, torch.randint(4, (11,), generator=generator)
