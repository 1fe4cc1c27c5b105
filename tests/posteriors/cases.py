"""Small networks and their factors, in float64: every kind of block, alone and mixed; all sizes distinct."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.curvature import Factors, fit_curvature
from aftermap.params import Params
from aftermap.posteriors import GaussianPosterior

__all__ = ["CASES", "build", "generator", "made", "mean_of", "normal", "posterior_of"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


class Text(nn.Module):
    """An embedding, whose input factor is diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 3), nn.Linear(3, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(tokens)).mean(1))


class Odd(nn.Module):
    """Parameters without a layer rule, one of them a single number; a layer that is never called; a norm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head, self.idle = nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 4), nn.Linear(2, 3)
        self.shift, self.gain = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.first(x) * self.gain)) + self.shift)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


def _grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, (2, 3), groups=2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
    )


def _transposed() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose1d(2, 3, 4), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(3, 4))


def _dead() -> nn.Module:
    # Two of the six units never fire: zero rows and columns in the factors.
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
    with torch.no_grad():
        net[0].weight[:2] = 0.0
        net[0].bias[:2] = -5.0
    return net


def _dead_layer() -> nn.Module:
    # No unit fires at all: the first layer has inputs but no gradients.
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
    nn.init.constant_(net[0].bias, -50.0)
    return net


def _tokens() -> Tensor:
    return torch.randint(7, (11, 5), generator=generator(3))


_NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (_mlp, lambda: normal(11, 3, seed=1)),
    "grouped": (_grouped, lambda: normal(11, 2, 4, 5, seed=1)),
    "transposed": (_transposed, lambda: normal(11, 2, 5, seed=1)),
    "text": (Text, _tokens),
    "odd": (Odd, lambda: normal(11, 3, seed=1)),
    "dead": (_dead, lambda: normal(11, 3, seed=1)),
    "dead layer": (_dead_layer, lambda: normal(11, 3, seed=1)),
    "linear": (lambda: nn.Linear(3, 4), lambda: normal(11, 3, seed=1)),
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "kron": ("mlp", {"structure": "kron"}),
    "kron grouped expand": ("grouped", {"structure": "kron"}),
    "kron grouped reduce": ("grouped", {"structure": "kron", "approach": "reduce"}),
    "kron transposed": ("transposed", {"structure": "kron"}),
    "kron embedding": ("text", {"structure": "kron"}),
    "kron mixed with full": ("odd", {"structure": "kron"}),
    "kron mixed with diagonal": ("odd", {"structure": "kron", "small_block": 2}),
    "kron dead": ("dead", {"structure": "kron"}),
    "kron dead layer": ("dead layer", {"structure": "kron"}),
    "kron one layer": ("linear", {"structure": "kron"}),
    "ekfac": ("mlp", {"structure": "ekfac"}),
    "ekfac grouped": ("grouped", {"structure": "ekfac"}),
    "ekfac embedding": ("text", {"structure": "ekfac"}),
    "ekfac mixed": ("odd", {"structure": "ekfac"}),
    "kfra": ("mlp", {"structure": "kfra"}),
    "diagonal": ("mlp", {"structure": "diagonal"}),
    "diagonal odd": ("odd", {"structure": "diagonal"}),
    "diagonal transposed": ("transposed", {"structure": "diagonal"}),
    "full": ("mlp", {"structure": "full"}),
    "full odd": ("odd", {"structure": "full"}),
    "full last layer": ("mlp", {"structure": "full", "params": "last_layer"}),
    "low_rank": ("mlp", {"structure": "low_rank", "rank": 7}),
    "low_rank odd": ("odd", {"structure": "low_rank", "rank": 9}),
}


def build(net: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A network with fixed weights, and two unequal batches of eleven data in four classes."""
    make, inputs = _NETS[net]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = make().to(dtype).eval()
    x = inputs()
    x = x.to(dtype) if x.is_floating_point() else x
    y = torch.randint(4, (11,), generator=generator(4))
    return model, [(x[:7], y[:7]), (x[7:], y[7:])]


def made(case: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Factors]:
    """The network and factors of a case, made once."""
    return _made(case, dtype)


@cache
def _made(case: str, dtype: torch.dtype) -> tuple[nn.Module, Factors]:
    net, options = CASES[case]
    model, data = build(net, dtype)
    return model, fit_curvature(model, data, "classification", generator=generator(6), progress=False, **options)


def mean_of(model: nn.Module) -> Params:
    return {n: p.detach() for n, p in model.named_parameters()}


def posterior_of(case: str, prior: Any = 0.7, dtype: torch.dtype = torch.float64, **options: Any) -> GaussianPosterior:
    model, factors = made(case, dtype)
    return GaussianPosterior.from_factors(factors, mean_of(model), prior, **options)
