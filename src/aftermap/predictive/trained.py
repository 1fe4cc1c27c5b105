"""The posterior that training has built, with its network, as a predictor of the library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Unpack
from aftermap.curvature.structures.base import Factors
from aftermap.curvature.structures.diagonal import DiagonalBlock
from aftermap.errors import InputError
from aftermap.lazy import lazy_attribute
from aftermap.likelihoods import Likelihood, at_temperature, temperature_of
from aftermap.models import WeightsFingerprint, evaluation_mode
from aftermap.params import Params, named_parameters
from aftermap.posteriors import GaussianPosterior
from aftermap.posteriors.io import save_posterior
from aftermap.predictive.functionals import Functional
from aftermap.predictive.prediction import Prediction
from aftermap.predictive.predictor import PosteriorPredictor

__all__ = ["TrainedPosterior"]


class TrainedPosterior:
    """A network with the Gaussian over its weights that training has built.

    It holds around the weights that the network has when it is made: predictions refuse a network that was trained further.

    Args:
        model: The network, at the mean.
        posterior: The Gaussian over its weights.
        factors: The curvature that it was made from, as sums over the data.
        likelihood: The likelihood of predictions; None means that it is unknown.
        method: The name of the optimiser.
        damping: For each parameter what damping adds to its precision, Nγ/τ; empty where there is none.
        output_temperature: T, what `tune` found that outputs are divided by in the predictive, and 1 where they are no logits; None
            for the posterior as training left it.

    Attributes:
        tuning: What the last `tune` gave; None before it, and for a loaded posterior.
    """

    def __init__(
        self,
        model: nn.Module,
        posterior: GaussianPosterior,
        factors: Factors,
        likelihood: Likelihood | None,
        method: str,
        damping: Mapping[str, float],
        output_temperature: float | None = None,
    ):
        self.model, self.posterior, self.factors, self.method = model, posterior, factors, method
        self.damping, self.output_temperature = dict(damping), output_temperature
        self.tuning: Any = None
        self._likelihood = likelihood
        self._weights = WeightsFingerprint.of(model)
        self._predictor: PosteriorPredictor | None = None

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood p(y | f) of predictions: with the noise or the temperature of the outputs that tuning found.

        Raises:
            InputError: It was not given, and the loss did not tell it.
        """
        base = self.base_likelihood
        if self.output_temperature is None or temperature_of(base) is None:
            return base
        return at_temperature(base, self.output_temperature)

    @property
    def base_likelihood(self) -> Likelihood:
        """The likelihood at the temperature that the network was trained with, which its own answers keep."""
        if self._likelihood is None:
            raise InputError(
                "the likelihood is unknown: a loss does not always tell it. Pass it: opt.posterior('regression') or "
                "opt.posterior(aftermap.likelihoods.Gaussian(noise=0.3))"
            )
        return self._likelihood

    @property
    def predictor(self) -> PosteriorPredictor:
        """The predictor made of model, posterior and likelihood.

        Raises:
            InputError: The network has changed since this posterior was made.
        """
        self._weights.check(
            self.model,
            f"{self.method} gave this posterior",
            "It holds around the weights of that moment: after more training call posterior() of the optimiser again, or restore "
            "the weights",
        )
        if self._predictor is None:
            network = self.base_likelihood
            self._predictor = PosteriorPredictor(
                self.model, self.posterior, self.likelihood, network_likelihood=network
            )
        return self._predictor

    def predict(
        self,
        x: Any,
        *,
        kind: str = "sampling",
        samples: int = 10,
        link: str = "auto",
        differentiable: bool = False,
        generator: torch.Generator | None = None,
        unpack: Unpack | None = None,
        progress: bool | None = None,
    ) -> Prediction:
        """Predicts with uncertainty; in evaluation mode, after which the model's modes are as before.

        Args:
            x: The inputs as the model takes them, arrays or tables of them, or batches; see :meth:`PosteriorPredictor.predict`.
            kind: The predictive: "sampling" (the network under draws of the weights, as in training) or "linearised".
            samples: The number of draws of the weights; for "linearised" those of the link.
            link: How "linearised" turns the Gaussian over outputs into probabilities: "auto", "mc", "probit", "pairwise" or
                "bridge".
            differentiable: Whether the result has a gradient in x.
            generator: The generator of the draws.
            unpack: What turns a batch of an unusual form into (inputs, targets).
            progress: Whether to show a bar over several pieces; None shows it on a terminal.

        Raises:
            InputError: The network has changed since this posterior was made, or the likelihood is unknown.
        """
        predictor = self.predictor
        with evaluation_mode(self.model):
            return predictor.predict(
                x,
                kind=kind,
                samples=samples,
                link=link,
                differentiable=differentiable,
                generator=generator,
                unpack=unpack,
                progress=progress,
            )

    def tune(
        self,
        val_loader: Iterable[Any],
        *,
        kind: str = "sampling",
        link: str = "auto",
        samples: int = 30,
        unpack: Unpack | None = None,
        generator: torch.Generator | None = None,
    ) -> TrainedPosterior:
        """Tunes the posterior on held-out data, by the rules of `Laplace.tune`, and returns self.

        Temperature and noise of training serve training; what they promise about new data was never compared with any. For classes
        the labels set the temperature of the outputs; for kind="linearised" the prior precision and the data scale are found
        anew, too. A regression gets a noise for each output, and the scale of its covariance, from held-out residuals.

        Args:
            val_loader: Batches that the network was not trained on; at most 1,000 examples of them are used.
            kind: The predictive that will be used: "sampling" or "linearised".
            link: The link of the linearised predictive; see `predict`.
            samples: The number of draws of the weights; for "linearised" those of the link.
            unpack: What turns a batch of an unusual form into (inputs, targets).
            generator: The source of the choice of examples; None takes the same every time.

        Returns:
            This object, so that calls can be chained; details are in ``tuning``.

        Raises:
            InputError: The network has changed since this posterior was made, or the likelihood is unknown.

        Warns:
            StatisticalWarning: The labels are few, or all the same.
        """
        tune_trained = lazy_attribute("aftermap.laplace.trained", "tune_trained")
        with evaluation_mode(self.model):
            tuned = tune_trained(
                self, val_loader, kind=kind, link=link, samples=samples, unpack=unpack, generator=generator
            )
        self.posterior, self._likelihood, self.tuning = tuned.posterior, tuned.base_likelihood, tuned.result
        self.output_temperature, self.damping, self._predictor = tuned.output_temperature, tuned.damping, None
        return self

    def variance_of(self, functional: Functional | Sequence[Functional]) -> Tensor:
        """Returns the variance of a functional, as :meth:`PosteriorPredictor.variance_of` does, in evaluation mode."""
        predictor = self.predictor
        with evaluation_mode(self.model):
            return predictor.variance_of(functional)

    def variance_by_layer(self, x: Any) -> dict[str, Tensor]:
        """Returns each layer's part of the variance of the outputs [N, ..., C]: where the uncertainty sits."""
        predictor = self.predictor
        with evaluation_mode(self.model):
            return dict(predictor.variance_by_layer(x))

    where = PosteriorPredictor.where

    def sample(self, count: int, generator: torch.Generator | None = None) -> Params:
        """Draws weights: for each name a tensor [count, *shape]."""
        return self.posterior.sample(count, generator)

    def as_prior(self, *, damping: float = 0.0) -> tuple[Params, Params]:
        """Returns (mean, precision) of each weight, for `set_prior` of the next task's optimiser.

        Precisions are one over the marginal variance, without what damping added to a diagonal posterior: it steadies the
        optimiser, but no datum said it. Keeping a share of it keeps more of the old task at the price of learning the new one
        less freely: the weights were never tried farther from the mean than damping allowed.

        Args:
            damping: The share of the damping that is kept, from 0 to 1.

        >>> from aftermap.optim import VOGN
        >>> net = nn.Linear(3, 2)
        >>> opt = VOGN(net, n_data=4)
        >>> loss = opt.step(lambda: nn.functional.cross_entropy(net(torch.ones(4, 3)), torch.tensor([0, 1, 0, 1])))
        >>> VOGN(net, n_data=4).set_prior(*opt.posterior().as_prior())
        """
        if not 0.0 <= damping <= 1.0:
            raise InputError(f"damping={damping!r} is the share that is kept: from 0 to 1")
        mean = {n: v.clone() for n, v in self.posterior.mean.items()}
        variance = self.posterior.marginal_variance()
        diagonal = {n for b in self.factors.blocks if isinstance(b, DiagonalBlock) for n in b.shapes}
        precision = {
            n: 1 / variance[n] - ((1 - damping) * self.damping.get(n, 0.0) if n in diagonal else 0.0) for n in mean
        }
        return mean, {n: v.to(mean[n].dtype) for n, v in precision.items()}

    def save(
        self,
        folder: str | Path,
        *,
        overwrite: bool = False,
        extras: Mapping[str, Any] | None = None,
        reference: Mapping[str, Tensor] | None = None,
        with_model: bool = False,
    ) -> Path:
        """Writes the posterior as json and safetensors into a folder, whole or not at all; `aftermap.load` reads it.

        Args:
            folder: The folder that is written.
            overwrite: Whether a folder that is there is replaced; on a failure it stays as it was.
            extras: The caller's own plain JSON values, such as thresholds.
            reference: Tensors by name to compare new inputs with, such as quantiles of scores.
            with_model: Whether the network's weights and buffers go into the folder, too.
        """
        config: dict[str, Any] = {
            "method": self.method,
            "likelihood": None if self._likelihood is None else self._likelihood.config(),
            "damping": self.damping,
            "extras": dict(extras or {}),
        }
        if self.output_temperature is not None:
            config["output_temperature"] = self.output_temperature
        return save_posterior(
            folder,
            self.posterior,
            self.factors,
            config,
            None if not reference else dict(reference),
            weights={**named_parameters(self.model), **dict(self.model.named_buffers())},
            model_state=self.model.state_dict() if with_model else None,
            overwrite=overwrite,
        )

    def __repr__(self) -> str:
        return f"TrainedPosterior({self.method}, {self.posterior.n_params:,} weights in {len(self.posterior.blocks)} blocks)"
