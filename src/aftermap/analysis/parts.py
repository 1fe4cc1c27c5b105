"""A posterior cut into layers: what each contributes alone, and what it shares with the others.

With J_ℓ the columns of the Jacobian that belong to layer ℓ, Σ the covariance of the weights and P = Σ⁻¹,

    own          J_ℓ Σ_ℓℓ J_ℓᵀ                       the layer's part, everything else marginalised
    cross        J_ℓ Σ_ℓm J_mᵀ summed over m ≠ ℓ     signed; zero where layers are independent
    conditional  J_ℓ (P_ℓℓ)⁻¹ J_ℓᵀ                   all other layers held at their means

and Σ_ℓ (own + cross) = J Σ Jᵀ exactly (docs/mathematics/where.md).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.curvature.passes.backward import LayerGradients
from aftermap.curvature.passes.plan import WHOLE_MODEL
from aftermap.curvature.rules.base import examples_per_chunk
from aftermap.curvature.structures.base import BlockPosterior, flatten_batch, join_flat, split_flat
from aftermap.curvature.structures.ekfac import EkfacBlock
from aftermap.curvature.structures.full import FullBlockPosterior
from aftermap.curvature.structures.kron import KronBlock
from aftermap.curvature.structures.low_rank import LowRankBlockPosterior
from aftermap.curvature.structures.subnetwork import SubnetworkBlockPosterior, put_entries, take_entries
from aftermap.draws import normal_like
from aftermap.errors import UnsupportedError
from aftermap.linalg import safe_cholesky, symmetrise
from aftermap.params import Params
from aftermap.posteriors import GaussianPosterior, MatrixFreePosterior, Posterior
from aftermap.prior import Prior

__all__ = ["Collector", "DensePart", "LowRankPart", "Part", "Pieces", "SolvedPart", "WholePart", "cut", "rows_of"]

_CONDITIONAL_LIMIT = 5_000  # a dense part beyond this has no conditional version: it would double the memory


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
    def covariances(self, gradients: LayerGradients, diagonal: bool) -> Pieces:
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
        """½ tr(s·H_ℓℓ C) for the covariance C that `draw` draws from: ½γ; NaN if unknown (docs/mathematics/where.md)."""
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

    def covariances(self, gradients: LayerGradients, diagonal: bool) -> Pieces:
        return Pieces({self.layer: self.block.functional_covariance(gradients, [self.block], diagonal)[0]})

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

    def __init__(self, gradients: LayerGradients, diagonal: bool, size: int):
        self.gradients, self.diagonal = gradients, diagonal
        self.stride = examples_per_chunk(3 * gradients.n_vectors * size)
        self.found: dict[str, dict[str, list[Tensor]]] = {"own": {}, "cross": {}, "conditional": {}}
        self._start = -1

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(first example, how many)."""
        for start in range(0, self.gradients.record.size, self.stride):
            self._start = start
            yield start, min(self.stride, self.gradients.record.size - start)

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


