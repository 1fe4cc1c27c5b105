"""Sums over processes: the only place that knows torch.distributed. In one process everything is a no-op."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["all_reduce_", "is_distributed", "rank", "shared_out", "world_size"]


def is_distributed() -> bool:
    """Whether a process group with more than one process is initialised."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """This process's number; 0 in one process."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """How many processes work together; 1 in one process."""
    return dist.get_world_size() if is_distributed() else 1


def all_reduce_(tensors: Sequence[Tensor]) -> None:
    """Sums each tensor over all processes, in place, with one message per dtype.

    >>> x = torch.ones(2)
    >>> all_reduce_([x])  # one process: nothing happens
    >>> x
    tensor([1., 1.])
    """
    if not is_distributed():
        return
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        same = [t for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in same])
        dist.all_reduce(flat)
        for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
            tensor.copy_(part.view_as(tensor))


def shared_out(
    costs: Sequence[float],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    work: Callable[[int], Sequence[Tensor]],
    like: Tensor,
) -> list[list[Tensor]]:
    """Does job i on one process only and gives its result to all; jobs go to the least loaded process, dearest first.

    Args:
        costs: one number per job.
        shapes: for each job the shapes of the tensors that it returns.
        work: ``work(i)`` does job i.
        like: dtype and device of the results.

    Returns:
        For each job its tensors, the same on every process.
    """
    if not is_distributed():
        return [list(work(i)) for i in range(len(costs))]
    load = [0.0] * world_size()
    owner = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner[job] = min(range(len(load)), key=load.__getitem__)
        load[owner[job]] += costs[job]
    results: list[list[Tensor]] = []
    for job, job_shapes in enumerate(shapes):
        if owner[job] == rank():
            results.append([t.contiguous() for t in work(job)])
        else:
            results.append([torch.empty(s, dtype=like.dtype, device=like.device) for s in job_shapes])
    for job, tensors in enumerate(results):
        for tensor in tensors:
            dist.broadcast(tensor, src=owner[job])
    return results
