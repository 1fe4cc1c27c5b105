"""The contract of a layer rule: how a call looks in the format [batch, group, shared, features].

A rule answers three questions about a module: how its parameters form a block (`layout`), what the input rows of a call
are (`rows`), and how an output gradient is arranged (`grads`). Everything else (Kronecker factors, diagonals, per-example
gradients, the linearised predictive) follows from these. Add a layer by writing one class with ``@register``; see
docs/add_a_layer.md. A module without a rule is not dropped: its parameters are treated by exact per-example gradients.

Index legend: b example, v back-propagated vector, g group, t shared position, i feature in, o feature out.

A layer call is affine in its block: y[b,g,t,o] = Σ_i W[g,o,i] a[b,g,t,i]. So for an output gradient g the block's
per-example gradient is

    G[v,b,g] = Σ_t g[v,b,g,t] a[b,g,t]ᵀ          (the sum over t comes before any square: docs/mathematics/layers.md)

and every curvature is a contraction of a and g. An `InputRows` holds its a in the cheapest form and does these contractions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.errors import InputError
from aftermap.linalg import TERMS_PER_PART, GramSum

__all__ = [
    "MOMENT_NUMBERS",
    "InputRows",
    "LayerRule",
    "Layout",
    "MatrixRows",
    "Named",
    "Piece",
    "add_grad_gram_",
    "append_ones",
    "examples_per_chunk",
    "find_rule",
    "group_products",
    "matrix_layout",
    "merge_vectors",
    "register",
    "registered_rules",
    "split_vectors",
    "sum_into_",
    "without_view",
]

# Working memory of one contraction, in numbers: large enough to keep the cores busy, small enough for the cache.
_CHUNK_NUMBERS = 1 << 22
# The same for per-example gradients that are read twice, for their sum and for their squares. Smaller chunks would stay in
# the cache between the two, but products over more examples at a time are worth more than that; a step of VOGN shows it
# (python -m benchmarks.run --only optim).
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
        """Takes values [..., *shape] of the parameter to columns [..., groups, out, stop − start] of the block."""
        lead = value.shape[: value.dim() - len(self.shape)]
        value = value.reshape(*lead, *self.view)
        value = value.permute(*range(len(lead)), *(len(lead) + i for i in self.order))
        return value.reshape(*lead, groups, out, self.stop - self.start)

    def to_parameter(self, columns: Tensor) -> Tensor:
        """Takes columns [..., groups, out, stop − start] of the block to values [..., *shape] of the parameter."""
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
        """The names of the parameters that form the block."""
        return tuple(piece.name for piece in self.pieces)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each of the block's parameters, by its name."""
        return {piece.name: piece.shape for piece in self.pieces}

    @property
    def size(self) -> int:
        """The number of entries of the block."""
        return self.groups * self.out * self.in_

    def join(self, params: Mapping[str, Tensor]) -> Tensor:
        """Joins parameters [..., *shape] to the block [..., groups, out, in]."""
        columns = [p.to_columns(params[p.name], self.groups, self.out) for p in self.pieces]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)

    def split(self, block: Tensor) -> dict[str, Tensor]:
        """Splits the block [..., groups, out, in] into parameters [..., *shape]."""
        if len(self.pieces) == 1:
            return {self.pieces[0].name: self.pieces[0].to_parameter(block)}
        return {p.name: p.to_parameter(block[..., p.start : p.stop]) for p in self.pieces}

    def positions(self) -> Tensor:
        """Says, for each entry of the flattened block, where it stands in the concatenation of the flattened parameters."""
        places: dict[str, Tensor] = {}
        start = 0
        for piece in self.pieces:
            size = math.prod(piece.shape)
            places[piece.name] = torch.arange(start, start + size).reshape(piece.shape)
            start += size
        return self.join(places).reshape(-1)

    def to_config(self) -> dict[str, Any]:
        """Returns the layout as plain lists and numbers, for saving."""
        return {
            "name": self.name,
            "groups": self.groups,
            "out": self.out,
            "in": self.in_,
            "pieces": [[p.name, list(p.shape), list(p.view), list(p.order), p.start, p.stop] for p in self.pieces],
        }

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> Layout:
        """Makes the layout from what :meth:`to_config` returned."""
        pieces = tuple(
            Piece(name, tuple(shape), tuple(view), tuple(order), start, stop)
            for name, shape, view, order, start, stop in config["pieces"]
        )
        return Layout(config["name"], config["groups"], config["out"], config["in"], pieces)


