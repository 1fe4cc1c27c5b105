"""How the parameters of a layer lie in its block [group, out, in]: one matrix per group, the bias as last column."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

__all__ = ["Layout", "Piece"]


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

    @cached_property
    def _in_order(self) -> bool:
        """Nothing is permuted."""
        return self.order == tuple(range(len(self.order)))

    def to_columns(self, value: Tensor, groups: int, out: int) -> Tensor:
        """[..., *shape] -> [..., groups, out, stop − start]."""
        lead = value.shape[: value.dim() - len(self.shape)]
        value = value.reshape(*lead, *self.view)
        value = value.permute(*range(len(lead)), *(len(lead) + i for i in self.order))
        return value.reshape(*lead, groups, out, self.stop - self.start)

    def to_parameter(self, columns: Tensor) -> Tensor:
        """[..., groups, out, stop − start] -> [..., *shape]."""
        lead = columns.shape[:-3]
        if self._in_order:  # most layers, and once per layer and step of an optimiser
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
