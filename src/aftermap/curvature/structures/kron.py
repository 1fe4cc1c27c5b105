"""Kronecker-factored curvature (KFAC): one pair of factors per layer and group.

For the sum loss and row-major vec(W) the block of a layer is approximated by

    Σ_n Σ_v vec(G_nv) vec(G_nv)ᵀ ≈ B ⊗ A / rows,   A = Σ a aᵀ,   B = Σ g gᵀ

The sums are over data and shared positions (expand, Grosse & Martens 2016; Ritter et al. 2018, eq. 1 and 14), or over
data after summing each example's positions (reduce, Eschenhagen et al. 2023). ``rows`` is the number of rows in A: the
block is an expectation over rows of one factor times the sum of the other. It is exact for one datum without sharing,
for deep linear networks with squared loss, and (reduce) for linear convolutions with mean pooling.

Kronecker posteriors live in the eigenbasis: KFAC, EKFAC and KFRA factors with the exact prior, or factored damping.

With B ⊗ A / rows = (U_B ⊗ U_A) diag(μ_i λ_j) (U_B ⊗ U_A)ᵀ the posterior precision has eigenvalues

    exact:      s·μ_i λ_j + δ                                        (EKFAC: s·E_ij + δ)
    factored:   (√(sN) λ_j + √δ)(√(s/N) μ_i + √δ)                    (Ritter et al. 2018, eq. 9, with H̄ = B/N)
    pi:         (√(sN) λ_j + π√δ)(√(s/N) μ_i + √δ/π),  π² = ratio of the factors' mean traces

in the same basis, so priors, scales and kinds of damping are all re-evaluated without a decomposition.

Draws are cheaper from a Kronecker block whose data leave many directions to the prior.

With fewer data than a layer is wide, most eigenvalues of its factors are zero, and there the standard deviation is the
prior's, c = δ^{-1/2}. A standard normal matrix E looks the same in every basis, so

    W = c·E + U_R ((T − c) ∘ (U_Rᵀ E V_C)) V_Cᵀ,        T_ij the standard deviation in eigen-direction (i, j),

is a draw from the block, exactly, where R and C are the directions in which T differs from c. Only these are rotated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from aftermap.curvature.passes.backward import Accumulator, LayerGradients
from aftermap.curvature.passes.record import ForwardRecord
from aftermap.curvature.passes.stream import CurvatureProblem, DataCounts
from aftermap.curvature.rules.base import Layout, MatrixRows, add_grad_gram_
from aftermap.curvature.structures.assign import layer_accumulators
from aftermap.curvature.structures.base import (
    Block,
    BlockPosterior,
    OutputNoise,
    Structure,
    register_structure,
)
from aftermap.curvature.structures.diagonal import DiagonalBlock
from aftermap.curvature.structures.eigenbasis import (
    DAMPINGS,
    Eigen,
    KroneckerEigenbasis,
    damped_eigenvalues,
    eigendecompose,
)
from aftermap.curvature.structures.full import FullBlock
from aftermap.curvature.structures.layer_covariance import layer_covariance, layer_of
from aftermap.curvature.structures.sketch import DIRECTIONS, sketch_basis
from aftermap.draws import normal_like
from aftermap.errors import InputError, UnsupportedError
from aftermap.linalg import GramSum, kron, take_like, take_under
from aftermap.params import Params
from aftermap.prior import Prior

__all__ = [
    "APPROACHES",
    "Informed",
    "KronAccumulator",
    "KronBlock",
    "KronBlockPosterior",
    "KroneckerEigenvalues",
    "decompose_bases",
    "rotation_costs",
]

APPROACHES = ("expand", "reduce")
# An embedding with more entries than this has no reduced Kronecker factors: their input side would be a dense matrix.
_MAX_REDUCED_ONE_HOT = 4096
_SAMPLE_NUMBERS = 1 << 20
_LEAST_DATA = 0.1  # Data that add less than this share to the prior's precision count as none in a sketch.
_ROUNDING = 8  # Times machine epsilon this is less than the rotations themselves round.


@dataclass(frozen=True)
class KronBlock(Block):
    """The matrix B ⊗ A / rows for each group.

    Attributes:
        layout: The way in which the parameters form [group, out, in].
        inputs: The factor A [g, i, i], or its diagonal [g, i] (embeddings).
        outputs: The factor B [g, o, o].
        rows: The number of rows in A [g], float64.
        kind: The structure that the factors are of: kron or kfra.
        approach: What the sums are sums of: expand or reduce.
    """

    layout: Layout
    inputs: Tensor
    outputs: Tensor
    rows: Tensor
    kind: str = "kron"
    approach: str = "expand"
    dampings = DAMPINGS
    one_precision = True

    def __add__(self, other: Block) -> Block:
        if isinstance(other, KronBlock) and other.approach != self.approach:
            raise InputError(
                f"Kronecker factors of {self.name} made with approach={self.approach!r} and with {other.approach!r} are sums "
                "of different things and cannot be added; fit both with the same approach"
            )
        return super().__add__(other)

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.layout.shapes

    def tensors(self) -> dict[str, Tensor]:
        return {"inputs": self.inputs, "outputs": self.outputs, "rows": self.rows}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> KronBlock:
        return replace(self, inputs=tensors["inputs"], outputs=tensors["outputs"], rows=tensors["rows"])

    def scaled(self, factor: float) -> KronBlock:
        # Counting every datum c times multiplies both sums and the rows.
        return replace(self, inputs=self.inputs * factor, outputs=self.outputs * factor, rows=self.rows * factor)

    def input_mean(self) -> Tensor:
        """Returns A / rows in float64: [g, i, i] or [g, i]."""
        return self.inputs.to(torch.float64) / self.row_counts().reshape(-1, *[1] * (self.inputs.dim() - 1))

    def row_counts(self) -> Tensor:
        """Returns what A is divided by, [g] in float64; 1 for a layer that was never called, whose A is 0."""
        return torch.where(self.rows > 0, self.rows, 1.0)

    def to_dense(self) -> Tensor:
        mean, size = self.input_mean(), self.layout.out * self.layout.in_
        dense = torch.zeros(self.size, self.size, dtype=torch.float64, device=mean.device)
        for g in range(self.layout.groups):
            side = torch.diag(mean[g]) if mean.dim() == 2 else mean[g]
            part = slice(g * size, (g + 1) * size)
            dense[part, part] = kron(self.outputs[g].to(torch.float64), side)
        place = self.layout.positions()
        ordered = torch.empty_like(dense)
        ordered[place[:, None], place] = dense
        return ordered

    def diagonal(self) -> dict[str, Tensor]:
        mean = self.input_mean()
        inputs = mean if mean.dim() == 2 else mean.diagonal(dim1=-2, dim2=-1)
        outputs = self.outputs.to(torch.float64).diagonal(dim1=-2, dim2=-1)
        return self.layout.split(outputs[:, :, None] * inputs[:, None, :])

    def matrices_to_decompose(self, prior: Prior | None = None) -> list[tuple[str, Tensor]]:
        """Returns B, and A where it is not diagonal."""
        outputs = (f"the output factor of {self.name}", self.outputs)
        return [outputs] if self.inputs.dim() == 2 else [outputs, (f"the input factor of {self.name}", self.inputs)]

    def posterior(
        self, prior: Prior, scale: Tensor, eigen: Sequence[Eigen], *, damping: str, dtype: torch.dtype, n_data: float
    ) -> KronBlockPosterior:
        """Makes the posterior: eigenvectors take ``dtype``, as they meet the network's gradients; eigenvalues stay in float64."""
        mu, output_vectors = eigen[0]
        if self.inputs.dim() == 2:  # This is the diagonal of A, whose eigenvectors are the unit vectors.
            lam, basis = self.input_mean(), KroneckerEigenbasis(None, output_vectors)
        else:
            lam, basis = eigen[1][0] / self.row_counts()[:, None], KroneckerEigenbasis(eigen[1][1], output_vectors)
        device = self.outputs.device
        return KronBlockPosterior(
            self,
            self.layout,
            basis.to(dtype),
            KroneckerEigenvalues(None, mu, lam, n_data),
            prior.scalar(tuple(self.shapes)).to(device),
            scale.to(device),
            damping,
        )


