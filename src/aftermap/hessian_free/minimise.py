"""Minimisers of many functions at once, each with its own path: L-BFGS and Newton-CG with a Wolfe line search.

Members never influence each other: what one does is what it would do alone. Those that are done stand still and cost nothing.

Index legend: m members, p parameters.

The fine-tuners minimise pushed objectives: to the minimum over all data, or by a fixed number of steps on common batches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from aftermap.batches import Batch, Unpack, iterate
from aftermap.errors import DataError
from aftermap.hessian_free.objective import Evaluation, Objective, Push
from aftermap.hessian_free.settings import Settings
from aftermap.models import evaluating

__all__ = [
    "BatchFineTuner",
    "FineTuned",
    "FineTuner",
    "FullDataFineTuner",
    "Minimum",
    "Point",
    "largest_curvature",
    "lbfgs",
    "newton_cg",
]

# These are Armijo's and Wolfe's constants; the second is loose, as quasi-Newton steps want it.
_DECREASE, _CURVATURE = 1e-4, 0.9
_TRIALS = 30


class Point(Protocol):
    """A value and its gradient, for each of several members."""

    @property
    def value(self) -> Tensor:
        """The objectives φ of the members [m]."""

    @property
    def gradient(self) -> Tensor:
        """The gradients of the members [m, P]."""


Evaluate = Callable[[Tensor, Tensor], Point]  # From (weights [k, P], which members [k]) to their values.


@dataclass(frozen=True)
class Minimum:
    """The points where the members ended.

    Attributes:
        theta: The weights of the members [m, P].
        value: The value of φ of each member [m].
        gradient: The gradient of φ of each member [m, P].
        steps: The number of steps of each member [m].
        converged: Whether the norm of each gradient is below the goal [m].
        negative: Whether a direction of negative curvature was met [m] (Newton-CG only).
    """

    theta: Tensor
    value: Tensor
    gradient: Tensor
    steps: Tensor
    converged: Tensor
    negative: Tensor


@dataclass
class _State:
    """The state of the members on their way."""

    theta: Tensor
    value: Tensor
    gradient: Tensor
    steps: Tensor
    stuck: Tensor
    negative: Tensor

    @staticmethod
    def at(evaluate: Evaluate, start: Tensor) -> _State:
        every = torch.arange(len(start), device=start.device)
        point = evaluate(start, every)
        none = torch.zeros_like(every, dtype=torch.bool)
        return _State(start.clone(), point.value, point.gradient, torch.zeros_like(every), none, none.clone())

    def active(self, goal: Tensor) -> Tensor:
        going = (self.gradient.norm(dim=1) > goal) & ~self.stuck & self.value.isfinite()
        return torch.nonzero(going)[:, 0]

    def end(self, goal: Tensor) -> Minimum:
        norm = self.gradient.norm(dim=1)
        return Minimum(self.theta, self.value, self.gradient, self.steps, norm <= goal, self.negative)


def lbfgs(evaluate: Evaluate, start: Tensor, goal: Tensor, *, max_steps: int, history: int) -> Minimum:
    """Minimises every member by limited-memory BFGS (Liu and Nocedal 1989).

    Args:
        evaluate: A function of weights [k, P] and members [k] that returns their values and gradients.
        start: The weights that the members start from [m, P].
        goal: The gradient norm at which each member is done [m].
        max_steps: The greatest number of steps of one member.
        history: The number of pairs that are kept.

    >>> from types import SimpleNamespace
    >>> bowl = lambda t, _: SimpleNamespace(value=((t - 3) ** 2).sum(1), gradient=2 * (t - 3))
    >>> lbfgs(bowl, torch.zeros(1, 2), torch.tensor([1e-6]), max_steps=9, history=2).theta
    tensor([[3., 3.]])
    """
    state = _State.at(evaluate, start)
    moves = start.new_zeros(history, *start.shape)
    changes = torch.zeros_like(moves)
    rho = start.new_zeros(history, len(start))  # A 0 means that there is no pair.
    gamma = start.new_zeros(len(start))  # A 0 means that there is no pair yet.
    for step in range(max_steps):
        index = state.active(goal)
        if not len(index):
            break
        order = [(step - 1 - k) % history for k in range(min(step, history))]
        direction = -_two_loops(
            state.gradient[index], [(moves[k, index], changes[k, index], rho[k, index]) for k in order], gamma[index]
        )
        before, slope = state.theta[index], state.gradient[index]
        first = gamma[index] == 0
        # Without a pair the scale is unknown, so it begins with a move of length one at most.
        length = torch.where(first, (1 / slope.norm(dim=1)).clamp_max(1.0), torch.ones_like(gamma[index]))
        _search(evaluate, state, index, direction, length)
        move, change = state.theta[index] - before, state.gradient[index] - slope
        along = (move * change).sum(1)
        good = along > 1e-12 * move.norm(dim=1) * change.norm(dim=1)
        here = step % history
        moves[here, index], changes[here, index] = move, change
        rho[here] = 0.0
        rho[here, index] = torch.where(good, 1 / torch.where(good, along, 1.0), 0.0)
        gamma[index] = torch.where(good, along / change.square().sum(1).clamp_min(1e-300), gamma[index])
    return state.end(goal)


def _two_loops(gradient: Tensor, pairs: list[tuple[Tensor, Tensor, Tensor]], gamma: Tensor) -> Tensor:
    """Returns the inverse Hessian that the pairs (newest first) stand for, times the gradient."""
    q, alphas = gradient.clone(), []
    for move, change, rho in pairs:
        alpha = rho * (move * q).sum(1)
        q = q - alpha[:, None] * change
        alphas.append(alpha)
    q = torch.where(gamma > 0, gamma, 1.0)[:, None] * q
    for (move, change, rho), alpha in zip(reversed(pairs), reversed(alphas), strict=True):
        beta = rho * (change * q).sum(1)
        q = q + (alpha - beta)[:, None] * move
    return q


def newton_cg(
    evaluate: Evaluate,
    product: Callable[[Tensor, Tensor, Tensor], Tensor],
    start: Tensor,
    goal: Tensor,
    *,
    max_steps: int,
) -> Minimum:
    """Minimises every member by Newton's method with truncated conjugate gradients (Nocedal and Wright 2006, algorithm 7.1).

    Args:
        evaluate: A function of weights [k, P] and members [k] that returns their values and gradients.
        product: A function of weights [k, P], vectors [k, P] and members [k] that returns the Hessian times the vectors
            [k, P].
        start: The weights that the members start from [m, P].
        goal: The gradient norm at which each member is done [m].
        max_steps: The greatest number of Newton steps.
    """
    state = _State.at(evaluate, start)
    for _ in range(max_steps):
        index = state.active(goal)
        if not len(index):
            break
        gradient = state.gradient[index]
        norm = gradient.norm(dim=1)
        # This never solves further than the goal asks for: the last step is as cheap as it can be.
        wanted = torch.maximum(0.3 * goal[index], norm * torch.minimum(norm.sqrt(), torch.full_like(norm, 0.1)))
        theta = state.theta[index]
        direction, negative = _solve(
            lambda v, some, theta=theta, index=index: product(theta[some], v, index[some]),  # type: ignore[misc]
            gradient,
            wanted,
        )
        state.negative[index] |= negative
        _search(evaluate, state, index, direction, torch.ones_like(norm))
    return state.end(goal)


def _solve(product: Callable[[Tensor, Tensor], Tensor], gradient: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a direction of descent −H⁻¹g up to a residual, and where negative curvature was met."""
    x, r = torch.zeros_like(gradient), gradient.clone()  # r is the residual of H x = −g, negated.
    p, rr = -r, r.square().sum(1)
    negative = torch.zeros(len(gradient), dtype=torch.bool, device=gradient.device)
    going = rr.sqrt() > wanted
    for iteration in range(2 * gradient.shape[1] + 10):
        some = torch.nonzero(going)[:, 0]
        if not len(some):
            break
        Hp = product(p[some], some)
        curvature = (p[some] * Hp).sum(1)
        bad = ~(curvature > 0)
        negative[some[bad]], going[some[bad]] = True, False
        if iteration == 0:
            x[some[bad]] = p[some[bad]]
        ok, Hp, curvature = some[~bad], Hp[~bad], curvature[~bad]
        alpha = rr[ok] / curvature
        x[ok] = x[ok] + alpha[:, None] * p[ok]
        r[ok] = r[ok] + alpha[:, None] * Hp
        new = r[ok].square().sum(1)
        p[ok] = -r[ok] + (new / rr[ok])[:, None] * p[ok]
        rr[ok] = new
        going[ok] = new.sqrt() > wanted[ok]
    return x, negative


