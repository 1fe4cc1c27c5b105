"""Real data, cut into training data, a pool of validation data, test data and inputs of other kinds.

Every cut is made from a seed alone, so that a task is the same wherever it is loaded. Images come from the data folder; tables
from there and from scikit-learn.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Images", "MissingData", "Pairs", "Regression", "Splits", "Table", "check_folder"]

Array = npt.NDArray[Any]
Examples = tuple[Tensor, Tensor]

GREY = ("mnist", "fashion-mnist", "kmnist", "notmnist")
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # of CIFAR-10's colours
SCALED = 3.0


class MissingData(Exception):
    """A file of the data folder is not there; the message says which, and what belongs there."""


@dataclass(frozen=True)
class Splits:
    """The data of a task under one seed.

    Attributes:
        train: Inputs and targets of the training.
        pool: What validation sets are drawn from.
        test: What every method is judged on.
        outputs: The number of outputs that a network for these data has.
        ood: Inputs of other kinds, by name.
    """

    train: Examples
    pool: Examples
    test: Examples
    outputs: int
    ood: dict[str, Tensor] = field(default_factory=dict)


def check_folder(folder: Path) -> Path:
    """Returns the data folder if it is there.

    Raises:
        MissingData: It is not there.
    """
    if not folder.is_dir():
        raise MissingData(
            f"the data folder {folder} is not there: pass --data-dir, or set AFTERMAP_DATA. It holds {', '.join(GREY)} (idx.gz files as they "
            "are published), cifar10 and svhn (labels.npz and lossless mosaics of 32 × 32 tiles, *.webp), uci_classification and "
            "uci_regression (*.npz with X and y), models/cifar10_resnet20.npz"
        )
    return folder


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise MissingData(
            f"{path} is not there; leave out the tasks that need it with --tasks, or see benchmarks/README.md"
        )
    return path


def _order(count: int, seed: int) -> Array:
    return np.random.default_rng(seed).permutation(count)


# Images.


def _idx(path: Path) -> Array:
    content = gzip.decompress(_existing(path).read_bytes())
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


@lru_cache(maxsize=8)
def _grey(folder: Path, name: str, part: str) -> tuple[Array, Array]:
    """Images [N, 28, 28] and labels; of notMNIST and of KMNIST's training images only a part is at hand."""
    stem = {"test": "t10k", "train": "train7011" if name == "kmnist" else "train"}[part]
    place = folder / name
    return _idx(place / f"{stem}-images-idx3-ubyte.gz"), _idx(place / f"{stem}-labels-idx1-ubyte.gz").astype(np.int64)


def _mosaic(path: Path) -> Array:
    """The 10,000 tiles [N, 32, 32, 3] of a lossless mosaic."""
    from PIL import Image

    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        pixels = np.asarray(Image.open(_existing(path)).convert("RGB"))
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    rows, columns = pixels.shape[0] // 32, pixels.shape[1] // 32
    return pixels.reshape(rows, 32, columns, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3)[:10000]


@lru_cache(maxsize=3)
def _colour(folder: Path, name: str, part: str) -> tuple[Array, Array]:
    """Images [N, 32, 32, 3] and labels of CIFAR-10 (train: the first 20,000) or SVHN (test: 10,000)."""
    place = folder / name
    labels = np.load(_existing(place / "labels.npz"))
    if part == "test":
        return _mosaic(place / "test_10k.webp"), labels["test_labels"].astype(np.int64)[:10000]
    parts = [_mosaic(place / f"train_{a:05d}_{a + 9999:05d}.webp") for a in (0, 10000)]
    return np.concatenate(parts), labels["train_labels_all"].astype(np.int64)[:20000]


def _read(folder: Path, name: str, part: str) -> tuple[Array, Array]:
    return _grey(folder, name, part) if name in GREY else _colour(folder, name, part)


def _as_input(pixels: Array, form: str) -> Tensor:
    """Pixels as a network takes them.

    Args:
        pixels: [N, 28, 28] or [N, 32, 32, 3], from 0 to 255.
        form: "flat" (784 numbers), "grey" [1, 28, 28], "half" (8 × 8 numbers), or "colour" [3, 32, 32], normalised as for CIFAR-10; grey images
            are padded and repeated for it.
    """
    x = torch.from_numpy(np.ascontiguousarray(pixels)).float() / 255
    if form == "colour":
        if x.dim() == 3:
            x = F.pad(x, (2, 2, 2, 2)).unsqueeze(-1).expand(-1, -1, -1, 3)
        return ((x - torch.tensor(MEAN)) / torch.tensor(DEVIATION)).permute(0, 3, 1, 2).contiguous()
    x = x.unsqueeze(1)
    if form == "half":
        return F.adaptive_avg_pool2d(x, 8).flatten(1)
    return x.flatten(1) if form == "flat" else x


