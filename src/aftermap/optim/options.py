"""The options of the optimisers: one table that says of each whether groups may differ in it, its default and its check.

Schedules of the temperature, which are saved with an optimiser's state, stand here too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from aftermap import checks
from aftermap.errors import InputError
from aftermap.likelihoods import Likelihood, parse_likelihood
from aftermap.params import check_not_complex

__all__ = [
    "OPTIONS",
    "Option",
    "Schedule",
    "Settings",
    "check_group",
    "constant",
    "constructor_options",
    "parameter_groups",
    "parse_schedule",
    "precision_of_decay",
    "read_options",
    "warmup",
    "without_decay",
]


@dataclass(frozen=True)
class Schedule:
    """A value that moves from ``start`` to ``stop`` in ``steps`` steps and then stays there.

    With u = min(1, t / steps): linear start + u (stop − start); cosine with u replaced by (1 − cos πu)/2; geometric
    start^{1−u} stop^u.

    Args:
        start: The value at step 0, above 0.
        stop: The value from step ``steps`` on, above 0.
        steps: The number of optimiser steps from one to the other; 0 means ``stop`` from the beginning.
        kind: The form of the path: "linear", "cosine" or "geometric".

    Raises:
        InputError: A value is not a finite number above 0, or the kind is unknown.

    >>> schedule = Schedule(0.1, 1.0, 9)
    >>> [round(schedule(t), 2) for t in (0, 3, 9, 20)]
    [0.1, 0.4, 1.0, 1.0]
    """

    start: float
    stop: float
    steps: int
    kind: str = "linear"

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "start": checks.number("the schedule's start", self.start, above=0),
            "stop": checks.number("the schedule's stop", self.stop, above=0),
            "steps": checks.count("the schedule's steps", self.steps, 0, advice="Pass the number of optimiser steps"),
        }
        for name, value in checked.items():  # plain numbers, which are saved with the optimiser's state
            object.__setattr__(self, name, value)
        checks.choice("the schedule's kind", self.kind, ("linear", "cosine", "geometric"))

    def __call__(self, step: int) -> float:
        """Returns the value before optimiser step ``step`` (from 0)."""
        share = 1.0 if self.steps == 0 else min(1.0, step / self.steps)
        if self.kind == "geometric":
            return math.exp((1 - share) * math.log(self.start) + share * math.log(self.stop))
        if self.kind == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return self.start + share * (self.stop - self.start)

    def config(self) -> dict[str, Any]:
        """Returns the schedule as plain numbers and words, which `parse_schedule` reads."""
        return asdict(self)


def constant(value: float) -> Schedule:
    """Returns a schedule that always has the same value.

    >>> constant(0.5)(100)
    0.5
    """
    return Schedule(value, value, 0)


def warmup(steps: int, start: float = 0.1, stop: float = 1.0) -> Schedule:
    """Returns a linear warm-up, by default of the temperature from 0.1 to 1 (Osawa et al. 2019: 30 epochs for LeNet-5).

    >>> warmup(100)(50)
    0.55
    """
    return Schedule(start, stop, steps)


def parse_schedule(value: Any, name: str) -> Schedule:
    """Turns a number, a schedule or a saved configuration into a schedule.

    Raises:
        InputError: It is anything else, or a number that is not finite and above 0.
    """
    if isinstance(value, Schedule):
        return value
    if isinstance(value, Mapping):
        return Schedule(**value)
    advice = "Pass a number, or a schedule such as aftermap.optim.warmup(steps=1000)"
    return constant(checks.number(name, value, above=0, advice=advice))


@dataclass(frozen=True)
class Settings:
    """The options of an optimiser in which its groups of parameters do not differ.

    Attributes:
        n_data: N, the number of training data.
        mc_samples: K, the number of draws of the weights in a step.
        sampling: Whether weights are drawn at all.
        reduction: How the closure's loss sums over its examples: "mean" or "sum".
        temperature: τ by step.
        augmentation: ρ, the number of data that one augmented datum stands for.
        curvature: The estimate of the curvature h.
        likelihood: The likelihood, which the GGN needs.
        vectors: The kind of vectors that the GGN is estimated with.
        form: "consistent" (the tempered posterior) or "published".
        momentum_form: "heavy_ball" or "normalised".
        initial_curvature: The curvature s before the first step; None means that of the first batch, which is then seen
            without noise.
        max_grad_norm: The greatest length of the mean gradient.
        sample_groups: The number of groups of processes that draw different weights.
        batch_norm: How the parameters of BatchNorm are treated: "deterministic" or "variational".
        clip_radius: IVON: entries of the preconditioned step are cut to ± this.
        rescale_lr: IVON: whether α is multiplied by h₀ + c.
        damping_form: K-FAC: "exact" or "pi".
        factor_every: K-FAC: the number of steps between refreshes of the factors.
        inverse_every: K-FAC: the number of steps between eigendecompositions.
    """

    n_data: float
    mc_samples: int
    sampling: bool
    reduction: str
    temperature: Schedule
    augmentation: float
    curvature: str
    likelihood: Likelihood | None
    vectors: str
    form: str
    momentum_form: str
    initial_curvature: float | None
    max_grad_norm: float | None
    sample_groups: int
    batch_norm: str
    clip_radius: float
    rescale_lr: bool
    damping_form: str
    factor_every: int
    inverse_every: int

    @property
    def n_effective(self) -> float:
        """The effective number of data ρN."""
        return self.n_data * self.augmentation


# What an option's check gets: its name and its value. It returns the value as it is used, or raises InputError.
Check = Callable[[str, Any], Any]


def _number(**bounds: Any) -> Check:
    """Makes the check of a number within the bounds of `aftermap.checks.number`."""
    return lambda name, value: checks.number(name, value, **bounds)


def _word(*allowed: str, renamed: Mapping[str, str] | None = None, accepted: Mapping[str, str] | None = None) -> Check:
    """Makes the check of one of some words. One that was ``renamed`` is taken with a warning, one that is also ``accepted`` without."""

    def check(name: str, value: Any) -> str:
        if renamed and isinstance(value, str) and value in renamed:
            warnings.warn(
                f"{name}={value!r} is now called {renamed[value]!r}; the old word will go with the next release",
                DeprecationWarning,
                stacklevel=5,
            )
            return renamed[value]
        if accepted and isinstance(value, str) and value in accepted:
            return accepted[value]
        return checks.choice(name, value, allowed)

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name}={value!r} must be True or False")
    return value


def _optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _n_data(name: str, value: Any) -> float:
    value = getattr(value, "dataset", value)  # of a DataLoader, whose own length counts batches
    if isinstance(value, Sized) and not (isinstance(value, str | bytes | Tensor) and not getattr(value, "ndim", 0)):
        value = len(value)
    if value is None:
        raise InputError(
            "n_data is missing: the posterior's width depends on the number of training data. Pass n_data=len(train_set)"
        )
    return checks.number(
        name, value, above=0, advice="It is the number of training data, not of batches: pass n_data=len(train_set)"
    )


@dataclass(frozen=True)
class Option:
    """One option of the optimisers.

    Attributes:
        per_group: Whether groups of parameters may differ in it (it then stands in ``param_groups``), or all share it (it then
            stands in `Settings`).
        default: The value of an optimiser that does not give one.
        check: Returns the value as it is used; raises InputError where it is not allowed.
    """

    per_group: bool
    default: Any
    check: Check


OPTIONS: dict[str, Option] = {
    "lr": Option(True, 1e-3, _number(least=0.0)),
    "momentum": Option(True, 0.9, _number(least=0.0, below=1.0)),
    "new_curvature_weight": Option(True, 0.05, _number(above=0.0, most=1.0)),
    "prior_precision": Option(True, 1.0, _number(least=0.0)),
    "prior_mean": Option(True, 0.0, _number(advice="For one value per weight use opt.set_prior(...)")),
    "damping": Option(True, 1e-2, _number(least=0.0)),
    "deterministic": Option(True, False, _flag),
    "n_data": Option(False, None, _n_data),
    "mc_samples": Option(False, 1, checks.count),
    "sampling": Option(False, True, _flag),
    "reduction": Option(False, "mean", _word("mean", "sum")),
    "temperature": Option(False, 1.0, lambda name, value: parse_schedule(value, name)),
    "augmentation": Option(False, 1.0, _number(above=0.0)),
    "curvature": Option(False, "squares", _word("squares", "ggn", "reparametrised", "micro_batch")),
    "likelihood": Option(False, None, _optional(lambda name, value: parse_likelihood(value))),
    "vectors": Option(False, "auto", _word("auto", "exact", "rademacher", "sampled")),
    "form": Option(False, "consistent", _word("consistent", "published", renamed={"poster": "published"})),
    "momentum_form": Option(False, "heavy_ball", _word("heavy_ball", "normalised")),
    "initial_curvature": Option(False, None, _optional(_number(least=0.0))),
    "max_grad_norm": Option(False, None, _optional(_number(above=0.0))),
    "sample_groups": Option(False, 1, checks.count),
    "batch_norm": Option(False, "deterministic", _word("deterministic", "variational")),
    "clip_radius": Option(False, math.inf, _number(above=0.0, infinite=True)),
    "rescale_lr": Option(False, True, _flag),
    "damping_form": Option(False, "exact", _word("exact", "pi", accepted={"factored": "pi"})),
    "factor_every": Option(False, 1, checks.count),
    "inverse_every": Option(False, 10, checks.count),
}


def constructor_options(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options among the local variables of a constructor ``(self, model, …, params, …, generator)``."""
    others = ("self", "__class__", "model", "params", "generator")
    return {name: value for name, value in variables.items() if name not in others}


