"""Linear algebra with a symmetric matrix known only through products: eigenpairs and solves.

Nothing here knows about networks. A `matvec` takes [P] or [P, k] and returns the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.errors import InputError, NumericalError, ShapeError

__all__ = [
    "CGResult",
    "Eigenpairs",
    "KrylovSpace",
    "LanczosResult",
    "Matvec",
    "Rounding",
    "TraceEstimate",
    "conjugate_gradient",
    "gaussian",
    "lanczos",
    "lanczos_eigh",
]

Matvec = Callable[[Tensor], Tensor]
_CHECK_EVERY = 4  # This many Lanczos steps lie between two looks at the Ritz values.
_LEAST_STEPS = 12  # A round needs this many before it may conclude that nothing large is left.


@dataclass(frozen=True)
class LanczosResult:
    """The result A Q = Q T + (rest) of a Lanczos recursion, with orthonormal Q.

    Attributes:
        basis: The basis Q [P, m].
        diagonal: The diagonal of T [m].
        off_diagonal: The off-diagonal of T [m - 1].
        remainder: The norm of what the last step left over; it is zero when the space is exhausted.
        exhausted: Whether the Krylov space is invariant, so that the eigenvalues of T are eigenvalues of A.
    """

    basis: Tensor
    diagonal: Tensor
    off_diagonal: Tensor
    remainder: float
    exhausted: bool

    def eigh(self) -> tuple[Tensor, Tensor]:
        """Returns eigenvalues [m] (ascending) and eigenvectors [m, m] of T."""
        T = torch.diag(self.diagonal)
        if self.off_diagonal.numel():
            T = T + torch.diag(self.off_diagonal, 1) + torch.diag(self.off_diagonal, -1)
        values, vectors = torch.linalg.eigh(T)
        return values, vectors


@dataclass(frozen=True)
class TraceEstimate:
    """A stochastic estimate of tr f(A) with its standard error over probe vectors."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class Rounding:
    """How much rounding there is in products with A.

    The error of A q is random and of size ``noise`` · ‖A‖. A product that is computed as Rᵀ(R q) is better than that away
    from the leading eigenvectors: what R q loses, noise · ‖R‖, is multiplied by Rᵀ again, so that within a subspace whose
    largest eigenvalue is l only noise · √(l ‖A‖) of the error remains. Eigenvalues can then be told from zero down to
    noise² · ‖A‖.

    Attributes:
        noise: The error of a product relative to the norm of A.
        factored: Whether products are computed as Rᵀ(R q).
    """

    noise: float
    factored: bool = False

    @property
    def floor(self) -> float:
        """The least eigenvalue, relative to the largest, that is more than rounding."""
        return max(self.noise**2, 100 * torch.finfo(torch.float64).eps) if self.factored else self.noise

    def relative(self, values: Tensor, scale: float) -> Tensor:
        """Returns what errors in directions with these eigenvalues are relative to: ‖A‖, or √(l ‖A‖) for Rᵀ(R q)."""
        if not self.factored:
            return torch.full_like(values, scale)
        return (values.clamp_min(self.floor * scale) * scale).sqrt()


class KrylovSpace:
    """A growing Krylov basis with full reorthogonalisation, kept orthogonal to `against`."""

    def __init__(self, matvec: Matvec, start: Tensor, against: Tensor | None, rounding: Rounding, scale: float) -> None:
        self.matvec, self.against, self.rounding, self.scale = matvec, against, rounding, scale
        self.columns: list[Tensor] = []
        self.diagonal: list[float] = []
        self.off_diagonal: list[float] = []
        self.exhausted = False
        self.remainder = 0.0
        start = self._project(start)
        norm = float(start.norm())
        self.exhausted = norm == 0.0
        self.next = start if self.exhausted else start / norm

    def _project(self, v: Tensor) -> Tensor:
        # Two passes are enough, and needed: one loses orthogonality when most of v is cancelled.
        Q = torch.stack(self.columns, dim=1) if self.columns else None
        for _ in range(2):
            if self.against is not None:
                v = v - self.against @ (self.against.T @ v)
            if Q is not None:
                v = v - Q @ (Q.T @ v)
        return v

    def step(self) -> None:
        """Adds one basis vector to the space."""
        q = self.next
        if self.columns:
            self.off_diagonal.append(self.remainder)
        self.columns.append(q)
        v = self.matvec(q).to(q)
        if not bool(torch.isfinite(v).all()):
            raise NumericalError("the matrix-vector product is not finite; check the model's outputs and weights")
        energy = q @ v
        self.diagonal.append(float(energy))
        self.scale = max(self.scale, float(v.norm()))
        v = self._project(v)
        self.remainder = float(v.norm())
        least = self.rounding.noise * float(self.rounding.relative(energy, self.scale))
        full = len(self.columns) + (0 if self.against is None else self.against.shape[1]) >= q.numel()
        if full or self.remainder <= least:
            self.exhausted, self.remainder = True, 0.0
        else:
            self.next = v / self.remainder

    def result(self) -> LanczosResult:
        """Returns what has been found so far."""
        q = self.next
        basis = torch.stack(self.columns, dim=1) if self.columns else q.new_zeros(q.numel(), 0)
        return LanczosResult(
            basis,
            q.new_tensor(self.diagonal),
            q.new_tensor(self.off_diagonal),
            self.remainder,
            self.exhausted,
        )


