"""Input rows of convolutions in one to three dimensions: windows, never stored whole.

The rows of a convolution are the windows of its padded input, a[b,g,t] ∈ R^{channels·kernel}. A strided view shows them
without copying; contractions copy a few examples at a time, small enough for the cache. Per-example gradients need no
windows in two cases. On a CPU, examples become the groups of one grouped convolution, whose weight gradient holds one
gradient per example (PyTorch's own kernel, three to four times as fast). Elsewhere, where the stride is one, input and
gradient are flattened to rows of equal width: a kernel offset is a shift of the flat input, and each offset is one
batched product of strided views.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from aftermap.curvature.gram_sum import GramSum
from aftermap.curvature.rows import (
    DenseRows,
    MatrixRows,
    append_ones,
    budget,
    merged_vectors,
    split_vectors,
    sum_into_,
)

__all__ = ["ConvRows"]

# Below this many channels per group a product of shifted views is too thin to be fast.
_SHIFT_CHANNELS = 16
# Gradients of a grouped convolution are made for so many numbers at a time (measured: beyond 4 MB memory costs more).
_GROUPED_NUMBERS = 1 << 20
# Below this many positions the grouped kernel spends its time on fresh memory (measured: 4 ms against 1.4 ms for 8×8).
_GROUPED_POSITIONS = 128
# Windows, or padded lines, of at most this many numbers are copied at a time (measured: 4 MB is fastest).
_WINDOW_NUMBERS = 1 << 20
# Per-example gradients of at most this many numbers are made at a time by products of shifted views.
_PRODUCT_NUMBERS = 1 << 21


@dataclass(frozen=True)
class ConvRows(MatrixRows):
    """Windows of a padded input; the padding is done for a few examples at a time, when they are needed.

    Attributes:
        inputs: [b, channels, *space].
        pads: as `torch.nn.functional.pad` takes them; mode: constant, reflect, replicate or circular.
        kernel, stride, dilation: one number per spatial dimension.
        space: output size per spatial dimension.
        groups: of the convolution.
        ones: whether a trailing 1 belongs to each row.
        weights: whether the windows belong to the block (False: only a bias is selected).
        flipped: the kernel runs backwards (transposed convolutions).
    """

    inputs: Tensor
    pads: tuple[int, ...]
    mode: str
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
        return self.inputs.shape[0]

    @property
    def channels(self) -> int:
        """Input channels of one group."""
        return self.inputs.shape[1] // self.groups

    def _padded(self) -> Tensor:
        """[b, channels, *space] with all padding, contiguous."""
        padded = F.pad(self.inputs, self.pads, mode=self.mode) if any(self.pads) else self.inputs
        return padded.contiguous()

    @property
    def shared(self) -> int:  # type: ignore[override]
        return math.prod(self.space)

    @property
    def width(self) -> int:
        """Numbers in a window of one group."""
        return self.channels * math.prod(self.kernel) if self.weights else 0

    @property
    def features(self) -> int:  # type: ignore[override]
        return self.width + int(self.ones)

    def narrow(self, start: int, length: int) -> ConvRows:
        if start == 0 and length >= self.batch:
            return self
        return replace(self, inputs=self.inputs[start : start + length])

    def _windows(self) -> Tensor:
        """View [b, channels, *kernel, *space]."""
        x, n = self._padded(), len(self.kernel)
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
        if not self.weights:
            return self.inputs.new_zeros(self.batch, self.groups, 0, self.shared)
        return self._windows().reshape(self.batch, self.groups, self.width, self.shared)

    def dense(self) -> Tensor:
        """[b, g, t, i] with the ones: every window copied."""
        rows = self.examples_first().transpose(-1, -2)
        return append_ones(rows) if self.ones else rows

    def add_gram_(self, out: GramSum, weight: Tensor | None = None) -> None:
        if not self.weights and weight is None:
            out.add_ones(self.inputs.new_zeros(self.groups, 0), self.batch * self.shared)
            return
        for start, part in self._chunks():
            if weight is not None:
                rows = part.examples_first().transpose(-1, -2)  # [b, g, t, i]
                DenseRows(rows, self.ones).add_gram_(out, weight[start : start + part.batch])
                continue
            lines = part.features_first()
            for g in range(self.groups):
                out.add(lines[g].T, g)
            if self.ones:
                out.add_ones(lines.sum(-1, dtype=out.dtype), part.batch * self.shared)

    def total(self) -> Tensor:
        parts = []
        if self.weights:
            n = len(self.kernel)
            summed = self._windows().sum(tuple(range(2 + n, 2 + 2 * n)))
            parts.append(summed.reshape(self.batch, self.groups, self.width))
        if self.ones:
            parts.append(self.inputs.new_full((self.batch, self.groups, 1), self.shared))
        return torch.cat(parts, -1)

    def outer(self, grads: Tensor) -> Tensor:
        lines = merged_vectors(grads)  # [b, g, v·o, t]
        result = lines.new_empty(*lines.shape[:-1], self.features)
        if self.ones:
            torch.sum(lines, -1, out=result[..., -1])
        if self.weights:
            view = self._by_offset(result)
            for start, product in self._products(lines, grads.shape[-1]):
                view[start : start + len(product)] = product
        return split_vectors(result, len(grads))

    def add_outer_squared_(self, out: Tensor, grads: Tensor) -> None:
        self._add_moments_(None, out, grads)

    def outer_moments(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        total, squares = grads.new_empty(2, self.groups, grads.shape[-1], self.features)
        self._add_moments_(total, squares, grads, fresh=True)
        return total, squares

    def _add_moments_(self, total: Tensor | None, squares: Tensor, grads: Tensor, *, fresh: bool = False) -> None:
        """Adds Σ_vb G (if asked for) and Σ_vb G² to [g, o, i], a few per-example gradients at a time; fresh: overwrites them."""
        sums = [] if total is None else [total]
        views = [self._by_offset(each) for each in (*sums, squares)] if self.weights else []
        for number, each in enumerate(grads.unbind()):
            lines = each.transpose(-1, -2)  # [b, g, o, t]
            new = fresh and number == 0
            if self.ones:
                summed = lines.sum(-1)
                for out in sums:
                    sum_into_(out[..., -1], summed, fresh=new)
                sum_into_(squares[..., -1], summed.square_(), fresh=new)
            if not self.weights:
                continue
            for start, product in self._products(lines, grads.shape[-1]):
                for view in views[:-1]:
                    sum_into_(view, product, fresh=new and start == 0)
                sum_into_(views[-1], product.square_(), fresh=new and start == 0)

    def _by_offset(self, block: Tensor) -> Tensor:
        """View [..., channels, *kernel] of the weights in [..., i]."""
        return block[..., : self.width].unflatten(-1, (self.channels, *self.kernel))

    def _products(self, lines: Tensor, out: int) -> Iterator[tuple[int, Tensor]]:
        """Per-example gradients of the weights for lines [b, g, o, t], some examples at a time, in the fastest way.

        Returns:
            An iterator over (first example, products [b, g, o, c, *kernel], of any strides).
        """
        way = self._way(out, lines)
        if way == "grouped":
            return self._grouped_products(lines)
        return self._shifted_products(lines) if way == "shifted" else self._window_products(lines)

    def _way(self, out: int, grads: Tensor) -> str:
        """The fastest way to the per-example gradients of ``out`` channels: "grouped", "shifted" or "windows"."""
        if self._groupable(out, grads):
            return "grouped"
        return "shifted" if self._shiftable(out) else "windows"

    def _groupable(self, out: int, grads: Tensor) -> bool:
        """Whether the grouped kernel is the fastest: measured on CPU in float32, the only place that has it."""
        channels = self.channels
        wide = min(channels, out) >= 16 or (channels % 8 == 0 and out % 8 == 0)
        kernel = grads.dtype == self.inputs.dtype == torch.float32 and grads.device.type == "cpu"
        # Several examples at a time, or the kernel's set-up dominates; many positions, or writing the gradients does.
        small = self.width * out <= _GROUPED_NUMBERS // 8 and self.shared >= _GROUPED_POSITIONS
        return kernel and wide and small and math.prod(self.kernel) > 1 and torch.backends.mkldnn.is_available()

    def _grouped_products(self, lines: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Per-example gradients as the weight gradient of one convolution whose groups are the examples.

        Yields:
            (first example, products [b, g, o, c, *kernel]).
        """
        batch, groups, out, _ = lines.shape
        n = len(self.kernel)
        ends = [(self.pads[-2 * d - 2], self.pads[-2 * d - 1]) for d in range(n)] if self.pads else [(0, 0)] * n
        inside = self.mode == "constant" and all(before == after for before, after in ends)
        padding = tuple(before for before, _ in ends) if inside else (0,) * n
        stride = budget(groups * out * self.width, _GROUPED_NUMBERS)
        for start in range(0, batch, stride):
            some = lines[start : start + stride]
            part = self.narrow(start, len(some))
            inputs = part.inputs if inside else part._padded()
            found = torch.ops.aten.convolution_backward.default(
                some.reshape(1, -1, *self.space),
                inputs.reshape(1, -1, *inputs.shape[2:]),
                lines.new_empty(1).expand(
                    len(some) * groups * out, self.channels, *self.kernel
                ),  # only its shape counts
                None,
                self.stride,
                padding,
                self.dilation,
                False,
                [0],
                len(some) * groups,
                [False, True, False],
            )[1]
            found = found.flip(tuple(range(2, 2 + n))) if self.flipped else found
            yield start, found.reshape(-1, groups, out, self.channels, *self.kernel)

    def _shiftable(self, out: int) -> bool:
        channels = self.channels
        # A thin product per kernel offset pays only when windows are many and channels are not few.
        return (
            all(s == 1 for s in self.stride)
            and min(channels, out) >= _SHIFT_CHANNELS
            and 2 * self.shared >= channels
            and not self.flipped
        )

    def _shifted_products(self, lines: Tensor) -> Iterator[tuple[int, Tensor]]:
        """G[o, c, k] = Σ_t g[o, t] x[c, t + shift(k)], one product per kernel offset k and some examples at a time.

        With input and gradient flattened to lines of one width, an offset is a shift: a strided view, no windows.

        Yields:
            (first example, products [b, g, o, c, *kernel], a view).
        """
        batch, groups, out, _ = lines.shape
        before = self.inputs.shape[2:]
        space = (
            [n + self.pads[-2 * d - 2] + self.pads[-2 * d - 1] for d, n in enumerate(before)] if self.pads else before
        )
        channels = self.channels
        pads: list[int] = []
        for d in range(len(space) - 1, 0, -1):
            pads += [0, space[d] - self.space[d]]
        inner = [math.prod(space[d + 1 :]) for d in range(len(space))]
        offsets = [0]
        for k, dil, step in zip(self.kernel, self.dilation, inner, strict=True):
            offsets = [o + j * dil * step for o in offsets for j in range(k)]
        size = math.prod(space)
        few = budget(groups * out * self.width, _PRODUCT_NUMBERS)
        stride = min(few, budget(groups * (channels + out) * size, _WINDOW_NUMBERS))
        for start in range(0, batch, stride):
            some = lines[start : start + stride].reshape(-1, out, *self.space)
            grid = F.pad(some, pads).flatten(2) if any(pads) else some.flatten(2)
            # Beyond the last valid position the padded gradient is zero: what sticks out can be cut.
            length = min(grid.shape[-1], size - offsets[-1])
            grid = grid[..., :length]
            flat = self.narrow(start, stride)._padded().reshape(-1, channels, size)
            products = lines.new_empty(len(offsets), len(grid), out, channels)
            for product, offset in zip(products.unbind(), offsets, strict=True):
                torch.bmm(grid, flat[..., offset : offset + length].transpose(1, 2), out=product)
            yield start, products.unflatten(1, (-1, groups)).movedim(0, -1).unflatten(-1, self.kernel)

    def _window_products(self, lines: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Per-example gradients from copied windows, some examples at a time.

        Yields:
            (first example, products [b, g, o, c, *kernel]).
        """
        for start, part in self._chunks():
            windows = part.examples_first().to(lines.dtype).flatten(0, 1)  # [bg, i, t]
            some = lines[start : start + part.batch]
            product = torch.bmm(some.flatten(0, 1), windows.transpose(-1, -2))
            yield start, product.view(*some.shape[:3], self.channels, *self.kernel)
