"""Data in memory: inputs and targets, parts that never overlap, and toy problems with a known answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aftermap import checks
from aftermap.errors import DataError, InputError, ShapeError

__all__ = ["PARTS", "TOYS", "Examples", "as_inputs", "as_targets", "existing_file", "part_of", "split", "toy"]

PARTS = ("train", "validation", "test")
_SEED = 20180  # The seed is fixed: training and testing may happen in different processes, weeks apart.


@dataclass(frozen=True)
class Examples:
    """A data set that fits into memory.

    Attributes:
        inputs: The inputs [N, ...], in floating point, or as whole numbers (tokens).
        targets: The class indices [N], or numbers [N] or [N, D]; None where there are no targets.
        name: The name of the data set in tables.
        classes: The names of the classes, by index; None where they are unknown.
        columns: The names of the input columns of a table; None elsewhere.
        identifiers: What says which example is which, by name, one text per example: the file of an image, and the columns of a
            table that are neither inputs nor targets.
        rescaled: Whether the inputs were bytes, which were taken as pixels and divided by 255.
        counting: The input columns of a table that may only number its rows, as identifiers do.
    """

    inputs: Tensor
    targets: Tensor | None
    name: str
    classes: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    identifiers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rescaled: bool = False
    counting: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.inputs.dim() == 0 or len(self.inputs) == 0:
            raise DataError(f"{self.name} holds no example")
        if self.inputs.numel() == 0:
            raise DataError(f"{self.name} holds inputs of shape {list(self.inputs.shape)}: there is no number in them")
        if self.targets is not None and len(self.targets) != len(self.inputs):
            raise ShapeError(f"{self.name} holds {len(self.inputs)} inputs, but {len(self.targets)} targets")

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, index: Tensor | slice) -> Examples:
        """Returns some of the examples, by their numbers or a slice.

        >>> len(Examples(torch.zeros(5, 2), torch.arange(5), "five").take(slice(0, 3)))
        3
        """
        targets = None if self.targets is None else self.targets[index]
        numbers = torch.arange(len(self))[index].tolist() if self.identifiers else []
        identifiers = {name: tuple(texts[i] for i in numbers) for name, texts in self.identifiers.items()}
        return replace(self, inputs=self.inputs[index], targets=targets, identifiers=identifiers)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yields batches (x, y) in order; y is None where there are no targets."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield self.inputs[part], None if self.targets is None else self.targets[part]

    @property
    def is_classes(self) -> bool:
        """Whether the targets are class indices."""
        return self.targets is not None and not self.targets.is_floating_point()


def as_inputs(values: npt.NDArray[np.generic], where: str) -> Tensor:
    """Returns an array in the form that a network takes.

    Bytes are pixels: they are divided by 255, and images [N, H, W] or [N, H, W, 1 or 3] get the layout [N, C, H, W]. Floating
    point becomes float32, whole numbers int64.

    >>> as_inputs(np.full((2, 4, 4, 3), 255, dtype=np.uint8), "x").shape
    torch.Size([2, 3, 4, 4])
    """
    if values.dtype == np.uint8:
        pixels = torch.from_numpy(np.ascontiguousarray(values))
        if pixels.dim() == 4 and pixels.shape[-1] in (1, 3) and pixels.shape[1] not in (1, 3):
            pixels = pixels.permute(0, 3, 1, 2)
        if pixels.dim() == 3:
            pixels = pixels[:, None]
        return pixels.float().div_(255).contiguous()
    return _numbers(values, where)


def as_targets(values: npt.NDArray[np.generic], where: str) -> Tensor:
    """Returns whole numbers as class indices (int64), and other numbers as float32."""
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    return _numbers(values, where)


def _numbers(values: npt.NDArray[np.generic], where: str) -> Tensor:
    """Returns whole numbers as int64, others as float32; what does not fit into these is refused."""
    if values.dtype.kind not in "iubf":
        raise DataError(f"{where} holds {values.dtype}, which are not numbers")
    wanted = np.float32 if values.dtype.kind == "f" else np.int64
    limits = np.finfo(np.float32) if wanted is np.float32 else np.iinfo(np.int64)
    if not np.can_cast(values.dtype, wanted) and values.dtype.kind in "uf" and values.size:
        finite = values[np.isfinite(values)]
        largest = np.abs(finite).max() if finite.size else 0
        if largest > limits.max:
            raise DataError(f"{where} holds {largest:g}, a number too large for {np.dtype(wanted)}; scale the numbers")
    if wanted is np.float32 and not np.isfinite(values).all():
        bad = np.argwhere(~np.isfinite(values))
        rows = len(np.unique(bad[:, 0]))
        raise DataError(
            f"{where} holds {values[tuple(bad[0])]} at index {bad[0].tolist()}; {rows:,} of {len(values):,} examples are not finite. "
            "Fill or correct these numbers, or leave the examples out"
        )
    return torch.from_numpy(np.ascontiguousarray(values, dtype=wanted))


def existing_file(path: str | Path) -> Path:
    """Returns the file, and raises an error if it is not there or larger than the memory."""
    file = Path(path).expanduser()
    try:
        there, size = file.is_file(), file.stat().st_size if file.is_file() else 0
    except (OSError, ValueError) as error:  # A name that is too long, or a folder that may not be read.
        raise DataError(f"there is no file {str(file)[:200]}: {error}") from error
    if not there:
        raise DataError(f"there is no file {file}" + (": it is a folder" if file.is_dir() else ""))
    checks.memory(str(file), size)
    return file


def split(data: Examples, *, validation: float, test: float) -> dict[str, Examples]:
    """Splits data into train, validation and test parts, by a fixed permutation of the examples.

    Args:
        data: The data to split; the same data are always split in the same way.
        validation: The share of the validation part, in [0, 1).
        test: The share of the test part, in [0, 1).

    Returns:
        The parts by name; a part of share 0 is left out.

    Raises:
        InputError: The shares leave nothing for training.
        DataError: There are too few examples for the parts.

    >>> data = Examples(torch.arange(10.0)[:, None], None, "ten")
    >>> {name: len(part) for name, part in split(data, validation=0.2, test=0.2).items()}
    {'train': 6, 'validation': 2, 'test': 2}
    """
    if min(validation, test) < 0 or not validation + test < 1:
        raise InputError(f"the shares validation={validation} and test={test} must be at least 0 and together below 1")
    n = len(data)
    n_test, n_validation = round(test * n), round(validation * n)
    sizes = {"train": n - n_test - n_validation, "validation": n_validation, "test": n_test}
    empty = [k for k, share in (("validation", validation), ("test", test)) if share > 0 and sizes[k] == 0]
    if empty or sizes["train"] < 1:
        raise DataError(f"{data.name} holds {n} examples, too few to be split")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(_SEED))
    parts, start = {}, 0
    for name in PARTS:
        if sizes[name]:
            parts[name] = data.take(order[start : start + sizes[name]])
            start += sizes[name]
    return parts


def part_of(data: Examples, part: str, *, validation: float = 0.2, test: float = 0.2) -> Examples:
    """Returns one part of a data set that has no official parts: "train", "validation", "test" or "all"."""
    if part == "all":
        return data
    checks.choice("part", part, (*PARTS, "all"))
    return split(data, validation=validation, test=test)[part]


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
    """Returns a toy problem with a known answer.

    Args:
        name: The problem: "cubic" (y = x³ + N(0, 9), x in [-4, 4]; Hernández-Lobato & Adams 2015), "gap" (y = sin 2x +
            N(0, 0.01) with a gap in the middle), "moons" (two classes) or "blobs" (three classes).
        n: The number of examples.
        generator: The source of the random draws. None means a seed of 0, so that the data are the same at every call.

    Raises:
        InputError: The name is unknown, or no examples are asked for.

    >>> toy("moons", 6).targets
    tensor([0, 1, 0, 1, 0, 1])
    """
    if name not in TOYS:
        raise InputError(f"there is no toy problem {name!r}; there are {', '.join(TOYS)}")
    n = checks.count("n", n)
    x, y = TOYS[name](n, generator or torch.Generator().manual_seed(0))
    return Examples(x, y, name)