def examples_per_chunk(per_example: int, numbers: int = _CHUNK_NUMBERS) -> int:
    """Returns how many examples of ``per_example`` numbers each fit into a working memory of ``numbers``: at least one.

    >>> examples_per_chunk(300, 1000)
    3
    """
    return max(1, numbers // max(1, per_example))


def append_ones(columns: Tensor) -> Tensor:
    """Appends a 1 to each row, [..., i] -> [..., i + 1], so that the bias is one more weight."""
    return torch.cat([columns, columns.new_ones(*columns.shape[:-1], 1)], dim=-1)


def without_view(output: Any) -> Any:
    """Returns the same numbers in the same memory, but not as a view in the eyes of autograd.

    A Linear on tokens returns a view of a matrix product. An operation in place on a view (an activation, a residual
    sum) rewrites the graph around it, and the gradient edge of the view is lost.
    """
    if isinstance(output, Tensor) and output.requires_grad and output._is_view():
        return torch.ops.aten._unsafe_view(output, output.shape)
    return output


def merge_vectors(grads: Tensor) -> Tensor:
    """Puts all vectors into one matrix for the product with the rows that they share: [v, b, g, t, o] -> [b, g, v·o, t]."""
    vectors, batch, groups, shared, out = grads.shape
    if vectors == 1:
        return grads[0].transpose(-1, -2)
    return grads.permute(1, 2, 0, 4, 3).reshape(batch, groups, vectors * out, shared)


def group_products(values: Tensor, matrices: Tensor) -> Tensor:
    """Returns [..., g, r, n] times [g, n, m] as one product for each group, instead of one for each example and vector."""
    if len(matrices) == 1:
        return values @ matrices[0]
    return torch.einsum("...grn,gnm->...grm", values, matrices)


def split_vectors(products: Tensor, vectors: int) -> Tensor:
    """Takes the vectors apart again after a product of `merge_vectors`: [b, g, v·o, i] -> [v, b, g, o, i]."""
    return products.unflatten(2, (vectors, -1)).permute(2, 0, 1, 3, 4)


def sum_into_(out: Tensor, values: Tensor, *, fresh: bool) -> None:
    """Adds the sum over the first dimension of ``values`` to ``out``, or overwrites ``out`` with it if that is ``fresh``."""
    if values.is_contiguous():
        torch.sum(values, 0, out=out) if fresh else out.add_(values.sum(0))
        return
    # The sum is made in the order in which the values lie in memory: a sum right into another order would be slow.
    order = sorted(range(1, values.dim()), key=values.stride, reverse=True)
    summed, out = values.permute(0, *order).sum(0), out.permute([d - 1 for d in order])
    out.copy_(summed) if fresh else out.add_(summed)


# The methods of rows that have another name now.
_FORMER_NAMES = {
    "outer": "per_example_gradients",
    "outer_moments": "moments",
    "add_outer_squared_": "add_squares_",
    "total": "sum_over_positions",
    "lengths": "positions_per_group",
    "narrow": "examples",
    "for_reuse": "cached",
}


class InputRows(ABC):
    """The input rows a[b,g,t,i] of one call of a layer.

    Attributes:
        batch: The number of examples.
        groups: The number of groups.
        shared: The number of positions that share the weights.
        features: The number of entries of a row; the trailing 1 of a bias counts.
    """

    batch: int
    groups: int
    shared: int
    features: int

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuses former names of methods: nothing would call them, and what they changed would be missed silently."""
        super().__init_subclass__(**options)
        for former, name in _FORMER_NAMES.items():
            if callable(vars(cls).get(former)):
                raise InputError(
                    f"{cls.__name__}.{former} is called {name} now and would be ignored. Rename the method."
                )

    @abstractmethod
    def per_example_gradients(self, grads: Tensor) -> Tensor:
        """Returns the gradient of the block for every example: output gradients [v, b, g, t, o] -> [v, b, g, o, i]."""

    def add_squares_(self, out: Tensor, grads: Tensor) -> None:
        """Adds Σ_vb G², the squared per-example gradients for [v, b, g, t, o], to ``out`` [g, o, i]."""
        step = examples_per_chunk(grads.shape[0] * self.groups * grads.shape[-1] * self.features)
        for start in range(0, self.batch, step):
            part = self.examples(start, min(step, self.batch - start))
            out += part.per_example_gradients(grads[:, start : start + step]).square_().sum((0, 1))

    def moments(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Returns Σ_vb G and Σ_vb G² of the per-example gradients, in one pass: [v, b, g, t, o] -> two [g, o, i]."""
        step = examples_per_chunk(grads.shape[0] * self.groups * grads.shape[-1] * self.features, MOMENT_NUMBERS)
        first = self.examples(0, step) if step < self.batch else self
        gradients = first.per_example_gradients(grads[:, :step])
        total = gradients.sum((0, 1))
        squares = gradients.square_().sum((0, 1))
        for start in range(step, self.batch, step):
            part = self.examples(start, min(step, self.batch - start))
            gradients = part.per_example_gradients(grads[:, start : start + step])
            total += gradients.sum((0, 1))
            squares += gradients.square_().sum((0, 1))
        return total, squares

    def dense(self) -> Tensor | None:
        """Returns the rows as one tensor [b, g, t, i], with the 1 of a bias; None where they have only another form."""
        return None

    def turned(self, basis: Tensor) -> Tensor | None:
        """Returns the rows times a matrix [g, i, m] for each group: [b, g, t, m]; None where they are not dense."""
        rows = self.dense()
        return None if rows is None else group_products(rows, basis)

    def columns(self, grads: Tensor) -> list[Tensor] | None:
        """Returns per-example gradients for [v, b, g, t, o] as one column [b·g] per feature; None where they are no columns."""
        return None

    def cached(self) -> InputRows:
        """Returns the same rows in the form that is cheapest when several vectors will meet them."""
        return self

    @abstractmethod
    def examples(self, start: int, length: int) -> InputRows:
        """Returns the rows of ``length`` examples, from the example ``start`` on."""


class MatrixRows(InputRows):
    """The input rows of a layer with a weight matrix. Their Gram matrix is the input factor of a Kronecker block."""

    @abstractmethod
    def add_gram_(self, out: GramSum, weight: Tensor | None = None) -> None:
        """Adds Σ_bt w_b a aᵀ [g, i, i] to ``out``, or its diagonal [g, i] where the rows are one-hot.

        Args:
            out: The sum over batches that is added to.
            weight: The weight w of each example [b]; None where all of them count once.
        """

    @abstractmethod
    def sum_over_positions(self) -> Tensor:
        """Returns Σ_t a, the sum of each example's rows: [b, g, i]."""

    def positions_per_group(self) -> tuple[int, ...]:
        """Returns how many rows one example has in each group."""
        return (self.shared,) * self.groups


def add_grad_gram_(out: GramSum, grads: Tensor) -> None:
    """Adds Σ_vbt g gᵀ of gradients [v, b, g, t, o] to ``out`` [g, o, o]."""
    vectors, batch, groups, shared, width = grads.shape
    if shared > 1 and grads.stride(-2) == 1:
        # A convolution's gradient lies feature by feature: the lines are multiplied where they are.
        lines = grads.transpose(-1, -2).reshape(vectors * batch, groups, width, shared)
        step = examples_per_chunk(groups * width * width, 1 << 20)
        for start in range(0, len(lines), step):
            for part in lines[start : start + step].split(TERMS_PER_PART, -1):
                out.add_products((part @ part.transpose(-1, -2)).sum(0))
        return
    out.add(grads.permute(2, 0, 1, 3, 4).reshape(groups, -1, width))


class LayerRule(ABC):
    """The rule of one layer type.

    Attributes:
        matrix: Whether the block is a weight matrix, for which Kronecker factors make sense. Otherwise it is a vector of scales.
        one_hot: Whether the input rows are one-hot, so that their Gram matrix is a diagonal.
        leading: Whether inputs may have any number of dimensions between the batch and the features.
        roles: The attribute names of the parameters that the rule covers.
    """

    matrix: bool = True
    one_hot: bool = False
    leading: bool = False
    roles: tuple[str, ...] = ("weight", "bias")

    def unsupported(self, module: Any) -> str | None:
        """Says why this module cannot be treated by the rule; returns None when it can."""
        return None

    @abstractmethod
    def layout(self, name: str, module: Any, named: Named) -> Layout:
        """Says how the selected parameters form a block.

        Args:
            name: The name of the module in the network.
            module: The layer.
            named: For the role of each selected parameter, its name in the network and the parameter.
        """

    @abstractmethod
    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Named) -> InputRows:
        """Returns the input rows of a call.

        Args:
            module: The layer.
            inputs: The input of the call [b, ...].
            space: The shape of the call's output [b, ...], without b.
            named: For the role of each selected parameter, its name in the network and the parameter.
        """

    @abstractmethod
    def grads(self, module: Any, grads: Tensor) -> Tensor:
        """Arranges the gradient [v, b, ...] at the output of a call as [v, b, group, shared, out]."""


