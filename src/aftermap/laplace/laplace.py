"""Laplace: a trained network becomes Bayesian in three lines."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.batches import Unpack
from aftermap.curvature import Factors, fit_curvature
from aftermap.curvature.passes.last_block import find_last_layer
from aftermap.curvature.passes.stream import first_batch
from aftermap.curvature.structures.base import find_structure
from aftermap.errors import InputError, NotFittedError
from aftermap.laplace.display import NotebookView
from aftermap.laplace.evidence import log_evidence
from aftermap.laplace.fitted import Fitted, Initial, Tuned, TuningResult, check_numbers, data_if_repeatable
from aftermap.laplace.subnetwork import Subnetwork, fit_subnetwork, is_subnetwork, subnetwork_structure
from aftermap.laplace.tune import choose_method, tune_by, tune_by_evidence
from aftermap.likelihoods import Likelihood, parse_likelihood, temperature_of
from aftermap.models import check_is_network, check_not_causal, check_not_sharded, explain_model_errors
from aftermap.params import Params, Selection, named_parameters
from aftermap.posteriors import CurvaturePosterior, GaussianPosterior
from aftermap.posteriors.base import Hyperparameters, has_noise, likelihood_with, split_noise
from aftermap.predictive import Functional, PosteriorPredictor, Prediction, WeightsFingerprint, draw_weights
from aftermap.prior import PriorSpec

if TYPE_CHECKING:
    from aftermap.laplace.auto import FitReport

__all__ = ["Laplace"]


class Laplace(NotebookView):
    """A Gaussian posterior around the trained weights of a network.

    The posterior is N(θ*, (s·H + P₀)⁻¹): H is the curvature of the negative log-likelihood at the trained weights θ*, summed
    over the data, P₀ the prior's precision and s = data_scale / temperature (times 1/σ² for a regression).

    Args:
        model: A trained network with outputs [N, ..., C], in eval mode. It is never changed.
        likelihood: "classification", "binary", "regression", "counts", or an object from `aftermap.likelihoods`.
        structure: The structure of H: "kron", "ekfac", "kfra", "diagonal", "full", "low_rank", "subset" (the full GGN of some
            training examples), "hessian", or "matrix_free" (the full GGN by products with the data, preconditioned by
            Kronecker factors).
        params: Which weights are uncertain: "all", "last_layer", "last_block" (the last block of a residual, convolutional or
            transformer network with its head, found by the order of execution), names, a regular expression, a function,
            or a `Subnetwork` (single weights, with their full covariance).
        curvature: How H is computed from the outputs: "exact", "rademacher", "sampled", "empirical", or "auto".
        prior_precision: The prior's precision: one number, one per layer, or a mapping; see `posteriors.Prior`. `tune` finds it.
        prior_mean: The prior's mean: a number, or tensors by parameter.
        data_scale: How many data each datum stands for.
        temperature: What the log-likelihood is divided by.
        damping: How the prior is added to Kronecker factors: "exact" (in the eigenbasis), "factored" (Ritter et al. 2018, eq. 9)
            or "pi".
        approach: How Kronecker factors of shared weights are formed: "expand" or "reduce".
        rank: How many directions structure="low_rank" and "subset" keep; None keeps all that a subset has.
        subset_size: How many training examples structure="subset" draws. Each of them stands for N / subset_size data.
        strict: Whether to refuse parameters without a layer rule.

    Raises:
        InputError: An option is not known, is no number where one is needed, or does not go with the structure.
        UnsupportedError: The model is a causal language model of transformers.

    >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> y = net(x).detach() + 0.01 * torch.randn(20, 1)  # data that the network fits
    >>> la = Laplace(net, "regression").fit([(x, y)]).tune()
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
        rank: int | None = 50,
        subset_size: int = 300,
        strict: bool = False,
    ):
        if isinstance(params, Subnetwork):
            structure = subnetwork_structure(structure, damping)
        entry = find_structure(structure)
        entry.check_options(curvature, damping)
        check_is_network(model, "Laplace(model, likelihood)")
        check_not_causal(model)
        check_not_sharded(model.parameters())
        self.model = model
        self.base_likelihood, noise = split_noise(parse_likelihood(likelihood))
        self.structure, self.params, self.curvature = structure, params, curvature
        self.damping, self.approach, self.strict = damping, approach, strict
        self.rank, self.subset_size = entry.check_rank(rank), checks.count("subset_size", subset_size)
        self._initial = Initial(
            prior_precision, prior_mean, noise, data_scale, temperature, temperature_of(self.base_likelihood) or 1.0
        )
        self._fitted: Fitted | None = None
        # The predictor of a fit, which keeps what it knows of the model, beside the weights of that fit.
        self._predictor: tuple[WeightsFingerprint, PosteriorPredictor] | None = None

    # What was fitted

    @property
    def fitted(self) -> Fitted:
        """The fit: curvature, posterior, hyperparameters and tuning.

        Raises:
            NotFittedError: There is none yet.
        """
        if self._fitted is None:
            raise NotFittedError("this Laplace approximation has not been fitted yet: call fit(train_loader) first")
        return self._fitted

    @fitted.setter
    def fitted(self, fitted: Fitted) -> None:
        self._fitted = fitted

    @property
    def posterior(self) -> CurvaturePosterior:
        """The posterior over the weights: a `GaussianPosterior`, or a `MatrixFreePosterior`."""
        return self.fitted.posterior

    @property
    def factors(self) -> Factors:
        """The curvature of the data."""
        return self.fitted.factors

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The prior, the noise, the data scale and the temperature of the fit."""
        return self.fitted.hyperparameters

    @property
    def _present(self) -> Hyperparameters | Initial:
        return self._initial if self._fitted is None else self._fitted.hyperparameters

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the predictive: with its present noise, or with the present temperature of its outputs."""
        return likelihood_with(self.base_likelihood, self._present.noise, self._present.output_temperature)

    @property
    def has_noise(self) -> bool:
        """Whether the likelihood has a noise that `tune` can find."""
        return has_noise(self.base_likelihood)

    @property
    def data_scale(self) -> float:
        """How many data each datum stands for; given to the constructor, or found by `tune`."""
        return float(self._present.data_scale)

    @property
    def temperature(self) -> float:
        """What the log-likelihood is divided by; given to the constructor."""
        return float(self._present.temperature)

    @property
    def output_temperature(self) -> float:
        """What the outputs are divided by in the predictive, softmax(f/T); that of the likelihood, or found by `tune`."""
        return float(self._present.output_temperature)

    @property
    def prior_mean(self) -> float | Params:
        """The prior's mean, as it was given to the constructor."""
        return self._initial.prior_mean

    @property
    def prior_precision(self) -> dict[str, Tensor]:
        """Prior precision by layer (a number), or by parameter where a layer holds several."""
        prior, by_layer = self.posterior.prior, {}
        for layer, names in self.posterior.layers.items():
            if prior.is_scalar(list(names)):
                by_layer[layer] = prior.precision[names[0]]
            else:
                by_layer.update({n: prior.precision[n] for n in names})
        return by_layer

    @property
    def tuning(self) -> TuningResult | None:
        """What the last `tune` gave; None before it and after a new `fit`."""
        return None if self._fitted is None else self._fitted.tuning

    @property
    def data(self) -> Iterable[Any] | None:
        """The data of the fit where they can be passed over again; None for a generator or a loaded posterior."""
        return None if self._fitted is None else self._fitted.data

    @property
    def unpack(self) -> Unpack | None:
        """What turned the batches of the fit into inputs and targets, if it was given."""
        return None if self._fitted is None else self._fitted.unpack

    @property
    def report(self) -> FitReport | None:
        """How `aftermap.fit` chose and checked this fit; None where `Laplace.fit` made it."""
        return None if self._fitted is None else self._fitted.report

    @report.setter
    def report(self, report: FitReport | None) -> None:
        self.fitted = replace(self.fitted, report=report)

    @property
    def n_data(self) -> float:
        """The number of data that the curvature was summed over."""
        return self.factors.n_data

    @property
    def likelihood_weight(self) -> float:
        """What the log-likelihood is multiplied by: data_scale / temperature."""
        return self.data_scale / self.temperature

    @property
    def power(self) -> float:
        """The old name of `likelihood_weight`."""
        warnings.warn("Laplace.power is now called Laplace.likelihood_weight", DeprecationWarning, stacklevel=2)
        return self.likelihood_weight

    @property
    def observation(self) -> Any:
        """The old place of `base_likelihood` (base), `hyperparameters.noise` (level) and `has_noise` (tunable)."""
        warnings.warn(
            "Laplace.observation is gone: use Laplace.base_likelihood, Laplace.hyperparameters.noise and Laplace.has_noise",
            DeprecationWarning,
            stacklevel=2,
        )
        return SimpleNamespace(base=self.base_likelihood, level=self._present.noise, tunable=self.has_noise)

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
        checkpoint: str | os.PathLike[str] | None = None,
        every: int = 100,
    ) -> Laplace:
        """Sums the curvature over the data and forms the posterior.

        A fit starts from the values of the constructor, whatever was tuned before; an update keeps what was tuned. After an
        error the old fit stays.

        Args:
            data: The batches: a DataLoader, or a list of (x, y), (x, y, weight) or mappings.
            update: Whether to add to what was fitted before (more data of the same kind) instead of starting anew.
            passes: How often to go through a loader that augments its data.
            samples: The number of vectors per datum for curvature="rademacher" or "sampled".
            unpack: What turns a batch of another form into (inputs, targets).
            generator: The source of random vectors, and of the examples that structure="subset" draws.
            progress: Whether to show a bar; None shows it on a terminal.
            checkpoint: A folder that keeps the sums, so that a fit that was killed goes on when it is called again; see `fit_curvature`.
            every: The number of batches after which the sums are written to ``checkpoint``.

        Returns:
            This object, so that calls can be chained.
        """
        before = self.fitted if update else None
        if before is not None:
            before.weights.check(self.model)
        with explain_model_errors(self.model, lambda: first_batch(self.model, data, unpack).inputs):
            factors = self._fit_curvature(
                data,
                before,
                samples=samples,
                passes=passes,
                unpack=unpack,
                generator=generator,
                progress=progress,
                checkpoint=checkpoint,
                every=every,
            )
        factors = factors if before is None else before.factors + factors
        parameters = named_parameters(self.model)
        weights: Params = {n: parameters[n].detach() for n in factors.names}
        hyperparameters = self._initial.resolve(factors, weights) if before is None else before.hyperparameters
        posterior: CurvaturePosterior = GaussianPosterior.from_factors(
            factors,
            weights,
            hyperparameters.prior,
            scale=hyperparameters.curvature_scale(factors.curvature),
            damping=self.damping,
        )
        make_posterior = find_structure(self.structure).posterior
        if make_posterior is not None:
            posterior = make_posterior(posterior, self.model, data, self.base_likelihood, unpack)
        # Nothing is stored before everything has succeeded: a failed fit leaves the old one.
        self._fitted = Fitted(
            factors,
            posterior,
            hyperparameters,
            WeightsFingerprint.of(self.model),
            data_if_repeatable(data, before),
            unpack,
            narrowing=1.0 if before is None else before.narrowing,
        )
        return self

    def _fit_curvature(self, data: Iterable[Any], before: Fitted | None, **options: Any) -> Factors:
        """Returns the curvature of these data alone; ``before`` is the fit that it will be added to."""
        options["curvature"] = self.curvature
        structure = find_structure(self.structure)
        if before is not None and not structure.updatable:
            raise InputError(
                f"a fit with structure={self.structure!r} cannot be updated: two such fits do not add up. Fit on all data at "
                "once, or use structure='kron', whose factors add up"
            )
        previous = None if before is None else before.factors
        if isinstance(self.params, Subnetwork) or (previous is not None and is_subnetwork(previous)):
            prior, scale = self._initial.prior_precision, self._initial.curvature_scale(self.curvature)
            return fit_subnetwork(
                self.params, previous, self.model, data, self.base_likelihood, prior, scale, **options
            )
        params = self.params
        if params == "last_layer":
            params = find_last_layer(self.model, first_batch(self.model, data, options["unpack"], together=True))
        return fit_curvature(
            self.model,
            data,
            self.base_likelihood,
            structure=structure.preconditioner or structure.name,
            params=params,
            approach=self.approach,
            rank=self.rank,
            subset_size=self.subset_size,
            strict=self.strict,
            check_layers=self._initial.check_layers if before is None else None,
            **options,
        )

    def restore(
        self, factors: Factors, posterior: GaussianPosterior, hyperparameters: Hyperparameters, narrowing: float = 1.0
    ) -> Laplace:
        """Takes over a fit that was saved; a new `fit` starts from its hyperparameters.

        Args:
            factors: The curvature of the data.
            posterior: The posterior over the weights.
            hyperparameters: The hyperparameters that the posterior was formed with.
            narrowing: The factor that tuning divided the covariance by; see `Fitted`.
        """
        self._initial = replace(self._initial, noise=hyperparameters.noise)
        self._fitted = Fitted(
            factors, posterior, hyperparameters, WeightsFingerprint.of(self.model), narrowing=narrowing
        )
        return self

    def check_weights(self) -> None:
        """Raises if the model has been changed since the fit."""
        self.fitted.weights.check(self.model)

    # Evidence and tuning

    def log_evidence(self) -> Tensor:
        """Returns the log marginal likelihood of the training data under the present prior and noise (0-d, float64).

        Where tuning divided the covariance by a factor, by counting every datum several times, this is the evidence of the
        posterior before that: the evidence of such data is no evidence of those that were seen.
        """
        fitted = self.fitted.without_narrowing()
        return log_evidence(fitted.posterior, fitted.factors, self.base_likelihood, fitted.hyperparameters)

    @torch.inference_mode(False)
    def tune(
        self,
        val_loader: Iterable[Any] | None = None,
        *,
        train_loader: Iterable[Any] | None = None,
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
        """Finds the prior precision, the data scale, the temperature of the outputs and the noise.

        Every tuning starts from the data scale and the temperature of the constructor, whatever was found before. With
        validation data, classes are tuned by `search_family`: the labels set the temperature, and the posterior is as wide as a small
        budget of likelihood allows. Without, the precisions come from the evidence, and the width is that at which the
        posterior agrees with the curvature that it averages over; training data cannot tell more. A regression is tuned by its
        residuals when each datum is left out, in closed form, and by those of validation data where there are some.

        Args:
            val_loader: Held-out data for method="validation" or "grid"; for method="self_consistent" and "dimension" the training data, if
                not those of the fit. A network that was trained on augmented data can also be tuned on its own training data
                under stronger augmentation, handed over here.
            train_loader: The training data where they are not at hand: of a loaded posterior, or of a fit on a generator. None takes those of the fit.
            method: "validation" (the rule for labels of classes, and for residuals), "self_consistent" (the rule without labels, for classes and
                counts; fit on all data that the network was trained on, or on a part with ``data_scale``), "leave_one_out" (the rule
                without labels for regressions), "evidence" (its maximum on the training
                data by MacKay's fixed point), "lbfgs" (the same by gradients; for factored damping), "dimension" (the evidence, then the width
                by the effective dimension of the full Gauss-Newton matrix), or "grid" (the least validation loss over data scale and
                precision). None takes validation with ``val_loader`` (grid for other likelihoods, for sampling, and where grid points are
                given), else self_consistent or leave_one_out where they apply, else evidence.
            kind: The predictive whose log-likelihood the grid maximises: "linearised" or "sampling".
            link: How the linearised predictive turns the Gaussian over logits into probabilities; see `predict`.
            samples: The number of draws that the predictive averages over, as in `predict`.
            per_layer: Whether the evidence finds one prior precision for each layer (True) or one for all weights (False).
            noise: Whether the noise of a regression is tuned, too.
            precisions: The ratios precision / data scale that method="grid" tries.
            scales: The data scales that method="grid" tries.
            generator: The source of random draws and samples of the data; None takes the same ones every time.

        Returns:
            This object, so that calls can be chained; details are in ``tuning``, and ``print(la.tuning)`` says what the data could decide.

        Warns:
            StatisticalWarning: What was found is not to be relied on; the message says why.
        """
        fitted, likelihood = self.fitted.with_data(train_loader), self.base_likelihood
        on_grid = precisions is not None or scales is not None
        chosen = choose_method(fitted, likelihood, val_loader, method, kind=kind, on_grid=on_grid, noise=noise)
        start = replace(fitted.hyperparameters, output_temperature=self._initial.output_temperature)
        fitted = replace(fitted, hyperparameters=start)
        by_gradients = chosen == "lbfgs" or self.damping != "exact"
        if chosen in ("evidence", "lbfgs"):
            return self.adopt(
                tune_by_evidence(fitted, likelihood, per_layer=per_layer, noise=noise, by_gradients=by_gradients)
            )
        fitted.weights.check(self.model)
        tuned = tune_by(
            chosen,
            fitted,
            self.base_likelihood,
            self.predictor,
            val_loader,
            kind=kind,
            link=link,
            samples=samples,
            per_layer=per_layer,
            noise=noise,
            by_gradients=by_gradients,
            precisions=precisions,
            scales=scales,
            generator=generator,
        )
        return self.adopt(tuned)

    def adopt(self, tuned: Tuned) -> Laplace:
        """Takes over hyperparameters that a tuning found, and returns self."""
        self._fitted = replace(
            self.fitted,
            posterior=tuned.posterior,
            hyperparameters=tuned.hyperparameters,
            tuning=tuned.result,
            narrowing=tuned.narrowing,
        )
        return self

    def with_prior(self, precision: PriorSpec) -> Laplace:
        """Sets the prior precision of a fitted posterior, without a pass over the data, and returns self.

        Args:
            precision: One number, one per layer, or a mapping; see `posteriors.Prior`.
        """
        fitted = self.fitted
        scale = fitted.hyperparameters.curvature_scale(fitted.factors.curvature)
        posterior = fitted.posterior.with_prior(precision, scale=scale)
        hyperparameters = replace(fitted.hyperparameters, prior=posterior.prior)
        self._fitted = replace(fitted, posterior=posterior, hyperparameters=hyperparameters)
        return self

    def narrow(self, factor: float) -> Laplace:
        """Divides the covariance of a fitted posterior by a factor, and returns self.

        The prior precision and the data scale grow by the factor; `log_evidence` stays that of the data as they are.
        """
        check_numbers("the factor to divide the covariance by", factor, positive=True)
        fitted = self.fitted
        hyperparameters = fitted.hyperparameters.narrowed(factor)
        posterior = hyperparameters.applied_to(fitted.posterior, fitted.factors.curvature)
        self._fitted = replace(
            fitted, posterior=posterior, hyperparameters=hyperparameters, narrowing=factor * fitted.narrowing
        )
        return self

    # Prediction

    @property
    def predictor(self) -> PosteriorPredictor:
        """What predicts: the model, its posterior and the likelihood with its noise."""
        fitted = self.fitted
        weights, earlier = self._predictor or (None, None)
        earlier = (
            earlier if weights is fitted.weights else None
        )  # what it knows of the model holds for these weights alone
        if earlier is not None and earlier.posterior is fitted.posterior:
            return earlier
        fitted.weights.check(self.model)
        base, noise = self.base_likelihood, fitted.hyperparameters.noise
        likelihood = likelihood_with(base, noise, fitted.hyperparameters.output_temperature)
        network = likelihood_with(base, noise)  # at the temperature that it was trained with
        predictor = PosteriorPredictor(self.model, fitted.posterior, likelihood, earlier, fitted.weights, network)
        self._predictor = (fitted.weights, predictor)
        return predictor

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
        local: bool = False,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
        unpack: Unpack | None = None,
        progress: bool | None = None,
    ) -> Prediction:
        """Predicts with uncertainty.

        Args:
            x: The inputs as the model takes them: a tensor, an array, a table of pandas or polars, a tuple of positional or a mapping
                of keyword arguments. Or batches of them: a DataLoader, or a list of (x, y), whose targets are not looked at.
                Many inputs are predicted in pieces, with the same draws for all.
            kind: "linearised" for the Gaussian of the linearised network, "margin" for its cheap form for classes (one backward pass), or
                "sampling" for the network under weight samples.
            link: How the linearised predictive turns the Gaussian over logits into probabilities: "auto", "mc", "probit",
                "pairwise" or "bridge".
            samples: The number of draws for link="mc", or of weight samples for kind="sampling".
            diagonal: Whether to compute only the variances of the outputs, without their covariances.
            outputs: Which of the outputs of a regression to predict; fewer are cheaper. None predicts all.
            weights: A fixed set of weight samples for kind="sampling", from `ensemble`.
            local: Whether kind="sampling" draws the outputs of linear layers, afresh for every example, instead of weights.
            differentiable: Whether to keep the gradient in x; for small batches.
            generator: The source of the random draws.
            unpack: What turns a batch of an unusual form into (inputs, targets).
            progress: Whether to show a bar over several pieces; None shows it on a terminal.
        """
        options = dict(locals())
        del options["self"], options["x"]
        return self.predictor.predict(x, **options)

    def joint(self, x: Any) -> tuple[Tensor, Tensor]:
        """Returns the mean [N, C] and the covariance [N, C, N, C] of the outputs of several inputs together (linearised)."""
        return self.predictor.joint(x)

    def function_samples(self, x: Any, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws outputs of the linearised network with the true correlation between inputs: [count, N, ..., C]."""
        return self.predictor.function_samples(x, count, generator)

    def variance_by_layer(self, x: Any) -> Mapping[str, Tensor]:
        """Returns each layer's part of the variance of the outputs [N, ..., C]; they add up to the whole, exactly."""
        return self.predictor.variance_by_layer(x)

    where = PosteriorPredictor.where

    def variance_of(self, functional: Functional | Sequence[Functional]) -> Tensor:
        """Returns the variance of a scalar functional of the network, or the covariance of several; see `PosteriorPredictor`."""
        return self.predictor.variance_of(functional)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Params:
        """Draws weights from the posterior: name -> [count, *shape]."""
        return self.posterior.sample(count, generator)

    def ensemble(self, count: int, generator: torch.Generator | None = None) -> list[Params]:
        """Draws a fixed set of weight samples, to be used again and again: predict(x, kind="sampling", weights=...)."""
        return draw_weights(self.posterior, count, generator)

    # Saving

    def save(self, folder: str | Path, *, overwrite: bool = False, **more: Any) -> Path:
        """Writes the posterior to a folder (json and safetensors, never pickle); for ``more`` see `save_laplace`."""
        from aftermap.laplace.saving import save_laplace

        return save_laplace(self, folder, overwrite=overwrite, **more)

    def __repr__(self) -> str:
        size = "not fitted" if self._fitted is None else f"{self.n_data:g} data, {self.posterior.n_params:,} parameters"
        return f"Laplace({type(self.model).__name__}, {self.likelihood!r}, structure={self.structure!r}, {size})"
