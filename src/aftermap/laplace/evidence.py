"""The Laplace evidence (log marginal likelihood) and its maximisation in the prior and the noise.

    log q(D) = s₀ Σ log p(y_n | f_n) − ½ ‖θ* − μ₀‖²_{P₀} − ½ log |P| / |P₀|          (MATH 5.4)

with s₀ = data scale / temperature. With weights and curvature fixed, the gradients are ½(γ_ℓ − τ_ℓ ‖θ_ℓ − μ₀‖²) in
log τ_ℓ, and MacKay's fixed point τ_ℓ = γ_ℓ / ‖θ_ℓ − μ₀‖², σ² = SSE / (N·D − γ/s₀) needs no step size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aftermap.curvature.structures.base import Factors
from aftermap.errors import InputError
from aftermap.posteriors import GaussianPosterior
from aftermap.posteriors.base import Observation

__all__ = ["EvidenceResult", "log_evidence", "maximise_evidence"]

_PRECISION_RANGE = (1e-8, 1e12)
_LOG_RANGE = (math.log(_PRECISION_RANGE[0]), math.log(_PRECISION_RANGE[1]))
_LONGEST = math.log(100.0)  # of a step in a logarithm
_LEAST_FREEDOM = 0.1  # share of the data that counts as left for the noise, at least
_NOISE = "the noise"


def log_evidence(
    posterior: GaussianPosterior, factors: Factors, observation: Observation, power: float | Tensor = 1.0
) -> Tensor:
    """log q(D) of a posterior that was formed with the observation's noise; differentiable in prior and noise.

    Args:
        posterior: with scale power/σ².
        factors: its curvature, with the loss.
        observation: the likelihood with its noise.
        power: s₀, what the log-likelihood is multiplied by.

    Raises:
        InputError: the factors hold no value of the likelihood.
    """
    if not math.isfinite(factors.loss) or (observation.tunable and not factors.n_outputs):
        raise InputError(
            f"the evidence needs the log-likelihood of the training data, and this curvature holds none (loss {factors.loss}, "
            f"{factors.n_outputs} outputs): fit it on data with targets, Laplace(model, likelihood).fit(train_loader)"
        )
    fit = power * observation.log_likelihood(factors)
    return fit - posterior.prior.energy(posterior.mean) - 0.5 * posterior.log_det_ratio()


@dataclass
class EvidenceResult:
    """What maximising the evidence gave.

    Attributes:
        precision: layer -> prior precision.
        level: noise σ.
        history: the log evidence after each iteration, the start first.
        converged: whether the changes fell below the tolerance.
    """

    precision: Mapping[str, float]
    level: float
    history: list[float] = field(default_factory=list)
    converged: bool = False


def maximise_evidence(
    posterior: GaussianPosterior,
    factors: Factors,
    observation: Observation,
    power: float = 1.0,
    *,
    method: str = "mackay",
    per_layer: bool = True,
    noise: bool = True,
    iterations: int = 100,
    tolerance: float = 1e-4,
) -> EvidenceResult:
    """Finds prior precisions (one, or one per layer) and the noise that maximise the evidence.

    Args:
        posterior: the starting point.
        factors: its curvature.
        observation: the likelihood; its noise is tuned where there is one and ``noise`` is True.
        power: data scale / temperature.
        method: "mackay" (fixed point) or "lbfgs" (gradients in log precision and log noise; any damping).
        per_layer: one precision per layer, or one for all.
        iterations: at most this many.
        tolerance: relative change at which it has converged.
        noise: whether to tune the noise.

    Returns:
        The best values seen, never worse than the start.
    """
    groups = {k: list(v) for k, v in posterior.layers.items()}
    if not per_layer:
        groups = {"all": list(posterior.names)}
    tune_noise = noise and observation.tunable
    if method == "mackay":
        if isinstance(posterior, GaussianPosterior) and posterior.damping != "exact":
            raise InputError("MacKay's fixed point holds for damping='exact'; use method='lbfgs' with factored damping")
        result = _mackay(posterior, factors, observation, power, groups, tune_noise, iterations, tolerance)
    elif method == "lbfgs":
        result = _lbfgs(posterior, factors, observation, power, groups, tune_noise, iterations)
    else:
        raise InputError(f"method={method!r} is not known; allowed are 'mackay' and 'lbfgs'")
    by_layer = {
        k: result.precision[next(g for g, n in groups.items() if names[0] in n)]
        for k, names in posterior.layers.items()
    }
    return EvidenceResult(by_layer, result.level, result.history, result.converged)


def _apply(
    posterior: GaussianPosterior,
    observation: Observation,
    power: float,
    groups: Mapping[str, list[str]],
    values: Mapping[str, Tensor],
    level: Tensor,
) -> tuple[GaussianPosterior, Observation]:
    precision = {n: values[k] for k, names in groups.items() for n in names}
    prior = posterior.prior.with_precision(precision)
    moved = Observation(observation.base, level, observation.tunable)
    return posterior.with_prior(prior=prior, scale=power * moved.curvature_scale()), moved


def _mackay(
    posterior: GaussianPosterior,
    factors: Factors,
    observation: Observation,
    power: float,
    groups: Mapping[str, list[str]],
    tune_noise: bool,
    iterations: int,
    tolerance: float,
) -> EvidenceResult:
    keys = list(groups)
    at = {k: math.log(_mean_precision(posterior, groups[k])) for k in keys}
    at[_NOISE] = math.log(float(observation.level))
    distances = {k: posterior.prior.squared_distance(posterior.mean, groups[k]) for k in keys}
    squares = observation.squared_error(factors) if tune_noise else 0.0
    count = factors.n_data * factors.n_outputs

    def applied(logs: Mapping[str, float]) -> tuple[GaussianPosterior, float]:
        values = {k: torch.tensor(math.exp(logs[k]), dtype=torch.float64) for k in keys}
        level = torch.tensor(math.exp(logs[_NOISE]), dtype=torch.float64) if tune_noise else observation.level.detach()
        made, moved = _apply(posterior, observation, power, groups, values, level)
        return made, float(log_evidence(made, factors, moved, power))

    def mapped(current: GaussianPosterior, logs: Mapping[str, float]) -> dict[str, float]:
        """One step of the fixed point; what says nothing stays where it is."""
        gammas, found = _gammas(current, groups), dict(logs)
        for key in keys:
            # A layer without signal (γ = 0) or without weights says nothing about its prior.
            if gammas[key] > 1e-12 and distances[key] > 0:
                found[key] = min(max(math.log(gammas[key] / distances[key]), _LOG_RANGE[0]), _LOG_RANGE[1])
        total = sum(gammas.values()) / power
        if tune_noise and squares > 0:
            # A noise far below the residuals lets an approximation count more determined parameters than there are data:
            # then the evidence rises with the noise, and the step must not wait for γ < N.
            found[_NOISE] = 0.5 * math.log(squares / max(count - total, _LEAST_FREEDOM * count))
        return found

    current, value = applied(at)
    result = EvidenceResult({k: math.exp(at[k]) for k in keys}, float(observation.level), [value])
    best, previous = value, None
    for _ in range(iterations):
        image = mapped(current, at)
        if max(abs(image[k] - at[k]) for k in at) < tolerance:
            result.converged = True
            break
        target = image if previous is None else _accelerated(at, image, *previous)
        moved, value = applied(target)
        if previous is not None and value < best:  # the extrapolation went too far: the plain step instead
            target, previous = image, None
            moved, value = applied(target)
        else:
            previous = (at, image)
        at, current = target, moved
        result.history.append(value)
        if value > best:
            best = value
            result.precision = {k: math.exp(at[k]) for k in keys}
            result.level = math.exp(at[_NOISE]) if tune_noise else result.level
    return result


def _accelerated(
    at: Mapping[str, float], image: Mapping[str, float], before: Mapping[str, float], image_before: Mapping[str, float]
) -> dict[str, float]:
    """A secant step towards x = G(x), for each number on its own: they hardly depend on one another.

    The plain iteration contracts with a slope near 1 where a layer is barely determined by the data, and crawls there.
    """
    found = {}
    for key, value in image.items():
        moved = at[key] - before[key]
        slope = (value - image_before[key]) / moved if abs(moved) > 1e-12 else 0.0
        step = (value - at[key]) / (1 - slope) if slope < 0.99 else _LONGEST
        step = math.copysign(min(abs(step), _LONGEST), value - at[key])
        found[key] = min(max(at[key] + step, _LOG_RANGE[0]), _LOG_RANGE[1])
    return found


def _gammas(posterior: GaussianPosterior, groups: Mapping[str, list[str]]) -> dict[str, float]:
    by_layer = posterior.effective_parameters()
    if set(groups) == set(by_layer):
        return by_layer
    return {
        k: sum(g for layer, g in by_layer.items() if posterior.layers[layer][0] in names) for k, names in groups.items()
    }


def _mean_precision(posterior: GaussianPosterior, names: list[str]) -> float:
    values = torch.stack([posterior.prior.precision[n].detach().log().mean() for n in names])
    return float(values.mean().exp())


def _lbfgs(
    posterior: GaussianPosterior,
    factors: Factors,
    observation: Observation,
    power: float,
    groups: Mapping[str, list[str]],
    tune_noise: bool,
    iterations: int,
) -> EvidenceResult:
    start = [math.log(_mean_precision(posterior, names)) for names in groups.values()]
    logs = torch.tensor([*start, math.log(float(observation.level))], dtype=torch.float64, requires_grad=True)
    result = EvidenceResult({}, float(observation.level))
    best = -math.inf

    def evaluate() -> Tensor:
        clamped = logs.clamp(math.log(_PRECISION_RANGE[0]), math.log(_PRECISION_RANGE[1]))
        values = {k: clamped[i].exp() for i, k in enumerate(groups)}
        level = clamped[-1].exp() if tune_noise else observation.level
        current, moved = _apply(posterior, observation, power, groups, values, level)
        return log_evidence(current, factors, moved, power)

    optimiser = torch.optim.LBFGS([logs], max_iter=iterations, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def closure() -> Tensor:
        nonlocal best
        optimiser.zero_grad()
        value = evaluate()
        (-value).backward()
        result.history.append(float(value.detach()))
        if float(value.detach()) > best:
            best = float(value.detach())
            result.precision = {k: float(logs[i].detach().exp()) for i, k in enumerate(groups)}
            result.level = float(logs[-1].detach().exp()) if tune_noise else float(observation.level)
        return -value

    optimiser.step(closure)
    gradient = logs.grad
    result.converged = gradient is not None and float(gradient.abs().max()) < 1e-3 * max(1.0, abs(best))
    return result
