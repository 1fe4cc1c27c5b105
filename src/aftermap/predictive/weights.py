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
    """A few entries of every parameter and floating-point buffer: cheap to compare, and every training step moves them."""

    entries: dict[str, Tensor]

    @staticmethod
    def of(model: nn.Module) -> WeightsWatch:
        """Looks at a model."""
        return WeightsWatch({n: _some(t) for n, t in _state(model).items()})

    def check(self, model: nn.Module) -> None:
        """Raises if the model has changed."""
        now = _state(model)
        changed = [n for n, t in self.entries.items() if n not in now or not torch.equal(_some(now[n]), t)]
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise InputError(
                f"the model's weights have changed since the fit ({', '.join(changed[:3])}{more}). A Laplace approximation holds "
                "around the weights it was fitted at: fit again, or restore them"
            )


def _state(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.detach() for n, p in model.named_parameters()}
    found.update({n: b for n, b in model.named_buffers() if b.is_floating_point()})
    return found


def _some(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _ENTRIES)].clone()
