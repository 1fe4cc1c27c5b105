"""Gaussians over a network's outputs that are computed once for each input: many validation sets of one pool cost one pass.

A fit that is tuned on another validation set has the same curvature, and so the same covariances under each of the rule's priors. Only
the link is left to compute. The predictions equal those of `Laplace.tune` and `Laplace.predict` to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import aftermap as am
from aftermap.batches import Batch
from aftermap.laplace import ValidationResult
from aftermap.laplace.latents import OutputGaussians
from aftermap.laplace.validation import RATIOS, search_family
from aftermap.likelihoods import at_temperature
from aftermap.predictive import Prediction, gaussian_prediction, latent_gaussians
from benchmarks.quality.training import Batches

__all__ = ["KeptOutputs"]


class KeptOutputs:
    """The outputs of a fitted classifier, under each ratio of prior precision to data scale.

    Args:
        laplace: The fit, whose posterior is Gaussian and in blocks.
    """

    def __init__(self, laplace: am.Laplace):
        self.laplace = laplace
        posterior: Any = laplace.posterior
        self._variants = [posterior.with_prior(r, scale=1.0) for r in RATIOS]
        self._rows: dict[bytes, tuple[Tensor, Tensor]] = {}

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means [N, C] and covariances [N, R, C, C], one for each ratio, at data scale 1."""
        keys = [row.numpy().tobytes() for row in x]
        new = [i for i, key in enumerate(keys) if key not in self._rows]
        if new:
            predictor, inputs = self.laplace.predictor, x[new]
            batch = Batch(inputs, None, None, len(inputs))
            latents = latent_gaussians(predictor.plan(batch), predictor.posterior, batch, variants=self._variants)
            covariances = torch.stack([torch.as_tensor(latent.cov) for latent in latents], 1).detach()
            for i, mean, covariance in zip(new, latents[0].mean.detach(), covariances, strict=True):
                self._rows[keys[i]] = mean, covariance
        found = [self._rows[key] for key in keys]
        return torch.stack([mean for mean, _ in found]), torch.stack([covariance for _, covariance in found])

    def tune(self, data: Batches) -> ValidationResult:
        """What `Laplace.tune` finds on a validation set."""
        parts = [self.outputs(x) for x, _ in data]
        mean, covariances = (torch.cat(part).double() for part in zip(*parts, strict=True))
        targets = torch.cat([y for _, y in data])
        gaussians = OutputGaussians(
            mean, covariances.unbind(1), targets, torch.ones(len(mean), dtype=torch.float64), len(mean)
        )
        return search_family(gaussians, self.laplace.base_likelihood)

    def predict(self, x: Tensor, found: ValidationResult) -> Prediction:
        """What `Laplace.predict` gives after a tuning."""
        mean, covariances = self.outputs(x)
        return gaussian_prediction(
            at_temperature(self.laplace.base_likelihood, found.output_temperature),
            mean,
            covariances[:, RATIOS.index(found.ratio)] / found.data_scale,
        )
