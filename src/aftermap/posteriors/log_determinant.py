"""Log determinants from products: stochastic Lanczos quadrature relative to a preconditioner.

log |A| = log |M| + tr log(M^{-½} A M^{-½}), and the trace is small and cheap to estimate where M is close to A.
All probes advance together, so one step is one pass over the data, and only the last vectors are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from aftermap.errors import InputError, NumericalError
from aftermap.krylov import TraceEstimate
from aftermap.posteriors.preconditioner import Preconditioner

__all__ = ["log_det_quadrature"]

_SETTLED = 0.01  # a change of the estimate, in standard errors, that is not worth another pass


def log_det_quadrature(
    product: Callable[[Tensor], Tensor],
    preconditioner: Preconditioner,
    *,
    probes: int = 16,
    steps: int = 50,
    generator: torch.Generator | None = None,
) -> TraceEstimate:
    r"""log |A| from products with A.

    With u uniform on the sphere, Lanczos on M^{-½} A M^{-½} gives Ritz values θ and weights τ², and

    .. math::
        \log|A| = \log|M| + P\,\mathbb E_u\Big[\sum_i \tau_i^2 \log\theta_i\Big]

    The recursion runs on q = M^{-½}u, which needs products with A and M⁻¹ only; its first vectors are draws from
    N(0, M⁻¹). It is not reorthogonalised: that costs Ritz values copies, which share their weight.

    Args:
        product: rows [k, P] -> A v for each; A symmetric positive definite.
        preconditioner: M.
        probes: number of vectors u.
        steps: the most products; fewer when the estimate has settled.
        generator: for the probes.

    Returns:
        The estimate and its standard error over probes (NaN for one probe).

    Raises:
        InputError: fewer than one probe or step.
        NumericalError: A is not positive definite.

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
    """Σ τ² log θ of each probe's tridiagonal matrix: [k]."""
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
