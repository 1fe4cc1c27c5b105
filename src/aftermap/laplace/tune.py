"""Which prior, noise and data scale: by the evidence, by the effective dimension, or on validation data.

Tuning on validation data: the prior's precision τ and the data's scale c, on the predictive that will be used.

(c, τ) and (1, τ/c) differ only by a factor 1/c of the whole covariance. So one pass through the network gives the
covariances for a row of ratios τ/c, and every c costs only the link. The random numbers of the link are the same at every
grid point.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from aftermap.batches import Batch, iterate
from aftermap.curvature import Factors
from aftermap.errors import DataError, InputError, NumericalError, StatisticalWarning
from aftermap.laplace.dimension import is_normalised, match_dimension
from aftermap.laplace.evidence import EvidenceResult, maximise_evidence
from aftermap.laplace.fitted import Fitted, Tuned, ValidationResult
from aftermap.laplace.self_check import SelfCheck, check_predictive
from aftermap.likelihoods import Likelihood
from aftermap.models import call_model, check_device
from aftermap.params import swapped
from aftermap.posteriors import GaussianPosterior
from aftermap.posteriors.base import has_noise, with_noise
from aftermap.predictive import PosteriorPredictor, gaussian_prediction, latent_gaussians, samples_prediction
from aftermap.predictive.predictor import KINDS
from aftermap.predictive.sampling import weight_samples
from aftermap.prior import Prior

__all__ = [
    "METHODS",
    "choose_method",
    "dimension_applies",
    "search_grid",
    "tune_by_dimension",
    "tune_by_evidence",
    "tune_by_validation",
]

_CHECKED = 200  # training data on which the matched predictive is compared with the network
METHODS = ("evidence", "lbfgs", "dimension", "validation")


def search_grid(
    predictor: PosteriorPredictor,
    batches: Iterable[Batch],
    base_scale: float,
    *,
    kind: str = "linearised",
    link: str = "auto",
    samples: int = 100,
    precisions: Sequence[float] | None = None,
    scales: Sequence[float] | None = None,
    first_stage: int = 500,
) -> ValidationResult:
    """Grid search over (c, τ) on the mean negative log predictive probability.

    Args:
        predictor: The model, its posterior (whose prior is replaced by one precision for all) and the likelihood with its noise.
        batches: The validation data.
        base_scale: What multiplies the curvature at c = 1 (1/temperature, 1/σ²).
        kind: The predictive to score: "linearised" or "sampling".
        link: How the linearised predictive turns the Gaussian over logits into probabilities.
        samples: The number of draws that the predictive averages over.
        precisions: The ratios τ/c to try; None searches in two stages, coarse on ``first_stage`` examples, then fine on all.
        scales: The values of c to try.
        first_stage: The number of examples of the coarse stage.
    """
    validation = [b for b in batches if b.targets is not None]
    if not validation:
        raise DataError("the validation data are empty or have no targets")
    if kind not in KINDS:
        raise InputError(f"kind={kind!r} is not known; allowed are {', '.join(map(repr, KINDS))}")
    _check_grid(precisions=precisions, scales=scales)
    cs = list(scales) if scales is not None else [10 ** (k / 2) for k in range(-4, 9)]
    if precisions is not None:
        ratios = list(precisions)
        result = _stage(predictor, validation, base_scale, ratios, cs, kind, link, samples)
        _warn_at_edge(result, cs, (min(ratios), max(ratios)) if len(ratios) > 2 else (0.0, math.inf))
        return result
    coarse = [10.0**k for k in range(-6, 6)]
    some = _limited(validation, first_stage)
    first = _stage(predictor, some, base_scale, coarse, cs, kind, link, samples)
    centre = math.log10(first.precision / first.data_scale)
    fine = [10 ** (centre + d) for d in (-0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75)]
    near = cs if scales is not None else [first.data_scale * 10 ** (k / 4) for k in range(-4, 5)]
    result = _stage(predictor, validation, base_scale, fine, near, kind, link, samples)
    # The fine stage may look a little beyond the coarse one.
    _warn_at_edge(result, cs, (coarse[0] * 10**0.25, coarse[-1] / 10**0.25))
    return result


def _check_grid(**grids: Sequence[float] | None) -> None:
    for name, values in grids.items():
        if values is not None and (not len(values) or not all(math.isfinite(v) and v > 0 for v in values)):
            raise InputError(f"{name}={list(values)!r} must be some positive and finite numbers")


def _warn_at_edge(result: ValidationResult, cs: Sequence[float], ratios: tuple[float, float]) -> None:
    at_edge = []
    if len(cs) > 2 and (result.data_scale <= min(cs) or result.data_scale >= max(cs)):
        at_edge.append(f"data scale {result.data_scale:g}")
    ratio = result.precision / result.data_scale
    if ratio <= ratios[0] * (1 + 1e-9) or ratio >= ratios[1] * (1 - 1e-9):
        at_edge.append(f"precision ratio {ratio:g}")
    if at_edge:
        warnings.warn(
            f"the best point lies at the edge of the grid ({', '.join(at_edge)}): the posterior wants to be narrower or wider than "
            "the grid allows. Pass scales= and precisions= to widen it, or look whether this posterior helps at all",
            StatisticalWarning,
            stacklevel=4,
        )


def _limited(validation: Sequence[Batch], limit: int) -> list[Batch]:
    some, count = [], 0
    for batch in validation:
        some.append(batch)
        count += batch.size
        if count >= limit:
            break
    return some


def _stage(
    predictor: PosteriorPredictor,
    validation: Sequence[Batch],
    base_scale: float,
    ratios: Sequence[float],
    cs: Sequence[float],
    kind: str,
    link: str,
    samples: int,
) -> ValidationResult:
    posterior = predictor.posterior
    if not isinstance(posterior, GaussianPosterior):
        raise InputError(f"a grid over priors needs a Gaussian posterior in blocks, got a {type(posterior).__name__}")
    variants = [posterior.with_prior(r, scale=base_scale) for r in ratios]
    sums = torch.zeros(len(ratios), len(cs), dtype=torch.float64)
    count = 0
    for batch in validation:
        count += batch.size
        if kind == "linearised":
            sums += _linearised(predictor, posterior, variants, batch, cs, link, samples)
        else:
            sums += _sampled(predictor, variants, batch, cs, samples)
    means = sums / count
    table = [(c, ratio * c, float(means[i, j])) for i, ratio in enumerate(ratios) for j, c in enumerate(cs)]
    # A predictive that is not finite somewhere can never be the best.
    best = min(table, key=lambda row: row[2] if math.isfinite(row[2]) else math.inf)
    if not math.isfinite(best[2]):
        raise NumericalError(
            f"the predictive log-likelihood of the validation data is not finite at any of {len(table)} grid points; "
            "look at the outputs of the network on these data, and widen the grid with precisions= and scales="
        )
    return ValidationResult(best[0], best[1], best[2], table, count)


def _linearised(
    predictor: PosteriorPredictor,
    posterior: GaussianPosterior,
    variants: Sequence[GaussianPosterior],
    batch: Batch,
    cs: Sequence[float],
    link: str,
    samples: int,
) -> Tensor:
    latents = latent_gaussians(predictor.plan(batch), posterior, batch, variants=variants)
    values = torch.empty(len(variants), len(cs), dtype=torch.float64)
    for i, latent in enumerate(latents):
        for j, c in enumerate(cs):
            prediction = gaussian_prediction(
                predictor.likelihood,
                latent.mean,
                None if latent.cov is None else latent.cov / c,
                latent_var=latent.var / c if latent.cov is None else None,
                link=link,
                samples=samples,
                generator=torch.Generator().manual_seed(0),
            )
            values[i, j] = -prediction.log_prob(batch.targets).sum().to(torch.float64)
    return values


def _sampled(
    predictor: PosteriorPredictor,
    variants: Sequence[GaussianPosterior],
    batch: Batch,
    cs: Sequence[float],
    samples: int,
) -> Tensor:
    values = torch.empty(len(variants), len(cs), dtype=torch.float64)
    for i, variant in enumerate(variants):
        drawn: list[list[Tensor]] = [[] for _ in cs]
        for weights in weight_samples(variant, samples, torch.Generator().manual_seed(0)):
            for j, c in enumerate(cs):
                # A covariance divided by c is the same draw with a deviation divided by √c.
                near = {n: variant.mean[n] + (w - variant.mean[n]) / math.sqrt(c) for n, w in weights.items()}
                with torch.no_grad(), swapped(predictor.model, near):
                    drawn[j].append(call_model(predictor.model, batch.inputs))
        for j, outputs in enumerate(drawn):
            prediction = samples_prediction(predictor.likelihood, torch.stack(outputs))
            values[i, j] = -prediction.log_prob(batch.targets).sum().to(torch.float64)
    return values


def choose_method(fitted: Fitted, model: nn.Module, val_loader: Iterable[Any] | None, method: str | None) -> str:
    """The method to tune with: the one asked for, or the default.

    Raises:
        InputError: The method is not known, or is validation without data.
    """
    if method is None:
        if val_loader is not None:
            return "validation"
        return "dimension" if dimension_applies(fitted, model) else "evidence"
    method = "evidence" if method == "mackay" else method
    if method not in METHODS:
        listed = ", ".join(map(repr, METHODS[:-1]))
        raise InputError(f"method={method!r} is not known; allowed are {listed} and {METHODS[-1]!r}")
    if method == "validation" and val_loader is None:
        raise InputError("method='validation' needs validation data: tune(val_loader, method='validation')")
    return method


def dimension_applies(fitted: Fitted, model: nn.Module) -> bool:
    """Whether the evidence would mislead and the effective dimension can be matched instead.

    That is: normalisation layers, several blocks that know nothing of each other, and the data of the fit at hand.
    """
    posterior = fitted.posterior
    blocks = len(posterior.blocks) if isinstance(posterior, GaussianPosterior) else 0
    return blocks > 1 and fitted.data is not None and is_normalised(model)


def tune_by_evidence(
    fitted: Fitted,
    likelihood: Likelihood,
    *,
    per_layer: bool = True,
    noise: bool = True,
    by_gradients: bool = False,
    iterations: int | None = None,
    warn: bool = True,
) -> Tuned:
    """Prior precision and noise that maximise the evidence.

    Args:
        fitted: The fit.
        likelihood: The likelihood that its curvature is of.
        per_layer: Whether every layer has a precision of its own.
        noise: Whether to tune the noise of a regression.
        by_gradients: Whether to use L-BFGS instead of MacKay's fixed point.
        iterations: The largest number of iterations; None goes on to a stationary point.
        warn: Whether to warn of a result that is not to be relied on.

    Warns:
        StatisticalWarning: No stationary point was reached, or only by a bound on the noise.
    """
    # The evidence is that of the data, not of the width that was matched to them.
    plain = fitted if fitted.narrowing == 1.0 else fitted.without_narrowing()
    result = maximise_evidence(
        plain.posterior,
        plain.factors,
        likelihood,
        plain.hyperparameters,
        method="lbfgs" if by_gradients else "mackay",
        per_layer=per_layer,
        noise=noise,
        iterations=100 if iterations is None else iterations,
    )
    if warn:
        _warn_of_evidence(result, fitted.factors)
    hyperparameters = result.applied_to(plain.hyperparameters, plain.posterior.layers)
    return Tuned(hyperparameters.applied_to(plain.posterior, plain.factors.curvature), hyperparameters, result)


def _warn_of_evidence(result: EvidenceResult, factors: Factors) -> None:
    if not result.converged:
        problem = (
            f"ended after {len(result.history) - 1} iterations at a point that is not stationary: the log evidence still changes by "
            f"{result.gradient:.3g} nats per unit of the logarithm of a precision or of the noise. The best values seen are taken. Tune "
            "again to go on from there, try method='lbfgs', or use validation data: tune(val_loader)"
        )
    elif result.noise_bounded:
        problem = (
            f"has no maximum at a noise that fits the residuals: the {len(factors.blocks)} blocks of structure={factors.structure!r} count "
            f"as many determined parameters as the {factors.n_data * factors.n_outputs:g} numbers in the data, or more. The noise is held "
            f"at its upper bound {result.noise:.3g}, √10 times the deviation of the training residuals. Use structure='full' or "
            "'low_rank', params='last_layer', or more data, and check the intervals on data that were held out"
        )
    else:
        return
    warnings.warn(f"maximising the evidence {problem}", StatisticalWarning, stacklevel=5)


def tune_by_dimension(
    fitted: Fitted,
    tuned: Tuned,
    likelihood: Likelihood,
    predictor: PosteriorPredictor,
    data: Iterable[Any] | None,
    generator: torch.Generator | None,
) -> Tuned:
    """The width of the posterior by the effective dimension of the full Gauss-Newton matrix.

    Args:
        fitted: The fit.
        tuned: Its hyperparameters by the evidence, which give the prior.
        likelihood: The likelihood that its curvature is of.
        predictor: A predictor of the same network.
        data: The training data; None takes those of the fit.
        generator: The source of the random draws; None takes the same draws every time.

    Warns:
        StatisticalWarning: The matched predictive is much less sure of the training data than the network.
    """
    data = fitted.data if data is None else data
    if data is None:
        raise InputError(
            "method='dimension' passes over the training data again, and they are not at hand (a loaded posterior, or a fit on a "
            "generator): tune(train_loader, method='dimension')"
        )
    model = predictor.model
    device, dtype = check_device(model)
    result = match_dimension(
        model,
        iterate(data, device=device, dtype=dtype, unpack=fitted.unpack),
        likelihood,
        tuned.posterior,
        tuned.hyperparameters.data_scale,
        generator=torch.Generator().manual_seed(0) if generator is None else generator,
    )
    hyperparameters = tuned.hyperparameters.narrowed(result.factor)
    posterior = hyperparameters.applied_to(tuned.posterior, fitted.factors.curvature)
    matched = PosteriorPredictor(model, posterior, with_noise(likelihood, hyperparameters.noise), predictor)
    checked = check_predictive(matched, iterate(data, device=device, dtype=dtype, unpack=fitted.unpack), limit=_CHECKED)
    if checked.collapsed:
        _warn_too_wide(fitted.factors.n_data, tuned.hyperparameters.data_scale, checked, data)
    return Tuned(posterior, hyperparameters, result, narrowing=result.factor)


def _warn_too_wide(seen: float, counted: float, checked: SelfCheck, data: Iterable[Any]) -> None:
    """A fit on a part of the training data, or a network that knows them by heart: the data themselves do not tell which."""
    size = _dataset_size(data)
    each = "" if counted == 1 else f", each counted as {counted:g}"
    hint = f" (the loader's dataset holds {size:,})" if size is not None and size > seen else ""
    warnings.warn(
        f"matched to the effective dimension of the {seen:g} data of this fit{each}, the predictive is much less sure of {checked.n_data} of "
        f"them than the network itself ({checked.message}). Either the network was trained on more data than these{hint}: then say how "
        f"many, Laplace(..., data_scale=N / {seen:g}) with N the number that it was trained on, or fit on all of them. Or it has learned "
        "few data by heart, and the wider predictive may be the better one. Validation data decide: tune(val_loader)",
        StatisticalWarning,
        stacklevel=4,
    )


def _dataset_size(data: Iterable[Any]) -> int | None:
    """The size of the dataset behind a loader, and behind a subset of it, if that can be known."""
    dataset = getattr(data, "dataset", None)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return len(dataset) if isinstance(dataset, Sized) else None


def tune_by_validation(
    fitted: Fitted,
    likelihood: Likelihood,
    predictor: PosteriorPredictor,
    val_loader: Iterable[Any],
    *,
    kind: str,
    link: str,
    samples: int,
    noise: bool,
    by_gradients: bool,
    precisions: Sequence[float] | None,
    scales: Sequence[float] | None,
) -> Tuned:
    """Data scale and one prior precision that maximise the predictive log-likelihood of validation data.

    The noise of a regression follows from the training residuals by the evidence; the grid then decides on the rest. The other
    arguments are those of `Laplace.tune`.
    """
    hyperparameters, posterior = fitted.hyperparameters, fitted.posterior
    if noise and has_noise(likelihood):
        by_evidence = tune_by_evidence(fitted, likelihood, per_layer=False, by_gradients=by_gradients, warn=False)
        hyperparameters = replace(hyperparameters, noise=by_evidence.hyperparameters.noise)
        posterior = hyperparameters.applied_to(posterior, fitted.factors.curvature)
        predictor = PosteriorPredictor(
            predictor.model, posterior, with_noise(likelihood, hyperparameters.noise), predictor
        )
    device, dtype = check_device(predictor.model)
    result = search_grid(
        predictor,
        iterate(val_loader, device=device, dtype=dtype, unpack=fitted.unpack),
        float(replace(hyperparameters, data_scale=1.0).curvature_scale(fitted.factors.curvature)),
        kind=kind,
        link=link,
        samples=samples,
        precisions=precisions,
        scales=scales,
    )
    prior = Prior.make(result.precision, dict(posterior.prior.mean), posterior.layers, posterior.shapes)
    hyperparameters = replace(hyperparameters, prior=prior, data_scale=result.data_scale)
    return Tuned(hyperparameters.applied_to(posterior, fitted.factors.curvature), hyperparameters, result)