class DensePart(Part):
    """Layers under one dense covariance, over whole parameters or over single entries of them.

    Args:
        layers: layer -> parameters.
        covariance: Σ [S, S].
        precision: P [S, S]; None: no conditional version.
        prior: precisions [S].
        shapes: of the parameters, in the order of the rows.
        entries: parameter -> places of its uncertain entries; None: all of them.
        ratio: log |P| − log |P₀|.
    """

    crosses = True

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
        self.conditions = precision is not None
        self.roots: dict[str, Tensor] = {}
        self.inverses: dict[str, Tensor] = {}
        for layer, rows in self.rows.items():
            if precision is None:
                break
            own = symmetrise(precision[rows][:, rows])
            self.roots[layer] = safe_cholesky(own, what=f"the precision of {layer}")
            self.inverses[layer] = torch.cholesky_inverse(self.roots[layer])

    def _lines(self, gradients: LayerGradients, start: int, length: int) -> Tensor:
        values = gradients.per_example(list(self.shapes), start, length)
        if self.entries is not None:
            return take_entries(values, self.entries, 2).to(self.sigma)
        return flatten_batch(values, list(self.shapes)).to(self.sigma)

    def covariances(self, gradients: LayerGradients, diagonal: bool) -> Pieces:
        found = Collector(gradients, diagonal, sum(math.prod(s) for s in self.shapes.values()))
        for start, length in found.chunks():
            lines = self._lines(gradients, start, length)  # [v, b, S]
            right = lines @ self.sigma
            for layer, rows in self.rows.items():
                part = lines[..., rows]
                own = part @ self.sigma[rows][:, rows]
                found.add("own", layer, part, own)
                found.add("cross", layer, part, right[..., rows] - own)
                if self.conditions:
                    found.add("conditional", layer, part, part @ self.inverses[layer])
        return found.pieces()

    def _split(self, layer: str, values: Tensor) -> Params:
        """[..., S_ℓ] to the layer's parameters."""
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
        if not self.conditions:
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
        if not self.conditions:
            root = safe_cholesky(self.sigma[rows][:, rows], what=f"the covariance of {layer}")
            return self._split(layer, noise @ root.T)
        return self._split(layer, torch.linalg.solve_triangular(self.roots[layer].T, noise.T, upper=True).T)


class LowRankPart(Part):
    """Layers under D½ (I + Q σ² Qᵀ) D½: every version costs k numbers per output."""

    crosses = True
    conditions = True

    def __init__(self, layers: Mapping[str, tuple[str, ...]], block: LowRankBlockPosterior):
        self.layers, self.block = layers, block
        self.root = block.prior.detach().sqrt()
        self.gain = (1 + block.scale * block.values / block.ratio).detach()
        self.rows = rows_of(layers, block.shapes, None)
        # P_ℓℓ = D½ (I + L σ² Lᵀ) D½ with Q_ℓ √(gain − 1) = L σ Rᵀ: its inverse is the prior's outside of L, and 1/(1 + σ²) in it.
        self.conditional: dict[str, tuple[Tensor, Tensor]] = {}
        for layer, rows in self.rows.items():
            scaled = block.basis[rows] * (self.gain - 1).clamp_min(0.0).sqrt()
            left, singular, _ = torch.linalg.svd(scaled, full_matrices=False)
            self.conditional[layer] = left, 1 + singular.square()

    def covariances(self, gradients: LayerGradients, diagonal: bool) -> Pieces:
        block = self.block
        found = Collector(gradients, diagonal, block.size)
        # Sums over the informed directions and over the rest, never a difference of the two: it would cancel for a weak prior.
        for start, length in found.chunks():
            lines = flatten_batch(gradients.per_example(block.names, start, length), block.names).to(self.root)
            white = lines / self.root
            inside, outside = block.informed_parts(white)  # [v, b, k] and [v, b, p]
            for layer, rows in self.rows.items():
                alone = torch.zeros_like(white)
                alone[..., rows] = white[..., rows]
                inside_alone, outside_alone = block.informed_parts(alone)
                found.add("own", layer, inside_alone, inside_alone / self.gain)
                found.add("own", layer, outside_alone, outside_alone)
                found.add("cross", layer, inside_alone, (inside - inside_alone) / self.gain)
                found.add("cross", layer, outside_alone, outside - outside_alone)
                left, gain = self.conditional[layer]
                known = white[..., rows] @ left
                rest = white[..., rows] - known @ left.T
                found.add("conditional", layer, known, known / gain)
                found.add("conditional", layer, rest, rest)
        return found.pieces()

    def _split(self, layer: str, values: Tensor) -> Params:
        return split_flat(values, {n: self.block.shapes[n] for n in self.layers[layer]})

    def variance(self, layer: str) -> Params:
        variance = self.block.marginal_variance()
        return {n: variance[n] for n in self.layers[layer]}

    def effective(self) -> dict[str, float]:
        shrink = 1 - 1 / self.gain
        return {k: float((self.block.basis[rows].square() @ shrink).sum()) for k, rows in self.rows.items()}

    def half_effective(self, layer: str) -> float:
        return 0.5 * float((1 - 1 / self.conditional[layer][1]).sum())

    def information(self) -> tuple[dict[str, float], float]:
        half = (1 - 1 / self.gain).clamp_min(0.0).sqrt()
        eye = torch.eye(len(half), dtype=half.dtype, device=half.device)
        nats = {}
        for layer, rows in self.rows.items():
            own = self.block.basis[rows] * half
            nats[layer] = -0.5 * float(torch.linalg.slogdet(eye - own.T @ own)[1])
        return nats, 0.5 * float(self.block.log_det_ratio().detach())

    def draw(self, layer: str, count: int, generator: torch.Generator | None) -> Params:
        rows = self.rows[layer]
        noise = normal_like(self.root.new_empty(count, len(rows)), generator)
        left, gain = self.conditional[layer]
        known = noise @ left
        return self._split(layer, (noise + known * (gain.rsqrt() - 1) @ left.T) / self.root[rows])


