"""Preconditioned conjugate gradients for many right-hand sides, with a residual report."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.errors import NumericalError, ShapeError
from aftermap.krylov.lanczos import Matvec

__all__ = ["CGResult", "conjugate_gradient"]


@dataclass(frozen=True)
class CGResult:
    """A solution of A x = b.

    Attributes:
        solution: like the right-hand side.
        residual: true relative residuals ||b - A x|| / ||b||, one per column ([] or [k]).
        iterations: the number of products, the check at the end not counted.
        converged: every residual is at most the tolerance (or the rounding level).
    """

    solution: Tensor
    residual: Tensor
    iterations: int
    converged: bool


def conjugate_gradient(
    matvec: Matvec,
    rhs: Tensor,
    *,
    preconditioner: Matvec | None = None,
    tolerance: float = 1e-8,
    max_iterations: int | None = None,
) -> CGResult:
    """Solve A x = b by preconditioned conjugate gradients, all columns at once.

    Args:
        matvec: like b -> like b; A symmetric positive definite.
        rhs: b, [P] or [P, k].
        preconditioner: an approximation of A^-1, symmetric positive definite; None means the identity.
        tolerance: on ||b - A x|| / ||b||.
        max_iterations: None means 10 * P.

    Returns:
        A `CGResult` with the true residual (computed anew, not the recursive one). It is not an error when
        the tolerance is not reached: look at `converged`.

    Raises:
        NumericalError: A is not positive definite, or a product is not finite.

    >>> A = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    >>> conjugate_gradient(lambda v: A @ v, A @ torch.ones(2, dtype=torch.float64)).solution
    tensor([1., 1.], dtype=torch.float64)
    """
    if rhs.dim() not in (1, 2):
        raise ShapeError(f"got a right-hand side of shape {tuple(rhs.shape)}; pass [P] or [P, k]")
    limit = 10 * rhs.shape[0] if max_iterations is None else max_iterations
    apply = preconditioner if preconditioner is not None else torch.clone
    goal = tolerance * rhs.norm(dim=0)
    x, r = torch.zeros_like(rhs), rhs.clone()
    z = apply(r)
    p, rz, iterations = z.clone(), (r * z).sum(0), 0
    while iterations < limit and bool((r.norm(dim=0) > goal).any()):
        active = r.norm(dim=0) > goal
        Ap = matvec(p)
        curvature = (p * Ap).sum(0)
        if not bool(torch.isfinite(curvature).all()) or bool((curvature[active] <= 0).any()):
            raise NumericalError(
                f"p^T A p = {float(curvature[active].min()):.3g} in iteration {iterations}; A must be "
                "positive definite: add a prior precision, or use the GGN instead of the Hessian"
            )
        # Finished columns stand still: their steps would divide rounding by rounding.
        alpha = torch.where(active, rz / torch.where(active, curvature, 1.0), 0.0)
        x, r = x + alpha * p, r - alpha * Ap
        z = apply(r)
        rz_new = (r * z).sum(0)
        beta = torch.where(active, rz_new / torch.where(rz == 0, 1.0, rz), 0.0)
        p, rz, iterations = z + beta * p, rz_new, iterations + 1
    norm = rhs.norm(dim=0)
    residual = (rhs - matvec(x)).norm(dim=0) / torch.where(norm == 0, 1.0, norm)
    allowed = max(2 * tolerance, 100 * torch.finfo(rhs.dtype).eps)  # the recursive residual drifts a little
    return CGResult(x, residual, iterations, bool((residual <= allowed).all()))
