"""Digits and clothes: a perceptron and a convolutional network, each shown the other's images (claims L3, L6 to L8).

Trained weights are kept in the work folder, a file for every seed and prior precision.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import aftermap as am
from aftermap import metrics
from experiments.framework import Job, labelled, work_folder
from experiments.immer2021.contest import Pair, contest, network_probabilities, predicted, quality
from experiments.immer2021.settings import Images
from experiments.training import kept, made, train_epochs

__all__ = ["GROUPS", "METHODS", "Part", "jobs", "parts"]

# Posteriors, and the predictives that are made of each.
GROUPS: dict[str, tuple[str, ...]] = {
    "map": (),
    "kron": ("linearised", "sampling", "evidence"),
    "damped": ("sampling",),
    "diagonal": ("linearised", "sampling"),
    "subset": ("linearised",),
}
METHODS = {
    "map": ("map", "MAP"),
    "kron_sampling": ("kron", "sampling, Kronecker"),
    "damped_sampling": ("damped", "sampling, Kronecker, Ritter's damping"),
    "diagonal_sampling": ("diagonal", "sampling, diagonal"),
    "kron_linearised": ("kron", "linearised, Kronecker"),
    "diagonal_linearised": ("diagonal", "linearised, diagonal"),
    "subset_linearised": ("subset", "linearised, subset of data"),
}
_LEVELS = 41


@dataclass(frozen=True)
class Part:
    """One data set with its network.

    Attributes:
        settings: The settings.
        data_dir: The folder with the data sets.
        name: "mnist" (perceptron) or "fashion-mnist" (convolutional network).
    """

    settings: Images
    data_dir: Path
    name: str

    @property
    def groups(self) -> tuple[str, ...]:
        """The posteriors; the gradients of a subset of data are too many numbers for the perceptron."""
        return ("map", "kron", "damped") if self.name == "mnist" else ("map", "kron", "diagonal", "subset")

    def size(self, name: str) -> Any:
        """A setting that digits and clothes have each for themselves, such as "train" or "precisions"."""
        return getattr(self.settings, name if self.name == "mnist" else f"clothes_{name}")

    def network(self) -> nn.Sequential:
        """The network before training."""
        settings = self.settings
        if self.name == "mnist":
            sizes = (784, *settings.widths)
            layers: list[nn.Module] = [nn.Flatten()]
            for into, out in itertools.pairwise(sizes):
                layers += [nn.Linear(into, out), nn.Tanh()]
            return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))
        first, second = settings.channels
        return nn.Sequential(
            nn.Conv2d(1, first, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * second, settings.dense),
            nn.Tanh(),
            nn.Linear(settings.dense, 10),
        )

    def data(self, seed: int) -> Pair:
        """The training images of a seed."""
        x, y = labelled(self.data_dir, self.name, "train")
        kept = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: self.size("train")]
        return x[kept], y[kept]

    @property
    def validation(self) -> Pair:
        """Held-out images of the official training set."""
        x, y = labelled(self.data_dir, self.name, "validation")
        count = self.size("validation")
        return x[:count], y[:count]

    @property
    def test(self) -> Pair:
        """Test images."""
        x, y = labelled(self.data_dir, self.name, "test")
        count = self.size("test")
        return x[:count], y[:count]

    @property
    def other(self) -> Tensor:
        """Test images of the other data set."""
        if self.name == "mnist":
            return labelled(self.data_dir, "fashion-mnist", "test")[0][: self.settings.other]
        return labelled(self.data_dir, "mnist", "test")[0][: self.settings.clothes_test]

    def _weights(self, seed: int, precision: float) -> Path:
        return work_folder(self.name) / f"network{seed}_{precision:g}.pt"

    def train(self, seed: int, precision: float) -> dict[str, Any]:
        """Trains the network under one prior precision."""
        model = made(self.network, seed)
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)

        def energy() -> Tensor:
            return sum((0.5 * precision * p.square().sum() for p in model.parameters()), torch.zeros(()))

        losses = train_epochs(model, optimiser, self.data(seed), self.size("epochs"), seed, energy)
        torch.save(model.state_dict(), self._weights(seed, precision))
        return {"losses": losses}

    def _networks(self, seed: int) -> Iterator[tuple[float, nn.Module]]:
        for precision in self.size("precisions"):
            if not self._weights(
                seed, precision
            ).is_file():  # The numbers of training are kept elsewhere, the weights are not.
                self.train(seed, precision)
            yield precision, kept(self.network(), self._weights(seed, precision))

    def _fits(self, seed: int, group: str) -> Iterator[tuple[float, am.Laplace]]:
        x, y = self.data(seed)
        options: dict[str, Any] = {"structure": group, "curvature": "exact"}
        factor = 1.0
        if group == "damped":
            options = {"structure": "kron", "curvature": "exact", "damping": "factored"}
        if group == "subset":  # The precision times N/M, as in the paper.
            factor = len(x) / self.settings.subset
            x, y = x[: self.settings.subset], y[: self.settings.subset]
            options = {"structure": "subset", "subset_size": len(x), "rank": None}
        batches = list(zip(x.split(500), y.split(500), strict=True))
        for precision, model in self._networks(seed):
            la = am.Laplace(model, "classification", prior_precision=factor * precision, **options)
            yield precision, la.fit(batches, progress=False)

    def compare(self, seed: int, group: str) -> dict[str, Any]:
        """The precisions that validation images, or the evidence, choose, and what the predictives are worth then."""
        settings = self.settings
        (vx, vy), (tx, ty), other = self.validation, self.test, self.other
        if group == "map":
            scorer = {"map": lambda m: metrics.nll(network_probabilities(m, "classification", vx), vy)}
            best = contest(self._networks(seed), scorer)["map"]
            inside, outside = (network_probabilities(best.predictor, "classification", x) for x in (tx, other))
            return self._numbers("map", best, inside, ty, outside)
        if group == "subset":
            count = settings.subset_test
            vx, vy, tx, ty, other = vx[:count], vy[:count], tx[:count], ty[:count], other[:count]

        def loss(la: am.Laplace, kind: str) -> float:
            return metrics.nll(predicted(la, kind, vx, settings.samples, seed), vy)

        scorers: dict[str, Any] = {kind: partial(loss, kind=kind) for kind in GROUPS[group] if kind != "evidence"}
        if "evidence" in GROUPS[group]:
            scorers["evidence"] = lambda la: -float(la.log_evidence())
        numbers: dict[str, Any] = {}
        for rule, best in contest(self._fits(seed, group), scorers).items():
            kind = "linearised" if rule == "evidence" else rule
            inside, outside = (predicted(best.predictor, kind, x, settings.samples, seed) for x in (tx, other))
            found = self._numbers(f"{group}_{rule}", best, inside, ty, outside)
            few = slice(settings.subset_test)  # The ECE of fewer images is larger, so that only equally many compare.
            found[f"{group}_{rule}_few_ece"] = quality("few", inside[few], ty[few])["few_ece"]
            curves = {**numbers.get("curves", {}), **found["curves"]}
            numbers |= {**found, "curves": curves}
        return numbers

    @staticmethod
    def _numbers(name: str, best: Any, inside: Tensor, labels: Tensor, outside: Tensor) -> dict[str, Any]:
        scores, positive = metrics.labelled_scores(metrics.entropy(inside), metrics.entropy(outside))
        levels = torch.linspace(0, 1, _LEVELS, dtype=torch.float64)
        return {
            **quality(name, inside, labels),
            f"{name}_auroc": metrics.auroc(scores, positive),
            f"{name}_precision": best.precision,
            f"{name}_scores": best.scores,
            "curves": {
                name: {
                    "inside": metrics.entropy(inside).quantile(levels).tolist(),
                    "outside": metrics.entropy(outside).quantile(levels).tolist(),
                }
            },
        }


def parts(settings: Images, data_dir: Path) -> list[Part]:
    """Digits and clothes."""
    return [Part(settings, data_dir, name) for name in ("mnist", "fashion-mnist")]


def jobs(settings: Images, data_dir: Path) -> Iterator[Job]:
    """Training under every precision, then a job for every posterior."""
    for part in parts(settings, data_dir):
        for seed in range(settings.seeds):
            for precision in part.size("precisions"):
                yield Job(f"{part.name}/train_{precision:g}/seed{seed}", partial(part.train, seed, precision))
            for group in part.groups:
                yield Job(f"{part.name}/{group}/seed{seed}", partial(part.compare, seed, group))
