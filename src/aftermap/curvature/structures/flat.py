"""Tensors by name as one vector, and back: all entries of the parameters, or some of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aftermap.params import Params, flatten

__all__ = ["flatten_batch", "join_flat", "put_entries", "split_flat", "take_entries"]


def flatten_batch(values: Params, names: Sequence[str]) -> Tensor:
    """Joins tensors [v, b, *shape] by name to [v, b, p]."""
    return join_flat(values, names, 2)


def split_flat(vector: Tensor, shapes: dict[str, tuple[int, ...]]) -> Params:
    """Splits a vector [..., p] into tensors [..., *shape] by name."""
    sizes = [int(torch.Size(s).numel()) for s in shapes.values()]
    return {
        n: part.reshape((*vector.shape[:-1], *s))
        for (n, s), part in zip(shapes.items(), vector.split(sizes, dim=-1), strict=True)
    }


def join_flat(values: Params, names: Sequence[str], lead: int) -> Tensor:
    """Joins tensors [..., *shape] by name, with ``lead`` leading dimensions, to [..., p]."""
    if lead == 0:
        return flatten(values, names)
    return torch.cat(
        [values[n].flatten(lead) if values[n].dim() > lead else values[n][..., None] for n in names], dim=-1
    )


def take_entries(values: Mapping[str, Tensor], entries: Mapping[str, Tensor], lead: int) -> Tensor:
    """Takes entries of parameters [..., *shape] with ``lead`` leading dimensions: [..., S]."""
    return torch.cat(
        [
            values[n].reshape(*values[n].shape[:lead], -1)[..., place.to(values[n].device)]
            for n, place in entries.items()
        ],
        -1,
    )


def put_entries(
    vector: Tensor, entries: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Undoes `take_entries`: it puts [..., S] into parameters that are zero at every other entry.

    >>> put_entries(torch.tensor([5.0]), {"a": torch.tensor([1])}, {"a": (3,)})
    {'a': tensor([0., 5., 0.])}
    """
    values, lead = {}, vector.shape[:-1]
    parts = vector.split([len(p) for p in entries.values()], dim=-1)
    for (name, place), part in zip(entries.items(), parts, strict=True):
        flat = vector.new_zeros(*lead, math.prod(shapes[name]))
        flat[..., place.to(vector.device)] = part
        values[name] = flat.reshape(*lead, *shapes[name])
    return values
