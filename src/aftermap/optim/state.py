"""An optimiser's state: what it keeps per parameter, saving and loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from aftermap.errors import InputError
from aftermap.optim.noise import NoiseSource
from aftermap.optim.schedules import parse_schedule

__all__ = ["check_state", "load_extra", "momenta", "saved_extra"]

_VERSION = 1


def momenta(optimizer: Optimizer, params: Sequence[Tensor]) -> list[Tensor]:
    """The momentum of each parameter, 0 before its first step."""
    states = [optimizer.state[p] for p in params]
    for p, state in zip(params, states, strict=True):
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
    return [state["momentum"] for state in states]


def saved_extra(optimizer: Any) -> dict[str, Any]:
    """Everything beyond PyTorch's state, in plain numbers and words."""
    return {
        "version": _VERSION,
        "kind": type(optimizer).__name__,
        "steps": optimizer.steps,
        "skipped_steps": optimizer.skipped_steps,
        "seed": optimizer._noise.seed,
        "temperature": optimizer.settings.temperature.config(),
    }


def check_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raises unless a state belongs to this kind of optimiser and to parameters of these shapes."""
    kind = type(optimizer).__name__
    extra = state.get("aftermap")
    if not isinstance(extra, Mapping):
        raise InputError(f"this is not a state of {kind}: it was saved by another optimiser. Nothing was changed")
    if extra.get("kind") != kind:
        raise InputError(
            f"this state was saved by {extra.get('kind')}, but this optimiser is {kind}. Nothing was changed"
        )
    if extra.get("version") != _VERSION:
        raise InputError(
            f"this state has version {extra.get('version')}, but {_VERSION} is understood. Nothing was changed"
        )
    ours, theirs = optimizer.param_groups, state["param_groups"]
    sizes = [len(g["params"]) for g in ours], [len(g["params"]) for g in theirs]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"the saved parameter groups hold {sizes[1]} parameters, but this optimiser's hold {sizes[0]}. Nothing was changed"
        )
    for group, saved in zip(ours, theirs, strict=True):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            for name in ("momentum", "curvature"):
                value = state["state"].get(key, {}).get(name)
                if value is not None and value.shape != parameter.shape:
                    raise InputError(
                        f"the saved {name} of parameter {key} has shape {tuple(value.shape)}, but the parameter has shape "
                        f"{tuple(parameter.shape)}. Nothing was changed"
                    )


def load_extra(optimizer: Any, extra: Mapping[str, Any]) -> None:
    """Restores step, seed and schedules."""
    optimizer.steps = int(extra["steps"])
    optimizer.skipped_steps = int(extra["skipped_steps"])
    optimizer._noise = NoiseSource(int(extra["seed"]), optimizer._noise.group)
    optimizer.settings = replace(optimizer.settings, temperature=parse_schedule(extra["temperature"], "temperature"))
    optimizer._own_priors = any("prior_precision" in own for own in optimizer.state.values())
    optimizer._held = None
    optimizer._draws = 0
