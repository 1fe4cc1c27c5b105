"""Lanczos tridiagonalisation with full reorthogonalisation, and the log determinant that it gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.errors import InputError, NumericalError

__all__ = [
    "KrylovSpace",
    "LanczosResult",
    "Matvec",
    "TraceEstimate",
    "gaussian",
    "lanczos",
    "stochastic_lanczos_quadrature",
]

Matvec = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LanczosResult:
    """A Q = Q T + (rest) with orthonormal Q.

    Attributes:
        basis: Q [P, m].
        diagonal: of T [m].
        off_diagonal: of T [m - 1].
        remainder: norm of what the last step left over; it is zero when the space is exhausted.
        exhausted: the Krylov space is invariant, so the eigenvalues of T are eigenvalues of A.
    """

    basis: Tensor
    diagonal: Tensor
    off_diagonal: Tensor
    remainder: float
    exhausted: bool

    def eigh(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues [m] (ascending) and eigenvectors [m, m] of T."""
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


class KrylovSpace:
    """A growing Krylov basis with full reorthogonalisation, kept orthogonal to `against`."""

    def __init__(self, matvec: Matvec, start: Tensor, against: Tensor | None, noise: float, scale: float) -> None:
        self.matvec, self.against, self.noise, self.scale = matvec, against, noise, scale
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
        # Twice is enough: one pass loses orthogonality when most of v is cancelled.
        Q = torch.stack(self.columns, dim=1) if self.columns else None
        for _ in range(2):
            if self.against is not None:
                v = v - self.against @ (self.against.T @ v)
            if Q is not None:
                v = v - Q @ (Q.T @ v)
        return v

    def step(self) -> None:
        """Add one basis vector."""
        q = self.next
        if self.columns:
            self.off_diagonal.append(self.remainder)
        self.columns.append(q)
        v = self.matvec(q).to(q)
        if not bool(torch.isfinite(v).all()):
            raise NumericalError("the matrix-vector product is not finite; check the model's outputs and weights")
        self.diagonal.append(float(q @ v))
        self.scale = max(self.scale, float(v.norm()))
        v = self._project(v)
        self.remainder = float(v.norm())
        full = len(self.columns) + (0 if self.against is None else self.against.shape[1]) >= q.numel()
        if full or self.remainder <= self.noise * self.scale:
            self.exhausted, self.remainder = True, 0.0
        else:
            self.next = v / self.remainder

    def result(self) -> LanczosResult:
        """What has been found so far."""
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
    """Lanczos tridiagonalisation with full reorthogonalisation.

    Args:
        matvec: v [P] -> A v [P], A symmetric.
        start: [P], any scale, not zero.
        steps: the most basis vectors wanted.
        noise: relative rounding of `matvec`; a smaller remainder ends the recursion.

    Returns:
        A `LanczosResult` with m <= steps; fewer when the Krylov space is exhausted.

    Raises:
        InputError: steps < 1 or a zero start.

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
    state = KrylovSpace(matvec, start, None, noise, 0.0)
    while len(state.columns) < steps and not state.exhausted:
        state.step()
    return state.result()


def stochastic_lanczos_quadrature(
    matvec: Matvec,
    size: int,
    *,
    function: Callable[[Tensor], Tensor] = torch.log,
    samples: int = 16,
    steps: int = 50,
    noise: float = 1e-13,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> TraceEstimate:
    """Estimate tr f(A); with f = log (the default) this is log det A.

    tr f(A) ~ (1/S) sum_s P sum_i tau_si^2 f(theta_si): Rademacher probes, m Lanczos steps each, theta the
    Ritz values and tau the first entries of their eigenvectors.

    Args:
        matvec: v [P] -> A v [P], A symmetric, positive definite for the logarithm.
        size: P.
        function: applied to Ritz values, [m] -> [m].
        samples: S.
        steps: m.
        noise: relative rounding of `matvec`.
        generator: for the probes.
        dtype: of the arithmetic in here.
        device: of the vectors.

    Returns:
        The estimate and its standard error (over probes; NaN for one probe).

    Raises:
        NumericalError: the function is not finite at a Ritz value (log of a value that is not positive).

    References:
        Ubaru, Chen and Saad 2017.
    """
    if samples < 1 or steps < 1 or size < 1:
        raise InputError(f"got size={size}, samples={samples}, steps={steps}; all must be at least 1")
    estimates = []
    for _ in range(samples):
        bits = torch.randint(2, (size,), generator=generator, device=draw_device(generator, device))
        start = (2.0 * bits - 1.0).to(dtype=dtype, device=device)
        theta, S = lanczos(matvec, start, min(steps, size), noise=noise).eigh()
        f = function(theta)
        if not bool(torch.isfinite(f).all()):
            raise NumericalError(
                f"the function is not finite at the eigenvalue {float(theta.min()):.3g}; a log det needs a "
                "positive definite matrix: add a prior precision"
            )
        estimates.append(float(size * (S[0] ** 2 * f).sum()))
    values = torch.tensor(estimates, dtype=torch.float64)
    error = float(values.std() / math.sqrt(samples)) if samples > 1 else math.nan
    return TraceEstimate(float(values.mean()), error)


def draw_device(generator: torch.Generator | None, device: torch.device | str) -> torch.device:
    """Random numbers are drawn where the generator lives."""
    return torch.device(device) if generator is None else generator.device


def gaussian(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers in the dtype and on the device of `like`."""
    where = draw_device(generator, like.device)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=where).to(like)
