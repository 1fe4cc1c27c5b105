"""A posterior cut into layers: what each contributes alone, and what it shares with the others.

With J_ℓ the columns of the Jacobian that belong to layer ℓ, Σ the covariance of the weights and P = Σ⁻¹,

    own          J_ℓ Σ_ℓℓ J_ℓᵀ                       the layer's part, everything else marginalised
    cross        J_ℓ Σ_ℓm J_mᵀ summed over m ≠ ℓ     signed; zero where layers are independent
    conditional  J_ℓ (P_ℓℓ)⁻¹ J_ℓᵀ                   all other layers held at their means

and Σ_ℓ (own + cross) = J Σ Jᵀ exactly (MATH W4).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aftermap.curvature.rows import budget
from aftermap.curvature.step import VectorStep
from aftermap.linalg import symmetrise
from aftermap.params import Params
from aftermap.posteriors.blocks import BlockPosterior

__all__ = ["Collector", "Part", "Pieces", "WholePart", "rows_of"]


@dataclass(frozen=True)
class Pieces:
    """Covariances of the outputs of some examples: layer -> [b, v, v], or [b, v] for variances only.

    Attributes:
        own: the layer's part.
        cross: signed, symmetrised; empty where layers are independent.
        conditional: all other layers held; empty where it is not cheap.
    """

    own: dict[str, Tensor]
    cross: dict[str, Tensor] = field(default_factory=dict)
    conditional: dict[str, Tensor] = field(default_factory=dict)


class Part(ABC):
    """Some parameters of a posterior that are independent of all others, and the layers they belong to.

    Attributes:
        layers: layer -> its parameters here.
        crosses: whether its layers depend on each other.
        conditions: whether the conditional version is at hand.
    """

    layers: Mapping[str, tuple[str, ...]]
    crosses: bool = False
    conditions: bool = False

    @abstractmethod
    def covariances(self, step: VectorStep, diagonal: bool) -> Pieces:
        """What each layer adds to the covariance of the outputs."""

    @abstractmethod
    def variance(self, layer: str) -> Params:
        """Marginal variances of a layer's weights; zero where a weight is fixed."""

    @abstractmethod
    def effective(self) -> dict[str, float]:
        """γ = p − tr(P₀ Σ_ℓℓ) by layer."""

    @abstractmethod
    def information(self) -> tuple[dict[str, float], float]:
        """Nats by layer, ½ (log |P₀⁻¹| − log |Σ_ℓℓ|) in a layer's marginal, and of all together; NaN if unknown."""

    @abstractmethod
    def draw(self, layer: str, count: int, generator: torch.Generator | None) -> Params:
        """Deviations of one layer with all others at their means: name -> [count, *shape]."""

    def half_effective(self, layer: str) -> float:
        """½ tr(s·H_ℓℓ C) for the covariance C that `draw` draws from: ½γ; NaN if unknown (MATH W8)."""
        return 0.5 * self.effective()[layer]


@dataclass(frozen=True)
class WholePart(Part):
    """A block that is one layer, or belongs to one."""

    layer: str
    block: BlockPosterior

    @property
    def layers(self) -> Mapping[str, tuple[str, ...]]:  # type: ignore[override]
        """Its one layer."""
        return {self.layer: self.block.names}

    def covariances(self, step: VectorStep, diagonal: bool) -> Pieces:
        return Pieces({self.layer: self.block.functional_covariance(step, [self.block], diagonal)[0]})

    def variance(self, layer: str) -> Params:
        return self.block.marginal_variance()

    def effective(self) -> dict[str, float]:
        return {self.layer: float(self.block.effective_parameters().detach())}

    def information(self) -> tuple[dict[str, float], float]:
        nats = 0.5 * float(self.block.log_det_ratio().detach())
        return {self.layer: nats}, nats

    def draw(self, layer: str, count: int, generator: torch.Generator | None) -> Params:
        return self.block.sample(count, generator)


class Collector:
    """Adds up bilinear forms, some examples at a time."""

    def __init__(self, step: VectorStep, diagonal: bool, size: int):
        self.step, self.diagonal = step, diagonal
        self.stride = budget(3 * step.vectors * size)
        self.found: dict[str, dict[str, list[Tensor]]] = {"own": {}, "cross": {}, "conditional": {}}
        self._start = -1

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(first example, how many)."""
        for start in range(0, self.step.batch.size, self.stride):
            self._start = start
            yield start, min(self.stride, self.step.batch.size - start)

    def add(self, kind: str, layer: str, left: Tensor, right: Tensor) -> None:
        """Adds left · rightᵀ for [v, b, p]; the second call for the same examples adds to the first."""
        whole = None if self.diagonal else symmetrise(torch.einsum("vbp,wbp->bvw", left, right))
        value = (left * right).sum(-1).T if whole is None else whole
        parts = self.found[kind].setdefault(layer, [])
        number = self._start // self.stride
        if len(parts) > number:
            parts[number] = parts[number] + value
        else:
            parts.append(value)

    def pieces(self) -> Pieces:
        """Everything, over all examples."""
        joined = {kind: {k: torch.cat(v) for k, v in by.items()} for kind, by in self.found.items()}
        return Pieces(joined["own"], joined["cross"], joined["conditional"])


def rows_of(
    layers: Mapping[str, Sequence[str]], shapes: Mapping[str, tuple[int, ...]], entries: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Layer -> its places in the joined vector of all parameters."""
    places, start = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape) if entries is None else len(entries[name])
        places[name] = torch.arange(start, start + size)
        start += size
    return {k: torch.cat([places[n] for n in names]) for k, names in layers.items()}
