"""The loop of Bayesian optimisation: fit, choose, evaluate, and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aftermap.applications.bayesian_optimisation import (
    check_bounds,
    log_expected_improvement,
    maximise,
    spread,
    thompson_sample,
    upper_confidence_bound,
)
from aftermap.errors import DataError, InputError
from aftermap.evaluation.predictor import Predictor, check_predictor_object
from aftermap.progress import progress

__all__ = ["STRATEGIES", "Optimisation", "minimise"]

STRATEGIES = ("expected_improvement", "upper_confidence_bound", "thompson", "random")
_CANDIDATES = 1000  # of Thompson sampling
_CLOSE = 1e-6  # of the box: the same point again would teach nothing

Fit = Callable[[Tensor, Tensor, "torch.Generator | None"], Predictor]


@dataclass(frozen=True)
class Optimisation:
    """What was evaluated.

    Attributes:
        x: [n, d], in order.
        y: [n].
        strategy: how the points after the initial ones were chosen.
        initial: how many of them were spread over the box first.
    """

    x: Tensor
    y: Tensor
    strategy: str
    initial: int

    @property
    def best(self) -> tuple[Tensor, float]:
        """The point with the lowest value, and that value."""
        place = int(self.y.argmin())
        return self.x[place], float(self.y[place])

    @property
    def best_so_far(self) -> Tensor:
        """The lowest value after each evaluation [n]."""
        return self.y.cummin(0).values


def minimise(
    function: Callable[[Tensor], float | Tensor],
    bounds: Any,
    fit: Fit,
    *,
    strategy: str = "expected_improvement",
    evaluations: int,
    initial: int = 5,
    beta: float = 2.0,
    generator: torch.Generator | None = None,
    show: bool | None = None,
) -> Optimisation:
    """Minimises an expensive function with as few evaluations as possible.

    Args:
        function: of a point [d]; returns a number.
        bounds: [d, 2], lower and upper ends, in the dtype of the model.
        fit: a function of (x [n, d], y [n, 1], generator) that returns a regression predictor.
        strategy: "expected_improvement" and "upper_confidence_bound" are maximised by gradients in x, "thompson" takes the lowest
            of 1,000 evenly spread points under one function drawn from the posterior; "random" is there to compare with.
        evaluations: of the function in all.
        initial: of these, how many are spread evenly over the box first.
        beta: of the upper confidence bound.
        generator: for every random choice, and handed to ``fit``.
        show: a progress bar; None: on a terminal.

    Returns:
        All evaluations.

    Raises:
        InputError: an unknown strategy, or numbers that do not fit.
        DataError: a function that returns what is no finite number.

    >>> from aftermap.laplace import Laplace
    >>> def fit(x, y, generator):
    ...     net = torch.nn.Linear(1, 1)
    ...     return Laplace(net, "regression").fit([(x, y)])
    >>> minimise(lambda x: x.sum(), [[0.0, 1.0]], fit, evaluations=6).y.shape
    torch.Size([6])
    """
    if strategy not in STRATEGIES:
        raise InputError(f"strategy={strategy!r} is not known; allowed are {', '.join(map(repr, STRATEGIES))}")
    for name, value in (("evaluations", evaluations), ("initial", initial)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
    if initial > evaluations:
        raise InputError(f"initial={initial} evaluations are more than all evaluations={evaluations}")
    box = check_bounds(bounds)
    x = spread(box, initial, generator)
    y = torch.stack([_value(function, point) for point in x])
    for _ in progress(range(evaluations - initial), description="optimising", enabled=show):
        if strategy == "random":
            point = spread(box, 1, generator)[0]
        else:
            predictor = check_predictor_object(fit(x, y[:, None], generator))
            point = _next(predictor, x, box, strategy, beta, generator)
        x, y = torch.cat([x, point[None]]), torch.cat([y, _value(function, point)[None]])
    return Optimisation(x, y, strategy, initial)


def _value(function: Callable[[Tensor], float | Tensor], point: Tensor) -> Tensor:
    value = torch.as_tensor(function(point.clone()), dtype=point.dtype, device=point.device).detach()
    if value.numel() != 1 or not bool(value.isfinite()):
        raise DataError(f"the function must return one finite number, got {value.tolist()} at {point.tolist()}")
    return value.reshape(())


def _next(
    predictor: Any, x: Tensor, box: Tensor, strategy: str, beta: float, generator: torch.Generator | None
) -> Tensor:
    if strategy == "thompson":
        candidates = spread(box, _CANDIDATES, generator)
        return candidates[int(thompson_sample(predictor, candidates, generator=generator).indices)]
    if strategy == "upper_confidence_bound":
        found = maximise(lambda p: upper_confidence_bound(p, beta), predictor, box, generator=generator)
    else:
        # Values are noisy to the model: the best it believes in, not the luckiest.
        best = float(predictor.predict(x).mean[:, 0].min())
        found = maximise(lambda p: log_expected_improvement(p, best), predictor, box, generator=generator)
    width = box[:, 1] - box[:, 0]
    if bool((((found.x - x) / width).abs().amax(1) < _CLOSE).any()):
        return spread(box, 1, generator)[0]
    return found.x
