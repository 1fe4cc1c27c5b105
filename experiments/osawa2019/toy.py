"""The figure of the poster's introduction: two classes in the plane, by Adam and by VOGN (claim V15)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aftermap import metrics
from aftermap.analysis.figures import finish
from examples.vogn_toy import blobs, surfaces, train
from experiments.framework import Job, Results, Verdict, judged, mean_and_error, paired
from experiments.osawa2019.settings import Toy

__all__ = ["boundary", "figures", "jobs", "verdicts"]

REACH = 8.0  # the grid
NEAR, FAR = 1.0, 4.0  # distances to the nearest datum
CLOSE = 0.35  # half the standard deviation of a cloud


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
    """The mean distance of either boundary's points to the other one, of those near the data."""
    one, other = (b[torch.cdist(b, x).amin(1) < NEAR] for b in (first, second))
    if not len(one) or not len(other):
        return float("nan")
    distances = torch.cdist(one, other)
    return float(torch.cat([distances.amin(1), distances.amin(0)]).mean())


def _clouds(settings: Toy, seed: int) -> dict[str, Any]:
    x, y = blobs(torch.Generator().manual_seed(seed))
    line = torch.linspace(-REACH, REACH, settings.points)
    grid = torch.cartesian_prod(line, line)
    distance = torch.cdist(grid, x).amin(1)
    near, far = distance < NEAR, distance > FAR
    numbers: dict[str, Any] = {"curves": {"line": line, "x": x, "y": y[:, 0]}}
    lines = {}
    for name, kind, start in (("adam", "adam", seed), ("again", "adam", seed + 100), ("vogn", "vogn", seed)):
        net, opt = train(kind, x, y, settings.epochs, start)
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
        if name != "again":
            shape = (settings.points, settings.points)
            shown = [d.logit(eps=1e-6).reshape(shape) for d in draws[:12]] if name == "vogn" else []
            kept = {"entropy": entropy.float().reshape(shape), "mean": surface, "draws": shown}
            numbers["curves"][name] = {k: _rounded(v) for k, v in kept.items()}
    numbers["apart"] = _apart(lines["vogn"], lines["adam"], x)
    numbers["adam_apart"] = _apart(lines["again"], lines["adam"], x)
    return numbers


def _rounded(values: Any) -> Any:
    if isinstance(values, list):
        return [_rounded(v) for v in values]
    return [[round(v, 3) for v in row] for row in values.tolist()]


def verdicts(results: Results) -> list[Verdict]:
    """V15."""
    return judged(results, {"toy/*": results.settings.toy.seeds}, ("V15",), lambda r: [_verdict(r)])


def _verdict(results: Results) -> Verdict:
    apart, usual = results.numbers("toy/*", "apart"), results.numbers("toy/*", "adam_apart")
    far = {m: results.numbers("toy/*", f"far_{m}") for m in ("adam", "vogn")}
    near = {m: results.numbers("toy/*", f"near_{m}") for m in ("adam", "vogn")}
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
    reason = "not so: " + "; ".join(name for name, held in conditions.items() if not held)
    return Verdict.of("V15", list(conditions.values()), ours, reason, len(apart))


def figures(results: Results, folder: Path) -> dict[str, str]:
    """The first set of clouds, as on the poster."""
    value = results.values.get("toy/seed0")
    if value is None:
        return {}
    from matplotlib.figure import Figure

    shown = value["curves"]
    line, x, y = shown["line"], torch.tensor(shown["x"]), torch.tensor(shown["y"])
    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    for place, (name, title) in enumerate((("adam", "Adam"), ("vogn", "VOGN"))):
        ax, drawn = figure.add_subplot(1, 2, place + 1), shown[name]
        shades = ax.pcolormesh(
            line, line, torch.tensor(drawn["entropy"]).T, cmap="Blues", shading="auto", vmin=0, vmax=0.7
        )
        for draw in drawn["draws"]:
            ax.contour(line, line, torch.tensor(draw).T, levels=[0], colors="red", alpha=0.25, linewidths=0.6)
        ax.contour(line, line, torch.tensor(drawn["mean"]).T, levels=[0], colors="red", linewidths=1.6)
        for label, marker in ((0, "o"), (1, "^")):
            ax.scatter(*x[y == label].T, marker=marker, s=9, edgecolor="black", linewidth=0.4)
        ax.set_aspect("equal")
        finish(ax, title=title)
    bar = figure.colorbar(shades, ax=figure.axes)
    bar.set_label("entropy (nats)", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(folder / "toy.png", dpi=110)
    return {
        "toy.png": "Two classes by Adam and by VOGN: entropy in blue, the boundary of the mean in red, those of draws in light red."
    }
