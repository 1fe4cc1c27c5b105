"""A fixed set of weights as an ensemble: samples of any posterior, drawn once and used for every input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from aftermap.baselines.base import Baseline, check_count, outputs_under, read_inputs
from aftermap.errors import InputError
from aftermap.likelihoods import Likelihood
from aftermap.params import Params
from aftermap.posteriors import Posterior
from aftermap.predictive import Prediction, draw_weights, samples_prediction

__all__ = ["Particles"]


@final
class Particles(Baseline):
    """Predicts with a fixed set of weight samples, so that every input meets the same networks.

    Args:
        model: the network; it is never changed.
        weights: S dictionaries, parameter (or buffer) -> value. Parameters that are missing keep the model's own values.
        likelihood: "classification", "binary", "regression", "counts" or an object from `aftermap.likelihoods`.
        mixture: how much each set counts [S]; None: all the same.

    Raises:
        InputError: no weights, names that the model does not have, or shapes that differ.

    References:
        Ritter, Botev, Barber 2018, appendix D.

    >>> net = nn.Linear(2, 3)
    >>> own = {n: p.detach() for n, p in net.named_parameters()}
    >>> other = {n: -p for n, p in own.items()}
    >>> Particles(net, [own, other]).predict(torch.ones(4, 2)).samples.shape
    torch.Size([2, 4, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[Params],
        likelihood: str | Likelihood = "classification",
        *,
        mixture: Tensor | Sequence[float] | None = None,
    ):
        super().__init__(model, likelihood)
        self.weights = [_checked(model, each, i) for i, each in enumerate(weights)]
        if not self.weights:
            raise InputError("Particles needs at least one set of weights, got none")
        self.mixture = None if mixture is None else torch.as_tensor(mixture)
        if self.mixture is not None and self.mixture.shape != (len(self.weights),):
            raise InputError(
                f"mixture has shape {list(self.mixture.shape)}, but there are {len(self.weights)} sets of weights"
            )

    @staticmethod
    def from_posterior(
        model: nn.Module,
        posterior: Posterior,
        count: int = 30,
        likelihood: str | Likelihood = "classification",
        *,
        generator: torch.Generator | None = None,
    ) -> Particles:
        """Draws ``count`` sets of weights from a posterior, once."""
        return Particles(model, draw_weights(posterior, check_count("count", count), generator), likelihood)

    def __len__(self) -> int:
        return len(self.weights)

    def outputs(self, inputs: Any, samples: int | None, generator: torch.Generator | None) -> Tensor:
        count = len(self) if samples is None else samples
        if count > len(self):
            raise InputError(f"samples={count}, but there are only {len(self)} sets of weights")
        return torch.stack([outputs_under(self.model, each, inputs) for each in self.weights[:count]])

    def predict(
        self,
        x: Any,
        *,
        samples: int | None = None,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Predicts; ``samples`` takes only the first so many sets of weights."""
        if self.mixture is None:
            return super().predict(x, samples=samples, differentiable=differentiable, generator=generator)
        inputs = read_inputs(self.model, x)
        with torch.set_grad_enabled(differentiable):
            values = self.outputs(inputs, samples, generator)
        found = samples_prediction(self.likelihood, values, weights=self.mixture[: len(values)])
        return replace(found, link="samples")


def _checked(model: nn.Module, weights: Params, index: int) -> Params:
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in weights.items():
        if name not in known:
            raise InputError(f"weights[{index}] names {name!r}, which the model does not have")
        if value.shape != known[name].shape:
            raise InputError(
                f"weights[{index}][{name!r}] has shape {list(value.shape)}, the model's has {list(known[name].shape)}"
            )
    return {n: v.detach().to(known[n]) for n, v in weights.items()}
