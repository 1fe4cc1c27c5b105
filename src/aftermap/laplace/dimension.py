r"""The effective dimension of the full Gauss-Newton posterior, and block-diagonal posteriors brought to it.

For the exact Gaussian posterior N(θ*, (sG + P₀)⁻¹) the variance of the outputs on the training data, weighted by the
curvature of the loss, is the number of parameters that the data determine:

.. math::
    \sum_n \mathrm{tr}(s\Lambda_n V_n) = \mathrm{tr}(s G \Sigma) = \gamma

A block-diagonal posterior forgets the terms between layers and, with Kronecker factors, much within them; its left side comes
out too large, on networks with normalisation by a factor of ten to a hundred. Both sides are estimated here from products with
the data, without labels, and the covariance is divided by their ratio.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.batches import Batch
from aftermap.curvature.passes.products import GGNOperator
from aftermap.curvature.structures.base import join_flat
from aftermap.distributed import broadcast_number, fail_together, rank, world_size
from aftermap.errors import DataError, InputError, NumericalError
from aftermap.krylov import TraceEstimate
from aftermap.laplace.examples import informative_examples
from aftermap.likelihoods import Likelihood
from aftermap.posteriors import CurvaturePosterior, GaussianPosterior
from aftermap.posteriors.matrix_free import common_seed, mean_estimate

__all__ = [
    "DimensionResult",
    "block_dimension",
    "draws_for",
    "effective_dimension",
    "is_normalised",
    "match_dimension",
]

_SETTLED = 4.0  # ratio of the bounds of γ at which more passes are not worth their price
_FEW_DRAWS = 2  # of γ; where it is small, as many as bring its relative standard deviation to ...
_RELATIVE_ERROR = 0.1
_MOST_DRAWS = 32
_NORMALISING = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


@dataclass(frozen=True)
class DimensionResult:
    """What matching the effective dimension gave.

    Attributes:
        gamma: The effective dimension γ of the full Gauss-Newton posterior, with its standard error over draws.
        bounds: The lower and the upper bound of the quadrature for these draws.
        before: Σ tr(sΛ_n V_n) of the block-diagonal posterior before matching, with its standard error.
        factor: The ratio before / γ, which the covariance is divided by.
        data_scale: The data scale afterwards.
        precision: The prior precision of each layer afterwards.
        n_examples: How many data the estimates use.
        steps: The number of passes over these data for γ.
    """

    gamma: TraceEstimate
    bounds: tuple[float, float]
    before: TraceEstimate
    factor: float
    data_scale: float
    precision: Mapping[str, float]
    n_examples: int
    steps: int

    def __str__(self) -> str:
        change = f"{self.factor:.3g} times smaller" if self.factor >= 1 else f"{1 / self.factor:.3g} times larger"
        return (
            f"the data determine {self.gamma.value:.3g} ± {self.gamma.standard_error:.2g} parameters, where the posterior counted "
            f"{self.before.value:.3g} ± {self.before.standard_error:.2g}: its covariance is made {change}"
        )


def is_normalised(model: nn.Module) -> bool:
    """Tells whether a network has normalisation layers, for which the evidence of a block-diagonal posterior misleads.

    >>> is_normalised(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))), is_normalised(nn.Linear(2, 3))
    (True, False)
    """
    return any(isinstance(m, _NORMALISING) for m in model.modules())


def effective_dimension(
    operator: GGNOperator,
    prior: Tensor,
    scale: float = 1.0,
    *,
    draws: int = 2,
    steps: int = 25,
    settled: float = _SETTLED,
    generator: torch.Generator | None = None,
) -> tuple[TraceEstimate, tuple[float, float], int]:
    r"""Estimates γ = tr(sG(sG + P₀)⁻¹) of the full Gauss-Newton matrix from a few draws and passes.

    With g ~ N(0, sG) (no labels: ΣJᵀSε), γ = E[gᵀ(sG + P₀)⁻¹g], the same as E[wᵀ sG w] over posterior samples w but with
    one solve less to converge. Lanczos on A = P₀^{-½} sG P₀^{-½} from u = P₀^{-½}g gives Gauss and Gauss-Radau quadratures of
    uᵀ(A + I)⁻¹u, a lower and an upper bound; the passes end when they meet. One draw has a relative standard
    deviation of at most √(2/γ).

    Args:
        operator: The Gauss-Newton matrix G, known by its products with vectors.
        prior: The precision P₀ of the prior for each parameter [P].
        scale: The factor s of the curvature.
        draws: The number of draws of g. All of them go through the same passes.
        steps: The largest number of passes over the data.
        settled: The ratio of the upper to the lower bound at which the passes end.
        generator: The source of the draws.

    Returns:
        The estimate (the harmonic mean of the bounds), the bounds, and how many passes were made.

    Raises:
        InputError: Fewer than one draw or one step is asked for.
        NumericalError: A product with G is not finite.

    >>> net = nn.Linear(1, 1, bias=False).double()
    >>> from aftermap.likelihoods import Gaussian
    >>> data = [(torch.ones(3, 1, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64))]
    >>> operator = GGNOperator(net, data, Gaussian(1.0))
    >>> found = effective_dimension(operator, torch.ones(1, dtype=torch.float64), draws=4000)[0]
    >>> abs(found.value - 0.75) < 4 * found.standard_error
    True

    References:
        Golub and Meurant 2010, Matrices, moments and quadrature, chapter 6; Antorán et al. 2023, eq. (8).
    """
    draws, steps = checks.count("draws", draws), checks.count("steps", steps)
    root = prior.detach().to(device=operator.device, dtype=torch.float64).sqrt()[:, None]
    u = math.sqrt(scale) * operator.noise(draws, generator) / root
    size = u.norm(dim=0)
    q, before, beta = u / size.clamp_min(1e-300), torch.zeros_like(u), torch.zeros_like(size)
    diagonal: list[Tensor] = []
    off_diagonal: list[Tensor] = []
    lower = upper = torch.zeros_like(size)
    largest = 0.0
    for _ in range(min(steps, operator.size)):
        r = scale * operator.mv(q / root) / root
        alpha = (q * r).sum(0)
        if not bool(torch.isfinite(alpha).all()):
            raise NumericalError(
                "a product with the curvature is not finite; check that the model's outputs are finite"
            )
        diagonal.append(alpha.clamp_min(0.0))
        largest = max(largest, float(alpha.max()))
        r = r - alpha * q - beta * before
        beta = r.norm(dim=0)
        lower, upper = _bounds(diagonal, off_diagonal, beta, size.square())
        # What is left of an exhausted space is rounding.
        if float(upper.sum()) <= settled * float(lower.sum()) or float(beta.max()) <= 1e-10 * largest:
            break
        off_diagonal.append(beta)
        before, q = q, r / beta.clamp_min(1e-300)
    # The middle of 1/γ between its bounds, which need not have met.
    estimate = mean_estimate((2 / (1 / lower.clamp_min(1e-300) + 1 / upper.clamp_min(1e-300))).cpu())
    return estimate, (float(lower.mean()), float(upper.mean())), len(diagonal)


def _bounds(diagonal: list[Tensor], off_diagonal: list[Tensor], beta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the Gauss and Gauss-Radau (node at 0) values of uᵀ(A + I)⁻¹u: [k] each."""
    T = torch.diag_embed(torch.stack(diagonal, 1))
    if off_diagonal:
        side = torch.stack(off_diagonal, 1)
        T = T + torch.diag_embed(side, 1) + torch.diag_embed(side, -1)
    eye = torch.eye(T.shape[-1], dtype=T.dtype, device=T.device)
    lower = weight * torch.linalg.solve(T + eye, eye[:, :1])[:, 0, 0]
    # The last entry that makes 0 an eigenvalue: β² eᵀT⁻¹e.
    tiny = 1e-12 * T.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None] + 1e-300
    last = beta.square() * torch.linalg.solve(T + tiny * eye, eye[:, -1:])[:, -1, 0].clamp_min(0.0)
    grown = nn.functional.pad(T, (0, 1, 0, 1))
    grown[:, -1, -1], grown[:, -1, -2], grown[:, -2, -1] = last, beta, beta
    wide = torch.eye(T.shape[-1] + 1, dtype=T.dtype, device=T.device)
    upper = weight * torch.linalg.solve(grown + wide, wide[:, :1])[:, 0, 0]
    return lower, torch.maximum(lower, torch.minimum(upper, weight))


