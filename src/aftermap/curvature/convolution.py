"""Input rows of convolutions in one to three dimensions: windows, never stored whole.

The rows of a convolution are the windows of its padded input, a[b,g,t] ∈ R^{channels·kernel}. A strided view shows them
without copying; contractions copy a few examples at a time, small enough for the cache. Where the stride is one, the
per-example gradient needs no windows at all: with input and gradient flattened to rows of equal width, a kernel offset
is a shift of the flat input, and each offset is one batched product of strided views.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from aftermap.curvature.rows import DenseRows, MatrixRows, budget
from aftermap.linalg import add_gram_

__all__ = ["ConvRows"]

# Below this many channels per group a product of shifted views is too thin to be fast.
_SHIFT_CHANNELS = 16
# Windows of at most this many numbers are copied at a time (measured: 1-4 MB is fastest).
_WINDOW_NUMBERS = 1 << 18


@dataclass(frozen=True)
class ConvRows(MatrixRows):
    """Windows of a padded input.

    Attributes:
        padded: [b, channels, *space], contiguous, all padding done.
        kernel, stride, dilation: one number per spatial dimension.
        space: output size per spatial dimension.
        groups: of the convolution.
        ones: whether a trailing 1 belongs to each row.
        weights: whether the windows belong to the block (False: only a bias is selected).
        flipped: the kernel runs backwards (transposed convolutions).
    """

    padded: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    space: tuple[int, ...]
    groups: int
    ones: bool
    weights: bool = True
    flipped: bool = False

    @property
    def batch(self) -> int:  # type: ignore[override]
        return self.padded.shape[0]

    @property
    def shared(self) -> int:  # type: ignore[override]
        return math.prod(self.space)

    @property
    def width(self) -> int:
        """Numbers in a window of one group."""
        return self.padded.shape[1] // self.groups * math.prod(self.kernel) if self.weights else 0

    @property
    def features(self) -> int:  # type: ignore[override]
        return self.width + int(self.ones)

    def narrow(self, start: int, length: int) -> ConvRows:
        return replace(self, padded=self.padded[start : start + length])

    def _windows(self) -> Tensor:
        """View [b, channels, *kernel, *space]."""
        x, n = self.padded, len(self.kernel)
        strides = x.stride()
        kernel_strides = [strides[2 + d] * self.dilation[d] for d in range(n)]
        space_strides = [strides[2 + d] * self.stride[d] for d in range(n)]
        view = x.as_strided(
            (x.shape[0], x.shape[1], *self.kernel, *self.space),
            (strides[0], strides[1], *kernel_strides, *space_strides),
            x.storage_offset(),
        )
        return view.flip(tuple(range(2, 2 + n))) if self.flipped else view

    def _chunks(self) -> Iterator[tuple[int, ConvRows]]:
        step = budget(max(1, self.width) * self.groups * self.shared, _WINDOW_NUMBERS)
        for start in range(0, self.batch, step):
            yield start, self.narrow(start, min(step, self.batch - start))

    def features_first(self) -> Tensor:
        """[g, i, b·t] without the ones: each feature a contiguous line, as a Gram matrix wants it."""
        n = len(self.kernel)
        view = self._windows().movedim(0, 1 + n)  # [channels, *kernel, b, *space]
        return view.reshape(self.groups, self.width, -1)

    def examples_first(self) -> Tensor:
        """[b, g, i, t] without the ones."""
        return self._windows().reshape(self.batch, self.groups, self.width, self.shared)

    def gram(self, weight: Tensor | None = None) -> Tensor:
        if weight is not None:
            return self._weighted_gram(weight)
        width = self.width
        out = self.padded.new_zeros(self.groups, self.features, self.features)
        if self.weights:
            for _, part in self._chunks():
                lines = part.features_first()
                for g in range(self.groups):
                    add_gram_(out[g, :width, :width], lines[g].T)
                if self.ones:
                    out[:, width, :width] += lines.sum(-1)
        if self.ones:
            out[:, :width, width] = out[:, width, :width]
            out[:, width, width] = self.batch * self.shared
        return out

    def _weighted_gram(self, weight: Tensor) -> Tensor:
        out = self.padded.new_zeros(self.groups, self.features, self.features)
        for start, part in self._chunks():
            rows = part.examples_first().transpose(-1, -2)  # [b, g, t, i]
            out += DenseRows(rows, self.ones).gram(weight[start : start + part.batch])
        return out

    def total(self) -> Tensor:
        parts = []
        if self.weights:
            n = len(self.kernel)
            summed = self._windows().sum(tuple(range(2 + n, 2 + 2 * n)))
            parts.append(summed.reshape(self.batch, self.groups, self.width))
        if self.ones:
            parts.append(self.padded.new_full((self.batch, self.groups, 1), self.shared))
        return torch.cat(parts, -1)

    def outer(self, grads: Tensor) -> Tensor:
        return (
            torch.stack([self._outer_one(each) for each in grads])
            if len(grads) != 1
            else self._outer_one(grads[0])[None]
        )

    def _outer_one(self, grads: Tensor) -> Tensor:
        """[b, g, t, o] -> [b, g, o, i]."""
        out = grads.shape[-1]
        result = grads.new_empty(self.batch, self.groups, out, self.features)
        lines = grads.transpose(-1, -2)  # [b, g, o, t]: contiguous for a convolution's output
        if self.ones:
            torch.sum(lines, -1, out=result[..., -1])
        if not self.weights:
            return result
        if self._shiftable(out):
            self._outer_by_shifts(lines, result)
            return result
        for start, part in self._chunks():
            stop = start + part.batch
            windows = part.examples_first().to(grads.dtype)  # [b, g, i, t]
            result[start:stop, ..., : self.width] = lines[start:stop] @ windows.transpose(-1, -2)
        return result

    def _shiftable(self, out: int) -> bool:
        channels = self.padded.shape[1] // self.groups
        # A thin product per kernel offset pays only when windows are many and channels are not few.
        return (
            all(s == 1 for s in self.stride)
            and min(channels, out) >= _SHIFT_CHANNELS
            and self.shared >= 4 * channels
            and not self.flipped
        )

    def _outer_by_shifts(self, lines: Tensor, result: Tensor) -> None:
        """G[o, c, k] = Σ_t g[o, t] x[c, t + shift(k)] on rows padded to one width."""
        batch, groups, out, _ = lines.shape
        space = self.padded.shape[2:]
        channels = self.padded.shape[1] // groups
        # The gradient on the padded input's grid of lines: trailing dimensions get the input's width.
        grid = lines.reshape(batch * groups, out, *self.space)
        pads: list[int] = []
        for d in range(len(space) - 1, 0, -1):
            pads += [0, space[d] - self.space[d]]
        grid = F.pad(grid, pads).flatten(2) if pads else grid.flatten(2)
        length = grid.shape[-1]
        inner = [math.prod(space[d + 1 :]) for d in range(len(space))]
        reach = sum((k - 1) * dil * step for k, dil, step in zip(self.kernel, self.dilation, inner, strict=True))
        flat = self.padded.reshape(batch * groups, channels, -1)
        short = length + reach - flat.shape[-1]
        if short > 0:
            flat = F.pad(flat, (0, short))
        view = result[..., : self.width].unflatten(-1, (channels, math.prod(self.kernel)))
        offsets = [0]
        for k, dil, step in zip(self.kernel, self.dilation, inner, strict=True):
            offsets = [o + j * dil * step for o in offsets for j in range(k)]
        for place, offset in enumerate(offsets):
            shifted = flat[..., offset : offset + length]
            view[..., place] = torch.bmm(grid, shifted.transpose(1, 2)).view(batch, groups, out, channels)
