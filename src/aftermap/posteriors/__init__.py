"""Posteriors over parameters: Gaussian with Kronecker, diagonal, full and low-rank blocks."""

from aftermap.posteriors.base import GaussianPosterior, Posterior
from aftermap.posteriors.blocks import BlockPosterior
from aftermap.posteriors.prior import Prior, precision_from_weight_decay

__all__ = ["BlockPosterior", "GaussianPosterior", "Posterior", "Prior", "precision_from_weight_decay"]
