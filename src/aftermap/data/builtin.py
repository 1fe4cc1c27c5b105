"""Data sets that come with scikit-learn: nothing to download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from aftermap.data.examples import Examples
from aftermap.errors import InputError
from aftermap.late import optional

__all__ = ["BUILTIN", "builtin", "photograph_patches"]


def _digits(datasets: Any) -> Examples:
    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    return Examples(images, torch.tensor(bunch.target), "digits", tuple(map(str, range(10))))


def _table(loader: str, name: str) -> Callable[[Any], Examples]:
    def load(datasets: Any) -> Examples:
        bunch = getattr(datasets, loader)()
        classes = tuple(map(str, bunch.target_names)) if hasattr(bunch, "target_names") else None
        target = torch.tensor(bunch.target) if classes else torch.tensor(bunch.target, dtype=torch.float32)
        columns = tuple(map(str, bunch.feature_names))
        return Examples(torch.tensor(bunch.data, dtype=torch.float32), target, name, classes, columns)

    return load


BUILTIN: dict[str, Callable[[Any], Examples]] = {
    "digits": _digits,
    "iris": _table("load_iris", "iris"),
    "wine": _table("load_wine", "wine"),
    "breast_cancer": _table("load_breast_cancer", "breast_cancer"),
    "diabetes": _table("load_diabetes", "diabetes"),
}


def builtin(name: str) -> Examples:
    """One of scikit-learn's bundled data sets.

    Args:
        name: digits (8×8 grey images, from 0 to 1), iris, wine, breast_cancer (classes) or diabetes (regression).

    Raises:
        InputError: another name.
        UnsupportedError: scikit-learn is not installed.

    >>> builtin("digits").inputs.shape
    torch.Size([1797, 1, 8, 8])
    """
    key = name.replace("-", "_")
    if key not in BUILTIN:
        raise InputError(f"there is no built-in data set {name!r}; there are {', '.join(BUILTIN)}")
    return BUILTIN[key](optional("sklearn.datasets", "sklearn", "the built-in data sets"))


def photograph_patches(count: int, size: int, *, seed: int = 0) -> Examples:
    """Small grey patches of scikit-learn's two sample photographs: data that no classifier of digits has seen.

    A patch of 4·size pixels is averaged down to ``size``, so that it shows more than a flat piece of sky, and its grey values are
    stretched from 0 to 1.

    >>> photograph_patches(3, 8).inputs.shape
    torch.Size([3, 1, 8, 8])
    """
    pictures = optional("sklearn.datasets", "sklearn", "sample photographs").load_sample_images().images
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        picture = np.asarray(pictures[generator.integers(len(pictures))], dtype=np.float32).mean(2)
        side = 4 * size
        top, left = (int(generator.integers(0, limit - side + 1)) for limit in picture.shape)
        patch = picture[top : top + side, left : left + side].reshape(size, 4, size, 4).mean((1, 3))
        low, high = float(patch.min()), float(patch.max())
        found.append((patch - low) / max(high - low, 1e-6))
    return Examples(torch.from_numpy(np.stack(found))[:, None], None, "photographs")
