"""Products with a posterior precision s·G + P₀ and solves with it, on rows of flat vectors.

A `Preconditioner` is a Gaussian with a cheap inverse, close to the posterior. Log determinants come from stochastic Lanczos
quadrature relative to it:

log |A| = log |M| + tr log(M^{-½} A M^{-½}), and the trace is small and cheap to estimate where M is close to A.
All probes advance together, so one step is one pass over the data, and only the last vectors are kept.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aftermap.curvature.passes.products import GGNOperator
from aftermap.curvature.structures.base import join_flat, split_flat
from aftermap.draws import normal_like
from aftermap.errors import InputError, NumericalError, NumericalWarning
from aftermap.krylov import TraceEstimate, conjugate_gradient
from aftermap.params import Params
from aftermap.posteriors.base import GaussianPosterior
from aftermap.prior import Prior

__all__ = ["SOLVE_NUMBERS", "LinearSystem", "Preconditioner", "SolveReport", "log_det_quadrature", "symmetric_product"]

SOLVE_NUMBERS = 1 << 24  # One array of right-hand sides has this many numbers (128 MB); a solve holds about six.
_SETTLED = 0.01  # A change of the estimate below this, in standard errors, is not worth another pass.


@dataclass(frozen=True)
class Preconditioner:
    """A matrix M: the precision of a posterior with Kronecker, diagonal or low-rank blocks, or without one the prior's P₀.

    Kronecker factors help where data are many and layers badly scaled. With fewer data than parameters P is the prior plus
    a low rank, and a low-rank posterior is much the better choice; even P₀ alone may beat Kronecker factors there.
    Rows are vectors [k, P] in float64, in the order of ``shapes``.

    Attributes:
        posterior: The posterior that gives M. With None, M = P₀.
        shapes: The shapes of the parameters, in order.
        prior: The prior's precisions P₀ [P].
    """

    posterior: GaussianPosterior | None
    shapes: Mapping[str, tuple[int, ...]]
    prior: Tensor

    @staticmethod
    def make(
        posterior: GaussianPosterior | None,
        prior: Prior,
        scale: Tensor,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
    ) -> Preconditioner:
        """Brings a posterior of the same parameters to the prior and scale that are wanted.

        A Kronecker block carries one prior precision; where the prior has several, it gets their geometric mean:
        M need not be exact.

        Raises:
            InputError: The posterior is over other parameters.
        """
        if posterior is not None and posterior.shapes != dict(shapes):
            other = sorted(set(posterior.shapes.items()) ^ set(shapes.items()))
            raise InputError(
                f"the preconditioner is a posterior over other parameters; they differ in {[n for n, _ in other[:6]]}. "
                "Fit it with the same params= as the products"
            )
        vector = prior.vector(tuple(shapes), device).detach()
        if posterior is None:
            return Preconditioner(None, dict(shapes), vector)
        prior = prior.with_precision({n: prior.precision[n].detach() for n in shapes})
        precision = dict(prior.precision)
        for block in posterior.blocks:
            if block.source.one_precision and not prior.is_scalar(block.names):
                mean = prior.vector(block.names).log().mean().exp()
                precision.update(dict.fromkeys(block.names, mean))
        adapted = posterior.with_prior(prior=prior.with_precision(precision), scale=scale.detach())
        return Preconditioner(adapted, dict(shapes), vector)

    def safe_for(self, dtype: torch.dtype) -> Preconditioner:
        """Returns a preconditioner whose inverse times P has no eigenvalue that products in ``dtype`` cannot resolve.

        A Kronecker block may overstate the curvature of a direction by many orders; its tiny eigenvalues then drown in the
        rounding of a single-precision network. A low-rank block, or the prior alone, never does.
        """
        blocks = () if self.posterior is None else self.posterior.blocks
        if dtype == torch.float64 or all(b.source.never_overstates for b in blocks):
            return self
        return Preconditioner(None, self.shapes, self.prior)

    def solve(self, rows: Tensor) -> Tensor:
        """Returns M⁻¹ v for each row [k, P]."""
        if self.posterior is None:
            return rows / self.prior
        return join_flat(self.posterior.covariance_mv(split_flat(rows, dict(self.shapes))), list(self.shapes), 1)

    def multiply(self, rows: Tensor) -> Tensor:
        """Returns M v for each row [k, P]."""
        if self.posterior is None:
            return rows * self.prior
        return join_flat(self.posterior.precision_mv(split_flat(rows, dict(self.shapes))), list(self.shapes), 1)

    def marginal_variance(self) -> Tensor:
        """Returns the diagonal of M⁻¹ [P]."""
        if self.posterior is None:
            return 1 / self.prior
        return join_flat(self.posterior.marginal_variance(), list(self.shapes), 0).to(torch.float64)

    def log_det(self) -> float:
        """Returns the log-determinant log |M| of the preconditioner."""
        return float(self.prior.log().sum() if self.posterior is None else self.posterior.log_det_precision())

    def draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Draws rows [count, P] from N(0, M⁻¹)."""
        if self.posterior is None:
            like = self.prior.expand(count, -1)
            return normal_like(like, generator) / self.prior.sqrt()
        draws = {}
        # These are deviations of the blocks, not samples minus the mean, which would cancel in single precision.
        for block in self.posterior.blocks:
            draws.update(block.sample(count, generator))
        return join_flat(draws, list(self.shapes), 1).to(torch.float64)


