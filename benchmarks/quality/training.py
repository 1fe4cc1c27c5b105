"""Trains the network of a task, once: the weights are kept in a cache folder, by task, seed and settings."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from aftermap.likelihoods import parse_likelihood
from benchmarks.quality.datasets import Splits, check_folder
from benchmarks.quality.networks import load_resnet20
from benchmarks.quality.tasks import QUICK, TASKS, Task, Training

__all__ = ["CACHE", "DATA", "Batches", "Prepared", "find_task", "load_task", "prepare", "train_network"]

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("AFTERMAP_DATA", ROOT.parent / "shared" / "data"))
CACHE = Path(os.environ.get("AFTERMAP_QUALITY_CACHE", Path.home() / ".cache" / "aftermap-quality"))
VERSION = 1  # raise it when the readers, the networks or the training change: weights are then trained anew
BATCH = 250

Batch = tuple[Tensor, Tensor]


class Batches(list[Batch]):
    """Batches in memory, with the `dataset` whose length other libraries ask for."""

    @property
    def dataset(self) -> range:
        return range(sum(len(y) for _, y in self))


def cut(x: Tensor, y: Tensor, size: int = BATCH) -> Batches:
    """Data in batches of at most this size."""
    return Batches(zip(x.split(size), y.split(size), strict=True))


@dataclass(frozen=True, eq=False)
class Prepared:
    """A task under one seed: its data and its trained network.

    Attributes:
        task: The task.
        seed: The seed.
        splits: The data.
        model: The trained network, in eval mode.
        seconds: What the training took.
        data_dir: The data folder.
        cache: The cache folder.
    """

    task: Task
    seed: int
    splits: Splits
    model: nn.Module
    seconds: float
    data_dir: Path
    cache: Path

    @property
    def likelihood(self) -> str:
        """The name of the likelihood."""
        return self.task.likelihood

    @property
    def train(self) -> Batches:
        """The training data, in batches."""
        return cut(*self.splits.train)

    @property
    def test(self) -> Batch:
        """Test inputs and targets."""
        return self.splits.test

    @property
    def ood(self) -> dict[str, Tensor]:
        """Unusual inputs, by name."""
        return self.splits.ood

    def validation(self, n: int, split: int) -> Batches:
        """A validation set of n data, drawn from the pool: the same for every method."""
        x, y = self.splits.pool
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + 1009 * n + split)
        chosen = torch.randperm(len(x), generator=generator)[:n]
        return cut(x[chosen], y[chosen])

    def whole_pool(self) -> Batches:
        """All data that validation sets are drawn from."""
        return cut(*self.splits.pool)

    def members(self, count: int) -> tuple[list[nn.Module], float]:
        """The network and others of the same training, from other starts; and the seconds that the others took."""
        others = [_cached_network(self.task, self.seed, m, self.splits, self.cache) for m in range(1, count)]
        return [self.model, *(model for model, _ in others)], sum(seconds for _, seconds in others)


def find_task(name: str) -> Task:
    """The task of this name.

    Raises:
        KeyError: There is none.
    """
    return {**TASKS, **QUICK}[name]


def load_task(name: str, seed: int = 0, *, data_dir: Path | str = DATA, cache: Path | str = CACHE) -> Prepared:
    """A task by its name, with its trained network.

    >>> task = load_task("wine_mlp")  # doctest: +SKIP
    >>> la = aftermap.fit(task.model, task.likelihood, task.train, task.validation(30, 0))  # doctest: +SKIP
    """
    return prepare(find_task(name), seed, Path(data_dir), Path(cache))


def prepare(task: Task, seed: int, data_dir: Path, cache: Path) -> Prepared:
    """Loads the data of a task, and its network: from the cache, or trained now."""
    if task.name not in QUICK:
        check_folder(data_dir)
    splits = task.data.load(data_dir, seed)
    if task.training.epochs == 0:
        model, seconds = load_resnet20(data_dir), 0.0
    else:
        model, seconds = _cached_network(task, seed, 0, splits, cache)
    return Prepared(task, seed, splits, model, seconds, data_dir, cache)


def _settings(task: Task) -> str:
    described = repr((VERSION, task.data, task.network, task.training))
    return hashlib.sha256(described.encode()).hexdigest()[:8]


def _cached_network(task: Task, seed: int, member: int, splits: Splits, cache: Path) -> tuple[nn.Module, float]:
    """A network and the seconds of its training."""
    folder = cache / "weights"
    path = folder / f"{task.name}-{_settings(task)}-seed{seed}-{member}.safetensors"
    shape = tuple(splits.train[0].shape[1:])
    start = 1000 * (seed + 1) + member
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start)
        model = task.network.build(shape, splits.outputs)
    if path.is_file():
        model.load_state_dict(load_file(path))
        return model.eval(), float(json.loads(path.with_suffix(".json").read_text())["seconds"])
    began = time.process_time()
    train_network(model, splits.train, task.training, task.likelihood, torch.Generator().manual_seed(start))
    seconds = time.process_time() - began
    folder.mkdir(parents=True, exist_ok=True)
    described = {"task": task.name, "seed": seed, "member": member, "seconds": round(seconds, 2)}
    path.with_suffix(".json").write_text(json.dumps(described | {"settings": repr(task)}) + "\n")
    # Whole or not at all, should two processes write it, or one be interrupted.
    unfinished = path.with_suffix(f".{os.getpid()}")
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, unfinished)
    unfinished.replace(path)
    return model.eval(), seconds


def train_network(
    model: nn.Module, data: Batch, training: Training, likelihood: str, generator: torch.Generator
) -> None:
    """Trains in place, by Adam."""
    parsed = parse_likelihood(likelihood)
    x, y = data
    steps = training.epochs * math.ceil(len(x) / training.batch)
    optimiser = torch.optim.Adam(model.parameters(), lr=training.rate, weight_decay=training.decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    model.train()
    for chosen in _shuffled(len(x), training, generator):
        optimiser.zero_grad()
        outputs = model(x[chosen])
        loss: Any
        if likelihood == "classification":
            loss = F.cross_entropy(outputs, y[chosen])
        else:
            loss = parsed.nll(outputs, y[chosen]).mean()
        loss.backward()
        optimiser.step()
        schedule.step()
    model.eval()


def _shuffled(count: int, training: Training, generator: torch.Generator) -> Iterator[Tensor]:
    for _ in range(training.epochs):
        for chosen in torch.randperm(count, generator=generator).split(training.batch):
            # BatchNorm cannot normalise one example.
            yield chosen if len(chosen) > 1 else torch.cat([chosen, (chosen + 1) % count])
