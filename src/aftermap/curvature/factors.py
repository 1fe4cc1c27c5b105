"""Sums over data in frozen form: blocks of a curvature matrix, and the whole of them.

A `Factors` stands for Σ_n (curvature of datum n): a block-diagonal matrix over the selected parameters. Factors of
disjoint data add up, scale with a number, and sum over processes. What a block stands for, block by block, is
`to_dense`; nothing outside a block's own file knows its scale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aftermap.distributed import all_reduce_, is_distributed
from aftermap.errors import InputError

__all__ = ["Block", "Factors", "Treatment", "same_names"]


class Block(ABC):
    """A symmetric matrix over some parameters, in the order of `shapes`, each parameter row-major."""

    kind: str

    @property
    @abstractmethod
    def name(self) -> str:
        """A name for tables: the layer's path, or the first parameter."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters and their shapes."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Everything that adds up over data."""

    @abstractmethod
    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Block:
        """The same block with other sums."""

    @abstractmethod
    def scaled(self, factor: float) -> Block:
        """The block times a number."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """[p, p] in float64."""

    @abstractmethod
    def diagonal(self) -> dict[str, Tensor]:
        """The diagonal, by parameter, in float64."""

    @property
    def size(self) -> int:
        """P."""
        return sum(math.prod(s) for s in self.shapes.values())

    def trace(self) -> float:
        """Σ of the diagonal."""
        return float(sum(d.sum() for d in self.diagonal().values()))

    def __add__(self, other: Block) -> Block:
        same_names(self, other)
        mine, theirs = self.tensors(), other.tensors()
        return self.with_tensors({k: mine[k] + theirs[k] for k in mine})


def same_names(left: Block, right: Block) -> None:
    """Raises unless two blocks are of one kind and over the same parameters."""
    if type(left) is not type(right) or left.shapes != right.shapes:
        raise InputError(
            f"a {left.kind} block over {list(left.shapes)} and a {right.kind} block over {list(right.shapes)} cannot be added; "
            "fit both with the same structure and parameters"
        )


@dataclass(frozen=True)
class Treatment:
    """How one parameter was treated.

    Attributes:
        block: kron, ekfac, kfra, full, diagonal, low rank …
        rule: the layer rule's name, or "per-example" where there was none.
        note: why there was none; "unused" if the outputs do not depend on it.
    """

    block: str
    rule: str
    note: str = ""

    @property
    def by_rule(self) -> bool:
        """Whether a layer rule covered it."""
        return self.rule != "per-example"


@dataclass(frozen=True)
class Factors:
    """The curvature of a data set.

    Attributes:
        structure: what was asked for.
        blocks: together they hold every selected parameter once.
        names: the selected parameters in the model's order.
        n_data: how many data were seen (in one pass; weights count as copies).
        loss: Σ −log p(y_n | f_n) over one pass.
        curvature: kind of vectors (exact, rademacher, …).
        treatment: how each parameter was treated.
        n_outputs: numbers that the network returns for one datum.
    """

    structure: str
    blocks: tuple[Block, ...]
    names: tuple[str, ...]
    n_data: float
    loss: float
    curvature: str
    treatment: Mapping[str, Treatment]
    n_outputs: int = 0

    def __add__(self, other: Factors) -> Factors:
        """The curvature of both data sets together."""
        if (self.structure, self.names) != (other.structure, other.names):
            raise InputError(
                f"factors with structure {self.structure!r} over {len(self.names)} parameters and with structure "
                f"{other.structure!r} over {len(other.names)} cannot be added; fit both in the same way"
            )
        blocks = tuple(a + b for a, b in zip(self.blocks, other.blocks, strict=True))
        return replace(self, blocks=blocks, n_data=self.n_data + other.n_data, loss=self.loss + other.loss)

    def __mul__(self, factor: float) -> Factors:
        """Every datum counted ``factor`` times."""
        if not math.isfinite(factor) or factor < 0:
            raise InputError(f"factors can be multiplied by a finite number that is not negative, got {factor}")
        blocks = tuple(b.scaled(factor) for b in self.blocks)
        return replace(self, blocks=blocks, n_data=self.n_data * factor, loss=self.loss * factor)

    __rmul__ = __mul__

    def all_reduced(self) -> Factors:
        """The sum over all processes; one message per dtype. In one process: the same."""
        if not is_distributed():
            return self
        count = torch.tensor([self.n_data, self.loss], dtype=torch.float64)
        sums = [{k: t.clone() for k, t in b.tensors().items()} for b in self.blocks]
        all_reduce_([count, *(t for each in sums for t in each.values())])
        blocks = tuple(b.with_tensors(t) for b, t in zip(self.blocks, sums, strict=True))
        return replace(self, blocks=blocks, n_data=float(count[0]), loss=float(count[1]))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters, in the order of `names`."""
        found = {n: s for b in self.blocks for n, s in b.shapes.items()}
        return {n: found[n] for n in self.names}

    @property
    def n_params(self) -> int:
        """How many numbers are selected."""
        return sum(b.size for b in self.blocks)

    def to_dense(self) -> Tensor:
        """The matrix [P, P] in float64 over `names`, each parameter row-major; for small models and tests."""
        shapes = self.shapes
        starts: dict[str, int] = {}
        total = 0
        for name in self.names:
            starts[name] = total
            total += math.prod(shapes[name])
        dense = torch.zeros(total, total, dtype=torch.float64)
        for block in self.blocks:
            place = torch.cat([torch.arange(math.prod(s)) + starts[n] for n, s in block.shapes.items()])
            dense[place[:, None], place] = block.to_dense().cpu()
        return dense

    def diagonal(self) -> dict[str, Tensor]:
        """The diagonal by parameter, in float64."""
        found: dict[str, Tensor] = {}
        for block in self.blocks:
            found.update(block.diagonal())
        return {n: found[n] for n in self.names}

    def trace(self) -> float:
        """Σ of the diagonal: the mean curvature seen by a random direction, times P."""
        return sum(b.trace() for b in self.blocks)

    def summary(self) -> str:
        """A table of the blocks, for people."""
        rows: list[Sequence[Any]] = [("block", "kind", "parameters", "trace", "treated by")]
        for block in self.blocks:
            first = self.treatment[next(iter(block.shapes))]
            how = first.rule + (f" ({first.note})" if first.note else "")
            rows.append((block.name, block.kind, f"{block.size:,}", f"{block.trace():.4g}", how))
        widths = [max(len(str(r[c])) for r in rows) for c in range(len(rows[0]))]
        lines = [
            f"{self.structure} curvature ({self.curvature} vectors) of {self.n_params:,} parameters, "
            f"{self.n_data:,g} data, negative log-likelihood {self.loss:.5g}",
            "",
        ]
        for number, row in enumerate(rows):
            cells = [
                str(v).rjust(w) if c in (2, 3) else str(v).ljust(w)
                for c, (v, w) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
            if number == 0:
                lines.append("  ".join("-" * w for w in widths))
        return "\n".join(lines)