@dataclass(frozen=True)
class SolveReport:
    """A report of what a solve reached.

    Attributes:
        iterations: The number of passes over the data, of the slowest chunk.
        residual: The relative residuals ‖b − Px‖ / ‖b‖, computed anew, one per right-hand side.
        converged: Whether every residual is at most the tolerance, or what the rounding of the network's products
            allows.
    """

    iterations: int
    residual: Tensor
    converged: bool


@dataclass(frozen=True, eq=False)
class LinearSystem:
    """The precision P = s·G + P₀ as a function of rows [k, P] in float64.

    Attributes:
        operator: The products with G.
        weights: The weights at which G must be taken, so that a model that was trained on is noticed.
        prior: The prior's precisions P₀ [P], without gradient.
        scale: The factor s of the curvature, 0-d, without gradient.
        preconditioner: The preconditioner M, close to P.
        tolerance: The tolerance of a solve. None means 1e-8 for a float64 network, 1e-4 for others.
        max_iterations: The greatest number of iterations of a solve.
    """

    operator: GGNOperator
    weights: Params
    prior: Tensor
    scale: Tensor
    preconditioner: Preconditioner
    tolerance: float | None
    max_iterations: int

    def curvature(self, rows: Tensor) -> Tensor:
        """Returns s·G v for each row, by one pass over the data.

        Raises:
            InputError: The model has other weights by now.
        """
        changed = [n for n, p in self.operator.params.items() if not torch.equal(p, self.weights[n])]
        if changed:
            raise InputError(
                f"the model's weights have changed since the posterior was made ({', '.join(changed[:5])}), and products are "
                "taken at the weights; restore them, or fit again"
            )
        return self.scale * self.operator.mv(rows.T.contiguous()).T

    def precision(self, rows: Tensor) -> Tensor:
        """Returns P v for each row."""
        return self.curvature(rows) + rows * self.prior

    def solve(self, rows: Tensor) -> tuple[Tensor, SolveReport]:
        """Returns P⁻¹ v for each row by preconditioned conjugate gradients, all rows in the same passes over the data.

        Warns:
            NumericalWarning: The tolerance was not reached.
        """
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = 1e-8 if self.operator.dtype == torch.float64 else 1e-4
        solutions, residuals, iterations, converged = [], [], 0, True
        for part in rows.detach().to(torch.float64).split(max(1, SOLVE_NUMBERS // self.operator.size)):
            gains = [torch.zeros((), dtype=torch.float64, device=part.device)]

            def product(v: Tensor, gains: list[Tensor] = gains) -> Tensor:
                product_with_v = self.precision(v.T).T
                gains.append((product_with_v.norm(dim=0) / v.norm(dim=0).clamp_min(1e-300)).max())
                return product_with_v

            result = conjugate_gradient(
                product,
                part.T.contiguous(),
                preconditioner=lambda v: self.preconditioner.solve(v.T).T,
                tolerance=tolerance,
                max_iterations=self.max_iterations,
            )
            solutions.append(result.solution.T)
            residuals.append(result.residual)
            # This is a backward error: no residual can be below the rounding of ‖P‖‖x‖, large for a single-precision
            # network.
            ratio = result.solution.norm(dim=0) / part.norm(dim=1).clamp_min(1e-300)
            floor = 10 * torch.finfo(self.operator.dtype).eps * torch.stack(gains).max() * ratio
            iterations = max(iterations, result.iterations)
            converged = converged and bool((result.residual <= floor.clamp_min(2 * tolerance)).all())
        report = SolveReport(iterations, torch.cat(residuals), converged)
        if not converged:
            warnings.warn(
                f"conjugate gradients stopped after {iterations} iterations with a relative residual of up to "
                f"{float(report.residual.max()):.2g} (wanted {tolerance:.2g}). Raise max_iterations or the tolerance, "
                "give a Kronecker preconditioner, or raise the prior precision",
                NumericalWarning,
                stacklevel=3,
            )
        return torch.cat(solutions), report


class _Symmetric(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        return function(rows.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.function(grad), None


def symmetric_product(rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns a product with a symmetric matrix that autograd cannot look into; its derivative is the same product.

    >>> x = torch.ones(2, requires_grad=True)
    >>> symmetric_product(x, lambda v: 3 * v).sum().backward()
    >>> x.grad
    tensor([3., 3.])
    """
    product: Tensor = _Symmetric.apply(rows, function)
    return product


def log_det_quadrature(
    product: Callable[[Tensor], Tensor],
    preconditioner: Preconditioner,
    *,
    probes: int = 16,
    steps: int = 50,
    generator: torch.Generator | None = None,
) -> TraceEstimate:
    r"""Estimates log |A| from products with A.

    With u uniform on the sphere, Lanczos on M^{-½} A M^{-½} gives Ritz values θ and weights τ², and

    .. math::
        \log|A| = \log|M| + P\,\mathbb E_u\Big[\sum_i \tau_i^2 \log\theta_i\Big]

    The recursion runs on q = M^{-½}u, which needs products with A and M⁻¹ only; its first vectors are draws from
    N(0, M⁻¹). It is not reorthogonalised: that costs Ritz values copies, which share their weight.

    Args:
        product: A function from rows [k, P] to A v for each row, with A symmetric positive definite.
        preconditioner: The preconditioner M.
        probes: The number of vectors u.
        steps: The greatest number of products; fewer when the estimate has settled.
        generator: The source of the random probes.

    Returns:
        The estimate and its standard error over probes (NaN for one probe).

    Raises:
        InputError: There is less than one probe or step.
        NumericalError: The matrix A is not positive definite.

    >>> prior = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    >>> M = Preconditioner(None, {"w": (3,)}, prior)
    >>> estimate = log_det_quadrature(lambda rows: 2 * rows * prior, M, probes=2)
    >>> round(estimate.value, 6), round(math.log(48), 6)
    (3.871201, 3.871201)

    References:
        Ubaru, Chen and Saad 2017, algorithm 1; Gardner et al. 2018, section 4 (the preconditioned trace).
    """
    if probes < 1 or steps < 1:
        raise InputError(f"got probes={probes} and steps={steps}; both must be at least 1")
    q = preconditioner.draw(probes, generator)  # [k, P]
    p = preconditioner.multiply(q)
    norm = (q * p).sum(1, keepdim=True).sqrt()
    q, p = q / norm, p / norm
    size = q.shape[1]
    diagonal: list[Tensor] = []
    off_diagonal: list[Tensor] = []
    before, beta = torch.zeros_like(p), torch.zeros_like(norm)
    alive = torch.ones_like(norm, dtype=torch.bool)
    base, last, largest = preconditioner.log_det(), math.inf, 0.0
    values = norm.new_zeros(probes)
    for step in range(min(steps, size)):
        r = product(q)
        alpha = (q * r).sum(1, keepdim=True)
        if not bool(torch.isfinite(alpha).all()) or bool((alpha[alive] <= 0).any()):
            raise NumericalError(
                f"vᵀ A v = {float(alpha[alive].min()):.3g} in step {step}; a log determinant needs a positive definite matrix: "
                "add a prior precision, and check that the model's outputs are finite"
            )
        # A probe whose space is exhausted goes on with an identity that it does not touch.
        diagonal.append(torch.where(alive, alpha, 1.0)[:, 0])
        values = size * _quadrature(diagonal, off_diagonal)
        error = float(values.std() / math.sqrt(probes)) if probes > 1 else 0.0
        change = abs(float(values.mean()) - last)
        if step > 1 and change <= max(_SETTLED * error, 1e-12 * abs(base)):
            break
        last = float(values.mean())
        r = r - alpha * p - beta * before
        y = preconditioner.solve(r)
        square = (r * y).sum(1, keepdim=True)
        largest = max(largest, float(alpha.max()))
        alive = alive & (square > (1e-10 * largest) ** 2)
        if not bool(alive.any()):
            break
        beta = torch.where(alive, square.clamp_min(0.0).sqrt(), 0.0)
        off_diagonal.append(beta[:, 0])
        divisor = torch.where(alive, beta, 1.0)
        before, p, q = p, torch.where(alive, r / divisor, 0.0), torch.where(alive, y / divisor, 0.0)
    error = float(values.std() / math.sqrt(probes)) if probes > 1 else math.nan
    return TraceEstimate(base + float(values.mean()), error)


def _quadrature(diagonal: list[Tensor], off_diagonal: list[Tensor]) -> Tensor:
    """Returns Σ τ² log θ of each probe's tridiagonal matrix: [k]."""
    T = torch.diag_embed(torch.stack(diagonal, dim=1))
    if off_diagonal:
        side = torch.stack(off_diagonal, dim=1)
        T = T + torch.diag_embed(side, 1) + torch.diag_embed(side, -1)
    theta, vectors = torch.linalg.eigh(T)
    if bool((theta <= 0).any()):
        raise NumericalError(
            f"a Ritz value is {float(theta.min()):.3g}; a log determinant needs a positive definite matrix: "
            "add a prior precision, or compute in float64"
        )
    return (vectors[:, 0].square() * theta.log()).sum(1)
