"""Data with something missing in the middle, and small networks trained to a minimum of the negative log posterior."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aftermap.likelihoods import Categorical, Gaussian, Likelihood

__all__ = [
    "GAP",
    "NOISE",
    "Problem",
    "classification_split",
    "gap_split",
    "loss_of",
    "network",
    "regression_split",
    "settle",
    "sine",
    "spread_features",
    "train",
    "with_noise_from_data",
]

GAP, NOISE = (-0.7, 0.35), 0.1  # of the sine
NOISES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8)  # of standardised targets, tried on data that were held out
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "silu": nn.SiLU}


@dataclass(frozen=True)
class Problem:
    """A task.

    Attributes:
        x, y: The training data.
        queries, answers: Inputs that are asked for, with their targets (of the sine: the true function).
        likelihood: The likelihood; the noise of a regression is in it.
        outputs: The number of outputs of a network.
    """

    x: Tensor
    y: Tensor
    queries: Tensor
    answers: Tensor
    likelihood: Likelihood
    outputs: int


def sine(seed: int, count: int) -> Problem:
    """Noisy values of a sine on two intervals; the queries go across the gap between them and beyond both ends."""
    x = torch.cat([torch.arange(-1.5, -0.7 + 1e-9, 0.01), torch.arange(0.35, 1.15 + 1e-9, 0.01)]).double()[:, None]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    queries = torch.linspace(-2, 2, count, dtype=torch.float64)[:, None]

    def f(x: Tensor) -> Tensor:
        return -torch.sin(3 * x - 0.3)

    return Problem(x, f(x) + NOISE * noise, queries, f(queries), Gaussian(noise=NOISE), 1)


def _table(folder: Path, kind: str, name: str) -> tuple[Tensor, Tensor]:
    with np.load(folder / f"uci_{kind}" / f"{name}.npz") as file:
        return torch.from_numpy(file["X"]).double(), torch.from_numpy(file["y"]).double()


def spread_features(folder: Path, name: str, count: int) -> list[int]:
    """Features to make a gap in: spread evenly over those with at least ten different values."""
    x, _ = _table(folder, "regression", name)
    rich = [k for k in range(x.shape[1]) if len(x[:, k].unique()) >= 10]
    return [rich[round(i)] for i in np.linspace(0, len(rich) - 1, count)]


def gap_split(
    folder: Path, name: str, feature: int, seed: int, count: int, most: int = 10**9, held_out: int = 0
) -> Problem:
    """A regression set sorted by a feature, with the middle third taken out: ``count`` of its rows are the queries.

    At most ``most`` rows of the outer thirds are trained on. With ``held_out`` as many of them follow among the queries instead.
    """
    x, y = _table(folder, "regression", name)
    order = torch.argsort(x[:, feature], stable=True)
    third = len(order) // 3
    generator = torch.Generator().manual_seed(seed)
    middle, outer = order[third : len(order) - third], torch.cat([order[:third], order[len(order) - third :]])
    middle = middle[torch.randperm(len(middle), generator=generator)[:count]]
    outer = outer[torch.randperm(len(outer), generator=generator)]
    return _regression(x, y, outer[held_out : held_out + most], torch.cat([middle, outer[:held_out]]))


def regression_split(folder: Path, name: str, seed: int, count: int, most: int = 10**9) -> Problem:
    """A regression set with a random tenth for testing, of which ``count`` rows are the queries."""
    x, y = _table(folder, "regression", name)
    train, test = _tenth(len(x), seed)
    return _regression(x, y, train[:most], test[:count])


def classification_split(folder: Path, name: str, seed: int, count: int, most: int = 10**9) -> Problem:
    """A classification set with a random tenth for testing, of which ``count`` rows are the queries."""
    x, y = _table(folder, "classification", name)
    labels = torch.unique(y, return_inverse=True)[1]
    train, test = _tenth(len(x), seed)
    train, test = train[:most], test[:count]
    x = _standardised(x, x[train])
    return Problem(x[train], labels[train], x[test], labels[test], Categorical(), int(labels.max()) + 1)


def _tenth(count: int, seed: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[count // 10 :], order[: count // 10]


def _regression(x: Tensor, y: Tensor, train: Tensor, test: Tensor) -> Problem:
    x, y = _standardised(x, x[train]), _standardised(y[:, None], y[train, None])
    return Problem(x[train], y[train], x[test], y[test], Gaussian(noise=1.0), 1)


def _standardised(values: Tensor, of: Tensor) -> Tensor:
    return (values - of.mean(0)) / of.std(0).clamp_min(1e-6)


def network(problem: Problem, hidden: Sequence[int], activation: str, seed: int) -> nn.Sequential:
    """A network in float64, fresh from its initialisation."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        width = problem.x.shape[1]
        for size in hidden:
            layers += [nn.Linear(width, size), ACTIVATIONS[activation]()]
            width = size
        return nn.Sequential(*layers, nn.Linear(width, problem.outputs)).double().eval()


