"""A model with a posterior over its weights, ready to predict."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.batches import Batch, Unpack, check_inputs, input_batches, is_batches, unpack_inputs
from aftermap.curvature.passes.plan import CheckedPlan
from aftermap.errors import DataError, InputError
from aftermap.lazy import lazy_attribute
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from aftermap.models import (
    WeightsFingerprint,
    call_model,
    check_device,
    check_modes,
    check_outputs,
    explain_model_errors,
)
from aftermap.params import Params
from aftermap.posteriors import Posterior
from aftermap.predictive.functionals import Functional, functional_covariance, functional_gradients, parse_functionals
from aftermap.predictive.linearised import (
    check_chosen,
    differentiable_latent,
    examples_at_once,
    function_samples,
    joint_covariance,
    latent_gaussians,
    margin_gaussian,
)
from aftermap.predictive.links import gaussian_prediction, samples_prediction
from aftermap.predictive.prediction import Prediction
from aftermap.predictive.sampling import locally_sampled_outputs, sampled_outputs
from aftermap.progress import announce, in_seconds
from aftermap.progress import progress as with_bar

__all__ = ["KINDS", "PosteriorPredictor"]

KINDS = ("linearised", "margin", "sampling")
_PIECE = 1024  # inputs that are predicted at a time, at most
_LEAST_PIECE = 32  # and at least
_LONG = 5.0  # seconds of a prediction from which its cost is said, and the cheap way
_MOST_SAMPLE_BYTES = 2**28  # bytes of samples and covariances that the prediction of many inputs keeps


class PosteriorPredictor:
    """Predicts with a model and a posterior over its weights, by linearisation or by sampling.

    Args:
        model: The network at the posterior's mean, in eval mode.
        posterior: The posterior over its parameters.
        likelihood: The likelihood, with its noise.
        previous: A predictor of the same model and parameters whose knowledge of the model is reused.
        weights: The weights that the model must still have. None means those that it has now.
        network_likelihood: The likelihood of the network's own answers; None takes ``likelihood``. They differ where the
            outputs of the predictive are divided by a temperature that was found after training.
    """

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        likelihood: Likelihood,
        previous: PosteriorPredictor | None = None,
        weights: WeightsFingerprint | None = None,
        network_likelihood: Likelihood | None = None,
    ):
        self.model, self.posterior, self.likelihood = model, posterior, likelihood
        self.network_likelihood = likelihood if network_likelihood is None else network_likelihood
        self._plan: CheckedPlan | None = None if previous is None else previous._plan
        known = weights if previous is None else previous._watch
        self._watch: WeightsFingerprint = WeightsFingerprint.of(model) if known is None else known

    def __getstate__(self) -> dict[str, Any]:
        # What was found out goes by the identity of modules, which a copy does not share: it looks anew.
        return {**self.__dict__, "_plan": None}

    @property
    def predictor(self) -> PosteriorPredictor:
        """This object: a Laplace approximation and the posterior of an optimiser answer to the same name."""
        return self

    def plan(self, batch: Batch) -> CheckedPlan:
        """Returns how the model's layers are read; made from the first batch, and checked on every one."""
        if self._plan is None:
            self._plan = CheckedPlan(self.model, self.posterior.names, batch)
        return self._plan

    def inputs(self, x: Any) -> Batch:
        """Returns the inputs, checked and moved to the model's device."""
        self._watch.check(self.model)
        check_modes(self.model)
        device, dtype = check_device(self.model)
        batch = unpack_inputs(x, dtype).to(device)
        check_inputs(batch.inputs, dtype)
        if batch.size == 0:
            raise DataError("the inputs hold no example; there is nothing to predict")
        return batch

    @torch.inference_mode(False)
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
        """Predicts with uncertainty, by linearisation or by sampling.

        Args:
            x: The inputs as the model takes them: a tensor, an array, a table of pandas or polars, a tuple of positional or a mapping
                of keyword arguments. Or batches of them: a DataLoader, or a list of (x, y), whose targets are not looked at.
                Many inputs are predicted in pieces, with the same draws for all. For classes a linearised result then keeps the samples of
                the probabilities and the covariances of the outputs up to 256 MB together, and beyond that neither of them.
            kind: The predictive: "linearised" (default: the Gaussian of the linearised network), "margin" (the cheap one for
                classes: one backward pass finds the variance of the difference between the two largest outputs, which
                stands for all differences), or "sampling" (the network under weight samples).
            link: The way from a latent Gaussian to probabilities: auto, mc, probit, pairwise or bridge.
            samples: The number of samples of the link (mc), or of weight samples.
            diagonal: Whether to compute only variances of the outputs, no covariances.
            outputs: The indices of the outputs of a regression to predict, which is cheaper. None means all.
            weights: A fixed set of weight samples for kind="sampling" (`ensemble`).
            local: Whether kind="sampling" draws the outputs of Linear layers, afresh for every example, instead of
                their weights (`locally_sampled_outputs`). There is less noise in averages over inputs, but there are no
                common weights.
            differentiable: Whether to keep the gradient in x (small batches).
            generator: The source of the random samples. None takes torch's default generator for kind="sampling"; the draws of a link are then
                the same in every call, those that the posterior was tuned with.
            unpack: What turns a batch of an unusual form into (inputs, targets).
            progress: Whether to show a bar over several pieces; None shows it on a terminal.
        """
        checks.choice("kind", kind, KINDS)
        if local and (kind != "sampling" or weights is not None):
            raise InputError(
                "local=True draws layer outputs for kind='sampling'; it has no use for weights= or other kinds"
            )
        many = not isinstance(x, Tensor) and is_batches(x)
        batch = None if many else self.inputs(x)
        few = batch is not None and batch.size <= _LEAST_PIECE
        size = _PIECE if batch is None or few or differentiable or kind == "sampling" else self._piece(batch, kind)
        if batch is None or (batch.size > size and not differentiable and _is_divisible(batch)):
            options = {"link": link, "diagonal": diagonal, "outputs": outputs, "weights": weights, "local": local}
            pieces = input_batches(x, unpack) if batch is None else (piece.inputs for piece in batch.pieces(size))
            total = -(-batch.size // size) if batch is not None else len(x) if isinstance(x, Sized) else None
            bar = with_bar(pieces, description="predicting", total=total, enabled=progress)
            return self._predict_pieces(bar, total, generator, progress, kind=kind, samples=samples, **options)
        likelihood = self.likelihood if outputs is None else _of_outputs(self.likelihood, outputs)
        with explain_model_errors(self.model, lambda: batch.inputs):
            if kind == "sampling":
                samples = checks.count("samples", samples)
                with torch.set_grad_enabled(differentiable):
                    if local:
                        values = locally_sampled_outputs(self.plan(batch), self.posterior, batch, samples, generator)
                    else:
                        values = sampled_outputs(self.model, self.posterior, batch.inputs, samples, generator, weights)
                check_chosen(outputs, values.shape[-1])
                return samples_prediction(likelihood, values if outputs is None else values[..., list(outputs)])
            if kind == "margin":
                if differentiable or not isinstance(likelihood, Categorical | Bernoulli):
                    raise InputError(
                        "kind='margin' is the cheap prediction of classes; use kind='linearised' for other likelihoods (diagonal=True "
                        "is cheaper for many outputs) and for differentiable=True"
                    )
                latent = margin_gaussian(self.plan(batch), self.posterior, batch)
            elif not differentiable:
                latent = latent_gaussians(self.plan(batch), self.posterior, batch, diagonal=diagonal, outputs=outputs)[
                    0
                ]
            elif isinstance(batch.inputs, Tensor):
                latent = differentiable_latent(
                    self.model, self.posterior, batch.inputs, diagonal=diagonal, outputs=outputs
                )
            else:
                raise InputError("differentiable=True needs a single tensor as input")
        mean = latent.mean if outputs is None else latent.mean[..., list(outputs)]
        return gaussian_prediction(
            likelihood,
            mean,
            latent.cov,
            latent_var=latent.var if latent.cov is None else None,
            link=link,
            samples=samples,
            generator=generator,
        )

    def _piece(self, batch: Batch, kind: str) -> int:
        """Returns how many inputs are predicted at a time: fewer of large networks, so that a bar moves."""
        vectors = 1 if kind == "margin" else None
        with explain_model_errors(self.model, lambda: batch.inputs):
            return min(_PIECE, max(_LEAST_PIECE, 4 * examples_at_once(self.plan(batch), batch, vectors=vectors)))

    def _say_cost(self, seconds: float, first: int, pieces: int, progress: bool | None, kind: str) -> None:
        """Says what a long prediction will take, from its first piece, and which way is cheap."""
        if seconds * pieces < _LONG:
            return
        line = f"{first * pieces:,} inputs: about {in_seconds(seconds * pieces)}, {1000 * seconds / first:.3g} ms each"
        classes = isinstance(self.likelihood, Categorical | Bernoulli)
        cheap = '; kind="margin" is several times faster' if kind == "linearised" and classes else ""
        announce(line + cheap, enabled=progress)

    def _predict_pieces(
        self,
        pieces: Iterable[Any],
        total: int | None,
        generator: torch.Generator | None,
        progress: bool | None,
        **options: Any,
    ) -> Prediction:
        """Predicts piece by piece. The same draws answer for all inputs, however they are cut; only local noise is each input's own."""
        if generator is None and options["kind"] == "sampling":
            generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        state, large = None if generator is None else generator.get_state(), 0
        predictions: list[Prediction] = []
        for piece in pieces:
            if generator is not None and state is not None and not options["local"]:
                generator.set_state(state)
            start = time.perf_counter()
            predictions.append(self.predict(piece, generator=generator, progress=False, **options))
            if len(predictions) == 1 and total is not None:
                self._say_cost(time.perf_counter() - start, len(predictions[0]), total, progress, options["kind"])
            if large <= _MOST_SAMPLE_BYTES:
                large += _large_size(predictions[-1])
                predictions = [_reduced(part) for part in predictions] if large > _MOST_SAMPLE_BYTES else predictions
            else:
                predictions[-1] = _reduced(predictions[-1])
        if not predictions:
            raise DataError("the inputs hold no example; there is nothing to predict")
        return Prediction.concatenate(predictions)

    @torch.inference_mode(False)
    def map_prediction(self, x: Any) -> Prediction:
        """Returns the network's own answer as a Prediction without epistemic uncertainty."""
        with torch.no_grad():
            outputs = call_model(self.model, self.inputs(x).inputs)
        check_outputs(outputs, len(outputs))
        return gaussian_prediction(self.network_likelihood, outputs, latent_var=torch.zeros_like(outputs))

    @torch.inference_mode(False)
    def joint(self, x: Any) -> tuple[Tensor, Tensor]:
        """Returns mean [N, C] and covariance [N, C, N, C] of the outputs of several inputs together (linearised)."""
        batch = self.inputs(x)
        with explain_model_errors(self.model, lambda: batch.inputs):
            return joint_covariance(self.plan(batch), self.posterior, batch)

    @torch.inference_mode(False)
    def variance_of(self, functional: Functional | Sequence[Functional]) -> Tensor:
        """Returns the variance gᵀΣg of a scalar functional ψ of the network, g = dψ/dθ at the trained weights.

        The same call answers for every posterior, whatever it knows of Σ: in blocks, by products with the data, by samples.

        Args:
            functional: A function of the network f, such as ``lambda f: f(x)[0, 1] - f(x)[0, 0]``, or several, for
                their covariance.

        Returns:
            The variance as a 0-d float64 tensor; for a sequence of Q functionals their covariance [Q, Q].

        Raises:
            InputError: A functional is not scalar or does not depend on the posterior's parameters.

        >>> net = nn.Linear(1, 1, bias=False)
        >>> from aftermap.posteriors import GaussianPosterior
        >>> from aftermap.curvature import fit_curvature
        >>> factors = fit_curvature(net, [(torch.ones(3, 1), torch.zeros(3, 1))], "regression")
        >>> posterior = GaussianPosterior.from_factors(factors, dict(net.named_parameters()))
        >>> predictor = PosteriorPredictor(net, posterior, Gaussian(1.0))
        >>> predictor.variance_of(lambda f: 2 * f(torch.ones(1, 1))[0, 0])
        tensor(1., dtype=torch.float64)
        """
        self._watch.check(self.model)
        check_modes(self.model)
        functionals, single = parse_functionals(functional)
        _, gradients = functional_gradients(self.model, self.posterior.names, functionals)
        covariance = functional_covariance(self.posterior, gradients)
        return covariance[0, 0] if single else covariance

    @torch.inference_mode(False)
    def function_samples(self, x: Any, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Returns samples of the linearised network's outputs with the true correlation between inputs: [count, N, ..., C]."""
        batch = self.inputs(x)
        with explain_model_errors(self.model, lambda: batch.inputs):
            return function_samples(self.model, self.posterior, batch.inputs, count, generator)

    @torch.inference_mode(False)
    def variance_by_layer(self, x: Any) -> Mapping[str, Tensor]:
        """Returns each layer's part of the variance of the outputs [N, ..., C]; they add up to the whole, exactly."""
        batch = self.inputs(x)
        with explain_model_errors(self.model, lambda: batch.inputs):
            latent = latent_gaussians(self.plan(batch), self.posterior, batch, diagonal=True, by_layer=True)
        return latent[0].by_layer

    def where(self: Any, loader: Any, **options: Any) -> Any:
        """Finds where the uncertainty sits: by weight, filter, layer, class, input and pixel; see `aftermap.analysis.where`."""
        return lazy_attribute("aftermap.analysis.where", "where")(self, loader, **options)


def _large_size(prediction: Prediction) -> int:
    """Returns the bytes of what grows with samples × classes and with classes²; 0 where nothing of it can be spared."""
    if prediction.kind != "classification" or prediction.latent_var is None:
        return 0
    large = (prediction.samples, prediction.latent_cov)
    return sum(value.numel() * value.element_size() for value in large if value is not None)


def _reduced(prediction: Prediction) -> Prediction:
    """Returns the prediction of classes without samples and covariances, which its probabilities, uncertainties and scores do not need.

    Other predictions keep theirs: the density of a regression is made of them.
    """
    return replace(prediction, samples=None, latent_cov=None) if _large_size(prediction) else prediction


def _is_divisible(batch: Batch) -> bool:
    """Tells whether every input belongs to single examples; what they share might look like a row for each in a piece."""
    return all(batch.is_batched(path, tensor) for path, tensor in batch.tensors())


def _of_outputs(likelihood: Likelihood, outputs: Sequence[int]) -> Likelihood:
    """Returns the likelihood of some outputs alone."""
    if not isinstance(likelihood, Gaussian):
        raise InputError(
            f"outputs= chooses among the outputs of a regression; a prediction of {type(likelihood).__name__} needs all of them"
        )
    noise = likelihood.noise
    if not isinstance(noise, Tensor) or noise.dim() == 0:
        return likelihood
    check_chosen(outputs, len(noise))
    return Gaussian(noise[list(outputs)])
