"""Small networks with data, in float64, trained where the test needs a mode; all sizes distinct."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aftermap.laplace import Laplace
from aftermap.laplace.latents import OutputGaussians

__all__ = [
    "Data",
    "classes",
    "contrast_root",
    "dense_covariance",
    "gaussians",
    "generator",
    "linear_regression",
    "mlp",
    "new_classes",
    "normal",
    "regression",
    "seeded",
    "trained",
    "untrained",
]

Data = list[tuple[Tensor, Tensor]]

# For tests that tune networks which were never trained, as tuning rightly says.
untrained = pytest.mark.filterwarnings(
    "ignore:the posterior that was found without held-out labels",
    "ignore:.* the network itself is no better than always answering",
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def seeded(build: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double().eval()


def contrast_root(cov: Tensor) -> Tensor:
    """Q R [..., C, C - 1] with R Rᵀ = Qᵀ cov Q: Q the Householder reflection of e_0 to the constant vector, without that vector."""
    k = cov.shape[-1]
    w = -torch.full((k,), k**-0.5, dtype=cov.dtype)
    w[0] += 1
    q = (torch.eye(k, dtype=cov.dtype) - 2 * torch.outer(w, w) / w.dot(w))[:, 1:]
    return q @ torch.linalg.cholesky(q.mT @ cov @ q)


def mlp(inputs: int = 3, hidden: int = 5, outputs: int = 4, seed: int = 1) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)), seed)


def classes(count: int = 60, inputs: int = 3, outputs: int = 4, seed: int = 2) -> Data:
    """Two unequal batches of labels that depend on the inputs, with some noise."""
    x = normal(count, inputs, seed=seed)
    scores = x @ normal(inputs, outputs, seed=seed + 1) + 0.7 * normal(count, outputs, seed=seed + 2)
    y = scores.argmax(1)
    cut = count // 3
    return [(x[:cut], y[:cut]), (x[cut:], y[cut:])]


def new_classes(count: int = 200, inputs: int = 3, outputs: int = 4, seed: int = 2) -> Data:
    """Data of the same kind as `classes`, which no network has seen."""
    x = normal(count, inputs, seed=seed + 100)
    scores = x @ normal(inputs, outputs, seed=seed + 1) + 0.7 * normal(count, outputs, seed=seed + 102)
    return [(x, scores.argmax(1))]


def regression(count: int = 60, noise: float = 0.3, seed: int = 4, outputs: int = 1) -> Data:
    """A sine with noise, one input."""
    x = 4 * torch.rand(count, 1, generator=generator(seed), dtype=torch.float64) - 2
    shifts = torch.arange(outputs, dtype=torch.float64)
    y = torch.sin(2 * x + shifts) + noise * normal(count, outputs, seed=seed + 1)
    cut = count // 3
    return [(x[:cut], y[:cut]), (x[cut:], y[cut:])]


def trained(
    model: nn.Module, data: Data, loss: Callable[[Tensor, Tensor], Tensor], decay: float = 1.0, steps: int = 300
) -> nn.Module:
    """Minimises Σ loss + ½ decay ‖θ‖² by L-BFGS: a mode, not merely a good point."""
    x, y = torch.cat([b[0] for b in data]), torch.cat([b[1] for b in data])
    parameters = list(model.parameters())
    optimiser = torch.optim.LBFGS(
        parameters, max_iter=steps, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss(model(x), y) + 0.5 * decay * sum(p.square().sum() for p in parameters)
        value.backward()
        return value

    optimiser.step(closure)
    optimiser.zero_grad(set_to_none=True)
    return model


def linear_regression(
    noise: float = 0.6, prior: float = 1.4, count: int = 13, width: int = 4
) -> tuple[nn.Module, Data, Tensor, Tensor, Tensor]:
    """A Linear at the posterior mean of a Bayesian linear regression, with the truth beside it.

    Returns:
        Model, data, features with a column of ones [N, D + 1], targets [N], posterior precision [D + 1, D + 1].
    """
    x, y = normal(count, width, seed=1), normal(count, seed=2)
    features = torch.cat([x, torch.ones(count, 1, dtype=torch.float64)], 1)
    precision = features.T @ features / noise**2 + prior * torch.eye(width + 1, dtype=torch.float64)
    mean = torch.linalg.solve(precision, features.T @ y / noise**2)
    net = nn.Linear(width, 1).double().eval()
    with torch.no_grad():
        net.weight.copy_(mean[None, :width])
        net.bias.copy_(mean[width:])
    cut = count // 3
    return net, [(x[:cut], y[:cut, None]), (x[cut:], y[cut:, None])], features, y, precision


def dense_covariance(laplace: Laplace, jacobian: Tensor) -> Tensor:
    """J Σ Jᵀ [N, outputs, outputs] with the posterior's own dense precision."""
    covariance = torch.linalg.inv(laplace.posterior.to_dense())
    return jacobian @ covariance @ jacobian.transpose(1, 2)


def gaussian_nll(noise: float) -> Callable[[Tensor, Tensor], Any]:
    """Σ −log N(y; f, noise²)."""
    return lambda f, y: 0.5 * ((y - f) / noise).square().sum() + y.numel() * math.log(noise * math.sqrt(2 * math.pi))


def gaussians(
    width: int,
    count: int = 80,
    sure: float = 4.0,
    wide: float = 1.0,
    targets: Tensor | None = None,
    seed: int = 0,
    shift: float = 0.0,
) -> OutputGaussians:
    """Returns Gaussians over the outputs of some examples, as a posterior would give them."""
    roots = normal(count, width, width, seed=seed + 1) / math.sqrt(width)
    spread = 0.2 + 3 * torch.rand(count, 1, 1, generator=generator(seed + 2), dtype=torch.float64)
    cov = wide * spread * roots @ roots.mT
    y = torch.randint(width, (count,), generator=generator(seed + 3)) if targets is None else targets
    weight = 0.5 + torch.rand(count, generator=generator(seed + 4), dtype=torch.float64)
    return OutputGaussians(shift + sure * normal(count, width, seed=seed), (cov,), y, weight, count)
