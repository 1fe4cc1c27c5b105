"""aftermap: Bayesian neural networks in PyTorch.

Your network found the MAP; aftermap finds out what it does not know. Inside, every loss, gradient and factor
is a sum over data of the negative log-likelihood; the number of data, the noise, the temperature and the
prior enter once, when the posterior is formed.

Names are imported when they are first used, so that the command line can answer before PyTorch is loaded.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from aftermap import analysis, applications, curvature, data, likelihoods, metrics, optim
    from aftermap.analysis.where import where
    from aftermap.baselines import HMC, SWAG, Ensemble, MCDropout, MeanField, TemperatureScaling
    from aftermap.evaluation import Reference
    from aftermap.evaluation.evaluate import evaluate
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

# Where each name lives: the imports above, for Python. A test compares the two.
_HOMES = {
    "HMC": "baselines",
    "SWAG": "baselines",
    "Ensemble": "baselines",
    "HessianFree": "hessian_free",
    "Laplace": "laplace",
    "MCDropout": "baselines",
    "MeanField": "baselines",
    "Mixture": "laplace",
    "Prediction": "predictive",
    "Reference": "evaluation",
    "Subnetwork": "laplace",
    "TemperatureScaling": "baselines",
    "evaluate": "evaluation",
    "fit": "laplace",
    "load": "laplace",
    "precision_from_weight_decay": "posteriors",
    "select": "laplace",
    "train_by_evidence": "laplace",
    "where": "analysis",
}


def __getattr__(name: str) -> Any:
    """Imports a public name, or a module of the package, when it is asked for (PEP 562)."""
    if name in _HOMES:
        value = getattr(import_module(f"aftermap.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and find_spec(f"aftermap.{name}") is not None:
        return import_module(f"aftermap.{name}")
    raise AttributeError(f"module 'aftermap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
