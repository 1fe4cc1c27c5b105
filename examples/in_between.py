"""Uncertainty between the data: which posteriors see a gap?

A network with 50 tanh units is trained on a sine with a hole in the middle. Every posterior is asked where the true function
lies, with 95 % bands: inside the data, in the gap between them, and outside. The exact Hessian, the full Gauss-Newton matrix and
Hessian-free Laplace, which forms neither, cover the gap; posteriors without covariance between layers do not.

python examples/in_between.py [--seeds 8] [--queries 21] [--units 50] [--figure in_between.svg]
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.errors import NumericalWarning
from aftermap.hessian_free import HessianFree
from aftermap.likelihoods import Gaussian

NOISE = 0.1
REGIONS = ("gap", "in data", "outside")


def truth(x: Tensor) -> Tensor:
    return -torch.sin(3 * x - 0.3)


def problem(seed: int) -> tuple[Tensor, Tensor]:
    """Two stretches of inputs with a gap between them, and noisy values of the function."""
    x = torch.cat([torch.arange(-150, -70), torch.arange(35, 115)]).double()[:, None] / 100
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, truth(x) + NOISE * noise


def train(x: Tensor, y: Tensor, seed: int, units: int = 50, steps: int = 10_000) -> nn.Module:
    """The network at the minimum of its negative log posterior, prior precision 1, by L-BFGS."""
    model = nn.Sequential(nn.Linear(1, units), nn.Tanh(), nn.Linear(units, 1)).double()
    generator = torch.Generator().manual_seed(100 + seed)
    params = list(model.parameters())
    with torch.no_grad():
        for p in params:
            p.copy_(torch.randn(p.shape, generator=generator) * (1.0 if p.shape[-1] == 1 else 0.2))
    optimiser = torch.optim.LBFGS(
        params,
        max_iter=steps,
        history_size=50,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-6,
        tolerance_change=1e-14,
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = (model(x) - y).square().sum() / (2 * NOISE**2) + 0.5 * sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    optimiser.step(closure)
    optimiser.zero_grad(set_to_none=True)
    return model.eval()


def laplace(**options: object) -> Callable[[nn.Module, list[tuple[Tensor, Tensor]]], object]:
    return lambda model, data: am.Laplace(model, Gaussian(NOISE), **options).fit(data)  # type: ignore[arg-type]


METHODS: dict[str, Callable[[nn.Module, list[tuple[Tensor, Tensor]]], object]] = {
    "exact Hessian": laplace(structure="hessian"),
    "full GGN": laplace(structure="full"),
    "Hessian-free": lambda model, data: HessianFree(model, Gaussian(NOISE), method="newton_cg").fit(data),
    "diagonal GGN": laplace(structure="diagonal"),
    "KFAC": laplace(structure="kron"),
    "KFAC, eq. 9": laplace(structure="kron", damping="factored"),
    "last layer": laplace(structure="full", params="last_layer"),
}


def region_of(x: Tensor) -> list[str]:
    def name(value: float) -> str:
        if -0.7 < value < 0.35:
            return "gap"
        return "in data" if -1.5 <= value <= 1.15 else "outside"

    return [name(float(value)) for value in x[:, 0]]


def bands(model: nn.Module, data: list[tuple[Tensor, Tensor]], asked: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and standard deviation of the function at the inputs asked about, by method."""
    found = {}
    with warnings.catch_warnings():
        # The exact Hessian of the data alone is indefinite; with the prior it is a precision.
        warnings.simplefilter("ignore", NumericalWarning)
        for name, make in METHODS.items():
            prediction = make(model, data).predict(asked)  # type: ignore[attr-defined]
            found[name] = prediction.mean[:, 0], prediction.epistemic[:, 0].sqrt()
    return found


def draw(
    drawn: dict[str, tuple[Tensor, Tensor]], asked: Tensor, data: tuple[Tensor, Tensor], table: dict, path: str
) -> None:
    """One panel for each method: data, truth, mean and band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(2, 4, sharex=True, sharey=True).flatten()
    order = asked[:, 0]
    for panel, (name, (mean, sd)) in zip(panels, drawn.items(), strict=False):
        panel.axvspan(-0.7, 0.35, color="0.93", lw=0)
        panel.fill_between(order, mean - 1.96 * sd, mean + 1.96 * sd, color="#0072B2", alpha=0.3, lw=0)
        panel.plot(order, mean, color="#0072B2", lw=1)
        panel.plot(order, truth(order), color="#D55E00", lw=1, ls="--")
        panel.plot(data[0][:, 0], data[1][:, 0], ".", color="0.3", ms=2)
        panel.set_title(f"{name}: {table[name]['gap']:.0%} of the gap", fontsize=9, loc="left")
        panel.set_ylim(-2.5, 2.5)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].axis("off")
    panels[-1].text(
        0,
        0.5,
        "blue: mean and 95 % band\norange: the truth\ngrey: the gap in the data\n\nshare of the gap where the band\nholds the truth, over all seeds",
        fontsize=9,
        va="center",
    )
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--queries", type=int, default=21)
    parser.add_argument("--units", type=int, default=50)
    parser.add_argument("--figure", default="")
    options = parser.parse_args(arguments)
    asked = torch.linspace(-2, 2, options.queries, dtype=torch.float64)[:, None]
    regions = region_of(asked)
    hits: dict[str, dict[str, list[float]]] = {m: {r: [] for r in REGIONS} for m in METHODS}
    spread: dict[str, dict[str, list[float]]] = {m: {r: [] for r in REGIONS} for m in METHODS}
    first = None
    for seed in range(options.seeds):
        x, y = problem(seed)
        model = train(x, y, seed, options.units)
        found = bands(model, [(x, y)], asked)
        first = first or (found, (x, y))
        for method, (mean, sd) in found.items():
            inside = ((mean - truth(asked)[:, 0]).abs() <= 1.96 * sd).double().tolist()
            for region, hit, width in zip(regions, inside, sd.tolist(), strict=True):
                hits[method][region].append(hit)
                spread[method][region].append(width)

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    table = {m: {r: mean(hits[m][r]) for r in REGIONS} for m in METHODS}
    for m in METHODS:
        table[m].update({f"sd {r}": mean(spread[m][r]) for r in REGIONS})
    print(f"coverage of the true function by 95 % bands, {options.seeds} seeds, and mean standard deviation")
    print(f"{'':16}" + "".join(f"{r:>10}" for r in REGIONS) + "".join(f"{'sd ' + r:>12}" for r in REGIONS))
    for m, row in table.items():
        print(
            f"{m:16}"
            + "".join(f"{row[r]:10.2f}" for r in REGIONS)
            + "".join(f"{row['sd ' + r]:12.3f}" for r in REGIONS)
        )
    if options.figure and first is not None:
        draw(first[0], asked, first[1], table, options.figure)
        print(f"drawn: {options.figure}")
    return table


if __name__ == "__main__":
    main()
