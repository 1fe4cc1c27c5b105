"""Baselines to compare with: predictors, with `predict(x) -> Prediction`, and detectors of unusual inputs, with `score(x) -> Tensor`."""

from aftermap.baselines.base import Baseline, Particles
from aftermap.baselines.detectors import GEN, Detector, Energy
from aftermap.baselines.ensemble import Ensemble
from aftermap.baselines.feature_detectors import KNN, Mahalanobis, RelativeMahalanobis, ViM
from aftermap.baselines.hmc import HMC, ChainDiagnostics
from aftermap.baselines.mc_dropout import MCDropout, dropout_modules, insert_dropout
from aftermap.baselines.mean_field import MeanField
from aftermap.baselines.swag import SWAG
from aftermap.baselines.temperature import Deterministic, TemperatureScaling

__all__ = [
    "GEN",
    "HMC",
    "KNN",
    "SWAG",
    "Baseline",
    "ChainDiagnostics",
    "Detector",
    "Deterministic",
    "Energy",
    "Ensemble",
    "MCDropout",
    "Mahalanobis",
    "MeanField",
    "Particles",
    "RelativeMahalanobis",
    "TemperatureScaling",
    "ViM",
    "dropout_modules",
    "insert_dropout",
]
