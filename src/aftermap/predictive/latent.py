"""A Gaussian over network outputs at every position: checked, and drawn from.

Index legend: S samples, N examples, ... positions (tokens, pixels), C outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from aftermap.errors import InputError, ShapeError
from aftermap.likelihoods.base import check_outputs, check_values
from aftermap.linalg import psd_eigh, symmetrise

__all__ = ["Latent", "at_least_float32", "check_latent", "draw"]

_ROUNDING = 1e-6  # a negative variance of this size relative to the largest is rounding


class Latent(NamedTuple):
    """The Gaussian over outputs: mean [N, ..., C], covariance [N, ..., C, C] or None, variance [N, ..., C]."""

    mean: Tensor
    cov: Tensor | None
    var: Tensor

    def full(self) -> Tensor:
        """The covariance [N, ..., C, C], diagonal if only variances are known."""
        return torch.diag_embed(self.var) if self.cov is None else self.cov


def at_least_float32(values: Tensor) -> Tensor:
    """Half precision is too coarse to average in.

    >>> at_least_float32(torch.zeros(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return values.to(torch.promote_types(values.dtype, torch.float32))


def check_latent(mean: Tensor, cov: Tensor | None, var: Tensor | None) -> Latent:
    """Check a Gaussian over outputs, and complete it with its variances.

    Args:
        mean: [N, ..., C].
        cov: [N, ..., C, C], or None.
        var: [N, ..., C]; not used where ``cov`` is given.

    Returns:
        The Gaussian, at least float32. Negative variances within rounding become 0.

    Raises:
        InputError: neither covariance nor variance.
        ShapeError: shapes that do not fit.
        DataError: NaN or infinite values, or a negative variance.

    >>> check_latent(torch.zeros(3, 2), torch.eye(2).expand(3, 2, 2), None).var.shape
    torch.Size([3, 2])
    """
    check_outputs(mean, "latent_mean")
    check_values(mean, ~mean.isfinite(), "values", "finite; write a mask as -1e4, not -inf", "latent_mean")
    mean = at_least_float32(mean)
    name = "latent_var" if cov is None else "latent_cov"
    given = var if cov is None else cov
    if given is None:
        raise InputError("pass latent_cov [N, ..., C, C] or latent_var [N, ..., C]; both are None.")
    expected = (*mean.shape, mean.shape[-1]) if cov is not None else tuple(mean.shape)
    if given.shape != expected:
        raise ShapeError(
            f"{name} has shape {list(given.shape)}, but latent_mean of shape {list(mean.shape)} needs {list(expected)}."
        )
    check_values(given, ~given.isfinite(), "values", "finite", name)
    given = given.to(mean.dtype)
    variance = given if cov is None else given.diagonal(dim1=-2, dim2=-1)
    largest = variance.detach().amax().clamp_min(0.0) if variance.numel() else 0.0
    check_values(variance, variance < -_ROUNDING * largest, "variance", "0 or more", name)
    return Latent(mean, None if cov is None else given, variance.clamp_min(0.0))


def _root(cov: Tensor) -> Tensor:
    """R [..., C, C] with R Rᵀ = cov, float64: Cholesky, or the eigenvectors where cov is singular.

    A singular covariance has no derivative of its root, so none flows through it.
    """
    work = symmetrise(cov.to(torch.float64))
    factor, info = torch.linalg.cholesky_ex(work)
    singular = info > 0
    if not bool(singular.any()):
        return factor
    # However wide its dtype, a covariance of outputs holds the digits of a network, most often of single precision.
    values, vectors = psd_eigh(work.detach()[singular], what="latent_cov", precision=torch.float32)
    mask = singular[..., None, None].expand(work.shape)
    other = torch.zeros_like(work).masked_scatter(mask, vectors * values.sqrt().unsqueeze(-2))
    eye = torch.eye(work.shape[-1], dtype=work.dtype, device=work.device)
    # factored again without the singular ones, whose backward pass would be NaN for all
    return torch.where(mask, other, torch.linalg.cholesky(torch.where(mask, eye, work)))


def draw(latent: Latent, points: Tensor) -> Tensor:
    """Outputs [S, N, ..., C] from standard normal points [S, C], the same at every position.

    f_s = m + R z_s with R Rᵀ = V; R is zero, and so is its derivative, where V is.

    Args:
        latent: the Gaussian at every position.
        points: z [S, C].

    Returns:
        f [S, N, ..., C], differentiable in the Gaussian.

    Raises:
        NumericalError: a covariance that is not positive semi-definite.

    >>> draw(check_latent(torch.zeros(3, 2), None, torch.ones(3, 2)), torch.ones(5, 2)).shape
    torch.Size([5, 3, 2])
    """
    points = points.to(latent.mean.device)
    if latent.cov is None:
        positive = latent.var > 0
        sd = torch.where(positive, torch.where(positive, latent.var, 1.0).sqrt(), 0.0)  # no infinite slope at 0
        step = sd * points.to(sd.dtype).reshape(-1, *[1] * (sd.dim() - 1), sd.shape[-1])
    else:
        step = torch.einsum("...ij,sj->s...i", _root(latent.cov), points)
    return latent.mean + step.to(latent.mean.dtype)
