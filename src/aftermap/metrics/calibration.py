"""Is a confidence of 80 % right in 80 % of cases? Reliability bins and the errors made of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap import checks
from aftermap.metrics.tensors import TensorLike, check_classification

__all__ = [
    "ReliabilityBins",
    "adaptive_ece",
    "classwise_ece",
    "ece",
    "mce",
    "reliability_bins",
    "signed_calibration_error",
]

_STRATEGIES = ("width", "mass")


@dataclass(frozen=True)
class ReliabilityBins:
    """Bins of confidence; each attribute is a float64 tensor [B] with one entry per bin.

    Attributes:
        lower: The left end of each bin (open, but the first bin holds 0).
        upper: The right end of each bin (closed). For bins of equal mass both ends are the confidences met.
        count: The number of examples in the bin.
        confidence: The mean confidence in the bin, NaN where it is empty.
        accuracy: The fraction of right answers in the bin, NaN where it is empty.
    """

    lower: Tensor
    upper: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def gap(self) -> Tensor:
        """The confidence minus the accuracy [B], positive where overconfident, and 0 where the bin is empty."""
        return (self.confidence - self.accuracy).nan_to_num(0.0)

    @property
    def weight(self) -> Tensor:
        """The share of the examples in each bin [B]."""
        return self.count / self.count.sum()

    @property
    def ece(self) -> float:
        """The expected calibration error, sum_b n_b/n |accuracy_b - confidence_b|."""
        return (self.weight * self.gap.abs()).sum().item()

    @property
    def mce(self) -> float:
        """The maximum calibration error, max_b |accuracy_b - confidence_b| over bins that hold examples."""
        return self.gap.abs().max().item()

    @property
    def signed(self) -> float:
        """The mean confidence minus the accuracy; positive is overconfident."""
        return (self.weight * self.gap).sum().item()


def _width_index(confidence: Tensor, n_bins: int) -> Tensor:
    """Returns the index of the bin (l, u] that holds each confidence; 0 is in the first bin and 1 in the last."""
    inner = torch.linspace(0.0, 1.0, n_bins + 1, dtype=torch.float64, device=confidence.device)[1:-1]
    return torch.bucketize(confidence, inner, right=False)


def _mass_index(confidence: Tensor, n_bins: int) -> Tensor:
    """Returns the bin of each confidence by its middle rank, so that equal confidences always share a bin."""
    _, inverse, counts = confidence.unique(return_inverse=True, return_counts=True)
    middle = counts.cumsum(0) - 0.5 * counts
    return (middle * n_bins / confidence.numel()).to(torch.int64)[inverse]


def _bin_sums(confidence: Tensor, correct: Tensor, index: Tensor, n_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns count, sum of confidence and number correct in each bin; these sums add up over batches and ranks."""
    count = torch.bincount(index, minlength=n_bins).to(torch.float64)
    total_confidence = torch.bincount(index, weights=confidence, minlength=n_bins)
    total_correct = torch.bincount(index, weights=correct.to(torch.float64), minlength=n_bins)
    return count, total_confidence, total_correct


def _width_bins(count: Tensor, total_confidence: Tensor, total_correct: Tensor) -> ReliabilityBins:
    edges = torch.linspace(0.0, 1.0, count.numel() + 1, dtype=torch.float64, device=count.device)
    return ReliabilityBins(edges[:-1], edges[1:], count, total_confidence / count, total_correct / count)


def reliability_bins(
    probs: TensorLike, labels: TensorLike, *, n_bins: int = 15, strategy: str = "width"
) -> ReliabilityBins:
    """Returns the bins of the top confidence with the accuracy in each: the numbers of a reliability diagram.

    Bins of equal width are (l, u], and the last is closed at 1: a confidence of exactly 1 belongs to it, and
    there is no hidden extra bin. Bins of equal mass are cut by rank; equal confidences stay together, so with
    many ties there may be fewer bins than asked for, and none is empty.

    Args:
        probs: The probabilities [N, C] or [N, ..., C].
        labels: The class indices [N] or [N, ...].
        n_bins: The number of bins.
        strategy: How the bins are cut: "width" gives them equal widths, "mass" equal numbers of examples.

    Returns:
        The bins, as :class:`ReliabilityBins`.

    Raises:
        DataError: There is a NaN, a row does not sum to one, a label is out of range, or there are no examples.
        ShapeError: The shapes do not match.
        InputError: The number of bins is below one, or the strategy is unknown.

    >>> bins = reliability_bins([[0.9, 0.1], [1.0, 0.0], [0.4, 0.6]], [0, 1, 1], n_bins=2)
    >>> bins.count, bins.accuracy
    (tensor([0., 3.], dtype=torch.float64), tensor([   nan, 0.6667], dtype=torch.float64))
    """
    n_bins = checks.count("n_bins", n_bins)
    checks.choice("strategy", strategy, _STRATEGIES)
    confidence, correct = _top_confidence(*check_classification(probs, labels))
    if strategy == "width":
        return _width_bins(*_bin_sums(confidence, correct, _width_index(confidence, n_bins), n_bins))
    index = _mass_index(confidence, n_bins)
    _, index = index.unique(return_inverse=True)
    used = int(index.max()) + 1
    count, total_confidence, total_correct = _bin_sums(confidence, correct, index, used)
    ends = confidence.new_empty(used)
    lower = ends.scatter_reduce(0, index, confidence, "amin", include_self=False)
    upper = ends.scatter_reduce(0, index, confidence, "amax", include_self=False)
    return ReliabilityBins(lower, upper, count, total_confidence / count, total_correct / count)


