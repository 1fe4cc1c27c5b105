"""Tuning the posterior that an optimiser has built, on held-out data: the rules of Laplace approximations on another curvature.

Training leaves a curvature H, averaged over draws of the weights, and a posterior N(θ, (H/τ + P)⁻¹) at the temperature τ and the noise that
it was run with. Both serve training; what they promise about new data was never compared with any. To tuning this posterior is a point of
the family (r, c, T) of its curvature. Draws of the weights were tried out in training at its r and c alone, so that the sampling
predictive keeps them, and labels set T; the linearised one takes the whole rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from aftermap import checks
from aftermap.batches import Batch, Unpack, iterate
from aftermap.distributed import fail_together
from aftermap.errors import DataError, StatisticalWarning, warn_caller
from aftermap.laplace.examples import FiniteExamples, random_examples
from aftermap.laplace.fitted import Fitted
from aftermap.laplace.grid import GridResult
from aftermap.laplace.latents import drawn_outputs
from aftermap.laplace.regression_rule import fit_scale
from aftermap.laplace.tune import tune_by_grid, tune_by_validation, warn_of_labels
from aftermap.laplace.validation import TemperatureResult, ValidationResult, search_temperature
from aftermap.likelihoods import Gaussian, Likelihood, temperature_of
from aftermap.likelihoods.base import aligned
from aftermap.models import WeightsFingerprint, check_device
from aftermap.posteriors import GaussianPosterior
from aftermap.posteriors.base import Hyperparameters
from aftermap.predictive import PosteriorPredictor, TrainedPosterior

__all__ = ["NoiseResult", "TunedPosterior", "fit_noise", "tune_trained"]

_EXAMPLES = 1000
_NUMBERS = 2 * 10**7  # of the outputs under draws that are held at once
_LEAST_EXAMPLES = 50
_FEW_LABELS = 20  # examples below which residuals say little of each output
_LEAST_NOISE = 1e-3  # as a share of the targets' deviation: a network may reproduce an output exactly
_ROUNDS = 3  # the mean of draws changes a little with their width


@dataclass(frozen=True)
class NoiseResult:
    """The noise of a regression and the width of its posterior, from held-out residuals.

    Attributes:
        noise: The noise σ of each output.
        factor: What the covariance of the posterior was multiplied by.
        n_labels: How many examples were used.
        constant_nll: The negative log-likelihood per number of these under one variance for each output.
        nll: The same under the posterior.
    """

    noise: tuple[float, ...]
    factor: float
    n_labels: int
    constant_nll: float
    nll: float

    def __str__(self) -> str:
        low, high = min(self.noise), max(self.noise)
        noise = f"noise {low:.3g}" if len(self.noise) == 1 else f"noises {low:.3g} to {high:.3g} by output"
        return (
            f"{noise} and {self.factor:.3g} times the variance of the posterior, from residuals on {self.n_labels:,} validation examples. "
            f"Their negative log-likelihood is {self.constant_nll:.4f} with one variance for all inputs, {self.nll:.4f} with the posterior"
        )


@dataclass(frozen=True)
class TunedPosterior:
    """What tuning found for a posterior that an optimiser has built.

    Attributes:
        posterior: The posterior over the weights.
        base_likelihood: The likelihood with its noise, at the temperature of training.
        output_temperature: What the outputs are divided by in the predictive.
        damping: What damping adds to the precision of each parameter; empty where the prior was found anew.
        result: How it was found.
    """

    posterior: GaussianPosterior
    base_likelihood: Likelihood
    output_temperature: float
    damping: dict[str, float]
    result: TemperatureResult | ValidationResult | NoiseResult | GridResult


def tune_trained(
    trained: TrainedPosterior,
    val_loader: Iterable[Any],
    *,
    kind: str,
    link: str,
    samples: int,
    unpack: Unpack | None,
    generator: torch.Generator | None,
) -> TunedPosterior:
    """Tunes a posterior on held-out data: the work of `TrainedPosterior.tune`, which says what the arguments are."""
    checks.choice("kind", kind, ("sampling", "linearised"))
    samples, likelihood, predictor = checks.count("samples", samples), trained.base_likelihood, trained.predictor
    device, dtype = check_device(trained.model)
    temperature = temperature_of(likelihood)
    if isinstance(likelihood, Gaussian) or (temperature is not None and kind == "sampling"):
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        with fail_together("reading validation data"):
            batches = iterate(val_loader, device=device, dtype=dtype, unpack=unpack)
            labelled = (b for b in batches if isinstance(b.targets, Tensor))
            first = next(labelled, None)
            if first is None:
                raise DataError("the validation data have no targets")
            examples = random_examples(chain([first], labelled), _EXAMPLES, generator)
        if isinstance(likelihood, Gaussian):
            return _tuned_noise(trained, likelihood, examples, kind, samples)
        return _tuned_temperature(trained, likelihood, examples, samples)
    one = torch.ones((), dtype=torch.float64)
    scale = float(trained.posterior.scale)
    hyperparameters = Hyperparameters(trained.posterior.prior, one, scale, output_temperature=temperature or 1.0)
    weights = WeightsFingerprint.of(trained.model)
    fitted = Fitted(trained.factors, trained.posterior, hyperparameters, weights, unpack=unpack)
    if temperature is None:
        tuned = tune_by_grid(
            fitted,
            likelihood,
            predictor,
            val_loader,
            kind=kind,
            link=link,
            samples=samples,
            noise=False,
            by_gradients=False,
            precisions=None,
            scales=None,
        )
    else:
        tuned = tune_by_validation(
            fitted, likelihood, predictor, val_loader, link=link, samples=samples, generator=generator
        )
    assert isinstance(tuned.posterior, GaussianPosterior)
    assert isinstance(tuned.result, ValidationResult | GridResult)
    return TunedPosterior(tuned.posterior, likelihood, tuned.hyperparameters.output_temperature, {}, tuned.result)


def _tuned_temperature(
    trained: TrainedPosterior, likelihood: Likelihood, examples: list[Batch], samples: int
) -> TunedPosterior:
    """Tunes classes that are predicted by draws: the temperature of the outputs."""
    first = trained.predictor.map_prediction(examples[0].inputs).mean
    most = max(_LEAST_EXAMPLES, _NUMBERS // (samples * max(1, first[0].numel())))
    chosen = random_examples(examples, most, torch.Generator().manual_seed(0))
    result = search_temperature(
        *drawn_outputs(trained.model, chosen, likelihood, trained.posterior, samples), likelihood
    )
    warn_of_labels(result)
    return TunedPosterior(trained.posterior, likelihood, result.output_temperature, trained.damping, result)


def _tuned_noise(
    trained: TrainedPosterior, likelihood: Gaussian, examples: list[Batch], kind: str, samples: int
) -> TunedPosterior:
    """Tunes a regression: the noise of each output, and the scale of the covariance."""
    batches = list(FiniteExamples(trained.model, examples, "validation"))
    size = sum(b.size for b in batches)
    posterior, covariance, noise = trained.posterior, 1.0, torch.as_tensor(likelihood.noise, dtype=torch.float64)
    for _ in range(_ROUNDS if kind == "sampling" else 1):
        predictor = PosteriorPredictor(trained.model, posterior, likelihood, trained.predictor)
        residuals, variances, targets, weights = [], [], [], []
        for batch in batches:
            seeded = torch.Generator().manual_seed(0)
            prediction = predictor.predict(batch.inputs, kind=kind, samples=samples, diagonal=True, generator=seeded)
            mean = prediction.mean.detach().double().cpu()
            likelihood.check(mean, batch.targets)
            y = aligned(mean, batch.targets.cpu(), mean.shape[-1], "Gaussian").double()
            residuals.append((y - mean).reshape(batch.size, -1, mean.shape[-1]))
            variances.append(prediction.epistemic.double().cpu().reshape(residuals[-1].shape))
            targets.append(y.reshape(residuals[-1].shape))
            weights.append(torch.ones(batch.size) if batch.weight is None else batch.weight.cpu())
        weight = torch.cat(weights).double()
        noise, factor, constant_nll, nll = fit_noise(
            torch.cat(residuals), torch.cat(variances), torch.cat(targets), noise, weight
        )
        covariance *= factor
        prior = trained.posterior.prior
        scaled = prior.with_precision({n: p / covariance for n, p in prior.precision.items()})
        posterior = trained.posterior.with_prior(prior=scaled, scale=trained.posterior.scale / covariance)
    if size < _FEW_LABELS:
        warn_caller(
            f"there are only {size} validation examples, so that the noise {float(noise.mean()):.3g} is mostly a guess. Hold out more "
            "data that are like those to come",
            StatisticalWarning,
        )
    result = NoiseResult(tuple(noise.tolist()), covariance, size, constant_nll, nll)
    damping = {name: value / covariance for name, value in trained.damping.items()}
    found = Gaussian(float(noise) if len(noise) == 1 else noise)
    return TunedPosterior(posterior, found, 1.0, damping, result)


def fit_noise(
    residuals: Tensor, variance: Tensor, targets: Tensor, before: Tensor, weights: Tensor
) -> tuple[Tensor, float, float, float]:
    """Finds a noise for each output, and a factor of the posterior's variance, from held-out residuals.

    Residuals give the noises in relation to each other. The covariance of a posterior grows with the noise variance that its curvature
    is of, so it goes along with their mean change; then `fit_scale` scales both together, and takes from the posterior's part what
    the residuals speak against.

    Args:
        residuals: Targets less predictions [n, positions, C].
        variance: The variance of the predictions without noise [n, positions, C].
        targets: The targets [n, positions, C].
        before: The noise that the variance is of: 0-d or [C].
        weights: How many data each example stands for [n].

    Returns:
        The noise [C], the factor, and the negative log-likelihood per number under one variance for each output, and under what was found.
    """
    before = before.expand(residuals.shape[-1])
    share = (weights / weights.sum())[:, None, None] / residuals.shape[1]
    noise = before
    if len(residuals) >= _FEW_LABELS:
        deviation = (share * (targets - (share * targets).sum((0, 1))).square()).sum((0, 1)).sqrt()
        found = torch.maximum((share * residuals.square()).sum((0, 1)).sqrt(), _LEAST_NOISE * deviation)
        # For an output that never changes and is reproduced exactly any noise will do that is not too large.
        noise = torch.where(found > 0, found, found[found > 0].min()) if bool((found > 0).any()) else before
    shared = math.exp(2 * float((noise / before).log().mean()))
    whitened, leverage = residuals / noise, shared * variance / noise.square()
    factor, width = fit_scale(whitened.flatten(1), leverage.flatten(1), 1.0, weights)
    logs = float(noise.log().mean())

    def nll(total: Tensor) -> float:
        values = 0.5 * (2 * math.pi * total).log() + whitened.square() / (2 * total)
        return float((share * values).sum()) / residuals.shape[-1] + logs

    constant, posterior = nll(torch.ones_like(whitened)), nll(factor * (1 + width * leverage))
    return noise * math.sqrt(factor), shared * factor * width, constant, posterior
