"""Minimisers of many functions at once, each with its own path: L-BFGS and Newton-CG with a Wolfe line search.

Members never influence each other: what one does is what it would do alone. Those that are done stand still and cost nothing.

Index legend: m members, p parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Minimum", "Point", "lbfgs", "newton_cg"]

# Armijo's and Wolfe's constants; the second is loose, as quasi-Newton steps want it.
_DECREASE, _CURVATURE = 1e-4, 0.9
_TRIALS = 30


class Point(Protocol):
    """A value and its gradient, for several members."""

    @property
    def value(self) -> Tensor:
        """φ [m]."""

    @property
    def gradient(self) -> Tensor:
        """[m, P]."""


Evaluate = Callable[[Tensor, Tensor], Point]  # (weights [k, P], which members [k]) -> their values


@dataclass(frozen=True)
class Minimum:
    """Where the members ended.

    Attributes:
        theta: [m, P].
        value: φ [m].
        gradient: of φ [m, P].
        steps: [m].
        converged: [m], the gradient's norm is below the goal.
        negative: [m], a direction of negative curvature was met (Newton-CG only).
    """

    theta: Tensor
    value: Tensor
    gradient: Tensor
    steps: Tensor
    converged: Tensor
    negative: Tensor


@dataclass
class _State:
    """Members on their way."""

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
    """Limited-memory BFGS (Liu and Nocedal 1989) for every member.

    Args:
        evaluate: (weights [k, P], members [k]) -> values and gradients.
        start: [m, P].
        goal: gradient norm at which a member is done [m].
        max_steps: of one member.
        history: pairs that are kept.

    >>> from types import SimpleNamespace
    >>> bowl = lambda t, _: SimpleNamespace(value=((t - 3) ** 2).sum(1), gradient=2 * (t - 3))
    >>> lbfgs(bowl, torch.zeros(1, 2), torch.tensor([1e-6]), max_steps=9, history=2).theta
    tensor([[3., 3.]])
    """
    state = _State.at(evaluate, start)
    moves = start.new_zeros(history, *start.shape)
    changes = torch.zeros_like(moves)
    rho = start.new_zeros(history, len(start))  # 0: no pair there
    gamma = start.new_zeros(len(start))  # 0: no pair yet
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
        # Without a pair the scale is unknown: begin with a move of length one at most.
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
    """The inverse Hessian that the pairs (newest first) stand for, times the gradient."""
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
    """Newton's method with truncated conjugate gradients (Nocedal and Wright 2006, algorithm 7.1) for every member.

    Args:
        evaluate: (weights [k, P], members [k]) -> values and gradients.
        product: (weights [k, P], vectors [k, P], members [k]) -> Hessian times vectors [k, P].
        start: [m, P].
        goal: gradient norm at which a member is done [m].
        max_steps: Newton steps.
    """
    state = _State.at(evaluate, start)
    for _ in range(max_steps):
        index = state.active(goal)
        if not len(index):
            break
        gradient = state.gradient[index]
        norm = gradient.norm(dim=1)
        # Never solve further than the goal asks for: the last step is as cheap as it can be.
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
    """A direction of descent −H⁻¹g up to a residual, and where negative curvature was met."""
    x, r = torch.zeros_like(gradient), gradient.clone()  # residual of H x = −g, negated
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
        kept = some[falls]  # a fall is always taken, also where the slope asks for more
        state.theta[index[kept]] = trial[falls]
        state.value[index[kept]], state.gradient[index[kept]] = new[falls], point.gradient[falls]
        low[kept], low_slope[kept] = t[kept], grown[falls]
        over = some[~falls]
        high[over], high_slope[over] = t[over], grown[~falls]
        left[some[falls & flat]] = False
        t = _next(t, low, high, low_slope, high_slope)
    state.stuck[index[low == 0]] = True
    state.steps[index] += 1


def _next(t: Tensor, low: Tensor, high: Tensor, low_slope: Tensor, high_slope: Tensor) -> Tensor:
    """Where the slope should vanish between the ends, kept away from both; farther out where there is no upper end."""
    width = torch.where(high.isfinite(), high - low, 1.0)
    share = low_slope / (low_slope - high_slope)
    share = torch.where(share.isfinite() & (high_slope > 0), share.clamp(0.1, 0.9), torch.full_like(share, 0.5))
    return torch.where(high.isfinite(), low + share * width, 2 * torch.where(low > 0, low, t))
