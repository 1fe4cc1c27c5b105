"""Schedules of the temperature: plain numbers that are saved with the optimiser's state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from aftermap.errors import InputError

__all__ = ["Schedule", "constant", "parse_schedule", "warmup"]

_KINDS = ("linear", "cosine", "geometric")


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
