"""Hamiltonian Monte Carlo with replica exchange: several chains, each with a ladder of tempered replicas, moved as one batch.

The posterior of a small ReLU network has many modes, between which a chain of its own hardly ever moves. A replica at the inverse temperature β has
the density exp(−β nll(θ) − τ‖θ‖²/2): at small β it is nearly the prior and moves freely, and exchanges between neighbours carry what it
finds to β = 1 (Swendsen and Wang 1986). The draws are those at β = 1; each chain has a ladder of its own, so that R-hat compares independent chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Chains", "Perceptron", "sample"]

_TARGET = 0.8  # the acceptance rate that step sizes are adapted to
Potential = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Perceptron:
    """The negative log-likelihood of a perceptron 1-H-H-1 with ReLU units and known noise, with its gradient, for many weights at once.

    Weights [R, P] are in the order of a Sequential's parameters: weight and bias of each layer. The gradient is written out:
    automatic differentiation of so small a network takes many times as long.

    Attributes:
        x: The inputs [N, 1].
        y: The targets [N, 1].
        noise: The standard deviation of the noise.
        width: The number H of units of both hidden layers.
    """

    x: Tensor
    y: Tensor
    noise: float
    width: int

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The negative log-likelihood without its constant [R], and its gradient [R, P]."""
        h, x = self.width, self.x[:, 0]
        first, first_bias, second, second_bias, last, last_bias = theta.split([h, h, h * h, h, h, 1], 1)
        second = second.unflatten(1, (h, h))
        one = torch.addcmul(first_bias[:, :, None], first[:, :, None], x).relu_()  # [R, H, N]
        two = torch.baddbmm(second_bias[:, :, None], second, one).relu_()
        residual = (torch.bmm(last[:, None], two)[:, 0] + last_bias - self.y[:, 0]) / self.noise  # [R, N]
        slope = residual / self.noise
        back_two = _through_relu(last[:, :, None] * slope[:, None], two)
        back_one = _through_relu(torch.bmm(second.mT, back_two), one)
        gradient = [
            back_one @ x,
            back_one.sum(2),
            torch.bmm(back_two, one.mT).flatten(1),
            back_two.sum(2),
            torch.bmm(two, slope[:, :, None])[:, :, 0],
            slope.sum(1, keepdim=True),
        ]
        return 0.5 * residual.square().sum(1), torch.cat(gradient, 1)


def _through_relu(gradient: Tensor, outputs: Tensor) -> Tensor:
    """The gradient where the outputs of the units are positive, and zero elsewhere."""
    return torch.ops.aten.threshold_backward(gradient, outputs, 0.0)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Chains:
    """What was drawn.

    Attributes:
        draws: The kept weights at β = 1 [chains, draws, P].
        acceptance: The acceptance rate of transitions at each temperature, after the adaptation.
        exchanges: The acceptance rate of exchanges between neighbours, after the adaptation.
        temperatures: The inverse temperatures that the adaptation found, 1 first.
        step_sizes: The step size of each temperature.
    """

    draws: Tensor
    acceptance: Tensor
    exchanges: Tensor
    temperatures: Tensor
    step_sizes: Tensor


