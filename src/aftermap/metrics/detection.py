"""Telling unusual from usual by a score (higher means more unusual): ROC, AUROC, AUPR, and FPR at a TPR.

Selective prediction asks how good the answers are that are left when the most uncertain inputs are set aside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap import checks
from aftermap.errors import DataError
from aftermap.metrics.tensors import TensorLike, check_flags, check_real, check_same_shape, check_scores

__all__ = [
    "RiskCoverage",
    "RocCurve",
    "accuracy_at_coverage",
    "augrc",
    "aupr",
    "aurc",
    "auroc",
    "fpr_at_tpr",
    "labelled_scores",
    "rank_correlation",
    "risk_coverage",
    "roc_curve",
]

# coverage * N may land a rounding error above a whole number, which must not cost one more example.
_ROUNDING = 1e-9


def _check_detection(scores: TensorLike, positive: TensorLike) -> tuple[Tensor, Tensor]:
    s = check_scores("scores", scores).detach()
    flags = check_flags("positive", positive).to(s.device)
    check_same_shape(scores=s, positive=flags)
    n_positive = int(flags.sum())
    if n_positive in (0, flags.numel()):
        raise DataError(
            f"both kinds of examples are needed to rank them, got {n_positive} positive and "
            f"{flags.numel() - n_positive} negative. Add examples of the missing kind (for a set without "
            "errors there is nothing to detect)."
        )
    return s, flags


def labelled_scores(inside: TensorLike, outside: TensorLike) -> tuple[Tensor, Tensor]:
    """Joins the scores of usual and unusual data, with flags that mark the unusual ones as positive.

    Args:
        inside: The scores of in-distribution data [N].
        outside: The scores of out-of-distribution data [M].

    Returns:
        Scores [N + M] and booleans [N + M], true for ``outside``.

    Raises:
        DataError: There is a NaN, or a set is empty.
        ShapeError: The scores are not vectors.

    >>> auroc(*labelled_scores([0.1, 0.2], [0.2, 0.9, 0.3]))
    0.9166666666666666
    """
    usual = check_scores("inside", inside)
    unusual = check_scores("outside", outside).to(usual.device)
    flags = torch.arange(usual.numel() + unusual.numel(), device=usual.device) >= usual.numel()
    return torch.cat([usual, unusual]), flags


def _middle_ranks(values: Tensor) -> Tensor:
    """Returns the ranks [N] of values, from 1; equal ones share the middle of theirs."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - 0.5 * (counts - 1).to(torch.float64))[inverse]


def auroc(scores: TensorLike, positive: TensorLike) -> float:
    """Returns the area under the ROC curve: the chance that a positive example scores above a negative one.

    It is P(s+ > s-) + 1/2 P(s+ = s-), from middle ranks (Mann-Whitney), so ties count one half. To detect errors, the
    positives are the wrong answers; to detect data from outside the distribution, they are the outside inputs.

    Args:
        scores: One score for each example [N], higher for the more unusual; infinite values are allowed.
        positive: Booleans, or zeros and ones, that say which examples are positive [N].

    Returns:
        A number between 0 and 1; 0.5 for scores that say nothing.

    Raises:
        DataError: There is a NaN, there are no examples, or there is only one kind of them.
        ShapeError: The shapes do not match, or are not vectors.

    >>> auroc([0.1, 0.4, 0.4, 0.8], [False, False, True, True])
    0.875
    """
    s, flags = _check_detection(scores, positive)
    rank = _middle_ranks(s)
    n_positive = int(flags.sum())
    n_negative = flags.numel() - n_positive
    wins = rank[flags].sum().item() - 0.5 * n_positive * (n_positive + 1)
    return wins / (n_positive * n_negative)


