"""The equations of a Kronecker-factored (matrix-normal) posterior.

With A = E[a aᵀ] (inputs of a layer), B = E[g gᵀ] (its output gradients) and row-major vec(W), the curvature of the mean
loss is B ⊗ A (group by group), and Σ = (τ/N) (B ⊗ A + (c + γ) I)⁻¹. In the eigenbases A = U_A a U_Aᵀ, B = U_B b U_Bᵀ all
of it is elementwise in D = b aᵀ + c + γ ("exact"), or in D = (b + √(c+γ)/π)(a + π√(c+γ))ᵀ ("factored", which makes Σ a matrix
normal: MN(μ, B̃⁻¹, Ã⁻¹)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from aftermap.distributed import shared_out
from aftermap.linalg import psd_eigh

__all__ = ["DAMPING_FORMS", "Basis", "decompose", "deviation", "eigenvalues", "precondition"]

DAMPING_FORMS = ("exact", "factored")


@dataclass(frozen=True)
class Basis:
    """Eigendecompositions of a layer's factors.

    Attributes:
        inputs: U_A [g, i, i].
        outputs: U_B [g, o, o].
        input_values: a [g, i].
        output_values: b [g, o].
    """

    inputs: Tensor
    outputs: Tensor
    input_values: Tensor
    output_values: Tensor


def decompose(factors: Sequence[tuple[Tensor, Tensor]]) -> list[Basis]:
    """Eigendecompositions of (A, B) of each layer, in float64; over several processes each does its share."""
    if not factors:
        return []
    matrices = [m for pair in factors for m in pair]

    def work(number: int) -> list[Tensor]:
        values, vectors = psd_eigh(matrices[number], what="a Kronecker factor")
        return [values.to(matrices[number].dtype), vectors.to(matrices[number].dtype)]

    costs = [float(m.shape[0] * m.shape[-1] ** 3) for m in matrices]
    shapes = [[tuple(m.shape[:2]), tuple(m.shape)] for m in matrices]
    done = shared_out(costs, shapes, work, matrices[0])
    return [Basis(done[i][1], done[i + 1][1], done[i][0], done[i + 1][0]) for i in range(0, len(matrices), 2)]


def eigenvalues(basis: Basis, damping: float, form: str) -> Tensor:
    """D [g, o, i]: the curvature with prior and damping (c + γ) in the eigenbasis."""
    a, b = basis.input_values[:, None, :], basis.output_values[:, :, None]
    if form == "exact":
        return b * a + damping
    mean_a, mean_b = a.mean(-1, keepdim=True), b.mean(-2, keepdim=True)
    # π balances the two sides, so that scaling A up and B down changes nothing (Martens & Grosse 2015, section 6.3).
    ratio = (mean_a.clamp_min(1e-30) / mean_b.clamp_min(1e-30)).sqrt()
    root = damping**0.5
    return (b + root / ratio) * (a + root * ratio)


def precondition(basis: Basis, block: Tensor, below: Tensor) -> Tensor:
    """U_B ((U_Bᵀ M U_A) / D) U_Aᵀ of a block M [g, o, i]: the natural gradient."""
    rotated = basis.outputs.transpose(-1, -2) @ block @ basis.inputs
    return basis.outputs @ (rotated / below) @ basis.inputs.transpose(-1, -2)


def deviation(basis: Basis, noise: Tensor, below: Tensor, scale: float) -> Tensor:
    """scale · U_B (Z / √D) U_Aᵀ for standard normal Z [g, o, i]: covariance scale² (U_B ⊗ U_A) D⁻¹ (U_B ⊗ U_A)ᵀ."""
    # Z is isotropic, so it needs no rotation of its own (MATH 1.6).
    return scale * (basis.outputs @ (noise / below.sqrt()) @ basis.inputs.transpose(-1, -2))
