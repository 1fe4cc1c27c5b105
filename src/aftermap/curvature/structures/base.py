"""What all structures share: the curvature of a data set, posteriors of its blocks, and the registry of structures.

A `Factors` stands for Σ_n (curvature of datum n): a block-diagonal matrix over the selected parameters. Factors of
disjoint data add up, scale with a number, and sum over processes. Nothing outside a block's own file knows its scale.

A `BlockPosterior` has the precision s·H + P₀ with the data's scale s and the prior's precision P₀. It is made once; a new prior
or scale costs no decomposition. The log determinants, which the evidence needs, are differentiable in s and P₀.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from aftermap import checks
from aftermap.curvature.passes.backward import LayerGradients
from aftermap.curvature.passes.block import Block, same_names
from aftermap.curvature.passes.stream import CurvatureProblem, DataCounts
from aftermap.curvature.passes.vectors import VECTOR_KINDS
from aftermap.curvature.rules.base import Layout, examples_per_chunk
from aftermap.curvature.structures.eigenbasis import DAMPINGS
from aftermap.curvature.structures.flat import flatten_batch, join_flat, split_flat
from aftermap.curvature.structures.layer_parts import BlockLayerParts, LayerParts, WholeLayer
from aftermap.distributed import all_reduce_, is_distributed
from aftermap.draws import normal_like
from aftermap.errors import InputError
from aftermap.linalg import DenseWork
from aftermap.params import Params
from aftermap.prior import Prior

__all__ = [
    "STRUCTURES",
    "Block",
    "BlockPosterior",
    "Factors",
    "Structure",
    "Treatment",
    "find_structure",
    "flatten_batch",
    "join_flat",
    "register_structure",
    "same_names",
    "split_flat",
]


@dataclass(frozen=True)
class Treatment:
    """How one parameter was treated.

    Attributes:
        block: The kind of block: kron, ekfac, kfra, full, diagonal, low rank and so on.
        rule: The name of the layer rule, or "per-example" where there was none.
        note: The reason why there was none; "unused" if the outputs do not depend on the parameter.
    """

    block: str
    rule: str
    note: str = ""

    @property
    def by_rule(self) -> bool:
        """Whether a layer rule covered the parameter."""
        return self.rule != "per-example"


@dataclass(frozen=True)
class Factors:
    """The curvature of a data set.

    Attributes:
        structure: The name of the structure that was asked for.
        blocks: The blocks, which together hold every selected parameter once.
        names: The selected parameters in the model's order.
        n_data: The number of data that were seen (in one pass; weights count as copies).
        loss: The sum Σ −log p(y_n | f_n) over one pass.
        curvature: The kind of vectors (exact, rademacher, …).
        treatment: The way in which each parameter was treated.
        n_outputs: The number of numbers that the network returns for one datum.
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
        """Returns the curvature of both data sets together."""
        if (self.structure, self.names) != (other.structure, other.names):
            raise InputError(
                f"factors with structure {self.structure!r} over {len(self.names)} parameters and with structure "
                f"{other.structure!r} over {len(other.names)} cannot be added; fit both in the same way"
            )
        blocks = tuple(a + b for a, b in zip(self.blocks, other.blocks, strict=True))
        return replace(self, blocks=blocks, n_data=self.n_data + other.n_data, loss=self.loss + other.loss)

    def __mul__(self, factor: float) -> Factors:
        """Returns the curvature with every datum counted ``factor`` times."""
        if not math.isfinite(factor) or factor < 0:
            raise InputError(f"factors can be multiplied by a finite number that is not negative, got {factor}")
        blocks = tuple(b.scaled(factor) for b in self.blocks)
        return replace(self, blocks=blocks, n_data=self.n_data * factor, loss=self.loss * factor)

    __rmul__ = __mul__

    def all_reduced(self, *, counts_only: bool = False) -> Factors:
        """Returns the sum over all processes, with one message for each dtype; in one process the factors themselves.

        Args:
            counts_only: Whether the blocks are those of all processes already, so that only data and loss are summed.
        """
        if not is_distributed():
            return self
        counts = torch.tensor([self.n_data, self.loss], dtype=torch.float64)
        sums = [] if counts_only else [{k: t.clone() for k, t in b.tensors().items()} for b in self.blocks]
        all_reduce_([counts, *(t for tensors in sums for t in tensors.values())])
        blocks = tuple(b.with_tensors(t) for b, t in zip(self.blocks, sums, strict=True)) if sums else self.blocks
        return replace(self, blocks=blocks, n_data=float(counts[0]), loss=float(counts[1]))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, in the order of `names`."""
        shapes = {n: s for b in self.blocks for n, s in b.shapes.items()}
        return {n: shapes[n] for n in self.names}

    @property
    def n_params(self) -> int:
        """The number of weights that are selected."""
        return sum(b.size for b in self.blocks)

    def to_dense(self) -> Tensor:
        """Returns the matrix [P, P] in float64 over `names`, each parameter row-major; for small models and tests."""
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
        """Returns the diagonal by parameter, in float64."""
        diagonals: dict[str, Tensor] = {}
        for block in self.blocks:
            diagonals.update(block.diagonal())
        return {n: diagonals[n] for n in self.names}

    def trace(self) -> float:
        """Returns the sum of the diagonal: the mean curvature seen by a random direction, times P."""
        return sum(b.trace() for b in self.blocks)

    def summary(self) -> str:
        """Returns a table of the blocks, for people."""
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


class BlockPosterior(ABC):
    """A posterior N(mean, (s·H + P₀)⁻¹) over some parameters; it handles deviations from the mean, never the mean itself.

    Batches of parameter values are dicts from names to [..., *shape] with the same leading dimensions.

    Attributes:
        scale: The factor s of the curvature, a 0-d float64 tensor.
    """

    scale: Tensor

    @property
    @abstractmethod
    def source(self) -> Block:
        """The curvature block H."""

    @abstractmethod
    def with_prior(self, prior: Prior, scale: Tensor) -> BlockPosterior:
        """Returns the same curvature under another prior and scale; no new decomposition where the prior allows it."""

    @abstractmethod
    def log_det_ratio(self) -> Tensor:
        """Returns log |s·H + P₀| − log |P₀|, without cancellation and differentiable."""

    @abstractmethod
    def log_det_prior(self) -> Tensor:
        """Returns the log-determinant log |P₀| of the prior."""

    @abstractmethod
    def effective_parameters(self) -> Tensor:
        """Returns γ = p − tr(P₀ Σ), the number of directions that the data determine (MacKay); 0 ≤ γ ≤ p."""

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator | None) -> Params:
        """Draws deviations from the mean: for each name a tensor [count, *shape]."""

    @abstractmethod
    def precision_mv(self, values: Params) -> Params:
        """Returns (s·H + P₀) v for v [..., *shape]."""

    @abstractmethod
    def covariance_mv(self, values: Params) -> Params:
        """Returns (s·H + P₀)⁻¹ v for v [..., *shape]."""

    @abstractmethod
    def marginal_variance(self) -> Params:
        """Returns the diagonal of the covariance."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(self.source.shapes)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its parameters by name."""
        return self.source.shapes

    @property
    def size(self) -> int:
        """The number p of its parameters."""
        return self.source.size

    def log_det_precision(self) -> Tensor:
        """Returns the log-determinant log |s·H + P₀|."""
        return self.log_det_ratio() + self.log_det_prior()

    def to_dense(self) -> Tensor:
        """Returns the precision [p, p] in float64, by products with unit vectors."""
        eye = torch.eye(self.size, dtype=torch.float64, device=self.scale.device)
        values, start = {}, 0
        for name, shape in self.shapes.items():
            size = int(torch.Size(shape).numel())
            values[name] = eye[:, start : start + size].reshape((self.size, *shape))
            start += size
        product = self.precision_mv(values)
        return torch.cat([product[n].reshape(self.size, -1) for n in self.names], dim=1)

    def functional_covariance(
        self, gradients: LayerGradients, variants: Sequence[Self], diagonal: bool
    ) -> list[Tensor]:
        """Returns J Σ Jᵀ of this block for back-propagated outputs, under each of ``variants`` (the same curvature, other priors).

        Args:
            gradients: The gradients of the outputs' unit vectors at every layer.
            variants: Block posteriors made from this one by `with_prior`.
            diagonal: Whether to compute only the variances.

        Returns:
            The covariance [b, v, v], or the variances [b, v], for each variant.
        """
        stride = examples_per_chunk(2 * gradients.n_vectors * sum(math.prod(s) for s in self.shapes.values()))
        return covariances_by_example(gradients, self.names, stride, self.gradient_rows, variants, diagonal)

    def approximate_variance(self, gradients: LayerGradients) -> Tensor:
        """Returns the variances of J Σ Jᵀ of this block [b, v], exactly or, where that is much cheaper, to about a tenth.

        Args:
            gradients: The gradients of some vectors at every layer.
        """
        return self.functional_covariance(gradients, [self], diagonal=True)[0]

    def output_noise(self, layout: Layout) -> OutputNoise | None:
        """Returns how to draw the outputs of a linear layer instead of its weights; None where the structure does not allow it.

        Args:
            layout: The way in which the layer's parameters, which must be those of the block, form [group, out, in].
        """
        return None

    def split_by_layer(self, layers: Mapping[str, tuple[str, ...]], prior: Prior) -> LayerParts:
        """Returns what each layer adds to the covariance of the outputs: alone, and together with the others.

        Args:
            layers: For each module that owns some of the block's parameters their names.
            prior: The prior of the whole posterior.
        """
        if len(layers) == 1 and (self.source.joins_layers or self.source.name in self.shapes):
            return WholeLayer(next(iter(layers)), self)
        if self.source.joins_layers:
            return BlockLayerParts(layers, self, prior.vector(self.names).detach().cpu())
        return WholeLayer(self.source.name, self)

    def gradient_rows(self, gradients: Params) -> Tensor:
        """Returns the gradients of outputs in the uncertain numbers: by name [v, b, *shape] to [v, b, p]."""
        return flatten_batch(gradients, self.names)

    def output_covariance(self, gradients: Tensor, diagonal: bool) -> Tensor:
        """Returns J Σ Jᵀ for the gradients of some outputs.

        Args:
            gradients: The gradients [v, b, p], as `gradient_rows` returned them.
            diagonal: Whether only the variances are wanted.

        Returns:
            The covariance [b, v, v], or the variances [b, v].
        """
        product = flatten_batch(self.covariance_mv(split_flat(gradients, self.shapes)), self.names)
        return paired_products(gradients, product, diagonal)


