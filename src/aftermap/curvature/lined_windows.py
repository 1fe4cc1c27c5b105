"""Windows of a 2-dimensional convolution, unfolded along the width alone.

With the features (j, c) of a window's row next to each other,

    x[b, h, w, (j, c)] = padded input[b, c, h, w·stride + j·dilation],

the windows' columns (i, j, c) are, for every row i of the kernel, a plain slice of the positions (h, w), h ≥ i·dilation: one
batched product each, on a copy that is as large as the input times the kernel's width, not its area. Where several
back-propagated vectors will meet the windows of few channels, this copy is made once and kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from aftermap.curvature.convolution import ConvRows
from aftermap.curvature.rows import DenseRows, MatrixRows, budget

__all__ = ["LinedConvRows"]

# Copies of up to this many numbers are kept (16 MB in float32).
_KEPT_NUMBERS = 1 << 22
# Fewer columns than this are copied as lines: faster than a copy that is kept would be worth its memory.
_FEW_COLUMNS = 16
# Up to this many positions whole windows are better: products per row of the kernel would be many and thin.
_FEW_POSITIONS = 64
# So many numbers are unfolded or multiplied at a time (8 MB in float32; measured: smaller pieces lose more than a cache gains).
_COPIED_NUMBERS = 1 << 21
# Copies for layers with at least so many channels are not kept: making them costs little beside the products.
_MANY_CHANNELS = 16


@dataclass(frozen=True)
class LinedConvRows(ConvRows):
    """Rows of a convolution that are unfolded along the width where that is the fastest.

    Attributes:
        kept: [b, g, positions (h, w), columns] as `_unfolded` makes it, for rows that are reused.
    """

    kept: Tensor | None = None

    @property
    def _columns(self) -> int:
        """Of one row of the kernel."""
        return self.channels * self.kernel[1] + int(self._ones_column)

    @property
    def _as_lines(self) -> bool:
        """Whether the columns are so few that each is a line of its own; many lie side by side."""
        return self.channels * self.kernel[1] < _FEW_COLUMNS

    @property
    def _ones_column(self) -> bool:
        """Whether the bias is one more column: among few, and where some row of the kernel meets all positions."""
        return self.ones and self._as_lines and self._whole is not None

    @property
    def _span(self) -> tuple[int, int]:
        """Rows of zeros above the input, which are not unfolded, and rows that are."""
        above, below = self.pads[2:4] if self.pads else (0, 0)
        height = self.inputs.shape[2]
        if self.mode != "constant":
            return 0, height + above + below
        return max(0, above), height + min(0, above) + min(0, below)

    @property
    def _whole(self) -> int | None:
        """A row of the kernel that meets no padding above or below the input, whatever the position."""
        above, height = self._span
        shifts = [number * self.dilation[0] - above for number in range(self.kernel[0])]
        return next((n for n, shift in enumerate(shifts) if 0 <= shift <= height - self.space[0]), None)

    def _way(self, out: int, grads: Tensor) -> str:
        way = super()._way(out, grads)
        if way == "windows" and self.weights and not self.flipped and _lineable(self.kernel, self.stride, self.shared):
            return "lined"
        return way

    def for_reuse(self) -> MatrixRows:
        way = self._way(_MANY_CHANNELS, self.inputs)
        if not self.weights or way == "grouped" or self.channels >= _MANY_CHANNELS:
            return self
        if way == "lined":
            few = self.batch * self.groups * self._span[1] * self.space[1] * self._columns <= _KEPT_NUMBERS
            return replace(self, kept=self._unfolded()) if few and not self._as_lines else self
        if self.batch * self.groups * self.shared * self.features > _KEPT_NUMBERS:
            return self
        return DenseRows(self.examples_first().transpose(-1, -2).contiguous(), self.ones)

    def narrow(self, start: int, length: int) -> ConvRows:
        part = super().narrow(start, length)
        return part if self.kept is None or part is self else replace(part, kept=self.kept[start : start + length])  # type: ignore[call-arg]

    def _unfolded(self) -> Tensor:
        """[b, g, positions (h, w), columns]; few columns lie as lines, many side by side."""
        pads = (*self.pads[:2], min(0, self.pads[2]), min(0, self.pads[3])) if self.pads else ()
        x = self._channels_first(pads) if self._as_lines else self._channels_last(pads)  # [b, g, h, w, c]
        kernel, channels, height, width = self.kernel[1], self.channels, x.shape[2], self.space[1]
        example, group, row, column, channel = x.stride()
        view = x.as_strided(
            (self.batch, self.groups, height, width, kernel, channels),
            (example, group, row, column * self.stride[1], column * self.dilation[1], channel),
            x.storage_offset(),
        )
        weights = kernel * channels
        if self._as_lines:
            lines = x.new_ones(self.batch, self.groups, self._columns, height * width)
            whole = lines[:, :, :weights].view(self.batch, self.groups, kernel, channels, height, width)
            whole.copy_(view.permute(0, 1, 4, 5, 2, 3))
            return lines.transpose(-1, -2)
        return view.reshape(self.batch, self.groups, height * width, weights)

    def _channels_first(self, pads: tuple[int, ...]) -> Tensor:
        """As `_channels_last`, but a view of an input whose channels stay where they are."""
        x = self.inputs if self.mode == "constant" else self._padded()
        padded = F.pad(x, pads) if self.mode == "constant" and any(pads) else x
        return padded.contiguous().unflatten(1, (self.groups, self.channels)).movedim(2, -1)

    def _by_kernel_row(self, grads: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Products of gradient lines [b, g, o, t] with the unfolded input, some examples at a time.

        Yields:
            (first example, [kernel rows, b, g, o, columns]).
        """
        (rows, width), (above, height) = self.space, self._span
        most = max(height * width, self.kernel[0] * grads.shape[2])
        step = budget(self.groups * most * self._columns, _COPIED_NUMBERS)
        for start in range(0, self.batch, step):
            part, some = self.narrow(start, step), grads[start : start + step]
            assert isinstance(part, LinedConvRows)
            lines = (part._unfolded() if part.kept is None else part.kept).flatten(0, 1).to(some.dtype)
            flat = some.flatten(0, 1)
            found = flat.new_empty(self.kernel[0], *flat.shape[:2], self._columns)
            for number, product in enumerate(found.unbind()):
                shift = number * self.dilation[0] - above  # output row h meets input row h + shift
                first, last = max(0, -shift), max(0, -shift, min(rows, height - shift))
                torch.bmm(
                    flat[..., first * width : last * width],
                    lines[:, (first + shift) * width : (last + shift) * width],
                    out=product,
                )
            yield start, found.unflatten(1, some.shape[:2])

    def _weights_of(self, products: Tensor) -> Tensor:
        """[kernel rows, ..., columns] -> view [..., channels, *kernel]."""
        channels, width = self.channels, self.kernel[1]
        return products[..., : channels * width].unflatten(-1, (width, channels)).transpose(-1, -2).movedim(0, -2)

    def _products(self, lines: Tensor, out: int) -> Iterator[tuple[int, Tensor]]:
        if self._way(out, lines) != "lined":
            return super()._products(lines, out)
        return ((start, self._weights_of(found)) for start, found in self._by_kernel_row(lines))

    def _add_moments_(self, total: Tensor | None, squares: Tensor, grads: Tensor, *, fresh: bool = False) -> None:
        if self._way(grads.shape[-1], grads) != "lined":
            super()._add_moments_(total, squares, grads, fresh=fresh)
            return
        if fresh:
            for out in (squares,) if total is None else (squares, total):
                out.zero_()
        whole = self._whole if self._ones_column else None
        for each in grads.unbind():
            lines = each.transpose(-1, -2)  # [b, g, o, t]
            for start, found in self._by_kernel_row(lines):
                bias = None  # its gradient of every example [b, g, o]
                if self.ones:
                    some = lines[start : start + found.shape[1]]
                    bias = some.sum(-1) if whole is None else found[whole, ..., -1]
                if total is not None:
                    self._add(total, found, bias)
                squared = None if bias is None else bias.square()
                self._add(squares, found.square_(), squared)

    def _add(self, out: Tensor, products: Tensor, bias: Tensor | None) -> None:
        """Adds sums over examples of products [kernel rows, b, g, o, columns] and of bias gradients [b, g, o]."""
        self._by_offset(out).add_(self._weights_of(products.sum(1)))
        if bias is not None:
            out[..., -1].add_(bias.sum(0))


def _lineable(kernel: tuple[int, ...], stride: tuple[int, ...], positions: int) -> bool:
    """Whether rows of the kernel meet slices of an unfolded input, and are worth a product each."""
    return len(kernel) == 2 and kernel != (1, 1) and stride[0] == 1 and positions > _FEW_POSITIONS
