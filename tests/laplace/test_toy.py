"""The toy of Ritter, Botev & Barber 2018, section 5.1: the linearised predictive needs no tuning to agree with HMC."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from aftermap.laplace import Laplace
from aftermap.likelihoods import Gaussian
from tests.laplace.problems import Data, generator, normal

NOISE, PRIOR = 3.0, 1.0
WIDTHS = ((7, 1), (7,), (7, 7), (7,), (1, 7), (1,))


def toy(seed: int = 1) -> Data:
    x = 8 * torch.rand(20, 1, generator=generator(seed), dtype=torch.float64) - 4
    return [(x, x**3 + NOISE * normal(20, 1, seed=seed + 100))]


def split(flat: Tensor) -> list[Tensor]:
    """[chains, 78] -> the network's parameters with a leading dimension of chains."""
    parts = flat.split([int(torch.Size(s).numel()) for s in WIDTHS], 1)
    return [p.reshape(-1, *s) for p, s in zip(parts, WIDTHS, strict=True)]


def outputs(flat: Tensor, x: Tensor) -> Tensor:
    """[chains, N]."""
    w1, b1, w2, b2, w3, b3 = split(flat)
    h = (x @ w1.mT + b1[:, None]).relu()
    h = (h @ w2.mT + b2[:, None]).relu()
    return (h @ w3.mT + b3[:, None]).squeeze(-1)


