"""Antorán et al. 2022: on a network with BatchNorm, which precision does the evidence choose, and what is it worth?

    python -m experiments.antoran2022.run [--budget small]

README.md says what was done and what was scaled down. cifar.py is a study of our own of the same question on a larger network.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftermap as am
from aftermap import metrics
from aftermap.analysis.figures import CATEGORIES, axes, finish, save_svg
from aftermap.baselines import Deterministic
from aftermap.laplace import linear_mode
from experiments.framework import Job, Results, Verdict, judged, mean_and_error, run, work_folder
from experiments.training import kept, made, train_epochs

__all__ = ["BUDGETS", "DATA", "TITLE", "ResidualNetwork", "Settings", "figures", "jobs", "tables", "verdicts"]

TITLE = "The evidence of linearised networks with normalisation (Antorán et al. 2022)"
DATA = ("mnist",)
STRUCTURES = {"full": "full", "kron": "Kronecker"}
RULES = {
    "weights": "evidence at the trained weights",
    "joint": "evidence at the joint optimum",
    "validation": "validation labels",
}
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Settings:
    """The size of everything.

    Attributes:
        seeds: Networks.
        widths: Channels before and after the second residual block, which halves the image.
        train: Training images.
        epochs: Passes over them.
        fit: Training images of the curvature and of the linear model; each stands for train / fit.
        rounds: How often the precision and the mode of the linear model are found in turn.
        iterations: Iterations of L-BFGS for each mode.
        validation: Held-out images of the official training set that choose a precision for comparison.
        test: Test images.
        grid: Precisions that validation chooses among.
    """

    seeds: int = 3
    widths: tuple[int, int] = (6, 8)
    train: int = 54_000
    epochs: int = 3
    fit: int = 1000
    rounds: int = 2
    iterations: int = 6
    validation: int = 100
    test: int = 500
    grid: tuple[float, ...] = tuple(10.0**k for k in range(-2, 7, 2))


BUDGETS = {
    "stated": Settings(),
    "small": Settings(
        seeds=1,
        widths=(2, 3),
        train=400,
        epochs=1,
        fit=60,
        rounds=1,
        iterations=2,
        validation=40,
        test=40,
        grid=(1.0, 100.0),
    ),
}


class Block(nn.Module):
    """Two convolutions with BatchNorm, and a shortcut."""

    def __init__(self, into: int, out: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        same = stride == 1 and into == out
        self.shortcut = (
            None if same else nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + shortcut)


class ResidualNetwork(nn.Module):
    """A convolution with stride 2, three residual blocks, an average over quarters of the image, and a dense layer."""

    def __init__(self, widths: tuple[int, int]):
        super().__init__()
        first, second = widths
        self.conv, self.bn = nn.Conv2d(1, first, 3, 2, 1, bias=False), nn.BatchNorm2d(first)
        self.blocks = nn.Sequential(Block(first, first, 1), Block(first, second, 2), Block(second, second, 1))
        self.dense = nn.Linear(4 * second, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = self.blocks(F.relu(self.bn(self.conv(x))))
        return self.dense(F.adaptive_avg_pool2d(x, 2).flatten(1))


@cache
def _read(data_dir: Path, part: str) -> Pair:
    examples = am.data.named("mnist", part, folder=data_dir)
    assert examples.targets is not None
    return examples.inputs, examples.targets


@dataclass(frozen=True)
class Digits:
    """Data, networks and posteriors.

    Attributes:
        settings: The settings.
        data_dir: The folder with the data sets.
    """

    settings: Settings
    data_dir: Path

    def train(self, seed: int) -> dict[str, Any]:
        """Trains a network by SGD with momentum and keeps its weights."""
        settings = self.settings
        x, y = (t[: settings.train] for t in _read(self.data_dir, "train"))
        model = made(lambda: ResidualNetwork(settings.widths), seed)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
        losses = train_epochs(model, optimiser, (x, y), settings.epochs, seed)
        torch.save(model.state_dict(), work_folder("networks") / f"{seed}.pt")
        return {"losses": losses}

    def network(self, seed: int) -> nn.Module:
        """A trained network."""
        return kept(ResidualNetwork(self.settings.widths), work_folder("networks") / f"{seed}.pt")

    def numbers(self, name: str, predict: Callable[[Tensor], am.Prediction]) -> dict[str, float]:
        """Quality on test images."""
        x, y = (t[: self.settings.test] for t in _read(self.data_dir, "test"))
        p = torch.cat([predict(part).mean.double() for part in x.split(250)])
        return {
            f"{name}_nll": metrics.nll(p, y),
            f"{name}_ece": metrics.ece(p, y),
            f"{name}_accuracy": metrics.accuracy(p, y),
        }

    def map(self, seed: int) -> dict[str, Any]:
        """The network itself."""
        model = self.network(seed)
        return {
            **self.numbers("map", Deterministic(model).predict),
            "weights": sum(p.numel() for p in model.parameters()),
        }

    def compare(self, structure: str, seed: int) -> dict[str, Any]:
        """One posterior with one precision for all weights, chosen in three ways."""
        settings = self.settings
        index = torch.randperm(settings.train, generator=torch.Generator().manual_seed(seed))[: settings.fit]
        x, y = (t[index] for t in _read(self.data_dir, "train"))
        data = list(zip(x.split(250), y.split(250), strict=True))
        la = am.Laplace(
            self.network(seed),
            "classification",
            structure=structure,
            curvature="exact",
            data_scale=settings.train / settings.fit,
        )
        la.fit(data, progress=False)
        found: dict[str, Any] = {}

        def judge(rule: str, **more: float) -> None:
            precision = float(next(iter(la.prior_precision.values())))
            gamma = sum(la.posterior.effective_parameters().values())
            draws = torch.Generator().manual_seed(seed)
            found.update(self.numbers(rule, lambda part: la.predict(part, link="mc", samples=500, generator=draws)))
            found.update({f"{rule}_precision": precision, f"{rule}_gamma": gamma})
            found.update({f"{rule}_{name}": value for name, value in more.items()})

        la.tune(method="evidence", per_layer=False)
        judge("weights", norm=_square(la.posterior.mean))
        norm, converged = self._joint_optimum(la, data)
        judge("joint", norm=norm, converged=float(converged))
        vx, vy = (t[: settings.validation] for t in _read(self.data_dir, "validation"))
        scores = []
        best = (math.inf, 1.0)
        for precision in settings.grid:
            draws = torch.Generator().manual_seed(seed)
            p = la.with_prior(precision).predict(vx, link="mc", samples=200, generator=draws).mean.double()
            scores.append(metrics.nll(p, vy))
            best = min(best, (scores[-1], precision))
        la.with_prior(best[1])
        judge("validation")
        return {**found, "scores": scores}

    def _joint_optimum(self, la: am.Laplace, data: list[Pair]) -> tuple[float, bool]:
        """Sets the precision γ/‖v*‖² with the mode v* of the linear model, each found for the other in turn.

        The first value comes from the quadratic model of the loss, where v* = θ* − Σ(g + τθ*) costs nothing; then the modes are those of
        the loss itself.
        """
        slope: dict[str, Tensor] = {}
        for x, y in data:
            loss = la.likelihood_weight * F.cross_entropy(la.model(x), y, reduction="sum")
            parts = torch.autograd.grad(loss, list(la.model.parameters()))
            for (name, _), part in zip(la.model.named_parameters(), parts, strict=True):
                slope[name] = slope.get(name, 0.0) + part.double()

        def quadratic(precision: float) -> float:
            la.with_prior(precision)
            theta = {n: v.double() for n, v in la.posterior.mean.items()}
            step = la.posterior.covariance_mv({n: slope[n] + precision * theta[n] for n in theta})
            return _square({n: theta[n] - step[n] for n in theta})

        precision = float(next(iter(la.prior_precision.values())))
        for _ in range(40):
            norm = quadratic(precision)
            precision = math.sqrt(precision * sum(la.posterior.effective_parameters().values()) / norm)
        la.with_prior(precision)
        converged = True
        for _ in range(self.settings.rounds):
            mode = linear_mode(la, data, iterations=self.settings.iterations)
            norm, converged = _square(mode.mean), mode.converged
            la.with_prior(sum(la.posterior.effective_parameters().values()) / norm)
        return norm, converged


def _square(weights: Any) -> float:
    return sum(float(v.double().square().sum()) for v in weights.values())


def scale(settings: Settings) -> str:
    """How much smaller everything is."""
    weights = sum(p.numel() for p in ResidualNetwork(settings.widths).parameters())
    return f"{weights:,} weights instead of 14,814, {settings.epochs} epochs, the curvature of {settings.fit:,} training images, {settings.test:,} test images, {settings.seeds} seeds."


def jobs(settings: Settings, data_dir: Path) -> Iterator[Job]:
    """Training, then both structures, for every seed."""
    digits = Digits(settings, data_dir)
    for seed in range(settings.seeds):
        yield Job(f"train/seed{seed}", partial(digits.train, seed))
        yield Job(f"map/seed{seed}", partial(digits.map, seed))
    for structure in STRUCTURES:
        for seed in range(settings.seeds):
            yield Job(f"{structure}/seed{seed}", partial(digits.compare, structure, seed))


# What came out


def verdicts(results: Results) -> list[Verdict]:
    """L10."""
    count = results.settings.seeds
    return judged(results, {"full/*": count, "map/*": count}, ("L10",), lambda r: [_l10(r)])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _l10(results: Results) -> Verdict:
    nll = {rule: results.numbers("full/*", f"{rule}_nll") for rule in RULES}
    network = results.numbers("map/*", "map_nll")
    ratio = _mean(nll["weights"]) / _mean(nll["joint"])
    conditions = [ratio >= 5, _mean(nll["joint"]) <= 0.03]
    ours = (
        f"NLL {mean_and_error(nll['joint'])} at the joint optimum, {mean_and_error(nll['weights'])} at the trained weights (ratio {ratio:.1f}); "
        f"network {mean_and_error(network)}, by validation {mean_and_error(nll['validation'])}"
    )
    reason = f"ratio {ratio:.1f}, NLL at the joint optimum {_mean(nll['joint']):.3f}"
    unfinished = sum(not done for done in results.numbers("full/*", "joint_converged"))
    if unfinished:
        reason += f"; the mode of the linear model was not reached in {unfinished} of {len(network)} seeds, so that this is not the joint optimum itself"
    return Verdict.of("L10", conditions, ours, reason, len(network))


def tables(results: Results) -> str:
    """What each rule chose, and what it is worth."""
    if not results.among("map/*"):
        return ""
    weights = int(results.numbers("map/*", "weights")[0])
    lines = [
        f"### A residual network with BatchNorm on MNIST, {weights:,} weights, one precision for all",
        "",
        "| posterior | precision by | precision | effective parameters | squared norm | NLL | ECE | accuracy |",
        "|---" * 8 + "|",
        "| – | network alone | – | – | – | "
        + " | ".join(results.text("map/*", f"map_{w}", 4) for w in ("nll", "ece", "accuracy"))
        + " |",
    ]
    for structure, label in STRUCTURES.items():
        for rule, words in RULES.items():
            if results.among(f"{structure}/*"):
                chosen = ", ".join(f"{v:.3g}" for v in results.numbers(f"{structure}/*", f"{rule}_precision"))
                cells = [chosen, *(results.text(f"{structure}/*", f"{rule}_{w}", 0) for w in ("gamma", "norm"))]
                cells += [results.text(f"{structure}/*", f"{rule}_{w}", 4) for w in ("nll", "ece", "accuracy")]
                lines.append(f"| {label} | {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figures(results: Results, folder: Path) -> dict[str, str]:
    """Validation NLL against the precision, with what each evidence chose."""
    found = {s: list(results.among(f"{s}/*").values()) for s in STRUCTURES}
    found = {s: rows for s, rows in found.items() if rows}
    if not found:
        return {}
    ax = axes(width=5.5, height=3.2)
    for colour, (structure, rows) in zip(CATEGORIES, found.items(), strict=False):
        scores = [_mean(list(v)) for v in zip(*(row["scores"] for row in rows), strict=True)]
        ax.plot(results.settings.grid, scores, "-", color=colour, lw=1.2, label=f"{STRUCTURES[structure]}: validation")
        for rule, mark in (("weights", "X"), ("joint", "o")):
            x, y = ([row[f"{rule}_{w}"] for row in rows] for w in ("precision", "nll"))
            ax.plot(x, y, mark, color=colour, markersize=5, label=f"{STRUCTURES[structure]}: {RULES[rule]}")
    ax.set_xscale("log")
    ax.set_yscale("log")
    finish(ax, x="prior precision", y="NLL", legend=True)
    ax.tick_params(which="both", labelsize=7)
    (folder / "precision.svg").write_text(save_svg(ax.figure), encoding="utf-8")
    caption = "A residual network with BatchNorm on MNIST: NLL on validation images against the precision of the prior, mean over seeds, and the test NLL of what the evidence chooses, seed by seed."
    return {"precision.svg": caption}


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__], "antoran2022"))