class SolvedPart(Part):
    """A posterior known by products alone (matrix-free, dual): solves, or fixed samples; no conditional version.

    Args:
        posterior: any `Posterior` with a `prior`.
        layers: layer -> parameters.
    """

    crosses = True

    def __init__(self, posterior: Any, layers: Mapping[str, tuple[str, ...]]):
        self.posterior, self.layers = posterior, layers
        self.rows = rows_of(self.layers, posterior.shapes, None)

    def _times_covariance(self, lines: Tensor) -> Tensor:
        """lines Σ, for [v, b, P]."""
        posterior = self.posterior
        if isinstance(posterior, MatrixFreePosterior) and posterior.settings.kind == "samples":
            drawn = posterior.fixed_samples()
            return (lines @ drawn.T) @ drawn / len(drawn)
        values = split_flat(lines, posterior.shapes)
        return join_flat(posterior.covariance_mv(values), posterior.names, 2)

    def covariances(self, gradients: LayerGradients, diagonal: bool) -> Pieces:
        posterior = self.posterior
        found = Collector(gradients, diagonal, posterior.n_params * (1 + len(self.rows)))
        for start, length in found.chunks():
            lines = flatten_batch(gradients.per_example(posterior.names, start, length), posterior.names)
            lines = lines.to(torch.float64).detach()
            # All layers alone, and all together, in one solve: every iteration is one pass over the data.
            masked = [torch.zeros_like(lines) for _ in self.rows]
            for values, rows in zip(masked, self.rows.values(), strict=True):
                values[..., rows] = lines[..., rows]
            solved = self._times_covariance(torch.cat([lines, *masked])).chunk(len(masked) + 1)
            for (layer, rows), own in zip(self.rows.items(), solved[1:], strict=True):
                part = lines[..., rows]
                found.add("own", layer, part, own[..., rows])
                found.add("cross", layer, part, solved[0][..., rows] - own[..., rows])
        return found.pieces()

    def variance(self, layer: str) -> Params:
        found = self.posterior.marginal_variance()
        return {n: found[n] for n in self.layers[layer]}

    def effective(self) -> dict[str, float]:
        posterior = self.posterior
        if isinstance(posterior, MatrixFreePosterior):
            return posterior.effective_parameters()
        variance = join_flat(posterior.marginal_variance(), posterior.names, 0).cpu()
        gains = 1 - posterior.prior.vector(posterior.names).detach().cpu() * variance
        return {k: float(gains[rows].sum()) for k, rows in self.rows.items()}

    def half_effective(self, layer: str) -> float:
        return math.nan

    def information(self) -> tuple[dict[str, float], float]:
        posterior = self.posterior
        prior = posterior.prior.vector(posterior.names).detach().log().sum()
        ratio = float(posterior.log_det_precision().detach()) - float(prior)
        return dict.fromkeys(self.layers, math.nan), 0.5 * ratio

    def draw(self, layer: str, count: int, generator: torch.Generator | None) -> Params:
        drawn = self.posterior.sample(count, generator)
        return {n: drawn[n] - self.posterior.mean[n] for n in self.layers[layer]}