def decompose_bases(
    blocks: list[KronBlock], dtype: torch.dtype, load_or_make: Callable[[Callable[[], list[Tensor]]], list[Tensor]]
) -> list[KroneckerEigenbasis]:
    """Returns the eigenbases of Kronecker blocks; over several processes the work is shared out.

    Args:
        blocks: The blocks, in a list that is emptied, so that a factor can go when its basis exists and never both
            exist of all layers.
        dtype: The precision of the eigenvectors.
        load_or_make: A function that returns the eigenvectors of an earlier run, or those that its argument makes.
    """
    diagonal_inputs = [block.inputs.dim() == 2 for block in blocks]
    device = blocks[0].outputs.device if blocks else None
    matrices = [pair for block in blocks for pair in block.matrices_to_decompose()]
    blocks.clear()

    def decompose() -> list[Tensor]:
        return [eigenvectors for _, eigenvectors in eigendecompose(matrices, dtype, release=True)]

    # LAPACK returns columns that lie together, and a file rows: products with the one round differently than with the other.
    vectors = iter([eigenvectors.to(device).contiguous() for eigenvectors in load_or_make(decompose)])
    bases = []
    for diagonal in diagonal_inputs:
        outputs = next(vectors)
        bases.append(KroneckerEigenbasis(None if diagonal else next(vectors), outputs))
    return bases


