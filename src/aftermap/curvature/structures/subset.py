"""The Gauss-Newton matrix of some training examples, with all terms between layers.

Let A [R, P] hold the gradients Jᵀv of m examples that were drawn from N, for the vectors v whose outer products sum to the
Hessian of the loss in the outputs. Each of them stands for N/m data:

    G ≈ (N/m) AᵀA = U diag(l) Uᵀ.

Of the two matrices AAᵀ [R, R] and AᵀA [P, P] the smaller one is decomposed, in float64. The result is a `LowRankBlock`: what the
directions in U do not explain keeps the prior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from aftermap.batches import Batch
from aftermap.curvature.passes.backward import PerExampleAccumulator, PerExampleSum
from aftermap.curvature.passes.block import Block
from aftermap.curvature.passes.stream import CurvatureProblem, DataCounts
from aftermap.curvature.passes.vectors import make_vectors
from aftermap.curvature.structures.base import Structure, register_structure
from aftermap.curvature.structures.full import FullSum
from aftermap.curvature.structures.low_rank import LowRankBlock
from aftermap.distributed import all_reduce_, broadcast_number, fail_together, rank, world_size
from aftermap.errors import DataError, InputError
from aftermap.linalg import DenseWork, GramSum, psd_eigh

__all__ = ["MAX_NUMBERS", "SubsetSum"]

MAX_NUMBERS = 500_000_000  # of rows that are held during a fit: 2 GB in single precision
# Columns of the rows that are in double precision at once (64 MB).
_NUMBERS = 1 << 23


class ExampleDraw:
    """Which examples a fit uses: counted in one pass over the data, drawn without replacement, taken in another.

    An example with the weight zero counts as missing. In a process group the draw is from the data of all processes.

    Args:
        problem: The data, and how many examples are wanted.
        parameters: How many numbers a row has.

    Attributes:
        counts: What passed by in the first pass: all data of this process.
        total: How many examples there are.
        size: How many of them are drawn.
        own_size: How many of these are this process's.
        vectors: The most vectors that one example has.
    """

    def __init__(self, problem: CurvatureProblem, parameters: int):
        self._problem, self._parameters = problem, parameters
        self.vectors = 0
        self._seen = self._place = 0
        self.counts = problem.sum_loss(self._count)
        seen = torch.zeros(world_size(), dtype=torch.int64)
        seen[rank()] = self._seen
        most = torch.zeros(world_size(), dtype=torch.int64)
        most[rank()] = self.vectors
        all_reduce_([seen, most])
        self.total, self.vectors = int(seen.sum()), int(most.max())
        if self.total == 0:
            raise DataError(
                "every example has the weight zero, so there is nothing to draw; give some a positive weight"
            )
        self.size = min(problem.subset_size, self.total)
        self._check_memory(self.total)
        first = int(seen[: rank()].sum())
        chosen = self._draw()
        self._wanted = torch.zeros(self._seen, dtype=torch.bool)
        self._wanted[chosen[(chosen >= first) & (chosen < first + self._seen)] - first] = True
        self.own_size = int(self._wanted.sum())

    def _count(self, batch: Batch, outputs: Tensor) -> None:
        """Counts the examples of a batch, and their vectors."""
        problem = self._problem
        self._seen += batch.size if batch.weight is None else int((batch.weight > 0).sum())
        vectors = make_vectors(problem.curvature, problem.likelihood, outputs, batch.targets, samples=problem.samples)
        self.vectors = max(self.vectors, vectors.count)
        self._check_memory(self._seen)

    def _check_memory(self, seen: int) -> None:
        """Raises as soon as it is certain that the rows are too many."""
        examples = min(self._problem.subset_size, seen)
        rows = examples * self.vectors
        numbers = self._parameters * min(rows, self._parameters)
        if numbers > MAX_NUMBERS:
            size = self._problem.sums_dtype.itemsize * numbers / 2**30
            raise InputError(
                f"structure='subset' would hold the gradients of {examples:,} examples with {self.vectors} vectors each in "
                f"{self._parameters:,} parameters: {size:,.1f} GB. The limit are {MAX_NUMBERS:,} numbers. Use a smaller "
                f"subset_size= (at most {max(1, MAX_NUMBERS // (self.vectors * self._parameters)):,} here), fewer parameters "
                "(params='last_block' or 'last_layer'), or structure='low_rank' with a small rank=, which holds no gradients of examples"
            )

    def _draw(self) -> Tensor:
        """Returns the numbers of the chosen examples, the same in every process."""
        if self.size == self.total:
            return torch.arange(self.total)
        generator = self._problem.generator
        device = torch.device("cpu") if generator is None else generator.device
        seed = broadcast_number(int(torch.randint(2**62, (), generator=generator, device=device)))
        return torch.randperm(self.total, generator=torch.Generator().manual_seed(seed))[: self.size]

    def choose(self, batch: Batch) -> Batch | None:
        """Returns the chosen examples of the next batch; None where it has none."""
        there = torch.arange(batch.size) if batch.weight is None else (batch.weight > 0).nonzero()[:, 0].cpu()
        wanted = self._wanted[self._place : self._place + len(there)]
        self._place += len(there)
        if len(wanted) < len(there):
            self._raise_other_length()
        index = there[wanted]
        return batch if len(index) == batch.size else batch.take(index) if len(index) else None

    def check_end(self) -> None:
        """Raises where the second pass had other data than the first."""
        with fail_together("drawing examples"):
            if self._place != self._seen:
                self._raise_other_length()

    def _raise_other_length(self) -> None:
        raise DataError(
            f"the data had {self._seen} examples when they were counted, and another number when they were read again; "
            "structure='subset' needs data that have the same length every time"
        )


class SubsetSum(PerExampleSum):
    """Holds the gradients of the chosen examples, and makes U and l of them.

    Args:
        shapes: The parameters and their shapes.
        draw: Whose gradients come.
        keep: How many directions are kept; None for all.
        dtype: Of the rows while they are held.
        device: Where they are.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        draw: ExampleDraw,
        keep: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.shapes, self.names, self.draw, self.keep = dict(shapes), tuple(shapes), draw, keep
        self.size = sum(math.prod(s) for s in shapes.values())
        most = draw.size * draw.vectors
        self._matrix = FullSum("all", shapes, device) if self.size <= most else None
        rows = 0 if self._matrix is not None else draw.own_size * draw.vectors
        self._rows = torch.empty(rows, self.size, dtype=dtype, device=device)
        self._used = 0

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        if self._matrix is not None:
            self._matrix.add(gradients)
            return
        vectors, examples = next(iter(gradients.values())).shape[:2]
        count = vectors * examples
        if self._used + count > len(self._rows):  # outputs became longer between the passes
            self._rows = torch.cat([self._rows, self._rows.new_empty(self._used + count, self.size)])
        start = 0
        for name in self.names:
            lines = gradients[name].reshape(count, -1)
            self._rows[self._used : self._used + count, start : start + lines.shape[1]] = lines
            start += lines.shape[1]
        self._used += count

    def block(self) -> LowRankBlock:
        """Returns the block; in a process group from the rows of all processes."""
        vectors, values = self._from_rows() if self._matrix is None else self._from_matrix(self._matrix)
        return LowRankBlock("all", self.shapes, vectors, values * (self.draw.total / self.draw.size))

    def _from_matrix(self, sums: FullSum) -> tuple[Tensor, Tensor]:
        """Returns U and l of AᵀA, which is the smaller matrix."""
        matrix = sums.block().matrix
        all_reduce_([matrix])
        values, vectors = psd_eigh(matrix, what="the curvature of the chosen examples")
        leading = self._leading(values)
        return vectors[:, leading], values[leading]

    def _from_rows(self) -> tuple[Tensor, Tensor]:
        """Returns U and l from AAᵀ, which is the smaller matrix."""
        rows = self._gathered()
        step = max(1, _NUMBERS // max(1, len(rows)))
        gram = GramSum(1, len(rows), torch.float64, rows.device)
        for columns in rows.split(step, dim=1):
            gram.add(columns.to(torch.float64).T[None])
        values, left = psd_eigh(gram.full()[0], what="the products of the chosen examples' gradients")
        leading = self._leading(values)
        if not len(leading):
            return values.new_zeros(self.size, 0), values[leading]
        values, left = values[leading], left[:, leading] / values[leading].sqrt()
        vectors = torch.cat([columns.to(torch.float64).T @ left for columns in rows.split(step, dim=1)])
        # A direction with a small eigenvalue still holds what rounding left of those with large ones: QR makes the columns
        # orthonormal, and the small matrix says how the eigenvalues turn.
        vectors, turned = torch.linalg.qr(vectors)
        values, turn = psd_eigh((turned * values) @ turned.T, what="the curvature of the chosen examples")
        return (vectors @ turn).flip(1), values.flip(0)

    def _gathered(self) -> Tensor:
        """Returns the rows of all processes."""
        counts = torch.zeros(world_size(), dtype=torch.int64)
        counts[rank()] = self._used
        all_reduce_([counts])
        rows = self._rows[: self._used]
        if world_size() > 1:
            everybody = rows.new_zeros(int(counts.sum()), self.size)
            start = int(counts[: rank()].sum())
            everybody[start : start + self._used] = rows
            all_reduce_([everybody])
            rows = everybody
        return rows

    def _leading(self, values: Tensor) -> Tensor:
        """Returns the places of the leading eigenvalues that are more than rounding, the largest first."""
        order = torch.arange(len(values) - 1, -1, -1, device=values.device)
        order = order[values[order] > len(values) * torch.finfo(torch.float64).eps * values.max()]
        return order[: self.keep]


def fit_subset(problem: CurvatureProblem) -> tuple[tuple[Block, ...], DataCounts]:
    """Returns the leading directions of the Gauss-Newton matrix of some examples, of the data of all processes."""
    shapes = problem.shapes
    size = sum(math.prod(s) for s in shapes.values())
    draw = ExampleDraw(problem, size)
    rows = SubsetSum(shapes, draw, problem.rank, problem.sums_dtype, problem.device)
    blocks, used = problem.run([PerExampleAccumulator([rows], size)], "curvature of a subset", choose=draw.choose)
    draw.check_end()
    draw.counts.used = used.used
    return blocks, draw.counts


def subset_work(parameters: int, rows: int, keep: int | None) -> DenseWork:
    """Returns the work on the Gram matrix of the rows, or of the parameters where these are fewer, its eigenvectors, and their QR decomposition."""
    if parameters <= rows:
        return DenseWork(0.0, (parameters,))
    directions = rows if keep is None else min(keep, rows)
    return DenseWork(parameters * (0.5 * rows**2 + rows * directions + 3.0 * directions**2), (rows, directions))


register_structure(
    Structure(
        "subset",
        "The leading directions of the whole matrix of some examples; all others keep the prior.",
        fit_subset,
        (LowRankBlock,),
        passes=2,
        blocks_are_global=True,
        drawn_work=subset_work,
    )
)
