"""Laplace approximations: fit, tune, predict, check, save."""

from aftermap.laplace.evidence import EvidenceResult
from aftermap.laplace.grid import GridResult
from aftermap.laplace.laplace import Laplace

__all__ = ["EvidenceResult", "GridResult", "Laplace"]
