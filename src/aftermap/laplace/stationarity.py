r"""Whether the network is at a mode, as the evidence assumes, and the evidence of the linear model, which always is.

The Laplace evidence expands the log joint around a maximum. Elsewhere its gradient g is not zero, and to first order the linear
model f + J(θ − θ*) would gain ½ gᵀP⁻¹g nats by moving: a measure that does not depend on the scale of weights. Refinement moves:
it finds the mode of the linear model, whose problem is convex, and gives the evidence there (Antorán et al. 2022).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aftermap.batches import Batch, Unpack, iterate
from aftermap.curvature import fit_curvature
from aftermap.curvature.passes.products import pushed_forward
from aftermap.errors import InputError, StatisticalWarning, UnsupportedError
from aftermap.laplace.evidence import log_evidence
from aftermap.laplace.fitted import Fitted
from aftermap.likelihoods import Likelihood
from aftermap.models import call_model, check_device, evaluating, functional_outputs
from aftermap.params import Params, flatten, unflatten
from aftermap.posteriors import CurvaturePosterior, GaussianPosterior
from aftermap.posteriors.base import with_noise

if TYPE_CHECKING:
    from aftermap.laplace.laplace import Laplace

__all__ = [
    "LinearMode",
    "RefinedEvidence",
    "Stationarity",
    "check_stationarity",
    "linear_mode",
    "refined_evidence",
    "warn_unless_stationary",
]

# A mode may be this many nats away: models are compared by differences of nats, and large data forgive more.
_GAIN = 1.0
_GAIN_PER_DATUM = 0.01


@dataclass(frozen=True)
class Stationarity:
    """How far the weights are from a mode of their log joint.

    Attributes:
        gradient_norm: The norm ‖g‖ of the gradient of the log joint.
        relative: The norm ‖g‖ over the norms of its two parts, likelihood and prior: 0 at a mode, about 1 where they do
            not balance.
        gain: The nats ½ gᵀP⁻¹g that the linear model gains by moving to its mode (to second order).
        limit: The gain up to which weights count as a mode.
    """

    gradient_norm: float
    relative: float
    gain: float
    limit: float

    @property
    def stationary(self) -> bool:
        """Whether the gain is within the limit."""
        return self.gain <= self.limit

    @property
    def message(self) -> str:
        """The finding in one sentence."""
        return (
            f"the gradient of the log joint has norm {self.gradient_norm:.3g} ({self.relative:.2g} of its parts); the linear model would gain "
            f"{self.gain:.3g} nats by moving to its mode (limit {self.limit:.3g})"
        )


def check_stationarity(
    laplace: Laplace,
    data: Iterable[Any] | None = None,
    *,
    limit: float | None = None,
    unpack: Unpack | None = None,
) -> Stationarity:
    """Measures whether a fitted Laplace approximation stands at a mode, by one pass over the data.

    Args:
        laplace: A fitted approximation.
        data: The training data. None means those of the fit.
        limit: The gain, in nats, up to which weights count as a mode. None means 1, or 0.01 per datum if that is more.
        unpack: A function that turns a batch of another form into (inputs, targets).

    Raises:
        InputError: There are no data, or the limit is not positive.

    >>> from aftermap.laplace import Laplace
    >>> net = nn.Linear(1, 1, bias=False)
    >>> _ = net.weight.data.fill_(1.0)
    >>> x = torch.ones(4, 1)
    >>> at_mode = Laplace(net, "regression").fit([(x, 1.25 * x)])
    >>> check_stationarity(at_mode).stationary
    True
    """
    if limit is not None and not limit > 0:
        raise InputError(f"limit={limit!r} must be a positive number of nats")
    laplace.check_weights()
    fitted = laplace.fitted.without_narrowing()  # The evidence is that of the data as they are.
    posterior, weight = fitted.posterior, fitted.hyperparameters.likelihood_weight
    likelihood = with_noise(laplace.base_likelihood, fitted.hyperparameters.noise)  # that the network was trained with
    slope: Params = {n: torch.zeros_like(v, dtype=torch.float64) for n, v in posterior.mean.items()}
    with evaluating(laplace.model), torch.enable_grad():
        for batch in _batches(laplace, data, unpack):
            params = {n: v.detach().clone().requires_grad_() for n, v in posterior.mean.items()}
            loss = weight * _loss(likelihood, functional_outputs(laplace.model, params, batch.inputs), batch)
            for name, part in zip(
                params, torch.autograd.grad(loss, list(params.values()), allow_unused=True), strict=True
            ):
                if part is not None:
                    slope[name] += part.to(torch.float64)
    pull = _prior_gradient(posterior, posterior.mean)
    gradient = {n: slope[n] + pull[n] for n in slope}
    newton_step = posterior.covariance_mv(gradient)
    gain = 0.5 * sum(float((gradient[n] * newton_step[n]).sum()) for n in gradient)
    norm, data_norm, prior_norm = (float(flatten(v).norm()) for v in (gradient, slope, pull))
    allowed = limit if limit is not None else max(_GAIN, _GAIN_PER_DATUM * laplace.n_data)
    return Stationarity(norm, norm / max(data_norm + prior_norm, 1e-300), gain, allowed)


def warn_unless_stationary(stationarity: Stationarity) -> None:
    """Warns of an evidence that was taken away from a mode, and says what to do.

    Warns:
        StatisticalWarning: The weights are not at a mode.
    """
    if not stationarity.stationary:
        warnings.warn(
            f"the network is not at a mode, so its evidence is not to be trusted: {stationarity.message}. Train longer or with a smaller "
            "learning rate, with the prior as weight decay (precision / number of data), or take the evidence of the linear model: "
            "refined_evidence(laplace, train_loader)",
            StatisticalWarning,
            stacklevel=4,
        )


def _batches(laplace: Laplace, data: Iterable[Any] | None, unpack: Unpack | None) -> Iterable[Batch]:
    chosen = laplace.data if data is None else data
    if chosen is None:
        raise InputError("the data of the fit are not at hand; pass the training data")
    device, dtype = check_device(laplace.model)
    return iterate(chosen, device=device, dtype=dtype, unpack=laplace.unpack if unpack is None else unpack)


def _loss(likelihood: Likelihood, outputs: Tensor, batch: Batch) -> Tensor:
    """Returns −Σ log p(y|f), summed in float64."""
    values = likelihood.nll(outputs, batch.targets).to(torch.float64)
    if batch.weight is not None:
        values = values * batch.weight.to(values)
    return values.sum()


def _prior_gradient(posterior: CurvaturePosterior, at: Params) -> Params:
    """Returns the gradient P₀(θ − μ₀) of the prior's energy."""
    prior = posterior.prior
    return {
        n: prior.precision[n].detach().to(v.device) * (v.to(torch.float64) - prior.mean[n].to(v.device))
        for n, v in at.items()
    }


