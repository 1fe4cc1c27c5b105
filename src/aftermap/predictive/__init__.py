"""Predictions: the linearised and the sampling predictive, links, and the one Prediction type."""

from aftermap.models import WeightsFingerprint
from aftermap.predictive.functionals import Functional
from aftermap.predictive.linearised import (
    LatentGaussian,
    differentiable_latent,
    function_samples,
    joint_covariance,
    latent_gaussians,
)
from aftermap.predictive.links import LINKS, gaussian_prediction, samples_prediction
from aftermap.predictive.prediction import Prediction
from aftermap.predictive.predictor import PosteriorPredictor
from aftermap.predictive.sampling import draw_weights, locally_sampled_outputs, sampled_outputs
from aftermap.predictive.trained import TrainedPosterior

__all__ = [
    "LINKS",
    "Functional",
    "LatentGaussian",
    "PosteriorPredictor",
    "Prediction",
    "TrainedPosterior",
    "WeightsFingerprint",
    "differentiable_latent",
    "draw_weights",
    "function_samples",
    "gaussian_prediction",
    "joint_covariance",
    "latent_gaussians",
    "locally_sampled_outputs",
    "sampled_outputs",
    "samples_prediction",
]
