"""Laplace approximations: fit, tune, predict, check, save."""

import warnings

from aftermap.laplace.auto import FitReport, fit
from aftermap.laplace.cost import Cost, describe_costs, estimate_cost, estimate_costs
from aftermap.laplace.dimension import DimensionResult, effective_dimension, match_dimension
from aftermap.laplace.evidence import EvidenceResult
from aftermap.laplace.grid import GridResult
from aftermap.laplace.laplace import Laplace
from aftermap.laplace.marglik import EvidenceRecord, EvidenceTraining, train_by_evidence
from aftermap.laplace.mixture import Mixture, load_mixture
from aftermap.laplace.regression_rule import RegressionResult
from aftermap.laplace.saving import load, load_laplace, read_extras
from aftermap.laplace.selection import Candidate, Ranking, select
from aftermap.laplace.self_check import SelfCheck, check_predictive
from aftermap.laplace.self_consistent import CavityCheck, SelfConsistentResult
from aftermap.laplace.stationarity import (
    LinearMode,
    RefinedEvidence,
    Stationarity,
    check_stationarity,
    linear_mode,
    refined_evidence,
)
from aftermap.laplace.subnetwork import Subnetwork
from aftermap.laplace.trained import NoiseResult
from aftermap.laplace.validation import TemperatureResult, ValidationResult

__all__ = [
    "Candidate",
    "CavityCheck",
    "Cost",
    "DimensionResult",
    "EvidenceRecord",
    "EvidenceResult",
    "EvidenceTraining",
    "FitReport",
    "GridResult",
    "Laplace",
    "LinearMode",
    "Mixture",
    "NoiseResult",
    "Ranking",
    "RefinedEvidence",
    "RegressionResult",
    "SelfCheck",
    "SelfConsistentResult",
    "Stationarity",
    "Subnetwork",
    "TemperatureResult",
    "ValidationResult",
    "check_predictive",
    "check_stationarity",
    "describe_costs",
    "effective_dimension",
    "estimate_cost",
    "estimate_costs",
    "fit",
    "linear_mode",
    "load",
    "load_laplace",
    "load_mixture",
    "match_dimension",
    "read_extras",
    "refined_evidence",
    "select",
    "train_by_evidence",
]

_RENAMED = {"CheckReport": SelfCheck}


def __getattr__(name: str) -> type:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _RENAMED[name]
    warnings.warn(f"aftermap.laplace.{name} is now called {new.__name__}", DeprecationWarning, stacklevel=2)
    return new
