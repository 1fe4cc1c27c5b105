"""One small rule per layer type: how its call looks in the format [batch, group, shared, features].

A rule answers three questions about a module: how its parameters form a block (`layout`), what the input rows of a call
are (`rows`), and how an output gradient is arranged (`grads`). Everything else (Kronecker factors, diagonals, per-example
gradients, the linearised predictive) follows from these. Add a layer by writing one class with ``@register``; see
docs/add_a_layer.md. A module without a rule is not dropped: its parameters are treated by exact per-example gradients.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.curvature.kept import kept
from aftermap.curvature.layout import Layout, Piece
from aftermap.curvature.lined_windows import LinedConvRows
from aftermap.curvature.one_hot_rows import OneHotRows
from aftermap.curvature.rows import DenseRows, Rows, ScaleRows
from aftermap.errors import InputError

__all__ = ["LayerRule", "Named", "find_rule", "matrix_layout", "register", "registered_rules"]

Named = Mapping[str, tuple[str, Tensor]]  # role -> (parameter name, parameter)


class LayerRule(ABC):
    """The rule of one layer type.

    Attributes:
        matrix: the block is a weight matrix and Kronecker factors make sense; otherwise it is a vector of scales.
        leading: inputs may have any number of dimensions between the batch and the features.
        roles: attribute names of the parameters that the rule covers.
        one_hot: input rows are one-hot, so their Gram matrix is kept as a diagonal.
    """

    matrix: bool = True
    one_hot: bool = False
    leading: bool = False
    roles: tuple[str, ...] = ("weight", "bias")

    def unsupported(self, module: Any) -> str | None:
        """Why this module cannot be treated by the rule; None when it can."""
        return None

    @abstractmethod
    def layout(self, name: str, module: Any, named: Named) -> Layout:
        """The block of the selected parameters ``named``."""

    @abstractmethod
    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Named) -> Rows:
        """Input rows of a call: ``inputs`` [b, ...], ``space`` the shape of the output [b, ...] without b."""

    @abstractmethod
    def grads(self, module: Any, grads: Tensor) -> Tensor:
        """Output gradient [v, b, ...] as [v, b, group, shared, out]."""


_RULES: dict[type[nn.Module], LayerRule] = {}


def register(*modules: type[nn.Module]) -> Callable[[type[LayerRule]], type[LayerRule]]:
    """Class decorator: this rule serves these module types, and subclasses that do not change ``forward``."""

    def add(rule: type[LayerRule]) -> type[LayerRule]:
        instance = rule()
        for module in modules:
            _RULES[module] = instance
        return rule

    return add


def registered_rules() -> dict[type[nn.Module], LayerRule]:
    """Every registered module type with its rule."""
    return dict(_RULES)


def find_rule(module: nn.Module) -> LayerRule | None:
    """The rule of a module; None where there is none, or where a subclass has a ``forward`` of its own."""
    for kind in type(module).__mro__:
        if kind in _RULES:
            return _RULES[kind] if type(module).forward is kind.forward else None
    return None


def matrix_layout(
    name: str, named: Named, groups: int, out: int, view: tuple[int, ...], order: tuple[int, ...]
) -> Layout:
    """Weight columns first, the bias as last column."""
    pieces = []
    width = 0
    if "weight" in named:
        parameter, weight = named["weight"]
        width = weight.numel() // (groups * out)
        pieces.append(Piece(parameter, tuple(weight.shape), view, order, 0, width))
    if "bias" in named:
        parameter, bias = named["bias"]
        pieces.append(Piece(parameter, tuple(bias.shape), (groups, out, 1), (0, 1, 2), width, width + 1))
        width += 1
    return Layout(name, groups, out, width, tuple(pieces))


@register(nn.Linear)
class LinearRule(LayerRule):
    """y = W x + b, applied to the last dimension of an input with any number of leading dimensions."""

    leading = True

    def layout(self, name: str, module: Any, named: Named) -> Layout:
        _, first = next(iter(named.values()))
        out = first.shape[0]
        return matrix_layout(name, named, 1, out, (1, out, first.numel() // out), (0, 1, 2))

    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Named) -> Rows:
        data = inputs.reshape(inputs.shape[0], 1, -1, inputs.shape[-1])
        return DenseRows(data if "weight" in named else data[..., :0], "bias" in named)

    def grads(self, module: Any, grads: Tensor) -> Tensor:
        return grads.reshape(*grads.shape[:2], 1, -1, grads.shape[-1])


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


@register(nn.Embedding)
class EmbeddingRule(LayerRule):
    """A table: a linear map of one-hot rows, of which only the index is kept."""

    leading = True
    one_hot = True

    def unsupported(self, module: Any) -> str | None:
        return "max_norm changes the weights in every forward pass" if module.max_norm is not None else None

    def layout(self, name: str, module: Any, named: Named) -> Layout:
        _, weight = named["weight"]
        words, out = weight.shape
        return matrix_layout(name, named, 1, out, (1, words, out), (0, 2, 1))

    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Named) -> Rows:
        _, weight = named["weight"]
        index = inputs.reshape(inputs.shape[0], -1).long()
        padding = module.padding_idx
        if padding is not None:
            index = index.masked_fill(index == padding, -1)
        return OneHotRows(index, weight.shape[0], weight.dtype)

    def grads(self, module: Any, grads: Tensor) -> Tensor:
        return grads.reshape(*grads.shape[:2], 1, -1, grads.shape[-1])


class _ScaleRule(LayerRule):
    """y = weight ∘ x̂ + bias: one group per entry, features (x̂, 1)."""

    matrix = False

    def layout(self, name: str, module: Any, named: Named) -> Layout:
        _, first = next(iter(named.values()))
        return matrix_layout(name, named, first.numel(), 1, (first.numel(), 1, 1), (0, 1, 2))

    @abstractmethod
    def normalised(self, module: Any, inputs: Tensor) -> Tensor:
        """x̂, of the shape of the input."""

    @abstractmethod
    def arranged(self, module: Any, values: Tensor, lead: int) -> Tensor:
        """[*lead dimensions, ...] -> [*lead dimensions, group, shared]."""

    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Named) -> Rows:
        # The output has the shape of the input, so either tells the number of groups and shared positions.
        data = self.arranged(module, self.normalised(module, inputs) if "weight" in named else inputs, 1)
        shape = (data.shape[0], data.shape[1], data.shape[2])
        return ScaleRows(data if "weight" in named else None, "bias" in named, shape)

    def grads(self, module: Any, grads: Tensor) -> Tensor:
        return self.arranged(module, grads, 2)[..., None]


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormRule(_ScaleRule):
    """Batch normalisation with running statistics (Ritter et al. 2018, appendix G): the data stay independent."""

    def unsupported(self, module: Any) -> str | None:
        if module.training or module.running_mean is None:
            return "batch statistics make the outputs of examples depend on each other; call model.eval() and keep running statistics"
        return None

    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Named) -> Rows:
        if module.training or module.running_mean is None or "weight" not in named:
            return super().rows(module, inputs, space, named)
        data = self.arranged(module, inputs, 1)
        shape = (data.shape[0], data.shape[1], data.shape[2])
        statistics = kept((id(module), shape[0], data.dtype), lambda: _for_examples(module, shape[0], data.dtype))
        return ScaleRows(data, "bias" in named, shape, (*statistics, module.eps))

    def normalised(self, module: Any, inputs: Tensor) -> Tensor:
        if module.training or module.running_mean is None:  # only optimisers ask for this: see `find_sites`
            return F.batch_norm(inputs, None, None, None, None, True, 0.0, module.eps)
        return inputs  # only a shift is selected, which does not look at them; else see `rows`

    def arranged(self, module: Any, values: Tensor, lead: int) -> Tensor:
        return values.reshape(*values.shape[: lead + 1], -1)


def _for_examples(module: Any, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Running mean and variance [b·g] of a BatchNorm, repeated for every example."""
    found = (s.to(dtype).expand(batch, -1).reshape(-1) for s in (module.running_mean, module.running_var))
    return next(found), next(found)


