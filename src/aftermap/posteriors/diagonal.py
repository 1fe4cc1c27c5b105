"""Diagonal posteriors: independent Gaussians with precision s·d + δ per entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aftermap.curvature.diagonal import DiagonalBlock
from aftermap.curvature.factors import Block
from aftermap.curvature.step import VectorStep
from aftermap.likelihoods.draws import normal_like
from aftermap.params import Params
from aftermap.posteriors.blocks import BlockPosterior
from aftermap.posteriors.contraction import site_covariance, site_of
from aftermap.posteriors.prior import Prior

__all__ = ["DiagonalBlockPosterior"]


@dataclass(frozen=True)
class DiagonalBlockPosterior(BlockPosterior):
    """A diagonal block under a prior: the variance is 1/(s·d + δ), which is not the diagonal of a dense inverse.

    Attributes:
        source_block: the curvature d.
        prior: parameter -> δ, a number or one per entry.
        scale: s, 0-d.
        dtype: of samples.
    """

    source_block: DiagonalBlock
    prior: Params
    scale: Tensor
    dtype: torch.dtype

    @property
    def source(self) -> Block:
        return self.source_block

    def with_prior(self, prior: Prior, scale: Tensor) -> DiagonalBlockPosterior:
        device = next(iter(self.source_block.values.values())).device
        return replace(self, prior={n: prior.precision[n].to(device) for n in self.names}, scale=scale.to(device))

    @property
    def precision(self) -> Params:
        """Entries of the precision."""
        return {n: self.scale * d + self.prior[n] for n, d in self.source_block.diagonal().items()}

    def log_det_ratio(self) -> Tensor:
        parts = [torch.log1p(self.scale * d / self.prior[n]).sum() for n, d in self.source_block.diagonal().items()]
        return torch.stack(parts).sum()

    def log_det_prior(self) -> Tensor:
        parts = [self.prior[n].log().expand(s).sum() for n, s in self.shapes.items()]
        return torch.stack(parts).sum()

    def effective_parameters(self) -> Tensor:
        return torch.stack([(1 - self.prior[n] / p).sum() for n, p in self.precision.items()]).sum()

    def sample(self, count: int, generator: torch.Generator | None) -> Params:
        found = {}
        for name, precision in self.precision.items():
            deviation = precision.detach().rsqrt().to(self.dtype)
            found[name] = normal_like(deviation.expand(count, *deviation.shape), generator) * deviation
        return found

    def precision_mv(self, values: Params) -> Params:
        return {n: values[n] * p.to(values[n].dtype) for n, p in self.precision.items()}

    def covariance_mv(self, values: Params) -> Params:
        return {n: values[n] / p.to(values[n].dtype) for n, p in self.precision.items()}

    def functional_covariance(
        self, step: VectorStep, variants: Sequence[BlockPosterior], diagonal: bool
    ) -> list[Tensor]:
        site = site_of(step, self.names)
        if site is None:
            return super().functional_covariance(step, variants, diagonal)
        layout = step.batch.sites.sites[site].layout
        tables = [layout.join(v.marginal_variance()) for v in variants]
        return site_covariance(step, site, tables, None, None, diagonal)

    def marginal_variance(self) -> Params:
        return {n: 1 / p.detach() for n, p in self.precision.items()}
