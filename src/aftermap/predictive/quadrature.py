"""Integrals over a Gaussian latent output, and quantiles of mixtures: what the links and intervals stand on.

Index legend: S points or samples, N examples, ... positions, C outputs.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from aftermap.errors import NumericalError
from aftermap.predictive.latent import normal_quantile, shares

__all__ = [
    "bernoulli_entropy",
    "bernoulli_gaussian",
    "poisson_lognormal_log_prob",
    "poisson_lognormal_rates",
    "poisson_mixture_quantile",
    "weighted_quantile",
]

_WIDE = 4.0  # Above this variance the sum runs over the logit, below it over the standard normal.
_CHUNK = 1 << 15  # This many elements are integrated at once, which bounds the memory at a few tens of megabytes.
_LOG_2PI = math.log(2 * math.pi)


def bernoulli_entropy(logits: Tensor) -> Tensor:
    """Returns the entropy of a Bernoulli with the given logits, in nats, without cancellation at either end.

    >>> bernoulli_entropy(torch.tensor([0.0, 1e4]))
    tensor([0.6931, 0.0000])
    """
    size = logits.abs()
    return torch.log1p((-size).exp()) + size * torch.sigmoid(-size)


def _grid(step: float, reach: float, like: Tensor) -> Tensor:
    count = round(reach / step)
    return step * torch.arange(-count, count + 1, dtype=like.dtype, device=like.device)


def _narrow(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Sums by the trapezoidal rule over z with f = m + √v z; the poles of σ are at least π/2 away, so the error is e⁻³⁸."""
    z = _grid(0.25, 9.0, mean)
    weights = 0.25 * (-0.5 * z.square() - 0.5 * _LOG_2PI).exp()
    # The offset keeps the derivative of the root finite at v = 0 and moves no result by more than 1e-13.
    logits = mean.unsqueeze(-1) + (variance + 1e-12).sqrt().unsqueeze(-1) * z
    return torch.sigmoid(logits) @ weights, bernoulli_entropy(logits) @ weights


