"""Occam's razor without validation data: how deep and how wide should a network be?

    python examples/occams_razor.py [--depths 1 5 20] [--widths 5 30 100] [--epochs 3000] [--figure occams_razor.svg]

y = x sin 6x with noise of 0.1, a gap in the middle. Networks of several depths and widths are trained by evidence; the table ranks
them by their log evidence and shows the log-likelihood of test data beside it, which had no part in it. Five minutes; less with
--epochs 800 or without the twenty layers.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from torch import Tensor, nn

from aftermap.analysis.figures.style import CATEGORIES, axes, finish
from aftermap.errors import StatisticalWarning
from aftermap.laplace import Ranking, select


def data(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(count, 1, generator=generator) - 1
    x = x[(x[:, 0] < -0.25) | (x[:, 0] > 0.35)]
    return [(x, x * torch.sin(6 * x) + 0.1 * torch.randn(x.shape, generator=generator))]


def network(depth: int, width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(1, width), nn.Tanh()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def ranked(sizes: dict[str, tuple[int, int]], epochs: int) -> Ranking:
    factories = {name: (lambda size=size: network(*size)) for name, size in sizes.items()}
    with warnings.catch_warnings():
        # The table has a column for it.
        warnings.filterwarnings("ignore", ".*not at a mode", StatisticalWarning)
        return select(
            factories,
            data(120, 0),
            "regression",
            test=data(800, 1),
            generator=torch.Generator().manual_seed(0),
            epochs=epochs,
            lr=1e-2,
            frequency=max(1, epochs // 10),
        )


def panel(ax: object, ranking: Ranking, sizes: dict[str, int], name: str) -> None:
    """Evidence and test likelihood, each per datum."""
    count = sum(len(y) for _, y in data(120, 0))
    places = list(range(len(sizes)))
    evidence = [ranking[k].log_evidence / count for k in sizes]
    test = [ranking[k].test_log_likelihood for k in sizes]
    ax.plot(places, evidence, "o-", color=CATEGORIES[0], label="log evidence / N", markersize=4)  # type: ignore[attr-defined]
    ax.plot(places, test, "s--", color=CATEGORIES[1], label="test log-likelihood", markersize=4)  # type: ignore[attr-defined]
    ax.set_xticks(places, [str(v) for v in sizes.values()])  # type: ignore[attr-defined]
    finish(ax, x=name, y="nats per datum", legend=True)


def main(arguments: list[str] | None = None) -> tuple[Ranking, Ranking]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 5, 30, 100])
    parser.add_argument("--epochs", type=int, default=3000)
    parser.add_argument("--figure", default=None, help="where to draw it; none by default")
    options = parser.parse_args(arguments)
    depths = {f"{d} hidden layers" if d > 1 else "1 hidden layer": d for d in options.depths}
    widths = {f"width {w}": w for w in options.widths}
    by_depth = ranked({name: (d, 30) for name, d in depths.items()}, options.epochs)
    print(f"depth, at width 30\n{by_depth}\n", flush=True)
    by_width = ranked({name: (1, w) for name, w in widths.items()}, options.epochs)
    print(f"width, at one hidden layer\n{by_width}")
    if options.figure:
        left = axes(width=7.0, height=2.6)
        figure = left.figure
        figure.clf()
        first, second = figure.subplots(1, 2)
        panel(first, by_depth, depths, "hidden layers")
        panel(second, by_width, widths, "width of the one hidden layer")
        figure.savefig(options.figure)
        print(f"\ndrawn in {options.figure}")
    return by_depth, by_width


if __name__ == "__main__":
    main()