class KronAccumulator(Accumulator):
    """The sums A and B of one layer.

    Args:
        layer: The layer's number.
        layout: The way in which its parameters form a block.
        approach: The kind of sums: "expand" or "reduce".
        dtype: The dtype of the sums.
        device: The device of the sums.
        one_hot: Whether the input rows are one-hot. Expanded, their Gram matrix is diagonal and kept as one; reduced, each
            example's rows are summed first, and it is not.
    """

    def __init__(
        self,
        layer: int,
        layout: Layout,
        approach: str,
        dtype: torch.dtype,
        device: torch.device,
        one_hot: bool = False,
    ):
        self.layer, self.layout, self.approach, self.layers = layer, layout, approach, (layer,)
        groups, out, width = layout.groups, layout.out, layout.in_
        if one_hot and approach == "reduce" and width > _MAX_REDUCED_ONE_HOT:
            raise InputError(
                f"approach='reduce' for {layout.name} would need a matrix over its {width:,} entries; allowed are "
                f"{_MAX_REDUCED_ONE_HOT:,}. Use approach='expand', or leave its parameters out with params="
            )
        self.inputs = GramSum(groups, width, dtype, device, diagonal=one_hot and approach == "expand")
        self.outputs = GramSum(groups, out, dtype, device)
        self.rows, self.device = [0.0] * groups, device

    @staticmethod
    def of(problem: CurvatureProblem, layer: int) -> KronAccumulator:
        """Makes the accumulator of a problem's layer."""
        chosen = problem.plan.layers[layer]
        return KronAccumulator(
            layer, chosen.layout, problem.approach, problem.sums_dtype, problem.device, chosen.rule.one_hot
        )

    def start_batch(self, record: ForwardRecord) -> None:
        weight = record.batch.weight
        rows = [rows for call in record.calls[self.layer] if isinstance(rows := call.fresh_rows(), MatrixRows)]
        if len(rows) < len(record.calls[self.layer]):
            raise UnsupportedError(
                f"the rule of {self.layout.name} says that its block is a weight matrix, but its rows have no Gram matrix. Derive "
                "them from MatrixRows, or set matrix = False in the rule"
            )
        if not rows:
            return
        count = record.size if weight is None else float(weight.sum())
        lengths = [sum(group) for group in zip(*(r.positions_per_group() for r in rows), strict=True)]
        if self.approach == "expand":
            for part in rows:
                part.add_gram_(self.inputs, weight)
            self.rows = [r + count * n for r, n in zip(self.rows, lengths, strict=True)]
            return
        total = sum((r.sum_over_positions() for r in rows[1:]), rows[0].sum_over_positions())  # [b, g, i]
        if weight is not None:
            total = total * weight.to(total.dtype).sqrt()[:, None, None]
        self.inputs.add(total.transpose(0, 1))
        self.rows = [r + count * n**2 for r, n in zip(self.rows, lengths, strict=True)]

    def add(self, gradients: LayerGradients) -> None:
        arrived = [g for _, g in gradients.by_layer[self.layer]]
        if not arrived:
            return
        if self.approach == "expand":
            for part in arrived:
                add_grad_gram_(self.outputs, part)
            return
        total = sum((g.sum(3) for g in arrived[1:]), arrived[0].sum(3))  # [v, b, g, o]
        self.outputs.add(total.flatten(0, 1).transpose(0, 1))

    def state(self) -> dict[str, Tensor]:
        inputs = {f"inputs.{name}": value for name, value in self.inputs.state().items()}
        outputs = {f"outputs.{name}": value for name, value in self.outputs.state().items()}
        return {**inputs, **outputs, "rows": torch.tensor(self.rows, dtype=torch.float64)}

    def add_state(self, state: dict[str, Tensor]) -> None:
        self.inputs.add_state(take_under(state, "inputs."))
        self.outputs.add_state(take_under(state, "outputs."))
        rows = take_like(state, "rows", torch.tensor(self.rows, dtype=torch.float64))
        self.rows = [mine + saved for mine, saved in zip(self.rows, rows.tolist(), strict=True)]

    def blocks(self) -> list[Block]:
        rows = torch.tensor(self.rows, dtype=torch.float64, device=self.device)
        return [KronBlock(self.layout, self.inputs.full(), self.outputs.full(), rows, approach=self.approach)]


