"""Leading eigenpairs of a positive semi-definite matrix from products with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.errors import InputError, NumericalError
from aftermap.krylov.lanczos import KrylovSpace, Matvec, gaussian

__all__ = ["Eigenpairs", "lanczos_eigh", "randomised_eigh"]

_CHECK_EVERY = 4  # Lanczos steps between two looks at the Ritz values
_LEAST_STEPS = 12  # before a round may conclude that nothing large is left


@dataclass(frozen=True)
class Eigenpairs:
    """Leading eigenpairs, largest first.

    Attributes:
        vectors: [P, k], orthonormal.
        values: [k], descending.
        residuals: [k], bounds on ||A u - l u||.
        matvecs: the number of products that were used.
        converged: all residuals are below the tolerance.
    """

    vectors: Tensor
    values: Tensor
    residuals: Tensor
    matvecs: int
    converged: bool


def lanczos_eigh(
    matvec: Matvec,
    size: int,
    rank: int,
    *,
    tolerance: float = 1e-8,
    max_matvecs: int | None = None,
    noise: float = 1e-13,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Eigenpairs:
    """Leading eigenpairs of a positive semi-definite matrix by Lanczos in deflated rounds.

    One Krylov space holds a single vector of a repeated eigenvalue. So after a round the found vectors are
    locked and a new round starts in their complement, until a round finds nothing larger than what is locked.

    Args:
        matvec: v [P] -> A v [P].
        size: P.
        rank: the number of eigenpairs wanted.
        tolerance: on residuals, relative to the largest eigenvalue.
        max_matvecs: a budget; None means 20 * rank + 200.
        noise: relative rounding of `matvec`; eigenvalues below it (relative to the largest) are not returned.
        generator: for the random starts.
        dtype: of the arithmetic in here.
        device: of the vectors.

    Returns:
        At most `rank` eigenpairs; fewer when the matrix has a smaller rank.

    >>> A = torch.diag(torch.tensor([2.0, 2.0, 1.0, 0.0], dtype=torch.float64))
    >>> lanczos_eigh(lambda v: A @ v, 4, 3, generator=torch.Generator().manual_seed(0)).values.round(decimals=6)
    tensor([2., 2., 1.], dtype=torch.float64)
    """
    _check_rank(rank, size)
    budget = 20 * rank + 200 if max_matvecs is None else max_matvecs
    if budget < 1:
        raise InputError(f"got max_matvecs={max_matvecs}; pass at least 1")
    U = torch.zeros(size, 0, dtype=dtype, device=device)
    values, residuals = U.new_zeros(0), U.new_zeros(0)
    scale, used, finished = 0.0, 0, False
    while U.shape[1] < size and used < budget and not finished:
        threshold = float(values[rank - 1]) if len(values) >= rank else 0.0
        state = KrylovSpace(matvec, gaussian((size,), U, generator), U, noise, scale)
        theta, vectors, residual = _grow(state, rank, budget - used, threshold, tolerance)
        used, scale = used + len(state.columns), state.scale
        # A copy of the k-th eigenvalue itself may be exchanged for it freely, hence the margin.
        keep = theta > max(threshold * (1 + 10 * tolerance), noise * scale)
        finished = not bool(keep.any())
        U = torch.cat([U, state.result().basis @ vectors[:, keep]], dim=1)
        values, residuals = torch.cat([values, theta[keep]]), torch.cat([residuals, residual[keep]])
        order = values.argsort(descending=True)
        U, values, residuals = U[:, order], values[order], residuals[order]
    converged = (finished or U.shape[1] == size) and bool((residuals[:rank] <= tolerance * scale).all())
    return Eigenpairs(U[:, :rank], values[:rank], residuals[:rank], used, converged)


def _grow(
    state: KrylovSpace, rank: int, budget: int, threshold: float, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Grow a Krylov space until the Ritz values above `threshold` have converged; the leading `rank`."""
    while not state.exhausted and len(state.columns) < budget:
        state.step()
        m = len(state.columns)
        if m % _CHECK_EVERY == 0 and m >= _LEAST_STEPS:
            theta, _, residual = _ritz(state, rank)
            relevant = theta + residual > threshold
            enough = m >= rank or threshold > 0
            if enough and bool((residual[relevant] <= 0.1 * tolerance * state.scale).all()):
                break
    return _ritz(state, rank)


def _ritz(state: KrylovSpace, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The leading Ritz values, their coordinates in the basis and their residual norms."""
    if not state.columns:
        empty = state.next.new_zeros(0)
        return empty, state.next.new_zeros(0, 0), empty
    result = state.result()
    theta, S = result.eigh()
    theta, S = theta.flip(0)[:rank], S.flip(1)[:, :rank]
    return theta, S, result.remainder * S[-1].abs()


def randomised_eigh(
    matvec: Matvec,
    size: int,
    rank: int,
    *,
    oversampling: int = 10,
    power_iterations: int = 3,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Eigenpairs:
    """Leading eigenpairs by a random subspace, power iterations and Rayleigh-Ritz.

    Q = orth(A^(q+1) Omega); Q^T A Q = V diag(l) V^T; U = Q V.

    Args:
        matvec: V [P, k] -> A V [P, k], A positive semi-definite.
        size: P.
        rank: the number of eigenpairs wanted.
        oversampling: further columns of Omega.
        power_iterations: q; every one costs rank + oversampling products.
        generator: for Omega.
        dtype: of the arithmetic in here.
        device: of the vectors.

    Returns:
        `rank` eigenpairs (some may be zero); `converged`: all residuals are below 1e-6 of the largest.

    References:
        Halko, Martinsson and Tropp 2011 (subspace iteration).
    """
    _check_rank(rank, size)
    columns = min(size, rank + oversampling)
    like = torch.zeros((), dtype=dtype, device=device)
    Q = torch.linalg.qr(gaussian((size, columns), like, generator)).Q
    for _ in range(power_iterations + 1):
        Q = torch.linalg.qr(matvec(Q).to(Q)).Q
    AQ = matvec(Q).to(Q)
    if not bool(torch.isfinite(AQ).all()):
        raise NumericalError("the matrix-vector product is not finite; check the model's outputs and weights")
    T = Q.T @ AQ
    values, V = torch.linalg.eigh((T + T.T) / 2)
    values, V = values.flip(0)[:rank], V.flip(1)[:, :rank]
    residuals = (AQ @ V - (Q @ V) * values).norm(dim=0)
    converged = bool((residuals <= 1e-6 * values.abs().max()).all())
    return Eigenpairs(Q @ V, values, residuals, columns * (power_iterations + 2), converged)


def _check_rank(rank: int, size: int) -> None:
    if not 1 <= rank <= size:
        raise InputError(f"got rank={rank}; pass a rank between 1 and the matrix size {size}")
