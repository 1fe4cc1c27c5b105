"""How many digits a variance J Σ Jᵀ has left after rounding, and a warning where they are few.

Let w = ΣJᵀ, v = Jw, and u the unit roundoff of the gradients (half of machine epsilon). To first order an error E of the
curvature M changes v by s·wᵀEw, and an error d of the gradient changes it by 2dᵀw; to second order d adds dᵀΣd. The errors are:

- Every entry of the gradient J is rounded: d_j ≈ u·J_j, so that 2u·√(Σ_j J_j² w_j²) + u²·Σ_j J_j² Σ_jj is added to v.
- Every gradient of the data is rounded alike. With M = Σ_n J_n J_nᵀ the first order of E is Σ_n (d_n J_nᵀ + J_n d_nᵀ). It adds
  2u·√((v − wᵀDw) · s·Σ_j M_jj w_j² / n), where the n rows are taken as alike and are at least as many as the effective
  parameters. The second order adds u²·s·Σ_j M_jj w_j².
- A decomposition is that of a matrix that differs from the right one by u'·‖M‖, where u' is the unit roundoff of its
  arithmetic; this adds u'·s·‖M‖·wᵀDw, norms being those of matrices that are whitened by the prior D.
- Eigenpairs (q_k, l_k) that were found by products in the network's precision have residuals of about √n·u·√(l_k ‖M‖)
  outside of their span (`aftermap.krylov.Rounding`), in any of its q directions. With the coordinates t_k of the whitened
  gradient and its part o outside this adds 2·√n·u·|o|·√(Σ_k l_k ‖M‖ t_k²/g_k² / q), where g_k = 1 + l_k. What lies outside of
  the span keeps the prior, so only the part of w inside of it takes part in the second order of E.

All are typical sizes of random errors, not bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.errors import NumericalWarning, warn_caller
from aftermap.linalg import TERMS_PER_PART

__all__ = ["CurvatureSize", "VarianceErrors", "digits_tolerance", "unit_roundoff"]


def digits_tolerance(dtype: torch.dtype) -> float:
    """Returns the relative error at which half of the digits are gone.

    These are the digits of single precision for results in double precision, too: seven digits are never too few.

    >>> round(digits_tolerance(torch.float32), 6), digits_tolerance(torch.float64) == digits_tolerance(torch.float32)
    (0.000345, True)
    """
    return math.sqrt(max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps))


def unit_roundoff(dtype: torch.dtype) -> float:
    """Returns half of machine epsilon, the largest relative error of a rounded number."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class CurvatureSize:
    """The size of a curvature s·M relative to the prior, after whitening.

    Attributes:
        trace: The sum of its eigenvalues.
        largest: The largest one.
        effective: The effective number of parameters, which is at most the number of rows that were summed.
    """

    trace: float
    largest: float
    effective: float

    @staticmethod
    def of(eigenvalues: Tensor) -> CurvatureSize:
        """Reads the eigenvalues of the whitened curvature; those of a Hessian may be negative."""
        sizes = eigenvalues.detach().abs()
        if not sizes.numel():
            return CurvatureSize(0.0, 0.0, 1.0)
        return CurvatureSize(float(sizes.sum()), float(sizes.max()), max(1.0, float((sizes / (1 + sizes)).sum())))

    def data_rounding(self, dtype: torch.dtype) -> float:
        """Bounds the relative error of any variance that comes from the rounding of the data's gradients."""
        unit = unit_roundoff(dtype)
        return 2 * unit * math.sqrt(self.trace / self.effective) + unit**2 * self.trace

    def product_noise(self, dtype: torch.dtype) -> float:
        """Returns the relative rounding of products with the curvature."""
        return unit_roundoff(dtype) * math.sqrt(min(self.effective, TERMS_PER_PART))

    def residual_errors(
        self, dtype: torch.dtype, eigenvalues: Tensor, inside: Tensor, outside: Tensor, directions: int
    ) -> Tensor:
        """Returns what residuals of eigenpairs may add to the variances.

        Args:
            dtype: The precision of the products that the pairs were found by.
            eigenvalues: The eigenvalues l [k].
            inside: The coordinates t of the whitened gradients [..., k].
            outside: The squared length of what lies outside [...].
            directions: The number q of directions outside.
        """
        residuals = (eigenvalues * self.largest * (inside / (1 + eigenvalues)).square()).sum(-1) / max(1, directions)
        return 2 * self.product_noise(dtype) * (outside.clamp_min(0.0) * residuals).sqrt()


