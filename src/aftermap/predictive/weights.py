"""Notices when the weights of a model are no longer those that the posterior was fitted around."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aftermap.errors import InputError

__all__ = ["WeightsWatch"]

_ENTRIES = 64


@dataclass(frozen=True)
class WeightsWatch:
    """A few entries and a checksum of every parameter and floating-point buffer: cheap to compare, no copy of the weights.

    Attributes:
        entries: name -> some entries.
        sums: name -> the sum of all bits, read as whole numbers: a change of any one entry changes it.
    """

    entries: dict[str, Tensor]
    sums: dict[str, int]

    @staticmethod
    def of(model: nn.Module) -> WeightsWatch:
        """Looks at a model."""
        state = _state(model)
        return WeightsWatch({n: _some(t) for n, t in state.items()}, {n: _sum(t) for n, t in state.items()})

    def check(self, model: nn.Module) -> None:
        """Raises if the model has changed."""
        now = _state(model)
        changed = [n for n in self.entries if n not in now or not self._same(n, now[n])]
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise InputError(
                f"the model's weights have changed since the fit ({', '.join(changed[:3])}{more}). A Laplace approximation holds "
                "around the weights it was fitted at: fit again, or restore them"
            )

    def _same(self, name: str, value: Tensor) -> bool:
        return torch.equal(_some(value), self.entries[name]) and _sum(value) == self.sums[name]


def _state(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.detach() for n, p in model.named_parameters()}
    found.update({n: b for n, b in model.named_buffers() if b.is_floating_point()})
    return found


def _some(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _ENTRIES)].clone()


_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum(tensor: Tensor) -> int:
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return int(flat.view(_WHOLE[flat.element_size()]).sum(dtype=torch.int64))
