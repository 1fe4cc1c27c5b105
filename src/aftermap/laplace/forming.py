"""From the curvature of the data to a posterior: in blocks, or through products with the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from aftermap.batches import Unpack
from aftermap.curvature import Factors
from aftermap.curvature.ggn_operator import GGNOperator
from aftermap.errors import InputError
from aftermap.likelihoods import Likelihood
from aftermap.params import Params
from aftermap.posteriors import GaussianPosterior, MatrixFreePosterior
from aftermap.posteriors.prior import PriorSpec

__all__ = ["MATRIX_FREE", "curvature_structure", "form_posterior"]

MATRIX_FREE = "matrix_free"


def curvature_structure(structure: str, update: bool) -> str:
    """The structure of the sums over data: a matrix-free posterior sums Kronecker factors, as its preconditioner."""
    if structure == MATRIX_FREE and update:
        raise InputError(
            "a matrix-free posterior cannot be updated: it passes over its data again and again. Fit on all data at once"
        )
    return "kron" if structure == MATRIX_FREE else structure


def form_posterior(
    structure: str,
    factors: Factors,
    mean: Params,
    prior: PriorSpec,
    *,
    prior_mean: float | Params,
    scale: Tensor,
    damping: str,
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood,
    unpack: Unpack | None,
) -> GaussianPosterior | MatrixFreePosterior:
    """The posterior of a structure; a matrix-free one keeps the data and is preconditioned by Kronecker factors."""
    blocks = GaussianPosterior.from_factors(factors, mean, prior, prior_mean=prior_mean, scale=scale, damping=damping)
    if structure != MATRIX_FREE:
        return blocks
    operator = GGNOperator(model, data, likelihood, list(factors.names), unpack)
    return MatrixFreePosterior.from_operator(operator, preconditioner=blocks)