def _search(evaluate: Evaluate, state: _State, index: Tensor, direction: Tensor, length: Tensor) -> None:
    """Moves the members ``index`` along their directions to points that fulfil the weak Wolfe conditions.

    Near the minimum, where values differ by rounding only, the slopes decide instead (Hager and Zhang 2005, eq. 4.1).
    A member that finds no such point keeps its best one; if none is better, it is stuck.
    """
    theta, value, gradient = state.theta[index], state.value[index], state.gradient[index]
    slope = (direction * gradient).sum(1)
    downhill = slope < 0
    state.stuck[index[~downhill]] = True
    rounding = 20 * torch.finfo(value.dtype).eps * (1 + value.abs())
    low, high = torch.zeros_like(length), torch.full_like(length, float("inf"))
    low_slope, high_slope = slope.clone(), torch.full_like(slope, float("nan"))
    t, left = length.clone(), downhill.clone()
    for _ in range(_TRIALS):
        some = torch.nonzero(left)[:, 0]
        if not len(some):
            break
        trial = theta[some] + t[some, None] * direction[some]
        point = evaluate(trial, index[some])
        new, grown = point.value, (direction[some] * point.gradient).sum(1)
        falls = new <= value[some] + _DECREASE * t[some] * slope[some]
        level = (new <= value[some] + rounding[some]) & (grown <= (2 * _DECREASE - 1) * slope[some])
        falls = (falls | level) & new.isfinite() & point.gradient.isfinite().all(1)
        flat = grown >= _CURVATURE * slope[some]
        falling = some[falls]  # A fall is always taken, also where the slope asks for more.
        state.theta[index[falling]] = trial[falls]
        state.value[index[falling]], state.gradient[index[falling]] = new[falls], point.gradient[falls]
        low[falling], low_slope[falling] = t[falling], grown[falls]
        over = some[~falls]
        high[over], high_slope[over] = t[over], grown[~falls]
        left[some[falls & flat]] = False
        t = _next(t, low, high, low_slope, high_slope)
    state.stuck[index[low == 0]] = True
    state.steps[index] += 1


