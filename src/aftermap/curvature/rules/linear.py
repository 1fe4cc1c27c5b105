"""Linear layers and embeddings: a matrix on dense rows, and a matrix on rows that are one-hot."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.curvature.rules.base import (
    MOMENT_NUMBERS,
    InputRows,
    LayerRule,
    Layout,
    MatrixRows,
    Named,
    append_ones,
    examples_per_chunk,
    matrix_layout,
    merge_vectors,
    register,
    split_vectors,
)
from aftermap.linalg import GramSum, add_product_

__all__ = ["DenseRows", "EmbeddingRule", "LinearRule", "OneHotRows"]


@dataclass(frozen=True)
class DenseRows(MatrixRows):
    """Input rows that are there as a tensor.

    Attributes:
        data: The rows [b, g, t, i] without the ones. No features at all (i = 0) means that only a bias is selected.
        ones: Whether a trailing 1 belongs to each row, because a bias belongs to the block.
        only_group: The one group that this call concerns, where the others hold zeros; None where it concerns all.
        reused: Whether several vectors will meet the rows, so that what is computed from them is cached.
    """

    data: Tensor
    ones: bool
    only_group: int | None = None
    reused: bool = False

    @property
    def batch(self) -> int:  # type: ignore[override]
        return self.data.shape[0]

    @property
    def groups(self) -> int:  # type: ignore[override]
        return self.data.shape[1]

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.data.shape[2]

    @property
    def features(self) -> int:  # type: ignore[override]
        return self.data.shape[3] + int(self.ones)

    def positions_per_group(self) -> tuple[int, ...]:
        return tuple(self.shared if self.only_group in (None, g) else 0 for g in range(self.groups))

    def dense(self) -> Tensor:
        """Returns the rows with the ones: [b, g, t, i]."""
        return append_ones(self.data) if self.ones else self.data

    def add_gram_(self, out: GramSum, weight: Tensor | None = None) -> None:
        if weight is not None:
            root = weight.to(self.data.dtype).sqrt()[:, None, None, None]
            DenseRows(self.dense() * root, ones=False).add_gram_(out)
            return
        rows = self.data.transpose(0, 1).flatten(1, 2)  # [g, bt, i]
        out.add(rows)
        if self.ones:
            out.add_ones(rows.sum(1, dtype=out.dtype), rows.shape[1])

    def sum_over_positions(self) -> Tensor:
        summed = self.data.sum(2)
        return torch.cat([summed, summed.new_full((*summed.shape[:-1], 1), self.shared)], -1) if self.ones else summed

    def per_example_gradients(self, grads: Tensor) -> Tensor:
        if self.shared == 1:
            return grads[:, :, :, 0, :, None] * self.dense()[:, :, 0, None, :]
        lines = merge_vectors(grads)  # [b, g, v·o, t]
        if not self.ones:
            return split_vectors(self._products(lines, self.data), len(grads))
        # The bias column is a sum: cheaper than a copy of the rows with ones.
        result = lines.new_empty(*lines.shape[:-1], self.features)
        result[..., :-1] = self._products(lines, self.data)
        torch.sum(lines, -1, out=result[..., -1])
        return split_vectors(result, len(grads))

    def _products(self, lines: Tensor, data: Tensor) -> Tensor:
        """Multiplies [b, g, o, t] by [b, g, t, i].

        Groups that share their rows, those of a packed projection, go into one product without copies.
        """
        if self.groups == 1 or data.stride(1) != 0:
            return lines @ data
        return (lines.flatten(1, 2) @ data[:, 0]).unflatten(1, lines.shape[1:3])

    def add_squares_(self, out: Tensor, grads: Tensor) -> None:
        if self.shared > 1:
            self._add_shared_moments_(None, out, grads)
            return
        # Without sharing Σ_vb g² a² is one matrix product per group: no per-example tensor exists.
        weights = grads[:, :, :, 0].square().sum(0).transpose(0, 1)  # [g, b, o]
        rows = self._squares if self.reused else self._squared()
        for group in range(self.groups):
            add_product_(out[group], weights[group], rows[group])

    def _squared(self) -> Tensor:
        """Returns the squares of rows that are not shared over positions: [g, b, i]."""
        return self.dense()[:, :, 0].square().transpose(0, 1)

    @cached_property
    def _squares(self) -> Tensor:
        return self._squared()

    def cached(self) -> DenseRows:
        return replace(self, reused=True)

    def moments(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        vectors, _, groups, _, out = grads.shape
        width = self.data.shape[-1]
        total = grads.new_zeros(groups, out, self.features)
        squares = torch.zeros_like(total)
        if self.shared > 1:
            self._add_shared_moments_(total, squares, grads)
            return total, squares
        for g in range(groups):
            rows, lines = self.data[:, g, 0], grads[:, :, g, 0]  # [b, i], [v, b, o]
            summed = lines[0] if vectors == 1 else lines.sum(0)
            squared = lines[0].square() if vectors == 1 else lines.square().sum(0)
            if width:
                torch.mm(summed.T, rows, out=total[g, :, :width])
                torch.mm(squared.T, rows.square(), out=squares[g, :, :width])
            if self.ones:
                total[g, :, width] = summed.sum(0)
                squares[g, :, width] = squared.sum(0)
        return total, squares

    def _add_shared_moments_(self, total: Tensor | None, squares: Tensor, grads: Tensor) -> None:
        """Adds Σ_vb G (if it is asked for) and Σ_vb G²: weights and bias apart, which saves a copy of every product."""
        vectors, out, width = grads.shape[0], grads.shape[-1], self.data.shape[-1]
        step = examples_per_chunk(vectors * self.groups * out * max(1, width), MOMENT_NUMBERS)
        for start in range(0, self.batch, step):
            lines = merge_vectors(grads[:, start : start + step])  # [b, g, v·o, t]
            parts = []
            if width:
                parts.append((slice(0, width), self._products(lines, self.data[start : start + step])))
            if self.ones:
                parts.append((slice(width, None), lines.sum(-1, keepdim=True)))
            for columns, part in parts:
                gradients = part if vectors == 1 else part.unflatten(2, (vectors, out)).transpose(1, 2).flatten(0, 1)
                if total is not None:
                    total[..., columns].add_(gradients.sum(0))
                squares[..., columns].add_(gradients.square_().sum(0))

    def examples(self, start: int, length: int) -> DenseRows:
        return DenseRows(self.data[start : start + length], self.ones, self.only_group)


@dataclass(frozen=True)
class OneHotRows(MatrixRows):
    """Input rows that are one-hot, those of an embedding: an index stands for each, and Σ a aᵀ is a diagonal of counts.

    Attributes:
        index: The index of the 1 in every row [b, t]; a negative index stands for a row of zeros (padding).
        features: The size of the vocabulary.
        dtype: The dtype of sums of rows.
        groups: The number of groups, which is one.
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

    def sum_over_positions(self) -> Tensor:
        out = torch.zeros(self.batch, self.features, dtype=self.dtype, device=self.index.device)
        ones = (self.index >= 0).to(self.dtype)
        return out.scatter_add_(1, self.index.clamp_min(0), ones)[:, None]

    def per_example_gradients(self, grads: Tensor) -> Tensor:
        vectors, batch, _, shared, out = grads.shape
        result = grads.new_zeros(vectors, batch, self.features, out)
        used = (self.index >= 0).to(grads.dtype)[None, :, :, None]
        place = self.index.clamp_min(0)[None, :, :, None].expand(vectors, batch, shared, out)
        result.scatter_add_(2, place, grads[:, :, 0] * used)
        return result.transpose(2, 3)[:, :, None]

    def add_squares_(self, out: Tensor, grads: Tensor) -> None:
        # The gradients of one example for one token are summed and squared, and only then summed over examples: a tensor
        # [b, vocabulary, o] never exists.
        used = self.index >= 0
        numbers = self.index + self.features * torch.arange(self.batch, device=self.index.device)[:, None]
        whole = bool(used.all())
        pairs, place = torch.unique(numbers.flatten() if whole else numbers[used], return_inverse=True)
        for vector in grads[:, :, 0]:  # [b, t, o]
            lines = vector.flatten(0, 1) if whole else vector[used]
            sums = vector.new_zeros(len(pairs), vector.shape[-1]).index_add_(0, place, lines)
            result = grads.new_zeros(self.features, grads.shape[-1])  # at most b terms are added one after the other
            out[0].add_(result.index_add_(0, pairs % self.features, sums.square_()).T)

    def moments(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        used = self.index >= 0
        total = grads.new_zeros(self.features, grads.shape[-1])
        for vector in grads[:, :, 0]:  # [b, t, o]
            total.index_add_(0, self.index[used], vector[used])
        squares = grads.new_zeros(1, grads.shape[-1], self.features)
        self.add_squares_(squares, grads)
        return total.T[None], squares

    def examples(self, start: int, length: int) -> OneHotRows:
        return OneHotRows(self.index[start : start + length], self.features, self.dtype)


@register(nn.Linear)
class LinearRule(LayerRule):
    """y = W x + b, applied to the last dimension of an input with any number of leading dimensions."""

    leading = True

    def layout(self, name: str, module: Any, named: Named) -> Layout:
        _, first = next(iter(named.values()))
        out = first.shape[0]
        return matrix_layout(name, named, 1, out, (1, out, first.numel() // out), (0, 1, 2))

    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Named) -> InputRows:
        data = inputs.reshape(inputs.shape[0], 1, math.prod(inputs.shape[1:-1]), inputs.shape[-1])
        return DenseRows(data if "weight" in named else data[..., :0], "bias" in named)

    def grads(self, module: Any, grads: Tensor) -> Tensor:
        return grads.reshape(*grads.shape[:2], 1, -1, grads.shape[-1])


@register(nn.Embedding)
class EmbeddingRule(LayerRule):
    """A table, which is a linear map of one-hot rows; of these only the index is stored."""

    leading = True
    one_hot = True

    def unsupported(self, module: Any) -> str | None:
        return "max_norm changes the weights in every forward pass" if module.max_norm is not None else None

    def layout(self, name: str, module: Any, named: Named) -> Layout:
        _, weight = named["weight"]
        words, out = weight.shape
        return matrix_layout(name, named, 1, out, (1, words, out), (0, 2, 1))

    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Named) -> InputRows:
        _, weight = named["weight"]
        index = inputs.reshape(inputs.shape[0], -1).long()
        padding = module.padding_idx
        if padding is not None:
            index = index.masked_fill(index == padding, -1)
        return OneHotRows(index, weight.shape[0], weight.dtype)

    def grads(self, module: Any, grads: Tensor) -> Tensor:
        return grads.reshape(*grads.shape[:2], 1, -1, grads.shape[-1])
