"""How many parameters are worked on at once, and tensors that lie side by side in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

__all__ = ["as_one", "in_chunks", "views"]

Item = TypeVar("Item")
_CHUNK_NUMBERS = 1 << 18  # parameters that are worked on at once: few enough for the cache, enough to launch one kernel


def in_chunks(
    items: Sequence[tuple[Item, Tensor]], numbers: int = _CHUNK_NUMBERS
) -> Iterator[list[tuple[Item, Tensor]]]:
    """Parts of a list of (anything, parameter) with up to ``numbers`` numbers each, or with one parameter.

    >>> [len(part) for part in in_chunks([("a", torch.zeros(2)), ("b", torch.zeros(3)), ("c", torch.zeros(7))], 5)]
    [2, 1]
    """
    part: list[tuple[Item, Tensor]] = []
    size = 0
    for item in items:
        size += item[1].numel()
        if part and size > numbers:
            yield part
            part, size = [], item[1].numel()
        part.append(item)
    if part:
        yield part


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The beginning of a vector as tensors of these shapes, one after the other.

    >>> [v.tolist() for v in views(torch.arange(4.0), [torch.zeros(2), torch.zeros(1, 1)])]
    [[0.0, 1.0], [[2.0]]]
    """
    if all(t.numel() for t in like):
        return list(_unflatten_dense_tensors(flat, like))
    sizes = [t.numel() for t in like]  # PyTorch's function forgets the shape of what is empty
    return [part.view(t.shape) for part, t in zip(torch.split(flat[: sum(sizes)], sizes), like, strict=True)]


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """The vector of all numbers, in the same memory, of tensors that follow each other there; None where they do not.

    >>> as_one(views(torch.arange(3.0), [torch.zeros(2), torch.zeros(1)])).tolist()
    [0.0, 1.0, 2.0]
    >>> as_one([torch.zeros(2), torch.ones(2)]) is None
    True
    """
    first = tensors[0]
    start = end = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.dtype != first.dtype or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    # Two memories can touch each other; a third one cannot lie between the ends of one.
    if first.untyped_storage().data_ptr() != tensors[-1].untyped_storage().data_ptr():
        return None
    return first.as_strided(((end - start) // first.element_size(),), (1,))
