"""Draws from a Kronecker block whose data leave many directions to the prior.

With fewer data than a layer is wide, most eigenvalues of its factors are zero, and there the standard deviation is the
prior's, c = δ^{-1/2}. A standard normal matrix E looks the same in every basis, so

    W = c·E + U_R ((T − c) ∘ (U_Rᵀ E V_C)) V_Cᵀ,        T_ij the standard deviation in eigen-direction (i, j),

is a draw from the block, exactly, where R and C are the directions in which T differs from c. Only these are rotated.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["Informed", "rotation_costs"]


def rotation_costs(rows: int, columns: int, out: int, into: int) -> tuple[int, int]:
    """Multiplications of one draw of [o, i] with r × c informed directions: the outer side first, or the inner one.

    >>> rotation_costs(1, 2, 3, 4)
    (40, 60)
    """
    return 2 * rows * into * (out + columns), 2 * columns * out * (into + rows)


class Informed:
    """The directions that data inform.

    Args:
        outer: U_R [g, o, r].
        inner: V_C [g, i, c].
        prior_deviation: c, 0-d.
        deviations: T of these directions [g, r, c].

    >>> import torch
    >>> eye = torch.eye(3)[None]
    >>> one = Informed(eye[:, :, :1], eye[:, :, :2], torch.tensor(2.0), torch.tensor([[[0.5, 1.0]]]))
    >>> drawn = torch.empty(1, 1, 3, 3)
    >>> one.draw(torch.ones(1, 1, 3, 3), [(slice(0, 3), drawn)])
    >>> drawn[0, 0]
    tensor([[0.5000, 1.0000, 2.0000],
            [2.0000, 2.0000, 2.0000],
            [2.0000, 2.0000, 2.0000]])
    """

    def __init__(self, outer: Tensor, inner: Tensor, prior_deviation: Tensor, deviations: Tensor):
        self.outer, self.inner = outer, inner
        self.prior_deviation, self.change = prior_deviation, deviations - prior_deviation

    def draw(self, noise: Tensor, parts: Sequence[tuple[slice, Tensor]]) -> None:
        """Writes the columns of draws that ``noise`` [s, g, o, i] makes into each part's tensor [s, g, o, columns]."""
        outer_first, inner_first = rotation_costs(*self.change.shape[1:], *noise.shape[-2:])
        back = self.outer.transpose(-1, -2)
        if outer_first < inner_first:
            middle = (back @ noise) @ self.inner * self.change
        else:
            middle = self.outer @ (back @ (noise @ self.inner) * self.change)
        for columns, out in parts:
            out.copy_(noise[..., columns]).mul_(self.prior_deviation)
            turned = middle @ self.inner[:, columns].transpose(-1, -2)
            out += self.outer @ turned if outer_first < inner_first else turned
