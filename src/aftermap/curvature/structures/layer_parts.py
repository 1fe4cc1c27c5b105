"""The covariance of the outputs by layer: what each layer contributes alone, and what it shares with the others.

With J_ℓ the columns of the Jacobian that belong to layer ℓ, Σ the covariance of the weights and P = Σ⁻¹,

    own          J_ℓ Σ_ℓℓ J_ℓᵀ                       the layer's part, everything else marginalised
    cross        J_ℓ Σ_ℓm J_mᵀ summed over m ≠ ℓ     signed; zero where layers are independent
    conditional  J_ℓ (P_ℓℓ)⁻¹ J_ℓᵀ                   all other layers held at their means

and Σ_ℓ (own + cross) = J Σ Jᵀ exactly.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aftermap.curvature.passes.backward import LayerGradients
from aftermap.curvature.rules.base import examples_per_chunk
from aftermap.curvature.structures.flat import flatten_batch, join_flat, put_entries, split_flat, take_entries
from aftermap.draws import normal_like
from aftermap.linalg import safe_cholesky, symmetrise
from aftermap.params import Params

if TYPE_CHECKING:
    from aftermap.curvature.structures.base import BlockPosterior
    from aftermap.curvature.structures.full import FullBlockPosterior

__all__ = [
    "BlockLayerParts",
    "CovarianceCollector",
    "DenseLayerParts",
    "LayerCovariances",
    "LayerParts",
    "ProductLayerParts",
    "WholeLayer",
    "rows_of",
]

_CONDITIONAL_LIMIT = 5_000  # A dense part beyond this has no conditional version, which would double the memory.


@dataclass(frozen=True)
class LayerCovariances:
    """The covariances of the outputs of some examples, by layer: [b, v, v], or [b, v] for variances only.

    Attributes:
        own: The part of each layer alone.
        cross: The signed, symmetrised part that each layer shares with others; empty where layers are independent.
        conditional: The part with all other layers held; empty where it is not cheap.
    """

    own: dict[str, Tensor]
    cross: dict[str, Tensor] = field(default_factory=dict)
    conditional: dict[str, Tensor] = field(default_factory=dict)


class LayerParts(ABC):
    """Some parameters of a posterior that are independent of all others, and the layers they belong to.

    Attributes:
        layers: For each layer the names of its parameters here.
        has_cross_terms: Whether its layers depend on each other.
        has_conditionals: Whether the conditional version is at hand.
        kind: The structure of the covariance in a word; empty where it is that of the whole posterior.
    """

    layers: Mapping[str, tuple[str, ...]]
    has_cross_terms: bool = False
    has_conditionals: bool = False
    kind: str = ""

    @abstractmethod
    def covariances(self, gradients: LayerGradients, diagonal: bool) -> LayerCovariances:
        """Returns what each layer adds to the covariance of the outputs."""

    @abstractmethod
    def variance(self, layer: str) -> Params:
        """Returns the marginal variances of a layer's weights; zero where a weight is fixed."""

    @abstractmethod
    def effective(self) -> dict[str, float]:
        """Returns γ = p − tr(P₀ Σ_ℓℓ) by layer."""

    @abstractmethod
    def information(self) -> tuple[dict[str, float], float]:
        """Returns the nats by layer, ½ (log |P₀⁻¹| − log |Σ_ℓℓ|) in a layer's marginal, and of all together; NaN if unknown."""

    @abstractmethod
    def draw(self, layer: str, count: int, generator: torch.Generator | None) -> Params:
        """Draws deviations of one layer with all others at their means: for each name a tensor [count, *shape]."""

    def half_effective(self, layer: str) -> float:
        """Returns ½ tr(s·H_ℓℓ C) for the covariance C that `draw` draws from: ½γ; NaN if unknown (docs/mathematics/where.md)."""
        return 0.5 * self.effective()[layer]


