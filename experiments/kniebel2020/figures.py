"""The figures of "Where is the uncertainty?", from the results alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from aftermap.analysis.figures import CATEGORIES, axes, filter_maps, finish, save_svg
from experiments.framework import Results
from experiments.kniebel2020 import images, moves
from experiments.kniebel2020.layers import PRIORS

__all__ = ["draw"]

LABELS = {"depth": "hidden layers", "width": "hidden units", "length": "epochs", "size": "training images"}


def draw(results: Results, folder: Path) -> dict[str, str]:
    """Writes the figures whose jobs are done, and returns their captions."""
    captions: dict[str, str] = {}
    done = images.complete(results)
    maps = {
        p: results.values[f"images/{p}/seed0"].get("curves", {}) for p in done if f"images/{p}/seed0" in results.values
    }
    if any("image" in m for m in maps.values()):
        _pixels({p: m for p, m in maps.items() if "image" in m}).savefig(folder / "pixels.png", dpi=110)
        captions["pixels.png"] = (
            "First layer of the multilayer perceptrons, pixel by pixel. Above: the mean training image. Below: contraction of the weights that "
            "start at the pixel, mean over hidden units; 0 is the prior, 1 is determined by the data."
        )
    convolutions = {p: m for p, m in maps.items() if "weight" in m}
    if convolutions:
        pair, found = next(iter(convolutions.items()))
        tensors = [torch.tensor(found[k], dtype=torch.float64) for k in ("weight", "deviation", "contraction")]
        figure = filter_maps(tensors[0], tensors[1], contraction=tensors[2], title=f"first layer, {pair.split('/')[0]}")
        figure.savefig(folder / "filters.png", dpi=110)
        captions["filters.png"] = (
            "Filters of the first convolution, and the posterior standard deviation of each of their weights."
        )
    if all(results.among(f"moves/{axis}/*/*") for axis in moves.AXES):
        (folder / "moves.svg").write_text(save_svg(_moves(results)), encoding="utf-8")
        captions["moves.svg"] = (
            "Where the uncertainty of a multilayer perceptron sits (0: first layer, 1: last layer) as one thing is varied; mean and standard "
            "error over seeds. Full lines: the prior of training. Dashed: prior precisions tuned by layer."
        )
    pairs = [p for p in done if p.endswith("/cnn")]
    if pairs:
        (folder / "shares.svg").write_text(save_svg(_shares(results, pairs)), encoding="utf-8")
        captions["shares.svg"] = (
            "Convolutional networks: each layer's share of the epistemic uncertainty, on test images and on images of other sets; prior of "
            "training, mean over seeds."
        )
    if done:
        (folder / "confidence.svg").write_text(save_svg(_confidence(results, done)), encoding="utf-8")
        captions["confidence.svg"] = (
            "Mean confidence on images of other sets: the network, and tuned Laplace with Kronecker factors. Chance is .1."
        )
    curves = results.values.get("iris/mlp/seed0", {}).get("curves")
    if curves:
        (folder / "iris.svg").write_text(save_svg(_iris(curves)), encoding="utf-8")
        captions["iris.svg"] = (
            "Iris, first seed: marginal standard deviation of each weight of the multilayer perceptron, against that of the full matrix."
        )
    return captions


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _pixels(maps: dict[str, dict[str, Any]]) -> Any:
    figure = _figure(1.7 * len(maps) + 0.6, 3.6)
    grid = figure.subplots(2, len(maps), squeeze=False)
    for column, (pair, found) in enumerate(maps.items()):
        for row, (key, colours, top) in enumerate((("image", "Greys", None), ("contraction", "viridis", None))):
            values = torch.tensor(found[key]).reshape(28, 28).numpy()
            ax = grid[row, column]
            picture = ax.imshow(values, cmap=colours, vmin=0.0, vmax=top)
            ax.set_xticks([])
            ax.set_yticks([])
            if row == 0:
                ax.set_title(pair.split("/")[0], fontsize=9)
            else:
                bar = figure.colorbar(picture, ax=ax, orientation="horizontal", shrink=0.9, pad=0.03, aspect=14)
                bar.ax.tick_params(labelsize=6)
                bar.outline.set_visible(False)
    return figure


def _moves(results: Results) -> Any:
    figure = _figure(7.0, 4.6)
    grid = figure.subplots(2, 2).flatten()
    sets = results.settings.moves.sets
    curves = [moves.curve(results, a, s, f"centre_{p}") for a in moves.AXES for s in sets for p in PRIORS]
    top = 1.1 * max(max(values) for found in curves for values in found.values())
    for ax, axis in zip(grid, moves.AXES, strict=True):
        for colour, name in zip(CATEGORIES, results.settings.moves.sets, strict=False):
            for prior, dash in zip(PRIORS, ("-", (0, (4, 1.6))), strict=True):
                found = moves.curve(results, axis, name, f"centre_{prior}")
                x = sorted(found)
                y = [sum(found[v]) / len(found[v]) for v in x]
                error = [_error(found[v]) for v in x]
                label = name if prior == "trained" else None
                ax.errorbar(
                    x, y, error, color=colour, linestyle=dash, linewidth=1.2, marker="o", markersize=2.5, label=label
                )
        if axis != "depth":
            ax.set_xscale("log")
        values = sorted(moves.curve(results, axis, results.settings.moves.sets[0], "centre_trained"))
        ax.set_xticks(values, [str(v) for v in values])
        ax.set_xticks([], minor=True)
        ax.set_ylim(0, top)
        finish(ax, x=LABELS[axis], y="centre", legend=axis == "depth")
    return figure


def _error(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1) / len(values))


def _shares(results: Results, pairs: list[str]) -> Any:
    figure = _figure(1.9 * len(pairs) + 0.8, 3.0)
    grid = figure.subplots(1, len(pairs), squeeze=False, sharey=True)[0]
    for ax, pair in zip(grid, pairs, strict=True):
        rows = [v["layers"]["trained"] for _, v in sorted(results.among(f"images/{pair}/*").items())]
        groups = list(rows[0])
        kinds = rows[0]["test"]["kinds"]
        bottom = [0.0] * len(groups)
        for place, kind in enumerate(kinds):
            heights = [sum(r[g]["shares"][place] for r in rows) / len(rows) for g in groups]
            label = f"{place + 1} {'convolution' if kind == 'Conv2d' else 'linear'}"
            ax.bar(range(len(groups)), heights, 0.8, bottom=bottom, color=CATEGORIES[place], label=label)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        ax.set_xticks(range(len(groups)), [g.removesuffix("-mnist") for g in groups], rotation=35, ha="right")
        ax.set_ylim(0, 1)
        finish(ax, title=pair.split("/")[0], y="share" if ax is grid[0] else "")
    # The networks have the same layers: one legend, beside the last of them.
    grid[-1].legend(fontsize=6, frameon=False, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def _confidence(results: Results, pairs: list[str]) -> Any:
    labels, network, kron = [], [], []
    for pair in pairs:
        rows = [v["methods"] for _, v in sorted(results.among(f"images/{pair}/*").items())]
        for other in rows[0]["network"]["others"]:
            labels.append(f"{pair.replace('/', ', ')} on {other}")
            for method, into in (("network", network), ("kron", kron)):
                into.append(sum(r[method]["others"][other]["confidence"] for r in rows) / len(rows))
    ax = axes(width=5.6, height=0.19 * len(labels) + 0.8)
    places = list(range(len(labels)))[::-1]
    for left, right, place in zip(network, kron, places, strict=True):
        ax.plot([left, right], [place, place], color="0.8", linewidth=1.2, zorder=1)
    ax.plot(network, places, "o", color=CATEGORIES[1], markersize=4, label="network")
    ax.plot(kron, places, "o", color=CATEGORIES[0], markersize=4, label="Laplace, Kronecker")
    ax.axvline(0.1, color="0.5", linewidth=0.8, label="chance")
    ax.set_yticks(places, labels)
    ax.set_xlim(0, 1)
    ax.set_ylim(bottom=-4)  # room for the legend
    return finish(ax, x="mean confidence", legend="lower right").figure


def _iris(curves: dict[str, list[float]]) -> Any:
    ax = axes(width=4.2)
    names = {"diagonal": "diagonal", "kron": "Kronecker", "hmc": "HMC"}
    for colour, mark, (key, label) in zip(CATEGORIES, "sov", names.items(), strict=False):
        ax.plot(curves["full"], curves[key], mark, color=colour, markersize=3.5, alpha=0.7, label=label)
    ends = [min(curves["full"]), max(curves["full"])]
    ax.plot(ends, ends, color="0.5", linewidth=0.8)
    return finish(ax, x="standard deviation, full matrix", y="standard deviation", legend=True).figure