def lanczos(matvec: Matvec, start: Tensor, steps: int, *, noise: float = 1e-13) -> LanczosResult:
    """Runs Lanczos tridiagonalisation with full reorthogonalisation.

    Args:
        matvec: A function from v [P] to A v [P], with A symmetric.
        start: The first vector [P], of any scale, not zero.
        steps: The greatest number of basis vectors.
        noise: The relative rounding of `matvec`; a smaller remainder ends the recursion.

    Returns:
        A `LanczosResult` with m <= steps; fewer when the Krylov space is exhausted.

    Raises:
        InputError: The number of steps is below 1, or the start is zero.

    >>> A = torch.diag(torch.tensor([3.0, 2.0, 0.0], dtype=torch.float64))
    >>> result = lanczos(lambda v: A @ v, torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64), 3)
    >>> result.exhausted, result.basis.shape[1]
    (True, 2)

    References:
        Golub and Van Loan, Matrix Computations, chapter 10.
    """
    if steps < 1 or start.dim() != 1 or not float(start.norm()) > 0:
        raise InputError(
            f"got steps={steps} and a start of shape {tuple(start.shape)}; "
            "pass steps >= 1 and a vector that is not zero"
        )
    state = KrylovSpace(matvec, start, None, Rounding(noise), 0.0)
    while len(state.columns) < steps and not state.exhausted:
        state.step()
    return state.result()


def draw_device(generator: torch.Generator | None, device: torch.device | str) -> torch.device:
    """Returns the device where random numbers are drawn: where the generator lives."""
    return torch.device(device) if generator is None else generator.device