def read_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], Settings]:
    """Splits options into the defaults of parameter groups, which `check_group` judges, and the checked settings.

    Raises:
        InputError: An option is unknown, a value is not allowed, or two of them do not fit together.
    """
    options = dict(options)
    decay = options.pop("weight_decay", None)
    checks.keywords("an optimiser", options, list(OPTIONS))
    defaults: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        value = options.get(name, option.default)
        if option.per_group:
            defaults[name] = value
        else:
            shared[name] = option.check(name, value)
    settings = Settings(**shared)
    if decay is not None:
        precision = options.get("prior_precision", OPTIONS["prior_precision"].default)
        if precision != OPTIONS["prior_precision"].default:
            raise InputError(
                f"weight_decay={decay!r} and prior_precision={precision!r} say the same thing: a decay of λ is a prior precision of λN, "
                f"here {decay * settings.n_effective:g}. Give one of them"
            )
        defaults["prior_precision"] = precision_of_decay(decay, settings)
    if settings.curvature == "ggn" and settings.likelihood is None:
        raise InputError(
            "curvature='ggn' needs likelihood=, for example 'classification': the loss alone does not tell it"
        )
    if settings.curvature == "reparametrised" and not settings.sampling:
        raise InputError(
            "OGN draws no weights, so curvature='reparametrised' has nothing to work with; use VOGN or IVON"
        )
    if settings.curvature == "reparametrised" and settings.initial_curvature is None:
        raise InputError("curvature='reparametrised' needs initial_curvature=: its estimate starts from noise")
    return defaults, settings


