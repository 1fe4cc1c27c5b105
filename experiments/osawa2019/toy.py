"""The figure of the poster's introduction: two classes in the plane, by Adam and by VOGN (claim V15)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from aftermap import metrics
from aftermap.analysis.figures import finish
from aftermap.optim import VOGN
from examples.vogn_toy import blobs, network, surfaces
from experiments.framework import Job, Results, Verdict, judged, mean_and_error, not_met, paired
from experiments.osawa2019.settings import Toy

__all__ = ["boundary", "figures", "jobs", "verdicts"]

REACH = 8.0  # the grid
NEAR, FAR = 1.0, 4.0  # distances to the nearest datum
CLOSE = 0.35  # half the standard deviation of a cloud
# What is added to the seed, and the temperature of VOGN: Adam twice, VOGN, and VOGN with a posterior a tenth as wide.
RUNS: dict[str, tuple[int, float | None]] = {
    "adam": (0, None),
    "again": (100, None),
    "vogn": (0, 1.0),
    "cold": (0, 0.01),
}


def jobs(settings: Toy) -> Iterator[Job]:
    """One job for each set of clouds."""
    for seed in range(settings.seeds):
        yield Job(f"toy/seed{seed}", partial(_clouds, settings, seed))


def boundary(surface: Tensor, line: Tensor) -> Tensor:
    """Points [P, 2] where a surface [G, G] over line × line crosses zero, interpolated along the edges of the grid."""
    found = []
    for values, along_rows in ((surface, False), (surface.T, True)):
        a, b = values[:-1], values[1:]
        where = ((a > 0) != (b > 0)).nonzero()
        share = (a / (a - b))[where[:, 0], where[:, 1]]
        first = line[where[:, 0]] + share * (line[1] - line[0])
        second = line[where[:, 1]]
        found.append(torch.stack([second, first] if along_rows else [first, second], 1))
    return torch.cat(found)


def _apart(first: Tensor, second: Tensor, x: Tensor) -> float:
    """The mean distance of either boundary's points to the other one, of those near the data; without any, all of the grid."""
    one, other = (b[torch.cdist(b, x).amin(1) < NEAR] for b in (first, second))
    if not len(one) or not len(other):
        return 2 * REACH
    distances = torch.cdist(one, other)
    return float(torch.cat([distances.amin(1), distances.amin(0)]).mean())


def _clouds(settings: Toy, seed: int) -> dict[str, Any]:
    x, y = blobs(torch.Generator().manual_seed(seed))
    line = torch.linspace(-REACH, REACH, settings.points)
    grid = torch.cartesian_prod(line, line)
    distance = torch.cdist(grid, x).amin(1)
    near, far = distance < NEAR, distance > FAR
    numbers: dict[str, Any] = {"curves": {"x": x, "y": y[:, 0]} if seed == 0 else {}}
    lines = {}
    for name, (start, temperature) in RUNS.items():
        net, opt = _train(settings, x, y, seed + start, temperature)
        _, draws = surfaces(net, opt, grid, settings.samples)
        p = draws.double().mean(0)
        entropy = metrics.entropy(torch.stack([p, 1 - p], 1))
        with torch.no_grad():
            surface = net(grid)[:, 0].reshape(settings.points, settings.points)
            right = float(((net(x) > 0) == (y > 0.5)).float().mean())
        lines[name] = boundary(surface, line)
        numbers |= {
            f"accuracy_{name}": right,
            f"near_{name}": float(entropy[near].mean()),
            f"far_{name}": float(entropy[far].mean()),
        }
        if name in ("adam", "vogn") and seed == 0:
            shown = [boundary(d.reshape_as(surface) - 0.5, line) for d in draws[:12]] if name == "vogn" else []
            coarse = entropy.reshape_as(surface)[::2, ::2]
            numbers["curves"][name] = {"entropy": coarse, "mean": lines[name], "draws": [d.tolist() for d in shown]}
    return numbers | {f"apart_{name}": _apart(lines[name], lines["adam"], x) for name in RUNS if name != "adam"}


