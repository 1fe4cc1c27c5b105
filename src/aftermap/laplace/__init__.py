"""Laplace approximations: fit, tune, predict, check, save."""

from aftermap.laplace.auto import FitReport, fit
from aftermap.laplace.check import CheckReport, check_predictive
from aftermap.laplace.cost import Cost, describe_costs, estimate_costs
from aftermap.laplace.dimension import DimensionResult, effective_dimension, match_dimension
from aftermap.laplace.evidence import EvidenceResult
from aftermap.laplace.laplace import Laplace
from aftermap.laplace.marglik import EvidenceRecord, EvidenceTraining, train_by_evidence
from aftermap.laplace.mixture import Mixture, load_mixture
from aftermap.laplace.saving import load, load_laplace, read_extras
from aftermap.laplace.selection import Candidate, Ranking, select
from aftermap.laplace.stationarity import RefinedEvidence, Stationarity, check_stationarity, refined_evidence
from aftermap.laplace.subnetwork import Subnetwork
from aftermap.laplace.tune import GridResult

__all__ = [
    "Candidate",
    "CheckReport",
    "Cost",
    "DimensionResult",
    "EvidenceRecord",
    "EvidenceResult",
    "EvidenceTraining",
    "FitReport",
    "GridResult",
    "Laplace",
    "Mixture",
    "Ranking",
    "RefinedEvidence",
    "Stationarity",
    "Subnetwork",
    "check_predictive",
    "check_stationarity",
    "describe_costs",
    "effective_dimension",
    "estimate_costs",
    "fit",
    "load",
    "load_laplace",
    "load_mixture",
    "match_dimension",
    "read_extras",
    "refined_evidence",
    "select",
    "train_by_evidence",
]
