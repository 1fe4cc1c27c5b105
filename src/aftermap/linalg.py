"""Dense linear algebra that the rest stands on: products into sums, safe decompositions, Kronecker products.

Every decomposition is done in float64, whatever the dtype of its input: factors of neural networks are
often close to singular, and their small eigenvalues decide the posterior.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from aftermap.errors import NumericalError, NumericalWarning

__all__ = [
    "add_product_",
    "all_finite",
    "kron",
    "psd_eigh",
    "safe_cholesky",
    "symmetrise",
]

# An eigenvalue below -TOLERANCE * largest is no rounding error: the matrix was not p.s.d.
_NEGATIVE_TOLERANCE = 1e-5


def add_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds leftᵀ right to ``out``, without a temporary where the dtypes allow it."""
    left = left.transpose(-1, -2)
    if out.dtype != left.dtype:
        if left.element_size() < 4:  # a product rounded to half precision would not be positive semi-definite
            left, right = left.to(out.dtype), right.to(out.dtype)
        out += left @ right
    elif out.dim() == 2:
        out.addmm_(left, right)
    else:
        out.baddbmm_(left, right)


def all_finite(values: Tensor) -> bool:
    """Whether every number is finite; a sum tells it in one pass, unless it overflows.

    >>> all_finite(torch.tensor([1e38, 3e38])), all_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    return math.isfinite(float(values.detach().sum())) or bool(torch.isfinite(values).all())


def symmetrise(matrix: Tensor) -> Tensor:
    """(M + Mᵀ)/2 over the last two dimensions: removes what rounding made unsymmetric."""
    return (matrix + matrix.transpose(-1, -2)) / 2


def psd_eigh(matrix: Tensor, *, what: str = "matrix") -> tuple[Tensor, Tensor]:
    """Eigenvalues (clamped at 0) and eigenvectors of a p.s.d. matrix, in float64.

    Args:
        matrix: [..., D, D], symmetric and p.s.d. up to rounding.
        what: a name for messages.

    Returns:
        Eigenvalues [..., D] in ascending order, none negative, and eigenvectors [..., D, D] in columns.

    Raises:
        NumericalError: an entry is not finite, or the smallest eigenvalue is below −1e-5 times the largest.

    >>> values, vectors = psd_eigh(torch.diag(torch.tensor([4.0, 1.0])))
    >>> values
    tensor([1., 4.], dtype=torch.float64)
    """
    # Below its dtype's smallest normal number a matrix holds no digits, only rounding.
    floor = max(1e-300, torch.finfo(matrix.dtype).tiny)
    matrix = matrix.detach()
    work = _symmetric_columns(matrix)
    if work.numel() and not all(math.isfinite(v) for v in work.mT.aminmax()):
        raise NumericalError(f"{what} has entries that are not finite; check the data and the model's outputs")
    values = work.new_empty(matrix.shape[:-1])
    # Eigenvectors take the place of the matrix: the decomposition itself needs room for two more.
    try:
        torch.linalg.eigh(work, out=(values, work))
    except RuntimeError:
        work = _symmetric_columns(matrix)
        jitter = 1e-12 * work.diagonal(dim1=-2, dim2=-1).mean()
        warnings.warn(
            f"eigendecomposition of {what} did not converge; {float(jitter):.1e} was added to its diagonal",
            NumericalWarning,
            stacklevel=2,
        )
        work.diagonal(dim1=-2, dim2=-1).add_(jitter)
        torch.linalg.eigh(work, out=(values, work))
    if values.numel():
        smallest, largest = float(values.min()), float(values.max())
        if smallest < -_NEGATIVE_TOLERANCE * max(largest, 0.0) - floor:
            raise NumericalError(
                f"{what} is not positive semi-definite: smallest eigenvalue {smallest:.3e}, "
                f"largest {largest:.3e}. A Gauss-Newton or Fisher curvature always is; an exact Hessian need not be"
            )
    return values.clamp_min_(0.0), work


def _symmetric_columns(matrix: Tensor) -> Tensor:
    """(M + Mᵀ)/2 in float64, stored column by column as LAPACK wants it; made in strips, so that no second copy exists."""
    lines = torch.empty(matrix.shape, dtype=torch.float64, device=matrix.device)
    size, step = matrix.shape[-1], 256
    for start in range(0, size, step):
        strip = slice(start, min(start + step, size))
        out = lines[..., strip, :]
        torch.add(matrix[..., strip, :].to(torch.float64), matrix[..., strip].mT.to(torch.float64), out=out).div_(2)
    return lines.mT


def safe_cholesky(matrix: Tensor, *, what: str = "matrix") -> Tensor:
    """Lower Cholesky factor in float64; a ladder of jitters on failure, each one reported.

    Args:
        matrix: [D, D], symmetric positive definite up to rounding.
        what: a name for messages.

    Returns:
        L [D, D] with L Lᵀ = matrix (+ jitter).

    Raises:
        NumericalError: not positive definite even with a jitter of 1e-6 times the mean diagonal.

    >>> safe_cholesky(torch.tensor([[4.0]]))
    tensor([[2.]], dtype=torch.float64)
    """
    matrix = symmetrise(matrix.to(torch.float64))
    if not bool(torch.isfinite(matrix).all()):
        raise NumericalError(f"{what} has entries that are not finite; check the data and the model's outputs")
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info.max()) == 0:
        return factor
    scale = float(matrix.diagonal(dim1=-2, dim2=-1).abs().mean())
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for relative in (1e-14, 1e-12, 1e-10, 1e-8, 1e-6):
        factor, info = torch.linalg.cholesky_ex(matrix + relative * scale * eye)
        if int(info.max()) == 0:
            warnings.warn(
                f"Cholesky of {what} needed {relative * scale:.1e} on its diagonal (relative {relative:.0e})",
                NumericalWarning,
                stacklevel=2,
            )
            return factor
    raise NumericalError(
        f"{what} is not positive definite, even with 1e-6 of its mean diagonal added. "
        "A larger prior precision makes a posterior precision positive definite"
    )


def kron(left: Tensor, right: Tensor) -> Tensor:
    """Kronecker product of two matrices (or batches of them): [..., M, N] ⊗ [..., P, Q] -> [..., MP, NQ].

    >>> kron(torch.eye(2), torch.ones(1, 2)).shape
    torch.Size([2, 4])
    """
    shape = (*left.shape[:-2], left.shape[-2] * right.shape[-2], left.shape[-1] * right.shape[-1])
    return torch.einsum("...mn,...pq->...mpnq", left, right).reshape(shape)
