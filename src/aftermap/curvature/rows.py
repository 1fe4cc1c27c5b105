"""The input side of a layer call in the one format [batch, group, shared, features], and what is summed over it.

Index legend: b example, v back-propagated vector, g group, t shared position, i feature in, o feature out.

A layer call is affine in its block: y[b,g,t,o] = Σ_i W[g,o,i] a[b,g,t,i]. So for an output gradient g the block's
per-example gradient is

    G[v,b,g] = Σ_t g[v,b,g,t] a[b,g,t]ᵀ          (the sum over t before any square: MATH 1.2)

and every curvature is a contraction of a and g. A `Rows` knows its a, in the cheapest form, and does these contractions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from aftermap.curvature.gram_sum import GramSum
from aftermap.linalg import add_product_

__all__ = [
    "DenseRows",
    "MatrixRows",
    "Rows",
    "ScaleRows",
    "append_ones",
    "budget",
    "merged_vectors",
    "split_vectors",
    "sum_into_",
]

# Working memory of one contraction, in numbers: large enough to keep the cores busy, small enough for the cache.
_CHUNK_NUMBERS = 1 << 22
# Per-example gradients that are read twice (for their sum and their squares): products over several examples pay more
# than a cache that holds them (measured on CPU).
_MOMENT_NUMBERS = 1 << 21


def budget(per_example: int, numbers: int = _CHUNK_NUMBERS) -> int:
    """How many examples of ``per_example`` numbers each fit into the working memory (at least one)."""
    return max(1, numbers // max(1, per_example))


def append_ones(columns: Tensor) -> Tensor:
    """[..., i] -> [..., i + 1] with a trailing 1: the bias is one more weight."""
    return torch.cat([columns, columns.new_ones(*columns.shape[:-1], 1)], dim=-1)


def merged_vectors(grads: Tensor) -> Tensor:
    """[v, b, g, t, o] -> [b, g, v·o, t]: all vectors in one matrix product with the rows that they share."""
    vectors, batch, groups, shared, out = grads.shape
    if vectors == 1:
        return grads[0].transpose(-1, -2)
    return grads.permute(1, 2, 0, 4, 3).reshape(batch, groups, vectors * out, shared)


def split_vectors(products: Tensor, vectors: int) -> Tensor:
    """[b, g, v·o, i] -> [v, b, g, o, i]; undoes `merged_vectors` after a product."""
    return products.unflatten(2, (vectors, -1)).permute(2, 0, 1, 3, 4)


def sum_into_(out: Tensor, values: Tensor, *, fresh: bool) -> None:
    """Adds the sum over the first dimension of ``values`` to ``out``; fresh: ``out`` was empty."""
    if values.is_contiguous():
        torch.sum(values, 0, out=out) if fresh else out.add_(values.sum(0))
        return
    # In the order in which the values lie in memory; a sum right into another order would be slow.
    order = sorted(range(1, values.dim()), key=values.stride, reverse=True)
    summed, out = values.permute(0, *order).sum(0), out.permute([d - 1 for d in order])
    out.copy_(summed) if fresh else out.add_(summed)


class Rows(ABC):
    """Input rows a[b,g,t,i] of one call of a layer; ``i`` includes the trailing 1 of a bias."""

    batch: int
    groups: int
    shared: int
    features: int

    @abstractmethod
    def outer(self, grads: Tensor) -> Tensor:
        """Per-example gradients: [v, b, g, t, o] -> [v, b, g, o, i]."""

    def add_outer_squared_(self, out: Tensor, grads: Tensor) -> None:
        """Adds Σ_vb of the squared per-example gradients of [v, b, g, t, o] to ``out`` [g, o, i]."""
        step = budget(grads.shape[0] * self.groups * grads.shape[-1] * self.features)
        for start in range(0, self.batch, step):
            part = self.narrow(start, min(step, self.batch - start))
            out += part.outer(grads[:, start : start + step]).square_().sum((0, 1))

    def outer_moments(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_vb of the per-example gradients and Σ_vb of their squares, in one pass: [v, b, g, t, o] -> two [g, o, i]."""
        step = budget(grads.shape[0] * self.groups * grads.shape[-1] * self.features, _MOMENT_NUMBERS)
        each = self.narrow(0, min(step, self.batch)).outer(grads[:, :step]) if step < self.batch else self.outer(grads)
        total = each.sum((0, 1))
        squares = each.square_().sum((0, 1))
        for start in range(step, self.batch, step):
            each = self.narrow(start, min(step, self.batch - start)).outer(grads[:, start : start + step])
            total += each.sum((0, 1))
            squares += each.square_().sum((0, 1))
        return total, squares

    def for_reuse(self) -> Rows:
        """The same rows in the form that is cheapest when several vectors will meet them."""
        return self

    @abstractmethod
    def narrow(self, start: int, length: int) -> Rows:
        """The rows of some examples."""


