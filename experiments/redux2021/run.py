"""Laplace Redux (Daxberger et al. 2021): LeNet on MNIST is shown clothes and Japanese letters.

    python -m experiments.redux2021.run [--budget small]

README.md says what was done and what was scaled down.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import aftermap as am
from aftermap import metrics
from aftermap.analysis.figures import CATEGORIES, axes, finish, save_svg
from aftermap.baselines import Deterministic
from experiments.framework import Job, Results, Verdict, judged, labelled, mean_and_error, paired, run, work_folder
from experiments.training import kept, made, train_epochs

__all__ = ["BUDGETS", "DATA", "TITLE", "Settings", "figures", "jobs", "tables", "verdicts"]

TITLE = "Laplace Redux (Daxberger et al. 2021): LeNet on MNIST"
DATA = ("mnist", "fashion-mnist", "kmnist")
OTHERS = {"fashion-mnist": "Fashion-MNIST", "kmnist": "KMNIST"}
# Confidence and AUROC in percent, on Fashion-MNIST and on KMNIST.
PUBLISHED = {
    "map": (63.0, 98.9, 77.1, 97.1),
    "last_layer": (58.3, 98.5, 69.2, 96.7),
    "ensemble": (55.2, 99.3, 65.6, 98.5),
}
POSTERIORS: dict[str, tuple[str, dict[str, Any]]] = {
    "last_layer": ("last layer, Kronecker", {"params": "last_layer"}),
    "all_kron": ("all layers, Kronecker", {}),
    "last_block": ("last block, Kronecker", {"params": "last_block"}),
    "all_diagonal": ("all layers, diagonal", {"structure": "diagonal"}),
}
RULES = {"evidence": "evidence, probit", "validation": "the library's rule on labels"}
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Settings:
    """The size of everything.

    Attributes:
        seeds: Networks that posteriors are made of.
        members: The members of an ensemble.
        ensembles: Ensembles; no network is in two of them.
        train: Training images.
        epochs: Passes over them.
        fit: Training images that the curvature of several layers is summed over; each stands for train / fit.
        validation: Held-out images of the official training set that the library's rule looks at.
        test: Test images.
        other: Images of each other set.
    """

    seeds: int = 5
    members: int = 5
    ensembles: int = 1
    train: int = 54_000
    epochs: int = 20
    fit: int = 5400
    validation: int = 500
    test: int = 3000
    other: int = 2000


BUDGETS = {
    "stated": Settings(),
    "small": Settings(seeds=1, members=2, ensembles=1, train=600, epochs=1, fit=100, validation=100, test=60, other=60),
}


def lenet() -> nn.Sequential:
    """The network of the paper's code: two convolutions and three dense layers."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