@dataclass(frozen=True)
class Images:
    """A set of images, or several whose classes are put side by side.

    Training images come from the training file, the others from the test file; where there is no training file (SVHN,
    notMNIST), all from the test file, none twice.

    Attributes:
        names: The sets; the classes of the second follow those of the first.
        form: How pixels are handed to the network; see `_as_input`.
        train: How many training images, of all sets together.
        pool: How many images validation sets are drawn from.
        test: How many test images.
        ood: The sets of unusual images.
        unusual: How many images of each of these.
    """

    names: tuple[str, ...]
    form: str
    train: int
    pool: int = 2000
    test: int = 1000
    ood: tuple[str, ...] = ()
    unusual: int = 400

    def load(self, folder: Path, seed: int) -> Splits:
        parts: list[list[Examples]] = [[], [], []]
        share = len(self.names)
        sizes = [size // share for size in (self.train, self.pool, self.test)]
        for place, name in enumerate(self.names):
            for kept, (x, y) in zip(parts, self._cut(folder, name, sizes, seed), strict=True):
                kept.append((_as_input(x, self.form), torch.from_numpy(y) + 10 * place))
        train, pool, test = ((torch.cat([x for x, _ in part]), torch.cat([y for _, y in part])) for part in parts)
        others = {name: self._others(folder, name, seed) for name in self.ood}
        return Splits(train, pool, test, 10 * share, others)

    @staticmethod
    def _cut(folder: Path, name: str, sizes: Sequence[int], seed: int) -> list[tuple[Array, Array]]:
        train, pool, test = sizes
        x, y = _read(folder, name, "test")
        order = _order(len(y), seed)
        cut = [order[:test], order[test : test + pool]]
        if name in ("svhn", "notmnist"):
            chosen, source = order[test + pool : test + pool + train], (x, y)
        else:
            source = _read(folder, name, "train")
            chosen = _order(len(source[1]), seed)[:train]
        return [(source[0][chosen], source[1][chosen]), (x[cut[1]], y[cut[1]]), (x[cut[0]], y[cut[0]])]

    def _others(self, folder: Path, name: str, seed: int) -> Tensor:
        x, y = _read(folder, name, "test")
        return _as_input(x[_order(len(y), seed + 1)[: self.unusual]], self.form)


@dataclass(frozen=True)
class Pairs:
    """Two digits of MNIST side by side, halved in size: 100 classes, ten times the left one plus the right one.

    Attributes:
        train: How many pairs, from the training images.
        pool: How many, from the test images, for validation.
        test: How many, from other test images.
        ood: Sets whose images are paired in the same way.
        unusual: How many pairs of each of these.
    """

    train: int
    pool: int = 2000
    test: int = 1000
    ood: tuple[str, ...] = ("fashion-mnist", "kmnist", "notmnist")
    unusual: int = 300

    def load(self, folder: Path, seed: int) -> Splits:
        drawn = np.random.default_rng(seed)
        x, y = _grey(folder, "mnist", "train")
        train = self._paired(x, y, np.arange(len(y)), self.train, drawn)
        x, y = _grey(folder, "mnist", "test")
        order, half = _order(len(y), seed), len(y) // 2
        pool = self._paired(x, y, order[:half], self.pool, drawn)
        test = self._paired(x, y, order[half:], self.test, drawn)
        others = {}
        for name in self.ood:
            x, y = _grey(folder, name, "test")
            others[name] = self._paired(x, y, np.arange(len(y)), self.unusual, drawn)[0]
        return Splits(train, pool, test, 100, others)

    @staticmethod
    def _paired(x: Array, y: Array, among: Array, count: int, drawn: np.random.Generator) -> Examples:
        left, right = drawn.choice(among, count), drawn.choice(among, count)
        images = torch.from_numpy(np.concatenate([x[left], x[right]], 2)).float().unsqueeze(1) / 255
        return F.avg_pool2d(images, 2).flatten(1), torch.from_numpy(10 * y[left] + y[right])


# Tables.


def _scikit_learn(name: str) -> tuple[Array, Array]:
    import sklearn.datasets

    bunch = getattr(sklearn.datasets, f"load_{name}")()
    return bunch.data, bunch.target


def _table(folder: Path, name: str) -> tuple[Array, Array]:
    """Features and labels 0, 1, ... of a set of scikit-learn or of the data folder."""
    if name in ("digits", "wine", "breast_cancer", "iris"):
        return _scikit_learn(name)
    path = folder / "uci_classification" / f"{name}.npz"
    if not path.is_file():
        path = folder / "uci_classification" / f"{name}_presplit.npz"
    content = np.load(_existing(path))
    if "X" in content:
        x, y = content["X"], content["y"]
    else:
        x, y = (np.concatenate([content[f"{v}_tr"], content[f"{v}_te"]]) for v in "Xy")
    return x, np.unique(y, return_inverse=True)[1]


@dataclass(frozen=True)
class Table:
    """A table of a classification, standardised by its training rows.

    Unusual inputs are made from rows that the network has not seen: "scaled" is three times the standardised test rows; "shuffled" has
    every column of the test rows permuted by itself, so that every number is usual and their combination is not; "unseen" are the rows
    of classes that were left out of everything else; "box" are uniform draws from the box that is 1.5 times that of the training rows. For
    scikit-learn's digits, "kmnist" and "notmnist" are these images, reduced to 8 × 8.

    Attributes:
        name: The set.
        train: How many training rows.
        pool: How many rows validation sets are drawn from.
        test: How many test rows, at most.
        unseen: Classes that are left out, and are unusual inputs.
        ood: The kinds of unusual inputs.
        binary: Whether two classes are one logit with targets 0 and 1.
        unusual: How many unusual inputs of each kind, at most.
    """

    name: str
    train: int
    pool: int
    test: int = 1000
    unseen: tuple[int, ...] = ()
    ood: tuple[str, ...] = ("scaled", "shuffled")
    binary: bool = False
    unusual: int = 400

    def load(self, folder: Path, seed: int) -> Splits:
        x, y = _table(folder, self.name)
        left_out = np.isin(y, self.unseen)
        others = x[left_out]
        x, y = x[~left_out], np.unique(y[~left_out], return_inverse=True)[1]
        order = _order(len(y), seed)
        cut = np.split(order, [self.train, self.train + self.pool])
        cut[2] = cut[2][: self.test]
        mean, deviation = x[cut[0]].mean(0), x[cut[0]].std(0)
        deviation = np.where(deviation > 1e-6 * (np.abs(mean) + 1), deviation, 1.0)

        def standardised(rows: Array) -> Tensor:
            return torch.from_numpy((rows - mean) / deviation).float()

        labels = torch.from_numpy(y[:, None].astype(np.float32) if self.binary else y.astype(np.int64))
        train, pool, test = ((standardised(x[rows]), labels[rows]) for rows in cut)
        drawn = np.random.default_rng(seed + 1)
        makers: dict[str, Callable[[], Tensor]] = {
            "scaled": lambda: SCALED * test[0],
            "shuffled": lambda: torch.stack([column[drawn.permutation(len(column))] for column in test[0].T], 1),
            "unseen": lambda: standardised(others[drawn.permutation(len(others))]),
            "box": lambda: self._box(train[0], drawn),
            "kmnist": lambda: standardised(self._small_images(folder, "kmnist", seed)),
            "notmnist": lambda: standardised(self._small_images(folder, "notmnist", seed)),
        }
        unusual = {kind: makers[kind]()[: self.unusual] for kind in self.ood}
        return Splits(train, pool, test, 1 if self.binary else int(y.max()) + 1, unusual)

    def _box(self, train: Tensor, drawn: np.random.Generator) -> Tensor:
        low, high = train.amin(0), train.amax(0)
        middle, half = (low + high) / 2, 1.5 * (high - low) / 2
        return middle + half * torch.from_numpy(drawn.uniform(-1, 1, (self.unusual, train.shape[1]))).float()

    def _small_images(self, folder: Path, name: str, seed: int) -> Array:
        x, y = _grey(folder, name, "test")
        small = 16 * _as_input(x[_order(len(y), seed + 1)[: self.unusual]], "half")
        return small.round().double().numpy()  # the digits are whole numbers from 0 to 16


@dataclass(frozen=True)
class Regression:
    """A table of a regression; features and targets are standardised by the training rows.

    The test rows are those of the standard split whose number is the seed; scikit-learn's diabetes is split at random.

    Attributes:
        name: The set.
        train: How many training rows, at most.
        pool: How many rows validation sets are drawn from.
        test: How many test rows, at most.
    """

    name: str
    train: int
    pool: int
    test: int = 1000

    def load(self, folder: Path, seed: int) -> Splits:
        if self.name == "diabetes":
            x, y = _scikit_learn("diabetes")
            tested, rest = np.split(_order(len(y), seed), [len(y) // 10])
        else:
            content = np.load(_existing(folder / "uci_regression" / f"{self.name}.npz"))
            x, y, tested = content["X"], content["y"], content[f"test_{seed}"]
            rest = np.setdiff1d(np.arange(len(y)), tested)
        rest = rest[_order(len(rest), seed + 1)]
        cut = rest[: self.pool], rest[self.pool : self.pool + self.train], tested[: self.test]
        y = y.reshape(len(x), -1)
        centre, spread = x[cut[1]].mean(0), x[cut[1]].std(0)
        middle, width = y[cut[1]].mean(0), y[cut[1]].std(0)
        spread = np.where(spread > 1e-6 * (np.abs(centre) + 1), spread, 1.0)

        def pick(rows: Array) -> Examples:
            inputs, targets = (x[rows] - centre) / spread, (y[rows] - middle) / width
            return torch.from_numpy(inputs).float(), torch.from_numpy(targets).float()

        pool, train, test = (pick(rows) for rows in cut)
        return Splits(train, pool, test, y.shape[1])
