"""Sums of outer products, of which only one triangle is computed and held while data pass by."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from aftermap.linalg import add_product_

__all__ = ["GramSum"]

# Rows of a strip: narrower ones save more of the lower triangle, but make thinner products (measured on CPU).
_STRIP = 128


class GramSum:
    """Σ x xᵀ [g, D, D] as strips: rows s..e of the matrix with the columns s..D, so little more than half of it.

    Args:
        groups: g.
        width: D.
        dtype, device: of the sums.
        diagonal: only the diagonal [g, D] is wanted (one-hot rows).

    >>> x = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    >>> sums = GramSum(1, 2, torch.float32, torch.device("cpu"))
    >>> sums.add(x[None])
    >>> sums.full()
    tensor([[[1., 2.],
             [2., 5.]]])
    """

    def __init__(self, groups: int, width: int, dtype: torch.dtype, device: torch.device, *, diagonal: bool = False):
        self.groups, self.width, self.dtype, self.device = groups, width, dtype, device
        self.diagonal = torch.zeros(groups, width, dtype=dtype, device=device) if diagonal else None
        # Strips of even size: a narrow last one would be a thin product.
        count = max(1, round(width / _STRIP))
        ends = [width * k // count for k in range(count + 1)]
        self.bounds = [] if diagonal else list(pairwise(ends))
        self.strips = [torch.zeros(groups, e - s, width - s, dtype=dtype, device=device) for s, e in self.bounds]

    def add(self, rows: Tensor, group: int | None = None) -> None:
        """Adds the outer products of rows [g, R, w], or [R, w] of one group; w ≤ D features, the first ones."""
        width = rows.shape[-1]
        if group is None and self.groups == 1:
            rows, group = rows[0], 0
        for (start, end), strip in zip(self.bounds, self.strips, strict=True):
            if start < width:
                block = strip[:, : min(end, width) - start, : width - start]
                add_product_(block if group is None else block[group], rows[..., start:end], rows[..., start:])

    def add_products(self, products: Tensor) -> None:
        """Adds whole matrices [g, D, D]."""
        for (start, end), strip in zip(self.bounds, self.strips, strict=True):
            strip += products[:, start:end, start:]

    def add_ones(self, sums: Tensor, count: float) -> None:
        """Adds what a last feature that is always 1 makes of ``count`` rows whose other features sum to [g, D − 1]."""
        for (start, end), strip in zip(self.bounds, self.strips, strict=True):
            part = sums[:, start:end]
            strip[:, : part.shape[1], -1].add_(part)
        self.strips[-1][:, -1, -1].add_(count)

    def add_diagonal(self, values: Tensor) -> None:
        """Adds to the diagonal [g, D], where nothing else is held."""
        assert self.diagonal is not None
        self.diagonal += values

    def full(self) -> Tensor:
        """The symmetric matrices [g, D, D], or their diagonal [g, D]. Once: the strips are given up on the way."""
        if self.diagonal is not None:
            return self.diagonal
        found = torch.empty(self.groups, self.width, self.width, dtype=self.dtype, device=self.device)
        for start, end in reversed(self.bounds):
            strip = self.strips.pop()
            found[:, start:end, end:] = strip[:, :, end - start :]
            found[:, end:, start:end] = strip[:, :, end - start :].transpose(-1, -2)
            corner = strip[:, :, : end - start]
            # The products of a square block may differ in their last digit across the diagonal.
            found[:, start:end, start:end] = corner.triu() + corner.triu(1).transpose(-1, -2)
        return found
