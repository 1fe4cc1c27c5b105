"""IVON's steps against its equations, written out one by one; estimates that are not finite; skipped steps."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aftermap.optim import IVON
from aftermap.optim.options import Schedule
from tests.optim.problems import classifier

N = 40
X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def loss_of(weight: Tensor) -> Tensor:
    return (X @ weight.T - Y).pow(4).mean()


def written_out(opt: IVON, weight: Tensor, steps: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """μ and h after some steps of Shen et al. 2024, Algorithm 1, with the optimiser's noise."""
    mean, h, m = (
        weight.detach().clone(),
        torch.full_like(weight, options["initial_curvature"]),
        torch.zeros_like(weight),
    )
    temperature = opt.settings.temperature
    for step in range(steps):
        tau = temperature(step)
        c = tau * options["prior_precision"] / N
        below = h + c + options["damping"]
        sigma = (tau / N / below).sqrt()
        grads, estimates = [], []
        for sample in range(options["mc_samples"]):
            noise = opt._noise.normal([weight], step=step, sample=sample, stream=0)[0]
            drawn = (mean + sigma * noise).requires_grad_()
            (grad,) = torch.autograd.grad(loss_of(drawn), drawn)
            grads.append(grad)
            estimates.append(grad * noise / sigma)
        grad, estimate = torch.stack(grads).mean(0), torch.stack(estimates).mean(0)
        beta1, beta2 = options["momentum"], options["new_curvature_weight"]
        m = beta1 * m + (1 - beta1) * grad
        h = (1 - beta2) * h + beta2 * estimate + 0.5 * beta2**2 * (h - estimate) ** 2 / below
        rate = options["lr"] * (options["initial_curvature"] + c)
        move = (m / (1 - beta1 ** (step + 1)) + c * (mean - options["prior_mean"])) / (h + c + options["damping"])
        mean = mean - rate * move.clamp(-options["clip_radius"], options["clip_radius"])
    return mean, h


PLAIN: dict[str, Any] = {
    "lr": 0.1,
    "mc_samples": 1,
    "momentum": 0.9,
    "new_curvature_weight": 0.1,
    "prior_precision": 2.0,
    "prior_mean": 0.0,
    "damping": 0.0,
    "temperature": 1.0,
    "initial_curvature": 0.3,
    "clip_radius": math.inf,
}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"mc_samples": 3},
        {"temperature": Schedule(0.1, 1.0, 3)},
        {"damping": 0.05, "temperature": 0.5},
        {"prior_mean": 0.7},
        {"prior_precision": 0.0, "damping": 0.1},
        {"clip_radius": 0.05},
    ],
    ids=["plain", "samples", "schedule", "damping", "prior_mean", "no_prior", "clip"],
)
def test_steps_follow_the_equations(changed: dict[str, Any]) -> None:
    options = {**PLAIN, **changed}
    weight = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3))
    start = weight.detach().clone()
    opt = IVON([weight], n_data=N, generator=torch.Generator().manual_seed(0), **options)
    for _ in range(5):
        opt.step(lambda: loss_of(weight))
    mean, h = written_out(opt, start, 5, options)
    torch.testing.assert_close(weight.detach(), mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(opt.state[weight]["curvature"], h, rtol=1e-10, atol=1e-12)


def test_a_loaded_state_draws_with_its_own_curvature() -> None:
    net, x, y = classifier()
    opt = IVON(net, n_data=100, lr=0.1, generator=torch.Generator().manual_seed(3), new_curvature_weight=0.1)
    closure = lambda: nn.functional.cross_entropy(net(x), y)  # noqa: E731
    opt.step(closure)
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(net.state_dict())
    for _ in range(3):
        opt.step(closure)
    expected = [p.detach().clone() for p in net.parameters()]
    net.load_state_dict(weights)
    opt.load_state_dict(saved)
    for _ in range(3):
        opt.step(closure)
    assert all(torch.equal(a, b.detach()) for a, b in zip(expected, net.parameters(), strict=True))


def test_a_gradient_mended_from_outside_does_not_hide_a_bad_estimate() -> None:
    """g ∘ ε is finite where g is; but .grad can be mended after g was collected."""
    weight = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    opt = IVON([weight], n_data=N, lr=0.1)
    with opt.sampled_params():
        (loss_of(weight) * math.inf).backward()
    assert weight.grad is not None
    weight.grad = torch.nan_to_num(weight.grad, 0.0, 0.0, 0.0)
    before = weight.detach().clone()
    with pytest.warns(UserWarning, match="skipped"):
        opt.step()
    assert torch.equal(weight.detach(), before)
    assert bool(torch.isfinite(opt.state[weight]["curvature"]).all())


def test_an_estimate_that_overflows_is_noticed() -> None:
    """g can be finite where g ∘ ε is not."""
    weight = nn.Parameter(torch.zeros(100))
    weight.register_hook(lambda grad: torch.full_like(grad, 0.9 * torch.finfo(torch.float32).max))
    opt = IVON([weight], n_data=N, lr=0.1, generator=torch.Generator().manual_seed(0))
    before = opt.state[weight]["curvature"].clone()
    with pytest.warns(UserWarning, match="skipped"):
        opt.step(lambda: weight.sum())
    assert torch.equal(weight.detach(), torch.zeros(100))
    assert torch.equal(opt.state[weight]["curvature"], before)


def test_a_skipped_first_step_does_not_count_in_the_correction_of_the_bias() -> None:
    options = {**PLAIN, "new_curvature_weight": 1e-9}

    def moved(skip: bool) -> Tensor:
        weight = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3))
        opt = IVON([weight], n_data=N, generator=torch.Generator().manual_seed(0), **options)
        if skip:
            with pytest.warns(UserWarning, match="skipped"):
                opt.step(lambda: loss_of(weight) * math.nan)
            assert (opt.steps, opt.updates, opt.skipped_steps) == (1, 0, 1)
        else:
            opt.steps = 1  # the same noise
        opt.step(lambda: loss_of(weight))
        return weight.detach()

    assert torch.equal(moved(True), moved(False))
