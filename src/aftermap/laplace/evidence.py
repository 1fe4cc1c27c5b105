"""The Laplace evidence (log marginal likelihood) and its maximisation in the prior and the noise.

    log q(D) = w Σ log p(y_n | f_n) − ½ ‖θ* − μ₀‖²_{P₀} − ½ log |P| / |P₀|

with w = data scale / temperature. With weights and curvature fixed, the derivatives are ½(γ_ℓ − τ_ℓ ‖θ_ℓ − μ₀‖²) in log τ_ℓ and
w (SSE/σ² − N·D) + ½ k γ in log σ, where the curvature grows with σ^−k (k = 2; 4 for the empirical Fisher matrix). MacKay's fixed
point τ_ℓ = γ_ℓ / ‖θ_ℓ − μ₀‖², σ² = SSE / (N·D − ½ k γ/w) sets them to zero. It is a step uphill for every number, and a search along
it makes the evidence rise at every iteration.

The exact γ is at most N·D. Blocks that know nothing of each other may count more, and then their evidence rises with the noise far
beyond the residuals. So with several blocks σ² is at most SSE / (0.1·N·D).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from aftermap import checks
from aftermap.curvature.structures.base import Factors
from aftermap.errors import InputError
from aftermap.likelihoods import Gaussian, Likelihood
from aftermap.posteriors.base import CurvaturePosterior, Hyperparameters, has_noise, noise_exponent

__all__ = ["EvidenceResult", "log_evidence", "log_likelihood", "maximise_evidence", "squared_error"]

_RANGE = (math.log(1e-8), math.log(1e12))  # of the logarithms of precisions and noise
_LONGEST = math.log(100.0)  # of an extrapolated step in a logarithm
_LEAST_FREEDOM = 0.1  # share of the data that counts as left for the noise, at least
_HALVINGS = 40
_ITERATIONS = 100
_FIXED_POINT = 50  # iterations after which gradients take over; the fixed point crawls where precisions and noise depend on one another
_ROUNDING = 1e-10  # relative error of a log evidence
# A matrix-free posterior estimates γ and log |P| from different draws, so that they disagree by their standard errors.
_ESTIMATED = 0.05


def squared_error(likelihood: Likelihood, factors: Factors) -> float:
    """Returns Σ (y − f)²/v² over the data of the factors, with v the noise of the likelihood that they are of.

    Args:
        likelihood: The `Gaussian` likelihood that the factors are of.
        factors: The curvature of this likelihood, with its loss.
    """
    return max(0.0, 2 * (factors.loss - _log_normaliser(likelihood, factors)))


def _log_normaliser(likelihood: Likelihood, factors: Factors) -> float:
    """Returns Σ ½ log(2π v²)."""
    assert isinstance(likelihood, Gaussian)  # has_noise
    noise = torch.as_tensor(likelihood.noise, dtype=torch.float64)
    per_datum = 0.5 * (math.log(2 * math.pi) + 2 * noise.log().mean()) * factors.n_outputs
    return float(factors.n_data * per_datum)


def log_likelihood(likelihood: Likelihood, factors: Factors, noise: Tensor) -> Tensor:
    """Returns Σ log p(y_n | f_n) at noise σ, differentiable in it; no pass over the data.

    Args:
        likelihood: The likelihood that the curvature is of (`split_noise`).
        factors: The curvature of this likelihood, with its loss.
        noise: The noise σ. It has no effect for likelihoods without noise.
    """
    if not has_noise(likelihood):
        return torch.tensor(-factors.loss, dtype=torch.float64)
    squares, count = squared_error(likelihood, factors), factors.n_data * factors.n_outputs
    return -0.5 * squares / noise**2 - count * noise.log() - _log_normaliser(likelihood, factors)


def log_evidence(
    posterior: CurvaturePosterior, factors: Factors, likelihood: Likelihood, hyperparameters: Hyperparameters
) -> Tensor:
    """Returns log q(D) of a posterior that was formed with these hyperparameters; differentiable in prior and noise.

    Args:
        posterior: The posterior, with the hyperparameters' prior and scale.
        factors: Its curvature, with the loss.
        likelihood: The likelihood that the curvature is of.
        hyperparameters: The noise and the weight of the likelihood.

    Raises:
        InputError: The factors hold no value of the likelihood.
    """
    if not math.isfinite(factors.loss) or (has_noise(likelihood) and not factors.n_outputs):
        raise InputError(
            f"the evidence needs the log-likelihood of the training data, and this curvature holds none (loss {factors.loss}, "
            f"{factors.n_outputs} outputs): fit it on data with targets, Laplace(model, likelihood).fit(train_loader)"
        )
    fit = hyperparameters.likelihood_weight * log_likelihood(likelihood, factors, hyperparameters.noise)
    return fit - posterior.prior.energy(posterior.mean) - 0.5 * posterior.log_det_ratio()


@dataclass
class EvidenceResult:
    """What maximising the evidence gave.

    Attributes:
        precision: The prior precision of each layer.
        noise: The noise σ of a regression; 1 for other likelihoods.
        history: The log evidence after each iteration, the start first.
        converged: Whether the evidence is stationary at these values.
        gradient: The largest absolute derivative of the log evidence in the logarithm of a precision or of the noise, in nats;
            numbers at the end of their range from which the evidence would push them out do not count.
        noise_bounded: Whether the noise is at its upper bound: the blocks of the posterior count (nearly) as many determined
            parameters as there are data, and the evidence would rise with the noise.
    """

    precision: Mapping[str, float]
    noise: float
    history: list[float] = field(default_factory=list)
    converged: bool = False
    gradient: float = math.nan
    noise_bounded: bool = False

    def __str__(self) -> str:
        reached = "at its maximum" if self.converged else "not at its maximum yet"
        precision = ", ".join(f"{value:.3g} ({layer})" for layer, value in self.precision.items())
        noise = f"; noise {self.noise:.3g}" if self.noise != 1.0 else ""
        bounded = ", its upper bound" if self.noise_bounded else ""
        evidence = f"log evidence {self.history[-1]:.1f}, {reached}" if self.history else "no evidence yet"
        return f"{evidence}; prior precision {precision}{noise}{bounded}"

    @property
    def level(self) -> float:
        """The old name of `noise`."""
        warnings.warn("EvidenceResult.level is now called EvidenceResult.noise", DeprecationWarning, stacklevel=2)
        return self.noise

    def applied_to(self, hyperparameters: Hyperparameters, layers: Mapping[str, object]) -> Hyperparameters:
        """Returns hyperparameters with these precisions and this noise.

        Args:
            hyperparameters: The hyperparameters to change.
            layers: The parameters of each layer, as the posterior has them.
        """
        values = {k: torch.tensor(v, dtype=torch.float64) for k, v in self.precision.items()}
        precision = {n: values[k] for k, names in layers.items() for n in names}  # type: ignore[attr-defined]
        noise = torch.tensor(self.noise, dtype=torch.float64)
        return replace(hyperparameters, prior=hyperparameters.prior.with_precision(precision), noise=noise)


def maximise_evidence(
    posterior: CurvaturePosterior,
    factors: Factors,
    likelihood: Likelihood,
    hyperparameters: Hyperparameters,
    *,
    method: str = "mackay",
    per_layer: bool = True,
    noise: bool = True,
    iterations: int | None = None,
    tolerance: float = 1e-4,
) -> EvidenceResult:
    """Finds prior precisions (one, or one per layer) and the noise that maximise the evidence.

    Args:
        posterior: The posterior to start from.
        factors: The curvature of the data.
        likelihood: The likelihood that the curvature is of; its noise is tuned where it has one and ``noise`` is True.
        hyperparameters: The hyperparameters that the posterior was formed with.
        method: "mackay" (fixed point with a line search) or "lbfgs" (gradients in log precision and log noise; any damping).
        per_layer: Whether each layer has a precision of its own, or all have the same.
        noise: Whether to tune the noise.
        iterations: The largest number of iterations. None goes on to a stationary point, in at most 100.
        tolerance: How large a derivative may be, as a share of the terms that balance in it, where the evidence counts as
            stationary.

    Returns:
        The best values within their ranges: 1e-8 to 1e12, and for the noise of several blocks √(SSE / (0.1·N·D)) at most.
    """
    checks.choice("method", method, ("mackay", "lbfgs"))
    if method == "mackay" and posterior.damping != "exact":
        raise InputError("MacKay's fixed point holds for damping='exact'; use method='lbfgs' with factored damping")
    groups = {k: list(v) for k, v in posterior.layers.items()} if per_layer else {"all": list(posterior.names)}
    objective = _Objective(
        posterior, factors, likelihood, hyperparameters, groups, noise and has_noise(likelihood), tolerance
    )
    maximise = _by_fixed_point if method == "mackay" else _by_gradients
    return maximise(objective, _ITERATIONS if iterations is None else iterations)


@dataclass(frozen=True)
class _Objective:
    """The log evidence as a function of the logarithms of the precisions of some groups of parameters and of the noise.

    Attributes:
        start: The hyperparameters of `posterior`.
        groups: Group name -> the parameters that share a precision.
        tune_noise: Whether the noise is among the numbers; it is the last.
        tolerance: See `maximise_evidence`.
    """

    posterior: CurvaturePosterior
    factors: Factors
    likelihood: Likelihood
    start: Hyperparameters
    groups: Mapping[str, list[str]]
    tune_noise: bool
    tolerance: float

    def start_logs(self) -> Tensor:
        """Returns the logarithms at the start; of a group with several precisions their mean."""
        logs = [
            torch.stack([self.start.prior.precision[n].detach().log().mean() for n in names]).mean().cpu()
            for names in self.groups.values()
        ]
        if self.tune_noise:
            logs.append(self.start.noise.detach().log())
        return self.inside(torch.stack(logs).to(torch.float64))

    @cached_property
    def upper(self) -> Tensor:
        """The upper ends of the ranges."""
        upper = torch.full((len(self.groups) + self.tune_noise,), _RANGE[1], dtype=torch.float64)
        if self.tune_noise and len(self.posterior.block_names) > 1:
            squares = squared_error(self.likelihood, self.factors)
            if squares > 0:
                count = self.factors.n_data * self.factors.n_outputs
                upper[-1] = min(max(0.5 * math.log(squares / (_LEAST_FREEDOM * count)), _RANGE[0]), _RANGE[1])
        return upper

    def inside(self, logs: Tensor) -> Tensor:
        """Returns the nearest logarithms within their ranges."""
        return torch.minimum(logs.clamp_min(_RANGE[0]), self.upper)

    def evaluate(self, logs: Tensor) -> tuple[CurvaturePosterior, Tensor]:
        """Returns the posterior at these logarithms and its log evidence, differentiable in them."""
        values = logs.exp()
        precision = {n: values[i] for i, names in enumerate(self.groups.values()) for n in names}
        noise = values[-1] if self.tune_noise else self.start.noise.detach()
        hyperparameters = replace(self.start, prior=self.start.prior.with_precision(precision), noise=noise)
        posterior = hyperparameters.applied_to(self.posterior, self.factors.curvature)
        return posterior, log_evidence(posterior, self.factors, self.likelihood, hyperparameters)

    def squared_distances(self) -> Tensor:
        """Returns ‖θ − μ₀‖² of each group."""
        prior, mean = self.start.prior, self.posterior.mean
        return torch.tensor([prior.squared_distance(mean, n) for n in self.groups.values()], dtype=torch.float64)

    def slopes(self, posterior: CurvaturePosterior, logs: Tensor) -> _Slopes:
        """Returns the derivatives at these logarithms from the effective numbers of parameters, and MacKay's step."""
        by_layer = posterior.effective_parameters()
        gammas = torch.tensor(
            [
                sum(g for layer, g in by_layer.items() if posterior.layers[layer][0] in names)
                for names in self.groups.values()
            ],
            dtype=torch.float64,
        )
        distances = self.squared_distances()
        pulls = logs[: len(gammas)].exp() * distances
        # A group without signal (γ = 0) or without weights says nothing about its prior, which stays where it is.
        says = (gammas > 1e-12) & (distances > 0)
        gradient = torch.where(says, 0.5 * (gammas - pulls), 0.0)
        step = torch.where(says, gammas.clamp_min(1e-300).log() - pulls.clamp_min(1e-300).log(), 0.0)
        size = 0.5 * torch.maximum(gammas, pulls)
        squares = squared_error(self.likelihood, self.factors) if self.tune_noise else 0.0
        if self.tune_noise:
            weight, count = self.start.likelihood_weight, self.factors.n_data * self.factors.n_outputs
            residuals = squares / math.exp(2 * float(logs[-1]))
            determined = 0.5 * noise_exponent(self.factors.curvature) * float(gammas.sum()) / weight
            slope = weight * (residuals - (count - determined)) if squares > 0 else 0.0
            # An approximation may count more determined parameters than there are data. Then the evidence rises with the noise.
            freedom = max(count - determined, _LEAST_FREEDOM * count)
            length = 0.5 * abs(math.log(residuals / freedom)) if squares > 0 else 0.0
            length = max(length, 0.5 * abs(slope) / (weight * count))
            gradient = torch.cat([gradient, gradient.new_tensor([slope])])
            step = torch.cat([step, step.new_tensor([math.copysign(length, slope)])])
            size = torch.cat([size, size.new_tensor([weight * freedom])])
        return _Slopes(gradient, step, size).within(logs, self.upper)

    def result(self, logs: Tensor, history: list[float], slopes: _Slopes, tolerance: float) -> EvidenceResult:
        """Returns the values at these logarithms, with each layer's precision under its own name."""
        values = logs.detach().exp().tolist()
        of_group = dict(zip(self.groups, values, strict=False))
        precision = {
            layer: of_group[next(g for g, members in self.groups.items() if names[0] in members)]
            for layer, names in self.posterior.layers.items()
        }
        noise = values[-1] if self.tune_noise else float(self.start.noise)
        largest = float(slopes.gradient.abs().max())
        bounded = self.tune_noise and bool(self.upper[-1] < _RANGE[1]) and bool(logs[-1] >= self.upper[-1])
        return EvidenceResult(precision, noise, history, slopes.are_flat(tolerance), largest, bounded)