def fit_kron(problem: CurvatureProblem) -> tuple[tuple[Block, ...], DataCounts]:
    """Fits in one pass over the data: Kronecker factors for weight matrices, small full blocks or diagonals for the rest."""
    return problem.run(layer_accumulators(problem, KronAccumulator.of), "kron curvature")


def rotation_costs(rows: int, columns: int, out: int, into: int) -> tuple[int, int]:
    """Returns the multiplications of one draw of [o, i] with r × c informed directions: the outer side first, or the inner one.

    >>> rotation_costs(1, 2, 3, 4)
    (40, 60)
    """
    return 2 * rows * into * (out + columns), 2 * columns * out * (into + rows)


class Informed:
    """The directions of a block that data inform.

    Args:
        outer: The output directions U_R [g, o, r].
        inner: The input directions V_C [g, i, c].
        prior_deviation: The prior's standard deviation c, 0-d.
        deviations: The standard deviations T of these directions [g, r, c].

    >>> import torch
    >>> eye = torch.eye(3)[None]
    >>> one = Informed(eye[:, :, :1], eye[:, :, :2], torch.tensor(2.0), torch.tensor([[[0.5, 1.0]]]))
    >>> drawn = torch.empty(1, 1, 3, 3)
    >>> one.draw(torch.ones(1, 1, 3, 3), [(slice(0, 3), drawn)])
    >>> drawn[0, 0]
    tensor([[0.5000, 1.0000, 2.0000],
            [2.0000, 2.0000, 2.0000],
            [2.0000, 2.0000, 2.0000]])
    """

    def __init__(self, outer: Tensor, inner: Tensor, prior_deviation: Tensor, deviations: Tensor):
        self.outer, self.inner = outer, inner
        self.prior_deviation, self.change = prior_deviation, deviations - prior_deviation

    def draw(self, noise: Tensor, parts: Sequence[tuple[slice, Tensor]]) -> None:
        """Writes the columns of draws that ``noise`` [s, g, o, i] makes into each part's tensor [s, g, o, columns]."""
        outer_first, inner_first = rotation_costs(*self.change.shape[1:], *noise.shape[-2:])
        back = self.outer.transpose(-1, -2)
        if outer_first < inner_first:
            middle = (back @ noise) @ self.inner * self.change
        else:
            middle = self.outer @ (back @ (noise @ self.inner) * self.change)
        for columns, out in parts:
            out.copy_(noise[..., columns]).mul_(self.prior_deviation)
            turned = middle @ self.inner[:, columns].transpose(-1, -2)
            out += self.outer @ turned if outer_first < inner_first else turned


