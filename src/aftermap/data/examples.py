"""Data in memory: inputs, targets and what is known about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aftermap.errors import DataError, ShapeError

__all__ = ["Examples", "as_inputs", "as_targets", "existing_file"]


@dataclass(frozen=True)
class Examples:
    """A data set that fits into memory.

    Attributes:
        inputs: [N, ...], floating point, or whole numbers (tokens).
        targets: [N] class indices, or numbers [N] or [N, D]; None where there are none.
        name: for tables.
        classes: names of the classes, by index; None where they are unknown.
        columns: names of the input columns of a table; None elsewhere.
    """

    inputs: Tensor
    targets: Tensor | None
    name: str
    classes: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) == 0:
            raise DataError(f"{self.name} holds no example")
        if self.targets is not None and len(self.targets) != len(self.inputs):
            raise ShapeError(f"{self.name} holds {len(self.inputs)} inputs, but {len(self.targets)} targets")

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, index: Tensor | slice) -> Examples:
        """Some of the examples, by their numbers or a slice.

        >>> len(Examples(torch.zeros(5, 2), torch.arange(5), "five").take(slice(0, 3)))
        3
        """
        targets = None if self.targets is None else self.targets[index]
        return replace(self, inputs=self.inputs[index], targets=targets)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches (x, y) in order; y is None where there are no targets."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield self.inputs[part], None if self.targets is None else self.targets[part]

    @property
    def is_classes(self) -> bool:
        """Whether the targets are class indices."""
        return self.targets is not None and not self.targets.is_floating_point()


def as_inputs(values: npt.NDArray[np.generic], where: str) -> Tensor:
    """An array as a network takes it.

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
    if values.dtype.kind == "f":
        found = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        return found
    if values.dtype.kind in "iub":
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
    raise DataError(f"{where} holds {values.dtype}, which are no numbers")


def as_targets(values: npt.NDArray[np.generic], where: str) -> Tensor:
    """Whole numbers as class indices (int64), others as float32."""
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.dtype.kind in "iub":
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
    if values.dtype.kind == "f":
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    raise DataError(f"{where} holds {values.dtype}, which are no numbers")


def existing_file(path: str | Path) -> Path:
    """The file, which must be there."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"there is no file {file}" + (": it is a folder" if file.is_dir() else ""))
    return file