def _wide(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Sums by the trapezoidal rule over the logit l, where σ is the distribution function of a logistic variable."""
    logits = _grid(0.5, 40.0, mean)
    sd = variance.sqrt().unsqueeze(-1)
    z = (mean.unsqueeze(-1) - logits) / sd
    slope = torch.sigmoid(logits) * torch.sigmoid(-logits)
    density = (-0.5 * z.square() - 0.5 * _LOG_2PI).exp() / sd
    return torch.special.ndtr(z) @ (0.5 * slope), density @ (0.5 * bernoulli_entropy(logits))


def bernoulli_gaussian(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    r"""Returns the mean probability and the mean entropy of a Bernoulli whose logit is Gaussian.

    .. math::
        \int \sigma(f)\, N(f; m, v)\, df, \qquad \int H[\sigma(f)]\, N(f; m, v)\, df,

    The integrals are taken by the trapezoidal rule, which converges exponentially for analytic integrands that decay:
    over z = (f − m)/√v for v ≤ 4, and above over the logit itself, with E σ(f) = ∫ σ'(l) Φ((m − l)/√v) dl. The absolute
    error is below 1e-12 for every m and v.

    Args:
        mean: The mean m, of any shape.
        variance: The variance v ≥ 0, of the same shape.

    Returns:
        Both integrals, float64, of the shape of ``mean``; they are differentiable in both arguments.

    >>> probability, entropy = bernoulli_gaussian(torch.zeros(2), torch.tensor([0.0, 50.0]))
    >>> probability
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    flat_mean = mean.to(torch.float64).reshape(-1)
    flat_variance = variance.to(torch.float64).reshape(-1)
    parts = []
    for m, v in zip(flat_mean.split(_CHUNK), flat_variance.split(_CHUNK), strict=True):
        is_wide = v > _WIDE
        # Each branch gets a harmless variance where the other is used, since its gradient must stay finite.
        probability, entropy = _narrow(m, torch.where(is_wide, 1.0, v))
        if bool(is_wide.any()):
            other = _wide(m, torch.where(is_wide, v, 2 * _WIDE))
            probability = torch.where(is_wide, other[0], probability)
            entropy = torch.where(is_wide, other[1], entropy)
        parts.append((probability, entropy))
    probability = torch.cat([part[0] for part in parts]).reshape(mean.shape)
    return probability, torch.cat([part[1] for part in parts]).reshape(mean.shape)


def poisson_lognormal_log_prob(counts: Tensor, mean: Tensor, variance: Tensor, *, nodes: int = 40) -> Tensor:
    r"""Returns the log-probability of counts whose log-rate is Gaussian, by adaptive Gauss-Hermite quadrature.

    .. math::
        \log \int \mathrm{Poisson}(y; e^{f})\, N(f; m, v)\, df

    The nodes are centred on the mode of the integrand and scaled by its curvature there.

    Args:
        counts: The counts y, of any shape.
        mean: The mean m of the log-rate, of the same shape.
        variance: The variance v ≥ 0, of the same shape.
        nodes: The number of nodes.

    Returns:
        A float64 tensor of the shape of ``counts``.

    References:
        Liu and Pierce 1994, A note on Gauss-Hermite quadrature.

    >>> round(poisson_lognormal_log_prob(torch.tensor([3.0]), torch.zeros(1), torch.zeros(1)).item(), 4)
    -2.7918
    """
    y, m, v = (tensor.to(torch.float64) for tensor in (counts, mean, variance))
    root = (v + 1e-12).sqrt()
    with torch.no_grad():
        # h'(z) = √v (y − λ) − z is concave and decreasing, so Newton from the right of its root is monotone.
        z = ((y.clamp_min(1e-3).log() - m) / root).clamp_min(0.0)
        for _ in range(60):
            rate = (m + root * z).clamp_max(700.0).exp()
            z = z + (root * (y - rate) - z) / (1 + root.square() * rate)
        scale = (1 + root.square() * (m + root * z).clamp_max(700.0).exp()).rsqrt()
    points, weights = (torch.from_numpy(array).to(m) for array in np.polynomial.hermite_e.hermegauss(nodes))
    points = points.reshape(-1, *[1] * m.dim())
    weights = weights.reshape(points.shape)
    at = z + scale * points
    log_rate = m + root * at
    integrand = y * log_rate - log_rate.clamp_max(700.0).exp() - torch.lgamma(y + 1) - 0.5 * at.square()
    summed = torch.logsumexp(weights.log() + integrand + 0.5 * points.square(), 0)
    return summed + scale.log() - 0.5 * _LOG_2PI


def poisson_lognormal_rates(mean: Tensor, variance: Tensor, *, points: int = 128) -> Tensor:
    """Returns equally probable rates exp(m + √v z): the centres of equal slices of the log-normal distribution.

    Args:
        mean: The mean m, of any shape.
        variance: The variance v ≥ 0, of the same shape.
        points: The number S of rates.

    Returns:
        A float64 tensor [S, *mean.shape].

    >>> poisson_lognormal_rates(torch.zeros(2), torch.ones(2), points=5)[2]
    tensor([1., 1.], dtype=torch.float64)
    """
    slices = (torch.arange(points, dtype=torch.float64, device=mean.device) + 0.5) / points
    z = normal_quantile(slices).reshape(-1, *[1] * mean.dim())
    return (mean.to(torch.float64) + variance.to(torch.float64).sqrt() * z).exp()


def poisson_mixture_quantile(rates: Tensor, weights: Tensor | None, level: float) -> Tensor:
    """Returns the smallest count k with F(k) ≥ level, where F is a mixture of Poisson distributions.

    It is F(k) = Σ_s w_s Q(k + 1, λ_s) with Q the upper regularised gamma function. Cantelli's inequality gives a
    bracket, bisection the rest.

    Args:
        rates: The rates λ [S, ...].
        weights: The weights w [S], summing to one; None means 1/S.
        level: The level in (0, 1).

    Returns:
        The counts [...], as whole numbers in float64.

    Raises:
        NumericalError: A rate is not finite.

    >>> poisson_mixture_quantile(torch.tensor([[2.0]]), None, 0.5)
    tensor([2.], dtype=torch.float64)
    """
    rates = rates.detach().to(torch.float64)
    if not bool(torch.isfinite(rates).all()):
        raise NumericalError("a sampled rate is not finite, so its counts have no quantiles; check the log-rates.")
    share = shares(rates, weights)
    mean = (share * rates).sum(0)
    sd = (mean + (share * (rates - mean).square()).sum(0)).sqrt()
    low = (mean - sd * math.sqrt((1 - level) / level)).floor().sub(1).clamp_min(-1.0)
    high = (mean + sd * math.sqrt(level / (1 - level))).ceil().add(1)
    steps = math.ceil(math.log2(float((high - low).max()))) if high.numel() else 0
    for _ in range(steps):
        middle = ((low + high) / 2).floor()
        reached = (share * torch.special.gammaincc(middle.clamp_min(0.0) + 1, rates)).sum(0) >= level
        reached = reached & (middle >= 0)
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high


def weighted_quantile(samples: Tensor, weights: Tensor | None, level: float) -> Tensor:
    """Returns the smallest sample at which the weights of the sorted samples have reached ``level``.

    Args:
        samples: The samples [S, ...].
        weights: The weights [S], summing to one; None means 1/S.
        level: The level in (0, 1).

    Returns:
        The quantiles [...], each value one of the samples.

    >>> weighted_quantile(torch.tensor([[3.0], [1.0], [2.0]]), None, 0.5)
    tensor([2.])
    """
    ordered, order = samples.sort(0)
    share = shares(samples, weights).to(torch.float64).expand(samples.shape)
    # Rounding must not push a level that is reached exactly to the next sample.
    reached = share.gather(0, order).cumsum(0) >= level - 1e-9
    first = reached.to(torch.int8).argmax(0, keepdim=True)
    return ordered.gather(0, first).squeeze(0)
