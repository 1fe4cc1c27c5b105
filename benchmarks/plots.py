"""The pictures of the curvature benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.curvature import TARGETS, best_peer
from benchmarks.methods import QUANTITIES

__all__ = ["plot_ratios", "plot_scaling"]

OURS, PEER, INK = "#2a6f97", "#c9ced6", "#333333"


def plot_ratios(results: dict[str, Any], path: Path) -> None:
    """Bars for each network and quantity: aftermap beside the fastest peer, in u."""
    models = results["models"]
    figure, axes = plt.subplots(1, len(models), figsize=(3.1 * len(models) + 1.6, 3.6), sharey=True, squeeze=False)
    names = list(QUANTITIES)
    for axis, (model, found) in zip(axes[0], models.items(), strict=True):
        for row, quantity in enumerate(names):
            methods = found["quantities"].get(quantity, {})
            ours = [e["ratio"] for e in methods.values() if e["library"] == "aftermap" and "ratio" in e]
            peer, target = best_peer(methods), TARGETS.get((model, quantity))
            if ours:
                _bar(axis, row - 0.2, ours[0], OURS, f"{ours[0]:.1f}", target or 0.0)
            if peer:
                _bar(axis, row + 0.2, peer[1], PEER, f"{peer[1]:.1f}  {methods[peer[0]]['library']}")
            elif ours:
                axis.text(1, row + 0.2, " no peer can", va="center", fontsize=7, color=INK)
            if target:
                axis.plot([target, target], [row - 0.42, row + 0.02], color="black", linewidth=1.2)
        axis.set_xscale("log")
        axis.set_xlim(1, 300)
        axis.set_title(f"{model}\nu = {found['u_ms']:.0f} ms", fontsize=9)
        axis.set_xlabel("cost in u", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_yticks(range(len(names)), [QUANTITIES[q] for q in names], fontsize=7)
    axes[0][0].invert_yaxis()
    figure.suptitle(
        "One fit in units of a forward and backward pass (blue: aftermap; grey: fastest peer; line: target)", fontsize=9
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bar(axis: Any, height: float, value: float, colour: str, text: str, target: float = 0.0) -> None:
    axis.barh(height, value, 0.38, color=colour)
    axis.text(max(value, target), height, " " + text, va="center", fontsize=7, color=INK)


def plot_scaling(results: dict[str, Any], path: Path) -> None:
    """Cost over the number of data and of classes: exact vectors are linear in both, one random vector is flat in C."""
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.0))
    for axis, over in zip(axes, ("data", "classes"), strict=True):
        found = results["scaling"][over]
        for kind, colour in (("exact", OURS), ("rademacher", "#e07a5f")):
            axis.plot(found["x"], found[kind], "o-", color=colour, markersize=4, label=kind)
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.set_xlabel(
            {"data": "number of data N (C = 10)", "classes": "number of classes C (N = 128)"}[over], fontsize=8
        )
        axis.set_ylabel("milliseconds", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle("Kronecker factors of LeNet-5", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
