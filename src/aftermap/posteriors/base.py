"""What a posterior is, and the Gaussian one: a mean and block posteriors that together hold every parameter once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor

from aftermap import checks
from aftermap.curvature.passes.backward import LayerGradients
from aftermap.curvature.rules.base import examples_per_chunk
from aftermap.curvature.structures.base import (
    BlockPosterior,
    Factors,
    covariances_by_example,
    join_flat,
    paired_products,
    split_flat,
)
from aftermap.curvature.structures.eigenbasis import DAMPINGS, eigendecompose
from aftermap.errors import InputError, ShapeError
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from aftermap.linalg import symmetrise
from aftermap.params import Params, by_module
from aftermap.prior import Prior, PriorSpec

__all__ = [
    "CurvaturePosterior",
    "GaussianPosterior",
    "Hyperparameters",
    "Posterior",
    "check_scale",
    "has_noise",
    "layers_of",
    "likelihood_with",
    "noise_exponent",
    "split_noise",
    "with_noise",
]

_Posterior = TypeVar("_Posterior", bound="CurvaturePosterior")


class Posterior(ABC):
    """A distribution over the selected parameters of a network.

    Attributes:
        mean: The mean of the weights, by name.
        working_numbers: The number of gradient numbers that `functional_covariance` works on at once.
    """

    mean: Params
    working_numbers: ClassVar[int] = 1 << 21

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator | None = None) -> Params:
        """Draws weights: for each name a tensor [count, *shape]."""

    @abstractmethod
    def log_prob(self, params: Params) -> Tensor:
        """Returns the log density [...] at weights [..., *shape]."""

    @abstractmethod
    def log_det_precision(self) -> Tensor:
        """Returns the log determinant of the precision."""

    @abstractmethod
    def precision_mv(self, values: Params) -> Params:
        """Returns the precision times [..., *shape]."""

    @abstractmethod
    def covariance_mv(self, values: Params) -> Params:
        """Returns the covariance times [..., *shape]."""

    @abstractmethod
    def marginal_variance(self) -> Params:
        """Returns the diagonal of the covariance."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """Returns the precision [P, P] in float64 over `names`, each parameter row-major."""

    def times_covariance(self, rows: Tensor) -> Tensor:
        """Returns rows [..., P] over `names`, each parameter row-major, times the covariance."""
        product = self.covariance_mv(split_flat(rows, self.shapes))
        return join_flat(product, self.names, rows.dim() - 1)

    def functional_covariance(
        self, gradients: LayerGradients, variants: Sequence[Self] | None = None, *, diagonal: bool = False
    ) -> list[list[Tensor]]:
        """Returns J Σ Jᵀ by block, for this posterior or for variants of it (the same curvature under other priors).

        Args:
            gradients: The gradients of the outputs' unit vectors at every layer.
            variants: The variants. None means only this posterior.
            diagonal: Whether to compute only the variances.

        Returns:
            For each variant one [b, v, v] (or [b, v]) per name of `block_names`; they add up to the predictive covariance.
        """
        posteriors = [self] if variants is None else list(variants)
        stride = examples_per_chunk(gradients.n_vectors * self.n_params, self.working_numbers)

        def rows(by_name: Params) -> Tensor:
            return join_flat(by_name, self.names, 2).detach()

        return [[c] for c in covariances_by_example(gradients, self.names, stride, rows, posteriors, diagonal)]

    def approximate_variance(self, gradients: LayerGradients) -> Tensor:
        """Returns the variances of J Σ Jᵀ [b, v], exactly or, where that is much cheaper, to about a tenth.

        Args:
            gradients: The gradients of some vectors at every layer.
        """
        return torch.stack(self.functional_covariance(gradients, diagonal=True)[0]).sum(0)

    def output_covariance(self, gradients: Tensor, diagonal: bool) -> Tensor:
        """Returns J Σ Jᵀ for the gradients of some outputs [v, b, P]: [b, v, v], or the variances [b, v]."""
        wide = gradients.to(torch.float64)
        covariance = paired_products(wide, self.times_covariance(wide), diagonal)
        return (covariance if diagonal else symmetrise(covariance)).to(gradients.dtype)

    @property
    def block_names(self) -> tuple[str, ...]:
        """The names of the parts that `functional_covariance` returns, in order."""
        return ("all",)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in order."""
        return tuple(self.mean)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters by name."""
        return {n: tuple(v.shape) for n, v in self.mean.items()}

    @property
    def n_params(self) -> int:
        """The number P of parameters."""
        return sum(v.numel() for v in self.mean.values())


class CurvaturePosterior(Posterior):
    """A posterior N(θ*, (s·H + P₀)⁻¹) made from the curvature H of data; prior and scale can be exchanged without the data.

    Attributes:
        prior: The prior, with its precisions P₀ and its mean.
        scale: The factor s of the curvature, 0-d float64.
        layers: For each layer the names of its parameters: the granularity of a per-layer prior.
        damping: The way in which the prior is added: exact, factored or pi.
        is_estimated: Whether log determinants and effective parameters are estimates from random draws.
    """

    prior: Prior
    scale: Tensor
    layers: Mapping[str, Sequence[str]]
    damping: str = "exact"
    is_estimated: ClassVar[bool] = False

    @abstractmethod
    def with_prior(
        self, precision: PriorSpec | None = None, *, scale: float | Tensor | None = None, prior: Prior | None = None
    ) -> Self:
        """Returns the same curvature under another prior or scale, without a pass over the data.

        Args:
            precision: The precision of the new prior, whose mean stays; see :class:`Prior`.
            scale: The new factor of the curvature. None keeps the present one.
            prior: A whole prior, instead of a precision.
        """

    @property
    @abstractmethod
    def has_every_term(self) -> bool:
        """Whether H is the whole matrix: all terms between layers, and no direction left to the prior."""

    @abstractmethod
    def log_det_ratio(self) -> Tensor:
        """Returns log |P| − log |P₀|, twice the information gained from the data, in nats."""

    @abstractmethod
    def effective_parameters(self) -> dict[str, float]:
        """Returns γ by layer (MacKay): how many directions of a layer the data determine."""

    def _new_prior_and_scale(
        self, precision: PriorSpec | None, scale: float | Tensor | None, prior: Prior | None
    ) -> tuple[Prior, Tensor]:
        """Returns what `with_prior` was asked for, checked."""
        if prior is None:
            prior = self.prior
            if precision is not None:
                prior = Prior.make(precision, dict(self.prior.mean), self.layers, self.shapes)
        return prior, self.scale if scale is None else check_scale(scale)


def layers_of(factors: Factors) -> dict[str, list[str]]:
    """Returns the parameters of each layer: of the blocks, or for one matrix over everything of the modules that own them."""
    if len(factors.blocks) > 1 or not factors.blocks[0].joins_layers:
        return {b.name: list(b.shapes) for b in factors.blocks}
    return by_module(factors.names)


def check_scale(scale: float | Tensor) -> Tensor:
    """Returns the scale of a curvature, which must be positive, as a 0-d float64 tensor; its gradient stays."""
    factor = torch.as_tensor(scale, dtype=torch.float64)
    if factor.dim() or not math.isfinite(float(factor.detach())) or float(factor.detach()) <= 0:
        raise InputError(f"the scale of the curvature must be one positive and finite number, got {scale!r}")
    return factor


@dataclass(frozen=True)
class GaussianPosterior(CurvaturePosterior):
    """The posterior N(θ*, (s·H + P₀)⁻¹) with a block-diagonal curvature H.

    Attributes:
        mean: The trained weights θ*, by name.
        blocks: One posterior per curvature block.
        prior: The prior, with its precisions P₀ and its mean.
        scale: The factor s = data scale / temperature (and 1/σ² for a Gaussian likelihood with unit-noise curvature),
            0-d float64.
        layers: For each layer the names of its parameters: the granularity of a per-layer prior.
        damping: The way in which the prior is added: exact, factored or pi.
    """

    mean: Params
    blocks: tuple[BlockPosterior, ...]
    prior: Prior
    scale: Tensor
    layers: Mapping[str, Sequence[str]]
    damping: str = "exact"

    @staticmethod
    def from_factors(
        factors: Factors,
        mean: Params,
        prior: PriorSpec | Prior = 1.0,
        *,
        prior_mean: float | Params = 0.0,
        scale: float | Tensor = 1.0,
        damping: str = "exact",
    ) -> GaussianPosterior:
        """Makes a posterior by decomposing the curvature once; over several processes the decompositions are shared out.

        Args:
            factors: The curvature of the data.
            mean: The trained weights.
            prior: The prior's precision; see :class:`Prior`. Or a whole prior, which has its own mean.
            prior_mean: The mean of the prior: a number or tensors by name.
            scale: The factor of the curvature.
            damping: The way in which the prior is added: "exact", or for Kronecker factors "factored" (Ritter et al.
                2018, eq. 9) or "pi".
        """
        checks.choice("damping", damping, DAMPINGS)
        shapes = factors.shapes
        missing = [n for n in shapes if n not in mean]
        if missing:
            raise InputError(f"the mean has no value for {', '.join(missing)}, which the curvature covers")
        for name, shape in shapes.items():
            if tuple(mean[name].shape) != shape:
                raise ShapeError(
                    f"the mean of {name} has shape {tuple(mean[name].shape)}; the curvature is over shape {shape}"
                )
        mean = {n: mean[n].detach().clone() for n in shapes}
        layers = layers_of(factors)
        parsed = prior if isinstance(prior, Prior) else Prior.make(prior, prior_mean, layers, shapes)
        factor = check_scale(scale)
        if not any(damping in block.dampings for block in factors.blocks):
            raise InputError(
                f"damping={damping!r} is for Kronecker factors, and structure={factors.structure!r} has none: use damping='exact'"
            )
        matrices = [block.matrices_to_decompose(parsed) for block in factors.blocks]
        eigens = iter(eigendecompose([pair for pairs in matrices for pair in pairs]))
        blocks = tuple(
            block.posterior(
                parsed,
                factor,
                [next(eigens) for _ in pairs],
                damping=damping,
                dtype=mean[next(iter(block.shapes))].dtype,
                n_data=factors.n_data,
            )
            for block, pairs in zip(factors.blocks, matrices, strict=True)
        )
        return GaussianPosterior(mean, blocks, parsed, factor, layers, damping)

    def with_prior(
        self, precision: PriorSpec | None = None, *, scale: float | Tensor | None = None, prior: Prior | None = None
    ) -> GaussianPosterior:
        """Returns the same curvature under another prior or scale: no data pass, no new decomposition.

        (A full or low-rank block decomposes anew when the *shape* of the prior over its parameters changes.)
        """
        prior, factor = self._new_prior_and_scale(precision, scale, prior)
        blocks = tuple(b.with_prior(prior, factor) for b in self.blocks)
        return replace(self, blocks=blocks, prior=prior, scale=factor)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Params:
        count = checks.count("count", count)
        deviations: Params = {}
        for block in self.blocks:
            deviations.update(block.sample(count, generator))
        # A block's draws are its own to change, so there is no second copy of the samples.
        return {n: deviations[n].to(self.mean[n].dtype).add_(self.mean[n].detach()) for n in self.names}

    def log_prob(self, params: Params) -> Tensor:
        missing = [n for n in self.names if n not in params]
        if missing:
            raise InputError(f"log_prob needs every parameter of the posterior; missing are {', '.join(missing)}")
        difference = {n: params[n].to(torch.float64) - self.mean[n].to(torch.float64) for n in self.names}
        product = self.precision_mv(difference)
        name = self.names[0]
        lead = difference[name].dim() - self.mean[name].dim()
        energy = join_flat({n: difference[n] * product[n] for n in self.names}, self.names, lead).sum(-1)
        uncertain = sum(b.size for b in self.blocks)  # These are fewer than n_params where some entries are fixed.
        return 0.5 * (self.log_det_precision() - uncertain * math.log(2 * math.pi)) - 0.5 * energy

    def log_det_precision(self) -> Tensor:
        return torch.stack([b.log_det_precision().cpu() for b in self.blocks]).sum()

    @property
    def block_names(self) -> tuple[str, ...]:
        return tuple(b.source.name for b in self.blocks)

    @property
    def has_every_term(self) -> bool:
        return len(self.blocks) == 1 and self.blocks[0].source.is_complete

    def log_det_ratio(self) -> Tensor:
        return torch.stack([b.log_det_ratio().cpu() for b in self.blocks]).sum()

    def effective_parameters(self) -> dict[str, float]:
        if len(self.layers) == len(self.blocks):
            return {k: float(b.effective_parameters().detach()) for k, b in zip(self.layers, self.blocks, strict=True)}
        variance = self.marginal_variance()
        return {
            k: sum(float((1 - self.prior.precision[n].detach().to(v.device) * v).sum()) for n, v in parts.items())
            for k, parts in ((k, {n: variance[n] for n in names}) for k, names in self.layers.items())
        }

    def precision_mv(self, values: Params) -> Params:
        product: Params = {}
        for block in self.blocks:
            product.update(block.precision_mv({n: values[n] for n in block.names}))
        return {n: product[n] for n in self.names}

    def covariance_mv(self, values: Params) -> Params:
        product: Params = {}
        for block in self.blocks:
            product.update(block.covariance_mv({n: values[n] for n in block.names}))
        return {n: product[n] for n in self.names}

    def marginal_variance(self) -> Params:
        variance: Params = {}
        for block in self.blocks:
            variance.update(block.marginal_variance())
        return {n: variance[n] for n in self.names}

    def to_dense(self) -> Tensor:
        starts, total = {}, 0
        for name, value in self.mean.items():
            starts[name], total = total, total + value.numel()
        dense = torch.zeros(total, total, dtype=torch.float64)
        for block in self.blocks:
            place = torch.cat([torch.arange(self.mean[n].numel()) + starts[n] for n in block.names])
            dense[place[:, None], place] = block.to_dense().detach().cpu()
        return dense

    def functional_covariance(
        self, gradients: LayerGradients, variants: Sequence[Self] | None = None, *, diagonal: bool = False
    ) -> list[list[Tensor]]:
        posteriors = [self] if variants is None else list(variants)
        by_block = [
            block.functional_covariance(gradients, [p.blocks[i] for p in posteriors], diagonal)
            for i, block in enumerate(self.blocks)
        ]
        return [[parts[k] for parts in by_block] for k in range(len(posteriors))]

    def approximate_variance(self, gradients: LayerGradients) -> Tensor:
        return torch.stack([block.approximate_variance(gradients) for block in self.blocks]).sum(0)


@dataclass(frozen=True)
class Hyperparameters:
    """What a Laplace posterior depends on beside the curvature: none of it needs another pass over the data.

    The curvature is that of a likelihood with unit noise (`split_noise`), so the noise of a regression enters
    here, once, when the posterior is formed.

    Attributes:
        prior: The Gaussian prior over the weights.
        noise: σ, the standard deviation of a regression's noise in units of the likelihood that the curvature is of; a 0-d
            float64 tensor, whose gradient is kept, and 1 for likelihoods without noise.
        data_scale: How many data each datum stands for.
        temperature: What the log-likelihood is divided by.
        output_temperature: T, what the outputs are divided by in the predictive: p(y | f) = softmax(f/T) or sigmoid(f/T). The curvature
            is that at the temperature of the likelihood of the fit, where T starts. The network itself is the limit of a large
            data scale with T at its start, temperature scaling the same with another T.

    >>> prior = Prior.make(2.0, 0.0, {"fc": ["fc.weight"]}, {"fc.weight": (2, 3)})
    >>> Hyperparameters(prior, torch.tensor(0.5), data_scale=3.0).curvature_scale()
    tensor(12.)
    """

    prior: Prior
    noise: Tensor
    data_scale: float = 1.0
    temperature: float = 1.0
    output_temperature: float = 1.0

    @property
    def likelihood_weight(self) -> float:
        """What the log-likelihood is multiplied by: data_scale / temperature."""
        return self.data_scale / self.temperature

    def curvature_scale(self, curvature: str = "exact") -> Tensor:
        """Returns what the curvature at unit noise is multiplied by: the likelihood's weight times 1/σ².

        Args:
            curvature: The kind of curvature (`Factors.curvature`). An empirical Fisher matrix is a sum of squared gradients,
                each of which has a factor 1/σ², so it takes 1/σ⁴.
        """
        return self.likelihood_weight / self.noise ** noise_exponent(curvature)

    def applied_to(self, posterior: _Posterior, curvature: str) -> _Posterior:
        """Returns the posterior with the same curvature under these hyperparameters; no data pass and no decomposition."""
        return posterior.with_prior(prior=self.prior, scale=self.curvature_scale(curvature))

    def likelihood(self, base: Likelihood) -> Likelihood:
        """Returns the likelihood of the predictive: with this noise, and with this temperature of its outputs.

        Args:
            base: The likelihood that the curvature is of (`split_noise`).
        """
        return likelihood_with(base, self.noise, self.output_temperature)

    def narrowed(self, factor: float) -> Hyperparameters:
        """Returns the hyperparameters whose posterior has the covariance divided by ``factor``: precision and data scale grow by it."""
        precision = {n: factor * value for n, value in self.prior.precision.items()}
        return replace(self, prior=self.prior.with_precision(precision), data_scale=factor * self.data_scale)


def noise_exponent(curvature: str) -> int:
    """Returns the power of 1/σ that a kind of curvature grows with: 4 for the empirical Fisher matrix, 2 for all others."""
    return 4 if curvature == "empirical" else 2


def has_noise(likelihood: Likelihood) -> bool:
    """Tells whether a likelihood has a noise that can be tuned beside the network: a `Gaussian` does."""
    return isinstance(likelihood, Gaussian)


def split_noise(likelihood: Likelihood) -> tuple[Likelihood, Tensor]:
    """Takes the noise σ out of a Gaussian likelihood, so that it can be tuned without another pass over the data.

    Returns:
        The likelihood to compute curvature with, and σ (0-d, float64). One noise for all outputs leaves a noise of 1; a noise
        for each output stays, as the ratio between outputs, and σ = 1. Other likelihoods stay whole, with σ = 1.

    >>> split_noise(Gaussian(0.5))
    (Gaussian(noise=1.0), tensor(0.5000, dtype=torch.float64))
    """
    if isinstance(likelihood, Gaussian):
        noise = torch.as_tensor(likelihood.noise, dtype=torch.float64).detach()
        if noise.dim() == 0:
            return Gaussian(1.0), noise
    return likelihood, torch.ones((), dtype=torch.float64)


def with_noise(likelihood: Likelihood, noise: Tensor) -> Likelihood:
    """Returns the likelihood with its noise multiplied by σ: the inverse of `split_noise`.

    >>> with_noise(*split_noise(Gaussian(0.5)))
    Gaussian(noise=0.5)
    """
    return likelihood_with(likelihood, noise)


def likelihood_with(base: Likelihood, noise: Tensor, output_temperature: float | None = None) -> Likelihood:
    """Returns the likelihood of a predictive: a Gaussian with its noise multiplied by σ, logits at the temperature T; others as they are.

    Args:
        base: The likelihood that the curvature is of (`split_noise`).
        noise: The noise σ.
        output_temperature: T; None leaves logits at the temperature that they have.

    >>> likelihood_with(Categorical(), torch.tensor(1.0), 2.0).temperature
    2.0
    """
    if isinstance(base, Gaussian):
        scaled = torch.as_tensor(base.noise, dtype=torch.float64) * noise.detach()
        return Gaussian(float(scaled) if scaled.dim() == 0 else scaled)
    if output_temperature is None or not isinstance(base, Categorical | Bernoulli):
        return base
    return base if base.temperature == output_temperature else replace(base, temperature=output_temperature)
