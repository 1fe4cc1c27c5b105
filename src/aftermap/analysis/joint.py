"""Parts of a posterior whose layers depend on each other: dense, low-rank, and known by products alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aftermap.analysis.parts import Collector, Part, Pieces, rows_of
from aftermap.curvature.step import VectorStep
from aftermap.curvature.subset import gathered, scattered
from aftermap.likelihoods.draws import normal_like
from aftermap.linalg import safe_cholesky, symmetrise
from aftermap.params import Params
from aftermap.posteriors import MatrixFreePosterior
from aftermap.posteriors.blocks import flatten_batch, join_flat, split_flat
from aftermap.posteriors.low_rank import LowRankBlockPosterior

__all__ = ["DensePart", "LowRankPart", "SolvedPart"]


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

    def _lines(self, step: VectorStep, start: int, length: int) -> Tensor:
        values = step.per_example(list(self.shapes), start, length)
        if self.entries is not None:
            return gathered(values, self.entries, 2).to(self.sigma)
        return flatten_batch(values, list(self.shapes)).to(self.sigma)

    def covariances(self, step: VectorStep, diagonal: bool) -> Pieces:
        found = Collector(step, diagonal, sum(math.prod(s) for s in self.shapes.values()))
        for start, length in found.chunks():
            lines = self._lines(step, start, length)  # [v, b, S]
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
        return scattered(values, {n: self.entries[n] for n in names}, shapes)

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
        half = (self.gain - 1).clamp_min(0.0).sqrt()
        eye = torch.eye(len(half), dtype=half.dtype, device=half.device)
        self.taken: dict[str, Tensor] = {}  # (P_ℓℓ)⁻¹ = D⁻½ (I − Q_ℓ T Q_ℓᵀ) D⁻½
        for layer, rows in self.rows.items():
            own = block.basis[rows]
            inner = eye + half[:, None] * (own.T @ own) * half
            self.taken[layer] = half[:, None] * torch.linalg.solve(inner, torch.diag(half))

    def covariances(self, step: VectorStep, diagonal: bool) -> Pieces:
        block = self.block
        found = Collector(step, diagonal, block.size)
        shrink = 1 - 1 / self.gain
        for start, length in found.chunks():
            lines = flatten_batch(step.per_example(block.names, start, length), block.names).to(self.root)
            white = lines / self.root
            inside = white @ block.basis  # [v, b, k]
            for layer, rows in self.rows.items():
                part = white[..., rows]
                own = part @ block.basis[rows]
                found.add("own", layer, part, part)
                found.add("own", layer, own, -own * shrink)
                found.add("cross", layer, own, (own - inside) * shrink)
                found.add("conditional", layer, part, part)
                found.add("conditional", layer, own, -own @ self.taken[layer])
        return found.pieces()

    def _split(self, layer: str, values: Tensor) -> Params:
        return split_flat(values, {n: self.block.shapes[n] for n in self.layers[layer]})

    def variance(self, layer: str) -> Params:
        rows = self.rows[layer]
        left = 1 - self.block.basis[rows].square() @ (1 - 1 / self.gain)
        return self._split(layer, left / self.root[rows].square())

    def effective(self) -> dict[str, float]:
        shrink = 1 - 1 / self.gain
        return {k: float((self.block.basis[rows].square() @ shrink).sum()) for k, rows in self.rows.items()}

    def half_effective(self, layer: str) -> float:
        own = self.block.basis[self.rows[layer]]
        return 0.5 * float((self.taken[layer] * (own.T @ own)).sum())

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
        scaled = self.block.basis[rows] * (self.gain - 1).clamp_min(0.0).sqrt()
        left, singular, _ = torch.linalg.svd(scaled, full_matrices=False)
        shrunk = (noise @ left) * (1 - (1 + singular.square()).rsqrt())
        return self._split(layer, (noise - shrunk @ left.T) / self.root[rows])


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

    def covariances(self, step: VectorStep, diagonal: bool) -> Pieces:
        posterior = self.posterior
        found = Collector(step, diagonal, posterior.n_params * (1 + len(self.rows)))
        for start, length in found.chunks():
            lines = flatten_batch(step.per_example(posterior.names, start, length), posterior.names)
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
