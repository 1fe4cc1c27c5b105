"""Bayesian training as drop-in optimisers: VOGN, OGN, IVON, K-FAC and noisy K-FAC."""

from aftermap.models import update_bn
from aftermap.optim.ivon import IVON
from aftermap.optim.kfac import KFAC, NoisyKFAC
from aftermap.optim.options import Schedule, constant, warmup
from aftermap.optim.vogn import OGN, VOGN
from aftermap.predictive import TrainedPosterior

__all__ = [
    "IVON",
    "KFAC",
    "OGN",
    "VOGN",
    "NoisyKFAC",
    "Schedule",
    "TrainedPosterior",
    "constant",
    "update_bn",
    "warmup",
]
