"""h + c + γ and its root, kept from one use to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.optim.chunks import as_one, side_by_side

__all__ = ["ChunkDenominators", "Denominators"]

_MOST_CHUNKS = 1000  # that are remembered, where parameters take part in ever new combinations


@dataclass(slots=True)
class _Kept:
    """``value`` is h + shift, or its root, of the curvature h as it was at a version (−1: of none yet)."""

    value: Tensor
    curvature: Tensor
    version: int = -1
    shift: float = 0.0
    rooted: bool = False


class ChunkDenominators:
    """h + shift or √(h + shift) of parameters that are worked on at once."""

    def __init__(self, kept: list[_Kept]):
        self._kept = kept
        self.curvature, self._values = [k.curvature for k in kept], [k.value for k in kept]
        whole = as_one(self.curvature), as_one(self._values)
        # The same as vectors, where everything lies side by side.
        self._vectors = ([whole[0]], [whole[1]]) if whole[0] is not None and whole[1] is not None else None

    def plain(self, shift: float) -> list[Tensor]:
        """h + shift of each parameter; valid until something else is asked for."""
        if not self._is_of(shift) or any(k.rooted for k in self._kept):
            self._renew(shift)
        return self._values

    def root(self, shift: float) -> list[Tensor]:
        """√(h + shift) of each parameter; valid until something else is asked for."""
        if not self._is_of(shift) or len({k.rooted for k in self._kept}) > 1:
            self._renew(shift)
        if not self._kept[0].rooted:
            torch._foreach_sqrt_(self._values if self._vectors is None else self._vectors[1])
            for k in self._kept:
                k.rooted = True
        return self._values

    def beside(self, others: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """h, tensors of the same shapes, and what was asked for last: as vectors, where all lie side by side."""
        one = None if self._vectors is None else as_one(others)
        if one is None or self._vectors is None:
            return self.curvature, others, self._values
        return self._vectors[0], [one], self._vectors[1]

    def _is_of(self, shift: float) -> bool:
        return all(k.version == k.curvature._version and k.shift == shift for k in self._kept)

    def _renew(self, shift: float) -> None:
        for h, value in zip(*(self._vectors or (self.curvature, self._values)), strict=True):
            torch.add(h, shift, out=value)
        for k in self._kept:
            k.version, k.shift, k.rooted = k.curvature._version, shift, False


class Denominators:
    """h + shift or √(h + shift) of parameters, in memory of its own: worked out again only where h or shift has changed.

    >>> kept, weight, h = Denominators(), torch.zeros(2), torch.tensor([3.0, 8.0])
    >>> kept.of([weight], [h]).root(1.0)[0].tolist()
    [2.0, 3.0]
    >>> _ = h.add_(1)
    >>> kept.of([weight], [h]).plain(1.0)[0].tolist()
    [5.0, 10.0]
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}  # by the parameter's id
        self._chunks: dict[tuple[int, ...], ChunkDenominators] = {}

    def clear(self) -> None:
        """Forgets everything."""
        self._kept.clear()
        self._chunks.clear()

    def of(self, params: Sequence[Tensor], curvature: Sequence[Tensor]) -> ChunkDenominators:
        """Those of some parameters with these curvatures h.

        A parameter has one memory, whatever others it is asked for with.
        """
        key = tuple(map(id, params))
        chunk = self._chunks.get(key)
        if chunk is None or any(a is not b for a, b in zip(chunk.curvature, curvature, strict=True)):
            if len(self._chunks) >= _MOST_CHUNKS:
                self._chunks.clear()
            chunk = self._chunks[key] = ChunkDenominators(self._memory(key, curvature))
        return chunk

    def _memory(self, key: tuple[int, ...], curvature: Sequence[Tensor]) -> list[_Kept]:
        found = [self._kept.get(i) for i in key]
        kept = [k for k, h in zip(found, curvature, strict=True) if k is not None and k.curvature is h]
        if len(kept) < len(key):
            self._chunks.clear()  # they hold the old memory
            made = side_by_side([torch.empty_like(h) for h in curvature])
            kept = [_Kept(value, h) for value, h in zip(made, curvature, strict=True)]
            self._kept.update(zip(key, kept, strict=True))
        return kept
