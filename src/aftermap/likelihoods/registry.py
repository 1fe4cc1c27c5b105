"""From a word or a saved configuration to a likelihood. The messages are built from the two tables below."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from aftermap.errors import InputError
from aftermap.likelihoods.base import Likelihood
from aftermap.likelihoods.discrete import Bernoulli, Categorical, Poisson
from aftermap.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian

__all__ = ["BY_NAME", "BY_TASK", "likelihood_from_config", "parse_likelihood"]

BY_TASK: dict[str, type[Likelihood]] = {
    "classification": Categorical,
    "binary": Bernoulli,
    "regression": Gaussian,
    "counts": Poisson,
}

BY_NAME: dict[str, type[Likelihood]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
    "heteroscedastic_gaussian": HeteroscedasticGaussian,
    "poisson": Poisson,
}


def parse_likelihood(spec: object) -> Likelihood:
    """Returns the likelihood that a word stands for; an object passes through unchanged.

    Args:
        spec: The word "classification", "binary", "regression" or "counts", or a :class:`Likelihood`.

    Returns:
        The likelihood as an object.

    Raises:
        InputError: The argument is anything else.

    >>> parse_likelihood("regression")
    Gaussian(noise=1.0)
    """
    if isinstance(spec, Likelihood):
        return spec
    if isinstance(spec, str) and spec in BY_TASK:
        return BY_TASK[spec]()
    words = ", ".join(f'"{task}" ({cls.__name__})' for task, cls in BY_TASK.items())
    objects = ", ".join(f"{cls.__name__}(...)" for cls in BY_NAME.values())
    hint = ""
    if isinstance(spec, type) and issubclass(spec, Likelihood):
        hint = f" You passed the class: call it, {spec.__name__}()."
    raise InputError(
        f"likelihood is {spec!r}, but must be one of {words}, or an object: {objects} "
        f"or your own subclass of Likelihood.{hint}"
    )


def likelihood_from_config(config: Mapping[str, Any]) -> Likelihood:
    """Returns the likelihood that :meth:`Likelihood.config` describes.

    Args:
        config: The mapping that ``config()`` of a built-in likelihood returned, possibly after a trip through JSON.

    Returns:
        A likelihood with the same configuration.

    Raises:
        InputError: The name is unknown (a likelihood of your own), or settings do not belong to it.

    >>> likelihood_from_config({"name": "gaussian", "noise": [0.1, 0.2]})
    Gaussian(noise=[0.1, 0.2])
    """
    settings = dict(config)
    name = settings.pop("name", None)
    if name not in BY_NAME:
        raise InputError(
            f"the saved likelihood is named {name!r}, but only {', '.join(map(repr, BY_NAME))} can be "
            "built from a configuration; for a likelihood of your own pass the object itself."
        )
    cls = BY_NAME[name]
    known = set(inspect.signature(cls).parameters)
    if unknown := settings.keys() - known:
        raise InputError(
            f"the saved likelihood {name!r} has the unknown settings {sorted(unknown)}; it knows {sorted(known)}."
        )
    return cls(**settings)
