"""What an optimiser was asked for, checked once, and schedules of the temperature that are saved with its state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.errors import InputError
from aftermap.likelihoods import Likelihood, parse_likelihood

__all__ = [
    "CURVATURES",
    "FORMS",
    "MOMENTA",
    "REDUCTIONS",
    "VECTORS",
    "Schedule",
    "Settings",
    "check_count",
    "check_group",
    "check_number",
    "check_word",
    "constant",
    "make_groups",
    "make_settings",
    "parse_schedule",
    "warmup",
]

_KINDS = ("linear", "cosine", "geometric")
CURVATURES = ("squares", "ggn", "reparametrised", "micro_batch")
REDUCTIONS = ("mean", "sum")
MOMENTA = ("heavy_ball", "normalised")
FORMS = ("consistent", "poster")
VECTORS = ("auto", "exact", "rademacher", "sampled")
_BATCH_NORM = ("deterministic", "variational")


@dataclass(frozen=True)
class Schedule:
    """A value that moves from ``start`` to ``stop`` in ``steps`` steps and then stays.

    With u = min(1, t / steps): linear start + u (stop − start); cosine with u replaced by (1 − cos πu)/2; geometric
    start^{1−u} stop^u.

    Args:
        start: value at step 0, above 0.
        stop: value from step ``steps`` on, above 0.
        steps: how many optimiser steps the way takes; 0 means ``stop`` from the beginning.
        kind: "linear", "cosine" or "geometric".

    Raises:
        InputError: a value that is not a finite number above 0, or an unknown kind.

    >>> schedule = Schedule(0.1, 1.0, 9)
    >>> [round(schedule(t), 2) for t in (0, 3, 9, 20)]
    [0.1, 0.4, 1.0, 1.0]
    """

    start: float
    stop: float
    steps: int
    kind: str = "linear"

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("stop", self.stop)):
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise InputError(f"the schedule's {name} is {value!r}, but must be a finite number above 0")
        if not isinstance(self.steps, int) or self.steps < 0:
            raise InputError(f"the schedule's steps={self.steps!r} must be a whole number of at least 0")
        if self.kind not in _KINDS:
            raise InputError(
                f"the schedule's kind={self.kind!r} is not known; allowed are {', '.join(map(repr, _KINDS))}"
            )

    def __call__(self, step: int) -> float:
        """The value before optimiser step ``step`` (from 0)."""
        way = 1.0 if self.steps == 0 else min(1.0, step / self.steps)
        if self.kind == "geometric":
            return math.exp((1 - way) * math.log(self.start) + way * math.log(self.stop))
        if self.kind == "cosine":
            way = (1 - math.cos(math.pi * way)) / 2
        return self.start + way * (self.stop - self.start)

    def config(self) -> dict[str, Any]:
        """Plain numbers and words."""
        return asdict(self)


def constant(value: float) -> Schedule:
    """Always the same value.

    >>> constant(0.5)(100)
    0.5
    """
    return Schedule(value, value, 0)


def warmup(steps: int, start: float = 0.1, stop: float = 1.0) -> Schedule:
    """A linear warm-up, by default of the temperature from 0.1 to 1 (Osawa et al. 2019: 30 epochs for LeNet-5).

    >>> warmup(100)(50)
    0.55
    """
    return Schedule(start, stop, steps)


def parse_schedule(value: Any, name: str) -> Schedule:
    """A number, a schedule or a saved configuration as a schedule.

    Raises:
        InputError: anything else, or a number that is not finite and above 0.
    """
    if isinstance(value, Schedule):
        return value
    if isinstance(value, Mapping):
        return Schedule(**value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InputError(
            f"{name}={value!r} must be a finite number above 0, or a schedule such as aftermap.optim.warmup(steps=1000)"
        )
    return constant(float(value))


@dataclass(frozen=True)
class Settings:
    """Everything about an optimiser that belongs to all of its parameters.

    Attributes:
        n_data: N, the number of data.
        mc_samples: K, draws of the weights per step.
        sampling: whether weights are drawn at all.
        reduction: how the closure's loss sums over its examples: mean or sum.
        temperature: τ by step.
        augmentation: ρ, how many data one augmented datum stands for.
        curvature: how h is estimated.
        likelihood: for the GGN.
        vectors: kind of vectors for the GGN.
        form: consistent (the tempered posterior), or poster.
        momentum_form: heavy_ball or normalised.
        initial_curvature: s before the first step; None: the first batch's, seen without noise.
        max_grad_norm: the mean gradient is shortened to this length.
        sample_groups: groups of processes that draw different weights.
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

    @property
    def n_effective(self) -> float:
        """ρN."""
        return self.n_data * self.augmentation


