"""Hessian-free Laplace: the exact-Hessian variance of any functional from fine-tuning alone (McInerney and Kallus)."""

from aftermap.hessian_free.amortised import AmortisedScore, Probes
from aftermap.hessian_free.hessian_free import HessianFree, MapReport, VarianceReport
from aftermap.hessian_free.pushes import PushReport
from aftermap.hessian_free.settings import METHODS, Settings

__all__ = [
    "METHODS",
    "AmortisedScore",
    "HessianFree",
    "MapReport",
    "Probes",
    "PushReport",
    "Settings",
    "StepReport",
    "VarianceReport",
]

# This is the name of 0.x for one more release.
StepReport = PushReport