def _next(t: Tensor, low: Tensor, high: Tensor, low_slope: Tensor, high_slope: Tensor) -> Tensor:
    """Returns where the slope should vanish between the ends, kept away from both, or farther out where there is no upper end."""
    width = torch.where(high.isfinite(), high - low, 1.0)
    share = low_slope / (low_slope - high_slope)
    share = torch.where(share.isfinite() & (high_slope > 0), share.clamp(0.1, 0.9), torch.full_like(share, 0.5))
    return torch.where(high.isfinite(), low + share * width, 2 * torch.where(low > 0, low, t))


@dataclass(frozen=True)
class FineTuned:
    """The points where fine-tuning ended.

    Attributes:
        theta: The weights of the members [m, P].
        loss: The objective L of each member, without the push [m].
        gradient: The gradient of the pushed objective over all data [m, P].
        steps: The number of steps of each member [m].
        converged: Whether each member reached its goal [m]; True for methods with a fixed number of steps.
        control: The weights after the λ = 0 run [P].
        control_loss: The objective L of the λ = 0 run, 0-d.
        control_gradient: The gradient of L after the λ = 0 run [P].
    """

    theta: Tensor
    loss: Tensor
    gradient: Tensor
    steps: Tensor
    converged: Tensor
    control: Tensor
    control_loss: Tensor
    control_gradient: Tensor


class FineTuner(ABC):
    """Fine-tunes members from given starts."""

    @abstractmethod
    def control(self, start: Tensor, goal: float) -> tuple[FineTuned, Evaluation]:
        """Returns the λ = 0 run from weights [P] as the result of one member, and what was at the start."""

    @abstractmethod
    def run(self, start: Tensor, push: Push, goal: Tensor) -> FineTuned:
        """Fine-tunes members [m, P] under their pushes; with both signs, members k and k + m/2 are a pair."""