def check_word(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """Raises unless ``value`` is one of the words."""
    if not isinstance(value, str) or value not in allowed:
        raise InputError(f"{name}={value!r} is not known; allowed are {', '.join(map(repr, allowed))}")
    return value


def check_number(name: str, value: object, low: float, *, strict: bool = False, high: float = math.inf) -> float:
    """Raises unless ``value`` is a finite number in [low, high], or in (low, high] if ``strict``."""
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or value < low or (strict and value == low) or value > high:  # type: ignore[operator]
        least = f"above {low:g}" if strict else f"at least {low:g}"
        most = "" if math.isinf(high) else f" and at most {high:g}"
        raise InputError(f"{name}={value!r} must be a finite number, {least}{most}")
    return float(value)  # type: ignore[arg-type]


def check_count(name: str, value: object) -> int:
    """Raises unless ``value`` is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name}={value!r} must be a whole number of at least 1")
    return value


def check_n_data(value: object) -> float:
    """N, with a message that says why it is needed."""
    if value is None:
        raise InputError(
            "n_data is missing: the posterior's width depends on the number of training data. Pass n_data=len(train_set)"
        )
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    if not fine:
        raise InputError(f"n_data={value!r} must be the number of training data, above 0: n_data=len(train_set)")
    return float(value)  # type: ignore[arg-type]


def make_settings(
    *,
    n_data: object,
    mc_samples: object = 1,
    sampling: bool = True,
    reduction: object = "mean",
    temperature: object = 1.0,
    augmentation: object = 1.0,
    curvature: object = "squares",
    likelihood: object = None,
    vectors: str = "auto",
    form: object = "consistent",
    momentum_form: object = "heavy_ball",
    initial_curvature: object = None,
    max_grad_norm: object = None,
    sample_groups: object = 1,
) -> Settings:
    """Checks every value and makes the settings."""
    kind = check_word("curvature", curvature, CURVATURES)
    if kind == "ggn" and likelihood is None:
        raise InputError(
            "curvature='ggn' needs likelihood=, for example 'classification': the loss alone does not tell it"
        )
    if initial_curvature is not None:
        initial_curvature = check_number("initial_curvature", initial_curvature, 0.0)
    if kind == "reparametrised" and initial_curvature is None:
        raise InputError("curvature='reparametrised' needs initial_curvature=: its estimate starts from noise")
    if max_grad_norm is not None:
        max_grad_norm = check_number("max_grad_norm", max_grad_norm, 0.0, strict=True)
    return Settings(
        n_data=check_n_data(n_data),
        mc_samples=check_count("mc_samples", mc_samples),
        sampling=sampling,
        reduction=check_word("reduction", reduction, REDUCTIONS),
        temperature=parse_schedule(temperature, "temperature"),
        augmentation=check_number("augmentation", augmentation, 0.0, strict=True),
        curvature=kind,
        likelihood=None if likelihood is None else parse_likelihood(likelihood),
        vectors=check_word("vectors", vectors, VECTORS),
        form=check_word("form", form, FORMS),
        momentum_form=check_word("momentum_form", momentum_form, MOMENTA),
        initial_curvature=initial_curvature,
        max_grad_norm=max_grad_norm,
        sample_groups=check_count("sample_groups", sample_groups),
    )


def check_group(group: Mapping[str, Any]) -> None:
    """Raises unless a parameter group's own numbers are allowed."""
    check_number("lr", group["lr"], 0.0)
    check_number("momentum", group["momentum"], 0.0)
    if group["momentum"] >= 1:
        raise InputError(f"momentum={group['momentum']!r} must be below 1")
    check_number("new_curvature_weight", group["new_curvature_weight"], 0.0, strict=True, high=1.0)
    check_number("prior_precision", group["prior_precision"], 0.0)
    check_number("damping", group["damping"], 0.0)
    if not isinstance(group["prior_mean"], int | float) or not math.isfinite(group["prior_mean"]):
        raise InputError(
            f"prior_mean={group['prior_mean']!r} must be a finite number; for one value per weight use opt.set_prior(...)"
        )
    if not group["deterministic"] and group["prior_precision"] + group["damping"] <= 0:
        raise InputError(
            "prior_precision and damping are both 0: a weight without curvature would have infinite variance. "
            "Give one of them a value above 0, or make the group deterministic=True"
        )


def make_groups(model: nn.Module, params: Iterable[Any] | None, batch_norm: str) -> list[dict[str, Any]]:
    """Parameter groups: the user's own, or one for everything and one for the scales and shifts of BatchNorm.

    BatchNorm's parameters are deterministic and have no prior, as in the authors' runs; batch_norm="variational" treats
    them like all others.
    """
    check_word("batch_norm", batch_norm, _BATCH_NORM)
    if params is not None:
        given = list(params)
        if not given:
            raise InputError("params is empty: there is nothing to train")
        return given if isinstance(given[0], Mapping) else [{"params": given}]
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    special = {id(p) for m in norms for p in m.parameters(recurse=False)} if batch_norm == "deterministic" else set()
    wanted = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    if not wanted:
        raise InputError(
            f"{type(model).__name__} has no parameter that requires a gradient, so there is nothing to train"
        )
    groups: list[dict[str, Any]] = [{"params": [p for p in wanted if id(p) not in special]}]
    if special:
        own = [p for p in wanted if id(p) in special]
        groups.append({"params": own, "deterministic": True, "prior_precision": 0.0})
    return [g for g in groups if g["params"]]


def as_generator_seed(generator: torch.Generator | None) -> int:
    """A seed for the private noise: drawn from the generator, or from PyTorch's initial seed without touching it."""
    if generator is None:
        return torch.initial_seed() & (2**62 - 1)
    drawn: Tensor = torch.randint(2**62, (), generator=generator, device=generator.device)
    return int(drawn)
