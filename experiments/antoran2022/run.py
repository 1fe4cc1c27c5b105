"""Antorán et al. 2022: on a network with BatchNorm, which precision does the evidence choose, and what is it worth?

    python -m experiments.antoran2022.run [--budget small]

README.md says what was done and what was scaled down. cifar.py is a study of our own of the same question on a larger network.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftermap as am
from aftermap import metrics
from aftermap.analysis.figures import CATEGORIES, axes, finish, save_svg
from aftermap.baselines import Deterministic
from aftermap.likelihoods import Categorical
from aftermap.predictive import gaussian_prediction
from experiments.antoran2022.kernel import FullMatrix
from experiments.antoran2022.linear import LinearModel
from experiments.framework import Job, Results, Verdict, judged, labelled, mean_and_error, run, work_folder
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
        fits: Numbers of training images of the curvature and of the linear model, rising; each image stands for train / fit. The last is judged.
        rounds: How often at most the precision and the mode of the linear model are found in turn.
        validation: Held-out images of the official training set that choose a precision for comparison.
        test: Test images.
        grid: Precisions that validation chooses among.
    """

    seeds: int = 3
    widths: tuple[int, int] = (14, 17)
    train: int = 54_000
    epochs: int = 2
    fits: tuple[int, ...] = (100, 200, 400)
    rounds: int = 30
    validation: int = 100
    test: int = 500
    grid: tuple[float, ...] = tuple(10.0**k for k in range(-2, 7))