class FullDataFineTuner(FineTuner):
    """Minimises over all data, which the objective keeps.

    Args:
        objective: The objective, with its data read.
        settings: The settings, with method "lbfgs" or "newton_cg".
    """

    def __init__(self, objective: Objective, settings: Settings):
        self.objective, self.settings = objective, settings
        self._control: tuple[Tensor, Tensor, Tensor] | None = None

    def _minimise(self, start: Tensor, push: Push | None, goal: Tensor) -> Minimum:
        objective, settings = self.objective, self.settings

        def evaluate(theta: Tensor, index: Tensor) -> Evaluation:
            return objective.evaluate(theta, None if push is None else push.of(index))

        def product(theta: Tensor, vectors: Tensor, index: Tensor) -> Tensor:
            return objective.hessian_products(theta, vectors, None if push is None else push.of(index))

        with evaluating(objective.model):
            if settings.method == "newton_cg":
                return newton_cg(evaluate, product, start, goal, max_steps=settings.max_steps)
            return lbfgs(evaluate, start, goal, max_steps=settings.max_steps, history=settings.history)

    def control(self, start: Tensor, goal: float) -> tuple[FineTuned, Evaluation]:
        with evaluating(self.objective.model):
            before = self.objective.evaluate(start[None])
        minimum = self._minimise(start[None], None, torch.full_like(before.loss, goal))
        self._control = minimum.theta[0], minimum.value[0], minimum.gradient[0]
        fine_tuned = FineTuned(
            minimum.theta, minimum.value, minimum.gradient, minimum.steps, minimum.converged, *self._control
        )
        return fine_tuned, before

    def run(self, start: Tensor, push: Push, goal: Tensor) -> FineTuned:
        assert self._control is not None  # The fit made it.
        minimum = self._minimise(start, push, goal)
        loss = self.objective.losses(minimum.theta, self.objective.batches)
        return FineTuned(minimum.theta, loss, minimum.gradient, minimum.steps, minimum.converged, *self._control)


