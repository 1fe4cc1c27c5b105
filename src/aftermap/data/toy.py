"""Toy problems with a known answer: for pictures, tutorials and tests."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from aftermap.data.examples import Examples
from aftermap.errors import InputError

__all__ = ["TOYS", "toy"]


def _cubic(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = 8 * torch.rand(n, 1, generator=g) - 4
    return x, x**3 + 3 * torch.randn(n, 1, generator=g)


def _gap(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    side = torch.rand(n, 1, generator=g) < 0.5
    x = torch.where(side, -2 + 1.2 * torch.rand(n, 1, generator=g), 0.8 + 1.2 * torch.rand(n, 1, generator=g))
    return x, torch.sin(2 * x) + 0.1 * torch.randn(n, 1, generator=g)


def _moons(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % 2
    angle = math.pi * torch.rand(n, generator=g)
    x = torch.stack([torch.cos(angle) * (1 - 2 * y) + y, torch.sin(angle) * (1 - 2 * y) + 0.5 * y], 1)
    return x + 0.15 * torch.randn(n, 2, generator=g), y


def _blobs(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % 3
    angle = 2 * math.pi * y / 3
    return 2 * torch.stack([torch.cos(angle), torch.sin(angle)], 1) + 0.7 * torch.randn(n, 2, generator=g), y


TOYS: dict[str, Callable[[int, torch.Generator], tuple[Tensor, Tensor]]] = {
    "cubic": _cubic,
    "gap": _gap,
    "moons": _moons,
    "blobs": _blobs,
}


def toy(name: str, n: int = 200, *, generator: torch.Generator | None = None) -> Examples:
    """A toy problem.

    Args:
        name: "cubic" (y = x³ + N(0, 9), x in [-4, 4]; Hernández-Lobato & Adams 2015), "gap" (y = sin 2x + N(0, 0.01) with a
            gap in the middle), "moons" (two classes) or "blobs" (three classes).
        n: how many examples.
        generator: None: a seed of 0, the same data at every call.

    Raises:
        InputError: another name, or no examples.

    >>> toy("moons", 6).targets
    tensor([0, 1, 0, 1, 0, 1])
    """
    if name not in TOYS:
        raise InputError(f"there is no toy problem {name!r}; there are {', '.join(TOYS)}")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InputError(f"n must be a whole number of at least 1, got {n!r}")
    x, y = TOYS[name](n, generator or torch.Generator().manual_seed(0))
    return Examples(x, y, name)
