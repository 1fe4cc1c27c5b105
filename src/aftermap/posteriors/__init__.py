"""Posteriors over parameters: Gaussian with Kronecker, diagonal, full and low-rank blocks, and the full one matrix-free."""

from aftermap.curvature.structures.base import BlockPosterior
from aftermap.posteriors.base import CurvaturePosterior, GaussianPosterior, Posterior
from aftermap.posteriors.dual import DualPosterior, dual_covariance
from aftermap.posteriors.io import LoadedPosterior, load_posterior, save_posterior
from aftermap.posteriors.matrix_free import MatrixFreePosterior, MatrixFreeSettings
from aftermap.posteriors.solver import SolveReport
from aftermap.prior import Prior, precision_from_weight_decay

__all__ = [
    "BlockPosterior",
    "CurvaturePosterior",
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
