"""The figures of Hessian-free Laplace, from the results alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aftermap.analysis.figures import CATEGORIES, axes, finish, save_svg
from experiments.framework import Results
from experiments.mcinerney2024.problems import GAP

__all__ = ["draw"]

_SHOWN = ("hfl", "ggn", "kron", "last_layer")
_MARKS = {"hfl": "o", "ggn": "s", "kron": "^", "last_layer": "v"}


def draw(results: Results, folder: Path, names: Mapping[str, str]) -> dict[str, str]:
    """Writes the figures and returns their captions."""
    drawn = {
        "variances.svg": (
            _variances(results, names),
            "The sine: standard deviation of each method against that of the exact Hessian, at all queries of all seeds.",
        ),
        "in_between.svg": (
            _in_between(results, names),
            "The sine, first seed: the network and twice its standard deviation. There are no data in the shaded gap.",
        ),
        "gap_coverage.svg": (
            _gap_coverage(results, names),
            "UCI sets whose middle third by one feature was left out: coverage of 95 % intervals there, mean over gaps.",
        ),
    }
    if results.among("wide/*"):
        drawn["amortised.svg"] = (
            _amortised(results),
            "The large network, all seeds: standard deviations by two fine-tunings per query, and roots of the amortised score, "
            "against the exact Hessian. Each is divided by its mean.",
        )
    for file, (figure, _) in drawn.items():
        (folder / file).write_text(save_svg(figure), encoding="utf-8")
    return {file: caption for file, (_, caption) in drawn.items()}


def _variances(results: Results, names: Mapping[str, str]) -> Any:
    ax = axes(width=4.5)
    values = list(results.among("sine/*").values())
    exact = [v for value in values for v in value["sd_exact"]]
    for colour, method in zip(CATEGORIES, _SHOWN, strict=False):
        ours = [float("nan") if v is None else v for value in values for v in value[f"sd_{method}"]]
        ax.plot(exact, ours, _MARKS[method], color=colour, markersize=3, alpha=0.6, label=names[method])
    ends = [min(exact), max(exact)]
    ax.plot(ends, ends, color="0.5", linewidth=0.8)
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):  # less than two decades, whose small ticks would otherwise be labelled, too
        axis.set_minor_formatter("")
    return finish(ax, x="standard deviation, exact Hessian", y="standard deviation", legend=True).figure


def _in_between(results: Results, names: Mapping[str, str]) -> Any:
    ax = axes(width=4.5)
    value = results.values["sine/seed0"]
    x, mean = value["x"], value["mean"]
    ax.axvspan(*GAP, color="0.93")
    ax.plot(x, mean, color="black", linewidth=1, label="network")
    for colour, method in zip(CATEGORIES, _SHOWN, strict=False):
        sd = [float("nan") if v is None else v for v in value[f"sd_{method}"]]
        for sign in (-1, 1):
            label = names[method] if sign == 1 else None
            ends = [m + sign * 2 * s for m, s in zip(mean, sd, strict=True)]
            ax.plot(x, ends, color=colour, linewidth=1, label=label)
    ax.set_ylim(-2.5, 2.5)
    return finish(ax, x="x", y="f(x) ± 2 standard deviations", legend=True).figure


def _gap_coverage(results: Results, names: Mapping[str, str]) -> Any:
    ax = axes(width=4.5)
    sets = list(results.settings.gap_sets)
    shown = {"network": "network alone", **names}
    width = 0.8 / len(shown)
    colours = [*CATEGORIES, "0.4", "0.6", "0.8"]
    for place, (method, label) in enumerate(shown.items()):
        found = [results.numbers(f"gap/{name}/*", f"coverage_{method}") for name in sets]
        heights = [sum(f) / len(f) for f in found]
        ax.bar([i + (place - 3) * width for i in range(len(sets))], heights, width, color=colours[place], label=label)
    ax.axhline(0.95, color="black", linewidth=0.8)
    ax.set_xticks(range(len(sets)), sets)
    ax.set_ylim(0, 1.5)
    finish(ax, y="coverage in the gap").legend(ncols=3, loc="upper center", fontsize=6, frameon=False)
    return ax.figure


def _amortised(results: Results) -> Any:
    ax = axes(width=4.5)
    labels = {"hfl": "two fine-tunings per query", "amortised_sign": "amortised"}
    for colour, (method, label) in zip(CATEGORIES, labels.items(), strict=False):
        across: list[float] = []
        up: list[float] = []
        for value in results.among("wide/*").values():
            for values, into in ((value["sd_exact"], across), (value[f"sd_{method}"], up)):
                known = [v for v in values if v is not None]
                scale = sum(known) / len(known)
                into += [float("nan") if v is None else v / scale for v in values]
        ax.plot(across, up, "o", color=colour, markersize=4, alpha=0.7, label=label)
    ax.axline((0, 0), slope=1, color="0.5", linewidth=0.8)
    return finish(ax, x="standard deviation, exact Hessian", y="relative to its mean", legend=True).figure