@dataclass(frozen=True)
class _Slopes:
    """Derivatives of the log evidence [n].

    Attributes:
        gradient: In the logarithms of the precisions and the noise.
        step: A step uphill, of the same signs.
        size: The size of the terms that balance in each derivative where it is zero.
    """

    gradient: Tensor
    step: Tensor
    size: Tensor

    def within(self, logs: Tensor, upper: Tensor) -> _Slopes:
        """Returns the same slopes without what points out of the ranges of the logarithms."""
        out = ((logs <= _RANGE[0]) & (self.gradient < 0)) | ((logs >= upper) & (self.gradient > 0))
        return _Slopes(self.gradient.where(~out, 0.0), self.step.where(~out, 0.0), self.size)

    def are_flat(self, tolerance: float) -> bool:
        """Tells whether every derivative is small beside its terms."""
        return bool((self.gradient.abs() <= tolerance * self.size).all())


def _by_fixed_point(objective: _Objective, iterations: int) -> EvidenceResult:
    """Maximises the evidence by MacKay's fixed point with secant steps; every step is shortened until the evidence rises."""
    estimated = objective.posterior.is_estimated
    tolerance = objective.tolerance
    logs = objective.start_logs()
    posterior, start = objective.evaluate(logs)
    value = float(start.detach())
    history = [value]
    slopes = objective.slopes(posterior, logs)
    previous: tuple[Tensor, Tensor] | None = None
    for _ in range(iterations if estimated else min(iterations, _FIXED_POINT)):
        if slopes.are_flat(tolerance):
            break
        steps = [(slopes.step, 1.0)] if previous is None else [(_secant(logs, slopes.step, *previous), 1.0)]
        steps += [(slopes.step, 0.5**k) for k in range(0 if previous is not None else 1, _HALVINGS)]
        for step, length in steps:
            trial = objective.inside(logs + length * step)
            trial_posterior, evidence = objective.evaluate(trial)
            rise = 1e-4 * float((slopes.gradient * (trial - logs)).sum())
            if float(evidence.detach()) >= value + rise - _ROUNDING * (1 + abs(value)):
                break
        else:
            # Uphill by the derivatives, but not by the values: they are estimates, or the rest is rounding.
            tolerance = _ESTIMATED if estimated else tolerance
            break
        previous = (logs, slopes.step)
        logs, posterior, value = trial, trial_posterior, float(evidence.detach())
        history.append(value)
        slopes = objective.slopes(posterior, logs)
    if iterations > _FIXED_POINT and not estimated and not slopes.are_flat(tolerance):
        return _by_gradients(objective, iterations - _FIXED_POINT, logs, history)
    return objective.result(logs, history, slopes, tolerance)


