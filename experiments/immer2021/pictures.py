"""The figures and tables of the experiment, from the results alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from aftermap.analysis.figures import CATEGORIES, axes, finish, save_svg
from experiments.framework import Results
from experiments.immer2021.confidence import ACTIVATIONS
from experiments.immer2021.images import METHODS
from experiments.immer2021.uci import DEPTHS
from experiments.immer2021.verdicts import claim_l4, claim_l5

__all__ = ["draw", "tables"]


def _panels(width: float, height: float, count: int, **options: Any) -> Any:
    figure = axes(width=width, height=height).figure
    figure.clf()
    return figure.subplots(1, count, squeeze=False, **options)[0]


def draw(results: Results, folder: Path) -> dict[str, str]:
    """Writes the figures whose jobs are done, and returns their captions."""
    pictures: dict[str, tuple[Callable[[Results], Any], str]] = {
        "uci.svg": (
            _uci,
            "UCI classification, one hidden layer, full covariance: test NLL, mean ± standard error over seeds. Each method has the prior "
            "precision that validation data choose for it.",
        ),
        "precision.svg": (
            _precision,
            "MNIST perceptron: validation NLL against the prior precision of training and posterior, mean over seeds.",
        ),
        "entropy.svg": (
            _entropy,
            "Share of images with more entropy, first seed: the network's own test images (solid) and those of the other data set (dashed).",
        ),
        "far.svg": (
            _far,
            "Two classes in the plane, ReLU network, first seed: confidence of the network and of the linearised predictive; and mean confidence "
            "at test inputs that are multiplied by a factor, mean over seeds.",
        ),
        "occam.svg": (
            _occam,
            "Networks of 1, 5 and 20 hidden layers, trained by evidence, first seed: mean and two standard deviations of the function (dark) and "
            "of the data (light).",
        ),
        "svhn.svg": (_svhn, "A ResNet-20 trained on CIFAR-10 is shown house numbers: how sure it is, all seeds."),
    }
    captions = {}
    for file, (picture, caption) in pictures.items():
        figure = picture(results)
        if figure is not None:
            (folder / file).write_text(save_svg(figure), encoding="utf-8")
            captions[file] = caption
    return captions


def _uci(results: Results) -> Any:
    names = [n for n in results.settings.uci.sets if results.among(f"uci/{n}/depth1/*")]
    if not names:
        return None
    ax = axes(width=6.5, height=2.8)
    for place, (method, label) in enumerate(
        (
            ("map", "MAP"),
            ("full_sampling", "sampling"),
            ("full_linearised", "linearised"),
            ("subset_linearised", "subset of data"),
        )
    ):
        values = [results.numbers(f"uci/{n}/depth1/*", f"{method}_nll") for n in names]
        spread = [(sum((v - fmean(r)) ** 2 for v in r) / max(1, len(r) - 1) / len(r)) ** 0.5 for r in values]
        at = [k + 0.16 * (place - 1.5) for k in range(len(names))]
        ax.errorbar(
            at,
            [fmean(r) for r in values],
            spread,
            fmt="osv^"[place],
            color=CATEGORIES[place],
            markersize=4,
            lw=1,
            label=label,
        )
    ax.set_xticks(range(len(names)), [n.replace("_", " ") for n in names], rotation=20)
    ax.set_ylim(bottom=0)
    return finish(ax, y="test NLL", legend=True).figure


def _precision(results: Results) -> Any:
    shown = ("map", "kron_sampling", "damped_sampling", "kron_linearised")
    found = {m: list(results.among(f"mnist/{METHODS[m][0]}/*").values()) for m in shown}
    if not all(found.values()):
        return None
    ax = axes(width=5.0, height=3.0)
    for place, (method, rows) in enumerate(found.items()):
        curves = [row[f"{method}_scores"] for row in rows]
        ax.plot(
            results.settings.images.precisions,
            [fmean(c) for c in zip(*curves, strict=True)],
            "o-",
            color=CATEGORIES[place],
            markersize=3,
            lw=1.2,
            label=METHODS[method][1],
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    finish(ax, x="prior precision", y="validation NLL", legend=True)
    ax.tick_params(which="both", labelsize=7)
    return ax.figure


def _entropy(results: Results) -> Any:
    shown = ("map", "kron_sampling", "kron_linearised")
    panels = _panels(6.5, 2.6, 2, sharey=True)
    for ax, (name, title) in zip(
        panels, (("mnist", "trained on MNIST"), ("fashion-mnist", "trained on Fashion-MNIST")), strict=True
    ):
        for colour, method in zip(CATEGORIES, shown, strict=False):
            row = results.values.get(f"{name}/{METHODS[method][0]}/seed0")
            if row is None or "curves" not in row:
                return None
            curves = row["curves"][method]
            for part, dash in (("inside", "-"), ("outside", "--")):
                levels = curves[part]
                share = [1 - k / (len(levels) - 1) for k in range(len(levels))]
                ax.plot(
                    levels, share, dash, color=colour, lw=1.2, label=METHODS[method][1] if part == "inside" else None
                )
        finish(ax, title=title, x="entropy (nats)", y="share above" if ax is panels[0] else "", legend=ax is panels[1])
    return panels[0].figure


def _far(results: Results) -> Any:
    row = results.values.get("far/relu/seed0")
    if row is None or "curves" not in row:
        return None
    panels = _panels(7.5, 2.5, 3)
    maps, reach = row["curves"]["maps"], row["curves"]["reach"]
    for ax, values, title in zip(panels, maps, ("network", "linearised"), strict=False):
        ax.imshow(
            values,
            origin="lower",
            extent=(-reach, reach, -reach, reach),
            vmin=0.5,
            vmax=1,
            cmap="viridis",
            aspect="auto",
        )
        for label, colour in ((0, "w"), (1, CATEGORIES[1])):
            points = [p for p, y in zip(row["curves"]["x"], row["curves"]["y"], strict=True) if y == label]
            ax.plot([p[0] for p in points], [p[1] for p in points], ".", color=colour, markersize=1.5)
        finish(ax, title=title)
    ax = panels[2]
    for colour, name in zip(CATEGORIES, ("network", "linearised"), strict=False):
        for dash, activation in zip(("-", "--"), ACTIVATIONS, strict=True):
            curves = [value[name] for value in results.among(f"far/{activation}/*").values()]
            if curves:
                ax.plot(
                    results.settings.far.scales,
                    [fmean(c) for c in zip(*curves, strict=True)],
                    dash,
                    color=colour,
                    lw=1.2,
                    label=f"{name}, {activation}",
                )
    ax.set_xscale("log")
    ax.set_ylim(0.45, 1.02)
    finish(ax, x="inputs times", y="mean confidence", legend=True)
    return ax.figure


def _occam(results: Results) -> Any:
    depths = results.settings.occam.depths
    rows = {d: results.values.get(f"occam/depth{d}/seed0") for d in depths}
    if any(row is None or "curves" not in row for row in rows.values()):
        return None
    panels = _panels(7.5, 2.4, len(depths), sharey=True)
    for ax, (depth, row) in zip(panels, rows.items(), strict=True):
        assert row is not None
        curve = row["curves"]
        for sd, alpha in (("total_sd", 0.15), ("sd", 0.3)):
            low, high = ([m + sign * 2 * s for m, s in zip(curve["mean"], curve[sd], strict=True)] for sign in (-1, 1))
            ax.fill_between(curve["x"], low, high, color=CATEGORIES[0], alpha=alpha, lw=0)
        ax.plot(curve["x"], curve["mean"], color=CATEGORIES[0], lw=1.2)
        ax.plot(*curve["data"], ".", color="k", markersize=2)
        title = f"{depth} hidden layers\nevidence {row['log_evidence']:.1f}, test {row['test_log_likelihood']:.2f}"
        finish(ax, title=title, x="x")
        ax.set_ylim(-2, 2)
        ax.title.set_fontsize(7.5)
    return panels[0].figure


def _svhn(results: Results) -> Any:
    rows = [value["curves"] for value in results.among("svhn/*").values() if "curves" in value]
    if not rows:
        return None
    ax = axes(width=4.5, height=2.6)
    for colour, name, label in zip(
        CATEGORIES, ("network", "linearised"), ("network", "linearised, last block"), strict=False
    ):
        shares = [fmean(values) for values in zip(*(row[name] for row in rows), strict=True)]
        edges = [k / len(shares) for k in range(len(shares) + 1)]
        ax.stairs(shares, edges, color=colour, lw=1.4, label=label)
    return finish(ax, x="confidence", y="share of house numbers", legend=True).figure


def tables(results: Results) -> str:
    """NLL on tables, and the lines of both image networks."""
    parts = [_uci_table(results, depth) for depth in results.settings.uci.depths] + [
        _image_table(results, n) for n in ("mnist", "fashion-mnist")
    ]
    return "\n\n".join(filter(None, parts))


def _uci_table(results: Results, depth: int) -> str:
    names = [
        n
        for n in results.settings.uci.sets
        if len(results.among(f"uci/{n}/depth{depth}/*")) == len(results.settings.uci.seeds)
    ]
    if not names:
        return ""
    methods = {"map": "MAP"}
    for structure in DEPTHS[depth]:
        if structure != "subset":
            methods[f"{structure}_sampling"] = f"sampling, {structure}"
        methods[f"{structure}_linearised"] = f"linearised, {structure}"
    words = "one hidden layer" if depth == 1 else "two hidden layers"
    lines = [
        f"### UCI classification, {words}: test NLL",
        "",
        "| set | " + " | ".join(methods.values()) + " |",
        "|---" * (len(methods) + 1) + "|",
    ]
    for name in names:
        cells = [results.text(f"uci/{name}/depth{depth}/*", f"{m}_nll") for m in methods]
        lines.append(f"| {name.replace('_', ' ')} | " + " | ".join(cells) + " |")
    if depth != 1 and len(names) == len(results.settings.uci.sets):
        for verdict in (claim_l4(results, depth, "kron"), claim_l5(results, depth, "kron")):
            lines += [
                "",
                f"{verdict.id} with two hidden layers and Kronecker factors: **{verdict.verdict}**"
                + (f" ({verdict.reason})" if verdict.reason else "")
                + ".",
            ]
    return "\n".join(lines)


def _image_table(results: Results, name: str) -> str:
    shown = {
        m: v for m, v in METHODS.items() if len(results.among(f"{name}/{v[0]}/*")) == results.settings.images.seeds
    }
    if not shown:
        return ""
    title = (
        "MNIST perceptron, other data: Fashion-MNIST"
        if name == "mnist"
        else "Fashion-MNIST convolutional network, other data: MNIST"
    )
    lines = [f"### {title}", "", "| | precision | accuracy | NLL | ECE | AUROC |", "|---" * 6 + "|"]
    for method, (group, label) in shown.items():
        pattern = f"{name}/{group}/*"
        chosen = ", ".join(f"{v:g}" for v in results.numbers(pattern, f"{method}_precision"))
        cells = [results.text(pattern, f"{method}_{what}") for what in ("accuracy", "nll", "ece", "auroc")]
        lines.append(f"| {label} | {chosen} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