@dataclass(frozen=True)
class KroneckerEigenvalues:
    """The eigenvalues of a block in a Kronecker basis: a table E, or the outer product of μ and λ, which takes less memory.

    Attributes:
        table: The table E [g, o, i] (EKFAC), or None.
        outputs: The eigenvalues μ [g, o] of B, or None.
        inputs: The eigenvalues λ [g, i] of A / rows, or None.
        n_data: The number N of data in factored damping.
    """

    table: Tensor | None
    outputs: Tensor | None
    inputs: Tensor | None
    n_data: float

    def values(self) -> Tensor:
        """Returns the eigenvalues as a table [g, o, i]."""
        if self.table is not None:
            return self.table
        if self.outputs is None or self.inputs is None:
            raise InputError(
                "the eigenvalues of a Kronecker block are incomplete: they need the table E, or both μ and λ"
            )
        return self.outputs[:, :, None] * self.inputs[:, None, :]

    def exceed(self, least: Tensor) -> tuple[Tensor, Tensor]:
        """Tells where any eigenvalue of an output direction [g, o], and of an input direction [g, i], is above ``least``."""
        if self.outputs is not None and self.inputs is not None:
            outputs, inputs = self.outputs, self.inputs
            return outputs * inputs.amax(-1, keepdim=True) > least, inputs * outputs.amax(-1, keepdim=True) > least
        above = self.values() > least
        return above.any(-1), above.any(-2)

    def to(self, dtype: torch.dtype) -> KroneckerEigenvalues:
        """Returns the same eigenvalues in another precision."""
        table, outputs, inputs = (None if t is None else t.to(dtype) for t in (self.table, self.outputs, self.inputs))
        return KroneckerEigenvalues(table, outputs, inputs, self.n_data)


