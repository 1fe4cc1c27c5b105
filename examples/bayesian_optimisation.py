"""Minimise a function that is expensive to evaluate: Bayesian neural networks say where to look next.

Expected improvement and the confidence bound are maximised by gradients of mean and variance in x; Thompson sampling draws a
function with the true correlation between inputs and takes its minimum. Branin has three minima of 0.3979 on [-5, 10] × [0, 15],
Forrester one of −6.0207 on [0, 1].

python examples/bayesian_optimisation.py [--function branin] [--evaluations 40] [--seeds 3] [--out picture.png]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.applications import Optimisation, minimise
from aftermap.laplace import Laplace
from aftermap.likelihoods import Gaussian


def branin(u: Tensor) -> Tensor:
    """On the unit square."""
    x, y = 15 * u[0] - 5, 15 * u[1]
    a, b, c = y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6, 10 * (1 - 1 / (8 * math.pi)), 10
    return a**2 + b * x.cos() + c


def forrester(u: Tensor) -> Tensor:
    return ((6 * u - 2).square() * (12 * u - 4).sin()).sum()


PROBLEMS: dict[str, tuple[Callable[[Tensor], Tensor], int, float]] = {
    "branin": (branin, 2, 0.397887),
    "forrester": (forrester, 1, -6.020740),
}


class Standardised(nn.Module):
    """A network that works on inputs in [-1, 1] and on targets of mean 0 and variance 1, seen from outside in their own units."""

    def __init__(self, core: nn.Module, mean: Tensor, deviation: Tensor):
        super().__init__()
        self.core = core
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, x: Tensor) -> Tensor:
        return self.mean + self.deviation * self.core(2 * x - 1)


class Fit:
    """A small tanh network at its mode under a fixed prior and noise, with the full Gauss-Newton posterior around it."""

    def __init__(self, hidden: int, precision: float, noise: float):
        self.hidden, self.precision, self.noise = hidden, precision, noise

    def __call__(self, x: Tensor, y: Tensor, generator: torch.Generator | None) -> Laplace:
        h, d = self.hidden, x.shape[1]
        core = nn.Sequential(nn.Linear(d, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 1)).double()
        with torch.no_grad():
            for p in core.parameters():
                width = p.shape[1] if p.dim() == 2 else 1
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * (1.5 / width**0.5))
        mean, deviation = y.mean(), y.std() + 1e-6
        target, inputs = (y - mean) / deviation, 2 * x - 1
        optimiser = torch.optim.LBFGS(core.parameters(), max_iter=300, history_size=20, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimiser.zero_grad()
            misfit = (core(inputs) - target).square().sum() / (2 * self.noise**2)
            loss = misfit + 0.5 * self.precision * sum(p.square().sum() for p in core.parameters())
            loss.backward()
            return loss

        optimiser.step(closure)
        optimiser.zero_grad(set_to_none=True)
        model = Standardised(core, mean, deviation).eval()
        likelihood = Gaussian(self.noise * float(deviation))
        laplace = Laplace(model, likelihood, structure="full", prior_precision=self.precision)
        return laplace.fit([(x, y)], progress=False)


def draw(found: dict[str, list[Optimisation]], minimum: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for i, (name, runs) in enumerate(found.items()):
        regret = torch.stack([run.best_so_far - minimum for run in runs]).clamp_min(1e-6)
        axis.semilogy(regret.median(0).values, color=f"C{i}", label=name.replace("_", " "))
        axis.fill_between(
            range(regret.shape[1]), regret.amin(0), regret.amax(0), color=f"C{i}", alpha=0.15, linewidth=0
        )
    axis.set(xlabel="evaluations", ylabel="best value so far − minimum", title="median and range over seeds")
    axis.legend()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--function", choices=PROBLEMS, default="branin")
    parser.add_argument("--evaluations", type=int, default=40)
    parser.add_argument("--initial", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--strategies", nargs="+", default=["expected_improvement", "thompson", "random"])
    parser.add_argument("--out", type=Path, help="picture of the regret")
    options = parser.parse_args(arguments)
    function, dimensions, minimum = PROBLEMS[options.function]
    box: Any = torch.tensor([[0.0, 1.0]] * dimensions, dtype=torch.float64)
    found: dict[str, list[Optimisation]] = {}
    for strategy in options.strategies:
        for seed in range(options.seeds):
            run = minimise(
                function,
                box,
                Fit(options.hidden, precision=0.3, noise=0.005),
                strategy=strategy,
                evaluations=options.evaluations,
                initial=options.initial,
                generator=torch.Generator().manual_seed(seed),
            )
            found.setdefault(strategy, []).append(run)
            point, value = run.best
            shown = ", ".join(f"{u:.3f}" for u in point.tolist())
            print(
                f"{strategy:22} seed {seed}: {value:9.4f} at ({shown}) of the unit box; minimum {minimum:.4f}",
                flush=True,
            )
    print(
        f"\n{'median of best − minimum':26}" + "".join(f"{n:>10}" for n in (10, 20, 30, 40) if n <= options.evaluations)
    )
    for strategy, runs in found.items():
        regret = torch.stack([run.best_so_far - minimum for run in runs]).median(0).values
        line = "".join(f"{float(regret[n - 1]):10.4f}" for n in (10, 20, 30, 40) if n <= options.evaluations)
        print(f"{strategy:26}{line}")
    if options.out:
        draw(found, minimum, options.out)
    return {strategy: [run.best[1] - minimum for run in runs] for strategy, runs in found.items()}


if __name__ == "__main__":
    main()