def loss_of(problem: Problem, outputs: Tensor) -> Tensor:
    """The negative log-likelihood of the training data, summed, without constants."""
    if isinstance(problem.likelihood, Gaussian):
        return (outputs - problem.y).square().sum() / (2 * float(problem.likelihood.noise) ** 2)
    return F.cross_entropy(outputs, problem.y, reduction="sum")


def train(
    model: nn.Module, problem: Problem, prior: float, steps: int, around: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """Minimises the negative log posterior by L-BFGS over all data, to a largest slope of 3e-5 or until the steps are used up.

    The prior's mean is zero, or the weights ``around``.
    """
    optimiser = torch.optim.LBFGS(
        model.parameters(),
        max_iter=steps,
        max_eval=2 * steps,
        history_size=50,
        line_search_fn="strong_wolfe",
        tolerance_grad=3e-5,
        tolerance_change=1e-15,
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = loss_of(problem, model(problem.x))
        moves = (p if around is None else p - around[n] for n, p in model.named_parameters())
        loss = loss + 0.5 * prior * sum(m.square().sum() for m in moves)
        loss.backward()
        return loss

    optimiser.step(closure)
    return model.requires_grad_(True)


def settle(model: nn.Module, problem: Problem, prior: float, rounds: int = 300) -> nn.Module:
    """Takes damped Newton steps with the absolute values of the curvature, until the gradient vanishes where all curvature is positive.

    L-BFGS may come to rest on a saddle, where there is no Laplace approximation with the exact Hessian.
    """
    names, shapes = zip(*((n, p.shape) for n, p in model.named_parameters()), strict=True)
    sizes = [s.numel() for s in shapes]
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def named(theta: Tensor) -> dict[str, Tensor]:
        return {n: t.reshape(s) for n, t, s in zip(names, theta.split(sizes), shapes, strict=True)}

    def loss(theta: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, named(theta), (problem.x,))
        return loss_of(problem, outputs) + 0.5 * prior * theta.square().sum()

    damping = 1.0
    for _ in range(rounds):
        gradient, hessian = torch.func.grad(loss)(theta), torch.func.hessian(loss)(theta)
        values, vectors = torch.linalg.eigh(hessian)
        size, lowest, here = float(gradient.norm()), vectors[:, 0], float(loss(theta))
        if size < 1e-6 and float(values[0]) > 0:
            break
        slopes = vectors.T @ gradient
        for _ in range(30):
            direction = -vectors @ (slopes / (values.abs() + damping))
            if size < 1e-2 and float(values[0]) <= 0:
                direction = direction - lowest * math.copysign(0.3 / (1 + damping), float(slopes[0]))
            if float(loss(theta + direction)) <= here:
                break
            damping *= 4
        theta, damping = theta + direction, max(damping / 8, 1e-9)
    model.load_state_dict(named(theta))
    return model


def with_noise_from_data(
    problem: Problem, hidden: Sequence[int], activation: str, prior: float, steps: int, seed: int
) -> Problem:
    """The problem with a noise chosen on a fifth of the training data that was held out: the best likelihood of the network."""
    order = torch.randperm(len(problem.x), generator=torch.Generator().manual_seed(seed))
    cut = len(order) // 5
    held, kept = order[:cut], order[cut:]
    found: dict[float, float] = {}
    for noise in NOISES:
        part = replace(problem, x=problem.x[kept], y=problem.y[kept], likelihood=Gaussian(noise=noise))
        model = train(network(part, hidden, activation, seed), part, prior, steps)
        with torch.no_grad():
            errors = (model(problem.x[held]) - problem.y[held]).square().mean().item()
        found[noise] = float(np.log(noise)) + errors / (2 * noise**2)
    return replace(problem, likelihood=Gaussian(noise=min(found, key=found.__getitem__)))