@dataclass(frozen=True)
class KronBlockPosterior(BlockPosterior):
    """A Kronecker block under a prior.

    Attributes:
        source_block: The block of the curvature.
        layout: The way in which the parameters form [g, o, i].
        basis: The eigenbasis of U_A and U_B, in the network's dtype.
        eigen: The eigenvalues of the curvature, in float64.
        prior: The prior precision δ of the layer, 0-d.
        scale: The factor s of the curvature, 0-d.
        damping: The way in which the prior is added: exact, factored or pi.
    """

    source_block: Block
    layout: Layout
    basis: KroneckerEigenbasis
    eigen: KroneckerEigenvalues
    prior: Tensor
    scale: Tensor
    damping: str = "exact"

    @property
    def source(self) -> Block:
        return self.source_block

    @property
    def precision(self) -> Tensor:
        """The eigenvalues of the precision [g, o, i]."""
        mu, lam = self.eigen.outputs, self.eigen.inputs
        if mu is None or lam is None:
            return self.scale * self.eigen.values() + self.prior
        n_data = self.eigen.n_data
        return damped_eigenvalues(mu, lam, scale=self.scale, prior=self.prior, damping=self.damping, n_data=n_data)

    def with_prior(self, prior: Prior, scale: Tensor) -> KronBlockPosterior:
        device = self.basis.outputs.device
        return replace(self, prior=prior.scalar(self.layout.names).to(device), scale=scale.to(device))

    def log_det_ratio(self) -> Tensor:
        if self.damping == "exact":
            return torch.log1p(self.scale * self.eigen.values() / self.prior).sum()
        return (self.precision.log() - self.prior.log()).sum()

    def log_det_prior(self) -> Tensor:
        return self.size * self.prior.log()

    def effective_parameters(self) -> Tensor:
        return (1 - self.prior / self.precision).sum()

    def sample(self, count: int, generator: torch.Generator | None) -> Params:
        dtype = self.basis.outputs.dtype
        # Sums of positive numbers lose nothing in the samples' own precision, and the table is as large as the network.
        rounded = replace(self, eigen=self.eigen.to(dtype), scale=self.scale.to(dtype), prior=self.prior.to(dtype))
        table = rounded.precision.detach().rsqrt_()
        pieces = self.layout.pieces
        columns_drawn = [table.new_empty(count, *table.shape[:2], p.stop - p.start) for p in pieces]
        informed = self._informed(table)
        # Draws go some at a time, so that the noise and its rotations stay in the cache.
        step = max(1, _SAMPLE_NUMBERS // table.numel())
        for start in range(0, count, step):
            some = slice(start, min(start + step, count))
            noise = normal_like(table.new_empty(1).expand(some.stop - start, *table.shape), generator)
            parts = [(slice(p.start, p.stop), out[some]) for p, out in zip(pieces, columns_drawn, strict=True)]
            if informed is not None:
                informed.draw(noise, parts)
                continue
            turned = self.basis.outputs @ noise.mul_(table)
            for columns, out in parts:
                # Each parameter is written into a tensor of its own, so nothing is copied afterwards.
                if self.basis.inputs is None:
                    out.copy_(turned[..., columns])
                else:
                    torch.matmul(turned, self.basis.inputs[..., columns, :].transpose(-1, -2), out=out)
        return {piece.name: piece.to_parameter(columns) for piece, columns in zip(pieces, columns_drawn, strict=True)}

    def _informed(self, table: Tensor) -> Informed | None:
        """Returns the directions about which the data say more than rounding; None where they are too many to gain from."""
        if self.damping != "exact" or self.basis.inputs is None:
            return None
        least = _ROUNDING * torch.finfo(self.basis.outputs.dtype).eps * self.prior / self.scale
        rows, columns = (above.any(0).nonzero()[:, 0] for above in self.eigen.exceed(least))
        out, into = table.shape[1:]
        # They are counted before anything is copied, since most blocks have data for every direction.
        if min(rotation_costs(len(rows), len(columns), out, into)) >= 0.7 * out * into * (out + into):
            return None
        deviation, chosen = self.prior.to(table.dtype).rsqrt(), table[:, rows][:, :, columns]
        return Informed(self.basis.outputs[:, :, rows], self.basis.inputs[:, :, columns], deviation, chosen)

    def _apply(self, values: Params, table: Tensor) -> Params:
        block = self.layout.join(values)
        return self.layout.split(self.basis.rotate_back(self.basis.rotate(block) * table.to(block.dtype)))

    def precision_mv(self, values: Params) -> Params:
        return self._apply(values, self.precision)

    def covariance_mv(self, values: Params) -> Params:
        return self._apply(values, 1 / self.precision)

    def marginal_variance(self) -> Params:
        return self.layout.split(self.basis.diagonal(1 / self.precision.detach()))

    def output_noise(self, layout: Layout) -> OutputNoise:
        inputs = None if self.basis.inputs is None else self.basis.inputs[0]
        return OutputNoise((1 / self.precision.detach())[0], self.basis.outputs[0], inputs)

    def functional_covariance(
        self, gradients: LayerGradients, variants: Sequence[Self], diagonal: bool
    ) -> list[Tensor]:
        layer = layer_of(gradients, self.layout.names)
        if layer is None:
            return super().functional_covariance(gradients, variants, diagonal)
        tables = [1 / v.precision for v in variants]
        return layer_covariance(gradients, layer, tables, self.basis.outputs, self.basis.inputs, diagonal)

    def approximate_variance(self, gradients: LayerGradients) -> Tensor:
        layer = layer_of(gradients, self.layout.names)
        if layer is None or self._sketch is None:
            return super().approximate_variance(gradients)
        outer, inner, table = self._sketch
        return layer_covariance(gradients, layer, [table], outer, inner, diagonal=True)[0]

    @cached_property
    def _sketch(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Output and input directions [g, o, r] and [g, i, c] that stand for the eigenbasis, and their variances [g, r, c].

        A group with fewer directions than another has zeros after them.
        """
        mu, lam, inputs = self.eigen.outputs, self.eigen.inputs, self.basis.inputs
        if mu is None or lam is None or inputs is None or self.damping != "exact":
            return None
        if max(self.layout.out, self.layout.in_) <= DIRECTIONS:  # many small groups of a depthwise convolution
            return None
        bases, table = [], 1 / self.precision.detach()
        for vectors, eigenvalues, other in ((self.basis.outputs, mu, lam), (inputs, lam, mu)):
            least = _LEAST_DATA * self.prior / (self.scale * other.amax(-1))  # infinite where there are no data
            sketches = [sketch_basis(*each) for each in zip(vectors, eigenvalues, least.tolist(), strict=True)]
            widest = max(directions.shape[1] for directions, _ in sketches)
            bases.append(torch.stack([F.pad(d, (0, widest - d.shape[1])) for d, _ in sketches]))
            weights = torch.stack([F.pad(w, (0, 0, 0, widest - len(w))) for _, w in sketches])
            table = (weights.to(table) @ table).mT  # first over the outputs, then over the inputs
        return bases[0], bases[1], table.to(self.basis.outputs.dtype)


register_structure(
    Structure(
        "kron",
        "Kronecker factors: one pair of matrices for each layer.",
        fit_kron,
        (KronBlock, FullBlock, DiagonalBlock),
        dampings=DAMPINGS,
        streams_sums=True,
    )
)
