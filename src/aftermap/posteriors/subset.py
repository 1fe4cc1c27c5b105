"""Full covariance over chosen entries of the parameters; all others are fixed at their trained values.

A fixed weight has no variance: its rows and columns of the covariance are zero. Precision and determinants are those of the
chosen entries alone, s·G_S + D_S (Daxberger et al. 2021, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aftermap.curvature.factors import Block
from aftermap.curvature.full import FullBlock
from aftermap.curvature.rows import budget
from aftermap.curvature.step import VectorStep
from aftermap.curvature.subset import SubsetBlock, gathered, scattered
from aftermap.params import Params
from aftermap.posteriors.blocks import BlockPosterior
from aftermap.posteriors.full import FullBlockPosterior, full_block_posterior
from aftermap.posteriors.prior import Prior

__all__ = ["SubsetBlockPosterior", "subset_block_posterior"]

_INNER = "entries"


@dataclass(frozen=True)
class SubsetBlockPosterior(BlockPosterior):
    """A dense block over some entries under a prior.

    Attributes:
        source_block: which entries, and their curvature.
        inner: the dense posterior over them as one vector [S].
        scale: s, 0-d.
    """

    source_block: SubsetBlock
    inner: FullBlockPosterior
    scale: Tensor

    @property
    def source(self) -> Block:
        return self.source_block

    def with_prior(self, prior: Prior, scale: Tensor) -> SubsetBlockPosterior:
        inner = self.inner.with_prior(_inner_prior(self.source_block, prior), scale)
        return replace(self, inner=inner, scale=inner.scale)

    def log_det_ratio(self) -> Tensor:
        return self.inner.log_det_ratio()

    def log_det_prior(self) -> Tensor:
        return self.inner.log_det_prior()

    def effective_parameters(self) -> Tensor:
        return self.inner.effective_parameters()

    def _scattered(self, vector: Tensor) -> Params:
        return scattered(vector, self.source_block.entries, self.shapes)

    def _gathered(self, values: Params) -> Tensor:
        name = self.names[0]
        return gathered(values, self.source_block.entries, values[name].dim() - len(self.shapes[name]))

    def sample(self, count: int, generator: torch.Generator | None) -> Params:
        return self._scattered(self.inner.sample(count, generator)[_INNER])

    def precision_mv(self, values: Params) -> Params:
        """The precision of the chosen entries times theirs; zero at fixed ones."""
        return self._scattered(self.inner.precision_mv({_INNER: self._gathered(values)})[_INNER])

    def covariance_mv(self, values: Params) -> Params:
        return self._scattered(self.inner.covariance_mv({_INNER: self._gathered(values)})[_INNER])

    def marginal_variance(self) -> Params:
        return self._scattered(self.inner.marginal_variance()[_INNER])

    def to_dense(self) -> Tensor:
        """The precision [p, p] over whole parameters; rows and columns of fixed entries are zero."""
        places = self.source_block.places.to(self.scale.device)
        total = sum(int(torch.Size(s).numel()) for s in self.shapes.values())
        dense = torch.zeros(total, total, dtype=torch.float64, device=self.scale.device)
        dense[places[:, None], places] = self.inner.to_dense().detach()
        return dense

    def functional_covariance(
        self, step: VectorStep, variants: Sequence[BlockPosterior], diagonal: bool
    ) -> list[Tensor]:
        """J_S Σ_S J_Sᵀ: only the chosen columns of per-example gradients."""
        found: list[list[Tensor]] = [[] for _ in variants]
        total = sum(int(torch.Size(s).numel()) for s in self.shapes.values())
        stride = budget(2 * step.vectors * total)
        for start in range(0, step.batch.size, stride):
            length = min(stride, step.batch.size - start)
            left = gathered(step.per_example(self.names, start, length), self.source_block.entries, 2)  # [v, b, S]
            for place, variant in enumerate(variants):
                assert isinstance(variant, SubsetBlockPosterior)
                right = variant.inner.covariance_mv({_INNER: left})[_INNER]
                if diagonal:
                    found[place].append((left * right).sum(-1).T)
                else:
                    found[place].append(torch.einsum("vbp,wbp->bvw", left, right))
        return [torch.cat(parts) for parts in found]


def _inner_prior(block: SubsetBlock, prior: Prior) -> Prior:
    """The prior of the chosen entries as one vector; one shared number stays one, so that a gradient in it is whole."""
    names, shape = tuple(block.sizes), (block.size,)
    value = prior.precision[names[0]]
    if not prior.is_shared(names):
        value = prior.vector(names, block.matrix.device)[block.places.to(block.matrix.device)]
    return Prior({_INNER: value}, {_INNER: torch.zeros((), dtype=torch.float64)}, {_INNER: shape})


def subset_block_posterior(block: SubsetBlock, prior: Prior, scale: Tensor, dtype: torch.dtype) -> SubsetBlockPosterior:
    """Decomposes the whitened matrix over the entries."""
    full = FullBlock(block.label, {_INNER: (block.size,)}, block.matrix)
    inner = full_block_posterior(full, _inner_prior(block, prior), scale, dtype)
    return SubsetBlockPosterior(block, inner, inner.scale)