@dataclass(frozen=True)
class RefinedEvidence:
    """The evidence of the linear model at its own mode.

    Attributes:
        log_evidence: The log evidence at the mode, with the curvature of the loss taken there.
        mean: The mode v*, by name.
        posterior: The posterior N(v*, (sH + P₀)⁻¹) of the linear model.
        gain: The nats of log joint that moving gave.
        converged: Whether the gradient at v* is small.
    """

    log_evidence: float
    mean: Params
    posterior: GaussianPosterior
    gain: float
    converged: bool


class _Shifted(nn.Module):
    """The network with an offset added to its outputs: the linear model at another point has the same Jacobian."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, offset: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return call_model(self.model, kwargs or (args if len(args) > 1 else args[0])) + offset


@dataclass(frozen=True)
class LinearMode:
    """The mode of the linear model.

    Attributes:
        mean: The mode v*, by name.
        gain: The nats of log joint that moving from θ* gave.
        converged: Whether the gradient at v* is small.
    """

    mean: Params
    gain: float
    converged: bool


@torch.inference_mode(False)
def linear_mode(
    laplace: Laplace,
    data: Iterable[Any] | None = None,
    *,
    iterations: int = 100,
    unpack: Unpack | None = None,
) -> LinearMode:
    """Returns the mode v* of the linear model f(x, θ*) + J(x)(v − θ*) under the present prior and noise.

    It minimises the convex −p Σ log p(y|f + J(v − θ*)) + ½‖v − μ₀‖²_{P₀} by L-BFGS, preconditioned with the posterior's covariance.

    Args:
        laplace: A fitted approximation with Kronecker, full, low-rank or diagonal blocks.
        data: The training data, which are held in memory. None means those of the fit.
        iterations: The number of iterations of L-BFGS; each is one pass forward and back.
        unpack: A function that turns a batch of another form into (inputs, targets).

    Raises:
        InputError: There are no data.
        UnsupportedError: The posterior is matrix-free.

    References:
        Antorán et al. 2022, Adapting the linearised Laplace model evidence for modern deep learning, section 4.
    """
    return _find_mode(laplace, list(_batches(laplace, data, unpack)), iterations)[0]


def _find_mode(laplace: Laplace, batches: list[Batch], iterations: int) -> tuple[LinearMode, Params]:
    """Returns the mode v*, and the way v* − θ* to it."""
    fitted = laplace.fitted.without_narrowing()
    posterior, weight = fitted.posterior, fitted.hyperparameters.likelihood_weight
    likelihood = with_noise(laplace.base_likelihood, fitted.hyperparameters.noise)
    if not isinstance(posterior, GaussianPosterior):
        raise UnsupportedError(f"refinement needs a posterior with blocks, got a {type(posterior).__name__}")
    laplace.check_weights()
    model, names = laplace.model, list(posterior.names)
    start = {n: v.detach() for n, v in posterior.mean.items()}

    def energy_and_slope(flat: Tensor) -> tuple[float, Tensor]:
        direction = _direction(flat, start)
        value, slope = 0.0, torch.zeros_like(flat)
        for batch in batches:
            params = {n: v.clone().requires_grad_() for n, v in start.items()}
            offset = _offsets(model, start, direction, batch)
            with torch.enable_grad():
                f = functional_outputs(model, params, batch.inputs)
                shifted = (f.detach() + offset).requires_grad_()
                loss = weight * _loss(likelihood, shifted, batch)
                (pull,) = torch.autograd.grad(loss, shifted)
                parts = torch.autograd.grad(f, list(params.values()), pull, allow_unused=True, materialize_grads=True)
            value += float(loss.detach())
            slope += torch.cat([p.reshape(-1) for p in parts]).to(slope)
        at = {n: start[n].to(torch.float64) + unflatten(flat, start, names)[n] for n in names}
        return value + float(posterior.prior.energy(at)), slope + flatten(_prior_gradient(posterior, at), names)

    with evaluating(model):
        flat, gain, converged = _minimise(energy_and_slope, posterior, start, iterations)
    direction = _direction(flat, start)
    return LinearMode({n: start[n] + direction[n] for n in names}, gain, converged), direction


def _direction(flat: Tensor, start: Params) -> Params:
    """Returns v − θ* by name, in the network's precision."""
    return {n: v.to(start[n].dtype) for n, v in unflatten(flat, start, list(start)).items()}


