"""Metrics: pure functions of tensors, computed in float64.

Functions that judge classes take **probabilities** and check that they are; logits are never guessed.
Numbers come back as Python floats, values for each example as float64 tensors. Scores of uncertainty are
higher for the more unusual input, always.
"""

from __future__ import annotations

from aftermap.metrics.bootstrap import (
    BootstrapInterval,
    bootstrap_interval,
)
from aftermap.metrics.calibration import (
    ReliabilityBins,
    adaptive_ece,
    classwise_ece,
    ece,
    mce,
    reliability_bins,
    signed_calibration_error,
)
from aftermap.metrics.detection import (
    RocCurve,
    aupr,
    auroc,
    fpr_at_tpr,
    labelled_scores,
    roc_curve,
)
from aftermap.metrics.intervals import (
    IntervalCalibration,
    coverage,
    gaussian_interval,
    interval_calibration,
    interval_calibration_from_pit,
    interval_score,
    mean_width,
)
from aftermap.metrics.regression import (
    chi_square,
    crps_gaussian,
    crps_samples,
    gaussian_nll,
    pit,
    pit_samples,
    rmse,
    sample_nll,
)
from aftermap.metrics.scoring import (
    CovarianceDecomposition,
    EntropyDecomposition,
    InverseEcdf,
    accuracy,
    brier,
    covariance_decomposition,
    entropy,
    entropy_decomposition,
    inverse_ecdf,
    max_probability,
    misclassified,
    mutual_information,
    nll,
    pointwise_brier,
    pointwise_nll,
)
from aftermap.metrics.selective import (
    RiskCoverage,
    accuracy_at_coverage,
    aurc,
    risk_coverage,
)
from aftermap.metrics.streaming import (
    Streaming,
    StreamingAccuracy,
    StreamingAUROC,
    StreamingBrier,
    StreamingCoverage,
    StreamingECE,
    StreamingGaussianNLL,
    StreamingNLL,
    StreamingRMSE,
)

__all__ = [
    "BootstrapInterval",
    "CovarianceDecomposition",
    "EntropyDecomposition",
    "IntervalCalibration",
    "InverseEcdf",
    "ReliabilityBins",
    "RiskCoverage",
    "RocCurve",
    "Streaming",
    "StreamingAUROC",
    "StreamingAccuracy",
    "StreamingBrier",
    "StreamingCoverage",
    "StreamingECE",
    "StreamingGaussianNLL",
    "StreamingNLL",
    "StreamingRMSE",
    "accuracy",
    "accuracy_at_coverage",
    "adaptive_ece",
    "aupr",
    "aurc",
    "auroc",
    "bootstrap_interval",
    "brier",
    "chi_square",
    "classwise_ece",
    "covariance_decomposition",
    "coverage",
    "crps_gaussian",
    "crps_samples",
    "ece",
    "entropy",
    "entropy_decomposition",
    "fpr_at_tpr",
    "gaussian_interval",
    "gaussian_nll",
    "interval_calibration",
    "interval_calibration_from_pit",
    "interval_score",
    "inverse_ecdf",
    "labelled_scores",
    "max_probability",
    "mce",
    "mean_width",
    "misclassified",
    "mutual_information",
    "nll",
    "pit",
    "pit_samples",
    "pointwise_brier",
    "pointwise_nll",
    "reliability_bins",
    "risk_coverage",
    "rmse",
    "roc_curve",
    "sample_nll",
    "signed_calibration_error",
]
