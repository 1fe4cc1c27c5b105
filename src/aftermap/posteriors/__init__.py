"""Posteriors over parameters: Gaussian with Kronecker, diagonal, full and low-rank blocks, and the full one matrix-free."""

from aftermap.posteriors.base import GaussianPosterior, Posterior
from aftermap.posteriors.blocks import BlockPosterior
from aftermap.posteriors.dual import dual_covariance
from aftermap.posteriors.dual_posterior import DualPosterior
from aftermap.posteriors.io import LoadedPosterior, load_posterior, save_posterior
from aftermap.posteriors.linear_system import SolveReport
from aftermap.posteriors.matrix_free import MatrixFreePosterior
from aftermap.posteriors.matrix_free_settings import MatrixFreeSettings
from aftermap.posteriors.prior import Prior, precision_from_weight_decay

__all__ = [
    "BlockPosterior",
    "DualPosterior",
    "GaussianPosterior",
    "LoadedPosterior",
    "MatrixFreePosterior",
    "MatrixFreeSettings",
    "Posterior",
    "Prior",
    "SolveReport",
    "dual_covariance",
    "load_posterior",
    "precision_from_weight_decay",
    "save_posterior",
]
