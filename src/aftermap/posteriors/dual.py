"""The linearised predictive covariance in function space: for few data, and as an oracle.

Index legend: m inputs asked about, n data, d outputs of one example (positions × C), k columns of the roots, p parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aftermap.errors import InputError, ShapeError
from aftermap.linalg import safe_cholesky

__all__ = ["dual_covariance"]


def dual_covariance(
    jacobian: Tensor,
    data_jacobian: Tensor,
    data_root: Tensor,
    prior_precision: float | Tensor,
    *,
    scale: float | Tensor = 1.0,
    joint: bool = False,
) -> Tensor:
    r"""J_*(sG + P₀)⁻¹J_*ᵀ without a matrix over the parameters.

    With the kernel K = J P₀⁻¹ Jᵀ and blockdiag roots 𝒮 of the output Hessians, SSᵀ = Λ,

    .. math::
        V = K_{**} - s K_{*N}\mathcal S (I + s \mathcal S^\top K_{NN} \mathcal S)^{-1} \mathcal S^\top K_{N*}

    which needs no inverse of Λ (singular for a softmax) and one factorisation of an [NK, NK] matrix.

    Args:
        jacobian: J_* [M, D, P] of the inputs asked about.
        data_jacobian: J [N, D, P] of the data.
        data_root: S [N, D, K], `likelihood.hessian_root`, times the square root of example weights.
        prior_precision: P₀, a number or [P].
        scale: s, what multiplies the curvature.
        joint: the covariance between inputs too.

    Returns:
        [M, D, D], or [M, D, M, D] if joint.

    Raises:
        ShapeError: shapes that do not fit.
        InputError: a prior precision or a scale that is not positive and finite.

    >>> J = torch.ones(1, 1, 1, dtype=torch.float64)
    >>> dual_covariance(J, J, J, 1.0)  # one datum with unit noise halves a unit prior variance
    tensor([[[0.5000]]], dtype=torch.float64)

    References:
        Khan, Immer, Abedi and Korzepa 2019; Immer, Korzepa and Bauer 2021, section 3.3.
    """
    if jacobian.dim() != 3 or data_jacobian.dim() != 3 or jacobian.shape[-1] != data_jacobian.shape[-1]:
        raise ShapeError(
            f"the Jacobians have shapes {tuple(jacobian.shape)} and {tuple(data_jacobian.shape)}; "
            "pass [M, D, P] and [N, D, P] with one P"
        )
    if data_root.dim() != 3 or data_root.shape[:2] != data_jacobian.shape[:2]:
        raise ShapeError(
            f"the roots have shape {tuple(data_root.shape)}; data Jacobians of shape {tuple(data_jacobian.shape)} "
            "need [N, D, K]"
        )
    size = jacobian.shape[-1]
    prior = torch.as_tensor(prior_precision, dtype=torch.float64, device=jacobian.device)
    s = torch.as_tensor(scale, dtype=torch.float64, device=jacobian.device)
    if prior.dim() and prior.shape != (size,):
        raise ShapeError(f"the prior precision has shape {tuple(prior.shape)}; pass a number or [{size}]")
    for what, value in (("prior precision", prior), ("scale", s)):
        if not bool((torch.isfinite(value) & (value > 0)).all()):
            raise InputError(f"the {what} must be positive and finite, got {float(value.min()):g}")
    root = prior.sqrt()
    asked = jacobian.to(torch.float64) / root
    white = torch.einsum("ndp,ndk->nkp", data_jacobian.to(torch.float64) / root, data_root.to(torch.float64))
    white = s.sqrt() * white.reshape(-1, size)  # √s 𝒮ᵀ J P₀^{-½}: [NK, P]
    eye = torch.eye(len(white), dtype=torch.float64, device=white.device)
    factor = safe_cholesky(eye + white @ white.T, what="the kernel matrix of the data")
    cross = torch.einsum("ap,mdp->mad", white, asked)  # [M, NK, D]
    taken = torch.linalg.solve_triangular(factor, cross, upper=False)
    if joint:
        prior_part = torch.einsum("mdp,nep->mdne", asked, asked)
        return prior_part - torch.einsum("mad,nae->mdne", taken, taken)
    return asked @ asked.mT - taken.mT @ taken
