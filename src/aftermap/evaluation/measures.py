"""Which numbers an evaluation reports for each kind of task, with their bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aftermap import metrics as m
from aftermap.errors import DataError
from aftermap.evaluation.results import Metric
from aftermap.likelihoods.base import aligned
from aftermap.predictive import Prediction

__all__ = [
    "LEVELS",
    "Bootstrap",
    "as_classes",
    "class_curves",
    "class_metrics",
    "regression_curves",
    "regression_metrics",
]

LEVELS = (0.5, 0.9, 0.95)
_COVERAGES = (0.8, 0.9)


class Bootstrap:
    """Intervals for several metrics of the same data: every metric sees the same resamples.

    Args:
        n_resamples: 0: no intervals.
        level: of the intervals.
        seed: of the resamples.
    """

    def __init__(self, n_resamples: int, level: float, seed: int):
        self.n_resamples, self.level, self.seed = n_resamples, level, seed

    def __call__(
        self, metric: Callable[..., float], *data: Tensor, method: str = "percentile", strata: Any = None
    ) -> Metric:
        if not self.n_resamples:
            value = float(metric(*data))
            return Metric(value, value, value)
        found = m.bootstrap_interval(
            metric,
            *data,
            n_resamples=self.n_resamples,
            level=self.level,
            method=method,
            strata=strata,
            generator=torch.Generator().manual_seed(self.seed),
        )
        return Metric(found.estimate, found.lower, found.upper)


def _mean(values: Tensor) -> float:
    return values.mean().item()


def as_classes(prediction: Prediction, targets: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [M, C], labels [M] and the entropy [M] of every position that counts; a binary output is two classes."""
    if prediction.kind == "binary":
        p = prediction.mean.double()
        y = aligned(p, targets, p.shape[-1], "evaluate")
        if not bool(((y == 0) | (y == 1)).all()):
            raise DataError("evaluate needs binary targets that are 0 or 1, got others")
        probs, labels = torch.stack([1 - p, p], -1).reshape(-1, 2), y.reshape(-1).long()
        return probs, labels, prediction.total.reshape(-1)
    probs, labels = prediction.mean.reshape(-1, prediction.mean.shape[-1]), targets.reshape(-1)
    keep = labels != ignore_index
    if not bool(keep.any()):
        raise DataError(f"every target is {ignore_index}, the index of positions to leave out")
    return probs[keep], labels[keep], prediction.total.reshape(-1)[keep]


def class_metrics(probs: Tensor, labels: Tensor, uncertainty: Tensor, boot: Bootstrap) -> dict[str, Metric]:
    """Accuracy, proper scores, calibration, and how well the uncertainty finds the errors."""
    wrong = m.misclassified(probs, labels)
    scores = uncertainty.double()
    found = {
        "accuracy": boot(_mean, (~wrong).double()),
        "nll": boot(_mean, m.pointwise_nll(probs, labels)),
        "brier": boot(_mean, m.pointwise_brier(probs, labels)),
        # Resampling adds to the bias of a calibration error; the basic interval turns it around.
        "ece": boot(m.ece, probs, labels, method="basic"),
        "adaptive_ece": boot(m.adaptive_ece, probs, labels, method="basic"),
        "mce": _point(m.mce(probs, labels)),
        "classwise_ece": _point(m.classwise_ece(probs, labels)),
        "signed_calibration_error": boot(_mean, probs.amax(-1).double() - (~wrong).double()),
        "entropy": boot(_mean, scores),
        "aurc": boot(m.aurc, scores, wrong.double()),
    }
    for coverage in _COVERAGES:
        found[f"accuracy_at_{coverage:.0%}".replace("%", "")] = _point(
            m.accuracy_at_coverage(scores, wrong, coverage=coverage)
        )
    if 0 < int(wrong.sum()) < len(wrong):  # without both kinds there is nothing to tell apart
        found["auroc_errors"] = boot(m.auroc, scores, wrong, strata=wrong)
        found["fpr95_errors"] = _point(m.fpr_at_tpr(scores, wrong))
    return found


