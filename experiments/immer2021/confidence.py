"""How sure the network and the linearised predictive are far from the data (L9) and of house numbers (L1)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap import metrics
from aftermap.baselines import Deterministic
from examples.resnet20_cifar10 import ResNet20
from examples.resnet20_cifar10 import images as tiles
from experiments.framework import Job
from experiments.immer2021.contest import network_probabilities, predicted, quality
from experiments.immer2021.settings import Far, Svhn
from experiments.immer2021.uci import multilayer, read, split, train_stack

__all__ = ["ACTIVATIONS", "GRID", "jobs"]

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}
GRID = 40
_REACH = 12.0  # of the map, in standard deviations of the data


def _far(settings: Far, data_dir: Path, activation: str, seed: int) -> dict[str, Any]:
    """Two classes in the plane: the mean confidence at test inputs that are multiplied by a factor."""
    x, y = read(data_dir, "banana")
    kept = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: settings.rows]
    train, _, test = split(x[kept], y[kept], seed, settings.rows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = multilayer(2, settings.width, 2, 1, ACTIVATIONS[activation])
    (weights,) = train_stack(model, train, "binary", (settings.precision,), settings.steps)
    model.load_state_dict(weights)
    model.double().eval()
    la = am.Laplace(
        model, "binary", structure="subset", subset_size=len(train[0]), rank=None, prior_precision=settings.precision
    )
    la.fit([(train[0], train[1][:, None].double())], progress=False)
    network = Deterministic(model, "binary")

    def confidences(inputs: Tensor) -> tuple[Tensor, Tensor]:
        return network.predict(inputs).confidence[:, 0], la.predict(inputs).confidence[:, 0]

    found = [[float(c.mean()) for c in confidences(scale * test[0])] for scale in settings.scales]
    numbers: dict[str, Any] = {"network": [a for a, _ in found], "linearised": [b for _, b in found]}
    if seed == 0 and activation == "relu":  # the ones that are drawn
        line = torch.linspace(-_REACH, _REACH, GRID, dtype=torch.float64)
        plane = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).reshape(-1, 2)
        maps = [c.reshape(GRID, GRID).tolist() for c in confidences(plane)]
        numbers["curves"] = {"maps": maps, "reach": _REACH, "x": train[0][:100], "y": train[1][:100]}
    return numbers


def _svhn(settings: Svhn, data_dir: Path, seed: int) -> dict[str, Any]:
    """A pretrained ResNet-20: the share of images of each kind that it is surer of than 0.99."""
    weights = np.load(data_dir / "models" / "cifar10_resnet20.npz")
    model = ResNet20()
    model.load_state_dict({k: torch.from_numpy(weights[k]) for k in weights.files})
    model.eval()
    labels = np.load(data_dir / "cifar10" / "labels.npz")

    def some(file: str, first: int, count: int) -> Tensor:
        start = first + seed * count
        return tiles(data_dir / file, start + count)[start:]

    def targets(name: str, first: int, count: int) -> Tensor:
        start = first + seed * count
        return torch.from_numpy(labels[name][start : start + count]).long()

    fit_x, fit_y = some("cifar10/train_00000_09999.webp", 0, settings.fit), targets("train_labels_all", 0, settings.fit)
    val_x, val_y = some("cifar10/test_10k.webp", 0, settings.tuning), targets("test_labels", 0, settings.tuning)
    test_x, test_y = some("cifar10/test_10k.webp", 5000, settings.test), targets("test_labels", 5000, settings.test)
    other = some("svhn/test_10k.webp", 0, settings.other)
    la = am.Laplace(model, "classification", params="last_block")
    la.fit(list(zip(fit_x.split(100), fit_y.split(100), strict=True)), progress=False)
    la.tune([(val_x, val_y)])
    numbers: dict[str, Any] = {"weights": la.posterior.n_params}
    histograms = {}
    for name, answer in (
        ("network", lambda x: network_probabilities(model, "classification", x)),
        ("linearised", lambda x: predicted(la, "linearised", x, 100, seed)),
    ):
        inside, outside = answer(test_x), answer(other)
        scores, positive = metrics.labelled_scores(metrics.entropy(inside), metrics.entropy(outside))
        confidence = outside.max(-1).values
        numbers |= quality(name, inside, test_y)
        numbers |= {
            f"{name}_sure": float((confidence > 0.99).double().mean()),
            f"{name}_sure_inside": float((inside.max(-1).values > 0.99).double().mean()),
            f"{name}_confidence": float(confidence.mean()),
            f"{name}_auroc": metrics.auroc(scores, positive),
        }
        histograms[name] = (torch.histc(confidence, 20, 0, 1) / len(confidence)).tolist()
    return {**numbers, "curves": histograms}


def jobs(far: Far, svhn: Svhn, data_dir: Path) -> Iterator[Job]:
    """A job for every activation and seed, and for every seed of house numbers."""
    for activation in ACTIVATIONS:
        for seed in range(far.seeds):
            yield Job(f"far/{activation}/seed{seed}", partial(_far, far, data_dir, activation, seed))
    for seed in range(svhn.seeds):
        yield Job(f"svhn/seed{seed}", partial(_svhn, svhn, data_dir, seed))
