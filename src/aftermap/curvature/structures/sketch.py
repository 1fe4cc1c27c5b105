"""A few directions that stand for a whole eigenbasis where variances need not be exact.

The variance of an output due to a Kronecker block is Σ_oi g̃_o² R_oi ã_i² with g̃ = U_Bᵀ g and ã = U_Aᵀ a, and the two rotations are
most of its cost. Directions whose eigenvalues are close have nearly the same variances R, so that only the sum of their squares
matters, the squared norm of a projection. With Q [n, r] orthonormal and random,

    ‖x‖² ≈ (n / r) ‖Qᵀ x‖²,

without bias, and with a relative standard deviation of at most √(2/r) (Johnson & Lindenstrauss 1984). So every octave of eigenvalues
is kept as it is where it has few directions, and seen through r random ones where it has many.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["DIRECTIONS", "sketch_basis"]

DIRECTIONS = 16  # that an octave of eigenvalues is seen through
_WORTH = 0.7  # of the directions: a sketch with more of them saves too little


def sketch_basis(vectors: Tensor, values: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Returns fewer directions that stand for those of an eigenbasis, and which of them each one stands for.

    Args:
        vectors: The eigenvectors [n, n], in columns.
        values: Their eigenvalues [n], not negative.
        least: The eigenvalue below which differences do not matter.

    Returns:
        The directions [n, m], scaled so that their squares add up to those that they stand for, and weights [m, n] whose rows
        average over these; the basis itself with the identity where a sketch would not be much smaller.

    >>> directions, weights = sketch_basis(torch.eye(64), torch.ones(64), 0.1)
    >>> directions.shape, weights.sum(1).unique().tolist()
    (torch.Size([64, 16]), [1.0])
    >>> round(float(directions.square().sum()), 3)
    64.0
    """
    octaves = values.clamp_min(least).log2().floor()
    generator = torch.Generator().manual_seed(0)  # The same posterior always has the same sketch.
    directions, weights = [], []
    for octave in octaves.unique():
        members = (octaves == octave).nonzero()[:, 0]
        n = len(members)
        if n <= DIRECTIONS:
            directions.append(vectors[:, members])
            weights.append(torch.eye(len(values), dtype=values.dtype, device=values.device)[members])
            continue
        normal = torch.randn(n, DIRECTIONS, generator=generator, dtype=torch.float64)
        mixed = torch.linalg.qr(normal)[0] * math.sqrt(n / DIRECTIONS)
        directions.append(vectors[:, members] @ mixed.to(vectors))
        weights.append(((octaves == octave).to(values) / n).expand(DIRECTIONS, -1))
    if sum(d.shape[1] for d in directions) > _WORTH * len(values):
        return vectors, torch.eye(len(values), dtype=values.dtype, device=values.device)
    return torch.cat(directions, 1), torch.cat(weights)
