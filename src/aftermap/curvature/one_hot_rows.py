"""Rows that are one-hot: what a layer that looks things up (an embedding) is a matrix on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.curvature.gram_sum import GramSum
from aftermap.curvature.rows import MatrixRows

__all__ = ["OneHotRows"]


@dataclass(frozen=True)
class OneHotRows(MatrixRows):
    """Rows that are one-hot (embeddings): only the index is kept, Σ a aᵀ is the diagonal of counts.

    Attributes:
        index: [b, t] integer; a negative index is a row of zeros (padding).
        features: vocabulary.
    """

    index: Tensor
    features: int
    dtype: torch.dtype
    groups: int = 1

    @property
    def batch(self) -> int:  # type: ignore[override]
        return self.index.shape[0]

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.index.shape[1]

    def add_gram_(self, out: GramSum, weight: Tensor | None = None) -> None:
        used = self.index >= 0
        counts = None if weight is None else weight[:, None].expand_as(self.index)[used].to(torch.float64)
        out.add_diagonal(torch.bincount(self.index[used], counts, minlength=self.features)[None])

    def total(self) -> Tensor:
        out = torch.zeros(self.batch, self.features, dtype=self.dtype, device=self.index.device)
        ones = (self.index >= 0).to(self.dtype)
        return out.scatter_add_(1, self.index.clamp_min(0), ones)[:, None]

    def outer(self, grads: Tensor) -> Tensor:
        vectors, batch, _, shared, out = grads.shape
        result = grads.new_zeros(vectors, batch, self.features, out)
        used = (self.index >= 0).to(grads.dtype)[None, :, :, None]
        place = self.index.clamp_min(0)[None, :, :, None].expand(vectors, batch, shared, out)
        result.scatter_add_(2, place, grads[:, :, 0] * used)
        return result.transpose(2, 3)[:, :, None]

    def add_outer_squared_(self, out: Tensor, grads: Tensor) -> None:
        # Sum what one example says about one token, square, then sum over examples: never [b, vocabulary, o].
        used = self.index >= 0
        numbers = self.index + self.features * torch.arange(self.batch, device=self.index.device)[:, None]
        whole = bool(used.all())
        pairs, place = torch.unique(numbers.flatten() if whole else numbers[used], return_inverse=True)
        for each in grads[:, :, 0]:  # [b, t, o]
            lines = each.flatten(0, 1) if whole else each[used]
            sums = each.new_zeros(len(pairs), each.shape[-1]).index_add_(0, place, lines)
            result = grads.new_zeros(self.features, grads.shape[-1])  # at most b terms are added one after the other
            out[0].add_(result.index_add_(0, pairs % self.features, sums.square_()).T)

    def outer_moments(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        used = self.index >= 0
        total = grads.new_zeros(self.features, grads.shape[-1])
        for each in grads[:, :, 0]:  # [b, t, o]
            total.index_add_(0, self.index[used], each[used])
        squares = grads.new_zeros(1, grads.shape[-1], self.features)
        self.add_outer_squared_(squares, grads)
        return total.T[None], squares

    def narrow(self, start: int, length: int) -> OneHotRows:
        return OneHotRows(self.index[start : start + length], self.features, self.dtype)