def precision_of_decay(decay: Any, settings: Settings) -> float:
    """Returns the prior precision δ = λN that pulls as a weight decay of λ does on the mean loss of N data."""
    advice = "A weight decay of λ on a mean loss is a prior precision of λN"
    return checks.number("weight_decay", decay, least=0.0, advice=advice) * settings.n_effective


def without_decay(group: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Returns a group of parameters in which a weight decay has become a prior precision.

    Raises:
        InputError: The group has both.
    """
    if "weight_decay" not in group:
        return group
    if "prior_precision" in group:
        raise InputError(
            "a group of parameters has weight_decay and prior_precision, which say the same thing; give one of them"
        )
    others = {name: value for name, value in group.items() if name != "weight_decay"}
    return {**others, "prior_precision": precision_of_decay(group["weight_decay"], settings)}


def check_group(group: dict[str, Any]) -> None:
    """Puts every option of a parameter group into the form in which it is used; raises InputError where it is not allowed."""
    for name, option in OPTIONS.items():
        if option.per_group:
            group[name] = option.check(name, group[name])
    if not group["deterministic"] and group["prior_precision"] + group["damping"] <= 0:
        raise InputError(
            "prior_precision and damping are both 0: a weight without curvature would have infinite variance. "
            "Give one of them a value above 0, or make the group deterministic=True"
        )


def parameter_groups(model: nn.Module | None, params: Iterable[Any] | None, batch_norm: str) -> list[dict[str, Any]]:
    """Returns the user's own groups of parameters, or one for everything and one for the scales and shifts of BatchNorm.

    BatchNorm's parameters are deterministic and have no prior, as in the runs of Osawa et al. 2019;
    batch_norm="variational" treats them like all others.
    """
    if params is not None or model is None:
        listed = list(params or [])
        if not listed:
            raise InputError("params is empty: there is nothing to train")
        return listed if isinstance(listed[0], Mapping) else [{"params": listed}]
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    special = {id(p) for m in norms for p in m.parameters(recurse=False)} if batch_norm == "deterministic" else set()
    check_not_complex(dict(model.named_parameters()))
    trainable = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    if not trainable:
        raise InputError(
            f"{type(model).__name__} has no parameter that requires a gradient, so there is nothing to train"
        )
    groups: list[dict[str, Any]] = [{"params": [p for p in trainable if id(p) not in special]}]
    if special:
        of_norms: list[Tensor] = [p for p in trainable if id(p) in special]
        groups.append({"params": of_norms, "deterministic": True, "prior_precision": 0.0})
    return [g for g in groups if g["params"]]