@register(nn.GroupNorm)
class GroupNormRule(_ScaleRule):
    """Group normalisation; also instance normalisation as its extreme."""

    def normalised(self, module: Any, inputs: Tensor) -> Tensor:
        return F.group_norm(inputs, module.num_groups, None, None, module.eps)

    def arranged(self, module: Any, values: Tensor, lead: int) -> Tensor:
        return values.reshape(*values.shape[: lead + 1], -1)


@register(nn.LayerNorm)
class LayerNormRule(_ScaleRule):
    """Layer normalisation over the trailing dimensions."""

    leading = True

    def normalised(self, module: Any, inputs: Tensor) -> Tensor:
        return F.layer_norm(inputs, module.normalized_shape, None, None, module.eps)

    def arranged(self, module: Any, values: Tensor, lead: int) -> Tensor:
        size = math.prod(module.normalized_shape)
        return values.reshape(*values.shape[:lead], -1, size).transpose(-1, -2)


@register(nn.RMSNorm)
class RMSNormRule(LayerNormRule):
    """Root-mean-square normalisation: no mean, no bias."""

    def normalised(self, module: Any, inputs: Tensor) -> Tensor:
        return F.rms_norm(inputs, module.normalized_shape, None, module.eps)


@register(nn.PReLU)
class PReLURule(_ScaleRule):
    """y = max(0, x) + weight ∘ min(0, x): the slope is a scale of the negative part."""

    roles = ("weight",)

    def normalised(self, module: Any, inputs: Tensor) -> Tensor:
        return inputs.clamp_max(0.0)

    def arranged(self, module: Any, values: Tensor, lead: int) -> Tensor:
        if module.num_parameters == 1:
            return values.reshape(*values.shape[:lead], 1, -1)
        return values.reshape(*values.shape[: lead + 1], -1)