def _secant(logs: Tensor, step: Tensor, logs_before: Tensor, step_before: Tensor) -> Tensor:
    """Returns a secant step towards a step of zero, for each number on its own: they hardly depend on one another.

    The plain iteration contracts with a slope near 1 where a layer is barely determined by the data, and crawls there.
    """
    change = logs - logs_before
    slope = torch.where(change.abs() > 1e-12, (step_before - step) / change, 1.0)
    length = torch.where(slope > 0.01, step.abs() / slope.clamp_min(0.01), _LONGEST).clamp_max(_LONGEST)
    return torch.copysign(length, step).where(step != 0, 0.0)


def _by_gradients(
    objective: _Objective, iterations: int, start: Tensor | None = None, history: list[float] | None = None
) -> EvidenceResult:
    """Maximises the evidence by L-BFGS on the logarithms, with derivatives by autograd."""
    history = [] if history is None else history
    best: tuple[float, Tensor] = (-math.inf, objective.start_logs() if start is None else start)
    weight = objective.start.likelihood_weight
    distances = objective.squared_distances()

    def evaluate(logs: Tensor) -> Tensor:
        nonlocal best
        inside = objective.inside(logs)
        value = objective.evaluate(inside)[1]
        history.append(float(value.detach()))
        if history[-1] > best[0]:
            best = (history[-1], inside.detach().clone())
        return value

    def slopes() -> _Slopes:
        """Returns the slopes at the best point."""
        logs = best[1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(objective.evaluate(logs)[1], logs)
        size = (0.5 * best[1][: len(distances)].exp() * distances).clamp_min(1.0)
        if objective.tune_noise:
            count = weight * objective.factors.n_data * objective.factors.n_outputs
            size = torch.cat([size, size.new_tensor([count])])
        return _Slopes(gradient, gradient, size).within(best[1], objective.upper)

    tolerance = 10 * objective.tolerance
    for _ in range(3):
        _lbfgs(evaluate, best[1].clone(), iterations)
        at_best = slopes()
        if at_best.are_flat(tolerance):
            break
    return objective.result(best[1], history, at_best, tolerance)


def _lbfgs(evaluate: Callable[[Tensor], Tensor], start: Tensor, iterations: int) -> None:
    logs = start.requires_grad_()
    optimiser = torch.optim.LBFGS([logs], max_iter=iterations, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = evaluate(logs)
        (-value).backward()
        return -value

    optimiser.step(closure)
