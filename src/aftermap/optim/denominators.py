"""h + c + γ and its root, kept from one use to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Denominators"]


@dataclass(slots=True)
class _Kept:
    """``value`` is h + shift, or its root, of the curvature h as it was at a version (−1: of none yet)."""

    value: Tensor
    curvature: Tensor
    version: int = -1
    shift: float = 0.0
    rooted: bool = False

    def is_of(self, shift: float) -> bool:
        """Whether h and the shift are what they were."""
        return self.version == self.curvature._version and self.shift == shift

    def renew(self, shift: float) -> None:
        """Works h + shift out again, in place."""
        torch.add(self.curvature, shift, out=self.value)
        self.version, self.shift, self.rooted = self.curvature._version, shift, False


class Denominators:
    """h + shift or √(h + shift) of parameters, in memory of its own: worked out again only where h or shift has changed.

    What is asked for overwrites what was asked for before.

    >>> kept, weight, h = Denominators(), torch.zeros(2), torch.tensor([3.0, 8.0])
    >>> kept.root([weight], [h], 1.0)[0].tolist()
    [2.0, 3.0]
    >>> _ = h.add_(1)
    >>> kept.plain([weight], [h], 1.0)[0].tolist()
    [5.0, 10.0]
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}  # by the parameter's id

    def clear(self) -> None:
        """Forgets everything."""
        self._kept.clear()

    def plain(self, params: Sequence[Tensor], curvature: Sequence[Tensor], shift: float) -> list[Tensor]:
        """h + shift of each parameter."""
        kept = self._of(params, curvature)
        for k in kept:
            if k.rooted or not k.is_of(shift):
                k.renew(shift)
        return [k.value for k in kept]

    def root(self, params: Sequence[Tensor], curvature: Sequence[Tensor], shift: float) -> list[Tensor]:
        """√(h + shift) of each parameter."""
        kept = self._of(params, curvature)
        for k in kept:
            if not k.is_of(shift):
                k.renew(shift)
        plain = [k for k in kept if not k.rooted]
        if plain:
            torch._foreach_sqrt_([k.value for k in plain])
        for k in plain:
            k.rooted = True
        return [k.value for k in kept]

    def _of(self, params: Sequence[Tensor], curvature: Sequence[Tensor]) -> list[_Kept]:
        found: list[_Kept] = []
        for parameter, h in zip(params, curvature, strict=True):
            kept = self._kept.get(id(parameter))
            if kept is None or kept.curvature is not h:
                kept = self._kept[id(parameter)] = _Kept(torch.empty_like(h), h)
            found.append(kept)
        return found
