"""Scores of class probabilities, their entropy, and its split into what data and what weights leave open."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.errors import ShapeError
from aftermap.metrics.tensors import (
    PROBABILITY_FLOOR,
    TensorLike,
    check_classification,
    check_probabilities,
    check_real,
)

__all__ = [
    "CovarianceDecomposition",
    "EntropyDecomposition",
    "InverseEcdf",
    "accuracy",
    "brier",
    "covariance_decomposition",
    "entropy",
    "entropy_decomposition",
    "inverse_ecdf",
    "max_probability",
    "misclassified",
    "mutual_information",
    "nll",
    "pointwise_brier",
    "pointwise_nll",
]


def pointwise_nll(probs: TensorLike, labels: TensorLike) -> Tensor:
    """Returns the negative log-probability of each label, in nats.

    It is -log max(p_y, 1e-12), so that a label that was given probability 0 costs 27.6 nats instead of infinity.

    Args:
        probs: The probabilities [N, C] or [N, ..., C]; for methods that sample, the **mean** probabilities.
        labels: The class indices [N] or [N, ...].

    Returns:
        A float64 tensor [N]; leading dimensions are flattened.

    Raises:
        DataError: There is a NaN, a row does not sum to one, a label is out of range, or there are no examples.
        ShapeError: The shapes do not match.

    >>> pointwise_nll([[0.5, 0.5], [0.25, 0.75]], [0, 1]).exp()
    tensor([2.0000, 1.3333], dtype=torch.float64)
    """
    p, y = check_classification(probs, labels)
    return _nll_terms(p, y)


def _nll_terms(p: Tensor, y: Tensor) -> Tensor:
    return -p.gather(-1, y.unsqueeze(-1)).squeeze(-1).clamp_min(PROBABILITY_FLOOR).log()


def nll(probs: TensorLike, labels: TensorLike) -> float:
    """Returns the mean negative log-likelihood, -1/N sum_n log p_n(y_n), in nats.

    Args:
        probs: The probabilities [N, C] or [N, ..., C]. For methods that sample, pass the mean over samples: the score
            is the log of the mean probability, not the mean of the logs.
        labels: The class indices [N] or [N, ...].

    Returns:
        The mean over examples. Probabilities below 1e-12 count as 1e-12.

    Raises:
        DataError: There is a NaN, a row does not sum to one, a label is out of range, or there are no examples.
        ShapeError: The shapes do not match.

    >>> round(nll([[0.5, 0.5], [0.25, 0.75]], [0, 1]), 4)
    0.4904
    """
    return pointwise_nll(probs, labels).mean().item()


def misclassified(probs: TensorLike, labels: TensorLike) -> Tensor:
    """Tells which examples the most probable class gets wrong: the positives of misclassification detection.

    Args:
        probs: The probabilities [N, C] or [N, ..., C].
        labels: The class indices [N] or [N, ...].

    Returns:
        Booleans [N], true where argmax p != y (the first class wins a tie).

    Raises:
        DataError, ShapeError: The same as for :func:`nll`.

    >>> misclassified([[0.9, 0.1], [0.8, 0.2]], [0, 1])
    tensor([False,  True])
    """
    p, y = check_classification(probs, labels)
    return p.argmax(-1) != y


def accuracy(probs: TensorLike, labels: TensorLike) -> float:
    """Returns the fraction of examples whose most probable class is the label.

    Args:
        probs: The probabilities [N, C] or [N, ..., C].
        labels: The class indices [N] or [N, ...].

    Returns:
        The fraction 1/N #{n : argmax_k p_nk = y_n}; the first class wins a tie.

    Raises:
        DataError, ShapeError: The same as for :func:`nll`.

    >>> accuracy([[0.9, 0.1], [0.8, 0.2]], [0, 1])
    0.5
    """
    return 1.0 - misclassified(probs, labels).to(torch.float64).mean().item()


def pointwise_brier(probs: TensorLike, labels: TensorLike) -> Tensor:
    """Returns the Brier score of each example, sum_k (p_k - 1[y = k])^2, between 0 and 2.

    Args:
        probs: The probabilities [N, C] or [N, ..., C].
        labels: The class indices [N] or [N, ...].

    Returns:
        The score of each example, as a float64 tensor [N].

    Raises:
        DataError, ShapeError: The same as for :func:`nll`.

    >>> pointwise_brier([[0.5, 0.5], [0.0, 1.0]], [0, 0])
    tensor([0.5000, 2.0000], dtype=torch.float64)
    """
    p, y = check_classification(probs, labels)
    return _brier_terms(p, y)


def _brier_terms(p: Tensor, y: Tensor) -> Tensor:
    # This is the direct sum of squares, since the expanded form would cancel for confident, correct predictions.
    target = torch.zeros_like(p).scatter_(-1, y.unsqueeze(-1), 1.0)
    return (p - target).square().sum(-1)


def brier(probs: TensorLike, labels: TensorLike) -> float:
    """Returns the Brier score, 1/N sum_n sum_k (p_nk - 1[y_n = k])^2.

    The sum runs over all classes, so the range is 0 to 2; for two classes it is twice the score of the
    probability of class 1 alone (scikit-learn's ``brier_score_loss``).

    Args:
        probs: The probabilities [N, C] or [N, ..., C].
        labels: The class indices [N] or [N, ...].

    Returns:
        The mean over examples.

    Raises:
        DataError, ShapeError: The same as for :func:`nll`.

    >>> brier([[0.5, 0.5], [0.0, 1.0]], [0, 0])
    1.25
    """
    return pointwise_brier(probs, labels).mean().item()


def max_probability(probs: TensorLike) -> Tensor:
    """Returns the score 1 - max_k p_k of each example: higher means more unusual.

    Args:
        probs: The probabilities [..., C].

    Returns:
        A float64 tensor [...], with values between 0 and 1 - 1/C.

    Raises:
        DataError: There is a NaN, or a row does not sum to one.

    >>> max_probability([[0.75, 0.25], [0.5, 0.5]])
    tensor([0.2500, 0.5000], dtype=torch.float64)
    """
    return 1.0 - check_probabilities("probs", probs).max(-1).values


def entropy(probs: TensorLike) -> Tensor:
    """Returns the entropy H[p] = -sum_k p_k log p_k of each example, in nats; 0 log 0 = 0.

    Args:
        probs: The probabilities [..., C].

    Returns:
        A float64 tensor [...], with values between 0 and log C.

    Raises:
        DataError: There is a NaN, or a row does not sum to one.

    >>> entropy([[0.5, 0.5], [1.0, 0.0]])
    tensor([0.6931, 0.0000], dtype=torch.float64)
    """
    return torch.special.entr(check_probabilities("probs", probs)).sum(-1)


@dataclass(frozen=True)
class InverseEcdf:
    """The ``fraction`` of values above each of the ``thresholds``, both float64 [M]."""

    thresholds: Tensor
    fraction: Tensor


def inverse_ecdf(values: TensorLike, thresholds: TensorLike | None = None) -> InverseEcdf:
    """Returns the inverse empirical distribution function F(h) = 1/N #{n : v_n > h}.

    It is drawn for the predictive entropies of unknown classes: the higher the curve, the more inputs are doubted.

    Args:
        values: The values [...], for instance entropies. They are flattened.
        thresholds: The M thresholds to evaluate at; by default the sorted distinct values.

    Returns:
        The thresholds and the fractions above them.

    Raises:
        DataError: A value is NaN or infinite, or there are no values.

    References:
        Ritter, Botev, Barber (2018), figures 2 and 5.

    >>> inverse_ecdf([0.1, 0.3, 0.3, 0.9], [0.0, 0.3]).fraction
    tensor([1.0000, 0.2500], dtype=torch.float64)
    """
    ordered = check_real("values", values).reshape(-1).sort().values
    if thresholds is None:
        points = ordered.unique()
    else:
        points = check_real("thresholds", thresholds).reshape(-1).to(ordered.device)
    below = torch.searchsorted(ordered, points, right=True)
    return InverseEcdf(points, 1.0 - below.to(torch.float64) / ordered.numel())


@dataclass(frozen=True)
class EntropyDecomposition:
    """The parts of an entropy, ``total`` = ``aleatoric`` + ``epistemic``, each float64 [N] in nats."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


def _check_prob_samples(samples: TensorLike) -> Tensor:
    p = check_probabilities("samples", samples)
    if p.dim() < 3:
        raise ShapeError(
            f"samples must have shape [S, N, C] (samples first), got {list(p.shape)}. "
            "Stack the probabilities of the samples with torch.stack; one sample is p.unsqueeze(0)."
        )
    return p


def entropy_decomposition(samples: TensorLike) -> EntropyDecomposition:
    """Splits the predictive entropy of sampled probabilities into aleatoric and epistemic parts.

    With pbar = 1/S sum_s p_s, the total is H[pbar], the aleatoric part 1/S sum_s H[p_s], and the epistemic part their
    difference, which is the mutual information between label and weights, 1/S sum_s KL(p_s || pbar) >= 0.

    Args:
        samples: The probabilities [S, N, C] or [S, N, ..., C], one set for each posterior sample.

    Returns:
        The three parts [N, ...], in nats.

    Raises:
        DataError: There is a NaN, or a row does not sum to one.
        ShapeError: The samples have fewer than three dimensions.

    >>> parts = entropy_decomposition([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> [round(part.item(), 4) for part in (parts.total, parts.aleatoric, parts.epistemic)]
    [0.6931, 0.0, 0.6931]
    """
    p = _check_prob_samples(samples)
    total = torch.special.entr(p.mean(0)).sum(-1)
    aleatoric = torch.special.entr(p).sum(-1).mean(0)
    # The difference is not negative by Jensen's inequality; rounding may say otherwise when all samples agree.
    return EntropyDecomposition(total, aleatoric, (total - aleatoric).clamp_min(0.0))


def mutual_information(samples: TensorLike) -> Tensor:
    """Returns the mutual information between label and weights, H[mean p] - mean H[p], in nats.

    Args:
        samples: The probabilities [S, N, C] or [S, N, ..., C].

    Returns:
        A float64 tensor [N, ...], with values between 0 and min(log S, log C).

    Raises:
        DataError, ShapeError: The same as for :func:`entropy_decomposition`.

    >>> mutual_information([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]])
    tensor([0.6931, 0.0000], dtype=torch.float64)
    """
    return entropy_decomposition(samples).epistemic


@dataclass(frozen=True)
class CovarianceDecomposition:
    """The covariance of the one-hot label, ``total`` = ``aleatoric`` + ``epistemic``, each float64 [N, C, C]."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


def covariance_decomposition(samples: TensorLike) -> CovarianceDecomposition:
    """Splits the covariance of the one-hot label by the law of total covariance.

    The split diag(pbar) - pbar pbar^T = 1/S sum_s [diag(p_s) - p_s p_s^T] + 1/S sum_s (p_s - pbar)(p_s - pbar)^T into
    total = aleatoric + epistemic is exact (the divisor of the last term is S, not S - 1).

    Args:
        samples: The probabilities [S, N, C] or [S, N, ..., C].

    Returns:
        The three matrices [N, ..., C, C].

    Raises:
        DataError, ShapeError: The same as for :func:`entropy_decomposition`.

    References:
        Kwon, Won, Kim, Paik (2020), Uncertainty quantification using Bayesian neural
        networks in classification.

    >>> covariance_decomposition([[[1.0, 0.0]], [[0.0, 1.0]]]).epistemic
    tensor([[[ 0.2500, -0.2500],
             [-0.2500,  0.2500]]], dtype=torch.float64)
    """
    p = _check_prob_samples(samples)
    mean = p.mean(0)
    second = torch.einsum("s...i,s...j->...ij", p, p) / p.shape[0]
    deviation = p - mean
    epistemic = torch.einsum("s...i,s...j->...ij", deviation, deviation) / p.shape[0]
    diagonal = torch.diag_embed(mean)
    total = diagonal - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    return CovarianceDecomposition(total, diagonal - second, epistemic)
