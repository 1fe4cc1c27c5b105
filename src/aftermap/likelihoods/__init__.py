"""Likelihoods p(y | f): the loss, its gradient and its curvature in the outputs f of a network.

| word | class | targets |
|---|---|---|
| "classification" | Categorical | class indices [N, ...] |
| "binary" | Bernoulli | values in [0, 1], the shape of the outputs |
| "regression" | Gaussian | real numbers, the shape of the outputs |
| | HeteroscedasticGaussian | real numbers, half as many as outputs |
| "counts" | Poisson | counts, the shape of the outputs |

Your own is a subclass of Likelihood.
"""

from aftermap.likelihoods.base import Likelihood
from aftermap.likelihoods.discrete import Bernoulli, Categorical, Poisson, at_temperature, temperature_of
from aftermap.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian
from aftermap.likelihoods.registry import infer_task, likelihood_from_config, parse_likelihood

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
    "at_temperature",
    "infer_task",
    "likelihood_from_config",
    "parse_likelihood",
    "temperature_of",
]
