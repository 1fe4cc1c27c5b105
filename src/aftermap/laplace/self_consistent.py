r"""Tuning without labels that were held out: the width at which the posterior agrees with the curvature that it averages over.

At a datum that a network has learned by heart the curvature Λ(f) of the loss is nearly zero, so the Laplace approximation counts it as no
datum at all and comes out too wide. The Gaussian q that is best in Kullback-Leibler divergence has the precision

.. math::
    P_0 + \sum_n J_n^\top \, \mathrm E_q[\Lambda(z_n)] \, J_n

(Opper and Archambeau 2009): the curvature averaged over the posterior itself. One number is enough: the posterior is divided by the c that solves

.. math::
    c = \frac{\sum_n \mathrm E\,\mathrm{tr}(V_n \Lambda(z_n))}{\sum_n \mathrm{tr}(V_n \Lambda(f_n))}, \qquad z_n \sim N(f_n, V_n/(\kappa c)),

where κ ≥ 1 brings a posterior in blocks to the effective dimension of the full one. Whether the result is any good is judged at cavities: the
predictive of a training datum with that datum taken out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.distributed import all_reduce_
from aftermap.laplace.dimension import DimensionResult
from aftermap.laplace.evidence import EvidenceResult
from aftermap.laplace.latents import OutputGaussians
from aftermap.likelihoods import Bernoulli, Categorical, Likelihood, Poisson, at_temperature, temperature_of
from aftermap.linalg import psd_eigh
from aftermap.predictive.latent import Latent, draw, draw_logits, normal_points
from aftermap.predictive.links import gaussian_prediction

__all__ = ["Cavities", "CavityCheck", "SelfConsistentResult", "averages_curvature", "self_consistent_scale"]

_DRAWS = 32  # and as many mirrored ones
_SETTLED = 1e-3  # change of log c
_ITERATIONS = 200
_CLIPPED = 0.99  # the largest share of its own posterior precision that a datum may have
_ALARM = 0.05  # nats by which the predictive may be worse than the network at the cavities
_INVALID = 0.05  # share of cavities that may be clipped
_CORRECTED = 1.25  # above this c a difference near zero at the cavities says little: the posterior was corrected for data learned by heart
_JUDGES = 2.0  # above this c it says nothing of how wide the posterior should be
_COST = 0.01  # nats by which the predictive may then be worse than the network at the training data themselves
_SHARPER = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # temperatures for networks that are less sure than they should be
_NARROWER = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # what covariances are divided by where the posterior is too wide
_NUMBERS = 1 << 24


def averages_curvature(likelihood: Likelihood) -> bool:
    """Tells whether the curvature of a likelihood depends on its outputs in a way that can be averaged: for classes and counts it does."""
    return isinstance(likelihood, Categorical | Bernoulli | Poisson)


@dataclass(frozen=True)
class CavityCheck:
    """The Bayesian predictive against the network, both at training data that were taken out of the posterior.

    Attributes:
        difference: The mean negative log-likelihood of the predictive less that of the network, in nats.
        standard_error: The standard error of this difference.
        invalid: The share of data that determine more of the posterior than a datum can, whose cavity is not to be relied on.
        n_data: The number of data.
        passed: Whether the predictive may be trusted as far as training data can tell.
        message: The comparison in one sentence.
        at_chance: Whether the network knows no more of its training data than how frequent the classes are, or the mean of the targets.
    """

    difference: float
    standard_error: float
    invalid: float
    n_data: int
    passed: bool
    message: str
    at_chance: bool = False

    @property
    def state(self) -> str:
        """The judgement in a word: "passed" or "FAILED"."""
        return "passed" if self.passed else "FAILED"


@dataclass(frozen=True)
class SelfConsistentResult:
    """What was found without held-out labels.

    Attributes:
        precision: The prior precision of each layer.
        data_scale: The data scale.
        output_temperature: The temperature T that the outputs are divided by.
        curvature: The factor c: the mean curvature under the posterior relative to that at the network's outputs.
        dimension: The factor κ that the covariance was divided by to match the effective dimension of the full posterior; 1 for a full one.
        matched: How κ was found; None for a posterior that has every term already.
        evidence: The maximum of the evidence that the prior precisions come from.
        check: The comparison with the network at the cavities.
        converged: Whether c is a fixed point.
        n_data: The number of training data that were used for c.
        correction: What the covariance was divided by further, since the predictive was worse than the network at the cavities.
    """

    precision: Mapping[str, float]
    data_scale: float
    output_temperature: float
    curvature: float
    dimension: float
    matched: DimensionResult | None
    evidence: EvidenceResult
    check: CavityCheck
    converged: bool
    n_data: int
    correction: float = 1.0

    def __str__(self) -> str:
        return f"{self.found}; {self.check.message}"

    @property
    def found(self) -> str:
        """What was found, in plain English, without the check."""
        factor = self.dimension * self.curvature * self.correction
        change = f"{factor:.3g} times smaller than" if factor >= 1 else f"{1 / factor:.3g} times larger than"
        change = "as" if f"{factor:.3g}" == "1" else change
        sure = "sure" if self.curvature >= 1 else "unsure"
        reasons = [
            f"{value:.3g} {why}"
            for value, why in (
                (self.dimension, "to match the effective dimension"),
                (self.curvature, f"for data that the network is {sure} of"),
                (self.correction, "because training data that were taken out asked for it"),
            )
            if f"{value:.3g}" != "1"
        ]
        text = f"without held-out labels: the covariance is {change} the evidence makes it"
        if reasons:
            text += f" ({', '.join(reasons)})"
        if self.output_temperature != 1.0:
            text += f"; outputs are divided by {self.output_temperature:.3g}"
            if self.output_temperature < 1:
                text += ", because the network is less sure than it should be"
        return text


def self_consistent_scale(
    gaussians: OutputGaussians, likelihood: Likelihood, dimension: float = 1.0
) -> tuple[float, bool]:
    r"""Finds the fixed point c at which the curvature averaged over N(f, V/(κc)) is c times that at f.

    Args:
        gaussians: N(f, V) at some training data.
        likelihood: The likelihood whose curvature is averaged.
        dimension: The factor κ that the covariance is divided by already.

    Returns:
        The factor c, and whether the iteration settled.
    """
    mean, cov = gaussians.mean, gaussians.covariances[0]
    deviations = _deviations(likelihood, mean, cov)
    at_mean = (gaussians.weight * _curvature_trace(likelihood, cov, mean[None], gaussians.targets)[0]).sum()
    log_c = 0.0
    for _ in range(_ITERATIONS):
        narrowing = dimension * math.exp(log_c)
        averaged = (gaussians.weight * _mean_trace(likelihood, gaussians, deviations, narrowing)).sum()
        sums = torch.stack([averaged, at_mean])
        all_reduce_([sums])
        if not float(sums.min()) > 0 or not math.isfinite(float(sums[0])):
            return 1.0, False
        change = 0.5 * (math.log(float(sums[0] / sums[1])) - log_c)
        log_c += change
        if abs(change) < _SETTLED:
            return math.exp(log_c), True
    return math.exp(log_c), False


def _mean_trace(likelihood: Likelihood, gaussians: OutputGaussians, deviations: Tensor, narrowing: float) -> Tensor:
    """Returns E tr(VΛ(z)) under z ~ N(f, V/narrowing) [M]: from draws around zero of N(0, V), or in closed form."""
    mean, cov = gaussians.mean, gaussians.covariances[0]
    if isinstance(likelihood, Poisson):
        # Few draws miss the tail that the mean of an exponential is made of.
        variance = cov.diagonal(dim1=-2, dim2=-1)
        return (variance * (mean + variance / (2 * narrowing)).exp()).sum(-1)
    return _curvature_trace(likelihood, cov, mean + deviations / math.sqrt(narrowing), gaussians.targets).mean(0)


def _deviations(likelihood: Likelihood, mean: Tensor, cov: Tensor) -> Tensor:
    """Draws from N(0, V) [S, M, C]: fixed points and their mirror images, so that their mean is zero."""
    points = normal_points(_DRAWS, mean.shape[-1], fixed=True)
    drawn = draw_logits if isinstance(likelihood, Categorical) else draw
    return drawn(Latent(torch.zeros_like(mean), cov, cov.diagonal(dim1=-2, dim2=-1)), torch.cat([points, -points]))


def _curvature_trace(likelihood: Likelihood, cov: Tensor, z: Tensor, targets: Tensor) -> Tensor:
    """Returns tr(VΛ(z)) for outputs z [S, M, C] and covariances V [M, C, C]: [S, M]."""
    if isinstance(likelihood, Categorical):
        p = torch.softmax(z / likelihood.temperature, -1)
        spread = torch.einsum("smk,mk->sm", p, cov.diagonal(dim1=-2, dim2=-1)) - torch.einsum(
            "smk,mkl,sml->sm", p, cov, p
        )
        weight = 1.0 if likelihood.weight is None else torch.as_tensor(likelihood.weight).to(z)[targets.long()]
        return weight * spread / likelihood.temperature**2
    # The outputs of other likelihoods do not know of each other: Λ is diagonal.
    size, width = z.shape[1], z.shape[2]
    roots = likelihood.hessian_root(z.reshape(-1, width), targets.repeat(len(z), *[1] * (targets.dim() - 1)))
    diagonal = roots.square().sum(-1).reshape(len(z), size, width)
    return (diagonal * cov.diagonal(dim1=-2, dim2=-1)).sum(-1)


@dataclass(frozen=True)
class Cavities:
    r"""The Gaussians over the outputs of training data after each datum was taken out of the posterior.

    With ḡ and Λ̄ the gradient and the curvature averaged over N(f, V), the cavity of a datum has the covariance
    V₋ = (V⁻¹ − Λ̄)⁻¹ and the mean m₋ = f + V₋ḡ: away from its label.

    Attributes:
        mean: The means m₋ [M, C].
        covariance: The covariances V₋ [M, C, C].
        invalid: Which data determine so much that V⁻¹ − Λ̄ is not safely positive [M].
        outputs: The network's outputs f, with every datum in the posterior [M, C].
        posterior: The covariances V of the outputs, with every datum in it [M, C, C].
        targets: The labels [M], or [M, C].
        weight: How many data each stands for [M].
    """

    mean: Tensor
    covariance: Tensor
    invalid: Tensor
    outputs: Tensor
    posterior: Tensor
    targets: Tensor
    weight: Tensor

    @staticmethod
    def of(gaussians: OutputGaussians, likelihood: Likelihood, narrowing: float, share: float = 1.0) -> Cavities:
        """Returns the cavities under the covariances divided by ``narrowing``.

        Args:
            gaussians: N(f, V) at some training data.
            likelihood: The likelihood.
            narrowing: What the covariances are divided by.
            share: How much of a datum is taken out: less than 1 where the log-likelihood was divided by a temperature.
        """
        mean, cov = gaussians.mean, gaussians.covariances[0] / narrowing
        gradient, curvature = (share * part for part in _averages(likelihood, mean, cov, gaussians.targets))
        values, vectors = psd_eigh(curvature, what="the averaged curvature", precision=torch.float32)
        root = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)  # Λ̄^½
        shares, directions = torch.linalg.eigh(root.mT @ cov @ root)
        left = (1 - shares.clamp(0.0, _CLIPPED)).reciprocal()
        covariance_root = cov @ root @ directions
        cavity = cov + (covariance_root * left.unsqueeze(-2)) @ covariance_root.mT
        away = (cavity @ gradient.unsqueeze(-1)).squeeze(-1)
        return Cavities(mean + away, cavity, shares.amax(-1) > _CLIPPED, mean, cov, gaussians.targets, gaussians.weight)

    def losses(self, likelihood: Likelihood, cov: Tensor | None, mean: Tensor | None = None) -> Tensor:
        """Returns the negative log-likelihood [M] of the labels at the cavity means, or at other means, with a covariance or without."""
        mean = self.mean if mean is None else mean
        prediction = gaussian_prediction(
            likelihood,
            mean,
            latent_cov=cov,
            latent_var=None if cov is not None else torch.zeros_like(mean),
        )
        return -prediction.log_prob(self.targets).double().reshape(len(mean), -1).sum(-1)

    def check(
        self, likelihood: Likelihood, curvature: float = 1.0, narrower: float = 1.0, sharper: float = 1.0
    ) -> CavityCheck:
        """Compares the predictive with the network.

        Args:
            likelihood: The likelihood of both.
            curvature: The factor c. Where it is far above 1 the posterior was narrowed for data that the network knows by heart, and the
                difference says nothing.
            narrower: What the covariances are divided by further; the means stay.
            sharper: The factor of the predictive's temperature; the network keeps its own.
        """
        losses = self._at(likelihood, narrower, sharper) - self.losses(likelihood, None)
        difference, error, count = _paired(losses, self.weight)
        invalid = _paired(self.invalid.double(), self.weight)[0]
        worse = difference > _ALARM and difference > 2 * error and curvature < _JUDGES
        side = "above" if difference >= 0 else "below"
        numbers = (
            f"at {count:,} training data that were taken out one at a time, its negative log-likelihood is {abs(difference):.3f} ± {error:.3f} "
            f"{side} the network's"
        )
        if invalid > _INVALID:
            reading = f"{invalid:.0%} of the data determine more of the posterior than a single datum can, so its curvature is not to be trusted"
        elif worse:
            reading = "the predictive is worse than the network"
        elif difference < -2 * error and difference < -0.03:
            reading = "the predictive is better than the network"
        elif curvature > _CORRECTED:
            reading = "the network knows its data by heart, so they cannot judge"
        else:
            reading = "no difference that matters"
        passed = not worse and invalid <= _INVALID
        return CavityCheck(difference, error, invalid, count, passed, f"{numbers}: {reading}")

    def _at(self, likelihood: Likelihood, narrower: float, sharper: float) -> Tensor:
        now = temperature_of(likelihood)
        warm = likelihood if now is None else at_temperature(likelihood, now * sharper)
        return self.losses(warm, self.covariance / narrower)

    def corrected(self, likelihood: Likelihood, curvature: float) -> tuple[float, float]:
        """Returns by what to divide covariance and temperature where the predictive is worse than the network, by more than chance.

        A network that was trained for few steps, or under weight decay, is less sure than it should be, and a posterior over it makes that
        worse. Of some narrower posteriors and lower temperatures, at the same cavities, those whose likelihood is within one standard error of the best
        qualify, and the widest of them is taken. Data that are known by heart cannot choose among them; there an alarm brings back the
        widest posterior that costs next to nothing at the training data themselves.

        Args:
            likelihood: The likelihood.
            curvature: The factor c. The more of the data are known by heart, the less they can say that the posterior is too wide: from
                1.25 on only an alarm is believed, and from 2 on not how far to go.

        Returns:
            The divisor of the covariance, and the factor of the temperature; both are 1 where nothing is to be corrected.
        """
        check = self.check(likelihood)
        believed = curvature < _CORRECTED or check.difference > _ALARM
        if not (believed and check.difference > 2 * check.standard_error):
            return 1.0, 1.0
        if curvature >= _JUDGES:
            return self._affordable(likelihood), 1.0
        sharper = (1.0,) if temperature_of(likelihood) is None else _SHARPER
        points: dict[
            float, tuple[float, float, Tensor]
        ] = {}  # for each width the least mean, its temperature and its losses
        for width in _NARROWER:
            tried = [(t, self._at(likelihood, width, t)) for t in sharper]
            means = [_paired(losses, self.weight)[0] for _, losses in tried]
            best = min(range(len(tried)), key=means.__getitem__)
            points[width] = (means[best], *tried[best])
        least = min(points.values(), key=lambda point: point[0])
        for width, (_, t, losses) in points.items():
            excess, error, _ = _paired(losses - least[2], self.weight)
            if excess <= error:
                return width, t
        raise AssertionError("the best point is within one standard error of itself")

    def _affordable(self, likelihood: Likelihood) -> float:
        """Returns the least divisor of the covariance at which the predictive is nearly as good as the network at the training data themselves."""
        network = self.losses(likelihood, None, self.outputs)
        for width in _NARROWER:
            excess = self.losses(likelihood, self.posterior / width, self.outputs) - network
            if _paired(excess, self.weight)[0] <= _COST:
                return width
        return _NARROWER[-1]


def _averages(likelihood: Likelihood, mean: Tensor, cov: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient [M, C] and the curvature [M, C, C] of the loss, averaged over N(f, V): by draws, or in closed form."""
    if isinstance(likelihood, Poisson):
        rate = (mean + cov.diagonal(dim1=-2, dim2=-1) / 2).exp()
        return rate - targets.reshape(rate.shape), torch.diag_embed(rate)
    z = mean + _deviations(likelihood, mean, cov)
    size, width = mean.shape
    gradient, curvature = torch.zeros(size, width, dtype=z.dtype), torch.zeros(size, width, width, dtype=z.dtype)
    step = max(1, _NUMBERS // (size * width**2))
    for part in z.split(step):
        labels = targets.repeat(len(part), *[1] * (targets.dim() - 1))
        flat = part.reshape(-1, width)
        gradient += likelihood.gradient(flat, labels).reshape(len(part), size, width).sum(0)
        curvature += likelihood.hessian(flat, labels).reshape(len(part), size, width, width).sum(0)
    return gradient / len(z), curvature / len(z)


def _paired(values: Tensor, weight: Tensor) -> tuple[float, float, int]:
    """Returns the weighted mean over the data of all processes, its standard error, and the number of data."""
    sums = torch.stack([weight.sum(), (weight * values).sum(), torch.tensor(float(len(values)), dtype=torch.float64)])
    all_reduce_([sums])
    mean = sums[1] / sums[0]
    spread = (weight.square() * (values - mean).square()).sum().reshape(1)
    all_reduce_([spread])
    return float(mean), float(spread.sqrt() / sums[0]), int(sums[2])
