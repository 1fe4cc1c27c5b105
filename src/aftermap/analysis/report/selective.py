"""The operating point: what every share of answered inputs costs, for the slider of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aftermap.analysis.figures.style import Array
from aftermap.evaluation.results import Results
from aftermap.metrics import risk_coverage

__all__ = ["OperatingPoints", "column", "operating_points"]

_PERCENT = 100


def column(results: Results, name: str, data: str = "test") -> Array | None:
    """Returns one column of the table for one set, float64; None where the table lacks it or a number is missing.

    >>> column(Results("x", "regression", 2, {}, table={"set": ["test", "other"], "entropy": [1.0, 2.0]}), "entropy")
    array([1.])
    """
    table = results.table
    if name not in table or "set" not in table:
        return None
    values = [v for v, s in zip(table[name], table["set"], strict=True) if s == data]
    if not values or any(v is None or isinstance(v, str) for v in values):
        return None
    numbers = np.asarray(values, dtype=np.float64)
    return numbers if bool(np.isfinite(numbers).all()) else None


@dataclass(frozen=True)
class OperatingPoints:
    """What happens when the p % least uncertain inputs are answered, p = 1..100.

    Attributes:
        coverage: The share of inputs that are answered, ⌈p N / 100⌉ / N.
        answered: The number of inputs that are answered.
        risk: The mean loss of the answered inputs.
        threshold: The score of the most uncertain answered input; NaN where the scores are not known.
        caught: The share of the total loss that is set aside; NaN where there is none.
        others: The risk of each other predictor at the same coverage, by its name.
        outside: For each OOD set the share of its inputs that the threshold sets aside.
        n_data: The number N of inputs.
        score: The score that the threshold is of.
    """

    coverage: Sequence[float]
    answered: Sequence[int]
    risk: Sequence[float]
    threshold: Sequence[float]
    caught: Sequence[float]
    others: Mapping[str, Sequence[float]]
    outside: Mapping[str, Sequence[float]]
    n_data: int
    score: str

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, rounded to what is shown."""

        def short(values: Sequence[float]) -> list[float | None]:
            return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values]

        return {
            "coverage": short(self.coverage),
            "answered": list(self.answered),
            "risk": short(self.risk),
            "threshold": short(self.threshold),
            "caught": short(self.caught),
            "others": [short(v) for v in self.others.values()],
            "outside": [short(v) for v in self.outside.values()],
            "n": self.n_data,
        }


def _losses(results: Results) -> Array | None:
    """Returns the loss of every test input: wrong or not, or the squared error."""
    right = column(results, "correct")
    if right is not None:
        return 1.0 - right
    mean, target = column(results, "prediction"), column(results, "target")
    return None if mean is None or target is None else np.asarray((target - mean) ** 2)


def _score(results: Results) -> str:
    """Returns the score by which inputs are set aside: of classes the one by which they are flagged, where every input's is known."""
    flagged_by = results.provenance.get("flagged_by")
    classes = results.kind in ("classification", "binary")
    known = classes and flagged_by is not None and column(results, str(flagged_by)) is not None
    return str(flagged_by) if known else "entropy"


def _curve(results: Results) -> tuple[Array, Array, Array | None] | None:
    """Returns coverage, risk and thresholds: of every test input where the table has them, otherwise of the thinned curve."""
    scores, losses = column(results, _score(results)), _losses(results)
    if scores is not None and losses is not None:
        curve = risk_coverage(scores, losses)
        return curve.coverage.numpy(), curve.risk.numpy(), curve.thresholds.numpy()
    thin = results.curves.get("risk_coverage")
    if thin is None or not len(thin["coverage"]):
        return None
    return np.asarray(thin["coverage"], float), np.asarray(thin["risk"], float), None


def operating_points(results: Results, others: Mapping[str, Results] | None = None) -> OperatingPoints | None:
    """Returns the slider's table for one evaluation, beside the risk of others at the same coverage.

    Args:
        results: The evaluation whose score decides which inputs are answered: that by which inputs are flagged, otherwise
            entropy.
        others: More evaluations on the same data by name, each deciding by its own score.

    Returns:
        One entry per percent; None if the evaluation has no risk-coverage curve.

    >>> table = {"set": ["test"] * 4, "entropy": [0.1, 0.2, 0.3, 0.4], "correct": [True, True, True, False]}
    >>> points = operating_points(Results("x", "classification", 4, {}, table=table))
    >>> points.risk[74], points.threshold[74], points.caught[74], points.risk[99]
    (0.0, 0.3, 1.0, 0.25)
    """
    curve = _curve(results)
    if curve is None:
        return None
    coverage, risk, thresholds = curve
    n = results.n_data if thresholds is None else len(coverage)
    answered = [max(1, math.ceil(p * n / _PERCENT - 1e-9)) for p in range(1, _PERCENT + 1)]
    shares = np.asarray(answered) / n
    ours = np.interp(shares, coverage, risk)
    total = float(risk[-1])
    limits = np.full(_PERCENT, math.nan) if thresholds is None else thresholds[np.asarray(answered) - 1]
    caught = 1 - ours * shares / total if total > 0 else np.full(_PERCENT, math.nan)
    beside = {}
    for name, other in (others or {}).items():
        their = _curve(other)
        if their is not None:
            beside[name] = np.interp(shares, their[0], their[1]).tolist()
    outside, score = {}, _score(results)
    for data in results.ood:
        scores = column(results, score, data)
        if scores is not None and thresholds is not None:
            outside[data] = [float((scores > limit).mean()) for limit in limits]
    return OperatingPoints(
        shares.tolist(), answered, ours.tolist(), limits.tolist(), caught.tolist(), beside, outside, n, score
    )