@dataclass(frozen=True)
class Digits:
    """Data, training and what is asked.

    Attributes:
        settings: The settings.
        data_dir: The folder with the data sets.
    """

    settings: Settings
    data_dir: Path

    def train(self, seed: int) -> dict[str, Any]:
        """Trains a network and keeps its weights."""
        settings = self.settings
        x, y = (t[: settings.train] for t in labelled(self.data_dir, "mnist", "train"))
        model = made(lenet, seed)
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=5e-4)
        losses = train_epochs(model, optimiser, (x, y), settings.epochs, seed)
        torch.save(model.state_dict(), work_folder("networks") / f"{seed}.pt")
        return {"losses": losses}

    def network(self, seed: int) -> nn.Module:
        """A trained network."""
        return kept(lenet(), work_folder("networks") / f"{seed}.pt")

    def numbers(self, name: str, predictor: Any, **options: Any) -> dict[str, float]:
        """Quality on test images; confidence and AUROC by maximum probability on other images."""
        settings = self.settings
        x, y = (t[: settings.test] for t in labelled(self.data_dir, "mnist", "test"))

        def probabilities(inputs: Tensor) -> Tensor:
            return torch.cat([predictor.predict(part, **options).mean.double() for part in inputs.split(500)])

        inside = probabilities(x)
        found = {
            f"{name}_nll": metrics.nll(inside, y),
            f"{name}_ece": metrics.ece(inside, y),
            f"{name}_accuracy": metrics.accuracy(inside, y),
        }
        for other in OTHERS:
            outside = probabilities(labelled(self.data_dir, other, "test")[0][: settings.other])
            scores, positive = metrics.labelled_scores(-inside.max(-1).values, -outside.max(-1).values)
            found[f"{name}_{other}_confidence"] = 100 * float(outside.max(-1).values.mean())
            found[f"{name}_{other}_auroc"] = 100 * metrics.auroc(scores, positive)
        return found

    def map(self, seed: int) -> dict[str, float]:
        """The network itself."""
        return self.numbers("map", Deterministic(self.network(seed)))

    def ensemble(self, place: int) -> dict[str, float]:
        """An ensemble of networks that no other ensemble has."""
        first = place * self.settings.members
        return self.numbers("ensemble", am.Ensemble([self.network(first + k) for k in range(self.settings.members)]))

    def posterior(self, name: str, seed: int) -> dict[str, Any]:
        """A posterior, tuned as in the paper by the evidence with one precision, and by the library's rule on labels."""
        settings = self.settings
        count = settings.train if name == "last_layer" else settings.fit
        x, y = (t[:count] for t in labelled(self.data_dir, "mnist", "train"))
        options = POSTERIORS[name][1]
        la = am.Laplace(self.network(seed), "classification", data_scale=settings.train / count, **options)
        la.fit(
            list(zip(x.split(500), y.split(500), strict=True)),
            generator=torch.Generator().manual_seed(seed),
            progress=False,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", am.errors.StatisticalWarning)  # What came of it is in the numbers.
            la.tune(method="evidence", per_layer=False)
            precision = float(next(iter(la.prior_precision.values())).mean())
            found = self.numbers("evidence", la, link="probit")
            vx, vy = (t[: settings.validation] for t in labelled(self.data_dir, "mnist", "validation"))
            la.tune([(vx, vy)])
        found |= self.numbers("validation", la)
        return {**found, "evidence_precision": precision, "weights": la.posterior.n_params}


def scale(settings: Settings) -> str:
    """How much smaller everything is."""
    return f"{settings.seeds} networks and {settings.ensembles} ensemble instead of 10, {settings.epochs} epochs, {settings.test:,} test images and {settings.other:,} of each other set."


def jobs(settings: Settings, data_dir: Path) -> Iterator[Job]:
    """Training first, then what each method says."""
    digits = Digits(settings, data_dir)
    for seed in range(max(settings.seeds, settings.ensembles * settings.members)):
        yield Job(f"train/seed{seed}", partial(digits.train, seed))
    for seed in range(settings.seeds):
        yield Job(f"map/seed{seed}", partial(digits.map, seed))
    for place in range(settings.ensembles):
        yield Job(f"ensemble/seed{place}", partial(digits.ensemble, place))
    for name in POSTERIORS:
        for seed in range(settings.seeds):
            yield Job(f"{name}/seed{seed}", partial(digits.posterior, name, seed))


# What came out


def verdicts(results: Results) -> list[Verdict]:
    """X1 and X2."""
    settings = results.settings
    first = {"map/*": settings.seeds, "last_layer/*": settings.seeds, "ensemble/*": settings.ensembles}
    second = {"last_layer/*": settings.seeds, "all_kron/*": settings.seeds}
    return [
        *judged(results, first, ("X1",), lambda r: [_published(r)]),
        *judged(results, second, ("X2",), lambda r: [_layers(r)]),
    ]


def _columns(results: Results, method: str) -> list[list[float]]:
    """Confidence and AUROC on both sets, seed by seed."""
    prefix = method if method in ("map", "ensemble") else "evidence"
    return [results.numbers(f"{method}/*", f"{prefix}_{o}_{w}") for o in OTHERS for w in ("confidence", "auroc")]


def _published(results: Results) -> Verdict:
    conditions, lines, off = [], [], []
    names = [f"{what} on {label}" for label in OTHERS.values() for what in ("confidence", "AUROC")]
    for method, wanted in PUBLISHED.items():
        columns = _columns(results, method)
        for name, values, target in zip(names, columns, wanted, strict=True):
            mean = sum(values) / len(values)
            error = paired(values, [0.0] * len(values)).error if len(values) > 1 else 0.0
            conditions.append(abs(mean - target) <= max(3.0, 2 * error))
            if not conditions[-1]:
                off.append(f"{method.replace('_', ' ')} {name} {mean - target:+.1f}")
        cells = [mean_and_error(v, 1) for v in columns]
        lines.append(f"{method.replace('_', ' ')} {cells[0]} / {cells[1]}, {cells[2]} / {cells[3]}")
    reason = f"{sum(conditions)} of {len(conditions)} numbers agree; not " + ", ".join(off)
    return Verdict.of("X1", conditions, "; ".join(lines), reason, results.settings.seeds)


def _layers(results: Results) -> Verdict:
    """On par: the last layer is not worse than all layers by two standard errors, in NLL and AUROC."""
    conditions, lines, lost = [], [], []
    for what, worse in (("nll", "higher"), *((f"{other}_auroc", "lower") for other in OTHERS)):
        last, every = (results.numbers(f"{m}/*", f"evidence_{what}") for m in ("last_layer", "all_kron"))
        conditions.append(not getattr(paired(last, every), worse))
        label = "NLL" if what == "nll" else f"AUROC on {OTHERS[what.removesuffix('_auroc')]}"
        lines.append(f"{label}: last layer {mean_and_error(last)}, all layers {mean_and_error(every)}")
        if not conditions[-1]:
            lost.append(f"{label} of the last layer is worse ({paired(last, every)})")
    return Verdict.of("X2", conditions, "; ".join(lines), "; ".join(lost), results.settings.seeds)


def _rows(results: Results) -> list[tuple[str, str, str]]:
    """Label, pattern of the jobs, and what stands before their numbers."""
    rows = [("MAP", "map", "map"), ("ensemble", "ensemble", "ensemble")]
    rows += [
        (f"{label}; {words}", name, rule) for rule, words in RULES.items() for name, (label, _) in POSTERIORS.items()
    ]
    return [row for row in rows if results.among(f"{row[1]}/*")]


def tables(results: Results) -> str:
    """Every method: quality in distribution; confidence and AUROC on both other sets."""
    lines = [
        "### Every method: confidence / AUROC in percent, on 2 other data sets",
        "",
        "| | accuracy | NLL | ECE | " + " | ".join(OTHERS.values()) + " |",
        "|---" * (4 + len(OTHERS)) + "|",
    ]
    for label, name, prefix in _rows(results):
        cells = [results.text(f"{name}/*", f"{prefix}_{what}", 4) for what in ("accuracy", "nll", "ece")]
        for other in OTHERS:
            confidence, auroc = (results.text(f"{name}/*", f"{prefix}_{other}_{w}", 1) for w in ("confidence", "auroc"))
            cells.append(f"{confidence} / {auroc}")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figures(results: Results, folder: Path) -> dict[str, str]:
    """NLL against AUROC of every method."""
    rows = _rows(results)
    if not rows:
        return {}
    ax = axes(width=6.5, height=3.6)
    for label, name, prefix in rows:
        x, y = (results.numbers(f"{name}/*", f"{prefix}_{what}") for what in ("nll", "kmnist_auroc"))
        names = ["map", "ensemble", *POSTERIORS]
        colour = CATEGORIES[names.index(name) % len(CATEGORIES)]
        ax.plot(
            sum(x) / len(x),
            sum(y) / len(y),
            "s" if prefix == "validation" else "o",
            color=colour,
            markersize=6,
            label=label,
        )
    finish(ax, x="test NLL on MNIST", y="AUROC on KMNIST (%)")
    ax.legend(fontsize=6, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    (folder / "methods.svg").write_text(save_svg(ax.figure), encoding="utf-8")
    return {
        "methods.svg": "LeNet on MNIST: test NLL, and AUROC on KMNIST by maximum probability, mean over seeds. Squares are tuned on labels."
    }


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__], "redux2021"))
