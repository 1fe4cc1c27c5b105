"""Every number of a report: what it is called, how it is written, which way is better, and what it means."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aftermap.evaluation.results import Metric

__all__ = ["Definition", "definition", "interval", "written"]


@dataclass(frozen=True)
class Definition:
    """The definition of one kind of number.

    Attributes:
        label: The name of the number in a table.
        form: The way to write it: percent, points (a share that is a difference), nats, number or seconds.
        better: The better direction: "higher", "lower", or "" where neither is.
        meaning: The meaning in one or two sentences.
    """

    label: str
    form: str
    better: str
    meaning: str


_KNOWN = {
    "accuracy": Definition(
        "Accuracy", "percent", "higher", "Share of inputs whose most probable class is the true one."
    ),
    "nll": Definition(
        "Negative log-likelihood",
        "nats",
        "lower",
        "Mean of −log p(y | x) over the data, in nats: a proper score that punishes confident errors most.",
    ),
    "ece": Definition(
        "Calibration error (ECE)",
        "percent",
        "lower",
        "Answers are put in 15 bins of confidence, closed at 1; the mean over answers of |share right − mean confidence| of their bin. Bins make it too large on few data; the interval corrects for that and may lie below the number.",
    ),
    "adaptive_ece": Definition(
        "Calibration error, equal mass",
        "percent",
        "lower",
        "The calibration error with bins that hold equally many answers.",
    ),
    "mce": Definition(
        "Largest calibration error", "percent", "lower", "The largest |share right − mean confidence| of any bin."
    ),
    "classwise_ece": Definition(
        "Calibration error per class",
        "percent",
        "lower",
        "The calibration error of each class's probability, averaged over classes.",
    ),
    "signed_calibration_error": Definition(
        "Mean confidence − accuracy", "points", "", "Positive is overconfident, negative underconfident."
    ),
    "brier": Definition(
        "Brier score",
        "number",
        "lower",
        "Sum over classes of (p − 1)² for the true class and p² for the others, averaged: a proper score between 0 and 2.",
    ),
    "entropy": Definition(
        "Mean entropy",
        "nats",
        "",
        "Mean over inputs of −Σ p log p, summed over classes, in nats: the total uncertainty.",
    ),
    "mutual_information": Definition(
        "Mean mutual information",
        "nats",
        "",
        "Epistemic uncertainty: the entropy of the mean prediction minus the mean entropy of sampled predictions, in nats.",
    ),
    "aurc": Definition(
        "Area under risk-coverage",
        "percent",
        "lower",
        "Error rate of the answers, averaged over every share of inputs that is answered.",
    ),
    "augrc": Definition(
        "Area under generalised risk-coverage",
        "percent",
        "lower",
        "Chance that an input is answered, and wrongly, averaged over every share of inputs that is answered.",
    ),
    "epistemic_aleatoric_correlation": Definition(
        "Rank correlation of the two parts",
        "share",
        "",
        "Of epistemic and aleatoric uncertainty over inputs. Near 1 both put inputs in the same order: the parts are not told apart.",
    ),
    "auroc_errors": Definition(
        "AUROC, finding errors", "share", "higher", "Chance that a wrong answer has a higher entropy than a right one."
    ),
    "fpr95_errors": Definition(
        "FPR95, finding errors",
        "percent",
        "lower",
        "Right answers flagged when the threshold finds 95 % of the wrong ones.",
    ),
    "auroc": Definition(
        "AUROC",
        "share",
        "higher",
        "Chance that an input of the other set has a higher score than a test input; 0.5 is guessing.",
    ),
    "fpr95": Definition(
        "FPR95",
        "percent",
        "lower",
        "Share of test inputs flagged (false alarms) when the threshold finds 95 % of the other set.",
    ),
    "detected": Definition(
        "Flagged",
        "percent",
        "higher",
        "Share of the other set's inputs that the threshold flags.",
    ),
    "flagged": Definition(
        "Flagged of the test data",
        "percent",
        "",
        "Share of test inputs that the threshold flags; data like the validation data should have the promised rate of false alarms.",
    ),
    "median_ratio": Definition(
        "Ratio of median variances",
        "number",
        "",
        "Median variance of the network's outputs on the other set, divided by that on the test data.",
    ),
    "either": Definition(
        "Larger rank",
        "share",
        "",
        "Share of the validation inputs with a smaller entropy, or with a smaller mutual information, whichever is larger. It is near 1 "
        "for an input that one of the two finds unusual.",
    ),
    "aupr_out": Definition(
        "AUPR, other set", "share", "higher", "Area under the precision-recall curve with the other set as positive."
    ),
    "aupr_in": Definition(
        "AUPR, test set", "share", "higher", "Area under the precision-recall curve with the test set as positive."
    ),
    "mean_inside": Definition("Mean score, test", "number", "", "Mean score of the test inputs."),
    "mean_outside": Definition("Mean score, other set", "number", "", "Mean score of the other set's inputs."),
    "rmse": Definition(
        "Root mean squared error", "number", "lower", "√ of the mean of (y − mean)², in the units of the target."
    ),
    "epistemic": Definition(
        "Mean epistemic variance",
        "number",
        "",
        "Variance of the function itself, without the noise, averaged over inputs.",
    ),
    "crps": Definition(
        "CRPS",
        "number",
        "lower",
        "Continuous ranked probability score, in the units of the target: a proper score of the whole distribution.",
    ),
    "chi_square": Definition(
        "Mean squared standardised error",
        "number",
        "",
        "Mean of (y − mean)² / variance; 1 is calibrated, more is overconfident.",
    ),
    "miscalibration_area": Definition(
        "Miscalibration area", "share", "lower", "Area between the calibration curve of the intervals and the diagonal."
    ),
    "seconds_per_1000": Definition(
        "Time per 1,000 inputs",
        "seconds",
        "lower",
        "Wall-clock time of predicting the test data, per 1,000 inputs, on this machine.",
    ),
    "coverage": Definition("Coverage", "percent", "", "Share of inputs that are answered rather than set aside."),
    "risk": Definition(
        "Risk", "percent", "lower", "Mean loss of the answered inputs: the error rate, or the mean squared error."
    ),
    "threshold": Definition(
        "Threshold",
        "number",
        "",
        "Inputs whose score lies above it are set aside. Higher scores are always more unusual.",
    ),
    "epistemic_split": Definition(
        "Epistemic and aleatoric",
        "nats",
        "",
        "Epistemic: what the weights leave open, and more data would settle. Aleatoric: what the data leave open. They add to the total.",
    ),
}


def definition(name: str) -> Definition:
    """Returns what a metric is; `name` is as in `Results.metrics`, or the last part of a name such as "kmnist/entropy/auroc".

    >>> definition("accuracy_at_80").label, definition("coverage_0.95").better
    ('Accuracy at 80 % coverage', '')
    >>> definition("auroc_errors_knn").label
    'AUROC, finding errors by knn'
    """
    last = name.rpartition("/")[2]
    if last in _KNOWN:
        return _KNOWN[last]
    for errors in ("auroc_errors", "fpr95_errors"):
        if last.startswith(f"{errors}_"):
            known, detector = _KNOWN[errors], last.removeprefix(f"{errors}_").replace("_", " ")
            meaning = known.meaning.replace("entropy", f"score of the detector {detector}")
            return Definition(f"{known.label} by {detector}", known.form, known.better, meaning)
    head, _, level = last.rpartition("_")
    if head == "accuracy_at":
        return Definition(
            f"Accuracy at {level} % coverage",
            "percent",
            "higher",
            f"Accuracy on the {level} % of inputs with the lowest entropy, when the others are set aside.",
        )
    share = f"{100 * float(level):g} %" if level.replace(".", "").isdigit() else level
    if head == "coverage":
        return Definition(
            f"Inside the {share} interval",
            "percent",
            "",
            f"Share of targets in the central {share} interval; best at {share}.",
        )
    if head == "width":
        return Definition(
            f"Width of the {share} interval",
            "number",
            "",
            "Mean width of the interval, in the units of the target; narrow is good where the share inside holds.",
        )
    if head == "interval_score":
        return Definition(
            f"Interval score, {share}",
            "number",
            "lower",
            "Width plus a penalty for every target outside: a proper score of the interval.",
        )
    return Definition(last.replace("_", " "), "number", "", "")


def written(value: float, form: str) -> str:
    r"""Returns a number as people write it.

    >>> written(0.02018, "percent"), written(0.10112, "nats"), written(float("nan"), "number")
    ('2.0\xa0%', '0.101', '–')
    """
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if form == "percent":
        return f"{100 * value:.1f}\u00a0%"
    if form == "points":
        return f"{100 * value:+.1f}\u00a0%".replace("-", "−")
    if form == "share":
        return f"{value:.3f}"
    if form == "seconds":
        return f"{value:.2f}\u00a0s" if value >= 0.1 else f"{1000 * value:.1f}\u00a0ms"
    if form == "nats":
        text = f"{value:.3f}"
    else:
        text = (
            f"{value:,.0f}"
            if abs(value) >= 1000
            else f"{value:.3g}"
            if abs(value) >= 1 or value == 0
            else f"{value:.3f}"
        )
        if value != 0 and abs(value) < 0.001:
            text = f"{value:.1e}"
    return text.replace("-", "−")


def interval(metric: Metric, form: str) -> str:
    """Returns the confidence interval of a number, or nothing where it has none.

    A bootstrap that does not even hold the number itself has failed: calibration errors of few data are too high in every resample.
    """
    if not metric.lower <= metric.value <= metric.upper:
        return ""
    if metric.lower == metric.upper or not (math.isfinite(metric.lower) and math.isfinite(metric.upper)):
        return ""
    # The basic bootstrap of a calibration error, which cannot be negative, may cross zero.
    lower = max(0.0, metric.lower) if form == "percent" else metric.lower
    ends = [written(end, form) for end in (lower, metric.upper)]
    if ends[0] == ends[1]:
        return ""
    if form in ("percent", "points"):
        ends[0] = ends[0].removesuffix("\u00a0%")
    return ("–" if lower >= 0 else " to ").join(ends)