@torch.no_grad()
def _offsets(model: nn.Module, start: Params, direction: Params, batch: Batch) -> Tensor:
    """Returns J(x)(v − θ*), what moving adds to the outputs of the linear model."""
    return next(pushed_forward(model, start, batch.inputs, [direction]))[1]


@torch.inference_mode(False)
def refined_evidence(
    laplace: Laplace,
    data: Iterable[Any] | None = None,
    *,
    iterations: int = 100,
    unpack: Unpack | None = None,
) -> RefinedEvidence:
    """Returns the evidence of the linear model f(x, θ*) + J(x)(v − θ*) at its own mode v*, under the present prior and noise.

    Where θ* is a mode, v* = θ* and the evidence is the usual one; where it is not, only this one is an evidence.

    Args:
        laplace: A fitted approximation with Kronecker, full, low-rank or diagonal blocks.
        data: The training data, which are held in memory. None means those of the fit.
        iterations: The number of iterations of `linear_mode`; each is one pass forward and back.
        unpack: A function that turns a batch of another form into (inputs, targets).

    Raises:
        InputError: There are no data.
        UnsupportedError: The posterior is matrix-free.

    References:
        Antorán et al. 2022, Adapting the linearised Laplace model evidence for modern deep learning, section 4.
    """
    batches = list(_batches(laplace, data, unpack))
    mode, direction = _find_mode(laplace, batches, iterations)
    fitted = laplace.fitted.without_narrowing()
    start = {n: v.detach() for n, v in fitted.posterior.mean.items()}
    with evaluating(laplace.model):
        shifted = [
            (_with_offset(b.inputs, _offsets(laplace.model, start, direction, b)), b.targets, b.weight) for b in batches
        ]
        value, refined = _evidence_at(laplace, fitted, shifted, start, direction)
    return RefinedEvidence(value, mode.mean, refined, mode.gain, mode.converged)


