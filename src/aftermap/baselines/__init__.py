"""Baselines to compare with; each predicts as everything else here does: `predict(x) -> Prediction`."""

from aftermap.baselines.base import Baseline, Particles
from aftermap.baselines.ensemble import Ensemble
from aftermap.baselines.hmc import HMC, ChainDiagnostics
from aftermap.baselines.mc_dropout import MCDropout, dropout_modules, insert_dropout
from aftermap.baselines.mean_field import MeanField
from aftermap.baselines.swag import SWAG
from aftermap.baselines.temperature import Deterministic, TemperatureScaling

__all__ = [
    "HMC",
    "SWAG",
    "Baseline",
    "ChainDiagnostics",
    "Deterministic",
    "Ensemble",
    "MCDropout",
    "MeanField",
    "Particles",
    "TemperatureScaling",
    "dropout_modules",
    "insert_dropout",
]
