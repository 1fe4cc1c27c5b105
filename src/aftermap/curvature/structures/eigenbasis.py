"""The eigenbasis of Kronecker factors: decomposed in float64, shared out over processes, with the damped eigenvalues in it.

With A = U_A diag(λ) U_Aᵀ and B = U_B diag(μ) U_Bᵀ the matrix B ⊗ A is diagonal in the basis U_B ⊗ U_A. Structures, their
posteriors and the K-FAC optimisers all work there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap import checks
from aftermap.distributed import distribute_work
from aftermap.linalg import psd_eigh

__all__ = ["DAMPINGS", "Eigen", "KroneckerEigenbasis", "damped_eigenvalues", "eigendecompose"]

DAMPINGS = ("exact", "factored", "pi")
# Eigenvalues [..., D] are ascending, and eigenvectors [..., D, D] stand in columns.
Eigen = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class KroneckerEigenbasis:
    """The basis U_B ⊗ U_A of a layer's Kronecker factors.

    Attributes:
        inputs: The eigenvectors U_A [g, i, i]; None for the identity (one-hot inputs, whose factor is diagonal).
        outputs: The eigenvectors U_B [g, o, o].

    >>> turn = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    >>> KroneckerEigenbasis(turn, turn).rotate(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    tensor([[[4., 3.],
             [2., 1.]]])
    """

    inputs: Tensor | None
    outputs: Tensor

    def rotate(self, block: Tensor) -> Tensor:
        """Returns U_Bᵀ W U_A for a block of weights W [..., g, o, i], in its dtype."""
        rotated = self.outputs.to(block.dtype).transpose(-1, -2) @ block
        return rotated if self.inputs is None else rotated @ self.inputs.to(block.dtype)

    def rotate_back(self, rotated: Tensor) -> Tensor:
        """Returns U_B W U_Aᵀ, which undoes `rotate`."""
        block = self.outputs.to(rotated.dtype) @ rotated
        return block if self.inputs is None else block @ self.inputs.to(rotated.dtype).transpose(-1, -2)

    def diagonal(self, values: Tensor) -> Tensor:
        """Returns the diagonal of (U_B ⊗ U_A) diag(values) (U_B ⊗ U_A)ᵀ for values [g, o, i], in float64 and in the same shape."""
        diagonal = self.outputs.to(torch.float64).square() @ values
        if self.inputs is None:
            return diagonal
        return diagonal @ self.inputs.to(torch.float64).square().transpose(-1, -2)

    def to(self, dtype: torch.dtype) -> KroneckerEigenbasis:
        """Returns the same basis in another precision."""
        return KroneckerEigenbasis(None if self.inputs is None else self.inputs.to(dtype), self.outputs.to(dtype))


def eigendecompose(
    matrices: list[tuple[str, Tensor]], dtype: torch.dtype = torch.float64, *, release: bool = False
) -> list[Eigen]:
    """Returns eigendecompositions of positive semi-definite matrices, in float64.

    Over several processes they are shared out by cost (width³), and all processes get all results.

    Args:
        matrices: Pairs of a name for messages ("the output factor of conv1") and a matrix [g, D, D].
        dtype: The precision of the results.
        release: Whether to empty the list on the way. If nobody else holds a matrix, it is let go as soon as its
            decomposition exists, so that never both exist of all layers.

    Returns:
        For each matrix its eigenvalues [g, D] and eigenvectors [g, D, D].

    Raises:
        NumericalError: A matrix is not finite, or further from being positive semi-definite than rounding explains.

    >>> [(values, vectors)] = eigendecompose([("a factor", torch.diag(torch.tensor([1.0, 4.0]))[None])])
    >>> values
    tensor([[1., 4.]], dtype=torch.float64)
    """
    waiting = dict(enumerate(matrices))
    if release:
        matrices.clear()
    if not waiting:
        return []
    costs = [float(m.shape[0] * m.shape[-1] ** 3) for _, m in waiting.values()]
    shapes = [[tuple(m.shape[:-1]), tuple(m.shape)] for _, m in waiting.values()]
    like = torch.empty(0, dtype=dtype, device=waiting[0][1].device)

    def work(number: int) -> list[Tensor]:
        name, matrix = waiting.pop(number)
        return [t.to(dtype) for t in psd_eigh(matrix, what=name)]

    return [(values, vectors) for values, vectors in distribute_work(costs, shapes, work, like)]


def damped_eigenvalues(
    mu: Tensor,
    lam: Tensor,
    *,
    scale: float | Tensor = 1.0,
    prior: float | Tensor,
    damping: str = "exact",
    n_data: float = 1.0,
) -> Tensor:
    """Returns the eigenvalues of s · B ⊗ A + δ I, or of a Kronecker product that stands for it.

    - "exact": s μ_i λ_j + δ.
    - "factored": (√(s/N) μ_i + √δ)(√(sN) λ_j + √δ) (Ritter et al. 2018, eq. 9, with B/N and A as means over data).
    - "pi": (√(s/N) μ_i + √δ/π)(√(sN) λ_j + π√δ), where π² is the ratio of the mean eigenvalues of the two factors, so that
      scaling A up and B down changes nothing (Martens & Grosse 2015, section 6.3).

    Args:
        mu: The eigenvalues of B [g, o].
        lam: The eigenvalues of A [g, i].
        scale: The factor s of the curvature.
        prior: The prior's precision δ; for an optimiser its damping as well.
        damping: The kind of damping, one of the three.
        n_data: The number N of data, if B is a sum over so many; 1 for means. Only "factored" depends on it.

    Returns:
        The eigenvalues [g, o, i].

    >>> damped_eigenvalues(torch.tensor([[2.0]]), torch.tensor([[3.0]]), prior=4.0, damping="factored")
    tensor([[[20.]]])
    """
    checks.choice("damping", damping, DAMPINGS)
    s, delta = (torch.as_tensor(v, dtype=mu.dtype, device=mu.device) for v in (scale, prior))
    if damping == "exact":
        return s * (mu[:, :, None] * lam[:, None, :]) + delta
    left, right = (s / n_data).sqrt() * mu, (s * n_data).sqrt() * lam
    root = delta.sqrt()
    pi = torch.ones_like(left[:, :1])
    if damping == "pi":
        left_mean, right_mean = left.mean(1, keepdim=True), right.mean(1, keepdim=True)
        alive = (right_mean > 0) & (left_mean > 0)  # Otherwise the block is zero, and the prior stays as it is.
        pi = torch.where(alive, right_mean / torch.where(alive, left_mean, 1.0), 1.0).sqrt()
        left, right = left * alive, right * alive
    return (left + root / pi)[:, :, None] * (right + root * pi)[:, None, :]
