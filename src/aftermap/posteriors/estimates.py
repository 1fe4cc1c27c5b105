"""Means over random vectors, with their standard errors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aftermap.errors import InputError
from aftermap.krylov import TraceEstimate
from aftermap.likelihoods.draws import signs_like
from aftermap.posteriors.linear_system import LinearSystem

__all__ = ["ESTIMATORS", "check_estimator", "mean_estimate", "prior_shares"]

ESTIMATORS = ("samples", "hutchinson")


def check_estimator(method: str) -> str:
    """The method, if it is known.

    Raises:
        InputError: it is not.
    """
    if method not in ESTIMATORS:
        raise InputError(f"method={method!r} is not known; allowed are {', '.join(map(repr, ESTIMATORS))}")
    return method


def mean_estimate(values: Tensor) -> TraceEstimate:
    """The mean of values [S] and its standard error (NaN for one value).

    >>> mean_estimate(torch.tensor([1.0, 3.0]))
    TraceEstimate(value=2.0, standard_error=1.0)
    """
    error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return TraceEstimate(float(values.mean()), error)


def prior_shares(system: LinearSystem, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The diagonal of R = P₀^{½} Σ P₀^{½}, the share of each entry's prior variance that is left, by random signs z.

    With a matrix Q whose diagonal is known, diag R = diag Q + E[z∘(R − Q)z]. Q = I leaves a variance of at most 1 − R_ii per
    sign vector; Q from the preconditioner leaves less where that is close. The better of the two is taken.

    Args:
        system: solves with P.
        count: S.
        seed: of the signs.

    Returns:
        diag Q [P], and z∘(R − Q)z [S, P].
    """
    like = torch.empty(count, system.operator.size, dtype=torch.float64, device=system.operator.device)
    signs = signs_like(like, torch.Generator().manual_seed(seed))
    root = system.prior.sqrt()
    moved = root * system.solve(root * signs)[0]
    guess = root * system.preconditioner.solve(root * signs)
    options = [
        (torch.ones_like(root), signs * (moved - signs)),
        (system.prior * system.preconditioner.marginal_variance(), signs * (moved - guess)),
    ]
    return min(options, key=lambda pair: float(pair[1].var(0, correction=0).sum()))