@dataclass(frozen=True)
class VarianceErrors:
    """What rounding may have added to variances; see the top of this file for the terms.

    Attributes:
        dtype: The precision of the gradients.
        variance: The variances v [...].
        errors: Their errors by cause [...].
    """

    dtype: torch.dtype
    variance: Tensor
    errors: dict[str, Tensor]

    @staticmethod
    def may_matter(
        size: CurvatureSize, gradients: Tensor, prior: Tensor, variance: Tensor, decomposition: float, residuals: float
    ) -> bool:
        """Tells whether an error could be too large, by bounds that need neither Σ nor w.

        By the inequality of Cauchy and Schwarz w_j² ≤ v Σ_jj ≤ v/D_j, and wᵀDw ≤ v.

        Args:
            size: The size of the curvature.
            gradients: The gradients J as they were computed [v, b, p].
            prior: The prior's precisions D [p].
            variance: The variances [b, v].
            decomposition: The unit roundoff of the decomposition, zero for none.
            residuals: The relative residuals of eigenpairs, zero for none.
        """
        unit = unit_roundoff(gradients.dtype)
        left = digits_tolerance(gradients.dtype) - size.data_rounding(gradients.dtype)
        left -= decomposition * size.largest + 2 * residuals * math.sqrt(size.largest)
        if left <= 0:
            return True
        ratio = (gradients.detach().to(torch.float64).square() @ (1 / prior.detach())).T / variance.detach()
        return bool((2 * unit * ratio.sqrt() + unit**2 * ratio > left).any())

    @staticmethod
    def of_gradients(
        size: CurvatureSize,
        dtype: torch.dtype,
        rows: Tensor,
        products: Tensor,
        prior: Tensor,
        marginal: Tensor,
        curvature: Tensor,
        inside: Tensor | None = None,
    ) -> VarianceErrors:
        """Returns what the rounding of gradients may have added.

        Args:
            size: The size of the curvature.
            dtype: The precision in which the gradients were computed.
            rows: The gradients J [b, v, p], in float64.
            products: Their products w with the covariance [b, v, p].
            prior: The prior's precisions D [p].
            marginal: The marginal variances Σ_jj [p].
            curvature: The diagonal of s·M [p].
            inside: The part of w that the curvature changes [b, v, p]; None means all of it.
        """
        unit, squares = unit_roundoff(dtype), products.square()
        variance = (rows * products).sum(-1)
        rounding = 2 * unit * (rows.square() * squares).sum(-1).sqrt() + unit**2 * (rows.square() @ marginal)
        informed = (variance - squares @ prior).clamp_min(0.0)
        spread = squares @ curvature.clamp_min(0.0)
        changed = spread if inside is None else inside.square() @ curvature.clamp_min(0.0)
        data = 2 * unit * (informed * spread / size.effective).sqrt() + unit**2 * changed
        return VarianceErrors(dtype, variance, {"gradients": rounding + data})

    def warn(self, arithmetic: torch.dtype = torch.float64) -> None:
        """Warns if more than half of the digits of a variance may be gone.

        Args:
            arithmetic: The precision of the matrix that was decomposed.
        """
        total = torch.stack(list(self.errors.values())).sum(0) / self.variance
        unclear = total > digits_tolerance(self.dtype)
        if not bool(unclear.any()):
            return
        worst = int(torch.where(unclear, total, 0.0).argmax())
        cause = max(self.errors, key=lambda name: float(self.errors[name].flatten()[worst]))
        name = str(arithmetic if cause == "decomposition" else self.dtype).removeprefix("torch.")
        have = -math.log10(torch.finfo(self.dtype).eps)
        digits = max(0.0, -math.log10(float(total.flatten()[worst])))
        if cause == "gradients":
            reason = f"their gradients and those of the data are rounded to {name}"
        elif cause == "eigenpairs":
            reason = f"the eigenpairs of the curvature come from products in {name}"
        else:
            reason = f"the decomposition in {name} cannot tell small eigenvalues of the curvature from the prior"
        double = "Compute in double precision (model.double() and data in float64), or use"
        advice = "Use" if name == "float64" else double
        warn_caller(
            f"the variance of {int(unclear.sum())} of {unclear.numel()} outputs may have lost more than half of its digits: of {have:.0f} about "
            f"{digits:.0f} are left where it is worst, because the prior is weak beside the curvature and {reason}. {advice} a larger "
            "prior precision",
            NumericalWarning,
        )