def draws_for(gamma: float) -> int:
    """Returns how many draws an effective dimension γ needs: one has a relative variance of at most 2/γ.

    >>> draws_for(1000.0), draws_for(20.0), draws_for(1.0)
    (2, 10, 32)
    """
    return max(_FEW_DRAWS, min(_MOST_DRAWS, math.ceil(2 / (max(gamma, 1e-300) * _RELATIVE_ERROR**2))))


def block_dimension(
    operator: GGNOperator, posterior: GaussianPosterior, draws: int = 8, generator: torch.Generator | None = None
) -> TraceEstimate:
    """Estimates Σ tr(sΛ_n V_n) = tr(sG Σ) of a posterior with blocks, from draws w of it: the mean of wᵀ sG w, one pass.

    Args:
        operator: The Gauss-Newton matrix G, known by its products with vectors.
        posterior: The posterior whose covariance is Σ and whose curvature has the factor s.
        draws: The number of draws of w.
        generator: The source of the draws.
    """
    deviations = {}
    for block in posterior.blocks:
        deviations.update(block.sample(draws, generator))
    rows = join_flat(deviations, operator.names, 1).to(device=operator.device, dtype=torch.float64)
    products = float(posterior.scale.detach()) * operator.mv(rows.T.contiguous()).T
    return mean_estimate((rows * products).sum(1).cpu())


