"""What scores look like on usual inputs, and the default flag of unusual ones: either of entropy and mutual information."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aftermap import checks
from aftermap.errors import DataError, InputError, UnsupportedError
from aftermap.evaluation.selective import EITHER, Threshold, choose_threshold, conformal_rank
from aftermap.predictive import Prediction
from aftermap.predictive.prediction import SCORES

__all__ = ["FLAG_SCORES", "Reference", "available_scores", "check_scores", "default_score", "either_threshold"]

FLAG_SCORES = (EITHER, *SCORES)
_PARTS = ("entropy", "mutual_information")
_CLASSES = ("classification", "binary")
_POSITIONS = "positions"
_EXACT = 2000  # of so many inputs every score is kept
_TOP = 1000  # of more inputs the highest ones, and as many order statistics spread over all


def check_scores(scores: str | Iterable[str], *, reference: bool = False) -> tuple[str, ...]:
    """Returns the names of scores; every one of them must be known, and "either" needs a reference."""
    names = (scores,) if isinstance(scores, str) else tuple(scores)
    if EITHER in names and not reference:
        raise InputError(
            'the score "either" compares inputs with held-out ones; pass reference=Reference.from_predictions(…)'
        )
    return checks.choices("scores", names, FLAG_SCORES if reference else SCORES)


def available_scores(
    prediction: Prediction, wanted: Iterable[str] | None = None, reference: Reference | None = None
) -> dict[str, Tensor]:
    """Returns every score that a prediction has [N], or those wanted; a wanted one that is not defined raises.

    Args:
        prediction: The prediction.
        wanted: The names of scores; None means all.
        reference: What makes the score "either" possible.
    """
    names: tuple[str, ...] = SCORES
    if wanted is not None:
        names = check_scores(wanted, reference=reference is not None)
    elif reference is not None and EITHER in reference.thresholds:
        names = (*SCORES, EITHER)
    scores = {}
    for name in names:
        try:
            scores[name] = prediction.score(name) if reference is None else reference.score_of(prediction, name)
        except UnsupportedError:
            if wanted is not None:
                raise
    return scores


def default_score(thresholds: Mapping[str, Threshold]) -> str:
    """Returns the score by which inputs are flagged unless another one is asked for.

    For classes it is "either" where its threshold is finite, which takes 2 / rate − 1 held-out inputs, and "entropy" where it
    is not. For a regression it is "mutual_information", which compares the variance of each output with its noise, so that the units of
    several outputs do not matter; for counts it is "variance".

    >>> default_score(
    ...     {
    ...         "entropy": Threshold(0.5, "entropy", 0.05, None, 99),
    ...         "max_probability": Threshold(0.3, "", 0.05, None, 99),
    ...     }
    ... )
    'entropy'
    """
    either = thresholds.get(EITHER)
    if either is not None and math.isfinite(either.value):
        return EITHER
    if either is not None or "max_probability" in thresholds:
        return "entropy"
    return "mutual_information" if "mutual_information" in thresholds else "variance"


def either_threshold(scores: Sequence[Tensor], false_alarm_rate: float) -> Threshold:
    r"""Returns the threshold of the larger of two ranks, whose rate of false alarms is at most that which is asked for.

    The rank of a new input in one score is the number of the n held-out inputs whose score lies strictly below its own; r is the
    larger of its two ranks. A held-out input has been its own judge, so its ranks cᵢ are counted among the n − 1 others, Rᵢ is the
    larger one, and the new input could raise it by one. For an exchangeable new input, full conformal prediction promises

        P( 1 + #{i : Rᵢ with the new input counted ≥ r} ≤ α (n + 1) ) ≤ α.

    Where r is reached in one score, that number is at most G(r) + E(r), with G(r) = #{i : Rᵢ ≥ r} and E(r) the inputs with
    Rᵢ = cᵢ = r − 1 in the other score, of the two cases the larger one. The threshold is the largest r with
    G(r) + E(r) > n − ⌈(n + 1)(1 − α)⌉: it does not depend on the new input, ties cost nothing of the promise, and without ties
    the rate lies below α by about 1 / (n + 1), rarely 2.

    Args:
        scores: The two scores of held-out usual inputs, each [n].
        false_alarm_rate: The rate α that is promised, in (0, 1).

    Returns:
        The threshold (r + ½) / n of the larger rank divided by n; infinity where n is too small, which is n < 2 / α − 1.
    """
    n = len(scores[0])
    allowed = n - conformal_rank(n, false_alarm_rate)
    ranks = torch.stack([torch.searchsorted(s.sort().values, s) for s in scores])
    largest = ranks.amax(0)
    reached = torch.bincount(largest, minlength=n + 1).flip(0).cumsum(0).flip(0)  # G(0..n)
    tops = [torch.bincount(largest[r == largest], minlength=n + 1) for r in ranks]
    more = torch.cat([torch.zeros(1, dtype=torch.long), torch.stack(tops).amax(0)[:-1]])  # E(0..n)
    last = int((reached + more > allowed).nonzero().amax())
    return Threshold((last + 0.5) / n if last < n else math.inf, EITHER, float(false_alarm_rate), None, n)


@dataclass(frozen=True, eq=False, repr=False)
class Reference:
    """The scores of held-out usual inputs: what new inputs are compared with, and from where on they are flagged.

    The score "either" of an input is the larger of two shares: that of the held-out inputs with a smaller entropy, and that of
    those with a smaller mutual information. An input is flagged by it if one of the two is larger than on nearly all
    held-out inputs: entropy finds inputs between the classes, mutual information those on which the weights disagree.
    Labels are not needed.

    Attributes:
        thresholds: The threshold of each score.
        quantiles: The kept scores of held-out inputs, in increasing order and float64, by score: all of up to 2,000
            inputs; of more the 1,000 highest and 1,001 others.
        positions: Which of the ordered scores were kept [K].
        preferred: The score that is the default instead of what `default_score` says.

    >>> p = torch.linspace(0.5, 1, 99, dtype=torch.float64)
    >>> p = torch.stack([p, 1 - p], -1)
    >>> nats = torch.special.entr(p).sum(-1)
    >>> usual = Prediction("classification", p, torch.zeros(99), nats, nats, link="map")
    >>> reference = Reference.from_predictions(usual)
    >>> reference
    Reference(99 inputs, 5 % false alarms, flags by either)
    >>> reference.flag(usual).sum().item()
    3
    """

    thresholds: Mapping[str, Threshold]
    quantiles: Mapping[str, Tensor]
    positions: Tensor
    preferred: str | None = None

    @staticmethod
    def from_predictions(
        predictions: Prediction | Sequence[Prediction], *, false_alarm_rate: float = 0.05
    ) -> Reference:
        """Makes a reference from the predictions for held-out usual inputs.

        Args:
            predictions: The prediction for inputs that were not trained on, or those for several batches.
            false_alarm_rate: The share of usual inputs that may be flagged, on average over sets of held-out inputs.

        Raises:
            DataError: A score is NaN, or there is no input.
            InputError: The rate lies outside (0, 1).
        """
        checks.fraction("false_alarm_rate", false_alarm_rate, advice="Write 5 % as 0.05")
        if not isinstance(predictions, Prediction):
            predictions = Prediction.concatenate(list(predictions))
        scores = {s: v.detach().cpu().double() for s, v in available_scores(predictions).items()}
        thresholds = {s: choose_threshold(v, false_alarm_rate=false_alarm_rate, score=s) for s, v in scores.items()}
        n = len(predictions)
        ranks = [torch.arange(n)]
        if n > _EXACT:
            ranks = [torch.linspace(0, n - 1, _TOP + 1, dtype=torch.float64).round().long(), torch.arange(n - _TOP, n)]
        if predictions.kind in _CLASSES:
            thresholds[EITHER] = either_threshold([scores[s] for s in _PARTS], false_alarm_rate)
            if math.isfinite(thresholds[EITHER].value):
                # The rank that is flagged first must be known exactly.
                ranks.append(torch.tensor([int(thresholds[EITHER].value * n)]))
        positions = torch.cat(ranks).unique()
        return Reference(thresholds, {s: v.sort().values[positions] for s, v in scores.items()}, positions)

    @property
    def n_data(self) -> int:
        """How many held-out inputs there were."""
        return next(iter(self.thresholds.values())).n_data

    @property
    def default(self) -> str:
        """The score by which inputs are flagged: what is preferred, or what `default_score` says."""
        return self.preferred or default_score(self.thresholds)

    def by(self, kind: str) -> Reference:
        """Returns the same reference with another default score.

        Raises:
            InputError: The held-out inputs have no such score.
        """
        return replace(self, preferred=self.threshold(kind).score)

    def threshold(self, kind: str | None = None) -> Threshold:
        """Returns the threshold of a score.

        Raises:
            InputError: The held-out inputs have no such score.
        """
        return self.thresholds[checks.choice("score", kind or self.default, self.thresholds)]

    def score(self, prediction: Prediction, kind: str | None = None) -> Tensor:
        """Returns one number per input [N]; the higher, the more unusual.

        Args:
            prediction: The prediction for new inputs, by the same predictor with the same options.
            kind: "either", or a score of `Prediction.score`; None means the default.

        Raises:
            InputError: The held-out inputs have no such score, or were those of another kind of task.
        """
        return self.score_of(prediction, self.threshold(kind).score)

    def score_of(self, prediction: Prediction, kind: str) -> Tensor:
        """Returns the score of this name, whether it has a threshold or not."""
        if (prediction.kind in _CLASSES) != (EITHER in self.thresholds):
            made_of = "classes" if EITHER in self.thresholds else "numbers"
            raise InputError(
                f"this reference was made of predictions of {made_of}, but the prediction is a {prediction.kind}"
            )
        if kind != EITHER:
            return prediction.score(kind)
        ranks = torch.stack([self._rank(prediction.score(s), s) for s in _PARTS]).amax(0)
        return (ranks.double() / self.n_data).to(prediction.mean.device)

    def _rank(self, scores: Tensor, name: str) -> Tensor:
        """Returns how many held-out inputs lie strictly below each score; where not all were kept, how many do at least."""
        below = torch.searchsorted(self.quantiles[name].cpu(), scores.detach().cpu().double())
        return torch.cat([torch.zeros(1, dtype=torch.long), self.positions.cpu() + 1])[below]

    def flag(self, prediction: Prediction, kind: str | None = None) -> Tensor:
        """Returns which inputs to flag [N], booleans; the arguments are those of `score`."""
        return self.threshold(kind).flag(self.score(prediction, kind))

    def describe(self, kind: str | None = None) -> str:
        """Says in words when an input is flagged."""
        return self.threshold(kind).describe()

    def to_tensors(self) -> dict[str, Tensor]:
        """Returns the tensors to save, for instance as the reference of `Laplace.save`; `to_dict` has the rest."""
        return {**self.quantiles, _POSITIONS: self.positions}

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the thresholds as plain values for JSON."""
        return {s: t.to_dict() for s, t in self.thresholds.items()}

    @staticmethod
    def from_saved(tensors: Mapping[str, Tensor], thresholds: Mapping[str, Mapping[str, Any]]) -> Reference:
        """Makes a reference from what `to_tensors` and `to_dict` gave.

        Raises:
            DataError: Something is missing, or the scores are not in order.
        """
        if _POSITIONS not in tensors or not thresholds:
            raise DataError(
                'these tensors are no reference: "positions", or the thresholds that belong to them, are missing'
            )
        chosen = {s: Threshold.from_dict(t) for s, t in thresholds.items()}
        positions, needed = tensors[_POSITIONS], [s for s in chosen if s != EITHER]
        quantiles = {s: v for s, v in tensors.items() if s != _POSITIONS}
        if EITHER in chosen:
            needed += [s for s in _PARTS if s not in needed]
        for score in needed:
            values = quantiles.get(score)
            if values is None or values.shape != positions.shape or not bool((values.diff() >= 0).all()):
                raise DataError(f"the reference is damaged: its scores {score!r} are missing or not in order")
        return Reference(chosen, quantiles, positions)

    def __repr__(self) -> str:
        rate = next(iter(self.thresholds.values())).false_alarm_rate
        return f"Reference({self.n_data:,} inputs, {100 * rate:g} % false alarms, flags by {self.default})"
