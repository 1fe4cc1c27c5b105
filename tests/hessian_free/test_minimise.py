"""The minimisers alone: convergence, independence of members, negative curvature."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.hessian_free import Settings
from aftermap.hessian_free.minimise import BatchFineTuner, Minimum, _two_loops, lbfgs, newton_cg
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