@dataclass(frozen=True)
class OutputNoise:
    """The noise that the uncertain weights of a linear layer add to its outputs, example by example.

    With variances R in the basis U_B ⊗ U_A, an input a gets the noise U_B (√(R ã²) ∘ ε) with ã = U_Aᵀ a and ε ~ N(0, I)
    (Kingma, Salimans & Welling 2015, eq. 6).

    Attributes:
        variances: The variances R [o, i].
        outputs: The basis U_B [o, o]; None for the identity.
        inputs: The basis U_A [i, i]; None for the identity.
    """

    variances: Tensor
    outputs: Tensor | None
    inputs: Tensor | None

    def draw(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draws noise [b, o] for input rows [b, i] (with a trailing 1 where the layer has a bias)."""
        rotated = rows if self.inputs is None else rows @ self.inputs.to(rows.dtype)
        variance = rotated.square() @ self.variances.to(rows.dtype).T
        noise = variance.sqrt() * normal_like(variance.detach(), generator)
        return noise if self.outputs is None else noise @ self.outputs.to(rows.dtype).T


class HasOutputCovariance(Protocol):
    """Any object that knows the covariance of outputs from their gradients."""

    def output_covariance(self, gradients: Tensor, diagonal: bool) -> Tensor:
        """Returns J Σ Jᵀ for [v, b, p]: [b, v, v], or [b, v]."""
        ...


def covariances_by_example(
    gradients: LayerGradients,
    names: Sequence[str],
    stride: int,
    gradient_rows: Callable[[Params], Tensor],
    variants: Sequence[HasOutputCovariance],
    diagonal: bool,
) -> list[Tensor]:
    """Returns J Σ Jᵀ from per-example gradients, some examples at a time.

    Args:
        gradients: The gradients of the outputs' vectors v.
        names: The parameters whose gradients are wanted.
        stride: The number of examples that fit into memory.
        gradient_rows: A function that turns gradients by name [v, b, *shape] into [v, b, p].
        variants: Posteriors over these parameters.
        diagonal: Whether only the variances are wanted.

    Returns:
        The covariance [b, v, v], or the variances [b, v], for each variant.
    """
    parts: list[list[Tensor]] = [[] for _ in variants]
    size = gradients.record.size
    for start in range(0, size, stride):
        rows = gradient_rows(gradients.per_example(names, start, min(stride, size - start)))
        for covariances, variant in zip(parts, variants, strict=True):
            covariances.append(variant.output_covariance(rows, diagonal))
    return [torch.cat(covariances) for covariances in parts]


def paired_products(left: Tensor, right: Tensor, diagonal: bool) -> Tensor:
    """Returns Σ_p left_p right_p of rows [v, b, p] of the same example: [b, v, v], or [b, v] for equal v."""
    if diagonal:
        return (left * right).sum(-1).T
    return torch.einsum("vbp,wbp->bvw", left, right)


@dataclass(frozen=True)
class Structure:
    """One approximation of the curvature: how it is fitted, and what must be known before there is a fit.

    Attributes:
        name: The word that users write.
        summary: The structure in one sentence, for help texts, errors and the documentation's table.
        fit: A function that passes over a problem's data, and returns the blocks and what passed by.
        blocks: The kinds of blocks that a fit may return.
        posteriors: The kinds of block posteriors that only this structure has; a saved folder may hold them.
        passes: The number of times that a fit goes through the data.
        curvatures: The kinds of vectors that have a meaning for it.
        dampings: The ways in which the prior may be added to its blocks.
        max_parameters: The most numbers that it can be over; None where memory alone decides.
        updatable: Whether fits on further data can be added to it.
        saveable: Whether its posterior can be written to a folder.
        depends_on_batches: Whether the sums depend on how the data are split into batches.
        blocks_are_global: Whether the blocks of a fit are those of the data of all processes already.
        reads_layers: Whether the gradients of layers are read, by their rules; False where the structure is made from
            products with the whole matrix.
        needs_rank: Whether a fit must be told how many directions to look for.
        posterior: A function that makes the posterior where it is not one of blocks, from the posterior of the
            ``preconditioner``, the network, the data, the likelihood and what unpacks a batch; None where the blocks
            make it.
        streams_sums: Whether a fit is nothing but sums of passes over the data, by accumulators that know their state: such a fit
            can be kept in a checkpoint.
        preconditioner: The structure whose blocks are fitted instead where ``posterior`` is given.
        drawn_work: For a structure whose last pass is over drawn examples only, the dense work that their vectors make: a function
            of the number of parameters, of these vectors and of the directions that are kept (None for all). None where all
            data count. The estimate of the cost needs it, since a fit on few data does not show it.
    """

    name: str
    summary: str
    fit: Callable[[CurvatureProblem], tuple[tuple[Block, ...], DataCounts]]
    blocks: tuple[type[Block], ...]
    posteriors: tuple[type[BlockPosterior], ...] = ()
    passes: int = 1
    curvatures: tuple[str, ...] = VECTOR_KINDS
    dampings: tuple[str, ...] = ("exact",)
    max_parameters: int | None = None
    updatable: bool = True
    saveable: bool = True
    depends_on_batches: bool = False
    blocks_are_global: bool = False
    reads_layers: bool = True
    needs_rank: bool = False
    streams_sums: bool = False
    posterior: Callable[..., Any] | None = None
    preconditioner: str | None = None
    drawn_work: Callable[[int, int, int | None], DenseWork] | None = None

    def check_options(self, curvature: str, damping: str) -> None:
        """Raises an error where a curvature or a damping is not known, or where it does not go with the structure."""
        checks.choice("curvature", curvature, ("auto", *VECTOR_KINDS))
        checks.choice("damping", damping, DAMPINGS)
        if damping not in self.dampings:
            raise InputError(
                f"damping={damping!r} is for Kronecker factors, and structure={self.name!r} has none: use damping='exact', "
                "or structure='kron'"
            )
        if curvature not in ("auto", *self.curvatures):
            raise InputError(
                f"structure={self.name!r} uses the exact curvature of the outputs, so curvature={curvature!r} has no "
                "meaning; leave it at 'auto', or use 'exact'"
            )

    def check_rank(self, rank: int | None) -> int | None:
        """Returns the rank; raises where it is no positive number, or None for a structure that finds directions one by one."""
        if rank is None and not self.needs_rank:
            return None
        advice = "structure='subset' with rank=None, or structure='full', has all directions" if rank is None else ""
        return checks.count("rank", rank, advice=advice)

    def check_size(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises an error where a dense matrix over the parameters would be too large."""
        size = sum(math.prod(s) for s in shapes.values())
        if self.max_parameters is not None and size > self.max_parameters:
            raise InputError(
                f"a full matrix over {size:,} parameters would take {8 * size**2 / 2**30:,.1f} GiB; the limit is "
                f"{self.max_parameters:,}. Use structure='kron', 'ekfac' or 'diagonal', structure='low_rank' for cross-layer "
                "terms, or choose fewer parameters with params= (for example 'last_layer')"
            )


STRUCTURES: dict[str, Structure] = {}


def register_structure(structure: Structure) -> Structure:
    """Makes a structure known to `fit_curvature`, to `Laplace`, to saving and to the command line.

    A definition that is run again, as in a notebook, replaces the former one.

    Raises:
        InputError: Another structure has the name already, or another class of a structure has the name of one of its classes.
    """
    if structure.name in STRUCTURES and not _is_same_definition(STRUCTURES[structure.name].fit, structure.fit):
        raise InputError(f"a structure {structure.name!r} is registered already; choose another name")
    others = [entry for entry in STRUCTURES.values() if entry.name != structure.name]
    taken = {c.__name__: c for entry in others for c in (*entry.blocks, *entry.posteriors)}
    for saved in (*structure.blocks, *structure.posteriors):
        if not _is_same_definition(taken.get(saved.__name__, saved), saved):
            raise InputError(
                f"a class of another structure is called {saved.__name__}, too, and a saved folder names classes; rename it"
            )
    STRUCTURES[structure.name] = structure
    return structure


def _is_same_definition(left: Any, right: Any) -> bool:
    """Tells whether two functions or classes are one, or stand in the same place of the same module."""
    return left is right or (left.__module__, left.__qualname__) == (right.__module__, right.__qualname__)


def find_structure(name: str) -> Structure:
    """Returns the structure of that name.

    Raises:
        InputError: There is none; the message lists all that are registered.

    >>> find_structure("kron").summary
    'Kronecker factors: one pair of matrices for each layer.'
    """
    return STRUCTURES.get(name) or STRUCTURES[checks.choice("structure", name, sorted(STRUCTURES))]