def sample(
    potential: Potential,
    starts: Tensor,
    *,
    precision: float,
    hottest: float,
    warmup: int,
    draws: int,
    thin: int,
    leapfrogs: int,
    generator: torch.Generator,
) -> Chains:
    """Runs the chains.

    Args:
        potential: The negative log-likelihood [R] and its gradient [R, P] at weights [R, P].
        starts: Where the replicas start [chains, temperatures, P].
        precision: The precision of the prior N(0, 1/precision).
        hottest: The least inverse temperature.
        warmup: The number of transitions that adapt step sizes and temperatures; they are thrown away.
        draws: The number of kept draws of each chain.
        thin: The number of transitions for each of them.
        leapfrogs: The number of leapfrog steps of a transition.
        generator: The source of all random numbers.
    """
    chains, levels, size = starts.shape
    ladder = torch.logspace(0, math.log10(hottest), levels, dtype=starts.dtype)
    theta = starts.flatten(0, 1).clone()
    nll, slope = potential(theta)
    steps = _DualAveraging(torch.full((levels,), 1e-3, dtype=starts.dtype))
    accepted, exchanged = torch.zeros(levels), torch.zeros(levels - 1)
    recent, tried = torch.zeros(levels - 1), 0
    kept = torch.empty(chains, draws, size, dtype=starts.dtype)
    rounds = {warmup * k // 6 for k in range(1, 6)}  # when the ladder is adapted; the last sixth is for the step sizes
    for turn in range(warmup + draws * thin):
        beta = ladder.repeat(chains)
        jitter = 0.8 + 0.4 * torch.rand(len(theta), 1, dtype=starts.dtype, generator=generator)
        epsilon = steps.current(turn < warmup).repeat(chains)[:, None] * jitter
        momentum = torch.randn(theta.shape, dtype=starts.dtype, generator=generator)
        before = _energy(theta, nll, beta, precision) + 0.5 * momentum.square().sum(1)
        place, new_nll, new_slope = theta, nll, slope
        heat = beta[:, None]
        momentum = momentum.addcmul(epsilon, torch.addcmul(precision * theta, heat, slope), value=-0.5)
        for k in range(leapfrogs):
            place = torch.addcmul(place, epsilon, momentum)
            new_nll, new_slope = potential(place)
            share = -0.5 if k == leapfrogs - 1 else -1.0
            momentum = momentum.addcmul(epsilon, torch.addcmul(precision * place, heat, new_slope), value=share)
        after = _energy(place, new_nll, beta, precision) + 0.5 * momentum.square().sum(1)
        chance = torch.nan_to_num((before - after).clamp_max(0).exp(), nan=0.0)
        taken = torch.rand(len(theta), dtype=starts.dtype, generator=generator) < chance
        theta = torch.where(taken[:, None], place, theta)
        nll, slope = torch.where(taken, new_nll, nll), torch.where(taken[:, None], new_slope, slope)
        rate = chance.unflatten(0, (chains, levels)).mean(0)
        if turn < warmup:
            steps.update(rate)
        swapped, rates = _exchange(nll.unflatten(0, (chains, levels)), ladder, turn % 2, generator)
        theta, nll, slope = theta[swapped], nll[swapped], slope[swapped]
        recent += rates
        tried += 1
        if turn in rounds:
            # An exchange is tried at every other turn.
            ladder = _even(ladder, 1 - (2 * recent / tried).clamp(0.01, 0.99).to(ladder.dtype))
            recent, tried = torch.zeros(levels - 1), 0
            steps.restart()
        if turn >= warmup:
            accepted += rate
            exchanged += 2 * rates
            if (turn - warmup) % thin == thin - 1:
                kept[:, (turn - warmup) // thin] = theta.unflatten(0, (chains, levels))[:, 0]
    count = draws * thin
    return Chains(kept, accepted / count, exchanged / count, ladder, steps.current(False))


def _energy(theta: Tensor, nll: Tensor, beta: Tensor, precision: float) -> Tensor:
    return beta * nll + 0.5 * precision * theta.square().sum(1)


def _exchange(nll: Tensor, ladder: Tensor, parity: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Which replica every place gets [chains · levels], and the mean chance of every exchange that was tried [levels − 1]."""
    chains, levels = nll.shape
    chance = ((ladder[:-1] - ladder[1:]) * (nll[:, :-1] - nll[:, 1:])).clamp_max(0).exp()
    chance[:, 1 - parity :: 2] = 0  # Neighbouring pairs do not overlap.
    taken = torch.rand(chance.shape, dtype=chance.dtype, generator=generator) < chance
    order = torch.arange(chains * levels).unflatten(0, (chains, levels)).clone()
    left, right = order[:, :-1].clone(), order[:, 1:].clone()
    order[:, :-1] = torch.where(taken, right, order[:, :-1])
    order[:, 1:] = torch.where(taken, left, order[:, 1:])
    return order.flatten(), chance.mean(0).float()


def _even(ladder: Tensor, rejected: Tensor) -> Tensor:
    """The ladder on which every exchange would be rejected equally often (Syed et al. 2022): the sums of rejections, evenly divided."""
    sums = torch.cat([torch.zeros(1, dtype=ladder.dtype), rejected.cumsum(0)])
    wanted = torch.linspace(0, float(sums[-1]), len(ladder), dtype=ladder.dtype)
    place = torch.searchsorted(sums, wanted).clamp(1, len(ladder) - 1)
    share = (wanted - sums[place - 1]) / (sums[place] - sums[place - 1])
    logs = ladder.log()
    found = (logs[place - 1] + share * (logs[place] - logs[place - 1])).exp()
    found[0], found[-1] = ladder[0], ladder[-1]
    return found


class _DualAveraging:
    """Step sizes that reach an acceptance rate, one for each temperature (Hoffman and Gelman 2014, section 3.2)."""

    def __init__(self, first: Tensor):
        self._log, self._mean = first.log(), first.log()
        self.restart()

    def restart(self) -> None:
        """Begins anew around the present step sizes."""
        self._centre, self._error, self._count = self._log + math.log(2.0), torch.zeros_like(self._log), 0

    def update(self, rate: Tensor) -> None:
        """Learns from one transition."""
        self._count += 1
        t, weight = self._count, 1 / (self._count + 10)
        self._error = (1 - weight) * self._error + weight * (_TARGET - rate)
        self._log = self._centre - math.sqrt(t) / 0.05 * self._error
        share = t**-0.75
        self._mean = share * self._log + (1 - share) * self._mean

    def current(self, adapting: bool) -> Tensor:
        """The step sizes: those that are tried while adapting, their averages afterwards."""
        return (self._log if adapting else self._mean).exp()
