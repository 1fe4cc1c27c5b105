"""The Gaussian over the outputs of a network at every position, and draws from it.

Index legend: S samples, N examples, ... positions (tokens, pixels), C outputs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from aftermap.errors import InputError, ShapeError
from aftermap.likelihoods.base import check_outputs, check_values
from aftermap.linalg import psd_eigh, symmetrise

__all__ = ["Latent", "at_least_float32", "check_latent", "draw", "draw_logits"]

_ROUNDING = 1e-6  # a negative variance of this size relative to the largest is rounding


class Latent(NamedTuple):
    """The Gaussian over outputs: mean [N, ..., C], covariance [N, ..., C, C] or None, variance [N, ..., C]."""

    mean: Tensor
    cov: Tensor | None
    var: Tensor

    def full(self) -> Tensor:
        """Returns the covariance [N, ..., C, C], diagonal if only variances are known."""
        return torch.diag_embed(self.var) if self.cov is None else self.cov

    def divided_by(self, t: float) -> Latent:
        """Returns the Gaussian over f/t."""
        return Latent(self.mean / t, None if self.cov is None else self.cov / t**2, self.var / t**2)


def at_least_float32(values: Tensor) -> Tensor:
    """Returns the values in at least float32, since half precision is too coarse to average in.

    >>> at_least_float32(torch.zeros(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return values.to(torch.promote_types(values.dtype, torch.float32))


def check_latent(mean: Tensor, cov: Tensor | None, var: Tensor | None) -> Latent:
    """Checks a Gaussian over outputs, and completes it with its variances.

    Args:
        mean: The means [N, ..., C].
        cov: The covariance [N, ..., C, C], or None.
        var: The variances [N, ..., C], which are not used where ``cov`` is given.

    Returns:
        The Gaussian, at least float32. Negative variances within rounding become 0.

    Raises:
        InputError: There is neither a covariance nor a variance.
        ShapeError: The shapes do not fit together.
        DataError: A value is NaN or infinite, or a variance is negative.

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
    """Returns R [..., C, C] with R Rᵀ = cov, float64: Cholesky, or the eigenvectors where cov is singular.

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
    """Returns outputs [S, N, ..., C] from standard normal points [S, C], the same at every position.

    The outputs are f_s = m + R z_s with R Rᵀ = V; R is zero, and so is its derivative, where V is.

    Args:
        latent: The Gaussian at every position.
        points: The points z [S, C].

    Returns:
        The outputs f [S, N, ..., C], differentiable in the Gaussian.

    Raises:
        NumericalError: A covariance is not positive semi-definite.

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


def draw_logits(latent: Latent, points: Tensor) -> Tensor:
    """Returns logits of classes [S, N, ..., C] from standard normal points [S, C]; only their differences are those of the Gaussian.

    No softmax sees what is common to all logits, so it is not drawn: with Q [C, C − 1] an orthonormal basis of the contrasts and
    R Rᵀ = Qᵀ V Q the draws are m + Q R z_s. They are the same for V and for every V + 1uᵀ + u1ᵀ: logits and their log-softmax
    give the same probabilities draw by draw. Variances alone are drawn as they are.

    Args:
        latent: The Gaussian over logits at every position.
        points: The points z [S, C], of which the last column is not used where there is a covariance.

    Raises:
        NumericalError: A covariance is not positive semi-definite.

    >>> latent = check_latent(torch.zeros(1, 2), torch.ones(1, 2, 2), None)
    >>> draw_logits(latent, torch.ones(1, 2)).abs().max().item() < 1e-6
    True
    """
    if latent.cov is None:
        return draw(latent, points)
    basis = _contrasts(latent.mean.shape[-1], latent.mean.device)
    root = basis @ _root(basis.mT @ symmetrise(latent.cov.to(torch.float64)) @ basis)
    step = torch.einsum("...ij,sj->s...i", root, points[:, :-1].to(root))
    return latent.mean + step.to(latent.mean.dtype)


def _contrasts(classes: int, device: torch.device) -> Tensor:
    """Returns an orthonormal basis [C, C − 1] of the vectors with sum 0: a reflection of e_0 to 1/√C without its first column."""
    basis = torch.eye(classes, dtype=torch.float64, device=device)[:, 1:] - 1 / (classes - math.sqrt(classes))
    basis[0] = 1 / math.sqrt(classes)
    return basis