def match_dimension(
    model: nn.Module,
    batches: Iterable[Batch],
    likelihood: Likelihood,
    posterior: CurvaturePosterior,
    data_scale: float = 1.0,
    *,
    examples: int = 300,
    draws: int | None = None,
    steps: int = 25,
    generator: torch.Generator | None = None,
) -> DimensionResult:
    """Finds how much narrower a posterior with blocks must be for Σ tr(sΛ_n V_n) to be the full posterior's γ under the same prior.

    Dividing the covariance by a factor multiplies data scale and prior precision by it. γ is that of the data of the
    posterior, times their scale: with a posterior from a part of the training data and a scale of 1 the result is as wide as
    if the network had seen no more than this part. In a process group each process takes its share of ``examples`` from its data.

    Args:
        model: The network that the posterior is of.
        batches: The training data. Their labels have no influence (but for class weights and ignored targets).
        likelihood: The likelihood that the curvature is of, with unit noise.
        posterior: The posterior to be matched, with the prior that was found before.
        data_scale: How many data each datum of the posterior's fit stands for.
        examples: The number of data to estimate with; `informative_examples` chooses them.
        draws: The number of draws that γ is estimated from. None takes two, and more, up to 32, where they show that γ is small: few
            determined parameters vary more from draw to draw.
        steps: The largest number of passes over these data for γ.
        generator: The source of the draws.

    Raises:
        InputError: The posterior has no blocks, or a number is not positive.
        DataError: The data determine nothing under this prior.
    """
    if not isinstance(posterior, GaussianPosterior):
        raise InputError(
            f"the dimension is matched for posteriors with blocks, got a {type(posterior).__name__}, which has every term already"
        )
    examples = checks.count("examples", examples)
    seed = common_seed(generator)
    # Processes have other data, so other numbers for these; the draws of the blocks are the same everywhere.
    own_generator = torch.Generator().manual_seed(seed + 1 + rank())
    with fail_together("choosing informative examples"):
        chosen = informative_examples(model, batches, likelihood, math.ceil(examples / world_size()), own_generator)
    data = [(b.inputs, b.targets, b.weight) for b in chosen]
    operator = GGNOperator(model, data, likelihood, list(posterior.names))
    scale = float(posterior.scale.detach())
    prior = posterior.prior.vector(posterior.names)

    def estimate(count: int) -> tuple[TraceEstimate, tuple[float, float], int]:
        return effective_dimension(operator, prior, scale, draws=count, steps=steps, generator=own_generator)

    gamma, bounds, passes = estimate(_FEW_DRAWS if draws is None else draws)
    if draws is None and gamma.value > 0:
        needed = broadcast_number(draws_for(gamma.value))  # All processes make the same number of draws.
        if needed > _FEW_DRAWS:
            gamma, bounds, passes = estimate(needed)
    before = block_dimension(operator, posterior, generator=torch.Generator().manual_seed(seed))
    if not gamma.value > 0 or not math.isfinite(before.value):
        raise DataError(
            f"the effective dimension came out as {gamma.value:g} (blocks: {before.value:g}): under this prior the data determine "
            "nothing. Lower the prior precision, or use validation data: tune(val_loader)"
        )
    factor = before.value / gamma.value
    precision = {
        k: factor * float(posterior.prior.vector(names).detach().log().mean().exp())
        for k, names in posterior.layers.items()
    }
    return DimensionResult(gamma, bounds, before, factor, factor * data_scale, precision, operator.n_data, passes)