def _point(value: float) -> Metric:
    return Metric(value, value, value)


def class_curves(probs: Tensor, labels: Tensor, uncertainty: Tensor) -> dict[str, dict[str, list[float]]]:
    """Reliability bins, risk against coverage, and the inverse ECDF of the entropy of right and wrong answers."""
    wrong = m.misclassified(probs, labels)
    bins = m.reliability_bins(probs, labels)
    risk = m.risk_coverage(uncertainty.double(), wrong)
    curves = {
        "reliability": {
            "confidence": bins.confidence.tolist(),
            "accuracy": bins.accuracy.tolist(),
            "count": [float(c) for c in bins.count.tolist()],
        },
        "risk_coverage": {"coverage": _thin(risk.coverage), "risk": _thin(risk.risk)},
    }
    for name, rows in (("right", ~wrong), ("wrong", wrong)):
        if bool(rows.any()):
            curves[f"entropy_{name}"] = inverse_ecdf(uncertainty[rows])
    return curves


def inverse_ecdf(values: Tensor) -> dict[str, list[float]]:
    """Share of values above each threshold, thinned for a figure."""
    curve = m.inverse_ecdf(values.double())
    return {"threshold": _thin(curve.thresholds), "share_above": _thin(curve.fraction)}


def _thin(values: Tensor, most: int = 400) -> list[float]:
    picked = torch.linspace(0, len(values) - 1, min(most, len(values))).round().long()
    return [float(v) for v in values[picked].tolist()]


def regression_metrics(prediction: Prediction, targets: Tensor, boot: Bootstrap) -> dict[str, Metric]:
    """Error, proper scores, and coverage and width of intervals for new targets (noise included)."""
    mean = prediction.mean.double()
    y = aligned(mean, targets, mean.shape[-1], "evaluate")
    found = {"rmse": boot(m.rmse, mean.flatten(1), y.flatten(1))}
    if prediction.kind == "custom":
        return found
    found["nll"] = boot(_mean, -prediction.log_prob(targets).double())
    found["epistemic"] = boot(_mean, prediction.epistemic.double().flatten(1).mean(1))
    for level in LEVELS:
        lower, upper = (end.double() for end in prediction.interval(level))
        inside = ((y >= lower) & (y <= upper)).double().flatten(1).mean(1)
        found[f"coverage_{level:g}"] = boot(_mean, inside)
        found[f"width_{level:g}"] = boot(_mean, (upper - lower).flatten(1).mean(1))
    if prediction.kind == "regression":
        total = prediction.total.double()
        found["crps"] = boot(m.crps_gaussian, mean.flatten(1), total.flatten(1), y.flatten(1))
        found["chi_square"] = boot(_mean, ((y - mean).square() / total).flatten(1).mean(1))
        lower, upper = prediction.interval(0.95)
        found["interval_score_0.95"] = boot(
            m.interval_score, lower.double().flatten(1), upper.double().flatten(1), y.flatten(1)
        )
        found["miscalibration_area"] = _point(m.interval_calibration(mean, total, y).area)
    return found


def regression_curves(prediction: Prediction, targets: Tensor) -> dict[str, dict[str, Sequence[float]]]:
    """Calibration of intervals and the risk when the most uncertain inputs are set aside."""
    if prediction.kind != "regression":
        return {}
    mean, total = prediction.mean.double(), prediction.total.double()
    y = aligned(mean, targets, mean.shape[-1], "evaluate")
    calibration = m.interval_calibration(mean, total, y)
    risk = m.risk_coverage(prediction.score("entropy"), (y - mean).square().flatten(1).mean(1))
    return {
        "interval_calibration": {"level": calibration.levels.tolist(), "coverage": calibration.observed.tolist()},
        "risk_coverage": {"coverage": _thin(risk.coverage), "risk": _thin(risk.risk)},
    }
