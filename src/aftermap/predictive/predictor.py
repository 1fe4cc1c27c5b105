"""A model with a posterior over its weights, ready to predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Batch, call_model, check_device, check_inputs, unpack_inputs
from aftermap.curvature.probe import Probe, check_outputs, probe
from aftermap.errors import InputError
from aftermap.likelihoods import Likelihood
from aftermap.params import Params
from aftermap.predictive.linearised import (
    differentiable_latent,
    function_samples,
    joint_covariance,
    latent_gaussians,
)
from aftermap.predictive.links import gaussian_prediction, samples_prediction
from aftermap.predictive.prediction import Prediction
from aftermap.predictive.sampling import sampled_outputs
from aftermap.predictive.weights import WeightsWatch

__all__ = ["KINDS", "PosteriorPredictor"]

KINDS = ("linearised", "sampling")


class PosteriorPredictor:
    """Predicts with a model and a posterior over its weights, by linearisation or by sampling.

    Args:
        model: the network at the posterior's mean, in eval mode.
        posterior: a `Posterior` over its parameters; for linearised predictions one with `functional_covariance`.
        likelihood: with its noise.
        previous: a predictor of the same model and parameters whose knowledge of the model is reused.
    """

    def __init__(
        self,
        model: nn.Module,
        posterior: Any,
        likelihood: Likelihood,
        previous: PosteriorPredictor | None = None,
    ):
        self.model, self.posterior, self.likelihood = model, posterior, likelihood
        self._probe: Probe | None = None if previous is None else previous._probe
        self._watch: WeightsWatch = WeightsWatch.of(model) if previous is None else previous._watch

    def probe(self, batch: Batch) -> Probe:
        """How the model treats a batch; looked at once."""
        if self._probe is None:
            self._probe = probe(self.model, self.posterior.names, batch)
        return self._probe

    def inputs(self, x: Any) -> Batch:
        """Inputs, checked and moved to the model's device."""
        self._watch.check(self.model)
        device, dtype = check_device(self.model)
        batch = unpack_inputs(x).to(device)
        check_inputs(batch.inputs, dtype)
        return batch

    def predict(
        self,
        x: Any,
        *,
        kind: str = "linearised",
        link: str = "auto",
        samples: int = 100,
        diagonal: bool = False,
        outputs: Sequence[int] | None = None,
        weights: list[Params] | None = None,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Predicts with uncertainty.

        Args:
            x: inputs as the model takes them: a tensor, a tuple of positional or a mapping of keyword arguments.
            kind: "linearised" (default: the Gaussian of the linearised network) or "sampling" (the network under weight samples).
            link: from latent Gaussian to probabilities: auto, mc, probit, pairwise or bridge.
            samples: of the link (mc), or weight samples.
            diagonal: only variances of the outputs, no covariances.
            outputs: only these of the C outputs (regression): their variances; cheaper.
            weights: a fixed set of weight samples for kind="sampling" (`ensemble`).
            differentiable: keep the gradient in x (small batches).
            generator: for the samples.
        """
        if kind not in KINDS:
            raise InputError(f"kind={kind!r} is not known; allowed are {', '.join(map(repr, KINDS))}")
        batch = self.inputs(x)
        if kind == "sampling":
            with torch.set_grad_enabled(differentiable):
                values = sampled_outputs(self.model, self.posterior, batch.inputs, samples, generator, weights)
            return samples_prediction(self.likelihood, values)
        if differentiable:
            if not isinstance(batch.inputs, Tensor):
                raise InputError("differentiable=True needs a single tensor as input")
            latent = differentiable_latent(self.model, self.posterior, batch.inputs, diagonal=diagonal)
        else:
            latent = latent_gaussians(
                self.model, self.posterior, batch, self.probe(batch), diagonal=diagonal, outputs=outputs
            )[0]
        mean = latent.mean if outputs is None else latent.mean[..., list(outputs)]
        return gaussian_prediction(
            self.likelihood,
            mean,
            latent.cov,
            latent_var=latent.var if latent.cov is None else None,
            link=link,
            samples=samples,
            generator=generator,
        )

    def map_prediction(self, x: Any) -> Prediction:
        """The network's own answer as a Prediction without epistemic uncertainty."""
        with torch.no_grad():
            outputs = call_model(self.model, self.inputs(x).inputs)
        check_outputs(outputs, len(outputs))
        return gaussian_prediction(self.likelihood, outputs, latent_var=torch.zeros_like(outputs))

    def joint(self, x: Any) -> tuple[Tensor, Tensor]:
        """Mean [N, C] and covariance [N, C, N, C] of the outputs of several inputs together (linearised)."""
        batch = self.inputs(x)
        return joint_covariance(self.model, self.posterior, batch, self.probe(batch))

    def function_samples(self, x: Any, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Samples of the linearised network's outputs with the true correlation between inputs: [count, N, ..., C]."""
        return function_samples(self.model, self.posterior, self.inputs(x).inputs, count, generator)

    def variance_by_layer(self, x: Any) -> Mapping[str, Tensor]:
        """Each layer's part of the variance of the outputs [N, ..., C]; they add up to the whole, exactly."""
        batch = self.inputs(x)
        found = latent_gaussians(self.model, self.posterior, batch, self.probe(batch), diagonal=True, by_layer=True)
        return found[0].by_layer
