"""Small networks with posteriors, in float64; Iris with a 4-8-3 network of 67 weights is the exact oracle of docs/mathematics/where.md."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from sklearn.datasets import load_iris
from torch import Tensor, nn

from aftermap.laplace import Laplace

__all__ = [
    "STRUCTURES",
    "Reused",
    "Tied",
    "by_module",
    "fitted",
    "generator",
    "iris",
    "iris_net",
    "look",
    "normal",
    "normed",
    "seeded",
    "wave",
]

STRUCTURES = ("kron", "ekfac", "kfra", "diagonal", "full", "low_rank", "matrix_free")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def seeded(build: Any, seed: int = 1) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double().eval()


@cache
def iris() -> tuple[tuple[Tensor, Tensor], ...]:
    bunch = load_iris()
    x = torch.tensor(bunch.data, dtype=torch.float64)
    x, y = (x - x.mean(0)) / x.std(0), torch.tensor(bunch.target)
    order = torch.randperm(len(x), generator=generator(3))
    x, y = x[order], y[order]
    return ((x[:60], y[:60]), (x[60:], y[60:]))


def look() -> list[tuple[Tensor, Tensor]]:
    """A few of the data, in two unequal batches."""
    (x, y), _ = iris()
    return [(x[:13], y[:13]), (x[13:30], y[13:30])]


@cache
def iris_net() -> nn.Module:
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    x, y = torch.cat([b[0] for b in iris()]), torch.cat([b[1] for b in iris()])
    parameters = list(net.parameters())
    optimiser = torch.optim.LBFGS(parameters, max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y, reduction="sum")
        loss = loss + 0.5 * sum(p.square().sum() for p in parameters)
        loss.backward()
        return loss

    optimiser.step(closure)
    optimiser.zero_grad(set_to_none=True)
    return net


def fitted(structure: str, net: nn.Module | None = None, **options: Any) -> Laplace:
    """A Laplace approximation of the Iris network, or of another one, fitted on all of the data."""
    la = Laplace(net or iris_net(), "classification", structure=structure, **options)
    return la.fit(list(iris()), progress=False)


def by_module(net: nn.Module) -> dict[str, Tensor]:
    """Module -> places of its parameters in the flat vector of all."""
    found: dict[str, list[Tensor]] = {}
    start = 0
    for name, value in net.named_parameters():
        found.setdefault(name.rpartition(".")[0], []).append(torch.arange(start, start + value.numel()))
        start += value.numel()
    return {k: torch.cat(v) for k, v in found.items()}


def wave(outputs: int = 2) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A regression with several outputs."""
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, outputs)))
    x = normal(31, 3, seed=5)
    y = torch.sin(x @ normal(3, outputs, seed=6)) + 0.1 * normal(31, outputs, seed=7)
    return net, [(x[:11], y[:11]), (x[11:], y[11:])]


class Tied(nn.Module):
    """An embedding whose table is also the weight of the head; the head has a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.table(tokens).mean(1))))


class Reused(nn.Module):
    """One layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.head(x)


def normed() -> nn.Module:
    """A convolution, a BatchNorm with statistics of its own, and a head; the last convolution is transposed."""
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 6, 2, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )
    nn.init.uniform_(net[1].running_mean, -0.1, 0.1)
    nn.init.uniform_(net[1].running_var, 0.5, 1.5)
    return net
