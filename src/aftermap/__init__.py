"""aftermap: Bayesian neural networks in PyTorch.

Your network found the MAP; aftermap finds out what it does not know. Inside, every loss, gradient and factor
is a sum over data of the negative log-likelihood; the number of data, the noise, the temperature and the
prior enter once, when the posterior is formed.
"""

from __future__ import annotations

__version__ = "0.1.0"

from aftermap import analysis, applications, curvature, data, likelihoods, metrics, optim
from aftermap.analysis import where
from aftermap.baselines import HMC, SWAG, Ensemble, MCDropout, MeanField, TemperatureScaling
from aftermap.evaluation import Reference, evaluate
from aftermap.hessian_free import HessianFree
from aftermap.laplace import Laplace, Mixture, Subnetwork, fit, load, select, train_by_evidence
from aftermap.posteriors import precision_from_weight_decay
from aftermap.predictive import Prediction

__all__ = [
    "HMC",
    "SWAG",
    "Ensemble",
    "HessianFree",
    "Laplace",
    "MCDropout",
    "MeanField",
    "Mixture",
    "Prediction",
    "Reference",
    "Subnetwork",
    "TemperatureScaling",
    "__version__",
    "analysis",
    "applications",
    "curvature",
    "data",
    "evaluate",
    "fit",
    "likelihoods",
    "load",
    "metrics",
    "optim",
    "precision_from_weight_decay",
    "select",
    "train_by_evidence",
    "where",
]
