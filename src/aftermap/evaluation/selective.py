"""When to flag an input: a threshold at a target rate of false alarms, with a bound that holds for finite data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from aftermap import checks
from aftermap.errors import DataError, ShapeError

__all__ = [
    "EITHER",
    "SelectiveReport",
    "Threshold",
    "choose_threshold",
    "clopper_pearson",
    "conformal_rank",
    "selective_report",
]

EITHER = "either"  # the larger of the ranks of entropy and mutual information; see reference.py
_STEPS = 200


@dataclass(frozen=True)
class Threshold:
    """A rule that flags an input if its score is **above** ``value``.

    Attributes:
        value: The threshold; infinite where the data are too few for the promise.
        score: The kind of score, as in ``Prediction.score``, or "either", as in `Reference.score`.
        false_alarm_rate: The rate α that is promised on data like the calibration data.
        confidence: With None the rate holds on average over calibration sets (conformal); with a number δ it holds for
            this calibration set with probability δ.
        n_data: The number of calibration data.
    """

    value: float
    score: str
    false_alarm_rate: float
    confidence: float | None
    n_data: int

    def flag(self, scores: Tensor) -> Tensor:
        """Tells which inputs [N] to flag."""
        return scores > self.value

    def describe(self, data: str = "the validation inputs", digits: int = 3) -> str:
        """Says in words when an input is flagged, without the promise.

        Args:
            data: The name of the calibration data.
            digits: The number of significant digits of the threshold.

        >>> Threshold(0.9725, "either", 0.05, None, 200).describe()
        'its entropy or its mutual information is larger than on 97.5 % of the validation inputs'
        >>> Threshold(0.9916, "either", 0.05, None, 60).describe()
        'its entropy or its mutual information is larger than on all of the validation inputs'
        >>> Threshold(0.5, "entropy", 0.05, None, 200).describe()
        'its entropy is above 0.5'
        """
        if self.value == math.inf:
            return "never"
        if self.score == EITHER:
            share = (math.floor(self.value * self.n_data) + 1) / self.n_data
            return f"its entropy or its mutual information is larger than on {'all' if share == 1 else _percent(share)} of {data}"
        limit = f"its {self.score.replace('_', ' ')} is above {self.value:.{digits}g}"
        if self.score != "variance":
            return limit
        deviation = math.sqrt(max(self.value, 0.0))
        return f"{limit} (a standard deviation of {deviation:,.0f})" if deviation >= 1000 else limit

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON; an infinite threshold is null."""
        return {**asdict(self), "value": self.value if math.isfinite(self.value) else None}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Threshold:
        """Makes a threshold from what `to_dict` returned."""
        return Threshold(**{**values, "value": math.inf if values["value"] is None else float(values["value"])})


def choose_threshold(
    scores: Tensor, *, false_alarm_rate: float = 0.05, confidence: float | None = None, score: str = "entropy"
) -> Threshold:
    r"""Returns the lowest threshold whose false alarms on data like these are bounded.

    With sorted scores s₍₁₎ ≤ … ≤ s₍ₙ₎ of usual data, the threshold is s₍ₖ₎ with

    - no confidence: k = ⌈(n + 1)(1 − α)⌉. For a new, exchangeable input P(score > s₍ₖ₎) ≤ α, on average over calibration
      sets;
    - confidence δ: the smallest k with P(Bin(n, 1 − α) ≤ k − 1) ≥ δ. Then with probability at least δ over the
      calibration set, its false-alarm rate is at most α (the one-sided Clopper-Pearson bound).

    Args:
        scores: The scores of held-out usual data [N], not of the training data; a higher score means more unusual.
        false_alarm_rate: The rate α of false alarms to promise, in (0, 1).
        confidence: The probability δ in (0, 1) that the promise holds for this calibration set, or None for a promise
            on average.
        score: The kind of score, which is kept with the threshold.

    Returns:
        The threshold. It is infinite, so that nothing is flagged, if n is too small for the promise.

    Raises:
        DataError: There are no scores, or some are NaN.
        InputError: A rate lies outside (0, 1).

    References:
        Vovk, Gammerman, Shafer 2005, Algorithmic learning in a random world; Wilks 1941 (tolerance limits).

    >>> choose_threshold(torch.arange(1.0, 100.0), false_alarm_rate=0.05).value
    95.0
    >>> choose_threshold(torch.arange(1.0, 100.0), false_alarm_rate=0.05, confidence=0.95).value
    98.0
    """
    checks.fraction("false_alarm_rate", false_alarm_rate, advice="Write 5 % as 0.05")
    if scores.dim() != 1:
        raise ShapeError(f"scores must be a vector, one number per input; got shape {list(scores.shape)}")
    if scores.numel() == 0 or bool(scores.isnan().any()):
        raise DataError("scores must hold at least one number and no NaN")
    ordered, n = scores.detach().double().sort().values, scores.numel()
    if confidence is None:
        rank = conformal_rank(n, false_alarm_rate)
    else:
        checks.fraction("confidence", confidence, advice="Write 5 % as 0.05")
        cumulative = _binomial_cdf(n, 1 - false_alarm_rate)  # P(Bin ≤ j) for j = 0..n
        enough = (cumulative[:n] >= confidence).nonzero()
        rank = int(enough[0]) + 1 if len(enough) else n + 1
    value = float(ordered[rank - 1]) if rank <= n else math.inf
    return Threshold(value, score, float(false_alarm_rate), confidence, n)


