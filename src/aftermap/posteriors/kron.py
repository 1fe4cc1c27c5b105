"""Kronecker posteriors in the eigenbasis: KFAC, EKFAC and KFRA factors with the exact prior, or factored damping.

With B ⊗ A / rows = (U_B ⊗ U_A) diag(μ_i λ_j) (U_B ⊗ U_A)ᵀ the posterior precision has eigenvalues

    exact:      s·μ_i λ_j + δ                                        (EKFAC: s·E_ij + δ)
    factored:   (√(sN) λ_j + √δ)(√(s/N) μ_i + √δ)                    (Ritter et al. 2018, eq. 9, with H̄ = B/N)
    pi:         (√(sN) λ_j + π√δ)(√(s/N) μ_i + √δ/π),  π² = ratio of the factors' mean traces

in the same basis, so priors, scales and kinds of damping are all re-evaluated without a decomposition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aftermap.curvature.ekfac import EigenBlock, KronEigen
from aftermap.curvature.factors import Block
from aftermap.curvature.kron import KronBlock
from aftermap.curvature.layout import Layout
from aftermap.curvature.step import VectorStep
from aftermap.errors import InputError
from aftermap.likelihoods.draws import normal_like
from aftermap.params import Params
from aftermap.posteriors.blocks import BlockPosterior
from aftermap.posteriors.contraction import site_covariance, site_of
from aftermap.posteriors.informed import Informed, rotation_costs
from aftermap.posteriors.prior import Prior

__all__ = ["DAMPINGS", "EigenTable", "KronBlockPosterior", "kron_block_posterior"]

_SAMPLE_NUMBERS = 1 << 20
_ROUNDING = 8  # times machine epsilon: less than the rotations themselves round

DAMPINGS = ("exact", "factored", "pi")


@dataclass(frozen=True)
class EigenTable:
    """Curvature eigenvalues of a block: a full table E [g, o, i], or the outer product of μ [g, o] and λ [g, i].

    Attributes:
        n_data: N of eq. 9.
    """

    table: Tensor | None
    outputs: Tensor | None
    inputs: Tensor | None
    n_data: float

    def values(self) -> Tensor:
        """[g, o, i]."""
        if self.table is not None:
            return self.table
        if self.outputs is None or self.inputs is None:
            raise InputError("an eigenvalue table needs E, or both μ and λ")
        return self.outputs[:, :, None] * self.inputs[:, None, :]

    def exceed(self, least: Tensor) -> tuple[Tensor, Tensor]:
        """Where any eigenvalue of an output direction [g, o], and of an input direction [g, i], is above ``least``."""
        if self.table is None and self.outputs is not None and self.inputs is not None:
            outputs, inputs = self.outputs, self.inputs
            return outputs * inputs.amax(-1, keepdim=True) > least, inputs * outputs.amax(-1, keepdim=True) > least
        above = self.values() > least
        return above.any(-1), above.any(-2)

    def to(self, dtype: torch.dtype) -> EigenTable:
        """The same in another precision."""
        table, outputs, inputs = (None if t is None else t.to(dtype) for t in (self.table, self.outputs, self.inputs))
        return EigenTable(table, outputs, inputs, self.n_data)

    def precision(self, scale: Tensor, prior: Tensor, damping: str) -> Tensor:
        """Eigenvalues of the posterior precision [g, o, i]."""
        if damping == "exact":
            return scale * self.values() + prior
        if self.outputs is None or self.inputs is None:
            raise InputError(f"damping={damping!r} needs Kronecker factors; EKFAC has none: use damping='exact'")
        left = (scale / self.n_data).sqrt() * self.outputs
        right = (scale * self.n_data).sqrt() * self.inputs
        root = prior.sqrt()
        pi = torch.ones_like(left[:, :1])
        if damping == "pi":
            inner, outer = right.mean(1, keepdim=True), left.mean(1, keepdim=True)
            alive = (inner > 0) & (outer > 0)  # else the block is zero, and the prior stays as it is
            pi = torch.where(alive, inner / torch.where(alive, outer, 1.0), 1.0).sqrt()
            left, right = left * alive, right * alive
        return (left + root / pi)[:, :, None] * (right + root * pi)[:, None, :]  # eq. (9)


@dataclass(frozen=True)
class KronBlockPosterior(BlockPosterior):
    """A Kronecker block under a prior.

    Attributes:
        source_block: the curvature.
        layout: how parameters form [g, o, i].
        inner: U_A [g, i, i] or None for the identity (embeddings).
        outer: U_B [g, o, o].
        eigen: curvature eigenvalues.
        prior: δ, 0-d.
        scale: s, 0-d.
        damping: exact, factored or pi.
    """

    source_block: Block
    layout: Layout
    inner: Tensor | None
    outer: Tensor
    eigen: EigenTable
    prior: Tensor
    scale: Tensor
    damping: str = "exact"

    @property
    def source(self) -> Block:
        return self.source_block

    @property
    def precision(self) -> Tensor:
        """Eigenvalues of the precision [g, o, i]."""
        return self.eigen.precision(self.scale, self.prior, self.damping)

    def with_prior(self, prior: Prior, scale: Tensor) -> KronBlockPosterior:
        return replace(self, prior=prior.scalar(self.names).to(self.outer.device), scale=scale.to(self.outer.device))

    def log_det_ratio(self) -> Tensor:
        if self.damping == "exact":
            return torch.log1p(self.scale * self.eigen.values() / self.prior).sum()
        return (self.precision.log() - self.prior.log()).sum()

    def log_det_prior(self) -> Tensor:
        return self.size * self.prior.log()

    def effective_parameters(self) -> Tensor:
        return (1 - self.prior / self.precision).sum()

    def rotate(self, values: Tensor) -> Tensor:
        """U_Bᵀ W U_A for W [..., g, o, i]."""
        turned = self.outer.to(values.dtype).transpose(-1, -2) @ values
        return turned if self.inner is None else turned @ self.inner.to(values.dtype)

    def rotate_back(self, values: Tensor) -> Tensor:
        """U_B W U_Aᵀ."""
        turned = self.outer.to(values.dtype) @ values
        return turned if self.inner is None else turned @ self.inner.to(values.dtype).transpose(-1, -2)

    def sample(self, count: int, generator: torch.Generator | None) -> Params:
        dtype = self.outer.dtype
        # Sums of positive numbers lose nothing in the samples' own precision, and the table is as large as the network.
        precision = self.eigen.to(dtype).precision(self.scale.to(dtype), self.prior.to(dtype), self.damping)
        table = precision.detach().rsqrt_()
        pieces = self.layout.pieces
        found = [table.new_empty(count, *table.shape[:2], p.stop - p.start) for p in pieces]
        informed = self._informed(table)
        # Some at a time: the noise and its rotations stay in the cache.
        step = max(1, _SAMPLE_NUMBERS // table.numel())
        for start in range(0, count, step):
            some = slice(start, min(start + step, count))
            noise = normal_like(table.new_empty(1).expand(some.stop - start, *table.shape), generator)
            parts = [(slice(p.start, p.stop), out[some]) for p, out in zip(pieces, found, strict=True)]
            if informed is not None:
                informed.draw(noise, parts)
                continue
            turned = self.outer @ noise.mul_(table)
            for columns, out in parts:
                # Each parameter is written into a tensor of its own: nothing is copied afterwards.
                if self.inner is None:
                    out.copy_(turned[..., columns])
                else:
                    torch.matmul(turned, self.inner[..., columns, :].transpose(-1, -2), out=out)
        return {piece.name: piece.to_parameter(columns) for piece, columns in zip(pieces, found, strict=True)}

    def _informed(self, table: Tensor) -> Informed | None:
        """The directions about which the data say more than rounding; None where they are too many to gain from."""
        if self.damping != "exact" or self.inner is None:
            return None
        least = _ROUNDING * torch.finfo(self.outer.dtype).eps * self.prior / self.scale
        rows, columns = (told.any(0).nonzero()[:, 0] for told in self.eigen.exceed(least))
        out, into = table.shape[1:]
        # Counted before anything is copied: most blocks have data for every direction.
        if min(rotation_costs(len(rows), len(columns), out, into)) >= 0.7 * out * into * (out + into):
            return None
        root, chosen = self.prior.to(table.dtype).rsqrt(), table[:, rows][:, :, columns]
        return Informed(self.outer[:, :, rows], self.inner[:, :, columns], root, chosen)

    def _apply(self, values: Params, table: Tensor) -> Params:
        block = self.layout.join(values)
        return self.layout.split(self.rotate_back(self.rotate(block) * table.to(block.dtype)))

    def precision_mv(self, values: Params) -> Params:
        return self._apply(values, self.precision)

    def covariance_mv(self, values: Params) -> Params:
        return self._apply(values, 1 / self.precision)

    def marginal_variance(self) -> Params:
        found = self.outer.to(torch.float64).square() @ (1 / self.precision.detach())
        if self.inner is not None:
            found = found @ self.inner.to(torch.float64).square().transpose(-1, -2)
        return self.layout.split(found)

    def functional_covariance(
        self, step: VectorStep, variants: Sequence[BlockPosterior], diagonal: bool
    ) -> list[Tensor]:
        site = site_of(step, self.names)
        tables = [1 / v.precision for v in variants if isinstance(v, KronBlockPosterior)]
        if site is None or len(tables) != len(variants):
            return super().functional_covariance(step, variants, diagonal)
        return site_covariance(step, site, tables, self.outer, self.inner, diagonal)


def kron_block_posterior(
    block: KronBlock | EigenBlock,
    eigen: KronEigen | None,
    prior: Prior,
    scale: Tensor,
    n_data: float,
    damping: str,
    dtype: torch.dtype,
) -> KronBlockPosterior:
    """A posterior from a curvature block and, for plain Kronecker factors, their eigendecomposition.

    Eigenvectors take ``dtype`` (the model's own: they meet its gradients); eigenvalues stay in float64.
    """
    device = block.values.device if isinstance(block, EigenBlock) else block.outputs.device
    delta = prior.scalar(tuple(block.shapes)).to(device)
    if isinstance(block, EigenBlock):
        if damping != "exact":
            raise InputError(f"damping={damping!r} needs Kronecker factors; EKFAC has none: use damping='exact'")
        table = EigenTable(block.values.to(torch.float64), None, None, n_data)
        inner, outer = block.input_vectors, block.output_vectors
    else:
        if eigen is None:
            raise InputError(f"the Kronecker block of {block.name} needs its eigendecomposition")
        table = EigenTable(None, eigen.output_values, eigen.input_values, n_data)
        inner, outer = eigen.input_vectors, eigen.output_vectors
    inner = None if inner is None else inner.to(dtype)
    return KronBlockPosterior(block, block.layout, inner, outer.to(dtype), table, delta, scale.to(device), damping)
