"""Fine-tuning of pushed objectives: to the minimum over all data, or by a fixed number of steps on common batches.

Index legend: m members, p parameters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aftermap.batches import Batch, Unpack, iterate
from aftermap.curvature.functional import evaluating
from aftermap.errors import DataError
from aftermap.hessian_free.minimise import Minimum, lbfgs, newton_cg
from aftermap.hessian_free.objective import Evaluation, Objective, Push
from aftermap.hessian_free.settings import Settings

__all__ = ["BatchRunner", "Ends", "FullDataRunner", "Runner", "largest_curvature"]


@dataclass(frozen=True)
class Ends:
    """Where fine-tuning ended.

    Attributes:
        theta: [m, P].
        loss: L without the push [m].
        gradient: of the pushed objective over all data [m, P].
        steps: [m].
        converged: [m]; True for methods with a fixed number of steps.
        control: the λ = 0 run [P].
        control_loss: its L, 0-d.
        control_gradient: of L there [P].
    """

    theta: Tensor
    loss: Tensor
    gradient: Tensor
    steps: Tensor
    converged: Tensor
    control: Tensor
    control_loss: Tensor
    control_gradient: Tensor


class Runner(ABC):
    """Fine-tunes members from given starts."""

    @abstractmethod
    def control(self, start: Tensor, goal: float) -> tuple[Ends, Evaluation]:
        """The λ = 0 run from weights [P], and what was at the start: ends of one member."""

    @abstractmethod
    def run(self, start: Tensor, push: Push, goal: Tensor) -> Ends:
        """Fine-tunes members [m, P] under their pushes; with both signs, members k and k + m/2 are a pair."""


class FullDataRunner(Runner):
    """Minimises over all data, which the objective keeps.

    Args:
        objective: with its data read.
        settings: method "lbfgs" or "newton_cg".
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

    def control(self, start: Tensor, goal: float) -> tuple[Ends, Evaluation]:
        with evaluating(self.objective.model):
            before = self.objective.evaluate(start[None])
        found = self._minimise(start[None], None, torch.full_like(before.loss, goal))
        self._control = found.theta[0], found.value[0], found.gradient[0]
        ends = Ends(found.theta, found.value, found.gradient, found.steps, found.converged, *self._control)
        return ends, before

    def run(self, start: Tensor, push: Push, goal: Tensor) -> Ends:
        assert self._control is not None  # fit made it
        found = self._minimise(start, push, goal)
        loss = self.objective.losses(found.theta, self.objective.batches)
        return Ends(found.theta, loss, found.gradient, found.steps, found.converged, *self._control)


class BatchRunner(Runner):
    """A fixed number of steps of SGD or Adam; every member sees the same batches, and so does the λ = 0 control.

    Args:
        objective: with its data counted.
        data: batches that can be gone through again and again.
        settings: method "sgd" or "adam".
        unpack: of the data.
    """

    def __init__(self, objective: Objective, data: Iterable[Any], settings: Settings, unpack: Unpack | None):
        self.objective, self.data, self.unpack = objective, data, unpack
        self.origin = objective.centre  # where the control of every run begins
        if settings.lr is None and settings.method == "sgd":
            with evaluating(objective.model):
                top = largest_curvature(objective, self.batches)
            settings = replace(settings, lr=0.25 * objective.n_data / top)
        elif settings.lr is None:
            settings = replace(settings, lr=1e-3)
        self.settings = settings

    def batches(self) -> Iterator[Batch]:
        """One pass over the data."""
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
                raise DataError(
                    "the data cannot be gone through a second time: pass a list or a DataLoader, no generator"
                )

    def _descend(self, start: Tensor, push: Push | None, pairs: int = 0) -> Tensor:
        settings, objective = self.settings, self.objective
        lr = settings.lr or 0.0
        theta, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        average, kept = torch.zeros_like(start), 0
        tail = settings.steps - max(1, round(settings.average * settings.steps))
        stream = self._endless()
        with evaluating(objective.model):
            for step in range(settings.steps):
                # Times the number of batches: over a pass that is the sum over all data, also where batches are unequal.
                found = objective.evaluate(theta, push, batch=next(stream), scale=float(objective.n_batches))
                slope = found.gradient / objective.n_data  # of the mean loss + prior/N ∓ λψ/N
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
                    kept += 1
                    average = average + (theta - average) / kept
        return average

    def _over_all(self, theta: Tensor, push: Push | None) -> Evaluation:
        """Over one pass of the data."""
        objective = self.objective
        with evaluating(objective.model):
            prior = objective.evaluate(theta)  # nothing is kept: the prior alone
            total = objective.evaluate(theta, push)
            for batch in self.batches():
                part = objective.evaluate(theta, batch=batch)
                loss, slope = part.loss - prior.loss, part.gradient - prior.gradient
                total = Evaluation(total.loss + loss, total.shift, total.gradient + slope)
        return total

    def control(self, start: Tensor, goal: float) -> tuple[Ends, Evaluation]:
        before = self._over_all(start[None], None)
        theta = self._descend(start[None], None)
        after = self._over_all(theta, None)
        return self._ends(theta, after, theta[0], after), before

    def run(self, start: Tensor, push: Push, goal: Tensor) -> Ends:
        # The control goes along: the same batches, hence the same drift and the same noise.
        none = Push(push.functionals, torch.cat([push.weights, torch.zeros_like(push.weights[:1])]))
        pairs = len(start) // 2 if self.settings.symmetric else 0
        theta = self._descend(torch.cat([start, self.origin[None]]), none, pairs)
        found = self._over_all(theta, none)
        members = Evaluation(found.loss[:-1], found.shift[:-1], found.gradient[:-1])
        last = Evaluation(found.loss[-1:], found.shift[-1:], found.gradient[-1:])
        return self._ends(theta[:-1], members, theta[-1], last)

    def _ends(self, theta: Tensor, found: Evaluation, control: Tensor, last: Evaluation) -> Ends:
        count = torch.full((len(theta),), self.settings.steps, device=theta.device)
        done = torch.ones_like(count, dtype=torch.bool)
        return Ends(theta, found.loss, found.gradient, count, done, control, last.loss[0], last.gradient[0])


def _shared_squares(slope: Tensor, pairs: int) -> Tensor:
    """Squares of gradients, one mean for the two members k and k + pairs of a pair.

    With a common scale the difference of the two is a linear function of their gradients' difference: the noise of the
    batches, which is common, cancels.
    """
    squares = slope.square()
    mean = (squares[:pairs] + squares[pairs : 2 * pairs]) / 2
    return torch.cat([mean, mean, squares[2 * pairs :]])


def largest_curvature(objective: Objective, batches: Callable[[], Iterator[Batch]], rounds: int = 10) -> float:
    """The largest curvature that a step on a batch meets, by power iteration on differences of gradients alone.

    Args:
        objective: L, at its centre.
        batches: makes a pass over the data.
        rounds: of the iteration; each is one pass.

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
        own = objective.precision * (theta - objective.prior_mean)
        total, worst = (own[0] - own[1]) / (2 * width), 0.0
        for batch in batches():
            gradient = objective.evaluate(theta, batch=batch).gradient - own
            change = (gradient[0] - gradient[1]) / (2 * width)
            worst = max(worst, objective.n_batches * abs(float(change @ vector)))
            total = total + change
        vector, value = total, float(total.norm())
    return max(value, worst, float(objective.precision.max()))