def _top_confidence(p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    confidence, predicted = p.detach().max(-1)
    return confidence, predicted == y


def ece(probs: TensorLike, labels: TensorLike, *, n_bins: int = 15) -> float:
    """Returns the expected calibration error of the top confidence, sum_b n_b/n |accuracy_b - confidence_b|.

    The bins are of equal width, (l, u], closed at 1. The error is biased upwards for few examples: give a bootstrap
    interval.

    Args:
        probs: The probabilities [N, C] or [N, ..., C].
        labels: The class indices [N] or [N, ...].
        n_bins: The number of bins.

    Returns:
        A number between 0 and 1.

    Raises:
        DataError, ShapeError, InputError: The same as for :func:`reliability_bins`.

    References:
        Guo, Pleiss, Sun, Weinberger (2017), On calibration of modern neural networks, eq. (3).

    >>> round(ece([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]], [0, 0, 1]), 4)
    0.2333
    """
    return reliability_bins(probs, labels, n_bins=n_bins).ece


def adaptive_ece(probs: TensorLike, labels: TensorLike, *, n_bins: int = 15) -> float:
    """Returns the expected calibration error over bins of equal mass; equal confidences stay in one bin.

    Args:
        probs: The probabilities [N, C] or [N, ..., C].
        labels: The class indices [N] or [N, ...].
        n_bins: The number of bins.

    Returns:
        A number between 0 and 1. It does not depend on the order of the examples.

    Raises:
        DataError, ShapeError, InputError: The same as for :func:`reliability_bins`.

    References:
        Nixon, Dusenberry, Zhang, Jerfel, Tran (2019), Measuring calibration in deep learning.

    >>> round(adaptive_ece([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]], [0, 0, 1, 1], n_bins=2), 4)
    0.25
    """
    return reliability_bins(probs, labels, n_bins=n_bins, strategy="mass").ece


def mce(probs: TensorLike, labels: TensorLike, *, n_bins: int = 15) -> float:
    """Returns the maximum calibration error, max_b |accuracy_b - confidence_b| over bins of equal width with examples.

    Args:
        probs: The probabilities [N, C] or [N, ..., C].
        labels: The class indices [N] or [N, ...].
        n_bins: The number of bins.

    Returns:
        A number between 0 and 1.

    Raises:
        DataError, ShapeError, InputError: The same as for :func:`reliability_bins`.

    References:
        Guo, Pleiss, Sun, Weinberger (2017), eq. (5).

    >>> round(mce([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]], [0, 0, 1]), 4)
    0.4
    """
    return reliability_bins(probs, labels, n_bins=n_bins).mce


def signed_calibration_error(probs: TensorLike, labels: TensorLike) -> float:
    """Returns the mean top confidence minus the accuracy: positive is overconfident, negative underconfident.

    It is the ECE without its absolute values, so it does not depend on bins, and |signed| <= ECE.

    Args:
        probs: The probabilities [N, C] or [N, ..., C].
        labels: The class indices [N] or [N, ...].

    Returns:
        A number between -1 and 1.

    Raises:
        DataError, ShapeError: The same as for :func:`reliability_bins`.

    >>> signed_calibration_error([[0.75, 0.25], [0.25, 0.75]], [0, 0])
    0.25
    """
    return reliability_bins(probs, labels, n_bins=1).signed


def classwise_ece(probs: TensorLike, labels: TensorLike, *, n_bins: int = 15) -> float:
    """Returns the calibration error of the probability of every class, averaged over classes.

    1/C sum_k sum_b n_bk/n |frequency of class k in bin b - mean of p_k in bin b|, over bins of equal width
    (l, u] that also hold 0. It sees the probabilities that the top confidence hides.

    Args:
        probs: The probabilities [N, C] or [N, ..., C].
        labels: The class indices [N] or [N, ...].
        n_bins: The number of bins for each class.

    Returns:
        A number between 0 and 1.

    Raises:
        DataError, ShapeError, InputError: The same as for :func:`reliability_bins`.

    References:
        Kull, Perello-Nieto, Kängsepp, Silva Filho, Song, Flach (2019), Beyond temperature scaling.

    >>> round(classwise_ece([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]], [0, 0, 1]), 4)
    0.2333
    """
    n_bins = checks.count("n_bins", n_bins)
    p, y = check_classification(probs, labels)
    n, n_classes = p.shape
    p = p.detach()
    # One table of class and bin: the bins of class k are k * n_bins onwards.
    offset = torch.arange(n_classes, device=p.device) * n_bins
    index = (_width_index(p.contiguous(), n_bins) + offset).reshape(-1)
    hit = y.unsqueeze(-1) == torch.arange(n_classes, device=p.device)
    _, total_p, total_hit = _bin_sums(p.reshape(-1), hit.reshape(-1), index, n_bins * n_classes)
    return ((total_hit - total_p).abs().sum() / (n * n_classes)).item()
