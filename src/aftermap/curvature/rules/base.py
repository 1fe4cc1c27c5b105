"""The contract of a layer rule: how a call looks in the format [batch, group, shared, features].

A rule answers three questions about a module: how its parameters form a block (`layout`), what the input rows of a call
are (`rows`), and how an output gradient is arranged (`grads`). Everything else (Kronecker factors, diagonals, per-example
gradients, the linearised predictive) follows from these. Add a layer by writing one class with ``@register``; see
docs/add_a_layer.md. A module without a rule is not dropped: its parameters are treated by exact per-example gradients.

Index legend: b example, v back-propagated vector, g group, t shared position, i feature in, o feature out.

A layer call is affine in its block: y[b,g,t,o] = Σ_i W[g,o,i] a[b,g,t,i]. So for an output gradient g the block's
per-example gradient is

    G[v,b,g] = Σ_t g[v,b,g,t] a[b,g,t]ᵀ          (the sum over t before any square: docs/mathematics/layers.md)

and every curvature is a contraction of a and g. A `Rows` knows its a, in the cheapest form, and does these contractions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.linalg import TERMS_PER_PART, GramSum

__all__ = [
    "MOMENT_NUMBERS",
    "LayerRule",
    "Layout",
    "MatrixRows",
    "Named",
    "Piece",
    "Rows",
    "add_grad_gram_",
    "append_ones",
    "budget",
    "find_rule",
    "matrix_layout",
    "merged_vectors",
    "register",
    "registered_rules",
    "split_vectors",
    "sum_into_",
]

# Working memory of one contraction, in numbers: large enough to keep the cores busy, small enough for the cache.
_CHUNK_NUMBERS = 1 << 22
# Per-example gradients that are read twice (for their sum and their squares): products over several examples pay more
# than a cache that holds them (measured on CPU).
MOMENT_NUMBERS = 1 << 21
Named = Mapping[str, tuple[str, Tensor]]  # role -> (parameter name, parameter)


@dataclass(frozen=True)
class Piece:
    """Columns ``start:stop`` of a block are the parameter ``name``, reshaped to ``view`` and permuted by ``order``.

    For a transposed convolution, say, the weight [in, out/groups, k] is viewed as [groups, in/groups, out/groups, k]
    and permuted by (0, 2, 1, 3) to [groups, out/groups, in/groups·k].
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    order: tuple[int, ...]
    start: int
    stop: int

    def to_columns(self, value: Tensor, groups: int, out: int) -> Tensor:
        """[..., *shape] -> [..., groups, out, stop − start]."""
        lead = value.shape[: value.dim() - len(self.shape)]
        value = value.reshape(*lead, *self.view)
        value = value.permute(*range(len(lead)), *(len(lead) + i for i in self.order))
        return value.reshape(*lead, groups, out, self.stop - self.start)

    def to_parameter(self, columns: Tensor) -> Tensor:
        """[..., groups, out, stop − start] -> [..., *shape]."""
        lead = columns.shape[:-3]
        if self.order == tuple(range(len(self.order))):  # nothing is permuted in most layers
            return columns.reshape(*lead, *self.shape)
        permuted = [self.view[i] for i in self.order]
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        columns = columns.reshape(*lead, *permuted)
        columns = columns.permute(*range(len(lead)), *(len(lead) + i for i in inverse))
        return columns.reshape(*lead, *self.shape)


@dataclass(frozen=True)
class Layout:
    """A block of shape [groups, out, in] and the parameters that it is made of.

    >>> weight = Piece("fc.weight", (3, 2), (1, 3, 2), (0, 1, 2), 0, 2)
    >>> bias = Piece("fc.bias", (3,), (1, 3, 1), (0, 1, 2), 2, 3)
    >>> layout = Layout("fc", 1, 3, 3, (weight, bias))
    >>> block = layout.join({"fc.weight": torch.ones(3, 2), "fc.bias": torch.zeros(3)})
    >>> block[0, 0]
    tensor([1., 1., 0.])
    >>> layout.split(block)["fc.bias"]
    tensor([0., 0., 0.])
    """

    name: str
    groups: int
    out: int
    in_: int
    pieces: tuple[Piece, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of the block."""
        return tuple(piece.name for piece in self.pieces)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Their shapes."""
        return {piece.name: piece.shape for piece in self.pieces}

    @property
    def size(self) -> int:
        """How many numbers the block has."""
        return self.groups * self.out * self.in_

    def join(self, params: Mapping[str, Tensor]) -> Tensor:
        """Parameters [..., *shape] to the block [..., groups, out, in]."""
        columns = [p.to_columns(params[p.name], self.groups, self.out) for p in self.pieces]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)

    def split(self, block: Tensor) -> dict[str, Tensor]:
        """The block [..., groups, out, in] to parameters [..., *shape]."""
        if len(self.pieces) == 1:
            return {self.pieces[0].name: self.pieces[0].to_parameter(block)}
        return {p.name: p.to_parameter(block[..., p.start : p.stop]) for p in self.pieces}

    def positions(self) -> Tensor:
        """For each entry of the flattened block, its place in the concatenation of the flattened parameters."""
        places: dict[str, Tensor] = {}
        start = 0
        for piece in self.pieces:
            size = math.prod(piece.shape)
            places[piece.name] = torch.arange(start, start + size).reshape(piece.shape)
            start += size
        return self.join(places).reshape(-1)

    def to_config(self) -> dict[str, Any]:
        """Plain lists and numbers, for saving."""
        return {
            "name": self.name,
            "groups": self.groups,
            "out": self.out,
            "in": self.in_,
            "pieces": [[p.name, list(p.shape), list(p.view), list(p.order), p.start, p.stop] for p in self.pieces],
        }

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> Layout:
        """Undoes :meth:`to_config`."""
        pieces = tuple(
            Piece(name, tuple(shape), tuple(view), tuple(order), start, stop)
            for name, shape, view, order, start, stop in config["pieces"]
        )
        return Layout(config["name"], config["groups"], config["out"], config["in"], pieces)


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
        step = budget(grads.shape[0] * self.groups * grads.shape[-1] * self.features, MOMENT_NUMBERS)
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


def add_grad_gram_(out: GramSum, grads: Tensor) -> None:
    """Adds Σ_vbt g gᵀ of gradients [v, b, g, t, o] to ``out`` [g, o, o]."""
    vectors, batch, groups, shared, width = grads.shape
    if shared > 1 and grads.stride(-2) == 1:
        # A convolution's gradient lies feature by feature: multiply the lines where they are.
        lines = grads.transpose(-1, -2).reshape(vectors * batch, groups, width, shared)
        step = budget(groups * width * width, 1 << 20)
        for start in range(0, len(lines), step):
            for part in lines[start : start + step].split(TERMS_PER_PART, -1):
                out.add_products((part @ part.transpose(-1, -2)).sum(0))
        return
    out.add(grads.permute(2, 0, 1, 3, 4).reshape(groups, -1, width))


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
