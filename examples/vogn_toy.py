"""Two classes in the plane: the boundary of the mean, boundaries of draws, and a map of the entropy (Osawa et al. 2019, figure 1).

python examples/vogn_toy.py [--epochs 50] [--figure toy.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.optim import VOGN


def blobs(generator: torch.Generator, n: int = 100) -> tuple[Tensor, Tensor]:
    """Five clouds, labelled in turn 0 and 1."""
    centres = torch.rand(5, 2, generator=generator) * 8 - 4
    index = torch.arange(n) % 5
    return centres[index] + 0.7 * torch.randn(n, 2, generator=generator), (index % 2).float()[:, None]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 1))


def train(name: str, x: Tensor, y: Tensor, epochs: int, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    net, generator = network(), torch.Generator().manual_seed(seed)
    if name == "adam":
        opt: Any = torch.optim.Adam(net.parameters(), lr=1e-2)
    else:
        opt = VOGN(net, lr=3e-2, n_data=len(x), mc_samples=5, prior_precision=1.0, damping=1e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(10):

            def closure(index: Tensor = index) -> Tensor:
                loss = F.binary_cross_entropy_with_logits(net(x[index]), y[index])
                if name == "adam":
                    opt.zero_grad()
                    loss.backward()
                return loss

            opt.step(closure)
    return net, opt


@torch.no_grad()
def surfaces(net: nn.Module, opt: Any, grid: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """Probabilities of class 1: of the mean [G], and of draws of the weights [draws, G]."""
    mean = net(grid)[:, 0].sigmoid()
    found = []
    for _ in range(draws if isinstance(opt, VOGN) else 0):
        with opt.sampled_params(train=False):
            found.append(net(grid)[:, 0].sigmoid())
    return mean, torch.stack(found) if found else mean[None]


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--figure", type=Path)
    asked = parser.parse_args(arguments)
    x, y = blobs(torch.Generator().manual_seed(asked.seed))
    line = torch.linspace(-8, 8, 120)
    grid = torch.cartesian_prod(line, line)
    far = grid.norm(dim=1) > 7
    found: dict[str, float] = {}
    drawn: dict[str, tuple[Tensor, Tensor]] = {}
    for name in ("adam", "vogn"):
        net, opt = train(name, x, y, asked.epochs, asked.seed)
        drawn[name] = surfaces(net, opt, grid, 40)
        p = drawn[name][1].mean(0)
        entropy = -(p * p.clamp_min(1e-12).log() + (1 - p) * (1 - p).clamp_min(1e-12).log())
        with torch.no_grad():
            found[f"{name} accuracy"] = float(((net(x) > 0) == (y > 0.5)).float().mean())
        found[f"{name} entropy far away"] = float(entropy[far].mean())
    for key, value in found.items():
        print(f"{key:25s} {value:.3f}")
    if asked.figure:
        draw(x, y, line, drawn, asked.figure)
    return found


def draw(x: Tensor, y: Tensor, line: Tensor, drawn: dict[str, tuple[Tensor, Tensor]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), constrained_layout=True)
    n = len(line)
    for axis, (name, (mean, samples)) in zip(axes, drawn.items(), strict=True):
        p = samples.mean(0).double()
        entropy = -(p * p.clamp_min(1e-12).log() + (1 - p) * (1 - p).clamp_min(1e-12).log())
        shades = axis.pcolormesh(line, line, entropy.reshape(n, n).T, cmap="Blues", shading="auto", vmin=0, vmax=0.7)
        for sample in samples[1:21]:
            axis.contour(line, line, sample.reshape(n, n).T, levels=[0.5], colors="red", alpha=0.15, linewidths=0.8)
        axis.contour(line, line, mean.reshape(n, n).T, levels=[0.5], colors="red", linewidths=2)
        for label, marker in ((0, "o"), (1, "^")):
            chosen = y[:, 0] == label
            axis.scatter(x[chosen, 0], x[chosen, 1], marker=marker, s=22, edgecolor="black", label=f"class {label}")
        axis.set_title({"adam": "Adam", "vogn": "VOGN"}[name])
    axes[0].legend(loc="lower left")
    figure.colorbar(shades, ax=axes, label="entropy of the prediction (nats)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
