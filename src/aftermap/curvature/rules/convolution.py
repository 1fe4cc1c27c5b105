"""Input rows of convolutions in one to three dimensions: windows, never stored whole.

The rows of a convolution are the windows of its padded input, a[b,g,t] ∈ R^{channels·kernel}. A strided view shows them
without copying; contractions copy a few examples at a time, small enough for the cache. For per-example gradients the
channels of a window are copied last: then a row of the kernel is one run of numbers, here and in the padded input, and the
copy costs a fraction of the product. Where the maps are large, a CPU has something better: examples become the groups of
one grouped convolution, whose weight gradient (PyTorch's own kernel) holds one gradient per example and needs no windows.

A 2-dimensional convolution may be unfolded along the width alone (`LinedConvRows`).

With the features (j, c) of a window's row next to each other,

    x[b, h, w, (j, c)] = padded input[b, c, h, w·stride + j·dilation],

the windows' columns (i, j, c) are, for every row i of the kernel, a plain slice of the positions (h, w), h ≥ i·dilation: one
batched product each, on a copy that is as large as the input times the kernel's width, not its area. Where several
back-propagated vectors will meet the windows of few channels, this copy is made once and kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.curvature.rules.base import (
    LayerRule,
    Layout,
    MatrixRows,
    Named,
    Rows,
    append_ones,
    budget,
    matrix_layout,
    merged_vectors,
    register,
    split_vectors,
    sum_into_,
)
from aftermap.curvature.rules.linear import DenseRows
from aftermap.errors import InputError
from aftermap.linalg import GramSum

__all__ = ["ConvRows", "ConvRule", "ConvTransposeRule", "LinedConvRows"]

# Windows are copied with the channels last where so many numbers lie side by side (measured; one cache line).
_SIDE_BY_SIDE = 16
# Gradients of a grouped convolution are made for so many numbers at a time (measured: beyond 4 MB memory costs more).
_GROUPED_NUMBERS = 1 << 20
# Below this many positions copying windows is faster (measured: 0.5 ms against 0.8 ms for 8×8 and 64 channels).
_GROUPED_POSITIONS = 128
# Windows, or padded lines, of at most this many numbers are copied at a time (measured: 4 MB is fastest).
_WINDOW_NUMBERS = 1 << 20
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


class _AnyConv(LayerRule):
    def grads(self, module: Any, grads: Tensor) -> Tensor:
        vectors, batch, out = grads.shape[:3]
        groups = int(module.groups)
        return grads.reshape(vectors, batch, groups, out // groups, -1).transpose(-1, -2)

    def _unbatched(self, module: Any, inputs: Tensor) -> None:
        if inputs.dim() != len(module.kernel_size) + 2:
            raise InputError(
                f"{type(module).__name__} was called on an input of shape {tuple(inputs.shape)}; a batch dimension is needed"
            )


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvRule(_AnyConv):
    """Convolution as a matrix on windows; one block per group; every padding mode."""

    def layout(self, name: str, module: Any, named: Named) -> Layout:
        groups = int(module.groups)
        _, first = next(iter(named.values()))
        out = first.shape[0] // groups
        return matrix_layout(name, named, groups, out, (groups, out, first.numel() // (groups * out)), (0, 1, 2))

    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Named) -> Rows:
        self._unbatched(module, inputs)
        kernel: tuple[int, ...] = module.kernel_size
        dilation: tuple[int, ...] = module.dilation
        pads: list[int] = []
        for d in reversed(range(len(kernel))):
            if module.padding == "same":
                total = dilation[d] * (kernel[d] - 1)
                pads += [total // 2, total - total // 2]
            elif module.padding == "valid":
                pads += [0, 0]
            else:
                pads += [module.padding[d]] * 2
        return LinedConvRows(
            inputs=inputs,
            pads=tuple(pads),
            mode="constant" if module.padding_mode == "zeros" else str(module.padding_mode),
            kernel=kernel,
            stride=module.stride,
            dilation=dilation,
            space=space[1:],
            groups=int(module.groups),
            ones="bias" in named,
            weights="weight" in named,
        )


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeRule(_AnyConv):
    """Transposed convolution: a convolution with stride one and a flipped kernel on the input spread out with zeros."""

    def layout(self, name: str, module: Any, named: Named) -> Layout:
        groups = int(module.groups)
        out = int(module.out_channels) // groups
        into = int(module.in_channels) // groups
        size = math.prod(module.kernel_size)
        return matrix_layout(name, named, groups, out, (groups, into, out, size), (0, 2, 1, 3))

    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Named) -> Rows:
        self._unbatched(module, inputs)
        kernel: tuple[int, ...] = module.kernel_size
        dilation: tuple[int, ...] = module.dilation
        stride: tuple[int, ...] = module.stride
        padding: tuple[int, ...] = module.padding
        size = space[1:]
        pads: list[int] = []
        if "weight" in named:
            spread = [(n - 1) * s + 1 for n, s in zip(inputs.shape[2:], stride, strict=True)]
            canvas = inputs.new_zeros(*inputs.shape[:2], *spread)
            canvas[(slice(None), slice(None), *(slice(None, None, s) for s in stride))] = inputs
            for d in reversed(range(len(kernel))):
                reach = dilation[d] * (kernel[d] - 1)
                before = reach - padding[d]
                # Whatever output_size or output_padding added stands at the end.
                pads += [before, size[d] + reach - before - spread[d]]
            inputs = canvas
        return LinedConvRows(
            inputs=inputs,
            pads=tuple(pads),
            mode="constant",
            kernel=kernel,
            stride=(1,) * len(kernel),
            dilation=dilation,
            space=size,
            groups=int(module.groups),
            ones="bias" in named,
            weights="weight" in named,
            flipped=True,
        )
