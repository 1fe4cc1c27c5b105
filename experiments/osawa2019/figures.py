"""The figures of the networks on CIFAR-10, from the results alone."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean
from typing import Any

from aftermap.analysis.figures import CATEGORIES, finish, save_svg
from experiments.framework import Results
from experiments.osawa2019.settings import VARIANTS
from experiments.osawa2019.training import NAMES
from experiments.osawa2019.verdicts import NETWORKS

__all__ = ["draw"]

_COLOURS = dict(zip(NAMES, CATEGORIES, strict=True))


def draw(results: Results, folder: Path) -> dict[str, str]:
    """Writes every figure whose jobs are done, and returns captions."""
    drawn = {
        "convergence.svg": (
            _convergence(results),
            "Accuracy on held-out training images by epoch: all optimisers on LeNet-5 (mean over seeds), and what momentum and "
            "BatchNorm do for VOGN on the residual network.",
        ),
        "calibration.svg": (
            _calibration(results),
            "Calibration on test images, first seed: the share of right answers against confidence.",
        ),
        "entropy.svg": (
            _entropy(results),
            "Entropy of predictions for test images of CIFAR-10 (filled) and for house numbers (line), first seed.",
        ),
    }
    found = {name: (figure, caption) for name, (figure, caption) in drawn.items() if figure is not None}
    for name, (figure, _) in found.items():
        (folder / name).write_text(save_svg(figure), encoding="utf-8")
    return {name: caption for name, (_, caption) in found.items()}


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _curve(results: Results, network: str, method: str) -> list[float]:
    runs = [[e["accuracy"] for e in v["epochs"]] for v in results.among(f"{network}/{method}/*").values()]
    return [mean(epoch) for epoch in zip(*runs, strict=True)]


def _convergence(results: Results) -> Any:
    lenet = [m for m in results.settings.lenet.methods if m != "bbb" and results.among(f"lenet/{m}/*")]
    if not lenet:
        return None
    figure = _figure(7.0, 2.7)
    ax = figure.add_subplot(1, 2, 1)
    for method in lenet:
        curve = _curve(results, "lenet", method)
        ax.plot(range(1, len(curve) + 1), curve, lw=1.2, color=_COLOURS[method], label=NAMES[method])
    backprop = _curve(results, "lenet", "bbb")
    if backprop:
        ax.plot([results.settings.lenet.epochs], backprop, "o", ms=4, color=_COLOURS["bbb"], label=NAMES["bbb"])
    finish(ax, title="LeNet-5", x="epoch", y="accuracy, held-out images", legend=True)
    ax = figure.add_subplot(1, 2, 2)
    shown = {"vogn": "momentum and BatchNorm", **{k: v for k, v in VARIANTS.items() if k.startswith("no_")}}
    for colour, (method, label) in zip(CATEGORIES, shown.items(), strict=False):
        curve = _curve(results, "residual", method)
        if curve:
            ax.plot(range(1, len(curve) + 1), curve, lw=1.2, color=colour, label=label)
    finish(ax, title="VOGN, residual network", x="epoch", legend="lower right")
    ax.set_ylim(bottom=0)
    return figure


def _calibration(results: Results) -> Any:
    if not results.among("lenet/vogn/*"):
        return None
    figure = _figure(7.6, 2.8)
    for place, part in enumerate(results.settings.pictures()):
        ax = figure.add_subplot(1, 3, place + 1)
        ax.plot([0, 1], [0, 1], color="0.6", lw=0.8)
        for method in part.methods:
            value = results.values.get(f"{part.network}/{method}/seed0")
            if value is None:
                continue
            bins = value["curves"]
            least = 0.005 * sum(bins["count"])
            points = [
                (c, a)
                for c, a, n in zip(bins["confidence"], bins["accuracy"], bins["count"], strict=True)
                if n and n >= least
            ]
            if points:
                ax.plot(*zip(*points, strict=True), "o-", ms=2.5, lw=1, color=_COLOURS[method], label=NAMES[method])
        ax.set_xlim(0, 1)
        ax.set_ylim(0, 1)
        finish(
            ax,
            title=NETWORKS[part.network],
            x="confidence",
            y="share of right answers" if place == 0 else "",
            legend=place == 0,
        )
    return figure


def _entropy(results: Results) -> Any:
    if not results.among("lenet/vogn/*"):
        return None
    figure = _figure(7.6, 3.6)
    parts = results.settings.pictures()
    for row, method in enumerate(("adam", "vogn")):
        for column, part in enumerate(parts):
            ax = figure.add_subplot(2, len(parts), len(parts) * row + column + 1)
            value = results.values.get(f"{part.network}/{method}/seed0")
            if value is not None:
                curves = value["curves"]
                width = math.log(10) / len(curves["test"])
                middles = [(k + 0.5) * width for k in range(len(curves["test"]))]
                ax.fill_between(
                    middles, curves["test"], step="mid", color=_COLOURS[method], alpha=0.4, lw=0, label="CIFAR-10"
                )
                ax.step(middles, curves["svhn"], where="mid", color="black", lw=1, label="SVHN")
            finish(
                ax,
                title=f"{NETWORKS[part.network]}, {NAMES[method]}",
                x="entropy (nats)" if row else "",
                y="" if column else "density",
                legend=not row and not column,
            )
    return figure