def _with_offset(inputs: Any, offset: Tensor) -> Any:
    if isinstance(inputs, dict):
        return {"offset": offset, **inputs}
    return (offset, *inputs) if isinstance(inputs, tuple) else (offset, inputs)


def _minimise(
    function: Any, posterior: GaussianPosterior, start: Params, iterations: int
) -> tuple[Tensor, float, bool]:
    """Minimises by L-BFGS on d = v − θ*, with Σ as the first inverse Hessian: exact in one step where Σ is."""
    names = list(start)
    size = sum(v.numel() for v in start.values())
    device = next(iter(start.values())).device
    at = torch.zeros(size, dtype=torch.float64, device=device)

    def precondition(vector: Tensor) -> Tensor:
        return flatten(posterior.covariance_mv(unflatten(vector, start, names)), names).to(torch.float64)

    value, slope = function(at)
    pairs: list[tuple[Tensor, Tensor]] = []
    first, converged = value, False
    for _ in range(iterations):
        step = -_two_loops(slope, pairs, precondition)
        expected = float(-(slope * step).sum())
        if expected <= 1e-9:  # In nats.
            converged = True
            break
        length = 1.0
        while length > 1e-8:
            new_value, new_slope = function(at + length * step)
            if new_value <= value - 1e-4 * length * expected:
                break
            length /= 2
        else:
            break
        displacement, change = length * step, new_slope - slope
        if float(displacement @ change) > 0:
            pairs = [*pairs, (displacement, change)][-10:]
        at, value, slope = at + displacement, new_value, new_slope
    return at, first - value, converged


def _two_loops(slope: Tensor, pairs: list[tuple[Tensor, Tensor]], precondition: Any) -> Tensor:
    q, alphas = slope.clone(), []
    for s, y in reversed(pairs):
        alpha = float(s @ q) / float(s @ y)
        alphas.append(alpha)
        q -= alpha * y
    q = precondition(q)
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        q += (alpha - float(y @ q) / float(s @ y)) * s
    return q


def _evidence_at(
    laplace: Laplace,
    fitted: Fitted,
    data: list[tuple[Any, Any, Tensor | None]],
    start: Params,
    direction: Params,
) -> tuple[float, GaussianPosterior]:
    """Returns log q(D) of the linear model with the curvature of the loss at its outputs, and its posterior."""
    prefix = "model."
    trimmed = [(x, y) if w is None else (x, y, w) for x, y, w in data]
    factors = fit_curvature(
        _Shifted(laplace.model),
        trimmed,
        laplace.base_likelihood,
        structure=laplace.factors.structure,
        params=[prefix + n for n in start],
        curvature=laplace.curvature,
        approach=laplace.approach,
        rank=laplace.rank,
        progress=False,
    )
    prior, posterior = fitted.hyperparameters.prior, fitted.posterior
    refined = GaussianPosterior.from_factors(
        factors,
        {prefix + n: start[n] + direction[n] for n in start},
        {prefix + n: prior.precision[n].detach() for n in start},
        prior_mean={prefix + n: prior.mean[n].expand(start[n].shape) for n in start},
        scale=posterior.scale.detach(),
        damping=posterior.damping,
    )
    return float(log_evidence(refined, factors, laplace.base_likelihood, fitted.hyperparameters)), refined
