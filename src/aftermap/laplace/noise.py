"""The observation noise of a regression, apart from its curvature: it enters once, when the posterior is formed.

A Gaussian likelihood with noise σ·v (v: 1, or the given ratio between outputs) has the curvature of noise v divided by σ²
and a log-likelihood that is known for every σ from the one at σ = 1. So σ is tuned without a pass over the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.curvature.factors import Factors
from aftermap.likelihoods import Gaussian, Likelihood

__all__ = ["Observation"]


@dataclass(frozen=True)
class Observation:
    """A likelihood split into a fixed part and a noise level.

    Attributes:
        base: the likelihood that the curvature is computed with.
        level: σ, a 0-d float64 tensor; 1 where there is no noise to tune.
        tunable: whether σ is a parameter (Gaussian likelihoods).
    """

    base: Likelihood
    level: Tensor
    tunable: bool

    @staticmethod
    def split(likelihood: Likelihood) -> Observation:
        """Takes the noise out of a Gaussian likelihood; others stay whole."""
        one = torch.ones((), dtype=torch.float64)
        if not isinstance(likelihood, Gaussian):
            return Observation(likelihood, one, False)
        noise = torch.as_tensor(likelihood.noise, dtype=torch.float64).detach()
        if noise.dim() == 0:
            return Observation(Gaussian(1.0), noise, True)
        return Observation(likelihood, one, True)

    def whole(self) -> Likelihood:
        """The likelihood with its present noise."""
        if not isinstance(self.base, Gaussian):
            return self.base
        noise = torch.as_tensor(self.base.noise, dtype=torch.float64) * self.level.detach()
        return Gaussian(float(noise) if noise.dim() == 0 else noise)

    def curvature_scale(self, level: Tensor | None = None) -> Tensor:
        """1/σ²."""
        return 1 / (self.level if level is None else level) ** 2

    def log_likelihood(self, factors: Factors, level: Tensor | None = None) -> Tensor:
        """Σ log p(y_n | f_n) at noise σ, differentiable in it."""
        level = self.level if level is None else level
        if not self.tunable:
            return torch.tensor(-factors.loss, dtype=torch.float64)
        squares, count = self.squared_error(factors), factors.n_data * factors.n_outputs
        return -0.5 * squares / level**2 - count * level.log() - self._constant(factors)

    def squared_error(self, factors: Factors) -> float:
        """Σ (y − f)²/v²."""
        return max(0.0, 2 * (factors.loss - self._constant(factors)))

    def _constant(self, factors: Factors) -> float:
        """Σ ½ log(2π v²)."""
        assert isinstance(self.base, Gaussian)  # tunable
        noise = torch.as_tensor(self.base.noise, dtype=torch.float64)
        per_datum = 0.5 * (math.log(2 * math.pi) + 2 * noise.log().mean()) * factors.n_outputs
        return float(factors.n_data * per_datum)
