"""What a consumer of the engine is: something that sums while batches and back-propagated vectors pass by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from aftermap.curvature.factors import Block
from aftermap.curvature.rows import budget
from aftermap.curvature.step import BatchStep, VectorStep

__all__ = ["Accumulator", "ExampleAccumulator", "ExampleSum"]


class Accumulator(ABC):
    """Sums blocks over a stream of batches.

    Attributes:
        needs: the sites whose gradients it looks at; None for all. It is called once these are there.
    """

    needs: tuple[int, ...] | None = None

    def on_batch(self, step: BatchStep) -> None:  # noqa: B027
        """Once per batch, before any vector."""

    @abstractmethod
    def on_vectors(self, step: VectorStep) -> None:
        """For each group of back-propagated vectors."""

    @abstractmethod
    def results(self) -> list[Block]:
        """The blocks."""


class ExampleSum(ABC):
    """A sum over per-example gradients of some parameters."""

    names: tuple[str, ...]

    @abstractmethod
    def add(self, found: Mapping[str, Tensor]) -> None:
        """Adds gradients [v, b, *shape] by name."""

    @abstractmethod
    def result(self) -> Block:
        """The block."""


class ExampleAccumulator(Accumulator):
    """Hands per-example gradients, some examples at a time, to sums that share one pass over them."""

    def __init__(self, sums: Sequence[ExampleSum], numbers: int, needs: tuple[int, ...] | None = None):
        self.sums, self.needs = list(sums), needs
        self.numbers = numbers  # per example and vector

    def on_vectors(self, step: VectorStep) -> None:
        names = [n for each in self.sums for n in each.names]
        stride = budget(step.vectors * self.numbers)
        for start in range(0, step.batch.size, stride):
            found = step.per_example(names, start, min(stride, step.batch.size - start))
            for each in self.sums:
                each.add({n: found[n] for n in each.names})

    def results(self) -> list[Block]:
        return [each.result() for each in self.sums]