_RULES: dict[type[nn.Module], LayerRule] = {}


def register(*modules: type[nn.Module]) -> Callable[[type[LayerRule]], type[LayerRule]]:
    """Registers the decorated rule for these module types, and for their subclasses that do not change ``forward``."""

    def add(rule: type[LayerRule]) -> type[LayerRule]:
        instance = rule()
        for module in modules:
            _RULES[module] = instance
        return rule

    return add


def registered_rules() -> dict[type[nn.Module], LayerRule]:
    """Returns every registered module type with its rule."""
    return dict(_RULES)


def find_rule(module: nn.Module) -> LayerRule | None:
    """Returns the rule of a module; None where there is none, or where a subclass has a ``forward`` of its own."""
    for kind in type(module).__mro__:
        if kind in _RULES:
            return _RULES[kind] if type(module).forward is kind.forward else None
    return None


def matrix_layout(
    name: str, named: Named, groups: int, out: int, view: tuple[int, ...], order: tuple[int, ...]
) -> Layout:
    """Lays out a block [groups, out, in] of a weight and a bias; the bias is the last column.

    Args:
        name: The name of the module in the network.
        named: The selected ones of the roles "weight" and "bias", each with its name in the network and the parameter.
        groups: The number of groups.
        out: The number of output features of one group.
        view: The shape that the weight is brought to first.
        order: How the view's dimensions are permuted then, to groups, output features and input features.
    """
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