@dataclass(frozen=True)
class WholeLayer(LayerParts):
    """The parts of a block that is one layer, or belongs to one."""

    layer: str
    block: BlockPosterior

    @property
    def layers(self) -> Mapping[str, tuple[str, ...]]:  # type: ignore[override]
        """The one layer of the block."""
        return {self.layer: self.block.names}

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The structure of the block."""
        return self.block.source.kind

    def covariances(self, gradients: LayerGradients, diagonal: bool) -> LayerCovariances:
        return LayerCovariances({self.layer: self.block.functional_covariance(gradients, [self.block], diagonal)[0]})

    def variance(self, layer: str) -> Params:
        return self.block.marginal_variance()

    def effective(self) -> dict[str, float]:
        return {self.layer: float(self.block.effective_parameters().detach())}

    def information(self) -> tuple[dict[str, float], float]:
        nats = 0.5 * float(self.block.log_det_ratio().detach())
        return {self.layer: nats}, nats

    def draw(self, layer: str, count: int, generator: torch.Generator | None) -> Params:
        return self.block.sample(count, generator)


class CovarianceCollector:
    """Adds up bilinear forms, some examples at a time."""

    def __init__(self, gradients: LayerGradients, diagonal: bool, size: int):
        self.gradients, self.diagonal = gradients, diagonal
        self.stride = examples_per_chunk(3 * gradients.n_vectors * size)
        self._sums: dict[str, dict[str, list[Tensor]]] = {"own": {}, "cross": {}, "conditional": {}}
        self._start = -1

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yields (first example, how many) of each chunk."""
        for start in range(0, self.gradients.record.size, self.stride):
            self._start = start
            yield start, min(self.stride, self.gradients.record.size - start)

    def add(self, kind: str, layer: str, left: Tensor, right: Tensor) -> None:
        """Adds left · rightᵀ for [v, b, p]; the second call for the same examples adds to the first."""
        whole = None if self.diagonal else symmetrise(torch.einsum("vbp,wbp->bvw", left, right))
        value = (left * right).sum(-1).T if whole is None else whole
        parts = self._sums[kind].setdefault(layer, [])
        number = self._start // self.stride
        if len(parts) > number:
            parts[number] = parts[number] + value
        else:
            parts.append(value)

    def covariances(self) -> LayerCovariances:
        """Returns all sums, over all examples."""
        joined = {kind: {k: torch.cat(v) for k, v in by.items()} for kind, by in self._sums.items()}
        return LayerCovariances(joined["own"], joined["cross"], joined["conditional"])


