"""Hamiltonian Monte Carlo with replica exchange: several chains, each with a ladder of tempered replicas, moved as one batch.

The posterior of a small ReLU network has many modes, between which a chain of its own hardly ever moves. A replica at the inverse temperature β has
the density exp(−β nll(θ) − τ‖θ‖²/2): at small β it is nearly the prior and moves freely, and exchanges between neighbours carry what it
finds to β = 1 (Swendsen and Wang 1986). The draws are those at β = 1; each chain has a ladder of its own, so that R-hat compares independent chains.

NumPy, since a call of PyTorch takes longer than the arithmetic of so small a network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Chains", "Perceptron", "sample"]

_TARGET = 0.8  # the acceptance rate that step sizes are adapted to
Array = npt.NDArray[Any]
Potential = Callable[[Array], tuple[Array, Array]]


class Perceptron:
    """The negative log-likelihood of a perceptron 1-H-H-1 with ReLU units and known noise, with its gradient, for many weights at once.

    Weights [R, P] have the rows of each layer one after the other, each row with its bias at the end; `layers` takes them apart. Arrays
    are in single precision.

    Args:
        x: The inputs [N, 1].
        y: The targets [N, 1].
        noise: The standard deviation of the noise.
        width: The number H of units of both hidden layers.
    """

    def __init__(self, x: Tensor, y: Tensor, noise: float, width: int):
        self._x = np.stack([x[:, 0].numpy(), np.ones(len(x))]).astype(np.float32)  # [2, N]
        self._y, self._noise = y[:, 0].numpy().astype(np.float32), np.float32(noise)
        self._sizes = ((width, 2), (width, width + 1), (1, width + 1))

    def layers(self, theta: Array) -> list[Array]:
        """The weights of each layer with their biases in the last column [R, out, in + 1], as views."""
        ends = np.cumsum([a * b for a, b in self._sizes])[:-1]
        parts = np.split(theta, ends, axis=1)
        return [part.reshape(len(theta), *size) for part, size in zip(parts, self._sizes, strict=True)]

    def flat(self, parameters: list[Tensor]) -> Array:
        """Weights and biases of a network of this shape [P]."""
        pairs = zip(parameters[::2], parameters[1::2], strict=True)
        rows = [torch.cat([weight.detach(), bias.detach()[:, None]], 1).flatten() for weight, bias in pairs]
        return torch.cat(rows).numpy().astype(np.float32)

    def __call__(self, theta: Array) -> tuple[Array, Array]:
        """The negative log-likelihood without its constant [R], and its gradient [R, P]."""
        first, second, last = self.layers(theta)
        width, count = first.shape[1], self._x.shape[1]
        one = np.ones((len(theta), width + 1, count), np.float32)
        two = np.ones_like(one)
        np.maximum(first @ self._x, 0, out=one[:, :-1])
        np.maximum(second @ one, 0, out=two[:, :-1])
        residual = ((last @ two)[:, 0] - self._y) / self._noise
        slope = (residual / self._noise)[:, None]
        back_two = (last[:, 0, :-1, None] * slope) * (two[:, :-1] > 0)
        back_one = (second[:, :, :-1].transpose(0, 2, 1) @ back_two) * (one[:, :-1] > 0)
        parts = (back_one @ self._x.T, back_two @ one.transpose(0, 2, 1), slope @ two.transpose(0, 2, 1))
        gradient = np.concatenate([part.reshape(len(theta), -1) for part in parts], 1)
        return 0.5 * (residual * residual).sum(1), gradient


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

    draws: Array
    acceptance: Array
    exchanges: Array
    temperatures: Array
    step_sizes: Array


def sample(
    potential: Potential,
    starts: Array,
    *,
    precision: float,
    hottest: float,
    warmup: int,
    draws: int,
    thin: int,
    leapfrogs: int,
    seed: int,
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
        seed: The seed of all random numbers.
    """
    random, dtype = np.random.default_rng(seed), starts.dtype
    chains, levels, size = starts.shape
    prior = dtype.type(precision)
    ladder = np.logspace(0, math.log10(hottest), levels)
    theta = starts.reshape(-1, size).copy()
    nll, slope = potential(theta)
    steps = _DualAveraging(np.full(levels, 1e-3))
    accepted, exchanged = np.zeros(levels), np.zeros(levels - 1)
    recent, tried = np.zeros(levels - 1), 0
    kept = np.empty((chains, draws, size), dtype)
    rounds = {warmup * k // 6 for k in range(1, 6)}  # when the ladder is adapted; the last sixth is for the step sizes
    for turn in range(warmup + draws * thin):
        beta = np.tile(ladder, chains)[:, None].astype(dtype)
        jitter = random.uniform(0.8, 1.2, (len(theta), 1))
        epsilon = (np.tile(steps.current(turn < warmup), chains)[:, None] * jitter).astype(dtype)
        momentum = random.standard_normal(theta.shape).astype(dtype)
        before = _energy(theta, nll, momentum, beta, prior)
        place, new_nll, new_slope = theta, nll, slope
        momentum = momentum - 0.5 * epsilon * (beta * slope + prior * theta)
        with np.errstate(over="ignore", invalid="ignore"):  # A trajectory that diverges is rejected.
            for k in range(leapfrogs):
                place = place + epsilon * momentum
                new_nll, new_slope = potential(place)
                share = epsilon if k < leapfrogs - 1 else 0.5 * epsilon
                momentum = momentum - share * (beta * new_slope + prior * place)
            gain = before - _energy(place, new_nll, momentum, beta, prior)
            chance = np.nan_to_num(np.exp(np.minimum(gain, 0)), nan=0.0)
        taken = random.random(len(theta)) < chance
        theta = np.where(taken[:, None], place, theta)
        nll, slope = np.where(taken, new_nll, nll), np.where(taken[:, None], new_slope, slope)
        rate = chance.reshape(chains, levels).mean(0)
        if turn < warmup:
            steps.update(rate)
        order, rates = _exchange(nll.reshape(chains, levels), ladder, turn % 2, random)
        theta, nll, slope = theta[order], nll[order], slope[order]
        recent, tried = recent + rates, tried + 1
        if turn in rounds:
            # An exchange is tried at every other turn.
            ladder = _even(ladder, 1 - np.clip(2 * recent / tried, 0.01, 0.99))
            recent, tried = np.zeros(levels - 1), 0
            steps.restart()
        if turn >= warmup:
            accepted, exchanged = accepted + rate, exchanged + 2 * rates
            if (turn - warmup) % thin == thin - 1:
                kept[:, (turn - warmup) // thin] = theta.reshape(chains, levels, size)[:, 0]
    count = draws * thin
    return Chains(kept, accepted / count, exchanged / count, ladder, steps.current(False))


def _energy(theta: Array, nll: Array, momentum: Array, beta: Array, precision: Any) -> Array:
    """The energy with that of the momentum [R], in double precision."""
    squares = [np.square(part, dtype=np.float64).sum(1) for part in (theta, momentum)]
    return np.asarray(beta[:, 0] * nll.astype(np.float64) + 0.5 * (precision * squares[0] + squares[1]))


def _exchange(nll: Array, ladder: Array, parity: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Which replica every place gets [chains · levels], and the mean chance of every exchange that was tried [levels − 1]."""
    chains, levels = nll.shape
    chance = np.exp(np.minimum((ladder[:-1] - ladder[1:]) * (nll[:, :-1] - nll[:, 1:]), 0))
    chance[:, 1 - parity :: 2] = 0  # Neighbouring pairs do not overlap.
    taken = random.random(chance.shape) < chance
    order = np.arange(chains * levels).reshape(chains, levels)
    left, right = order[:, :-1].copy(), order[:, 1:].copy()
    order[:, :-1] = np.where(taken, right, order[:, :-1])
    order[:, 1:] = np.where(taken, left, order[:, 1:])
    return order.reshape(-1), chance.mean(0)


def _even(ladder: Array, rejected: Array) -> Array:
    """The ladder on which every exchange would be rejected equally often (Syed et al. 2022): the sums of rejections, evenly divided."""
    sums = np.concatenate([[0.0], np.cumsum(rejected)])
    return np.exp(np.interp(np.linspace(0, sums[-1], len(ladder)), sums, np.log(ladder)))


class _DualAveraging:
    """Step sizes that reach an acceptance rate, one for each temperature (Hoffman and Gelman 2014, section 3.2)."""

    def __init__(self, first: Array):
        self._log, self._mean = np.log(first), np.log(first)
        self.restart()

    def restart(self) -> None:
        """Begins anew around the present step sizes."""
        self._centre, self._error, self._count = self._log + math.log(2.0), np.zeros_like(self._log), 0

    def update(self, rate: Array) -> None:
        """Learns from one transition."""
        self._count += 1
        t, weight = self._count, 1 / (self._count + 10)
        self._error = (1 - weight) * self._error + weight * (_TARGET - rate)
        self._log = self._centre - math.sqrt(t) / 0.05 * self._error
        share = t**-0.75
        self._mean = share * self._log + (1 - share) * self._mean

    def current(self, adapting: bool) -> Array:
        """The step sizes: those that are tried while adapting, their averages afterwards."""
        return np.exp(self._log if adapting else self._mean)
