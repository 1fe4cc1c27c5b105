"""Small networks with data, their dense posteriors, and the data with a gap of docs/mathematics/structures.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import unpack_batch
from aftermap.curvature import reference
from aftermap.curvature.fit import fit_curvature
from aftermap.curvature.passes.plan import CheckedPlan
from aftermap.curvature.passes.products import GGNOperator
from aftermap.likelihoods import Categorical, Gaussian, Likelihood
from aftermap.posteriors import GaussianPosterior, MatrixFreePosterior, MatrixFreeSettings
from aftermap.predictive.linearised import LatentGaussian, latent_gaussians

__all__ = ["CASES", "PRIOR", "SCALE", "Case", "gap_coverage", "gap_problem", "generator", "latent", "randn"]

SCALE = 1.3
PRIOR = 0.7


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A network, its data in two uneven batches with example weights, and inputs to ask about."""

    model: nn.Module
    x: Tensor
    y: Tensor
    weight: Tensor
    likelihood: Likelihood
    asked: Tensor

    @property
    def data(self) -> list[Any]:
        return [(self.x[:4], self.y[:4], self.weight[:4]), (self.x[4:], self.y[4:], self.weight[4:])]

    @property
    def names(self) -> list[str]:
        return [n for n, _ in self.model.named_parameters()]

    def operator(self, chunk_size: int = 512) -> GGNOperator:
        return GGNOperator(self.model, self.data, self.likelihood, chunk_size=chunk_size)

    def gaussian(self, structure: str, prior: Any = PRIOR, **options: Any) -> GaussianPosterior:
        factors = fit_curvature(self.model, self.data, self.likelihood, structure=structure, progress=False, **options)
        return GaussianPosterior.from_factors(factors, dict(self.model.named_parameters()), prior, scale=SCALE)

    def matrix_free(self, structure: str | None = "kron", prior: Any = PRIOR, **settings: Any) -> MatrixFreePosterior:
        chosen = MatrixFreeSettings(**{"dense_limit": 0, "tolerance": 1e-10, **settings})
        helper = None if structure is None else self.gaussian(structure)
        return MatrixFreePosterior.from_operator(
            self.operator(), prior, preconditioner=helper, scale=SCALE, settings=chosen
        )

    def ggn(self) -> Tensor:
        return reference.ggn(self.model, self.x, self.likelihood, self.y, weight=self.weight)

    def precision(self, prior: Any = PRIOR, scale: float = SCALE) -> Tensor:
        G = self.ggn()
        return scale * G + torch.diag(torch.as_tensor(prior, dtype=torch.float64).expand(len(G)))


def _randomised(model: nn.Module) -> nn.Module:
    g = generator(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.6 * torch.randn(p.shape, generator=g))
    return model.double().eval()


def _mlp() -> nn.Module:
    return _randomised(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)))


def _cnn() -> nn.Module:
    layers = [nn.Conv2d(2, 3, 2, stride=2), nn.ReLU(), nn.MaxPool2d((1, 2)), nn.Flatten(), nn.Linear(12, 4)]
    return _randomised(nn.Sequential(*layers))


def _case(model: nn.Module, likelihood: Likelihood, *shape: int) -> Case:
    classes = torch.randint(4, (9,), generator=generator(3))
    y = classes if isinstance(likelihood, Categorical) else randn(9, 4, seed=1)
    weight = torch.linspace(0.5, 2, 9, dtype=torch.float64)
    return Case(model, randn(9, *shape), y, weight, likelihood, randn(6, *shape, seed=5))


CASES = {
    "mlp softmax": lambda: _case(_mlp(), Categorical(), 3),
    "mlp gaussian": lambda: _case(_mlp(), Gaussian(0.4), 3),
    "cnn softmax": lambda: _case(_cnn(), Categorical(), 2, 5, 8),
}


def latent(model: nn.Module, posterior: Any, x: Tensor, **options: Any) -> LatentGaussian:
    batch = unpack_batch((x, torch.zeros(len(x))))
    return latent_gaussians(CheckedPlan(model, posterior.names, batch), posterior, batch, **options)[0]


def gap_problem(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The data with a gap of docs/mathematics/structures.md and a tanh network with 50 units at its MAP for τ = 1, σ = 0.1."""
    x = torch.cat([torch.arange(-150, -70), torch.arange(35, 115)]).double()[:, None] / 100
    y = -torch.sin(3 * x - 0.3) + 0.1 * randn(*x.shape, seed=seed)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)).double()
    g = generator(100 + seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (1.0 if p.shape[-1] == 1 else 0.2))
    params = list(model.parameters())
    # Half-trained networks are covered by anything: the gap opens only at the optimum itself.
    optimiser = torch.optim.LBFGS(
        params,
        max_iter=4000,
        history_size=50,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-3,
        tolerance_change=1e-14,
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = (model(x) - y).square().sum() / (2 * 0.1**2) + 0.5 * sum(p.square().sum() for p in params)
        loss.backward()
        return loss.detach()

    optimiser.step(closure)
    closure()
    slope = max(float(p.grad.abs().max()) for p in params if p.grad is not None)
    assert slope < 0.01, f"training has not converged: the largest gradient is {slope}"
    optimiser.zero_grad(set_to_none=True)
    return model.eval(), x, y


def gap_coverage(model: nn.Module, posterior: Any) -> tuple[float, float]:
    """How often ±1.96 standard deviations hold the true function in the gap, and their mean there."""
    asked = torch.linspace(-2, 2, 21, dtype=torch.float64)[:, None]
    asked = asked[(asked[:, 0] > -0.7) & (asked[:, 0] < 0.35)]
    found = latent(model, posterior, asked, diagonal=True)
    inside = (found.mean + torch.sin(3 * asked - 0.3)).abs() <= 1.96 * found.var.sqrt()
    return float(inside.double().mean()), float(found.var.sqrt().mean())
