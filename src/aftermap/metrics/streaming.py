"""Metrics over data that come in batches: sums that add up over batches, over ranks and over restarts.

Every accumulator holds a fixed set of float64 sums on the CPU, so that ``state()`` has the same shapes on
every rank, also on one that saw nothing: ``accumulator.all_reduced().result()`` is the metric over the data of
all processes, whatever the share of each. Use a fresh accumulator, or ``reset()``, for each thing measured.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aftermap import checks
from aftermap.distributed import all_reduce_
from aftermap.errors import DataError, InputError, NotFittedError
from aftermap.metrics import calibration, regression, scoring
from aftermap.metrics.tensors import (
    TensorLike,
    check_classification,
    check_flags,
    check_gaussian,
    check_real,
    check_same_shape,
    check_scores,
)

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "Streaming",
    "StreamingAUROC",
    "StreamingAccuracy",
    "StreamingBrier",
    "StreamingCoverage",
    "StreamingECE",
    "StreamingGaussianNLL",
    "StreamingNLL",
    "StreamingRMSE",
]


class Streaming(ABC):
    """A metric made of sums that add up over batches.

    The law is that updating with the parts of a data set, in any order, on any rank, and adding the states gives what
    one update with the whole set gives, up to rounding.

    A subclass gives ``update`` (which adds sums), ``_zero_state`` and ``_result``.
    """

    def __init__(self) -> None:
        self._state = self._zero_state()

    @abstractmethod
    def _zero_state(self) -> dict[str, Tensor]:
        """Returns the sums over no data, which must hold ``count``."""

    @abstractmethod
    def _result(self) -> float:
        """Returns the metric from sums over at least one example."""

    def _settings(self) -> tuple[float, ...]:
        """Returns what two accumulators must share, beside their type, for their sums to add up."""
        return ()

    def _add(self, **sums: Tensor) -> Self:
        # All checks are over by now, so a refused batch leaves the sums as they were.
        for name, value in sums.items():
            self._state[name] = self._state[name] + value.detach().to("cpu", torch.float64)
        return self

    @property
    def count(self) -> int:
        """The number of terms seen so far (examples; entries for RMSE and coverage)."""
        return int(self._state["count"].sum())

    def result(self) -> float:
        """Returns the metric over everything seen.

        Raises:
            NotFittedError: No data were seen yet.
        """
        if self.count == 0:
            raise NotFittedError(f"{type(self).__name__} has seen no data. Call update(...) before result().")
        return self._result()

    def state(self) -> dict[str, Tensor]:
        """Returns a copy of the sums, float64 on the CPU; the states of several ranks may be added entry by entry."""
        return {name: value.clone() for name, value in self._state.items()}

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        """Returns a new accumulator with the same settings that holds the given sums.

        Args:
            state: The sums as given by :meth:`state`, or a sum of several such.

        Raises:
            InputError: The state has other names or shapes than this accumulator.
        """
        expected = {name: list(value.shape) for name, value in self._state.items()}
        got = {name: list(value.shape) for name, value in state.items()}
        if got != expected:
            raise InputError(
                f"the state does not fit {type(self).__name__}: expected {expected}, got {got}. "
                "Make both with the same class and settings."
            )
        new = copy.copy(self)
        new._state = {name: value.detach().to("cpu", torch.float64, copy=True) for name, value in state.items()}
        return new

    def merge(self, other: Streaming) -> Self:
        """Returns a new accumulator over the data of both; neither is changed.

        Args:
            other: An accumulator of the same class and settings.

        Raises:
            InputError: The other accumulator has another class, or other settings.
        """
        if type(other) is not type(self) or other._settings() != self._settings():
            raise InputError(
                f"only accumulators of the same class and settings can be merged, got {type(self).__name__}"
                f"{self._settings()} and {type(other).__name__}{getattr(other, '_settings', tuple)()}."
            )
        return self.with_state({name: value + other._state[name] for name, value in self._state.items()})

    def all_reduced(self) -> Self:
        """Returns a new accumulator over the data of all processes (in one process, a copy); every process must ask."""
        total = self.state()
        all_reduce_(list(total.values()))
        return self.with_state(total)

    def reset(self) -> Self:
        """Forgets everything that was seen."""
        self._state = self._zero_state()
        return self


def _zeros(*names: str, size: tuple[int, ...] = ()) -> dict[str, Tensor]:
    return {name: torch.zeros(size, dtype=torch.float64) for name in names}


def _number(tensor: Tensor) -> Tensor:
    return torch.tensor(tensor.numel(), dtype=torch.float64)


class _Mean(Streaming):
    """A mean of terms, which is their sum over their count."""

    def _zero_state(self) -> dict[str, Tensor]:
        return _zeros("count", "total")

    def _result(self) -> float:
        return (self._state["total"] / self._state["count"]).item()

    def _add_terms(self, terms: Tensor) -> Self:
        return self._add(count=_number(terms), total=terms.sum())


class StreamingAccuracy(_Mean):
    """The metric :func:`aftermap.metrics.accuracy` over batches.

    >>> StreamingAccuracy().update([[0.9, 0.1]], [0]).update([[0.8, 0.2]], [1]).result()
    0.5
    """

    def update(self, probs: TensorLike, labels: TensorLike) -> Self:
        """Adds a batch of probabilities [N, C] or [N, ..., C] and labels [N] or [N, ...]; N may be 0."""
        p, y = check_classification(probs, labels, allow_empty=True)
        return self._add_terms((p.argmax(-1) == y).to(torch.float64))


class StreamingNLL(_Mean):
    """The metric :func:`aftermap.metrics.nll` over batches.

    >>> round(StreamingNLL().update([[0.5, 0.5]], [0]).update([[0.25, 0.75]], [1]).result(), 4)
    0.4904
    """

    def update(self, probs: TensorLike, labels: TensorLike) -> Self:
        """Adds a batch of probabilities [N, C] or [N, ..., C] and labels [N] or [N, ...]; N may be 0."""
        return self._add_terms(scoring._nll_terms(*check_classification(probs, labels, allow_empty=True)))


class StreamingBrier(_Mean):
    """The metric :func:`aftermap.metrics.brier` over batches.

    >>> StreamingBrier().update([[0.5, 0.5]], [0]).update([[0.0, 1.0]], [0]).result()
    1.25
    """

    def update(self, probs: TensorLike, labels: TensorLike) -> Self:
        """Adds a batch of probabilities [N, C] or [N, ..., C] and labels [N] or [N, ...]; N may be 0."""
        return self._add_terms(scoring._brier_terms(*check_classification(probs, labels, allow_empty=True)))


class StreamingECE(Streaming):
    """The metric :func:`aftermap.metrics.ece` over batches, with the same bins and so the same number.

    Args:
        n_bins: The number of bins of equal width.

    >>> batches = StreamingECE(n_bins=15).update([[0.9, 0.1], [0.8, 0.2]], [0, 0]).update([[0.4, 0.6]], [1])
    >>> round(batches.result(), 4)
    0.2333
    """

    def __init__(self, n_bins: int = 15) -> None:
        self.n_bins = checks.count("n_bins", n_bins)
        super().__init__()

    def _settings(self) -> tuple[float, ...]:
        return (self.n_bins,)

    def _zero_state(self) -> dict[str, Tensor]:
        return _zeros("count", "confidence", "correct", size=(self.n_bins,))

    def update(self, probs: TensorLike, labels: TensorLike) -> Self:
        """Adds a batch of probabilities [N, C] or [N, ..., C] and labels [N] or [N, ...]; N may be 0."""
        p, y = check_classification(probs, labels, allow_empty=True)
        confidence, correct = calibration._top_confidence(p, y)
        index = calibration._width_index(confidence, self.n_bins)
        count, total, hits = calibration._bin_sums(confidence, correct, index, self.n_bins)
        return self._add(count=count, confidence=total, correct=hits)

    def bins(self) -> calibration.ReliabilityBins:
        """Returns the reliability bins over everything seen."""
        state = self.state()
        return calibration._width_bins(state["count"], state["confidence"], state["correct"])

    def _result(self) -> float:
        return self.bins().ece


class StreamingRMSE(_Mean):
    """The metric :func:`aftermap.metrics.rmse` over batches.

    >>> StreamingRMSE().update([0.0], [1.0]).update([0.0], [7.0]).result()
    5.0
    """

    def update(self, mean: TensorLike, targets: TensorLike) -> Self:
        """Adds a batch of predictive means [N] or [N, D] and targets of the same shape; N may be 0."""
        mu = check_real("mean", mean, allow_empty=True)
        y = check_real("targets", targets, allow_empty=True).to(mu.device)
        check_same_shape(mean=mu, targets=y)
        return self._add_terms((y - mu).square())

    def _result(self) -> float:
        return (self._state["total"] / self._state["count"]).sqrt().item()


class StreamingGaussianNLL(_Mean):
    """The metric :func:`aftermap.metrics.gaussian_nll` over batches.

    >>> round(StreamingGaussianNLL().update([0.0], 1.0, [0.0]).result(), 4)
    0.9189
    """

    def update(self, mean: TensorLike, variance: TensorLike, targets: TensorLike) -> Self:
        """Adds a batch of means [N] or [N, D], variances (the same, or a number) and targets; N may be 0."""
        return self._add_terms(regression._gaussian_terms(*check_gaussian(mean, variance, targets, allow_empty=True)))


class StreamingCoverage(_Mean):
    """The metric :func:`aftermap.metrics.coverage` over batches.

    >>> StreamingCoverage().update([0.0], [1.0], [0.5]).update([0.0], [1.0], [2.0]).result()
    0.5
    """

    def update(self, lower: TensorLike, upper: TensorLike, targets: TensorLike) -> Self:
        """Adds a batch of interval ends [N] or [N, D] and targets of the same shape; N may be 0."""
        low, high = regression._check_interval(lower, upper, allow_empty=True)
        return self._add_terms(regression._inside(low, high, targets, allow_empty=True))


class StreamingAUROC(Streaming):
    """The metric :func:`aftermap.metrics.auroc` from two histograms of the scores, with a bound on what binning costs.

    Scores that fall in one bin count as ties. With a_b and c_b the shares of positives and negatives in bin b,
    |binned - exact| <= 1/2 sum_b a_b c_b, which is :meth:`error_bound`. The bound holds for any scores; those outside
    [low, high] go to the first or last bin, so a range that is too small shows as a large bound.

    Args:
        low: The lower end of the range of the scores.
        high: The upper end of the range; for the entropy of C classes it is log C.
        n_bins: The number of bins, each of width (high - low) / n_bins, which is the resolution.

    Raises:
        InputError: The range is empty, or the number of bins is below one.

    >>> metric = StreamingAUROC(0.0, 1.0).update([0.1, 0.4], [0, 0]).update([0.35, 0.8], [1, 1])
    >>> metric.result(), metric.error_bound()
    (0.75, 0.0)
    """

    def __init__(self, low: float, high: float, n_bins: int = 4096) -> None:
        # The range is finite and increasing; the test is written so that NaN fails as well.
        if not float("-inf") < low < high < float("inf"):
            raise InputError(f"low must be below high and both finite, got low={low}, high={high}.")
        self.low = float(low)
        self.high = float(high)
        self.n_bins = checks.count("n_bins", n_bins)
        super().__init__()

    def _settings(self) -> tuple[float, ...]:
        return (self.low, self.high, self.n_bins)

    def _zero_state(self) -> dict[str, Tensor]:
        return _zeros("count", "positive", size=(self.n_bins,))

    @property
    def resolution(self) -> float:
        """The width of a bin: scores closer than this may count as equal."""
        return (self.high - self.low) / self.n_bins

    def update(self, scores: TensorLike, positive: TensorLike) -> Self:
        """Adds a batch of scores [N], higher for the more unusual, and flags [N] that say which are positive; N may be 0."""
        s = check_scores("scores", scores, allow_empty=True).detach()
        flags = check_flags("positive", positive).to(s.device)
        check_same_shape(scores=s, positive=flags)
        edges = torch.linspace(self.low, self.high, self.n_bins + 1, dtype=torch.float64, device=s.device)
        index = torch.bucketize(s, edges[1:-1])
        count = torch.bincount(index, minlength=self.n_bins)
        hits = torch.bincount(index, weights=flags.to(torch.float64), minlength=self.n_bins)
        return self._add(count=count, positive=hits)

    def _shares(self) -> tuple[Tensor, Tensor]:
        positive = self._state["positive"]
        negative = self._state["count"] - positive
        if positive.sum() == 0 or negative.sum() == 0:
            raise DataError(
                f"both kinds of examples are needed to rank them, got {int(positive.sum())} positive and "
                f"{int(negative.sum())} negative. Update with examples of the missing kind."
            )
        return positive / positive.sum(), negative / negative.sum()

    def _result(self) -> float:
        positive, negative = self._shares()
        below = negative.cumsum(0) - negative
        return (positive * (below + 0.5 * negative)).sum().item()

    def error_bound(self) -> float:
        """Returns the largest possible distance to the exact AUROC of everything seen."""
        positive, negative = self._shares()
        return 0.5 * (positive * negative).sum().item()
