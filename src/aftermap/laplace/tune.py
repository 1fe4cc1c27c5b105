"""Which prior, noise, data scale and temperature: functions from a fit to a tuned one, each by one method.

Nothing here changes state: every function takes a `Fitted` and returns a `Tuned` that `Laplace.adopt` takes over in one move.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Subset

from aftermap import checks
from aftermap.batches import Batch, iterate
from aftermap.curvature import Factors
from aftermap.distributed import fail_together, gathered, rank, world_size
from aftermap.errors import InputError, StatisticalWarning, warn_caller
from aftermap.laplace.dimension import match_dimension
from aftermap.laplace.evidence import EvidenceResult, maximise_evidence
from aftermap.laplace.examples import random_examples
from aftermap.laplace.fitted import Fitted, Tuned
from aftermap.laplace.grid import search_grid
from aftermap.laplace.latents import output_gaussians
from aftermap.laplace.overlap import warn_if_trained_on
from aftermap.laplace.regression import tune_regression
from aftermap.laplace.self_check import SelfCheck, check_predictive, network_at_chance
from aftermap.laplace.self_consistent import (
    Cavities,
    SelfConsistentResult,
    averages_curvature,
    self_consistent_scale,
)
from aftermap.laplace.validation import RATIOS, TemperatureResult, ValidationResult, search_family
from aftermap.likelihoods import Likelihood, temperature_of
from aftermap.models import check_device
from aftermap.posteriors import GaussianPosterior, Posterior
from aftermap.posteriors.base import has_noise, with_noise
from aftermap.predictive import PosteriorPredictor
from aftermap.predictive.links import check_link
from aftermap.prior import Prior

__all__ = [
    "METHODS",
    "choose_method",
    "tune_by",
    "tune_by_dimension",
    "tune_by_evidence",
    "tune_by_grid",
    "tune_by_validation",
    "tune_self_consistently",
    "warn_of_labels",
]

METHODS = ("validation", "self_consistent", "leave_one_out", "evidence", "lbfgs", "dimension", "grid")
_CHECKED = 200  # training data on which the matched predictive is compared with the network
_VALIDATION_INPUTS = 1000
_TRAINING_INPUTS = 500
_FEW_LABELS = 20


def choose_method(
    fitted: Fitted,
    likelihood: Likelihood,
    val_loader: Iterable[Any] | None,
    method: str | None,
    *,
    kind: str = "linearised",
    on_grid: bool = False,
    noise: bool = True,
) -> str:
    """Returns the method to tune with: the one asked for, or the default.

    Args:
        fitted: The fit.
        likelihood: The likelihood that its curvature is of.
        val_loader: The data that were handed over.
        method: The method that was asked for; None asks for the default.
        kind: The predictive that will be used.
        on_grid: Whether the points of a grid were given.
        noise: Whether the noise of a regression is to be tuned.

    Raises:
        InputError: The method is not known, needs data that are not there, or is not for this likelihood or posterior.

    Warns:
        StatisticalWarning: The default needs training data that are not at hand, so that another method takes its place.
    """
    in_blocks = isinstance(fitted.posterior, GaussianPosterior)
    if method is None or (method == "validation" and val_loader is not None):
        grid = kind != "linearised" or on_grid

        def rule(training_data: bool) -> str:
            regression = has_noise(likelihood) and noise and training_data
            if val_loader is not None:
                return "validation" if not grid and (temperature_of(likelihood) is not None or regression) else "grid"
            if averages_curvature(likelihood) and in_blocks and training_data:
                return "self_consistent"
            return "leave_one_out" if regression else "evidence"

        chosen, at_hand = rule(True), rule(fitted.data is not None)
        if at_hand != chosen:
            warn_caller(
                f"the training data are not at hand (a loaded posterior, or a fit on a generator), so that method={at_hand!r} takes the place of "
                f"{chosen!r}, by which a new fit is tuned; the result may be much worse. Hand them over: tune(train_loader=...), "
                f"am.load(folder, model, train_loader=...), or aftermap tune --train DATA. Ask for method={at_hand!r} if it is meant",
                StatisticalWarning,
            )
        return at_hand
    method = "evidence" if method == "mackay" else method
    checks.choice("method", method, METHODS)
    if method in ("validation", "grid") and val_loader is None:
        raise InputError(f"method={method!r} needs validation data: tune(val_loader, method={method!r})")
    if method == "leave_one_out" and not (has_noise(likelihood) and noise):
        raise InputError(
            "method='leave_one_out' finds prior and noise of a regression with a Gaussian likelihood; use tune() without a method"
        )
    if method == "self_consistent" and not averages_curvature(likelihood):
        raise InputError(
            f"method='self_consistent' averages a curvature that depends on the outputs, and that of {type(likelihood).__name__} does "
            "not. Use tune() without a method, or method='evidence'"
        )
    if method == "self_consistent" and not in_blocks:
        raise InputError(
            f"method='self_consistent' needs a posterior in blocks, got a {type(fitted.posterior).__name__}: use method='evidence'"
        )
    return method


def tune_by(
    method: str,
    fitted: Fitted,
    likelihood: Likelihood,
    predictor: PosteriorPredictor,
    data: Iterable[Any] | None,
    *,
    kind: str,
    link: str,
    samples: int,
    per_layer: bool,
    noise: bool,
    by_gradients: bool,
    precisions: Sequence[float] | None,
    scales: Sequence[float] | None,
    generator: torch.Generator | None,
) -> Tuned:
    """Tunes a fit by a method that needs data; the other arguments are those of `Laplace.tune`."""
    if method == "leave_one_out":
        return tune_regression(fitted, likelihood, predictor, data)
    if method == "self_consistent":
        return tune_self_consistently(
            fitted, likelihood, predictor, data, per_layer=per_layer, by_gradients=by_gradients, generator=generator
        )
    if method == "dimension":
        tuned = tune_by_evidence(fitted, likelihood, per_layer=per_layer, noise=noise, by_gradients=by_gradients)
        return tune_by_dimension(fitted, tuned, likelihood, predictor, data, generator)
    assert data is not None  # choose_method
    if method == "grid":
        return tune_by_grid(
            fitted,
            likelihood,
            predictor,
            data,
            kind=kind,
            link=link,
            samples=samples,
            noise=noise,
            by_gradients=by_gradients,
            precisions=precisions,
            scales=scales,
        )
    if has_noise(likelihood):
        return tune_regression(fitted, likelihood, predictor, val_data=data)
    return tune_by_validation(fitted, likelihood, predictor, data, link=link, samples=samples, generator=generator)


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
    """Finds the prior precision and the noise that maximise the evidence.

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
    plain = fitted.without_narrowing()
    result = maximise_evidence(
        plain.posterior,
        plain.factors,
        likelihood,
        plain.hyperparameters,
        method="lbfgs" if by_gradients else "mackay",
        per_layer=per_layer,
        noise=noise,
        iterations=iterations,
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
    warn_caller(f"maximising the evidence {problem}", StatisticalWarning)


def _training_data(fitted: Fitted, data: Iterable[Any] | None, method: str) -> Iterable[Any]:
    """Returns the data that were handed over, or those of the fit."""
    data = fitted.data if data is None else data
    if data is None:
        raise InputError(
            f"method={method!r} passes over the training data again, and they are not at hand (a loaded posterior, or a fit on a "
            f"generator): tune(train_loader=..., method={method!r}), or am.load(folder, model, train_loader=...)"
        )
    return data


def tune_by_dimension(
    fitted: Fitted,
    tuned: Tuned,
    likelihood: Likelihood,
    predictor: PosteriorPredictor,
    data: Iterable[Any] | None,
    generator: torch.Generator | None,
) -> Tuned:
    """Finds the width of the posterior by the effective dimension of the full Gauss-Newton matrix.

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
    data = _training_data(fitted, data, "dimension")
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
    """Warns of a fit on a part of the training data, or a network that knows them by heart: the data themselves do not tell which."""
    size = _dataset_size(data)
    counting = "" if counted == 1 else f", each counted as {counted:g}"
    hint = f" (the loader's dataset holds {size:,})" if size is not None and size > seen else ""
    warn_caller(
        f"matched to the effective dimension of the {seen:g} data of this fit{counting}, the predictive is much less sure of {checked.n_data} of "
        f"them than the network itself ({checked.message}). Either the network was trained on more data than these{hint}: then say how "
        f"many, Laplace(..., data_scale=N / {seen:g}) with N the number that it was trained on, or fit on all of them. Or it has learned "
        "few data by heart, and the wider predictive may be the better one. Validation data decide: tune(val_loader)",
        StatisticalWarning,
    )


def _dataset_size(data: Iterable[Any]) -> int | None:
    """Returns the size of the dataset behind a loader, and behind a subset of it, if that can be known."""
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
    link: str,
    samples: int,
    generator: torch.Generator | None,
) -> Tuned:
    """Finds the temperature of the outputs that validation labels ask for, with width and shape of the posterior by rule (`search_family`).

    Args:
        fitted: The fit.
        likelihood: The likelihood that its curvature is of, of classes.
        predictor: A predictor of the same network.
        val_loader: The validation data; at most 1,000 of them are used.
        link: The link that predictions will use.
        samples: The number of draws that the predictions will average over.
        generator: The source of the choice of these; None takes the same every time.

    Warns:
        StatisticalWarning: The labels are few or all the same, the validation data are training data, or the posterior has no variance on them.
    """
    posterior = _in_blocks(fitted.posterior)
    check_link(likelihood, link)
    samples = checks.count("samples", samples)
    device, dtype = check_device(predictor.model)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    with fail_together("reading validation data"):
        chosen = random_examples(
            iterate(val_loader, device=device, dtype=dtype, unpack=fitted.unpack), _VALIDATION_INPUTS, generator
        )
    warn_if_trained_on(chosen, fitted)
    hyperparameters = fitted.hyperparameters
    scale = replace(hyperparameters, data_scale=1.0).curvature_scale(fitted.factors.curvature)
    variants = [posterior.with_prior(r, scale=scale) for r in RATIOS]
    gaussians = output_gaussians(predictor, chosen, likelihood, variants, limit=_VALIDATION_INPUTS, generator=generator)
    result = search_family(gaussians, likelihood, link=link, samples=samples)
    warn_of_labels(result)
    if result.deterministic and not result.tried:
        _warn_of_no_variance("validation")
    prior = Prior.make(result.precision, dict(posterior.prior.mean), posterior.layers, posterior.shapes)
    tuned = replace(
        hyperparameters,
        prior=prior,
        data_scale=result.data_scale,
        output_temperature=result.output_temperature,
    )
    # The evidence is that of the data as they are.
    narrowing = result.data_scale / fitted.without_narrowing().hyperparameters.data_scale
    return Tuned(tuned.applied_to(posterior, fitted.factors.curvature), tuned, result, narrowing)


def _in_blocks(posterior: Posterior) -> GaussianPosterior:
    if not isinstance(posterior, GaussianPosterior):
        raise InputError(
            f"tuning on validation data compares priors, which needs a Gaussian posterior in blocks, got a {type(posterior).__name__}"
        )
    return posterior


def warn_of_labels(result: ValidationResult | TemperatureResult) -> None:
    """Warns of validation labels that are few, or all the same."""
    problems = []
    if result.n_data < _FEW_LABELS:
        problems.append(
            f"there {'is only 1 validation label' if result.n_data == 1 else f'are only {result.n_data} validation labels'}, so that the temperature {result.output_temperature:.3g} is mostly a guess "
            "from other networks"
        )
    if result.n_classes < 2:
        problems.append("all validation labels are of one class, so that they say little about the others")
    if problems:
        warn_caller(f"{'; '.join(problems)}. Hold out more data that are like those to come", StatisticalWarning)


def _warn_of_no_variance(what: str) -> None:
    warn_caller(
        f"the posterior has no variance on the {what} inputs: the network's outputs do not depend on its parameters there, so that predictions "
        "are the network's own. Look whether the network is constant, and choose other parameters with params=",
        StatisticalWarning,
    )


def tune_self_consistently(
    fitted: Fitted,
    likelihood: Likelihood,
    predictor: PosteriorPredictor,
    data: Iterable[Any] | None,
    *,
    per_layer: bool,
    by_gradients: bool,
    generator: torch.Generator | None,
) -> Tuned:
    """Finds precisions by the evidence, then the width at which the posterior agrees with the curvature that it averages over.

    Args:
        fitted: The fit.
        likelihood: The likelihood that its curvature is of.
        predictor: A predictor of the same network.
        data: The training data; None takes those of the fit.
        per_layer: Whether every layer has a precision of its own.
        by_gradients: Whether the evidence is maximised by gradients.
        generator: The source of the random draws; None takes the same draws every time.

    Warns:
        StatisticalWarning: The predictive is worse than the network at training data that were taken out of the posterior.
    """
    data = _training_data(fitted, data, "self_consistent")
    model = predictor.model
    device, dtype = check_device(model)
    tuned = tune_by_evidence(fitted, likelihood, per_layer=per_layer, by_gradients=by_gradients, warn=False)
    assert isinstance(tuned.result, EvidenceResult)
    hyperparameters, posterior = tuned.hyperparameters, tuned.posterior
    matched = None
    if not posterior.has_every_term:
        matched = match_dimension(
            model,
            iterate(data, device=device, dtype=dtype, unpack=fitted.unpack),
            likelihood,
            posterior,
            hyperparameters.data_scale,
            generator=torch.Generator().manual_seed(0) if generator is None else generator,
        )
    dimension = 1.0 if matched is None else max(1.0, matched.factor)
    own_generator = torch.Generator().manual_seed(rank()) if generator is None else generator
    with fail_together("looking at training data"):
        counted = _Counted(iterate(data, device=device, dtype=dtype, unpack=fitted.unpack))
        gaussians = output_gaussians(
            predictor,
            counted,
            likelihood,
            [posterior],
            limit=math.ceil(_TRAINING_INPUTS / world_size()),
            generator=own_generator,
            what="training",
        )
    # The sample of a process stands for all of its data, which may be more than another one's.
    gaussians = replace(gaussians, weight=gaussians.weight * (counted.seen / gaussians.n_examples))
    curvature, converged = self_consistent_scale(gaussians, likelihood, dimension)
    if not any(bool(cov.any()) for cov in gaussians.covariances):
        _warn_of_no_variance("training")
    # A posterior that was meant to be warm holds less of each datum; a data scale below 1 is a mistake that shows in the check.
    share = min(1.0, 1 / hyperparameters.temperature)
    cavities = Cavities.of(gaussians, likelihood, dimension * curvature, share)
    narrower, sharper = cavities.corrected(likelihood, curvature)
    check = cavities.check(likelihood, curvature, narrower, sharper)
    chance = network_at_chance(likelihood, gaussians.mean, gaussians.targets)
    if all(gathered(chance is not None)):
        check = replace(check, passed=False, at_chance=True, message=f"{check.message}; {chance}")
    temperature = hyperparameters.output_temperature * sharper
    narrowing = dimension * curvature * narrower
    hyperparameters = replace(hyperparameters.narrowed(narrowing), output_temperature=temperature)
    if check.at_chance:
        warn_caller(f"check FAILED on the training data: {check.message}", StatisticalWarning)
    elif not check.passed:
        _warn_of_cavities(check.message)
    precision = {k: float(hyperparameters.prior.precision[names[0]].mean()) for k, names in posterior.layers.items()}
    result = SelfConsistentResult(
        precision,
        hyperparameters.data_scale,
        temperature,
        curvature,
        dimension,
        matched,
        tuned.result,
        check,
        converged,
        gaussians.n_examples,
        narrower,
    )
    applied = hyperparameters.applied_to(posterior, fitted.factors.curvature)
    return Tuned(applied, hyperparameters, result, narrowing=narrowing)


class _Counted:
    """Batches whose examples are counted as they pass."""

    def __init__(self, batches: Iterable[Batch]):
        self.batches, self.seen = batches, 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            self.seen += batch.size
            yield batch


def _warn_of_cavities(message: str) -> None:
    warn_caller(
        f"the posterior that was found without held-out labels is not to be trusted: {message}. Tune on validation data: tune(val_loader)",
        StatisticalWarning,
    )


def tune_by_grid(
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
    """Finds the data scale and the one prior precision that maximise the predictive log-likelihood of validation data.

    This is the plain minimum, which follows the noise of the labels where these are few. The noise of a regression follows from the training residuals by the evidence; the grid then decides on the rest. The other
    arguments are those of `Laplace.tune`.
    """
    hyperparameters, posterior = fitted.hyperparameters, fitted.posterior
    if noise and has_noise(likelihood):
        by_evidence = tune_by_evidence(fitted, likelihood, per_layer=False, by_gradients=by_gradients, warn=False)
        hyperparameters = replace(hyperparameters, noise=by_evidence.hyperparameters.noise)
        posterior = hyperparameters.applied_to(posterior, fitted.factors.curvature)
    # Not the likelihood of the last tuning: its noise and its temperature are not those that the grid starts from.
    predictor = PosteriorPredictor(predictor.model, posterior, hyperparameters.likelihood(likelihood), predictor)
    device, dtype = check_device(predictor.model)
    with fail_together("reading validation data"):
        batches = list(iterate(val_loader, device=device, dtype=dtype, unpack=fitted.unpack))
    warn_if_trained_on(batches, fitted)
    result = search_grid(
        predictor,
        batches,
        float(replace(hyperparameters, data_scale=1.0).curvature_scale(fitted.factors.curvature)),
        kind=kind,
        link=link,
        samples=samples,
        precisions=precisions,
        scales=scales,
    )
    prior = Prior.make(result.precision, dict(posterior.prior.mean), posterior.layers, posterior.shapes)
    hyperparameters = replace(hyperparameters, prior=prior, data_scale=result.data_scale)
    narrowing = result.data_scale / fitted.without_narrowing().hyperparameters.data_scale
    return Tuned(hyperparameters.applied_to(posterior, fitted.factors.curvature), hyperparameters, result, narrowing)