class BatchFineTuner(FineTuner):
    """Takes a fixed number of steps of SGD or Adam; every member sees the same batches, and so does the λ = 0 control.

    Args:
        objective: The objective, with its data counted.
        data: Batches that can be gone through again and again.
        settings: The settings, with method "sgd" or "adam".
        unpack: A function that turns a batch of another form into (inputs, targets).
    """

    def __init__(self, objective: Objective, data: Iterable[Any], settings: Settings, unpack: Unpack | None):
        self.objective, self.data, self.unpack = objective, data, unpack
        self.origin = objective.centre  # The control of every run begins here.
        if settings.lr is None and settings.method == "sgd":
            with evaluating(objective.model):
                top = largest_curvature(objective, self.batches)
            settings = replace(settings, lr=0.25 * objective.n_data / top)
        elif settings.lr is None:
            settings = replace(settings, lr=1e-3)
        self.settings = settings

    def batches(self) -> Iterator[Batch]:
        """Yields the batches of one pass over the data."""
        dtype = next(iter(self.objective.like.values())).dtype
        for batch in iterate(self.data, device=self.objective.device, dtype=dtype, unpack=self.unpack):
            yield self.objective.cast(batch)

    def _endless(self) -> Iterator[Batch]:
        while True:
            count = 0
            for batch in self.batches():
                count += 1
                yield batch
            if not count:
                raise DataError("a pass over the data gave no example: the data changed since they were counted")

    def _descend(self, start: Tensor, push: Push | None, pairs: int = 0) -> Tensor:
        settings, objective = self.settings, self.objective
        lr = settings.lr or 0.0
        theta, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        average, averaged = torch.zeros_like(start), 0
        tail = settings.steps - max(1, round(settings.average * settings.steps))
        stream = self._endless()
        with evaluating(objective.model):
            for step in range(settings.steps):
                # Times the number of batches this is, over a pass, the sum over all data, also where batches are
                # unequal.
                evaluation = objective.evaluate(theta, push, batch=next(stream), scale=float(objective.n_batches))
                slope = evaluation.gradient / objective.n_data  # This is the slope of the mean loss + prior/N ∓ λψ/N.
                if settings.method == "sgd":
                    first = settings.momentum * first + slope
                    theta = theta - lr * first
                else:
                    first = 0.9 * first + 0.1 * slope
                    second = 0.999 * second + 0.001 * _shared_squares(slope, pairs)
                    rate = lr * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
                    scale = (second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-12
                    theta = theta - rate * first / (1 - 0.9 ** (step + 1)) / scale
                if step >= tail:
                    averaged += 1
                    average = average + (theta - average) / averaged
        return average

    def _over_all(self, theta: Tensor, push: Push | None) -> Evaluation:
        """Evaluates the members over one pass of the data."""
        objective = self.objective
        with evaluating(objective.model):
            prior = objective.evaluate(theta)  # Nothing is kept, so this is the prior alone.
            total = objective.evaluate(theta, push)
            for batch in self.batches():
                part = objective.evaluate(theta, batch=batch)
                loss, slope = part.loss - prior.loss, part.gradient - prior.gradient
                total = Evaluation(total.loss + loss, total.shift, total.gradient + slope)
        return total

    def control(self, start: Tensor, goal: float) -> tuple[FineTuned, Evaluation]:
        before = self._over_all(start[None], None)
        theta = self._descend(start[None], None)
        after = self._over_all(theta, None)
        return self._result(theta, after, theta[0], after), before

    def run(self, start: Tensor, push: Push, goal: Tensor) -> FineTuned:
        # The control goes along with the same batches, hence the same drift and the same noise.
        none = Push(push.functionals, torch.cat([push.weights, torch.zeros_like(push.weights[:1])]))
        pairs = len(start) // 2 if self.settings.symmetric else 0
        theta = self._descend(torch.cat([start, self.origin[None]]), none, pairs)
        evaluation = self._over_all(theta, none)
        members = Evaluation(evaluation.loss[:-1], evaluation.shift[:-1], evaluation.gradient[:-1])
        last = Evaluation(evaluation.loss[-1:], evaluation.shift[-1:], evaluation.gradient[-1:])
        return self._result(theta[:-1], members, theta[-1], last)

    def _result(self, theta: Tensor, members: Evaluation, control: Tensor, last: Evaluation) -> FineTuned:
        count = torch.full((len(theta),), self.settings.steps, device=theta.device)
        done = torch.ones_like(count, dtype=torch.bool)
        return FineTuned(theta, members.loss, members.gradient, count, done, control, last.loss[0], last.gradient[0])


def _shared_squares(slope: Tensor, pairs: int) -> Tensor:
    """Returns squares of gradients, one mean for the two members k and k + pairs of a pair.

    With a common scale the difference of the two is a linear function of their gradients' difference: the noise of the
    batches, which is common, cancels.
    """
    squares = slope.square()
    mean = (squares[:pairs] + squares[pairs : 2 * pairs]) / 2
    return torch.cat([mean, mean, squares[2 * pairs :]])


def largest_curvature(objective: Objective, batches: Callable[[], Iterator[Batch]], rounds: int = 10) -> float:
    """Returns the largest curvature that a step on a batch meets, by power iteration on differences of gradients alone.

    Args:
        objective: The objective L, at its centre.
        batches: A function that makes a pass over the data.
        rounds: The number of rounds of the iteration; each is one pass.

    Returns:
        The largest eigenvalue of L's Hessian, or the curvature of the worst single batch, times the number of batches, along
        its eigenvector: steps on batches must be stable, not only their mean.
    """
    centre = objective.centre
    width = 1e-4 if objective.dtype == torch.float64 else 1e-2
    width *= max(1.0, float(centre.norm()) / math.sqrt(len(centre)))
    vector = torch.randn(centre.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(centre)
    value = worst = 0.0
    for _ in range(rounds):
        vector = vector / vector.norm()
        theta = torch.stack([centre + width * vector, centre - width * vector])
        prior_gradient = objective.precision * (theta - objective.prior_mean)
        total, worst = (prior_gradient[0] - prior_gradient[1]) / (2 * width), 0.0
        for batch in batches():
            gradient = objective.evaluate(theta, batch=batch).gradient - prior_gradient
            change = (gradient[0] - gradient[1]) / (2 * width)
            worst = max(worst, objective.n_batches * abs(float(change @ vector)))
            total = total + change
        vector, value = total, float(total.norm())
    return max(value, worst, float(objective.precision.max()))
