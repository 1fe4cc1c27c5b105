"""Input rows of convolutions in one to three dimensions: windows, never stored whole.

The rows of a convolution are the windows of its padded input, a[b,g,t] ∈ R^{channels·kernel}. A strided view shows them
without copying; contractions copy a few examples at a time, small enough for the cache. For per-example gradients the
channels of a window are copied last: then a row of the kernel is one run of numbers, here and in the padded input, and the
copy costs a fraction of the product. Where the maps are large, a CPU has something better: examples become the groups of
one grouped convolution, whose weight gradient (PyTorch's own kernel) holds one gradient per example and needs no windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

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

# Windows are copied with the channels last where so many numbers lie side by side (measured; one cache line).
_SIDE_BY_SIDE = 16
# Gradients of a grouped convolution are made for so many numbers at a time (measured: beyond 4 MB memory costs more).
_GROUPED_NUMBERS = 1 << 20
# Below this many positions copying windows is faster (measured: 0.5 ms against 0.8 ms for 8×8 and 64 channels).
_GROUPED_POSITIONS = 128
# Windows, or padded lines, of at most this many numbers are copied at a time (measured: 4 MB is fastest).
_WINDOW_NUMBERS = 1 << 20


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

    @cached_property
    def channels(self) -> int:
        """Input channels of one group."""
        return self.inputs.shape[1] // self.groups

    def _padded(self) -> Tensor:
        """[b, channels, *space] with all padding, contiguous."""
        padded = F.pad(self.inputs, self.pads, mode=self.mode) if any(self.pads) else self.inputs
        return padded.contiguous()

    @cached_property
    def shared(self) -> int:  # type: ignore[override]
        return math.prod(self.space)

    @cached_property
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
        weights = block[..., : self.width] if self.ones else block
        return weights.view(*block.shape[:-1], self.channels, *self.kernel)

    def _products(self, lines: Tensor, out: int) -> Iterator[tuple[int, Tensor]]:
        """Per-example gradients of the weights for lines [b, g, o, t], some examples at a time, in the fastest way.

        Returns:
            An iterator over (first example, products [b, g, o, c, *kernel], of any strides).
        """
        grouped = self._way(out, lines) == "grouped"
        return self._grouped_products(lines) if grouped else self._window_products(lines)

    def _way(self, out: int, grads: Tensor) -> str:
        """The fastest way to the per-example gradients of ``out`` channels: "grouped" or "windows"."""
        single = grads.dtype == self.inputs.dtype == torch.float32 and grads.device.type == "cpu"
        return "grouped" if single and _groupable(self.channels, out, self.kernel, self.shared) else "windows"

    def _grouped_products(self, lines: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Per-example gradients as the weight gradient of one convolution whose groups are the examples.

        Yields:
            (first example, products [b, g, o, c, *kernel]).
        """
        batch, groups, out, _ = lines.shape
        n = len(self.kernel)
        even = _even_padding(self.pads, n) if self.mode == "constant" else None
        padding = (0,) * n if even is None else even
        stride = budget(groups * out * self.width, _GROUPED_NUMBERS)
        for start in range(0, batch, stride):
            some = lines[start : start + stride]
            part = self.narrow(start, len(some))
            inputs = part._padded() if even is None else part.inputs
            found = torch.ops.aten.convolution_backward.default(
                some.reshape(1, -1, *self.space),
                inputs.reshape(1, -1, *inputs.shape[2:]),
                # Of these weights only the shape counts.
                lines.new_empty(1).expand(len(some) * groups * out, self.channels, *self.kernel),
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

    def _window_products(self, lines: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Per-example gradients from copied windows, some examples at a time.

        Yields:
            (first example, products [b, g, o, c, *kernel], of any strides).
        """
        n = len(self.kernel)
        for start, part in self._chunks():
            some = lines[start : start + part.batch]
            flat = some.flatten(0, 1)  # [bg, o, t]
            if not self._side_by_side:
                windows = part.examples_first().to(lines.dtype).flatten(0, 1)  # [bg, i, t]
                product = torch.bmm(flat, windows.transpose(-1, -2))
                yield start, product.view(*some.shape[:3], self.channels, *self.kernel)
                continue
            product = torch.bmm(flat, part._windows_side_by_side().to(lines.dtype))
            product = product.view(*some.shape[:3], *self.kernel, self.channels).movedim(-1, 3)
            yield start, product.flip(tuple(range(4, 4 + n))) if self.flipped else product

    @property
    def _side_by_side(self) -> bool:
        """Whether windows with the channels last are copied in runs long enough."""
        run = self.channels * (self.kernel[-1] if self.dilation[-1] == 1 else 1)
        return run >= _SIDE_BY_SIDE and math.prod(self.kernel) > 1

    def _channels_last(self, pads: tuple[int, ...]) -> Tensor:
        """[b, g, *space, c], contiguous, with these pads of the spatial dimensions (none: already padded)."""
        x = self.inputs if self.mode == "constant" else self._padded()
        last = x.unflatten(1, (self.groups, self.channels)).movedim(2, -1)
        return (F.pad(last, (0, 0, *pads)) if self.mode == "constant" and any(pads) else last).contiguous()

    def _windows_side_by_side(self) -> Tensor:
        """[b·g, t, (*kernel, c)], a copy; the kernel is not flipped."""
        x, n = self._channels_last(self.pads), len(self.kernel)
        strides = x.stride()
        kernel_strides = [strides[2 + d] * self.dilation[d] for d in range(n)]
        space_strides = [strides[2 + d] * self.stride[d] for d in range(n)]
        view = x.as_strided(
            (*x.shape[:2], *self.space, *self.kernel, self.channels),
            (*strides[:2], *space_strides, *kernel_strides, 1),
            x.storage_offset(),
        )
        return view.reshape(-1, self.shared, self.width)


@lru_cache(maxsize=1024)
def _groupable(channels: int, out: int, kernel: tuple[int, ...], positions: int) -> bool:
    """Whether the grouped kernel is the fastest way: measured on CPU in float32, the only place that has it."""
    wide = min(channels, out) >= 16 or (channels % 8 == 0 and out % 8 == 0)
    # Several examples at a time, or the kernel's set-up dominates; many positions, or writing the gradients does.
    size = math.prod(kernel)
    small = channels * size * out <= _GROUPED_NUMBERS // 8 and positions >= _GROUPED_POSITIONS
    return wide and small and size > 1 and bool(torch.backends.mkldnn.is_available())


@lru_cache(maxsize=1024)
def _even_padding(pads: tuple[int, ...], dimensions: int) -> tuple[int, ...] | None:
    """The padding per dimension as a convolution takes it; None where it is not the same at both ends."""
    if not pads:
        return (0,) * dimensions
    ends = [(pads[-2 * d - 2], pads[-2 * d - 1]) for d in range(dimensions)]
    return tuple(before for before, _ in ends) if all(before == after for before, after in ends) else None