def rows_of(
    layers: Mapping[str, Sequence[str]], shapes: Mapping[str, tuple[int, ...]], entries: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Returns for each layer its places in the joined vector of all parameters."""
    places, start = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape) if entries is None else len(entries[name])
        places[name] = torch.arange(start, start + size)
        start += size
    return {k: torch.cat([places[n] for n in names]) for k, names in layers.items()}


class ProductLayerParts(LayerParts):
    """Layers under a covariance that is known by products alone; it has no conditional version.

    Args:
        layers: For each layer the names of its parameters.
        shapes: The shapes of the parameters, in order.
    """

    has_cross_terms = True

    def __init__(self, layers: Mapping[str, tuple[str, ...]], shapes: Mapping[str, tuple[int, ...]]):
        self.layers, self.shapes = layers, dict(shapes)
        self.rows = rows_of(layers, shapes, None)

    @abstractmethod
    def times_covariance(self, lines: Tensor) -> Tensor:
        """Returns the product of lines [v, b, P] with Σ."""

    def covariances(self, gradients: LayerGradients, diagonal: bool) -> LayerCovariances:
        names, size = list(self.shapes), sum(math.prod(s) for s in self.shapes.values())
        collector = CovarianceCollector(gradients, diagonal, size * (1 + len(self.rows)))
        for start, length in collector.chunks():
            lines = flatten_batch(gradients.per_example(names, start, length), names)
            lines = lines.to(torch.float64).detach()
            # All layers alone, and all together, go in one product, since it may be a pass over the data.
            masked = [torch.zeros_like(lines) for _ in self.rows]
            for values, rows in zip(masked, self.rows.values(), strict=True):
                values[..., rows] = lines[..., rows]
            products = self.times_covariance(torch.cat([lines, *masked])).chunk(len(masked) + 1)
            for (layer, rows), product in zip(self.rows.items(), products[1:], strict=True):
                part = lines[..., rows]
                collector.add("own", layer, part, product[..., rows])
                collector.add("cross", layer, part, products[0][..., rows] - product[..., rows])
        return collector.covariances()

    def half_effective(self, layer: str) -> float:
        return math.nan


class BlockLayerParts(ProductLayerParts):
    """The layers of any block posterior, by products with its covariance.

    Args:
        layers: For each layer the names of its parameters.
        block: The block posterior over all of them.
        prior: The precisions of the prior [p].
    """

    def __init__(self, layers: Mapping[str, tuple[str, ...]], block: BlockPosterior, prior: Tensor):
        super().__init__(layers, block.shapes)
        self.block, self.prior, self.kind = block, prior, block.source.kind

    def times_covariance(self, lines: Tensor) -> Tensor:
        return flatten_batch(self.block.covariance_mv(split_flat(lines, self.shapes)), list(self.shapes)).detach()

    def variance(self, layer: str) -> Params:
        variances = self.block.marginal_variance()
        return {n: variances[n] for n in self.layers[layer]}

    def effective(self) -> dict[str, float]:
        variances = join_flat(self.block.marginal_variance(), list(self.shapes), 0).cpu()
        gains = 1 - self.prior * variances
        return {k: float(gains[rows].sum()) for k, rows in self.rows.items()}

    def information(self) -> tuple[dict[str, float], float]:
        return dict.fromkeys(self.layers, math.nan), 0.5 * float(self.block.log_det_ratio().detach())

    def draw(self, layer: str, count: int, generator: torch.Generator | None) -> Params:
        deviations = self.block.sample(count, generator)
        return {n: deviations[n] for n in self.layers[layer]}


class DenseLayerParts(LayerParts):
    """Layers under one dense covariance, over whole parameters or over single entries of them.

    Args:
        layers: For each layer the names of its parameters.
        covariance: The covariance Σ [S, S].
        precision: The precision P [S, S]. With None there is no conditional version.
        prior: The precisions of the prior [S].
        shapes: The shapes of the parameters, in the order of the rows.
        entries: For each parameter the places of its uncertain entries. None means all of them.
        ratio: The difference log |P| − log |P₀|.
    """

    has_cross_terms = True

    def __init__(
        self,
        layers: Mapping[str, tuple[str, ...]],
        covariance: Tensor,
        precision: Tensor | None,
        prior: Tensor,
        shapes: Mapping[str, tuple[int, ...]],
        entries: Mapping[str, Tensor] | None,
        ratio: float,
    ):
        self.layers, self.sigma, self.prior = layers, symmetrise(covariance), prior
        self.shapes, self.entries, self.ratio = dict(shapes), entries, ratio
        self.rows = rows_of(layers, shapes, entries)
        self.has_conditionals = precision is not None
        self.roots: dict[str, Tensor] = {}
        self.inverses: dict[str, Tensor] = {}
        for layer, rows in self.rows.items():
            if precision is None:
                break
            block = symmetrise(precision[rows][:, rows])
            self.roots[layer] = safe_cholesky(block, what=f"the precision of {layer}")
            self.inverses[layer] = torch.cholesky_inverse(self.roots[layer])

    @staticmethod
    def of(
        block: FullBlockPosterior,
        layers: Mapping[str, tuple[str, ...]],
        shapes: Mapping[str, tuple[int, ...]],
        entries: Mapping[str, Tensor] | None,
    ) -> DenseLayerParts:
        """Returns the layers of a dense block posterior, whose numbers are the parameters or chosen entries of them."""
        eye = torch.eye(block.size, dtype=torch.float64, device=block.scale.device)
        covariance = join_flat(block.covariance_mv(split_flat(eye, block.shapes)), block.names, 1).detach()
        precision = block.to_dense().detach() if block.size <= _CONDITIONAL_LIMIT else None
        ratio = float(block.log_det_ratio().detach())
        return DenseLayerParts(layers, covariance, precision, block.prior.detach(), shapes, entries, ratio)

    def _lines(self, gradients: LayerGradients, start: int, length: int) -> Tensor:
        values = gradients.per_example(list(self.shapes), start, length)
        if self.entries is not None:
            return take_entries(values, self.entries, 2).to(self.sigma)
        return flatten_batch(values, list(self.shapes)).to(self.sigma)

    def covariances(self, gradients: LayerGradients, diagonal: bool) -> LayerCovariances:
        collector = CovarianceCollector(gradients, diagonal, sum(math.prod(s) for s in self.shapes.values()))
        for start, length in collector.chunks():
            lines = self._lines(gradients, start, length)  # [v, b, S]
            right = lines @ self.sigma
            for layer, rows in self.rows.items():
                part = lines[..., rows]
                product = part @ self.sigma[rows][:, rows]
                collector.add("own", layer, part, product)
                collector.add("cross", layer, part, right[..., rows] - product)
                if self.has_conditionals:
                    collector.add("conditional", layer, part, part @ self.inverses[layer])
        return collector.covariances()

    def _split(self, layer: str, values: Tensor) -> Params:
        """Splits values [..., S_ℓ] into the layer's parameters."""
        names = self.layers[layer]
        shapes = {n: self.shapes[n] for n in names}
        if self.entries is None:
            return split_flat(values, shapes)
        return put_entries(values, {n: self.entries[n] for n in names}, shapes)

    def variance(self, layer: str) -> Params:
        return self._split(layer, self.sigma.diagonal()[self.rows[layer]])

    def effective(self) -> dict[str, float]:
        gains = 1 - self.prior * self.sigma.diagonal()
        return {k: float(gains[rows].sum()) for k, rows in self.rows.items()}

    def half_effective(self, layer: str) -> float:
        if not self.has_conditionals:
            return math.nan
        rows = self.rows[layer]
        return 0.5 * float((1 - self.prior[rows] * self.inverses[layer].diagonal()).sum())

    def information(self) -> tuple[dict[str, float], float]:
        nats = {}
        for layer, rows in self.rows.items():
            root = safe_cholesky(self.sigma[rows][:, rows], what=f"the covariance of {layer}")
            nats[layer] = -float(root.diagonal().log().sum() + 0.5 * self.prior[rows].log().sum())
        return nats, 0.5 * self.ratio

    def draw(self, layer: str, count: int, generator: torch.Generator | None) -> Params:
        rows = self.rows[layer]
        noise = normal_like(self.sigma.new_empty(count, len(rows)), generator)
        if not self.has_conditionals:
            root = safe_cholesky(self.sigma[rows][:, rows], what=f"the covariance of {layer}")
            return self._split(layer, noise @ root.T)
        return self._split(layer, torch.linalg.solve_triangular(self.roots[layer].T, noise.T, upper=True).T)
