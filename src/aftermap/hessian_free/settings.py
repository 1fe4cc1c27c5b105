"""The settings of a Hessian-free posterior: how it minimises, how far it pushes, and when it gives up."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from aftermap import checks
from aftermap.errors import InputError

__all__ = ["METHODS", "Settings", "choose_method"]

METHODS = ("auto", "newton_cg", "lbfgs", "sgd", "adam")
# Up to this many parameters the pairs of L-BFGS fit, and a full pass for every step is affordable.
_LBFGS_PARAMETERS = 1_000_000
# A functional is moved this far, in posterior standard deviations: the error of the variance falls with its square.
_EXACT_DEVIATION, _NOISY_DEVIATION = 0.02, 0.1


@dataclass(frozen=True)
class Settings:
    """The settings of a Hessian-free posterior.

    Attributes:
        method: The optimiser that fine-tunes. "newton_cg" and "lbfgs" minimise over all data, to a tolerance; "sgd" and "adam"
            take a fixed number of steps on batches; "auto" chooses by the number of parameters.
        step: The size λ of the push. None chooses it so that the functional moves by ``deviation``.
        deviation: How far a functional is moved, in posterior standard deviations: ε of λ = ε/√v̂. None takes 0.02 where the work
            is in float64 over all data, which costs nothing, and 0.1 where rounding or the noise of batches would drown a
            smaller move.
        symmetric: Whether the functional is pushed both ways. One push against the λ = 0 control is half the work and has an
            error of order λ instead of λ².
        curvature_limit: The largest share of |ψ₊ − ψ₋| that |ψ₊ + ψ₋ − 2ψ₀| may have. Beyond it λ is halved.
        bias_limit: The largest relative error of a variance, as estimated from the rise of the loss. Beyond it λ is made smaller.
        max_halvings: How often λ is made smaller, to half or less, before a result is flagged.
        tolerance: Where the methods on all data stop: the gradient norm relative to the push, ‖∇φ‖ / (λ‖∇ψ‖). None takes what
            the dtype can reach.
        max_steps: The most iterations of the methods on all data.
        steps: How many steps sgd and adam take.
        lr: The learning rate of sgd and adam on the mean loss. None takes it from the largest curvature (sgd), or 1e-3 (adam).
        momentum: The momentum of sgd.
        average: The share of the last steps of sgd and adam whose weights are averaged.
        history: How many pairs of steps and gradients lbfgs remembers.
        queries: How many functionals are pushed at once. None chooses by memory.
        dtype: The dtype of the work. None takes float64 for the methods on all data, and the model's for sgd and adam.
        max_decrement: The farthest that the trained weights may be from the minimum of the objective, in posterior standard
            deviations.
        strict: Whether a functional that runs away raises an error. Otherwise its variance is NaN, with a warning.
    """

    method: str = "auto"
    step: float | None = None
    deviation: float | None = None
    symmetric: bool = True
    curvature_limit: float = 0.2
    bias_limit: float = 0.01
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
        checks.choice("method", self.method, METHODS)
        if self.step is not None:
            advice = "Leave it at None to have λ chosen: with λ = 0 nothing is pushed, and the sign is taken both ways anyway"
            checks.number("step", self.step, above=0, advice=advice)
        for name in ("deviation", "lr", "tolerance"):
            value = getattr(self, name)
            if value is not None:
                checks.number(name, value, above=0, advice=f"Leave {name}=None to have it chosen")
        for name in ("curvature_limit", "bias_limit", "max_decrement"):
            checks.number(name, getattr(self, name), above=0, infinite=True)
        for name, least in (("max_halvings", 0), ("max_steps", 1), ("steps", 1), ("history", 1)):
            checks.count(name, getattr(self, name), least)
        if self.queries is not None:
            checks.count("queries", self.queries)
        checks.fraction("momentum", self.momentum, zero=True)
        checks.fraction("average", self.average, zero=True, one=True, advice="Write a quarter of the steps as 0.25")
        if self.dtype is not None and self.dtype not in (torch.float32, torch.float64):
            raise InputError(f"dtype={self.dtype!r} must be torch.float32, torch.float64 or None")

    def resolved(self, n_params: int, dtype: torch.dtype) -> Settings:
        """Returns the settings with everything chosen that was left open, for a model of this size and dtype."""
        chosen = replace(self, method=choose_method(self.method, n_params))
        work = self.dtype or (torch.float64 if chosen.on_all_data else dtype)
        exact = chosen.on_all_data and work == torch.float64
        return replace(
            chosen, dtype=work, deviation=self.deviation or (_EXACT_DEVIATION if exact else _NOISY_DEVIATION)
        )

    @property
    def wanted_deviation(self) -> float:
        """The distance that a functional is moved, in posterior standard deviations, once it is resolved."""
        assert self.deviation is not None
        return self.deviation

    @property
    def on_all_data(self) -> bool:
        """Whether the method minimises over all data, not on batches."""
        return self.method in ("newton_cg", "lbfgs")

    def relative_tolerance(self, dtype: torch.dtype) -> float:
        """Returns the tolerance, by default what the dtype can reach."""
        return self.tolerance if self.tolerance is not None else (1e-7 if dtype == torch.float64 else 1e-3)

    def members(self, n_params: int) -> int:
        """Returns how many functionals go at once: two weight vectors each, with what the optimiser remembers of them."""
        if self.queries is not None:
            return self.queries
        vectors = 2 * (2 * self.history + 8 if self.method == "lbfgs" else 8)
        return max(1, min(128, (1 << 27) // (vectors * max(1, n_params))))


def choose_method(method: str, n_params: int) -> str:
    """Returns the method that "auto" stands for.

    >>> choose_method("auto", 500), choose_method("auto", 10**8), choose_method("sgd", 500)
    ('lbfgs', 'adam', 'sgd')
    """
    if method != "auto":
        return method
    return "lbfgs" if n_params <= _LBFGS_PARAMETERS else "adam"
