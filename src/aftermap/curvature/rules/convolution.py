"""Convolutions in one to three dimensions and their transposes: a matrix on windows that are never stored whole.

The input rows of a convolution are the windows of its padded input, a[b,g,t] ∈ R^{channels·kernel}. A strided view shows
them without copying, and contractions copy the windows of a few examples at a time, small enough for the cache.

The gradient of the weights for one example, G[b,g] = Σ_t g[b,g,t] a[b,g,t]ᵀ, can be computed by three functions that give
the same numbers at different speeds; `choose_method` says which one is used, and why:

* `grouped_kernel_gradients`: the examples become the groups of one grouped convolution. Its weight gradient, by PyTorch's
  own kernel, holds one gradient per example, and no window is copied.
* `kernel_row_gradients`: a 2-dimensional input is unfolded along its width alone,

      x[b, h, w, (j, c)] = padded input[b, c, h, w·stride + j·dilation].

  The part of all windows that row i of the kernel sees is then a plain slice of the positions (h, w), h ≥ i·dilation. Each
  row of the kernel costs one batched product, on a copy that is as large as the input times the kernel's width, not its area.
* `unfolded_gradients`: whole windows are copied, and one batched product does the rest. This works for every convolution.

What each choice is worth for single layers is measured by ``python -m benchmarks.convolution``, and what all of them are worth
for networks by ``python -m benchmarks.run --only curvature``, in the lines "sum of squared gradients".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.curvature.rules.base import (
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
    sum_into_,
)
from aftermap.curvature.rules.linear import DenseRows
from aftermap.errors import InputError
from aftermap.linalg import GramSum

__all__ = [
    "ConvRows",
    "ConvRule",
    "ConvTransposeRule",
    "Method",
    "choose_method",
    "grouped_kernel_gradients",
    "kernel_row_gradients",
    "unfolded_gradients",
]

# The numbers in these comments are printed by benchmarks/convolution.py; 1.2 times means 20 % more CPU time for that layer.
#
# The grouped kernel pays off only for maps with many positions, where writing the gradients does not dominate: it takes 1.1
# to 1.2 times as long as windows on the 8×8 maps of ResNet-20 (64 channels), windows take 1.6 times as long on its 16×16 maps.
_GROUPED_POSITIONS = 128
# The grouped kernel makes gradients of this many numbers at a time (4 MB in float32): an eighth of it takes 1.5 times as long
# on ResNet-20 (32 channels), more makes no difference but needs the memory.
_GROUPED_NUMBERS = 1 << 20
# Up to this many positions the products of single rows of the kernel are thin and whole windows are better: 1.1 to 1.3 times on
# the 8×8 maps of ResNet-20 and WRN-16-2. Above it windows take 1.5 (10×10 maps) and 2 times (28×28) as long on LeNet.
_FEW_POSITIONS = 64
# An input that has fewer columns than this when it is unfolded along its width is copied as lines. Lying side by side, the 5
# columns of LeNet's first layer take 1.7 times as long, the 9 of ResNet-20's only 0.8 times; the 30 columns of LeNet's second
# layer take 1.1 to 1.3 times as long if they are copied as lines.
_FEW_COLUMNS = 16
# An input is unfolded along its width, and multiplied, by this many numbers at a time (8 MB in float32): an eighth of it takes
# 1.1 to 1.3 times as long on LeNet, more makes no difference.
_UNFOLDED_NUMBERS = 1 << 21
# Whole windows are copied with their channels last where this many numbers then lie side by side, one cache line: with
# their channels first they take 1.1 to 1.2 times as long on ResNet-20 (64 channels) and WRN-16-2.
_SIDE_BY_SIDE = 16
# Whole windows are copied by this many numbers at a time (4 MB in float32): an eighth of it takes 2 times as long on ResNet-20
# (64 channels), more makes no difference.
_WINDOW_NUMBERS = 1 << 20
# Unfolded inputs are cached for the next vectors where a layer has fewer channels than this: that saves a third of the time
# of ten vectors on LeNet (6 channels), but nothing on ResNet-20 (16 channels), where products cost more than copies.
_MANY_CHANNELS = 16
# Larger copies than this are not cached, to bound the memory of a fit (16 MB in float32).
_CACHED_NUMBERS = 1 << 22

Method = Literal["grouped kernel", "kernel rows", "unfolded windows"]
# Some examples' gradients of the weights: the number of the first example, and [b, g, o, channels, *kernel] of any strides.
GradientChunk = tuple[int, Tensor]


@dataclass(frozen=True)
class ConvRows(MatrixRows):
    """The windows of a padded input. The padding is done for a few examples at a time, when they are needed.

    Attributes:
        inputs: The input of the layer without its padding [b, channels, *space].
        pads: The padding at both ends of every spatial dimension, as `torch.nn.functional.pad` takes it.
        mode: What the padding is filled with: constant (zeros), reflect, replicate or circular.
        kernel: The size of the kernel in every spatial dimension.
        stride: The distance of neighbouring windows in every spatial dimension.
        dilation: The distance of neighbouring entries of one window in every spatial dimension.
        space: The size of the output in every spatial dimension.
        groups: The number of groups of the convolution.
        ones: Whether a trailing 1 belongs to each row, because a bias belongs to the block.
        weights: Whether the windows belong to the block. They do not where only a bias is selected.
        flipped: Whether the kernel runs backwards, as it does in transposed convolutions.
        width_unfolded: The input unfolded along its width by `unfold_width`, for rows that several vectors will meet. None
            where it is made when it is needed.
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
    width_unfolded: Tensor | None = None

    @property
    def batch(self) -> int:  # type: ignore[override]
        return self.inputs.shape[0]

    @cached_property
    def channels(self) -> int:
        """The number of input channels of one group."""
        return self.inputs.shape[1] // self.groups

    @cached_property
    def shared(self) -> int:  # type: ignore[override]
        return math.prod(self.space)

    @cached_property
    def window_size(self) -> int:
        """How many numbers a window of one group has."""
        return self.channels * math.prod(self.kernel) if self.weights else 0

    @property
    def features(self) -> int:  # type: ignore[override]
        return self.window_size + int(self.ones)

    def examples(self, start: int, length: int) -> ConvRows:
        if start == 0 and length >= self.batch:
            return self
        part = slice(start, start + length)
        unfolded = None if self.width_unfolded is None else self.width_unfolded[part]
        return replace(self, inputs=self.inputs[part], width_unfolded=unfolded)

    def chunks(self) -> Iterator[tuple[int, ConvRows]]:
        """Yields the rows of some examples at a time, each with the number of its first example, whose windows fit the cache."""
        step = examples_per_chunk(max(1, self.window_size) * self.groups * self.shared, _WINDOW_NUMBERS)
        for start in range(0, self.batch, step):
            yield start, self.examples(start, min(step, self.batch - start))

    def cached(self) -> MatrixRows:
        if not self.weights or self.channels >= _MANY_CHANNELS:
            return self
        method = choose_method(self, _MANY_CHANNELS, self.inputs)
        if method == "grouped kernel":
            return self
        if method == "kernel rows":
            _, height = _unfolded_height(self)
            columns = self.channels * self.kernel[1]
            small = self.batch * self.groups * height * self.space[1] * columns <= _CACHED_NUMBERS
            return replace(self, width_unfolded=unfold_width(self)) if small and columns >= _FEW_COLUMNS else self
        if self.batch * self.groups * self.shared * self.features > _CACHED_NUMBERS:
            return self
        return DenseRows(self.examples_first().transpose(-1, -2).contiguous(), self.ones)

    def padded(self) -> Tensor:
        """Returns the input with all its padding [b, channels, *space], contiguous."""
        padded = F.pad(self.inputs, self.pads, mode=self.mode) if any(self.pads) else self.inputs
        return padded.contiguous()

    def channels_last(self, pads: tuple[int, ...]) -> Tensor:
        """Returns a copy [b, g, *space, c] of the input, with these pads of zeros or with all of its own padding of another mode."""
        x = self.inputs if self.mode == "constant" else self.padded()
        last = x.unflatten(1, (self.groups, self.channels)).movedim(2, -1)
        return (F.pad(last, (0, 0, *pads)) if self.mode == "constant" and any(pads) else last).contiguous()

    def windows(self) -> Tensor:
        """Returns a view [b, channels, *kernel, *space] of all windows."""
        x, n = self.padded(), len(self.kernel)
        strides = x.stride()
        kernel_strides = [strides[2 + d] * self.dilation[d] for d in range(n)]
        space_strides = [strides[2 + d] * self.stride[d] for d in range(n)]
        view = x.as_strided(
            (x.shape[0], x.shape[1], *self.kernel, *self.space),
            (strides[0], strides[1], *kernel_strides, *space_strides),
            x.storage_offset(),
        )
        return view.flip(tuple(range(2, 2 + n))) if self.flipped else view

    def windows_channels_last(self) -> Tensor:
        """Returns a copy [b·g, t, (*kernel, c)] of all windows; the kernel is not flipped."""
        x, n = self.channels_last(self.pads), len(self.kernel)
        strides = x.stride()
        kernel_strides = [strides[2 + d] * self.dilation[d] for d in range(n)]
        space_strides = [strides[2 + d] * self.stride[d] for d in range(n)]
        view = x.as_strided(
            (*x.shape[:2], *self.space, *self.kernel, self.channels),
            (*strides[:2], *space_strides, *kernel_strides, 1),
            x.storage_offset(),
        )
        return view.reshape(-1, self.shared, self.window_size)

    def features_first(self) -> Tensor:
        """Returns all windows without the ones as [g, i, b·t]: each feature is a contiguous line, as a Gram matrix wants it."""
        view = self.windows().movedim(0, 1 + len(self.kernel))  # [channels, *kernel, b, *space]
        return view.reshape(self.groups, self.window_size, -1)

    def examples_first(self) -> Tensor:
        """Returns all windows without the ones as [b, g, i, t]."""
        if not self.weights:
            return self.inputs.new_zeros(self.batch, self.groups, 0, self.shared)
        return self.windows().reshape(self.batch, self.groups, self.window_size, self.shared)

    def dense(self) -> Tensor:
        """Returns all rows with the ones as [b, g, t, i], which copies every window."""
        rows = self.examples_first().transpose(-1, -2)
        return append_ones(rows) if self.ones else rows

    def turned(self, basis: Tensor) -> Tensor | None:
        """Returns the rows times a matrix: a convolution of the input whose kernels are the matrix's columns, without any window."""
        # On other devices than a CPU convolutions may be less precise than products.
        if not self.weights or self.inputs.device.type != "cpu":
            return super().turned(basis)
        n = len(self.kernel)
        kernels = basis[:, : self.window_size].transpose(1, 2).reshape(-1, self.channels, *self.kernel)
        kernels = kernels.flip(tuple(range(2, 2 + n))) if self.flipped else kernels
        bias = basis[:, -1].flatten() if self.ones else None
        convolve: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
        maps = convolve(self.padded(), kernels, bias, self.stride, 0, self.dilation, self.groups)
        return maps.view(self.batch, self.groups, -1, self.shared).transpose(-1, -2)

    def add_gram_(self, out: GramSum, weight: Tensor | None = None) -> None:
        if not self.weights and weight is None:
            out.add_ones(self.inputs.new_zeros(self.groups, 0), self.batch * self.shared)
            return
        for start, part in self.chunks():
            if weight is not None:
                rows = part.examples_first().transpose(-1, -2)  # [b, g, t, i]
                DenseRows(rows, self.ones).add_gram_(out, weight[start : start + part.batch])
                continue
            lines = part.features_first()
            for g in range(self.groups):
                out.add(lines[g].T, g)
            if self.ones:
                out.add_ones(lines.sum(-1, dtype=out.dtype), part.batch * self.shared)

    def sum_over_positions(self) -> Tensor:
        parts = []
        if self.weights:
            n = len(self.kernel)
            summed = self.windows().sum(tuple(range(2 + n, 2 + 2 * n)))
            parts.append(summed.reshape(self.batch, self.groups, self.window_size))
        if self.ones:
            parts.append(self.inputs.new_full((self.batch, self.groups, 1), self.shared))
        return torch.cat(parts, -1)

    def per_example_gradients(self, grads: Tensor) -> Tensor:
        lines = merge_vectors(grads)  # [b, g, v·o, t]
        result = lines.new_empty(*lines.shape[:-1], self.features)
        if self.ones:
            torch.sum(lines, -1, out=result[..., -1])
        if self.weights:
            view = self._weights_of(result)
            for start, part in self._weight_gradients(lines, grads.shape[-1]):
                view[start : start + len(part)] = part
        return split_vectors(result, len(grads))

    def add_squares_(self, out: Tensor, grads: Tensor) -> None:
        self._add_moments_(None, out, grads)

    def moments(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        total, squares = grads.new_empty(2, self.groups, grads.shape[-1], self.features)
        self._add_moments_(total, squares, grads, fresh=True)
        return total, squares

    def _add_moments_(self, total: Tensor | None, squares: Tensor, grads: Tensor, *, fresh: bool = False) -> None:
        """Adds Σ_vb G (if it is asked for) and Σ_vb G² to [g, o, i], a few per-example gradients at a time.

        With ``fresh`` both tensors are overwritten.
        """
        for number, vector in enumerate(grads.unbind()):
            lines = vector.transpose(-1, -2)  # [b, g, o, t]
            first = fresh and number == 0
            if self.ones:
                bias = lines.sum(-1)
                if total is not None:
                    sum_into_(total[..., -1], bias, fresh=first)
                sum_into_(squares[..., -1], bias.square_(), fresh=first)
            if not self.weights:
                continue
            for start, part in self._weight_gradients(lines, grads.shape[-1]):
                if total is not None:
                    sum_into_(self._weights_of(total), part, fresh=first and start == 0)
                sum_into_(self._weights_of(squares), part.square_(), fresh=first and start == 0)

    def _weights_of(self, block: Tensor) -> Tensor:
        """Returns a view [..., channels, *kernel] of the weights in a block [..., i]."""
        weights = block[..., : self.window_size] if self.ones else block
        return weights.view(*block.shape[:-1], self.channels, *self.kernel)

    def _weight_gradients(self, lines: Tensor, out: int) -> Iterator[GradientChunk]:
        """Yields the weights' gradients of every example for lines [b, g, o, t] of a layer with ``out`` channels per group."""
        return _METHODS[choose_method(self, out, lines)](self, lines)


def choose_method(rows: ConvRows, out: int, grads: Tensor) -> Method:
    """Says which function computes per-example gradients fastest.

    * "grouped kernel" where PyTorch has one that is fast: on a CPU in float32, for channels that fill its registers, maps
      with many positions, and gradients small enough that several examples are treated at a time.
    * "kernel rows" where a row of the kernel meets a plain slice of the input, that is in two dimensions with a stride of
      one along the height, and where the maps are large enough that thin products do not dominate.
    * "unfolded windows" everywhere else.

    Args:
        rows: The input rows of the layer.
        out: The number of output channels of one group.
        grads: A tensor with the dtype and the device of the gradients that the rows will meet.
    """
    on_cpu = grads.dtype == rows.inputs.dtype == torch.float32 and grads.device.type == "cpu"
    if on_cpu and _grouped_kernel_is_fast(rows.channels, out, rows.kernel, rows.shared):
        return "grouped kernel"
    plain_slices = len(rows.kernel) == 2 and rows.kernel != (1, 1) and rows.stride[0] == 1 and not rows.flipped
    return "kernel rows" if plain_slices and rows.shared > _FEW_POSITIONS else "unfolded windows"


@lru_cache(maxsize=1024)
def _grouped_kernel_is_fast(channels: int, out: int, kernel: tuple[int, ...], positions: int) -> bool:
    """Tells whether the grouped kernel is the fastest method for a convolution of these sizes."""
    fills_registers = min(channels, out) >= 16 or (channels % 8 == 0 and out % 8 == 0)
    size = math.prod(kernel)
    several_examples = channels * size * out <= _GROUPED_NUMBERS // 8  # else the kernel's set-up dominates
    many_positions = positions >= _GROUPED_POSITIONS  # else writing the gradients dominates
    is_fast = fills_registers and several_examples and many_positions and size > 1
    return is_fast and bool(torch.backends.mkldnn.is_available())


def grouped_kernel_gradients(rows: ConvRows, lines: Tensor) -> Iterator[GradientChunk]:
    """Yields per-example gradients as the weight gradient of one convolution whose groups are the examples.

    Args:
        rows: The input rows of the layer.
        lines: The gradient at its output [b, g, o, t].

    Yields:
        The number of the first example, and gradients of some examples [b, g, o, channels, *kernel].
    """
    batch, groups, out, _ = lines.shape
    n = len(rows.kernel)
    even = _even_padding(rows.pads, n) if rows.mode == "constant" else None
    step = examples_per_chunk(groups * out * rows.window_size, _GROUPED_NUMBERS)
    for start in range(0, batch, step):
        some = lines[start : start + step]
        part = rows.examples(start, len(some))
        inputs = part.padded() if even is None else part.inputs
        gradients = torch.ops.aten.convolution_backward.default(
            some.reshape(1, -1, *rows.space),
            inputs.reshape(1, -1, *inputs.shape[2:]),
            # Of these weights only the shape counts.
            lines.new_empty(1).expand(len(some) * groups * out, rows.channels, *rows.kernel),
            None,
            rows.stride,
            (0,) * n if even is None else even,
            rows.dilation,
            False,
            [0],
            len(some) * groups,
            [False, True, False],
        )[1]
        gradients = gradients.flip(tuple(range(2, 2 + n))) if rows.flipped else gradients
        yield start, gradients.reshape(-1, groups, out, rows.channels, *rows.kernel)


@lru_cache(maxsize=1024)
def _even_padding(pads: tuple[int, ...], dimensions: int) -> tuple[int, ...] | None:
    """Returns the padding per dimension as a convolution takes it; None where it is not the same at both ends."""
    if not pads:
        return (0,) * dimensions
    ends = [(pads[-2 * d - 2], pads[-2 * d - 1]) for d in range(dimensions)]
    return tuple(before for before, _ in ends) if all(before == after for before, after in ends) else None


def unfolded_gradients(rows: ConvRows, lines: Tensor) -> Iterator[GradientChunk]:
    """Yields per-example gradients as products with whole windows, which are copied for some examples at a time.

    The windows are copied with their channels last where a row of the kernel is then one long run of numbers, in the copy
    and in the padded input: the copy costs a fraction of the product.

    Args:
        rows: The input rows of the layer.
        lines: The gradient at its output [b, g, o, t].

    Yields:
        The number of the first example, and gradients of some examples [b, g, o, channels, *kernel], of any strides.
    """
    n = len(rows.kernel)
    run = rows.channels * (rows.kernel[-1] if rows.dilation[-1] == 1 else 1)
    channels_last = run >= _SIDE_BY_SIDE and math.prod(rows.kernel) > 1
    for start, part in rows.chunks():
        some = lines[start : start + part.batch]
        flat = some.flatten(0, 1)  # [bg, o, t]
        if not channels_last:
            windows = part.examples_first().to(lines.dtype).flatten(0, 1)  # [bg, i, t]
            product = torch.bmm(flat, windows.transpose(-1, -2))
            yield start, product.view(*some.shape[:3], rows.channels, *rows.kernel)
            continue
        product = torch.bmm(flat, part.windows_channels_last().to(lines.dtype))
        product = product.view(*some.shape[:3], *rows.kernel, rows.channels).movedim(-1, 3)
        yield start, product.flip(tuple(range(4, 4 + n))) if rows.flipped else product


def kernel_row_gradients(rows: ConvRows, lines: Tensor) -> Iterator[GradientChunk]:
    """Yields per-example gradients of a 2-dimensional convolution, one product for each row of its kernel.

    Args:
        rows: The input rows of the layer, with a stride of one along the height and a kernel that is not flipped.
        lines: The gradient at its output [b, g, o, t].

    Yields:
        The number of the first example, and gradients of some examples [b, g, o, channels, *kernel], of any strides.
    """
    (height_out, width_out), (above, height) = rows.space, _unfolded_height(rows)
    kernel_height, kernel_width = rows.kernel
    columns = rows.channels * kernel_width
    largest = max(height * width_out, kernel_height * lines.shape[2])
    step = examples_per_chunk(rows.groups * largest * columns, _UNFOLDED_NUMBERS)
    for start in range(0, rows.batch, step):
        part, some = rows.examples(start, step), lines[start : start + step]
        inputs = unfold_width(part) if part.width_unfolded is None else part.width_unfolded
        inputs, flat = inputs.flatten(0, 1).to(some.dtype), some.flatten(0, 1)
        products = flat.new_empty(kernel_height, *flat.shape[:2], columns)
        for number, product in enumerate(products.unbind()):
            shift = number * rows.dilation[0] - above  # output row h meets input row h + shift
            first, last = max(0, -shift), max(0, -shift, min(height_out, height - shift))
            torch.bmm(
                flat[..., first * width_out : last * width_out],
                inputs[:, (first + shift) * width_out : (last + shift) * width_out],
                out=product,
            )
        # [kernel height, b·g, o, (kernel width, c)] -> [b, g, o, c, kernel height, kernel width]
        by_column = products.view(kernel_height, *some.shape[:3], kernel_width, rows.channels)
        yield start, by_column.transpose(-1, -2).movedim(0, -2)


def unfold_width(rows: ConvRows) -> Tensor:
    """Returns the input of a 2-dimensional convolution, unfolded along its width: [b, g, positions (h, w), (kernel width, c)].

    Few columns lie as lines, each of them contiguous; many lie side by side.
    """
    # Zeros above and below the input are left out: no product needs them.
    pads = (*rows.pads[:2], min(0, rows.pads[2]), min(0, rows.pads[3])) if rows.pads else ()
    kernel, channels, width = rows.kernel[1], rows.channels, rows.space[1]
    as_lines = channels * kernel < _FEW_COLUMNS
    if as_lines:
        x = F.pad(rows.inputs, pads) if rows.mode == "constant" and any(pads) else rows.inputs
        x = x.contiguous() if rows.mode == "constant" else rows.padded()
        x = x.unflatten(1, (rows.groups, channels)).movedim(2, -1)  # [b, g, h, w, c]
    else:
        x = rows.channels_last(pads)
    height = x.shape[2]
    example, group, row, column, channel = x.stride()
    view = x.as_strided(
        (rows.batch, rows.groups, height, width, kernel, channels),
        (example, group, row, column * rows.stride[1], column * rows.dilation[1], channel),
        x.storage_offset(),
    )
    if as_lines:
        lines = view.permute(0, 1, 4, 5, 2, 3).reshape(rows.batch, rows.groups, kernel * channels, height * width)
        return lines.transpose(-1, -2)
    return view.reshape(rows.batch, rows.groups, height * width, kernel * channels)


def _unfolded_height(rows: ConvRows) -> tuple[int, int]:
    """Returns how many rows of zeros stand above the input, which are not unfolded, and how many rows are unfolded."""
    above, below = rows.pads[2:4] if rows.pads else (0, 0)
    height = rows.inputs.shape[2]
    if rows.mode != "constant":
        return 0, height + above + below
    return max(0, above), height + min(0, above) + min(0, below)


_METHODS: dict[Method, Callable[[ConvRows, Tensor], Iterator[GradientChunk]]] = {
    "grouped kernel": grouped_kernel_gradients,
    "kernel rows": kernel_row_gradients,
    "unfolded windows": unfolded_gradients,
}


class _AnyConv(LayerRule):
    """What convolutions and their transposes have in common."""

    def grads(self, module: Any, grads: Tensor) -> Tensor:
        vectors, batch, out = grads.shape[:3]
        groups = int(module.groups)
        return grads.reshape(vectors, batch, groups, out // groups, -1).transpose(-1, -2)

    def _check_batched(self, module: Any, inputs: Tensor) -> None:
        if inputs.dim() != len(module.kernel_size) + 2:
            raise InputError(
                f"{type(module).__name__} was called on an input of shape {tuple(inputs.shape)}; a batch dimension is needed. "
                "Call the layer on [batch, channels, ...]; for one example, use x[None]."
            )


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvRule(_AnyConv):
    """A convolution as a matrix on windows, with one group of the block for each of its own and every padding mode."""

    def layout(self, name: str, module: Any, named: Named) -> Layout:
        groups = int(module.groups)
        _, first = next(iter(named.values()))
        out = first.shape[0] // groups
        return matrix_layout(name, named, groups, out, (groups, out, first.numel() // (groups * out)), (0, 1, 2))

    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Named) -> InputRows:
        self._check_batched(module, inputs)
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
        return ConvRows(
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
    """A transposed convolution: one with a stride of one and a flipped kernel, on the input spread out with zeros."""

    def layout(self, name: str, module: Any, named: Named) -> Layout:
        groups = int(module.groups)
        out = int(module.out_channels) // groups
        into = int(module.in_channels) // groups
        size = math.prod(module.kernel_size)
        return matrix_layout(name, named, groups, out, (groups, into, out, size), (0, 2, 1, 3))

    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Named) -> InputRows:
        self._check_batched(module, inputs)
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
        return ConvRows(
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