def _owner(name: str, model: nn.Module) -> str:
    """The layer of a parameter: its module; one that the network itself holds is a layer of its own."""
    path = name.rpartition(".")[0]
    if path:
        return path
    return WHOLE_MODEL if next(model.children(), None) is None else name


def _by_owner(names: Sequence[str], model: nn.Module) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_owner(name, model), []).append(name)
    return {k: tuple(v) for k, v in found.items()}


def _dense(block: BlockPosterior, layers: Mapping[str, tuple[str, ...]], prior: Prior) -> DensePart:
    entries = block.source_block.entries if isinstance(block, SubnetworkBlockPosterior) else None
    inner = block.inner if isinstance(block, SubnetworkBlockPosterior) else block
    eye = torch.eye(inner.size, dtype=torch.float64, device=block.scale.device)
    covariance = join_flat(inner.covariance_mv(split_flat(eye, inner.shapes)), inner.names, 1).detach()
    vector = prior.vector(block.names, eye.device).detach()
    if isinstance(block, SubnetworkBlockPosterior):
        vector = vector[block.source_block.places.to(vector.device)]
    precision = inner.to_dense().detach() if inner.size <= _CONDITIONAL_LIMIT else None
    ratio = float(block.log_det_ratio().detach())
    return DensePart(layers, covariance, precision, vector, block.shapes, entries, ratio)


def _part_of(block: BlockPosterior, model: nn.Module, prior: Prior) -> Part:
    layers = _by_owner(block.names, model)
    if isinstance(block.source, KronBlock | EkfacBlock):
        return WholePart(block.source.name, block)
    if isinstance(block, SubnetworkBlockPosterior):
        return _dense(block, layers, prior)
    if isinstance(block, FullBlockPosterior | LowRankBlockPosterior) and len(layers) > 1:
        return _dense(block, layers, prior) if isinstance(block, FullBlockPosterior) else LowRankPart(layers, block)
    # A block that is named after its one parameter, or "all" over one module, belongs to that module.
    named = block.source.name not in block.shapes and not isinstance(block, FullBlockPosterior | LowRankBlockPosterior)
    return WholePart(block.source.name if named or len(layers) > 1 else next(iter(layers)), block)


def cut(posterior: object, model: nn.Module) -> list[Part]:
    """The independent parts of a posterior, each cut into layers.

    Args:
        posterior: a Gaussian one: in blocks, matrix-free, or any `Posterior` with a `prior`.
        model: its network; layers are its modules.

    Raises:
        UnsupportedError: another kind of posterior: particles and ensembles have no covariance to cut.

    >>> from aftermap.laplace import Laplace
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> la = Laplace(net, "regression", structure="full").fit([(torch.ones(4, 2), torch.ones(4, 1))])
    >>> [list(part.layers) for part in cut(la.posterior, net)]
    [['0', '2']]
    """
    if isinstance(posterior, GaussianPosterior):
        return [_part_of(block, model, posterior.prior) for block in posterior.blocks]
    if isinstance(posterior, MatrixFreePosterior):
        layers = {k: tuple(v) for k, v in posterior.layers.items()}
        if posterior.n_params > posterior.settings.dense_limit:
            return [SolvedPart(posterior, layers)]
        dense = symmetrise(posterior.to_dense().detach())
        root = safe_cholesky(dense, what="the posterior precision")
        prior = posterior.prior.vector(posterior.names).detach().cpu()
        ratio = float(2 * root.diagonal().log().sum() - prior.log().sum())
        return [DensePart(layers, torch.cholesky_inverse(root), dense, prior, posterior.shapes, None, ratio)]
    if isinstance(posterior, Posterior) and isinstance(getattr(posterior, "prior", None), Prior):
        return [SolvedPart(posterior, _by_owner(posterior.names, model))]
    raise UnsupportedError(
        f"where() cuts a Gaussian posterior into layers, and a {type(posterior).__name__} is none. Use Laplace, or the "
        "posterior of an optimiser (opt.posterior())"
    )