class MatrixRows(Rows):
    """Rows of a layer with a weight matrix, which can also be correlated among themselves."""

    @abstractmethod
    def add_gram_(self, out: GramSum, weight: Tensor | None = None) -> None:
        """Adds Σ_bt w_b a aᵀ [g, i, i] to ``out``, or its diagonal [g, i] (one-hot rows)."""

    @abstractmethod
    def total(self) -> Tensor:
        """Σ_t a: [b, g, i]."""

    def lengths(self) -> tuple[int, ...]:
        """How many shared rows one example has in each group."""
        return (self.shared,) * self.groups


@dataclass(frozen=True)
class DenseRows(MatrixRows):
    """Rows that are there as a tensor; ``ones`` says that a trailing 1 belongs to each.

    Attributes:
        data: [b, g, t, i] without the ones; i may be 0 (only a bias).
        only_group: the one group that this call concerns (the others hold zeros); None for all.
        reused: several vectors will meet the rows; what is made of them is kept.
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

    def lengths(self) -> tuple[int, ...]:
        return tuple(self.shared if self.only_group in (None, g) else 0 for g in range(self.groups))

    def dense(self) -> Tensor:
        """[b, g, t, i] with the ones."""
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

    def total(self) -> Tensor:
        summed = self.data.sum(2)
        return torch.cat([summed, summed.new_full((*summed.shape[:-1], 1), self.shared)], -1) if self.ones else summed

    def outer(self, grads: Tensor) -> Tensor:
        if self.shared == 1:
            return grads[:, :, :, 0, :, None] * self.dense()[:, :, 0, None, :]
        lines = merged_vectors(grads)  # [b, g, v·o, t]
        if not self.ones:
            return split_vectors(self._products(lines, self.data), len(grads))
        # The bias column is a sum: cheaper than a copy of the rows with ones.
        result = lines.new_empty(*lines.shape[:-1], self.features)
        result[..., :-1] = self._products(lines, self.data)
        torch.sum(lines, -1, out=result[..., -1])
        return split_vectors(result, len(grads))

    def _products(self, lines: Tensor, data: Tensor) -> Tensor:
        """[b, g, o, t] · [b, g, t, i]; groups that share their rows (a packed projection) in one product, without copies."""
        if self.groups == 1 or data.stride(1) != 0:
            return lines @ data
        return (lines.flatten(1, 2) @ data[:, 0]).unflatten(1, lines.shape[1:3])

    def add_outer_squared_(self, out: Tensor, grads: Tensor) -> None:
        if self.shared > 1:
            self._add_shared_moments_(None, out, grads)
            return
        # Without sharing Σ_vb g² a² is one matrix product per group: no per-example tensor exists.
        weights = grads[:, :, :, 0].square().sum(0).transpose(0, 1)  # [g, b, o]
        rows = self._squares if self.reused else self._squared()
        for group in range(self.groups):
            add_product_(out[group], weights[group], rows[group])

    def _squared(self) -> Tensor:
        """Squares of unshared rows: [g, b, i]."""
        return self.dense()[:, :, 0].square().transpose(0, 1)

    @cached_property
    def _squares(self) -> Tensor:
        return self._squared()

    def for_reuse(self) -> DenseRows:
        return replace(self, reused=True)

    def outer_moments(self, grads: Tensor) -> tuple[Tensor, Tensor]:
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
        """Adds Σ_vb G and Σ_vb G²; weights and bias apart, so that a product is never copied to make room for a column."""
        vectors, out, width = grads.shape[0], grads.shape[-1], self.data.shape[-1]
        step = budget(vectors * self.groups * out * max(1, width), _MOMENT_NUMBERS)
        for start in range(0, self.batch, step):
            lines = merged_vectors(grads[:, start : start + step])  # [b, g, v·o, t]
            parts = []
            if width:
                parts.append((slice(0, width), self._products(lines, self.data[start : start + step])))
            if self.ones:
                parts.append((slice(width, None), lines.sum(-1, keepdim=True)))
            for columns, each in parts:
                each = each if vectors == 1 else each.unflatten(2, (vectors, out)).transpose(1, 2).flatten(0, 1)
                if total is not None:
                    total[..., columns].add_(each.sum(0))
                squares[..., columns].add_(each.square_().sum(0))

    def narrow(self, start: int, length: int) -> DenseRows:
        return DenseRows(self.data[start : start + length], self.ones, self.only_group)


@dataclass(frozen=True)
class ScaleRows(Rows):
    """Rows of an elementwise scale (norm layers, PReLU): each group has one output, features (x̂, 1).

    Attributes:
        data: [b, g, t]; None where only the shift is selected.
        ones: whether a shift belongs to the block.
        shape: (b, g, t).
        affine: (mean [b·g], variance [b·g], ε) where x̂ = (data − mean) / √(variance + ε) is left undone: only its sums are
            needed.
    """

    data: Tensor | None
    ones: bool
    shape: tuple[int, int, int]
    affine: tuple[Tensor, Tensor, float] | None = None

    @property
    def batch(self) -> int:  # type: ignore[override]
        return self.shape[0]

    @property
    def groups(self) -> int:  # type: ignore[override]
        return self.shape[1]

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.shape[2]

    @property
    def features(self) -> int:  # type: ignore[override]
        return int(self.data is not None) + int(self.ones)

    def outer(self, grads: Tensor) -> Tensor:
        if self.data is not None and (self.affine is not None or len(grads) == 1):
            # For one vector a product and a sum are several times faster than a batch of tiny matrix products.
            found = torch.stack([torch.stack(self._columns(each, self.data), -1) for each in grads.split(1)])
            return found.view(-1, *self.shape[:2], 1, self.features)
        flat = grads[..., 0]  # [v, b, g, t]
        parts = [] if self.data is None else [torch.einsum("vbgt,bgt->vbg", flat, self.data)]
        if self.ones:
            parts.append(flat.sum(-1))
        return torch.stack(parts, -1)[..., None, :]

    def columns(self, grads: Tensor) -> list[Tensor] | None:
        """Per-example gradients for one vector [1, b, g, t, 1], a column [b·g] per feature; None where `outer` is the way."""
        return None if self.data is None or len(grads) > 1 else self._columns(grads, self.data)

    def _columns(self, grads: Tensor, data: Tensor) -> list[Tensor]:
        if self.affine is None:
            flat = grads[0, ..., 0]  # [b, g, t]
            scale = torch.linalg.vecdot(flat, data).reshape(-1)
            return [scale, flat.sum(-1).reshape(-1)] if self.ones else [scale]
        mean, variance, tiny = self.affine
        # Σ_t g x̂ and Σ_t g by PyTorch's own kernel, with examples as channels.
        _, scale, shift = torch.ops.aten.native_batch_norm_backward.default(
            grads.reshape(1, -1, self.shape[2]),
            data.reshape(1, -1, self.shape[2]),
            None,
            mean,
            variance,
            None,
            None,
            False,
            tiny,
            [False, True, self.ones],
        )
        return [scale, shift] if self.ones else [scale]

    def outer_moments(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        columns = self.columns(grads)
        if columns is None:
            return super().outer_moments(grads)
        each = torch.cat(columns).view(-1, *self.shape[:2])  # [i, b, g]
        total = each.sum(1)
        return total.T[:, None], each.square_().sum(1).T[:, None]

    def narrow(self, start: int, length: int) -> ScaleRows:
        data = None if self.data is None else self.data[start : start + length]
        affine = None
        if self.affine is not None:
            groups = self.shape[1]
            part = slice(start * groups, (start + length) * groups)
            affine = (self.affine[0][part], self.affine[1][part], self.affine[2])
        return ScaleRows(data, self.ones, (length, *self.shape[1:]), affine)
