"""A Gaussian with a cheap inverse, close to the posterior: what speeds conjugate gradients and quadrature up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.errors import InputError
from aftermap.likelihoods.draws import normal_like
from aftermap.posteriors.base import GaussianPosterior
from aftermap.posteriors.blocks import join_flat, split_flat
from aftermap.posteriors.kron import KronBlockPosterior
from aftermap.posteriors.low_rank import LowRankBlockPosterior
from aftermap.posteriors.prior import Prior

__all__ = ["Preconditioner"]


@dataclass(frozen=True)
class Preconditioner:
    """M: the precision of a posterior with Kronecker, diagonal or low-rank blocks, or the prior's P₀ where there is none.

    Kronecker factors help where data are many and layers badly scaled. With fewer data than parameters P is the prior plus
    a low rank, and a low-rank posterior is much the better choice; even P₀ alone may beat Kronecker factors there.
    Rows are vectors [k, P] in float64, in the order of ``shapes``.

    Attributes:
        posterior: gives M; None: M = P₀.
        shapes: the parameters, in order.
        prior: P₀ [P].
    """

    posterior: GaussianPosterior | None
    shapes: Mapping[str, tuple[int, ...]]
    prior: Tensor

    @staticmethod
    def make(
        posterior: GaussianPosterior | None,
        prior: Prior,
        scale: Tensor,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
    ) -> Preconditioner:
        """Brings a posterior of the same parameters to the prior and scale that are wanted.

        A Kronecker block carries one prior precision; where the prior has several, it gets their geometric mean:
        M need not be exact.

        Raises:
            InputError: the posterior is over other parameters.
        """
        if posterior is not None and posterior.shapes != dict(shapes):
            other = sorted(set(posterior.shapes.items()) ^ set(shapes.items()))
            raise InputError(
                f"the preconditioner is a posterior over other parameters; they differ in {[n for n, _ in other[:6]]}. "
                "Fit it with the same params= as the products"
            )
        vector = prior.vector(tuple(shapes), device).detach()
        if posterior is None:
            return Preconditioner(None, dict(shapes), vector)
        prior = prior.with_precision({n: prior.precision[n].detach() for n in shapes})
        precision = dict(prior.precision)
        for block in posterior.blocks:
            if isinstance(block, KronBlockPosterior) and not prior.is_scalar(block.names):
                mean = prior.vector(block.names).log().mean().exp()
                precision.update(dict.fromkeys(block.names, mean))
        moved = posterior.with_prior(prior=prior.with_precision(precision), scale=scale.detach())
        return Preconditioner(moved, dict(shapes), vector)

    def safe_for(self, dtype: torch.dtype) -> Preconditioner:
        """One whose inverse times P has no eigenvalue that products in ``dtype`` cannot resolve.

        A Kronecker block may overstate the curvature of a direction by many orders; its tiny eigenvalues then drown in the
        rounding of a single-precision network. A low-rank block, or the prior alone, never does.
        """
        blocks = () if self.posterior is None else self.posterior.blocks
        if dtype == torch.float64 or all(isinstance(b, LowRankBlockPosterior) for b in blocks):
            return self
        return Preconditioner(None, self.shapes, self.prior)

    def solve(self, rows: Tensor) -> Tensor:
        """M⁻¹ v for each row [k, P]."""
        if self.posterior is None:
            return rows / self.prior
        return join_flat(self.posterior.covariance_mv(split_flat(rows, dict(self.shapes))), list(self.shapes), 1)

    def multiply(self, rows: Tensor) -> Tensor:
        """M v for each row [k, P]."""
        if self.posterior is None:
            return rows * self.prior
        return join_flat(self.posterior.precision_mv(split_flat(rows, dict(self.shapes))), list(self.shapes), 1)

    def marginal_variance(self) -> Tensor:
        """The diagonal of M⁻¹ [P]."""
        if self.posterior is None:
            return 1 / self.prior
        return join_flat(self.posterior.marginal_variance(), list(self.shapes), 0).to(torch.float64)

    def log_det(self) -> float:
        """log |M|."""
        return float(self.prior.log().sum() if self.posterior is None else self.posterior.log_det_precision())

    def draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Rows [count, P] from N(0, M⁻¹)."""
        if self.posterior is None:
            like = self.prior.expand(count, -1)
            return normal_like(like, generator) / self.prior.sqrt()
        found = {}
        # Deviations of the blocks, not samples minus the mean: that would cancel in single precision.
        for block in self.posterior.blocks:
            found.update(block.sample(count, generator))
        return join_flat(found, list(self.shapes), 1).to(torch.float64)