BUDGETS = {
    "stated": Settings(),
    "small": Settings(
        seeds=1,
        widths=(2, 3),
        train=400,
        epochs=1,
        fits=(20, 40),
        rounds=3,
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


def _quality(name: str, p: Tensor, y: Tensor) -> dict[str, float]:
    """NLL, ECE and accuracy of probabilities."""
    return {
        f"{name}_nll": metrics.nll(p, y),
        f"{name}_ece": metrics.ece(p, y),
        f"{name}_accuracy": metrics.accuracy(p, y),
    }


def precisions(
    gamma: Callable[[float], float], mode: Callable[[float], tuple[float, bool]], norm: float, rounds: int
) -> dict[str, dict[str, float]]:
    """The precision γ/‖θ*‖² at the trained weights, and γ/‖v*‖² with the mode v* of the linear model, each found for the other in turn.

    Args:
        gamma: The effective parameters under a precision.
        mode: The squared norm of the mode under a precision, and whether it was reached.
        norm: The squared norm of the trained weights.
        rounds: How often in turn at most.
    """
    low, high = -8.0, 12.0  # of the logarithm to base 10: γ(τ)/τ falls, so there is one solution
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gamma(10**middle) > 10**middle * norm else (low, middle)
    tau = 10 ** ((low + high) / 2)
    found = {"weights": {"precision": tau, "gamma": gamma(tau), "norm": norm}}
    reached, moved, squared, done = True, 1.0, norm, 0
    while done < rounds and moved > 0.01:
        squared, reached = mode(tau)
        new = gamma(tau) / squared
        moved, tau, done = abs(new / tau - 1), new, done + 1
    converged = float(reached and moved <= 0.01)
    found["joint"] = {
        "precision": tau,
        "gamma": gamma(tau),
        "norm": squared,
        "converged": converged,
        "rounds": float(done),
    }
    return found


@dataclass(frozen=True)
class Digits:
    """Data, networks and posteriors.

    Attributes:
        settings: The settings.
        data_dir: The folder with the data sets.
    """

    settings: Settings
    data_dir: Path

    def _part(self, part: str, count: int) -> Pair:
        x, y = labelled(self.data_dir, "mnist", part)
        return x[:count], y[:count]

    def _chosen(self, seed: int, count: int) -> Pair:
        """Random training images; fewer of them are the first of more."""
        x, y = self._part("train", self.settings.train)
        index = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:count]
        return x[index], y[index]

    def train(self, seed: int) -> dict[str, Any]:
        """Trains a network by SGD with momentum and keeps its weights."""
        settings = self.settings
        model = made(lambda: ResidualNetwork(settings.widths), seed)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
        losses = train_epochs(model, optimiser, self._part("train", settings.train), settings.epochs, seed)
        torch.save(model.state_dict(), work_folder("networks") / f"{seed}.pt")
        return {"losses": losses}

    def network(self, seed: int) -> nn.Module:
        """A trained network."""
        return kept(ResidualNetwork(self.settings.widths), work_folder("networks") / f"{seed}.pt")

    def map(self, seed: int) -> dict[str, Any]:
        """The network itself."""
        model = self.network(seed)
        x, y = self._part("test", self.settings.test)
        p = torch.cat([Deterministic(model).predict(part).mean.double() for part in x.split(250)])
        return {**_quality("map", p, y), "weights": sum(w.numel() for w in model.parameters())}

    def full(self, seed: int) -> dict[str, Any]:
        """The full Gauss-Newton matrix, for each number of images; those of the last stand alone, too."""
        rows = [self._full(seed, count) for count in self.settings.fits]
        return {**rows[-1], "by_images": {key: [row[key] for row in rows] for key in rows[-1] if key != "scores"}}

    def _full(self, seed: int, count: int) -> dict[str, Any]:
        """One precision for all weights, chosen in three ways."""
        settings, model = self.settings, self.network(seed)
        x, y = self._chosen(seed, count)
        (tx, ty), (vx, vy) = self._part("test", settings.test), self._part("validation", settings.validation)
        weight = settings.train / count
        matrix, linear = FullMatrix(model, x, y, torch.cat([tx, vx])), LinearModel(model, x, y, weight)

        def predicted(precision: float) -> Tensor:
            """Probabilities of test and validation images."""
            covariance, draws = matrix.covariance(precision, weight), torch.Generator().manual_seed(seed)
            outputs = matrix.outputs.double()
            made = gaussian_prediction(Categorical(), outputs, covariance, link="mc", samples=500, generator=draws)
            return made.mean

        def gamma(precision: float) -> float:
            return matrix.gamma(precision, weight)

        chosen = precisions(gamma, linear.mode_squared, matrix.theta_squared, settings.rounds)
        scores = [metrics.nll(predicted(precision)[len(tx) :], vy) for precision in settings.grid]
        best = settings.grid[scores.index(min(scores))]
        chosen["validation"] = {"precision": best, "gamma": gamma(best)}
        return {"scores": scores, "count": count, **self._judged(chosen, lambda p: predicted(p)[: len(tx)], ty)}

    def kron(self, seed: int) -> dict[str, Any]:
        """Kronecker factors of the most images."""
        settings, model = self.settings, self.network(seed)
        count = settings.fits[-1]
        x, y = self._chosen(seed, count)
        (tx, ty), (vx, vy) = self._part("test", settings.test), self._part("validation", settings.validation)
        weight = settings.train / count
        data = list(zip(x.split(250), y.split(250), strict=True))
        la = am.Laplace(model, "classification", structure="kron", curvature="exact", data_scale=weight)
        la.fit(data, progress=False)

        def gamma(precision: float) -> float:
            return sum(la.with_prior(precision).posterior.effective_parameters().values())

        def predicted(precision: float, inputs: Tensor) -> Tensor:
            draws, own = torch.Generator().manual_seed(seed), la.with_prior(precision)
            parts = [own.predict(part, link="mc", samples=500, generator=draws).mean for part in inputs.split(250)]
            return torch.cat(parts).double()

        norm = sum(float(p.detach().double().square().sum()) for p in model.parameters())
        chosen = precisions(gamma, LinearModel(model, x, y, weight).mode_squared, norm, settings.rounds)
        scores = [metrics.nll(predicted(precision, vx), vy) for precision in settings.grid]
        best = settings.grid[scores.index(min(scores))]
        chosen["validation"] = {"precision": best, "gamma": gamma(best)}
        return {"scores": scores, "count": count, **self._judged(chosen, lambda p: predicted(p, tx), ty)}

    def _judged(
        self, chosen: dict[str, dict[str, float]], predicted: Callable[[float], Tensor], y: Tensor
    ) -> dict[str, Any]:
        """The quality under each precision, with what is known of it."""
        found: dict[str, Any] = {}
        for rule, numbers in chosen.items():
            found |= _quality(rule, predicted(numbers["precision"]), y)
            found |= {f"{rule}_{key}": value for key, value in numbers.items()}
        return found


def scale(settings: Settings) -> str:
    """How much smaller everything is."""
    weights = sum(p.numel() for p in ResidualNetwork(settings.widths).parameters())
    return f"{weights:,} weights (14,814 in the paper), {settings.epochs} epochs, the curvature of {settings.fits[-1]:,} training images, {settings.test:,} test images, {settings.seeds} seeds."


def jobs(settings: Settings, data_dir: Path) -> Iterator[Job]:
    """Training, then both structures, for every seed."""
    digits = Digits(settings, data_dir)
    for seed in range(settings.seeds):
        yield Job(f"train/seed{seed}", partial(digits.train, seed))
        yield Job(f"map/seed{seed}", partial(digits.map, seed))
    for seed in range(settings.seeds):
        yield Job(f"full/seed{seed}", partial(digits.full, seed))
    for seed in range(settings.seeds):
        yield Job(f"kron/seed{seed}", partial(digits.kron, seed))


# What came out


def verdicts(results: Results) -> list[Verdict]:
    """L10."""
    count = results.settings.seeds
    return judged(results, {"full/*": count, "map/*": count}, ("L10",), lambda r: [_l10(r)])


def _l10(results: Results) -> Verdict:
    nll = {rule: results.numbers("full/*", f"{rule}_nll") for rule in RULES}
    network = results.numbers("map/*", "map_nll")
    ratio = fmean(nll["weights"]) / fmean(nll["joint"])
    conditions = [ratio >= 5, fmean(nll["joint"]) <= 0.03]
    ours = (
        f"NLL {mean_and_error(nll['joint'])} at the joint optimum, {mean_and_error(nll['weights'])} at the trained weights (ratio {ratio:.1f}); "
        f"network {mean_and_error(network)}, by validation {mean_and_error(nll['validation'])}"
    )
    reason = f"ratio {ratio:.1f}, NLL at the joint optimum {fmean(nll['joint']):.3f}"
    unfinished = sum(not done for done in results.numbers("full/*", "joint_converged"))
    if unfinished:
        reason += f"; precision and mode did not come to rest in {unfinished} of {len(network)} seeds, so that this is not the joint optimum itself"
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
    lines += ["", "### The full matrix of more and more training images: NLL (effective parameters)", ""]
    counts = [f"{count} images" for count in results.settings.fits]
    lines += ["| precision by | " + " | ".join(counts) + " |", "|---" * (1 + len(counts)) + "|"]
    rows = [row["by_images"] for row in results.among("full/*").values()]
    for rule, words in RULES.items():
        cells = []
        for place in range(len(counts)):
            nll, gamma = ([row[f"{rule}_{key}"][place] for row in rows] for key in ("nll", "gamma"))
            cells.append(f"{mean_and_error(nll)} ({mean_and_error(gamma, 0)})")
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figures(results: Results, folder: Path) -> dict[str, str]:
    """Validation NLL against the precision, with what each evidence chose."""
    found = {s: list(results.among(f"{s}/*").values()) for s in STRUCTURES}
    found = {s: rows for s, rows in found.items() if rows}
    if not found:
        return {}
    ax = axes(width=5.5, height=3.2)
    for colour, (structure, rows) in zip(CATEGORIES, found.items(), strict=False):
        scores = [fmean(list(v)) for v in zip(*(row["scores"] for row in rows), strict=True)]
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