def gaussian(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Returns standard normal numbers in the dtype and on the device of `like`."""
    where = draw_device(generator, like.device)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=where).to(like)


@dataclass(frozen=True)
class CGResult:
    """A solution of A x = b.

    Attributes:
        solution: The solution x, of the shape of the right-hand side.
        residual: The true relative residuals ||b - A x|| / ||b||, one per column ([] or [k]).
        iterations: The number of products, the check at the end not counted.
        converged: Whether every residual is at most the tolerance (or the rounding level).
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
    """Solves A x = b by preconditioned conjugate gradients, all columns at once.

    Args:
        matvec: A function from tensors like b to tensors like b, with A symmetric positive definite.
        rhs: The right-hand side b, [P] or [P, k].
        preconditioner: An approximation of A^-1, symmetric positive definite; None means the identity.
        tolerance: The tolerance of ||b - A x|| / ||b||.
        max_iterations: The greatest number of iterations; None means 10 * P.

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
        # Finished columns stand still, since their steps would divide rounding by rounding.
        alpha = torch.where(active, rz / torch.where(active, curvature, 1.0), 0.0)
        x, r = x + alpha * p, r - alpha * Ap
        z = apply(r)
        rz_new = (r * z).sum(0)
        beta = torch.where(active, rz_new / torch.where(rz == 0, 1.0, rz), 0.0)
        p, rz, iterations = z + beta * p, rz_new, iterations + 1
    norm = rhs.norm(dim=0)
    residual = (rhs - matvec(x)).norm(dim=0) / torch.where(norm == 0, 1.0, norm)
    allowed = max(2 * tolerance, 100 * torch.finfo(rhs.dtype).eps)  # The recursive residual drifts a little.
    return CGResult(x, residual, iterations, bool((residual <= allowed).all()))


@dataclass(frozen=True)
class Eigenpairs:
    """The leading eigenpairs of a matrix, largest first.

    Attributes:
        vectors: The eigenvectors [P, k], orthonormal.
        values: The eigenvalues [k], descending.
        residuals: The bounds on ||A u - l u|| [k].
        matvecs: The number of products that were used.
        converged: Whether all residuals are below the tolerance.
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
    factored: bool = False,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Eigenpairs:
    """Returns the leading eigenpairs of a positive semi-definite matrix by Lanczos in deflated rounds.

    One Krylov space holds a single vector of a repeated eigenvalue. So after a round the found vectors are
    locked and a new round starts in their complement, until a round finds nothing larger than what is locked.

    Args:
        matvec: A function from v [P] to A v [P].
        size: The number P of rows.
        rank: The number of eigenpairs wanted.
        tolerance: The tolerance of residuals, relative to the largest eigenvalue; for factored products relative to the
            geometric mean of the largest and the pair's own eigenvalue, so that all pairs together are as good as the
            tolerance's square.
        max_matvecs: The greatest number of products; None means 20 * rank + 200.
        noise: The relative rounding of `matvec`. Eigenvalues below it (relative to the largest; for factored products
            below its square) are not returned.
        factored: Whether `matvec` computes R^T (R v); see `Rounding`.
        generator: The source of the random starts.
        dtype: The dtype of the arithmetic in here.
        device: The device of the vectors.

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
    rounding = Rounding(noise, factored)
    U = torch.zeros(size, 0, dtype=dtype, device=device)
    values, residuals = U.new_zeros(0), U.new_zeros(0)
    scale, used, finished = 0.0, 0, False
    while U.shape[1] < size and used < budget and not finished:
        threshold = float(values[rank - 1]) if len(values) >= rank else 0.0
        state = KrylovSpace(matvec, gaussian((size,), U, generator), U, rounding, scale)
        theta, vectors, residual = _grow(state, rank, budget - used, threshold, tolerance)
        used, scale = used + len(state.columns), state.scale
        # A copy of the k-th eigenvalue itself may be exchanged for it freely, hence the margin.
        keep = theta > max(threshold * (1 + 10 * tolerance), rounding.floor * scale)
        finished = not bool(keep.any())
        U = torch.cat([U, state.result().basis @ vectors[:, keep]], dim=1)
        values, residuals = torch.cat([values, theta[keep]]), torch.cat([residuals, residual[keep]])
        order = values.argsort(descending=True)
        U, values, residuals = U[:, order], values[order], residuals[order]
    complete = finished or U.shape[1] == size
    U, values, residuals = U[:, :rank], values[:rank], residuals[:rank]
    converged = complete and bool((residuals <= tolerance * rounding.relative(values, scale)).all())
    if factored and len(values) and noise > torch.finfo(dtype).eps ** 0.75:
        U, values = _rayleigh_ritz(matvec, U)
        used += len(values)
        above = values > rounding.floor * scale
        U, values, residuals = U[:, above], values[above], residuals[above]
    return Eigenpairs(U, values, residuals, used, converged)


def _rayleigh_ritz(matvec: Matvec, U: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the eigenpairs of a factored matrix within the span of U.

    The vectors of a Krylov space mix all eigenvalues, so that its small Ritz values are off by the rounding of products with
    the large ones. Products with the Ritz vectors themselves are graded: that of a small one rounds little.
    """
    projected = U.T @ matvec(U).to(U)
    values, rotation = torch.linalg.eigh((projected + projected.T) / 2)
    return U @ rotation.flip(1), values.flip(0)


def _grow(
    state: KrylovSpace, rank: int, budget: int, threshold: float, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Grows a Krylov space until the Ritz values above `threshold` have converged, and returns the leading `rank`."""
    while not state.exhausted and len(state.columns) < budget:
        state.step()
        m = len(state.columns)
        if m % _CHECK_EVERY == 0 and m >= _LEAST_STEPS:
            theta, _, residual = _ritz(state, rank)
            relevant = theta + residual > threshold
            enough = m >= rank or threshold > 0
            goal = 0.1 * tolerance * state.rounding.relative(theta, state.scale)
            if enough and bool((residual <= goal)[relevant].all()):
                break
    return _ritz(state, rank)


def _ritz(state: KrylovSpace, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the leading Ritz values, their coordinates in the basis and their residual norms."""
    if not state.columns:
        empty = state.next.new_zeros(0)
        return empty, state.next.new_zeros(0, 0), empty
    result = state.result()
    theta, S = result.eigh()
    theta, S = theta.flip(0)[:rank], S.flip(1)[:, :rank]
    return theta, S, result.remainder * S[-1].abs()


def _check_rank(rank: int, size: int) -> None:
    if not 1 <= rank <= size:
        raise InputError(f"got rank={rank}; pass a rank between 1 and the matrix size {size}")
