"""Laplace approximations: fit, tune, predict, check, save."""

from aftermap.laplace.auto import FitReport, fit
from aftermap.laplace.check import CheckReport, check_predictive
from aftermap.laplace.cost import Cost, estimate_costs
from aftermap.laplace.evidence import EvidenceResult
from aftermap.laplace.grid import GridResult
from aftermap.laplace.laplace import Laplace
from aftermap.laplace.saving import load
from aftermap.laplace.subnetwork import Subnetwork

__all__ = [
    "CheckReport",
    "Cost",
    "EvidenceResult",
    "FitReport",
    "GridResult",
    "Laplace",
    "Subnetwork",
    "check_predictive",
    "estimate_costs",
    "fit",
    "load",
]
