"""The plan by which closures are read: which layers share parameters, where their batch is, and what has no rule."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.curvature.capture import RootCall, Seen
from aftermap.curvature.sites import Sites
from aftermap.curvature.step import ArrangedCall
from aftermap.errors import InputError

__all__ = ["Arrived", "Plan", "evaluating", "inputs_of", "is_low_precision", "outer_of_calls"]

Arrived = list[tuple[ArrangedCall, Tensor]]


@dataclass(frozen=True)
class Plan:
    """How each parameter is treated.

    Attributes:
        axes: (site, id of the module) -> dimension of the batch; missing: the first.
        by_parameter: parameter -> its sites.
        reasons: parameter without a rule -> why.
        cluster: site -> number of its cluster: sites that share a parameter are read together.
        alone: sites that share no parameter with another.
    """

    axes: Mapping[tuple[int, int], int]
    by_parameter: Mapping[str, Sequence[int]]
    reasons: Mapping[str, str]
    cluster: Mapping[int, int]
    alone: frozenset[int]

    @staticmethod
    def make(axes: Mapping[tuple[int, int], int], sites: Sites, reasons: Mapping[str, str]) -> Plan:
        """Joins sites that share a parameter; parameters with a reason have no rule."""
        by_parameter = {n: s for n, s in sites.by_parameter().items() if n not in reasons}
        cluster: dict[int, int] = {}
        for numbers in by_parameter.values():
            known = {cluster.get(s, s) for s in numbers}
            first = min(known)
            cluster.update({s: first for s, c in cluster.items() if c in known})
            cluster.update(dict.fromkeys(numbers, first))
        shared = {s for numbers in by_parameter.values() if len(numbers) > 1 for s in numbers}
        return Plan(dict(axes), by_parameter, dict(reasons), cluster, frozenset(range(len(sites.sites))) - shared)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode; each module's own mode comes back."""
    before = [(m, m.training) for m in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in before:
            module.training = mode


def outer_of_calls(calls: Arrived, start: int, length: int) -> Tensor:
    """Per-example gradients [1, length, g, o, i] over every call."""
    total: Tensor | None = None
    for call, grads in calls:
        each = call.rows.narrow(start, length).outer(grads[:, start : start + length])
        total = each if total is None else total + each
    if total is None:
        raise InputError("no call of a layer was recorded")
    return total


def is_low_precision(seen: Seen) -> bool:
    """Whether the outputs are 16-bit numbers (autocast)."""
    return any(r.output is not None and r.output.dtype in (torch.bfloat16, torch.float16) for r in seen.roots)


def inputs_of(model: nn.Module, root: RootCall) -> Any:
    """The arguments of a call as the inputs of a batch: a tensor, a tuple or a mapping; None if they cannot be told."""
    if not root.kwargs:
        return root.args[0] if len(root.args) == 1 else tuple(root.args)
    if not root.args:
        return dict(root.kwargs)
    try:
        return dict(inspect.signature(model.forward).bind(*root.args, **root.kwargs).arguments)
    except (TypeError, ValueError):
        return None
