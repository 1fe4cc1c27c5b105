"""A model's visible state, to show that a function left it alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ModelSnapshot", "check_unchanged"]


@dataclass(frozen=True)
class ModelSnapshot:
    """Everything of a model that a function must not change, as it was.

    Attributes:
        tensors: parameter or buffer -> (the object's id, a copy of its values).
        grads: parameter -> (id of ``.grad``, a copy of it), or None.
        requires_grad: by parameter.
        training: by module.
        attributes: module -> names in its ``__dict__``.
        hooks: module -> keys of each of its hook tables.
    """

    tensors: Mapping[str, tuple[int, Tensor]]
    grads: Mapping[str, tuple[int, Tensor] | None]
    requires_grad: Mapping[str, bool]
    training: Mapping[str, bool]
    attributes: Mapping[str, tuple[str, ...]]
    hooks: Mapping[str, Mapping[str, tuple[Any, ...]]]

    @staticmethod
    def of(model: nn.Module) -> ModelSnapshot:
        """The state of a model now."""
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        parameters = dict(model.named_parameters())
        modules = dict(model.named_modules())
        return ModelSnapshot(
            {n: (id(t), t.detach().clone()) for n, t in held.items()},
            {n: None if p.grad is None else (id(p.grad), p.grad.detach().clone()) for n, p in parameters.items()},
            {n: p.requires_grad for n, p in parameters.items()},
            {n: m.training for n, m in modules.items()},
            {n: tuple(m.__dict__) for n, m in modules.items()},
            {
                n: {k: tuple(v) for k, v in m.__dict__.items() if k.endswith(("_hooks", "_with_kwargs"))}
                for n, m in modules.items()
            },
        )


def check_unchanged(model: nn.Module, before: ModelSnapshot) -> None:
    """Raises unless a model is, bit by bit, what it was.

    Args:
        model: the model now.
        before: what it was.

    Raises:
        AssertionError: names everything that differs.

    >>> net = nn.Linear(2, 3)
    >>> before = ModelSnapshot.of(net)
    >>> check_unchanged(net, before)
    >>> _ = net.train(False)
    >>> check_unchanged(net, before)
    Traceback (most recent call last):
    ...
    AssertionError: the model was changed: training of the model
    """
    now = ModelSnapshot.of(model)
    wrong: list[str] = []
    for what in ("requires_grad", "training", "attributes", "hooks"):
        old, new = getattr(before, what), getattr(now, what)
        wrong += [f"{what} of {n or 'the model'}" for n in {**old, **new} if old.get(n) != new.get(n)]
    for what in ("tensors", "grads"):
        old, new = getattr(before, what), getattr(now, what)
        wrong += [f"{what} of {n}" for n in {**old, **new} if not _same(old.get(n), new.get(n))]
    if wrong:
        raise AssertionError(f"the model was changed: {', '.join(wrong)}")


def _same(old: tuple[int, Tensor] | None, new: tuple[int, Tensor] | None) -> bool:
    if old is None or new is None:
        return old is new
    (old_id, a), (new_id, b) = old, new
    if old_id != new_id or a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.device.type == "meta":  # no values to compare
        return True
    return bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(a.isnan(), b.isnan()))
