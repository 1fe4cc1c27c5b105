"""Suites for people who add to the library: each checks one contract and raises AssertionError with what is wrong."""

from aftermap.testing.layer_rule import check_layer_rule
from aftermap.testing.optimizer import check_optimizer
from aftermap.testing.posterior import check_posterior
from aftermap.testing.snapshot import ModelSnapshot, check_unchanged

__all__ = ["ModelSnapshot", "check_layer_rule", "check_optimizer", "check_posterior", "check_unchanged"]
