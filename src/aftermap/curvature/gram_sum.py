"""Sums of outer products, of which only one triangle is computed and held while data pass by."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from aftermap.linalg import TERMS_PER_PART, RunningSum, add_product_

__all__ = ["GramSum"]

# Rows of a strip: narrower ones save more of the lower triangle, but make thinner products (measured on CPU).
_STRIP = 128
# Strips start, and their rows lie, at multiples of so many numbers: products into other places are slower (measured on CPU).
_ALIGNED = 16


class GramSum:
    """Σ x xᵀ [g, D, D] as strips: rows s..e of the matrix with the columns s..D, so little more than half of it.

    Args:
        groups: g.
        width: D.
        dtype, device: of the sums; see `RunningSum` for how they keep their digits.
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
        self.diagonal = torch.zeros(groups, width, dtype=torch.float64, device=device) if diagonal else None
        # Strips of even size: a narrow last one would be a thin product.
        count = max(1, round(width / _STRIP))
        ends = [round(width * k / count / _ALIGNED) * _ALIGNED for k in range(count)]
        self.bounds = [] if diagonal else list(pairwise([*ends, width]))
        self.strips = RunningSum([_strip(groups, e - s, width - s, dtype, device) for s, e in self.bounds])
        self._views: dict[tuple[int, int | None], list[tuple[int, int, Tensor]]] = {}
        self._ones: Tensor | None = None  # [g, D − 1] in float64: what a last feature that is always 1 adds, with ...
        self._count = 0.0  # ... so many rows

    def add(self, rows: Tensor, group: int | None = None) -> None:
        """Adds the outer products of rows [g, R, w], or [R, w] of one group; w ≤ D features, the first ones."""
        if group is None and self.groups == 1:
            rows, group = rows[0], 0
        for some in rows.split(TERMS_PER_PART, -2):
            self.strips.room_for(some.shape[-2])
            for start, end, block in self._blocks(rows.shape[-1], group):
                add_product_(block, some[..., start:end], some[..., start:])

    def _blocks(self, width: int, group: int | None) -> list[tuple[int, int, Tensor]]:
        """(first row, row behind the last, view) of every strip for so many features; made once, as data come in many parts."""
        key = (width, group)
        if key not in self._views:
            self._views[key] = [
                (
                    start,
                    min(end, width),
                    (strip if group is None else strip[group])[..., : width - start, : width - start],
                )
                for (start, end), strip in zip(self.bounds, self.strips.parts, strict=True)
                if start < width
            ]
        return self._views[key]

    def add_products(self, products: Tensor) -> None:
        """Adds whole matrices [g, D, D]."""
        for (start, end), strip in zip(self.bounds, self.strips.room_for(1), strict=True):
            strip += products[:, start:end, start:]

    def add_ones(self, sums: Tensor, count: float) -> None:
        """Adds what a last feature that is always 1 makes of ``count`` rows whose other features sum to [g, D − 1]."""
        self._ones = sums.to(torch.float64, copy=True) if self._ones is None else self._ones.add_(sums)
        self._count += count

    def add_diagonal(self, values: Tensor) -> None:
        """Adds to the diagonal [g, D], where nothing else is held."""
        assert self.diagonal is not None
        self.diagonal += values

    def full(self) -> Tensor:
        """The symmetric matrices [g, D, D], or their diagonal [g, D]. Once: the strips are given up on the way."""
        if self.diagonal is not None:
            return self.diagonal.to(self.dtype)
        self._views.clear()
        found = torch.empty(self.groups, self.width, self.width, dtype=self.dtype, device=self.device)
        for start, end in reversed(self.bounds):
            strip = self.strips.take()
            if self._ones is not None:
                part = self._ones[:, start:end]
                strip[:, : part.shape[1], -1].add_(part)
                strip[:, part.shape[1] :, -1].add_(self._count)  # the last row of the last strip
            found[:, start:end, end:] = strip[:, :, end - start :]
            found[:, end:, start:end] = strip[:, :, end - start :].transpose(-1, -2)
            corner = strip[:, :, : end - start]
            # The products of a square block may differ in their last digit across the diagonal.
            found[:, start:end, start:end] = corner.triu() + corner.triu(1).transpose(-1, -2)
        return found


def _strip(groups: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [g, rows, columns] whose rows are a multiple of ``_ALIGNED`` numbers apart."""
    apart = -(-columns // _ALIGNED) * _ALIGNED
    return torch.zeros(groups, rows, apart, dtype=dtype, device=device)[..., :columns]
