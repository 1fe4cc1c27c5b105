"""The network as it is: the point of comparison for everything else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from aftermap.baselines.base import Baseline, outputs_under
from aftermap.predictive import Prediction

__all__ = ["Deterministic"]


@final
class Deterministic(Baseline):
    """The trained network without any uncertainty about its weights (MAP).

    Its epistemic uncertainty is zero; what is left is the noise that the likelihood and the outputs say.

    Args:
        model: the network; predictions are made in eval mode, and it is never changed.
        likelihood: "classification", "binary", "regression", "counts" or an object from `aftermap.likelihoods`.

    >>> net = torch.nn.Linear(3, 4)
    >>> Deterministic(net).predict(torch.ones(5, 3)).epistemic
    tensor([0., 0., 0., 0., 0.])
    """

    def outputs(self, inputs: Any, samples: int | None, generator: torch.Generator | None) -> Tensor:
        return outputs_under(self.model, {}, inputs).unsqueeze(0)

    def predict(
        self,
        x: Any,
        *,
        samples: int | None = None,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        found = super().predict(x, samples=samples, differentiable=differentiable, generator=generator)
        # One sample's mutual information is zero; rounding would leave ±1e-17.
        epistemic = torch.zeros_like(found.epistemic)
        return replace(found, epistemic=epistemic, aleatoric=found.total, link="map")
