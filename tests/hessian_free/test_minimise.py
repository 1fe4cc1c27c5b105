"""The minimisers alone: convergence, independence of members, negative curvature."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.hessian_free import Settings
from aftermap.hessian_free.minimise import (
    BatchFineTuner,
    Minimum,
    _search,
    _solve,
    _State,
    _two_loops,
    lbfgs,
    newton_cg,
)
from aftermap.hessian_free.objective import Push
from tests.laplace.problems import normal


def rosenbrock(theta: Tensor) -> Tensor:
    return (1 - theta[0]) ** 2 + 100 * (theta[1] - theta[0] ** 2) ** 2 + (theta[2] - 0.5 * theta[0]) ** 2


def run(
    function: Any, method: str, start: Tensor, goal: float = 1e-9, max_steps: int = 200, history: int = 7
) -> Minimum:
    single = torch.func.grad_and_value(function)

    def evaluate(theta: Tensor, index: Tensor) -> Any:
        found = [single(t) for t in theta]
        return SimpleNamespace(value=torch.stack([v for _, v in found]), gradient=torch.stack([g for g, _ in found]))

    def product(theta: Tensor, vectors: Tensor, index: Tensor) -> Tensor:
        along = torch.func.grad(lambda t, v: (torch.func.grad(function)(t) * v).sum())
        return torch.stack([along(t, v) for t, v in zip(theta, vectors, strict=True)])

    goals = torch.full((len(start),), goal, dtype=start.dtype)
    if method == "newton_cg":
        return newton_cg(evaluate, product, start, goals, max_steps=max_steps)
    return lbfgs(evaluate, start, goals, max_steps=max_steps, history=history)


@pytest.mark.parametrize("method", ["lbfgs", "newton_cg"])
def test_a_curved_valley_is_followed_to_its_end_and_members_do_not_mix(method: str) -> None:
    start = normal(2, 3, seed=3)
    found = run(rosenbrock, method, start)
    assert bool(found.converged.all())
    assert_close(found.theta, torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64).expand(2, 3), rtol=1e-7, atol=1e-7)
    assert float(found.gradient.norm(dim=1).max()) <= 1e-9
    for place in range(2):
        alone = run(rosenbrock, method, start[place : place + 1])
        assert_close(alone.theta[0], found.theta[place], rtol=0, atol=0)
        assert int(alone.steps) == int(found.steps[place])


@pytest.mark.parametrize("method", ["lbfgs", "newton_cg"])
def test_members_at_their_goal_stand_still_and_limits_hold(method: str) -> None:
    start = torch.tensor([[1.0, 1.0, 0.5], [-1.2, 1.0, 0.0]], dtype=torch.float64)
    found = run(rosenbrock, method, start, max_steps=2)
    assert_close(found.theta[0], start[0], rtol=0, atol=0)
    assert found.steps.tolist() == [0, 2]
    assert found.converged.tolist() == [True, False]
    assert float(found.value[1]) < float(rosenbrock(start[1]))


def test_badly_scaled_quadratics_reach_rounding() -> None:
    scales = torch.logspace(-2, 4, 11, dtype=torch.float64)
    target = normal(11, seed=1)

    def bowl(theta: Tensor) -> Tensor:
        return 100 + 0.5 * (scales * (theta - target).square()).sum()

    for method in ("lbfgs", "newton_cg"):
        found = run(bowl, method, torch.zeros(1, 11, dtype=torch.float64), goal=1e-8, history=50)
        assert bool(found.converged)
        assert_close(found.theta[0], target, rtol=0, atol=2e-6)


def test_negative_curvature_is_told() -> None:
    def double_well(theta: Tensor) -> Tensor:
        return (theta.square() - 1).square().sum()

    found = run(double_well, "newton_cg", torch.full((1, 3), 0.1, dtype=torch.float64))
    assert bool(found.negative)
    assert_close(found.theta, torch.ones(1, 3, dtype=torch.float64), rtol=0, atol=1e-8)
    assert not bool(run(double_well, "newton_cg", torch.full((1, 3), 0.9, dtype=torch.float64)).negative)


def test_the_newest_change_of_the_gradient_is_taken_for_its_move() -> None:
    """The secant equation H⁻¹y = s, which BFGS fulfils exactly for the newest pair, however many came before."""
    moves, changes = normal(4, 2, 6, seed=1), normal(4, 2, 6, seed=2)
    changes = changes * torch.sign((moves * changes).sum(2, keepdim=True))  # along every move the gradient rises
    pairs = [(s, y, 1 / (s * y).sum(1)) for s, y in zip(moves, changes, strict=True)]
    gamma = torch.tensor([0.3, 2.0], dtype=torch.float64)
    for count in range(1, 5):
        assert_close(_two_loops(changes[0], pairs[:count], gamma), moves[0])
    one, other = normal(2, 6, seed=3), normal(2, 6, seed=4)
    forth, back = (_two_loops(v, pairs, gamma) for v in (one, other))
    assert_close((forth * other).sum(1), (back * one).sum(1))  # H⁻¹ is symmetric


class Valley:
    """Stands for an objective with one batch of four data, whose mean loss is the valley."""

    model, device, like = nn.Identity(), torch.device("cpu"), {"theta": torch.zeros(3, dtype=torch.float64)}
    n_data, n_batches, centre = 4.0, 1, torch.zeros(3, dtype=torch.float64)

    def cast(self, batch: Any) -> Any:
        return batch

    def evaluate(self, theta: Tensor, push: Any = None, **_: Any) -> Any:
        return SimpleNamespace(gradient=self.n_data * torch.stack([torch.func.grad(rosenbrock)(t) for t in theta]))


@pytest.mark.parametrize("method", ["sgd", "adam"])
@pytest.mark.parametrize("average", [0.0, 0.5])
def test_steps_on_batches_are_those_of_torch(method: str, average: float) -> None:
    steps, lr = 20, 1e-3
    settings = Settings(method=method, lr=lr, steps=steps, momentum=0.7, average=average)
    tuner = BatchFineTuner(Valley(), [(torch.zeros(4, 1).double(), torch.zeros(4))], settings, None)  # type: ignore[arg-type]
    start = normal(3, 3, seed=3)
    found = tuner._descend(start, None)
    for begin, end in zip(start, found, strict=True):
        theta = begin.clone().requires_grad_()
        if method == "sgd":
            optimiser: torch.optim.Optimizer = torch.optim.SGD([theta], lr, momentum=0.7)
        else:
            optimiser = torch.optim.Adam([theta], lr, eps=1e-12)
        last = []
        for step in range(steps):
            if method == "adam":
                optimiser.param_groups[0]["lr"] = (
                    lr * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / steps)).item())
                )
            optimiser.zero_grad()
            rosenbrock(theta).backward()
            optimiser.step()
            last.append(theta.detach().clone())
        assert_close(end, torch.stack(last[-max(1, int(average * steps)) :]).mean(0), rtol=1e-6, atol=1e-9)
    # Members that are pushed both ways go on as alone where they are the same.
    pair = tuner._descend(torch.stack([start[0], start[0], start[1]]), None, pairs=1)
    assert_close(pair, found[[0, 0, 1]])


def evaluator(function: Any, count: list[int]) -> Any:
    """Values and gradients of many members at once; ``count`` tells how many single ones were asked for."""
    single = torch.func.grad_and_value(function)

    def evaluate(theta: Tensor, index: Tensor) -> Any:
        count[0] += len(theta)
        found = [single(t) for t in theta]
        return SimpleNamespace(value=torch.stack([v for _, v in found]), gradient=torch.stack([g for g, _ in found]))

    return evaluate


def test_as_few_evaluations_as_those_of_scipy() -> None:
    for seed in range(4):
        start, count = 1.5 * normal(1, 3, seed=seed), [0]
        goal = torch.tensor([1e-6], dtype=torch.float64)
        found = lbfgs(evaluator(rosenbrock, count), start, goal, max_steps=200, history=7)
        assert bool(found.converged)

        def both(theta: np.ndarray) -> tuple[float, np.ndarray]:
            slope, value = torch.func.grad_and_value(rosenbrock)(torch.from_numpy(theta))
            return float(value), slope.numpy()

        theirs = scipy.optimize.minimize(
            both, start[0].numpy(), jac=True, method="L-BFGS-B", options={"maxcor": 7, "gtol": 1e-6, "ftol": 0}
        )
        assert count[0] <= 1.3 * theirs.nfev + 3


@pytest.mark.parametrize("length", [1e-3, 1.0, 30.0])
def test_a_search_ends_where_the_weak_wolfe_conditions_hold(length: float) -> None:
    def wavy(theta: Tensor) -> Tensor:
        return (theta.square() + torch.sin(3 * theta)).sum() + 0.1 * (theta[0] * theta[1]) ** 2

    start, count = 2 * normal(12, 3, seed=5), [0]
    evaluate = evaluator(wavy, count)
    state = _State.at(evaluate, start)
    before, slopes = state.value.clone(), state.gradient.clone()
    direction = -slopes * (0.2 + torch.rand(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    some = torch.arange(1, 12)  # the first one stands still
    _search(evaluate, state, some, direction[some], torch.full((11,), length, dtype=torch.float64))
    move = state.theta - start
    assert_close(move[0], torch.zeros(3, dtype=torch.float64), rtol=0, atol=0)
    assert state.steps.tolist() == [0] + 11 * [1]
    step = (move[1:] / direction[1:])[:, 0]
    assert_close(move[1:], step[:, None] * direction[1:])
    along = (direction * slopes).sum(1)[1:]
    assert bool((step > 0).all())
    assert bool((state.value[1:] <= before[1:] + 1e-4 * step * along).all())
    assert bool(((state.gradient * direction).sum(1)[1:] >= 0.9 * along).all())
    assert not bool(state.stuck.any())
    assert count[0] < 12 + 11 * 14  # lengths are doubled, or where the slope should vanish is asked for
    # Upwards nothing is found, and nothing is moved.
    there = state.theta.clone()
    _search(evaluate, state, some, state.gradient[some], torch.ones(11, dtype=torch.float64))
    assert state.stuck.tolist() == [False] + 11 * [True]
    assert_close(state.theta, there, rtol=0, atol=0)


def test_a_search_asks_a_steep_slope_for_more() -> None:
    """A first trial that falls by a half, where the slope promises 10,000, is too far; the bottom is half as far."""
    steep = 1e4
    evaluate = evaluator(lambda t: (-steep * t + (steep - 0.5) * t.square()).sum(), [0])
    state = _State.at(evaluate, torch.zeros(1, 1, dtype=torch.float64))
    one = torch.ones(1, 1, dtype=torch.float64)
    _search(evaluate, state, torch.tensor([0]), one, one[0])
    assert_close(state.theta, one * steep / (2 * steep - 1), rtol=1e-6, atol=0)


def test_a_parabola_takes_two_trials() -> None:
    """Its slope is linear: after a first trial too far the second one is at the bottom."""
    count = [0]
    evaluate = evaluator(lambda t: 3 * (t - 1).square().sum(), count)
    state = _State.at(evaluate, torch.zeros(1, 2, dtype=torch.float64))
    _search(
        evaluate, state, torch.tensor([0]), -state.gradient.clone(), torch.tensor([0.5], dtype=torch.float64)
    )  # the bottom is at 1/6
    assert_close(state.theta, torch.ones(1, 2, dtype=torch.float64))
    assert count[0] == 3


def test_directions_of_newton_are_those_of_dense_solves_and_stop_at_their_goals() -> None:
    roots = normal(3, 6, 6, seed=1)
    matrices = roots @ roots.mT + 0.5 * torch.eye(6, dtype=torch.float64)
    gradient, products = normal(3, 6, seed=2), torch.zeros(3)

    def product(v: Tensor, some: Tensor) -> Tensor:
        products[some] += 1
        return (matrices[some] @ v[..., None])[..., 0]

    norm = gradient.norm(dim=1)
    wanted = norm * torch.tensor([1e-10, 0.3, 2.0], dtype=torch.float64)
    found, negative = _solve(product, gradient, wanted)
    left = (matrices @ found[..., None])[..., 0] + gradient
    assert bool((left.norm(dim=1) <= wanted).all())
    assert_close(found[0], -torch.linalg.solve(matrices[0], gradient[0]))
    assert_close(found[2], torch.zeros(6, dtype=torch.float64))  # as good as it is wanted before anything was done
    assert products[2] == 0
    assert 0 < products[1] < products[0] <= 8
    assert not bool(negative.any())
    # Against negative curvature the first direction is steepest descent; later ones stay where they were.
    matrices[1] = -matrices[1]
    found, negative = _solve(product, gradient, 1e-10 * norm)
    assert negative.tolist() == [False, True, False]
    assert_close(found[1], -gradient[1])


def test_pairs_go_on_as_they_would_alone() -> None:
    """With a common scale for the two of a pair, whatever other pairs do."""

    class Pushed(Valley):
        def evaluate(self, theta: Tensor, push: Any = None, **_: Any) -> Any:
            if push is None:
                value = torch.stack([rosenbrock(t) for t in theta])
                return SimpleNamespace(loss=value, shift=0 * value, gradient=super().evaluate(theta).gradient)
            pull = push.weights.sum(1)[:, None] * torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
            found = self.evaluate(theta)
            return SimpleNamespace(loss=found.loss, shift=found.shift, gradient=found.gradient - pull)

    settings = Settings(method="adam", lr=1e-2, steps=15)
    batches = [(torch.zeros(4, 1).double(), torch.zeros(4))]
    tuner = BatchFineTuner(Pushed(), batches, settings, None)  # type: ignore[arg-type]
    assert settings.symmetric
    weights = torch.tensor([[0.5], [0.1], [2.0]], dtype=torch.float64)
    goal = torch.ones(6, dtype=torch.float64)
    start = normal(3, 3, seed=1)
    both = tuner.run(torch.cat([start, start]), Push(None, torch.cat([weights, -weights])), goal)  # type: ignore[arg-type]
    for place in range(3):
        one, weight = start[place : place + 1], weights[place : place + 1]
        alone = tuner.run(torch.cat([one, one]), Push(None, torch.cat([weight, -weight])), goal[:2])  # type: ignore[arg-type]
        assert_close(alone.theta, both.theta[[place, place + 3]], rtol=1e-12, atol=1e-12)
        assert_close(alone.gradient, both.gradient[[place, place + 3]], rtol=1e-12, atol=1e-12)
        assert_close(alone.control, both.control, rtol=1e-12, atol=1e-12)
    assert both.steps.tolist() == 6 * [15]
    assert_close(both.control, tuner._descend(tuner.origin[None], None)[0], rtol=1e-12, atol=1e-12)
