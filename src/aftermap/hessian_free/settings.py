"""How a Hessian-free posterior minimises, how far it pushes, and when it gives up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from aftermap.errors import InputError

__all__ = ["METHODS", "Settings", "choose_method"]

METHODS = ("auto", "newton_cg", "lbfgs", "sgd", "adam")
# Up to so many parameters the pairs of L-BFGS fit, and a full pass for every step is affordable.
_LBFGS_PARAMETERS = 1_000_000


@dataclass(frozen=True)
class Settings:
    """Settings of a Hessian-free posterior.

    Attributes:
        method: the inner optimiser: "newton_cg" and "lbfgs" minimise over all data, to a tolerance; "sgd" and "adam" take a
            fixed number of steps on batches; "auto" chooses by size.
        step: λ, how hard the functional is pushed; None: chosen so that it moves by ``deviation`` standard deviations.
        deviation: ε of λ = ε/√v̂.
        symmetric: push both ways; False: once, against the λ = 0 control. Half the work, an error of order λ instead of λ².
        curvature_limit: |ψ₊ + ψ₋ − 2ψ₀| may be this share of |ψ₊ − ψ₋|; beyond it λ is halved.
        max_halvings: of λ, before a result is flagged.
        tolerance: of the full-data methods: gradient norm relative to the push, ‖∇φ‖ / (λ‖∇ψ‖).
        max_steps: iterations of the full-data methods.
        steps: steps of sgd and adam.
        lr: of sgd and adam on the mean loss; None: from the largest curvature (sgd), or 1e-3 (adam).
        momentum: of sgd.
        average: share of the last steps of sgd and adam whose weights are averaged.
        history: pairs that lbfgs keeps.
        queries: how many functionals are pushed at once; None: by memory.
        dtype: of the work; None: float64 for the full-data methods, the model's for sgd and adam.
        max_decrement: the most that the trained weights may be away from the minimum of the objective, in posterior
            standard deviations.
        strict: raise where a functional runs away; False: its variance is NaN, with a warning.
    """

    method: str = "auto"
    step: float | None = None
    deviation: float = 0.1
    symmetric: bool = True
    curvature_limit: float = 0.2
    max_halvings: int = 6
    tolerance: float | None = None
    max_steps: int = 2000
    steps: int = 1000
    lr: float | None = None
    momentum: float = 0.9
    average: float = 0.25
    history: int = 50
    queries: int | None = None
    dtype: torch.dtype | None = None
    max_decrement: float = 1.0
    strict: bool = True

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"method={self.method!r} is not known; allowed are {', '.join(map(repr, METHODS))}")
        if self.step is not None and not _positive(self.step):
            raise InputError(
                f"step={self.step!r} (λ) must be a positive and finite number, or None to choose it: with λ = 0 nothing is "
                "pushed, and the sign is taken both ways anyway"
            )
        for name in ("deviation", "curvature_limit", "max_decrement"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise InputError(f"{name}={value!r} must be a positive number")
        for name in ("lr", "tolerance"):
            value = getattr(self, name)
            if value is not None and not _positive(value):
                raise InputError(f"{name}={value!r} must be a positive and finite number, or None")
        for name, least in (("max_halvings", 0), ("max_steps", 1), ("steps", 1), ("history", 1)):
            _check_count(name, getattr(self, name), least)
        if self.queries is not None:
            _check_count("queries", self.queries, 1)
        if not 0 <= self.momentum < 1 or not 0 <= self.average <= 1:
            raise InputError(
                f"momentum={self.momentum!r} must be in [0, 1) and average={self.average!r} in [0, 1], as shares"
            )
        if self.dtype is not None and self.dtype not in (torch.float32, torch.float64):
            raise InputError(f"dtype={self.dtype!r} must be torch.float32, torch.float64 or None")

    @property
    def on_all_data(self) -> bool:
        """Whether the method minimises over all data, not on batches."""
        return self.method in ("newton_cg", "lbfgs")

    def relative_tolerance(self, dtype: torch.dtype) -> float:
        """The tolerance, by default what the dtype can reach."""
        return self.tolerance if self.tolerance is not None else (1e-7 if dtype == torch.float64 else 1e-3)

    def members(self, n_params: int) -> int:
        """How many functionals go at once: two weight vectors each, with what the optimiser remembers of them."""
        if self.queries is not None:
            return self.queries
        vectors = 2 * (2 * self.history + 8 if self.method == "lbfgs" else 8)
        return max(1, min(128, (1 << 27) // (vectors * max(1, n_params))))


def choose_method(method: str, n_params: int) -> str:
    """The method that "auto" stands for.

    >>> choose_method("auto", 500), choose_method("auto", 10**8), choose_method("sgd", 500)
    ('lbfgs', 'adam', 'sgd')
    """
    if method != "auto":
        return method
    return "lbfgs" if n_params <= _LBFGS_PARAMETERS else "adam"


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}")
