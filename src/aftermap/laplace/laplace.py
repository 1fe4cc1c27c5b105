"""Laplace: a trained network becomes Bayesian in three lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Batch, Unpack, iterate
from aftermap.curvature import Factors, fit_curvature
from aftermap.curvature.passes.plan import find_last_layer
from aftermap.curvature.passes.products import GGNOperator
from aftermap.errors import InputError, NotFittedError
from aftermap.laplace.dimension import DimensionResult
from aftermap.laplace.evidence import EvidenceResult, log_evidence
from aftermap.laplace.subnetwork import (
    Subnetwork,
    fit_subnetwork,
    is_subnetwork,
    subnetwork_structure,
    with_fixed_means,
)
from aftermap.laplace.tune import GridResult, reusable, tune_laplace
from aftermap.likelihoods import Likelihood, parse_likelihood
from aftermap.models import check_device, model_errors_explained
from aftermap.params import Params, Selection, named_parameters
from aftermap.posteriors import GaussianPosterior, MatrixFreePosterior
from aftermap.posteriors.base import Observation
from aftermap.predictive import PosteriorPredictor, Prediction, WeightsWatch, draw_weights
from aftermap.prior import PriorSpec

__all__ = ["MATRIX_FREE", "Laplace", "curvature_structure", "form_posterior"]

MATRIX_FREE = "matrix_free"


def curvature_structure(structure: str, update: bool) -> str:
    """The structure of the sums over data: a matrix-free posterior sums Kronecker factors, as its preconditioner."""
    if structure == MATRIX_FREE and update:
        raise InputError(
            "a matrix-free posterior cannot be updated: it passes over its data again and again. Fit on all data at once"
        )
    return "kron" if structure == MATRIX_FREE else structure


def form_posterior(
    structure: str,
    factors: Factors,
    mean: Params,
    prior: PriorSpec,
    *,
    prior_mean: float | Params,
    scale: Tensor,
    damping: str,
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood,
    unpack: Unpack | None,
) -> GaussianPosterior | MatrixFreePosterior:
    """The posterior of a structure; a matrix-free one keeps the data and is preconditioned by Kronecker factors."""
    blocks = GaussianPosterior.from_factors(factors, mean, prior, prior_mean=prior_mean, scale=scale, damping=damping)
    if structure != MATRIX_FREE:
        return blocks
    operator = GGNOperator(model, data, likelihood, list(factors.names), unpack)
    return MatrixFreePosterior.from_operator(operator, preconditioner=blocks)


class Laplace:
    """A Gaussian posterior around the trained weights of a network.

    The posterior is N(θ*, (s·H + P₀)⁻¹): H is the curvature of the negative log-likelihood at the trained weights θ*, summed
    over the data, P₀ the prior's precision and s = data_scale / temperature (times 1/σ² for a regression).

    Args:
        model: a trained network with outputs [N, ..., C], in eval mode. It is never changed.
        likelihood: "classification", "binary", "regression", "counts", or an object from `aftermap.likelihoods`.
        structure: of H: kron, ekfac, kfra, diagonal, full, low_rank, hessian, or matrix_free (the full GGN by products
            with the data, preconditioned by Kronecker factors).
        params: which weights are uncertain: "all", "last_layer", names, a regular expression, a function, or a
            `Subnetwork` (single weights, with their full covariance).
        curvature: exact, rademacher, sampled, empirical, or auto.
        prior_precision: one number, one per layer, or a mapping; see `posteriors.Prior`. `tune` finds it.
        prior_mean: a number or tensors by name.
        data_scale: multiplies the number of data (pseudo-observations).
        temperature: divides the log-likelihood.
        damping: "exact" (the prior is added in the eigenbasis), "factored" (Ritter et al. 2018, eq. 9) or "pi".
        approach: Kronecker factors of shared weights: expand or reduce.
        rank: of structure="low_rank".
        strict: refuse parameters without a layer rule.

    >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> la = Laplace(net, "regression").fit([(x, x**3)]).tune()
    >>> la.predict(x).epistemic.shape
    torch.Size([20, 1])
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        *,
        structure: str = "kron",
        params: Selection | Subnetwork = "all",
        curvature: str = "auto",
        prior_precision: PriorSpec = 1.0,
        prior_mean: float | Params = 0.0,
        data_scale: float = 1.0,
        temperature: float = 1.0,
        damping: str = "exact",
        approach: str = "expand",
        rank: int = 50,
        strict: bool = False,
    ):
        for name, value in (("data_scale", data_scale), ("temperature", temperature)):
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise InputError(f"{name}={value!r} must be a positive and finite number")
        if isinstance(params, Subnetwork):
            structure = subnetwork_structure(structure, damping)
        self.model = model
        self.observation = Observation.split(parse_likelihood(likelihood))
        self.structure, self.params, self.curvature = structure, params, curvature
        self.prior_mean, self.damping, self.approach = prior_mean, damping, approach
        self.rank, self.strict = rank, strict
        self.data_scale, self.temperature = float(data_scale), float(temperature)
        self.tuning: EvidenceResult | GridResult | DimensionResult | None = None
        self.report: Any = None
        self._prior_precision = prior_precision
        self._factors: Factors | None = None
        self._posterior: Any = None
        self._predictor: PosteriorPredictor | None = None
        self.data: Iterable[Any] | None = None  # of the fit, where it can be passed over again
        self._watch: WeightsWatch | None = None
        self.unpack: Unpack | None = None

    # What was fitted

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood with its present noise."""
        return self.observation.whole()

    @property
    def posterior(self) -> Any:
        """The posterior over the weights: a `GaussianPosterior`, or a `MatrixFreePosterior`."""
        if self._posterior is None:
            raise NotFittedError("this Laplace approximation has not been fitted yet: call fit(train_loader) first")
        return self._posterior

    @property
    def factors(self) -> Factors:
        """The curvature of the data."""
        if self._factors is None:
            raise NotFittedError("this Laplace approximation has not been fitted yet: call fit(train_loader) first")
        return self._factors

    @property
    def prior_precision(self) -> dict[str, Tensor]:
        """Prior precision by layer (a number), or by parameter where a layer holds several."""
        prior, found = self.posterior.prior, {}
        for layer, names in self.posterior.layers.items():
            if prior.is_scalar(list(names)):
                found[layer] = prior.precision[names[0]]
            else:
                found.update({n: prior.precision[n] for n in names})
        return found

    @property
    def n_data(self) -> float:
        """How many data were seen."""
        return self.factors.n_data

    @property
    def power(self) -> float:
        """What the log-likelihood is multiplied by: data_scale / temperature."""
        return self.data_scale / self.temperature

    def _scale(self) -> Tensor:
        return self.power * self.observation.curvature_scale()

    # Fitting

    @torch.inference_mode(False)
    def fit(
        self,
        data: Iterable[Any],
        *,
        update: bool = False,
        passes: int = 1,
        samples: int = 1,
        unpack: Unpack | None = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Laplace:
        """Sums the curvature over the data and forms the posterior.

        Args:
            data: batches: a DataLoader, or a list of (x, y), (x, y, weight) or mappings.
            update: add to what was fitted before (more data of the same kind) instead of starting anew.
            passes: how often to go through a loader that augments its data.
            samples: vectors per datum for curvature="rademacher" or "sampled".
            unpack: turns a batch of another form into (inputs, targets).
            generator: for random vectors.
            progress: show a bar; None: on a terminal.

        Returns:
            self.
        """
        if update:
            self.check_weights()
        with model_errors_explained(self.model, lambda: self._first(data, unpack).inputs):
            factors = self._curvature(
                data, update, samples=samples, passes=passes, unpack=unpack, generator=generator, progress=progress
            )
        prior: PriorSpec = self._prior_precision
        if update and self._factors is not None:
            factors = self._factors + factors
            prior = dict(self.posterior.prior.precision)
        mean: Params = {n: named_parameters(self.model)[n].detach() for n in factors.names}
        posterior = form_posterior(
            self.structure,
            factors,
            mean,
            prior,
            prior_mean=with_fixed_means(factors, mean, self.prior_mean),
            scale=self._scale(),
            damping=self.damping,
            model=self.model,
            data=data,
            likelihood=self.observation.base,
            unpack=unpack,
        )
        # Nothing is stored before everything has succeeded: a failed fit leaves the old one.
        self.data = reusable(data, self.data, update=update)
        self._factors, self._posterior, self.unpack, self._predictor = factors, posterior, unpack, None
        self._watch = WeightsWatch.of(self.model)
        return self

    def _first(self, data: Iterable[Any], unpack: Unpack | None) -> Batch:
        device, dtype = check_device(self.model)
        return next(iter(iterate(data, device=device, dtype=dtype, unpack=unpack)))

    def _curvature(self, data: Iterable[Any], update: bool, **options: Any) -> Factors:
        """The curvature of these data alone."""
        kept = self._factors if update else None
        options["curvature"] = self.curvature
        if isinstance(self.params, Subnetwork) or is_subnetwork(kept):
            prior, scale = self._prior_precision, self._scale()
            base = self.observation.base
            return fit_subnetwork(self.params, kept, self.model, data, base, prior, scale, **options)
        params = self.params
        if params == "last_layer":
            params = find_last_layer(self.model, self._first(data, options["unpack"]))
        return fit_curvature(
            self.model,
            data,
            self.observation.base,
            structure=curvature_structure(self.structure, update),
            params=params,
            approach=self.approach,
            rank=self.rank,
            strict=self.strict,
            **options,
        )

    def restore(self, observation: Observation, factors: Factors, posterior: Any) -> None:
        """Takes over a fit that was saved."""
        self.observation, self._factors, self._posterior = observation, factors, posterior
        self._predictor, self._watch = None, WeightsWatch.of(self.model)

    def check_weights(self) -> None:
        """Raises if the model has been changed since the fit."""
        if self._watch is None:
            raise NotFittedError("this Laplace approximation has not been fitted yet: call fit(train_loader) first")
        self._watch.check(self.model)

    # Evidence and tuning

    def log_evidence(self) -> Tensor:
        """Log marginal likelihood of the training data under the present prior and noise (0-d, float64)."""
        return log_evidence(self.posterior, self.factors, self.observation, self.power)

    @torch.inference_mode(False)
    def tune(
        self,
        val_loader: Iterable[Any] | None = None,
        *,
        method: str | None = None,
        kind: str = "linearised",
        link: str = "auto",
        samples: int = 100,
        per_layer: bool = True,
        noise: bool = True,
        precisions: Sequence[float] | None = None,
        scales: Sequence[float] | None = None,
        generator: torch.Generator | None = None,
    ) -> Laplace:
        """Finds the prior precision (and noise, and data scale) that fit best.

        Args:
            val_loader: held-out data, for method="validation"; for method="dimension" the training data, if not those of the fit.
            method: "evidence" (MacKay's fixed point on the training data), "lbfgs" (the same by gradients; for factored damping),
                "dimension" (the evidence, then the width of the whole posterior by the effective dimension of the full
                Gauss-Newton matrix; no labels, some passes over some data), or "validation" (a grid over data scale and precision on
                the predictive log-likelihood). None: validation with ``val_loader``; without, dimension for networks with
                normalisation layers and posteriors with several blocks, where the evidence misleads, else evidence. The dimension is that
                of the data of the fit: fit on all that the network was trained on, or on a part with ``data_scale``.
            kind: the predictive that validation scores: linearised or sampling.
            link: its link.
            samples: its samples.
            per_layer: evidence: one precision per layer, or one for all.
            noise: tune the noise of a regression too.
            precisions: validation: ratios precision / data scale to try.
            scales: validation: data scales to try.
            generator: dimension: for its draws; None: always the same.

        Returns:
            self; details are in ``tuning``.
        """
        tune_laplace(
            self,
            val_loader,
            method=method,
            kind=kind,
            link=link,
            samples=samples,
            per_layer=per_layer,
            noise=noise,
            precisions=precisions,
            scales=scales,
            generator=generator,
        )
        return self

    def move(self, precision: PriorSpec | None, *, level: float | None = None) -> None:
        """Another prior or noise: no data pass, no decomposition."""
        if level is not None:
            value = torch.tensor(level, dtype=torch.float64)
            self.observation = Observation(self.observation.base, value, self.observation.tunable)
        self._posterior = self.posterior.with_prior(precision, scale=self._scale())

    def with_prior(self, precision: PriorSpec) -> Laplace:
        """Sets the prior precision of a fitted posterior; returns self."""
        self.move(precision)
        return self

    # Prediction

    @property
    def predictor(self) -> PosteriorPredictor:
        """What predicts: the model, its posterior and the likelihood with its noise."""
        posterior = self.posterior
        if self._predictor is None or self._predictor.posterior is not posterior:
            self.check_weights()
            self._predictor = PosteriorPredictor(self.model, posterior, self.likelihood, self._predictor)
        return self._predictor

    def predict(self, x: Any, **options: Any) -> Prediction:
        """Predicts with uncertainty.

        Args:
            x: inputs as the model takes them: a tensor, a tuple of positional or a mapping of keyword arguments.
            options: kind ("linearised" or "sampling"), link, samples, diagonal, outputs, weights, local, differentiable and
                generator; see `PosteriorPredictor.predict`.
        """
        return self.predictor.predict(x, **options)

    def joint(self, x: Any) -> tuple[Tensor, Tensor]:
        """Mean [N, C] and covariance [N, C, N, C] of the outputs of several inputs together (linearised)."""
        return self.predictor.joint(x)

    def function_samples(self, x: Any, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Samples of the linearised network's outputs with the true correlation between inputs: [count, N, ..., C]."""
        return self.predictor.function_samples(x, count, generator)

    def variance_by_layer(self, x: Any) -> Mapping[str, Tensor]:
        """Each layer's part of the variance of the outputs [N, ..., C]; they add up to the whole, exactly."""
        return self.predictor.variance_by_layer(x)

    where = PosteriorPredictor.where

    def variance_of(self, functional: Any) -> Tensor:
        """The variance of a scalar functional of the network, or the covariance of several; see `PosteriorPredictor`."""
        return self.predictor.variance_of(functional)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Params:
        """Weights from the posterior: name -> [count, *shape]."""
        return self.posterior.sample(count, generator)

    def ensemble(self, count: int, generator: torch.Generator | None = None) -> list[Params]:
        """A fixed set of weight samples, to be used again and again: predict(x, kind="sampling", weights=...)."""
        return draw_weights(self.posterior, count, generator)

    # Saving

    def save(self, folder: str | Path, *, overwrite: bool = False, **more: Any) -> Path:
        """Writes the posterior to a folder (json and safetensors, never pickle); for ``more`` see `save_laplace`."""
        from aftermap.laplace.saving import save_laplace

        return save_laplace(self, folder, overwrite=overwrite, **more)

    def __repr__(self) -> str:
        state = (
            "not fitted" if self._factors is None else f"{self.n_data:g} data, {self.posterior.n_params:,} parameters"
        )
        return f"Laplace({type(self.model).__name__}, {self.likelihood!r}, structure={self.structure!r}, {state})"