def gradient(flat: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Energy [chains] and its gradient, by hand: several times faster than autograd at this size."""
    w1, b1, w2, b2, w3, b3 = split(flat)
    h1 = (x @ w1.mT + b1[:, None]).relu()
    h2 = (h1 @ w2.mT + b2[:, None]).relu()
    residual = (h2 @ w3.mT + b3[:, None] - y) / NOISE**2  # [chains, N, 1]
    energy = 0.5 * NOISE**2 * residual.square().sum((1, 2)) + 0.5 * PRIOR * flat.square().sum(1)
    d2 = (residual @ w3) * (h2 > 0)
    d1 = (d2 @ w2) * (h1 > 0)
    parts = [d1.mT @ x, d1.sum(1), d2.mT @ h1, d2.sum(1), residual.mT @ h2, residual.sum(1)]
    return energy, torch.cat([p.flatten(1) for p in parts], 1) + PRIOR * flat


@cache
def network(seed: int = 1) -> nn.Module:
    """1-7-7-1 with 78 parameters: the best of 24 starts, trained side by side by Adam with a falling step."""
    net = nn.Sequential(nn.Linear(1, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 1)).double().eval()
    x, y = toy(seed)[0]
    flat = torch.cat([normal(24, *s, seed=i).flatten(1) / s[-1] ** 0.5 for i, s in enumerate(WIDTHS)], 1)
    optimiser = torch.optim.Adam([flat], lr=5e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.9985)
    for _ in range(4000):
        flat.grad = gradient(flat, x, y)[1]
        optimiser.step()
        schedule.step()
    best = flat[int(gradient(flat, x, y)[0].argmin())]
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), split(best[None]), strict=True):
            parameter.copy_(value[0])
    return net


def hmc(start: Tensor, x: Tensor, y: Tensor, draws: int, steps: int = 60, size: float = 0.006) -> tuple[Tensor, float]:
    """Hamiltonian Monte Carlo with jittered leapfrog steps, all chains at once: [draws, chains, 78], acceptance."""
    source, position = generator(5), start.clone()
    energy, slope = gradient(position, x, y)
    kept, accepted = [], 0.0
    for _ in range(draws):
        momentum = torch.randn(position.shape, generator=source, dtype=torch.float64)
        step = size * (0.8 + 0.4 * torch.rand(len(start), 1, generator=source, dtype=torch.float64))
        where, at, moving = position, slope, momentum - 0.5 * step * slope
        for number in range(steps):
            where = where + step * moving
            new, at = gradient(where, x, y)
            moving = moving - (step if number < steps - 1 else 0.5 * step) * at
        change = energy + 0.5 * momentum.square().sum(1) - new - 0.5 * moving.square().sum(1)
        take = torch.rand(len(start), generator=source, dtype=torch.float64).log() < change
        position, slope = torch.where(take[:, None], where, position), torch.where(take[:, None], at, slope)
        energy = torch.where(take, new, energy)
        accepted += float(take.double().mean()) / draws
        kept.append(position)
    return torch.stack(kept), accepted


def test_the_gradient_by_hand() -> None:
    x, y = toy()[0]
    flat = normal(3, 78, seed=4).requires_grad_()
    energy = 0.5 * ((y.T - outputs(flat, x)) / NOISE).square().sum(1) + 0.5 * PRIOR * flat.square().sum(1)
    (wanted,) = torch.autograd.grad(energy.sum(), flat)
    found = gradient(flat.detach(), x, y)
    torch.testing.assert_close(found[0], energy.detach())
    torch.testing.assert_close(found[1], wanted)


def ratios(seed: int, draws: int) -> tuple[Tensor, Tensor]:
    """Standard deviations of the linearised full posterior on [-6, 6], and their ratio to HMC's between the data."""
    model, (x, y) = network(seed), toy(seed)[0]
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    drawn, accepted = hmc(flat.expand(16, -1), x, y, draws)
    assert accepted > 0.8
    laplace = Laplace(model, Gaussian(NOISE), structure="full", prior_precision=PRIOR).fit(toy(seed), progress=False)
    assert laplace.posterior.n_params == 78
    grid = torch.linspace(-6, 6, 25, dtype=torch.float64)[:, None]
    truth = outputs(drawn[draws // 5 :].flatten(0, 1), grid).std(0)
    found = laplace.predict(grid).epistemic.sqrt().squeeze(1)
    return found, (found / truth)[((grid >= x.min()) & (grid <= x.max())).squeeze(1)]


def test_the_linearised_predictive_agrees_with_hmc() -> None:
    found, ratio = ratios(1, 200)
    assert bool(((ratio > 0.5) & (ratio < 3)).all())
    assert 0.67 < float(ratio.median()) < 1.5
    # Away from the data the uncertainty grows, on both sides.
    assert bool((found[-5:].diff() > 0).all())
    assert bool((found[:5].diff() < 0).all())


@pytest.mark.slow
def test_the_linearised_predictive_agrees_with_hmc_on_several_data_sets() -> None:
    every = torch.cat([ratios(seed, 400)[1] for seed in (2, 3, 4, 5)])
    # A ReLU that bends near the last datum makes the linearised network uncertain there, where HMC moves the bend.
    assert float(((every > 0.5) & (every < 3)).double().mean()) > 0.9
    assert 0.67 < float(every.median()) < 1.5


@pytest.mark.parametrize("structure", ["diagonal", "kron", "full"])
def test_sampling_without_tuning_overestimates(structure: str) -> None:
    """Appendix E: the network under weight samples needs tuning where the linearised one does not."""
    laplace = Laplace(network(), Gaussian(NOISE), structure=structure, prior_precision=PRIOR).fit(toy(), progress=False)
    grid = torch.linspace(-6, 6, 13, dtype=torch.float64)[:, None]
    sampled = laplace.predict(grid, kind="sampling", samples=300, generator=generator(1)).epistemic.sqrt()
    linear = laplace.predict(grid).epistemic.sqrt()
    assert float((sampled / linear).median()) > 1.2


def test_twenty_data_determine_at_most_twenty_directions() -> None:
    laplace = Laplace(network(), Gaussian(NOISE), structure="full").fit(toy(), progress=False)
    assert int(torch.linalg.matrix_rank(laplace.factors.to_dense(), hermitian=True)) <= 20
    assert sum(laplace.posterior.effective_parameters().values()) <= 20
