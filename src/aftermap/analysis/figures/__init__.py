"""Figures: data in, Axes out; one look, colours for every eye, no global state."""

from aftermap.analysis.figures.calibration import interval_calibration, reliability
from aftermap.analysis.figures.curves import (
    ATTACK_QUANTITIES,
    attack_curves,
    decision_grid,
    decision_map,
    evidence_curve,
    observed_against_predicted,
    regression_band,
    risk_coverage,
    training_history,
)
from aftermap.analysis.figures.detection import inverse_ecdf, roc, score_histograms
from aftermap.analysis.figures.style import CATEGORIES, axes, finish, save_svg
from aftermap.analysis.figures.where import (
    class_matrix,
    filter_maps,
    layer_calibration,
    layer_shares,
    saliency_maps,
    uncertain_inputs,
    weight_histograms,
)

__all__ = [
    "ATTACK_QUANTITIES",
    "CATEGORIES",
    "attack_curves",
    "axes",
    "class_matrix",
    "decision_grid",
    "decision_map",
    "evidence_curve",
    "filter_maps",
    "finish",
    "interval_calibration",
    "inverse_ecdf",
    "layer_calibration",
    "layer_shares",
    "observed_against_predicted",
    "regression_band",
    "reliability",
    "risk_coverage",
    "roc",
    "saliency_maps",
    "save_svg",
    "score_histograms",
    "training_history",
    "uncertain_inputs",
    "weight_histograms",
]