def conformal_rank(n: int, false_alarm_rate: float) -> int:
    """Returns ⌈(n + 1)(1 − α)⌉: which of n ordered scores is the threshold; n + 1 where there are too few.

    >>> conformal_rank(99, 0.05), conformal_rank(18, 0.05)
    (95, 19)
    """
    return math.ceil((n + 1) * (1 - false_alarm_rate) - 1e-9)


def _percent(share: float) -> str:
    """Writes a share as people do, rounded down so that it is not said to be more than it is: 97.5 %."""
    return f"{math.floor(1000 * share + 1e-9) / 10:g} %"


def _binomial_cdf(n: int, p: float) -> Tensor:
    k = torch.arange(n + 1, dtype=torch.float64)
    size = torch.tensor(float(n), dtype=torch.float64)
    choose = torch.lgamma(size + 1) - torch.lgamma(k + 1) - torch.lgamma(size - k + 1)
    return (choose + k * math.log(p) + (n - k) * math.log1p(-p)).exp().cumsum(0).clamp_max(1.0)


def clopper_pearson(events: int, trials: int, *, level: float = 0.95) -> tuple[float, float]:
    """Returns the exact two-sided confidence interval for a rate, from ``events`` in ``trials``.

    Args:
        events: The number k of events.
        trials: The number n of trials, at least 1.
        level: The probability that the interval holds the rate.

    Returns:
        The lower and the upper end: P(Bin(n, lower) ≥ k) = P(Bin(n, upper) ≤ k) = (1 − level) / 2.

    Raises:
        InputError: The number k is not in 0..n, or the level lies outside (0, 1).

    References:
        Clopper, Pearson 1934, The use of confidence or fiducial limits illustrated in the case of the binomial.

    >>> tuple(round(end, 4) for end in clopper_pearson(3, 20))
    (0.0321, 0.3789)
    """
    trials = checks.count("trials", trials)
    events = checks.count("events", events, 0, most=trials)
    checks.fraction("level", level, advice="Write 5 % as 0.05")
    tail = 0.5 * (1 - level)
    lower = 0.0 if events == 0 else _solve(lambda p: 1 - float(_binomial_cdf(trials, p)[events - 1]) - tail)
    upper = 1.0 if events == trials else _solve(lambda p: tail - float(_binomial_cdf(trials, p)[events]))
    return lower, upper


def _solve(increasing: Any) -> float:
    """Finds the zero in (0, 1) of an increasing function."""
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if increasing(middle) < 0 else (low, middle)
    return 0.5 * (low + high)


@dataclass(frozen=True)
class SelectiveReport:
    """What a threshold does on test data; the rates have exact 95 % intervals.

    Attributes:
        threshold: The threshold that was applied.
        flagged: The share of inputs that are flagged.
        flagged_interval: The interval of the share of flagged inputs.
        errors_answered: The error rate among inputs that are answered; NaN if none is.
        errors_answered_interval: The interval of that error rate.
        errors_flagged: The share of all errors that are flagged; NaN if there are no errors.
    """

    threshold: Threshold
    flagged: float
    flagged_interval: tuple[float, float]
    errors_answered: float
    errors_answered_interval: tuple[float, float]
    errors_flagged: float


def selective_report(threshold: Threshold, scores: Tensor, errors: Tensor) -> SelectiveReport:
    """Applies a threshold to test data and reports what it flags.

    Args:
        threshold: A threshold that was chosen on other data.
        scores: The scores of the test inputs [N].
        errors: Booleans [N] that say which answers are wrong.

    Returns:
        The shares and error rates with their intervals.

    >>> t = Threshold(0.5, "entropy", 0.05, None, 100)
    >>> selective_report(
    ...     t, torch.tensor([0.1, 0.2, 0.9, 0.8]), torch.tensor([False, True, True, False])
    ... ).errors_answered
    0.5
    """
    if scores.shape != errors.shape or scores.dim() != 1:
        raise ShapeError(
            f"scores and errors must be two vectors of one length, got {list(scores.shape)} and {list(errors.shape)}"
        )
    wrong, flags = errors.bool(), threshold.flag(scores)
    n, answered = len(scores), int((~flags).sum())
    mistakes = int((wrong & ~flags).sum())
    return SelectiveReport(
        threshold,
        int(flags.sum()) / n,
        clopper_pearson(int(flags.sum()), n),
        mistakes / answered if answered else math.nan,
        clopper_pearson(mistakes, answered) if answered else (0.0, 1.0),
        int((wrong & flags).sum()) / int(wrong.sum()) if bool(wrong.any()) else math.nan,
    )
