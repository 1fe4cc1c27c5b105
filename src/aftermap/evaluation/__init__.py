"""Evaluation: one call for the numbers of a method, detection of unusual data, attacks, thresholds, and tables of several."""

from aftermap.evaluation.adversarial import (
    FGSM,
    PGD,
    Attack,
    AttackCurve,
    TargetedAttack,
    input_range,
    log_probability_gradient,
)
from aftermap.evaluation.corruptions import CORRUPTIONS, Corrupted, corrupt, rotate
from aftermap.evaluation.evaluate import evaluate
from aftermap.evaluation.ood import Detection, detection, detections, variance_ratio
from aftermap.evaluation.predictor import Predictor
from aftermap.evaluation.reference import Reference, default_score
from aftermap.evaluation.results import Comparison, Metric, Results, compare
from aftermap.evaluation.selective import (
    SelectiveReport,
    Threshold,
    choose_threshold,
    clopper_pearson,
    selective_report,
)

__all__ = [
    "CORRUPTIONS",
    "FGSM",
    "PGD",
    "Attack",
    "AttackCurve",
    "Comparison",
    "Corrupted",
    "Detection",
    "Metric",
    "Predictor",
    "Reference",
    "Results",
    "SelectiveReport",
    "TargetedAttack",
    "Threshold",
    "choose_threshold",
    "clopper_pearson",
    "compare",
    "corrupt",
    "default_score",
    "detection",
    "detections",
    "evaluate",
    "input_range",
    "log_probability_gradient",
    "rotate",
    "selective_report",
    "variance_ratio",
]
