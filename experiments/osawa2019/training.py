"""Images, networks, and one training loop for every method, through the public interface of the library."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftermap as am
from aftermap import metrics
from aftermap.baselines import Deterministic, insert_dropout
from examples.resnet20_cifar10 import Block
from examples.resnet20_cifar10 import images as tiles
from examples.train_vogn import lenet
from experiments.osawa2019.settings import Pictures

__all__ = [
    "NAMES",
    "Batches",
    "Data",
    "Trained",
    "at_entropy",
    "closure",
    "judge",
    "network",
    "optimiser",
    "probabilities",
    "train",
]

Pair = tuple[Tensor, Tensor]
NAMES = {
    "adam": "Adam",
    "bbb": "Bayes by backprop",
    "dropout": "MC dropout",
    "vogn": "VOGN",
    "ogn": "OGN",
    "kfac": "K-FAC",
    "noisy_kfac": "noisy K-FAC",
}
NATURAL: dict[str, Any] = {
    "vogn": am.optim.VOGN,
    "ogn": am.optim.OGN,
    "kfac": am.optim.KFAC,
    "noisy_kfac": am.optim.NoisyKFAC,
}
CLASSES = 10


@cache
def _mosaic(path: Path) -> Tensor:
    return tiles(path, 10_000)


@cache
def _training_images(folder: Path, files: int) -> Tensor:
    """So many files of 10,000 training images."""
    names = [f"train_{10_000 * k:05}_{10_000 * k + 9999:05}.webp" for k in range(files)]
    return _mosaic(folder / names[0]) if files == 1 else torch.cat([_mosaic(folder / name) for name in names])


@dataclass(frozen=True)
class Data:
    """The images of one network: all training images come from the first 10,000 of CIFAR-10, or from 20,000 where these are too few.

    Attributes:
        folder: The folder with the data sets.
        settings: How many of each.
    """

    folder: Path
    settings: Pictures

    def _labels(self, name: str) -> Tensor:
        return torch.from_numpy(np.load(self.folder / "cifar10" / "labels.npz")[name]).long()

    def _training_part(self) -> Pair:
        """As many files of 10,000 training images as are needed."""
        x = _training_images(self.folder / "cifar10", -(-(self.settings.train + self.settings.held_out) // 10_000))
        return x, self._labels("train_labels_all")[: len(x)]

    @property
    def train(self) -> Pair:
        """The images that are trained on."""
        x, y = self._training_part()
        return x[: self.settings.train], y[: self.settings.train]

    @property
    def held_out(self) -> Pair:
        """Training images that are not trained on, the last ones."""
        x, y = self._training_part()
        return x[-self.settings.held_out :], y[-self.settings.held_out :]

    @property
    def test(self) -> Pair:
        """The test images."""
        count = self.settings.test
        return _mosaic(self.folder / "cifar10" / "test_10k.webp")[:count], self._labels("test_labels")[:count]

    @property
    def other(self) -> Tensor:
        """House numbers, which no class fits."""
        return _mosaic(self.folder / "svhn" / "test_10k.webp")[: self.settings.other]


@dataclass(frozen=True)
class Batches:
    """Batches in a new order at every pass, shifted by up to four pixels and reflected where they are augmented.

    Attributes:
        x: The images.
        y: The labels.
        size: The size of a batch.
        generator: The source of order, shifts and reflections.
        augmented: Whether images are shifted and reflected.
    """

    x: Tensor
    y: Tensor
    size: int
    generator: torch.Generator
    augmented: bool = False

    def __len__(self) -> int:
        return math.ceil(len(self.x) / self.size)

    def __iter__(self) -> Iterator[Pair]:
        for index in torch.randperm(len(self.x), generator=self.generator).split(self.size):
            x = self.x[index]
            yield (self._moved(x) if self.augmented else x), self.y[index]

    def _moved(self, x: Tensor) -> Tensor:
        padded, size = F.pad(x, (4, 4, 4, 4)), x.shape[-1]
        rows, columns = torch.randint(9, (2, len(x), 1), generator=self.generator) + torch.arange(size)
        turned = torch.rand(len(x), 1, generator=self.generator) < 0.5
        columns = torch.where(turned, columns.flip(1), columns)
        example = torch.arange(len(x))[:, None, None]
        return (
            padded.permute(0, 2, 3, 1)[example, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
        )


def network(name: str, *, norm: bool = True) -> nn.Module:
    """LeNet-5; a wide convolutional network with half a million weights; a residual network with BatchNorm, or without."""
    if name in ("lenet", "large"):
        return lenet(3, 32)
    if name == "wide":
        return nn.Sequential(
            nn.Conv2d(3, 32, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1024, 480),
            nn.ReLU(),
            nn.Linear(480, CLASSES),
        )
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        Block(12, 12, 1),
        Block(12, 24, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, CLASSES),
    )
    return model if norm else _without_norm(model)


def _without_norm(model: nn.Module) -> nn.Module:
    for name, child in model.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(model, name, nn.Identity())
        else:
            _without_norm(child)
    return model


def optimiser(
    method: str, model: nn.Module, settings: Pictures, steps: int, values: Mapping[str, float], **changes: Any
) -> Any:
    """The optimiser of a method; ``changes`` are options that a variant has otherwise."""
    if method in ("adam", "dropout"):
        return torch.optim.Adam(model.parameters(), lr=values["lr"], weight_decay=settings.decay)
    options: dict[str, Any] = {"n_data": settings.train, "prior_precision": settings.prior_precision, **values}
    if method in ("vogn", "noisy_kfac"):
        options |= {
            "mc_samples": settings.draws,
            "augmentation": settings.augmentation,
            "temperature": am.optim.warmup(round(settings.warm * steps), start=settings.cold),
        }
    if method in ("kfac", "noisy_kfac"):
        options |= {"factor_every": 5, "inverse_every": 50}
    return NATURAL[method](model, **{**options, **changes})


@dataclass(frozen=True)
class Trained:
    """A trained network.

    Attributes:
        predictor: What predicts.
        curve: What was measured after every epoch: accuracy and NLL on held-out images, processor seconds of training so far.
        accuracy: The accuracy on the training images.
        weights: The number of weights.
    """

    predictor: Any
    curve: list[dict[str, float]]
    accuracy: float
    weights: int


def train(
    method: str,
    settings: Pictures,
    data: Data,
    seed: int,
    values: Mapping[str, float],
    *,
    norm: bool = True,
    watched: bool = True,
    **changes: Any,
) -> Trained:
    """Trains one network with a learning rate that falls to zero as a cosine; ``watched`` measures after every epoch."""
    torch.manual_seed(seed)
    model = network(settings.network, norm=norm)
    x, y = data.train
    batches = Batches(x, y, settings.batch, torch.Generator().manual_seed(seed), settings.augmentation > 1)
    if method == "dropout":
        model = insert_dropout(model, values["drop"])
    if method == "bbb":
        return _by_backprop(model, settings, data, batches, seed, values)
    steps = settings.epochs * len(batches)
    opt = optimiser(method, model, settings, steps, values, **changes)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    curve: list[dict[str, float]] = []
    seconds = 0.0
    for epoch in range(settings.epochs):
        start = time.process_time()
        model.train()
        for a, b in batches:
            opt.step(closure(method, model, opt, a, b))
            schedule.step()
        seconds += time.process_time() - start
        if watched or epoch + 1 == settings.epochs:
            samples = settings.samples if epoch + 1 == settings.epochs else settings.curve_samples
            p = probabilities(_predictor(method, model, opt, samples), data.held_out[0], samples)
            curve.append({"seconds": seconds, **_scores(p, data.held_out[1])})
    predictor = _predictor(method, model, opt, settings.samples)
    return Trained(predictor, curve, _training_accuracy(predictor, data, settings.samples), _weights(model))


def closure(method: str, model: nn.Module, opt: Any, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """The loss of a batch; Adam needs its backward pass, too."""

    def run() -> Tensor:
        loss = F.cross_entropy(model(x), y)
        if method in ("adam", "dropout"):
            opt.zero_grad()
            loss.backward()
        return loss

    return run


def _by_backprop(
    model: nn.Module, settings: Pictures, data: Data, batches: Batches, seed: int, values: Mapping[str, float]
) -> Trained:
    field = am.MeanField(model, prior_precision=settings.prior_precision, samples=settings.samples)
    start = time.process_time()
    field.fit(
        batches,
        epochs=settings.epochs,
        lr=values["lr"],
        n_data=settings.train,
        samples=settings.draws,
        generator=torch.Generator().manual_seed(seed),
        progress=False,
    )
    seconds = time.process_time() - start
    p = probabilities(field, data.held_out[0], settings.samples)
    curve = [{"seconds": seconds, **_scores(p, data.held_out[1])}]
    return Trained(field, curve, _training_accuracy(field, data, settings.samples), _weights(model))


def _predictor(method: str, model: nn.Module, opt: Any, samples: int) -> Any:
    if method == "dropout":
        return am.MCDropout(model, samples=samples)
    if method in ("vogn", "noisy_kfac"):
        return opt.posterior("classification")
    return Deterministic(model)


def probabilities(predictor: Any, x: Tensor, samples: int) -> Tensor:
    """Mean probabilities, by batches; the same draws of the weights for each."""
    single = isinstance(predictor, Deterministic)
    parts = []
    for part in x.split(250):
        options = {} if single else {"samples": samples, "generator": torch.Generator().manual_seed(0)}
        parts.append(predictor.predict(part, **options).mean)
    return torch.cat(parts)


def _training_accuracy(predictor: Any, data: Data, samples: int) -> float:
    """With as many draws as on test images, since fewer would make the gap between the two look smaller."""
    x, y = data.train
    return metrics.accuracy(probabilities(predictor, x[:2000], samples), y[:2000])


def _weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _deviation(predictor: Any) -> float | None:
    """The median standard deviation of a weight, where there is one."""
    if isinstance(predictor, am.MeanField):
        parts = list(predictor.deviation.values())
    elif hasattr(predictor, "posterior"):
        parts = [v.sqrt() for v in predictor.posterior.marginal_variance().values()]
    else:
        return None
    return float(torch.cat([part.flatten().double() for part in parts]).median())


def _scores(p: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy and NLL; a run that left the numbers counts as one that knows nothing."""
    if not bool(p.isfinite().all()):
        return {"accuracy": 1 / CLASSES, "nll": math.inf}
    return {"accuracy": metrics.accuracy(p, y), "nll": metrics.nll(p, y)}


