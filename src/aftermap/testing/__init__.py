"""Suites for people who add to the library: each checks one contract and raises AssertionError with what is wrong."""

from aftermap.testing.layer_rule import check_layer_rule
from aftermap.testing.optimizer import check_optimizer
from aftermap.testing.posterior import check_posterior
from aftermap.testing.predictor import ModelSnapshot, check_predictor, check_unchanged
from aftermap.testing.sbc import CalibrationRanks, simulation_based_calibration
from aftermap.testing.structure import check_structure

__all__ = [
    "CalibrationRanks",
    "ModelSnapshot",
    "check_layer_rule",
    "check_optimizer",
    "check_posterior",
    "check_predictor",
    "check_structure",
    "check_unchanged",
    "simulation_based_calibration",
]
