"""One case per built-in likelihood: the object and data that it accepts."""

from __future__ import annotations

import torch
from torch import Tensor

from aftermap.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)

__all__ = ["BUILT_IN", "LEADING", "NOISE", "WEIGHT", "WIDTH", "make_data", "seeded"]

LEADING = [(5,), (5, 3), (5, 3, 2)]
WIDTH = 4

WEIGHT = torch.tensor([0.5, 2.0, 1.5, 0.25], dtype=torch.float64)
NOISE = torch.tensor([0.3, 0.7, 1.1, 2.0], dtype=torch.float64)

BUILT_IN: dict[str, Likelihood] = {
    "categorical": Categorical(),
    "weighted": Categorical(weight=WEIGHT),
    "ignoring": Categorical(weight=WEIGHT, ignore_index=-1),
    "ignoring_a_class": Categorical(ignore_index=2),
    "tempered": Categorical(weight=WEIGHT, temperature=1.7),
    "bernoulli": Bernoulli(),
    "tempered_bernoulli": Bernoulli(temperature=0.6),
    "gaussian": Gaussian(noise=0.3),
    "gaussian_per_output": Gaussian(noise=NOISE),
    "mean_log_variance": HeteroscedasticGaussian(),
    "natural": HeteroscedasticGaussian("natural"),
    "poisson": Poisson(),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_data(name: str, leading: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs and targets that the likelihood accepts, in float64."""
    g = seeded(seed)
    outputs = 1.5 * torch.randn(*leading, WIDTH, generator=g, dtype=torch.float64)
    if name == "natural":
        outputs[..., WIDTH // 2 :] = -outputs[..., WIDTH // 2 :].abs() - 0.2
    if name in ("categorical", "weighted", "ignoring", "ignoring_a_class", "tempered"):
        targets = torch.randint(WIDTH, leading, generator=g)
        if name == "ignoring":
            targets = torch.where(torch.rand(leading, generator=g) < 0.4, -1, targets)
    elif name in ("bernoulli", "tempered_bernoulli"):
        targets = torch.randint(2, (*leading, WIDTH), generator=g)
    elif name == "poisson":
        targets = torch.randint(7, (*leading, WIDTH), generator=g)
    elif name in ("mean_log_variance", "natural"):
        targets = torch.randn(*leading, WIDTH // 2, generator=g, dtype=torch.float64)
    else:
        targets = torch.randn(*leading, WIDTH, generator=g, dtype=torch.float64)
    return outputs, targets