def at_entropy(p: Tensor, wanted: float) -> float:
    """The power of the probabilities p, renormalised, that gives them this mean entropy."""
    low, high = 1e-3, 1e3
    logs = p.double().clamp_min(1e-30).log()
    for _ in range(60):
        middle = math.sqrt(low * high)
        if float(metrics.entropy((middle * logs).softmax(1)).mean()) > wanted:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def judge(trained: Trained, data: Data, samples: int) -> dict[str, Any]:
    """What test images and house numbers say; half the largest entropy is where methods are compared at equal entropy."""
    (x, y), other = data.test, data.other
    p, q = (probabilities(trained.predictor, images, samples) for images in (x, other))
    inside, outside = metrics.entropy(p), metrics.entropy(q)
    wrong = metrics.misclassified(p, y)
    wanted = math.log(CLASSES) / 2
    power = at_entropy(p, wanted)
    tempered = (power * q.double().clamp_min(1e-30).log()).softmax(1)
    scores, positive = metrics.labelled_scores(inside, outside)
    bins = metrics.reliability_bins(p, y, n_bins=10)
    levels = torch.linspace(0, math.log(CLASSES), 31, dtype=torch.float64)
    return {
        "accuracy": metrics.accuracy(p, y),
        "nll": metrics.nll(p, y),
        "ece": metrics.ece(p, y),
        "signed": metrics.signed_calibration_error(p, y),
        "auroc": metrics.auroc(metrics.max_probability(p), wrong),
        "train_accuracy": trained.accuracy,
        "weights": trained.weights,
        "deviation": _deviation(trained.predictor),
        "entropy": float(inside.mean()),
        "entropy_svhn": float(outside.mean()),
        "equal_entropy_svhn": float(metrics.entropy(tempered).mean()),
        "auroc_svhn": metrics.auroc(scores, positive),
        "train_seconds": trained.curve[-1]["seconds"],
        "epochs": trained.curve,
        "curves": {
            "confidence": bins.confidence,
            "accuracy": bins.accuracy,
            "count": bins.count,
            "test": torch.histogram(inside.double(), levels, density=True).hist,
            "svhn": torch.histogram(outside.double(), levels, density=True).hist,
        },
    }
