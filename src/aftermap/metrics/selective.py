"""Selective prediction: how good are the answers left when the most uncertain inputs are set aside?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.metrics._check import (
    TensorLike,
    check_flags,
    check_fraction,
    check_real,
    check_same_shape,
    check_scores,
)

__all__ = ["RiskCoverage", "accuracy_at_coverage", "aurc", "risk_coverage"]

# coverage * N may land a rounding error above a whole number, which must not cost one more example.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class RiskCoverage:
    """Risk when the k least uncertain examples are answered, k = 1..N; each tensor is float64 [N].

    Attributes:
        coverage: k / N.
        risk: mean loss of the k answered examples.
        thresholds: score of the k-th example; answering where score <= it gives at least this coverage.
    """

    coverage: Tensor
    risk: Tensor
    thresholds: Tensor

    @property
    def area(self) -> float:
        """Mean risk over all coverages (AURC)."""
        return self.risk.mean().item()


def risk_coverage(scores: TensorLike, errors: TensorLike) -> RiskCoverage:
    """Risk-coverage curve: r(k) = 1/k sum of the losses of the k examples with the lowest scores.

    Examples with equal scores are taken in the mean over all their orders, so that the curve does not depend
    on the order of the data.

    Args:
        scores: uncertainty of each example [N], higher = more unusual.
        errors: what each answer costs [N]: booleans (true = wrong) or any finite loss.

    Returns:
        The curve, as :class:`RiskCoverage`.

    Raises:
        DataError: NaN, or no examples.
        ShapeError: shapes that do not match, or are not vectors.

    References:
        El-Yaniv, Wiener (2010); Geifman, Uziel, El-Yaniv (2019), Bias-reduced uncertainty estimation.

    >>> risk_coverage([0.1, 0.9, 0.2], [False, True, False]).risk
    tensor([0.0000, 0.0000, 0.3333], dtype=torch.float64)
    """
    s = check_scores("scores", scores).detach()
    losses = check_real("errors", errors).to(s.device).detach()
    check_same_shape(scores=s, errors=losses)
    n = s.numel()
    values, inverse, counts = s.unique(return_inverse=True, return_counts=True)
    group_mean = torch.bincount(inverse, weights=losses, minlength=values.numel()) / counts
    # Each member of a group of ties costs the mean of the group: the expectation over random orders.
    expected = group_mean.repeat_interleave(counts)
    accepted = torch.arange(1, n + 1, dtype=torch.float64, device=s.device)
    return RiskCoverage(accepted / n, expected.cumsum(0) / accepted, values.repeat_interleave(counts))


def aurc(scores: TensorLike, errors: TensorLike) -> float:
    """Area under the risk-coverage curve, 1/N sum_k r(k); lower is better.

    Args:
        scores: uncertainty of each example [N], higher = more unusual.
        errors: what each answer costs [N]: booleans (true = wrong) or any finite loss.

    Returns:
        The mean risk over all coverages; the plain mean loss for scores that are all equal.

    Raises:
        DataError, ShapeError: as :func:`risk_coverage`.

    >>> round(aurc([0.1, 0.9, 0.2], [False, True, False]), 4)
    0.1111
    """
    return risk_coverage(scores, errors).area


def accuracy_at_coverage(scores: TensorLike, errors: TensorLike, *, coverage: float = 0.8) -> float:
    """Accuracy on the least uncertain share of the examples.

    The ceil(coverage N) examples with the lowest scores are answered; ties as in :func:`risk_coverage`.

    Args:
        scores: uncertainty of each example [N], higher = more unusual.
        errors: which answers are wrong [N], booleans or 0/1 (see :func:`aftermap.metrics.misclassified`).
        coverage: share of the examples to answer, in (0, 1].

    Returns:
        A number between 0 and 1; the plain accuracy at coverage 1.

    Raises:
        DataError, ShapeError: as :func:`risk_coverage`.
        InputError: ``coverage`` outside (0, 1].

    >>> accuracy_at_coverage([0.1, 0.9, 0.2, 0.3], [False, True, False, True], coverage=0.5)
    1.0
    """
    coverage = check_fraction("coverage", coverage, closed_at_one=True)
    curve = risk_coverage(scores, check_flags("errors", errors))
    answered = max(1, math.ceil(coverage * curve.risk.numel() - _ROUNDING))
    return 1.0 - curve.risk[answered - 1].item()
