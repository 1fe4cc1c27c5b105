"""From a word or a saved configuration to a likelihood. The messages are built from the two tables below."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from aftermap.errors import InputError
from aftermap.likelihoods.base import Likelihood
from aftermap.likelihoods.discrete import Bernoulli, Categorical, Poisson
from aftermap.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian

__all__ = ["BY_NAME", "BY_TASK", "infer_task", "likelihood_from_config", "parse_likelihood"]

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
    got = repr(spec) if spec is None or isinstance(spec, str | type) else f"a {type(spec).__name__}"
    raise InputError(
        f"likelihood is {got}, but must be one of {words}, or an object: {objects} "
        f"or your own subclass of Likelihood.{hint}"
    )


def _as_argument(task: str) -> str:
    return f'likelihood="{task}"'


def infer_task(targets: object, outputs: Tensor, say: Callable[[str], str] = _as_argument) -> str:
    """Returns the task that targets and outputs show, where nobody said it.

    Whole numbers with several outputs are classes, zeros and ones with one output are binary, and other numbers are a regression.

    Args:
        targets: The targets of a batch.
        outputs: The network's outputs [N, ..., C] for it.
        say: How a user says a task, for messages.

    Raises:
        InputError: There are no targets, or they could mean several things.

    >>> import torch
    >>> infer_task(torch.tensor([0, 2, 1]), torch.zeros(3, 4)), infer_task(torch.randn(3), torch.zeros(3, 1))
    ('classification', 'regression')
    """
    if not isinstance(targets, Tensor):
        raise InputError(f"the data have no targets to tell the likelihood by; say {say('classification')} or another")
    wide = outputs.shape[-1] if outputs.dim() > 1 else 1
    shapes = f"targets of shape {list(targets.shape)} and outputs of shape {list(outputs.shape)}"
    of_two = bool(((targets == 0) | (targets == 1)).all())
    if targets.is_floating_point():
        if targets.numel() < outputs.numel() and bool((targets == targets.round()).all()) and wide > 2:
            raise InputError(
                f"the targets are whole numbers in {targets.dtype}, with {shapes}: class labels are integers (y.long()), and for "
                f"numbers there would be one target for each output. Convert them, or say {say('regression')}"
            )
        if of_two:
            raise InputError(
                f"the targets are zeros and ones in {targets.dtype}, which could be labels or numbers: say {say('binary')} (also for "
                f"several labels at once) or {say('regression')}. One-hot labels are given as class indices, y.argmax(-1)"
            )
        return "regression"
    if wide == 1:
        if of_two:
            return "binary"
        raise InputError(
            f"the targets are whole numbers and the network has one output: say {say('regression')}, {say('counts')} or {say('binary')}"
        )
    if targets.shape == outputs.shape and of_two:
        raise InputError(
            f"the targets are zeros and ones for each output, with {shapes}: one-hot labels are given as class indices, y.argmax(-1); "
            f"for several labels at once say {say('binary')}"
        )
    return "classification"


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
