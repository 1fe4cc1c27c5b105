"""What a posterior is good for: asking for labels, choosing experiments, and one small network that knows as much."""

from aftermap.applications.acquisition import (
    ACQUISITIONS,
    class_predictive_information,
    entropy,
    expected_information_gain,
    gaussian_predictive_information,
    greedy_information,
    mutual_information,
    random,
    variance,
)
from aftermap.applications.active_learning import History, JointInformation, active_learning
from aftermap.applications.bayesian_optimisation import (
    Maximum,
    Optimisation,
    ThompsonSample,
    expected_improvement,
    log_expected_improvement,
    maximise,
    minimise,
    thompson_sample,
    upper_confidence_bound,
)
from aftermap.applications.distillation import Distillation, distil, distillation_loss

__all__ = [
    "ACQUISITIONS",
    "Distillation",
    "History",
    "JointInformation",
    "Maximum",
    "Optimisation",
    "ThompsonSample",
    "active_learning",
    "class_predictive_information",
    "distil",
    "distillation_loss",
    "entropy",
    "expected_improvement",
    "expected_information_gain",
    "gaussian_predictive_information",
    "greedy_information",
    "log_expected_improvement",
    "maximise",
    "minimise",
    "mutual_information",
    "random",
    "thompson_sample",
    "upper_confidence_bound",
    "variance",
]