def _train(settings: Toy, x: Tensor, y: Tensor, seed: int, temperature: float | None) -> tuple[nn.Module, Any]:
    """A network by Adam, or by VOGN where there is a temperature."""
    torch.manual_seed(seed)
    net, generator = network(), torch.Generator().manual_seed(seed)
    opt: Any = torch.optim.Adam(net.parameters(), lr=1e-2)
    if temperature is not None:
        opt = VOGN(net, lr=3e-2, n_data=len(x), mc_samples=5, damping=1e-3, temperature=temperature)
    for _ in range(settings.epochs):
        for index in torch.randperm(len(x), generator=generator).split(10):

            def closure(index: Tensor = index) -> Tensor:
                loss = F.binary_cross_entropy_with_logits(net(x[index]), y[index])
                if temperature is None:
                    opt.zero_grad()
                    loss.backward()
                return loss

            opt.step(closure)
    return net, opt


def verdicts(results: Results) -> list[Verdict]:
    """V15."""
    return judged(results, {"toy/*": results.settings.toy.seeds}, ("V15",), lambda r: [_verdict(r)])


def _verdict(results: Results) -> Verdict:
    apart, usual, cold = (results.numbers("toy/*", f"apart_{name}") for name in ("vogn", "again", "cold"))
    far = {m: results.numbers("toy/*", f"far_{m}") for m in ("adam", "vogn")}
    near = {m: results.numbers("toy/*", f"near_{m}") for m in ("adam", "vogn")}
    right = {m: results.text("toy/*", f"accuracy_{m}", 2) for m in ("adam", "vogn", "cold")}
    conditions = {
        f"boundaries less than {CLOSE} apart near the data": sum(apart) / len(apart) < CLOSE,
        "VOGN more uncertain far away than near": paired(far["vogn"], near["vogn"]).higher,
        "VOGN more uncertain far away than Adam": paired(far["vogn"], far["adam"]).higher,
    }
    ours = (
        f"boundaries near the data are {mean_and_error(apart, 2)} apart (those of two networks by Adam {mean_and_error(usual, 2)}; the "
        f"clouds' standard deviation is 0.7); entropy near and far: Adam {mean_and_error(near['adam'], 2)} and "
        f"{mean_and_error(far['adam'], 2)}, VOGN {mean_and_error(near['vogn'], 2)} and {mean_and_error(far['vogn'], 2)} nats"
    )
    reason = (
        not_met(conditions)
        + f". With 100 data for 513 weights the posterior is broad, and the network at its mean is right for {right['vogn']} of the data "
        f"(Adam {right['adam']}); at a temperature of {RUNS['cold'][1]:g} it is for {right['cold']}, with boundaries "
        f"{mean_and_error(cold, 2)} apart"
    )
    return Verdict.of("V15", list(conditions.values()), ours, reason, len(apart))


def figures(results: Results, folder: Path) -> dict[str, str]:
    """The first set of clouds, as on the poster."""
    value = results.values.get("toy/seed0")
    if value is None:
        return {}
    from matplotlib.figure import Figure

    shown = value["curves"]
    x, y = torch.tensor(shown["x"]), torch.tensor(shown["y"])
    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    for place, (name, title) in enumerate((("adam", "Adam"), ("vogn", "VOGN"))):
        ax, drawn = figure.add_subplot(1, 2, place + 1), shown[name]
        ends = (-REACH, REACH, -REACH, REACH)
        entropy = torch.tensor(drawn["entropy"]).T
        shades = ax.imshow(
            entropy, extent=ends, origin="lower", cmap="Blues", vmin=0, vmax=0.7, interpolation="bilinear"
        )
        for points, size, alpha in (*((d, 0.6, 0.25) for d in drawn["draws"]), (drawn["mean"], 2.5, 1.0)):
            across, up = zip(*points, strict=True) if points else ((), ())
            ax.plot(across, up, "o", color="red", markersize=size, alpha=alpha, markeredgewidth=0)
        for label, marker in ((0, "o"), (1, "^")):
            ax.scatter(*x[y == label].T, marker=marker, s=9, edgecolor="black", linewidth=0.4)
        ax.set(xlim=(-REACH, REACH), ylim=(-REACH, REACH))
        finish(ax, title=title)
    bar = figure.colorbar(shades, ax=figure.axes)
    bar.set_label("entropy (nats)", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(folder / "toy.png", dpi=110)
    with Image.open(folder / "toy.png") as picture:  # A palette takes a quarter of the bytes, and nobody sees it.
        picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(folder / "toy.png", optimize=True)
    return {
        "toy.png": "Two classes by Adam and by VOGN: entropy in blue, the boundary of the mean in red, those of draws in light red."
    }