def _cumulative(s: Tensor, flags: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the thresholds from high to low, with the number of positives and negatives at or above each."""
    values, inverse = s.unique(return_inverse=True)
    marks = flags.to(torch.float64)
    hits = torch.bincount(inverse, weights=marks, minlength=values.numel()).flip(0).cumsum(0)
    alarms = torch.bincount(inverse, weights=1.0 - marks, minlength=values.numel()).flip(0).cumsum(0)
    return values.flip(0), hits, alarms


@dataclass(frozen=True)
class RocCurve:
    """The rates ``tpr`` and ``fpr`` as the threshold falls, each float64 [M + 1]; an input is flagged where score >= threshold."""

    fpr: Tensor
    tpr: Tensor
    thresholds: Tensor

    @property
    def area(self) -> float:
        """The area by the trapezium rule, which equals :func:`auroc`."""
        return torch.trapezoid(self.tpr, self.fpr).item()


def roc_curve(scores: TensorLike, positive: TensorLike) -> RocCurve:
    """Returns the receiver operating characteristic: one point for each distinct score, from (0, 0) to (1, 1).

    Args:
        scores: One score for each example [N], higher for the more unusual.
        positive: Booleans, or zeros and ones, that say which examples are positive [N].

    Returns:
        The curve; its first threshold is infinity (nothing flagged).

    Raises:
        DataError, ShapeError: The same as for :func:`auroc`.

    >>> curve = roc_curve([0.1, 0.4, 0.35, 0.8], [False, False, True, True])
    >>> curve.fpr.tolist(), curve.tpr.tolist()
    ([0.0, 0.0, 0.5, 0.5, 1.0], [0.0, 0.5, 0.5, 1.0, 1.0])
    """
    values, hits, alarms = _cumulative(*_check_detection(scores, positive))
    start = values.new_zeros(1)
    return RocCurve(
        fpr=torch.cat([start, alarms / alarms[-1]]),
        tpr=torch.cat([start, hits / hits[-1]]),
        thresholds=torch.cat([values.new_full((1,), torch.inf), values]),
    )


def aupr(scores: TensorLike, positive: TensorLike) -> float:
    """Returns the area under the precision-recall curve as average precision, sum_i (R_i - R_{i-1}) P_i.

    The sum is over distinct thresholds, without interpolation (which would be too optimistic). It depends on the share
    of positives. The value with the other kind as positive ("in") is ``aupr(-scores, ~positive)``.

    Args:
        scores: One score for each example [N], higher for the more unusual.
        positive: Booleans, or zeros and ones, that say which examples are positive [N].

    Returns:
        A number between 0 and 1; about the share of positives for scores that say nothing.

    Raises:
        DataError, ShapeError: The same as for :func:`auroc`.

    References:
        Davis, Goadrich (2006), The relationship between precision-recall and ROC curves.

    >>> round(aupr([0.1, 0.4, 0.35, 0.8], [False, False, True, True]), 4)
    0.8333
    """
    _, hits, alarms = _cumulative(*_check_detection(scores, positive))
    precision = hits / (hits + alarms)
    recall_step = torch.diff(hits, prepend=hits.new_zeros(1)) / hits[-1]
    return (recall_step * precision).sum().item()


def fpr_at_tpr(scores: TensorLike, positive: TensorLike, *, tpr: float = 0.95) -> float:
    """Returns the smallest false positive rate at which at least ``tpr`` of the positives are found (FPR95 by default).

    There is no interpolation: the rate belongs to a threshold that can be set.

    Args:
        scores: One score for each example [N], higher for the more unusual.
        positive: Booleans, or zeros and ones, that say which examples are positive [N].
        tpr: The true positive rate to reach, in (0, 1].

    Returns:
        A number between 0 and 1; lower is better.

    Raises:
        DataError, ShapeError: The same as for :func:`auroc`.
        InputError: The rate ``tpr`` lies outside (0, 1].

    References:
        Hendrycks, Gimpel (2017); Liang, Li, Srikant (2018), which made FPR95 common.

    >>> fpr_at_tpr([0.1, 0.4, 0.35, 0.8], [False, False, True, True])
    0.5
    """
    tpr = checks.fraction("tpr", tpr, one=True)
    curve = roc_curve(scores, positive)
    return curve.fpr[curve.tpr >= tpr][0].item()


@dataclass(frozen=True)
class RiskCoverage:
    """The risk when the k least uncertain examples are answered, k = 1..N; each tensor is float64 [N].

    Attributes:
        coverage: The share k / N of examples that are answered.
        risk: The mean loss of the k answered examples.
        thresholds: The score of the k-th example; answering where the score is at most this gives at least this
            coverage.
    """

    coverage: Tensor
    risk: Tensor
    thresholds: Tensor

    @property
    def area(self) -> float:
        """The mean risk over all coverages (AURC)."""
        return self.risk.mean().item()

    @property
    def generalised_risk(self) -> Tensor:
        """Mean over **all** examples of the losses of the k answered ones [N]: coverage times risk."""
        return self.coverage * self.risk

    @property
    def generalised_area(self) -> float:
        """Area under the generalised risk over coverage, from 0, by the trapezium rule (AUGRC)."""
        start = self.risk.new_zeros(1)
        return torch.trapezoid(torch.cat([start, self.generalised_risk]), torch.cat([start, self.coverage])).item()


def risk_coverage(scores: TensorLike, errors: TensorLike) -> RiskCoverage:
    """Returns the risk-coverage curve: r(k) = 1/k sum of the losses of the k examples with the lowest scores.

    Examples with equal scores are taken in the mean over all their orders, so that the curve does not depend
    on the order of the data.

    Args:
        scores: The uncertainty of each example [N], higher for the more unusual.
        errors: The cost of each answer [N]: booleans that are true where the answer is wrong, or any finite loss.

    Returns:
        The curve, as :class:`RiskCoverage`.

    Raises:
        DataError: There is a NaN, or there are no examples.
        ShapeError: The shapes do not match, or are not vectors.

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
    """Returns the area under the risk-coverage curve, 1/N sum_k r(k); lower is better.

    Args:
        scores: The uncertainty of each example [N], higher for the more unusual.
        errors: The cost of each answer [N]: booleans that are true where the answer is wrong, or any finite loss.

    Returns:
        The mean risk over all coverages; the plain mean loss for scores that are all equal.

    Raises:
        DataError, ShapeError: The same as for :func:`risk_coverage`.

    >>> round(aurc([0.1, 0.9, 0.2], [False, True, False]), 4)
    0.1111
    """
    return risk_coverage(scores, errors).area


def augrc(scores: TensorLike, errors: TensorLike) -> float:
    r"""Returns the area under the generalised risk-coverage curve: the mean loss of undetected failures; lower is better.

    The generalised risk at k answers is 1/N times the sum of their losses: the chance that an input is answered, and wrongly. Its
    area weighs every failure by the share of coverages at which it is answered, whereas the AURC gives the answers with the
    highest confidence far more weight than the others. For errors that are 0 or 1, with accuracy a,

    .. math::
        \text{AUGRC} = (1 - \text{AUROC})\, a (1 - a) + \tfrac12 (1 - a)^2

    with the AUROC of finding the errors, in which ties count one half. Examples with equal scores are taken in the mean over all
    their orders.

    Args:
        scores: The uncertainty of each example [N]; higher means more unusual.
        errors: What each answer costs [N]: booleans (true means wrong) or any finite loss.

    Returns:
        The area, half the mean loss for scores that are all equal.

    Raises:
        DataError, ShapeError: The scores or errors are refused for the reasons of :func:`risk_coverage`.

    References:
        Traub, Bungert, Lüth, Baumgartner, Maier-Hein, Maier-Hein, Jaeger 2024, Overcoming common flaws in the evaluation of selective
        classification systems.

    >>> round(augrc([0.1, 0.9, 0.2], [False, True, False]), 4)
    0.0556
    """
    return risk_coverage(scores, errors).generalised_area


def rank_correlation(first: TensorLike, second: TensorLike) -> float:
    """Returns Spearman's rank correlation of two scores: the correlation of their ranks, ties with their middle rank.

    Of epistemic and aleatoric uncertainty it tells whether the two parts are two: near 1 both put inputs in the same order, and
    nothing can be said from one that the other does not say.

    Args:
        first: One number for each example [N]; infinite values are allowed.
        second: Another number for each example [N].

    Returns:
        A number between -1 and 1.

    Raises:
        DataError: NaN, no examples, or scores that are all equal, which have no order.
        ShapeError: The shapes do not match, or are not those of vectors.

    References:
        Spearman 1904, The proof and measurement of association between two things.

    >>> rank_correlation([1.0, 2.0, 3.0], [1.0, 100.0, 1000.0])
    1.0
    """
    a, b = (check_scores(name, value).detach() for name, value in (("first", first), ("second", second)))
    check_same_shape(first=a, second=b)
    centred = []
    for name, values in (("first", a), ("second", b)):
        rank = _middle_ranks(values) - 0.5 * (values.numel() + 1)
        if not bool(rank.any()):
            raise DataError(f"all values of {name} are equal, so that they have no order to compare.")
        centred.append(rank.cpu())
    products = [
        (x * y).sum().item() for x, y in ((centred[0], centred[1]), (centred[0], centred[0]), (centred[1], centred[1]))
    ]
    return max(-1.0, min(1.0, products[0] / math.sqrt(products[1] * products[2])))


def accuracy_at_coverage(scores: TensorLike, errors: TensorLike, *, coverage: float = 0.8) -> float:
    """Returns the accuracy on the least uncertain share of the examples.

    The ceil(coverage N) examples with the lowest scores are answered; ties are treated as in :func:`risk_coverage`.

    Args:
        scores: The uncertainty of each example [N], higher for the more unusual.
        errors: Booleans, or zeros and ones, that say which answers are wrong [N] (see
            :func:`aftermap.metrics.misclassified`).
        coverage: The share of the examples to answer, in (0, 1].

    Returns:
        A number between 0 and 1; the plain accuracy at coverage 1.

    Raises:
        DataError, ShapeError: The same as for :func:`risk_coverage`.
        InputError: The coverage lies outside (0, 1].

    >>> accuracy_at_coverage([0.1, 0.9, 0.2, 0.3], [False, True, False, True], coverage=0.5)
    1.0
    """
    coverage = checks.fraction("coverage", coverage, one=True)
    curve = risk_coverage(scores, check_flags("errors", errors))
    answered = max(1, math.ceil(coverage * curve.risk.numel() - _ROUNDING))
    return 1.0 - curve.risk[answered - 1].item()
