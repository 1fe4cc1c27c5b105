"""Bayesian training as drop-in optimisers: VOGN, OGN, IVON, K-FAC and noisy K-FAC."""

from aftermap.optim.batch_norm import update_bn
from aftermap.optim.ivon import IVON
from aftermap.optim.kfac import KFAC
from aftermap.optim.noisy_kfac import NoisyKFAC
from aftermap.optim.posterior import TrainedPosterior
from aftermap.optim.schedules import Schedule, constant, warmup
from aftermap.optim.vogn import OGN, VOGN

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
