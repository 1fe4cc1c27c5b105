"""The prior as an update sees it: one number for a group, or one per weight after an earlier task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aftermap.errors import InputError

__all__ = ["prior_of", "store_prior"]


def prior_of(group: Mapping[str, Any], params: Sequence[Tensor], state: Any, factor: float) -> tuple[Any, Any]:
    """(factor · δ, μ₀): numbers, or lists of tensors where a prior per weight was set in the group; factor is τ/N."""
    if not params or not any("prior_precision" in state.get(p, {}) for p in group["params"]):
        return factor * group["prior_precision"], group["prior_mean"]
    precision, mean = [], []
    for p in params:
        own = state[p]
        known = "prior_precision" in own
        precision.append(
            own["prior_precision"] * factor if known else torch.full_like(p, factor * group["prior_precision"])
        )
        mean.append(own["prior_mean"] if known else torch.full_like(p, group["prior_mean"]))
    return precision, mean


def store_prior(
    params: Mapping[str, Tensor], state: Any, mean: Mapping[str, Tensor], precision: Mapping[str, Tensor]
) -> None:
    """Checks a prior per weight and keeps it with the parameters' state."""
    for name, value in precision.items():
        if name not in params:
            raise InputError(f"{name!r} is not trained by this optimiser; it trains {', '.join(list(params)[:5])}…")
        if value.shape != params[name].shape or name not in mean or mean[name].shape != value.shape:
            raise InputError(
                f"the prior of {name} must have a mean and a precision of shape {tuple(params[name].shape)}"
            )
        if not bool((value > 0).all()) or not bool(torch.isfinite(value).all()):
            raise InputError(f"the prior precision of {name} must be finite and above 0 everywhere")
    for name, value in precision.items():
        parameter = params[name]
        state[parameter]["prior_precision"] = value.detach().to(parameter).clone()
        state[parameter]["prior_mean"] = mean[name].detach().to(parameter).clone()
