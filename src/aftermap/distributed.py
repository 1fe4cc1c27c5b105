"""Sums over processes: the only place that knows torch.distributed, where in one process everything is a no-op."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from aftermap.errors import DataError, InputError, ProcessError

__all__ = [
    "Mesh",
    "all_reduce_",
    "broadcast_",
    "broadcast_number",
    "distribute_work",
    "fail_together",
    "from_any_process",
    "is_distributed",
    "is_sharded",
    "launched_rank",
    "make_mesh",
    "process_group",
    "rank",
    "unsynchronised",
    "unwrapped",
    "world_size",
]

Item = TypeVar("Item")
_NOTE_BYTES = 512  # This many bytes of an error's message are told to the other processes.


@contextmanager
def process_group(device: torch.device | str = "cpu") -> Iterator[None]:
    """Lets the processes that torchrun started work together inside; without torchrun nothing happens.

    An initialised group is used as it is. The backend is NCCL for graphics cards, gloo otherwise; the group that was
    made here is left at the end.

    Args:
        device: The device where tensors will be.

    >>> with process_group():  # not started by torchrun
    ...     world_size()
    1
    """
    started = all(os.environ.get(k, "").strip() for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if not started or not dist.is_available() or dist.is_initialized() or int(os.environ["WORLD_SIZE"]) < 2:
        yield
        return
    on_cards = torch.device(device).type == "cuda"
    if on_cards:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    # What PyTorch imports with an optimiser keeps the group that exists at its import, as a default of arguments, and gloo's threads with
    # it. One that still gives back a tensor while the interpreter ends is aborted, and the process, too; so it is imported before.
    importlib.import_module("torch.distributed.nn.functional")
    with _talking():
        store, own_rank, world = next(iter(rendezvous("env://")))
        # After `torchrun --max-restarts` the store may still hold addresses of the processes of an earlier attempt.
        attempt = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group("nccl" if on_cards else "gloo", store=attempt, rank=own_rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _talking() -> Iterator[None]:
    """Turns what the backend raises when a process does not answer into one sentence.

    Raises:
        ProcessError: A message did not arrive.
    """
    try:
        yield
    except RuntimeError as error:
        message = str(error).strip().partition("\n")[0][:200]
        raise ProcessError(
            "another process has ended or does not answer, so this one stops, too. Look at the messages of the others; started again, "
            f"`aftermap train`, and `aftermap fit` with --checkpoint, go on where they were ({message})"
        ) from error


def launched_rank() -> int:
    """Returns the number that torchrun gave to this process, whether or not a process group exists; 0 without torchrun.

    >>> launched_rank()
    0
    """
    several = os.environ.get("WORLD_SIZE", "1").strip() not in ("", "1")
    return int(os.environ.get("RANK") or 0) if several else 0


def is_distributed() -> bool:
    """Tells whether a process group with more than one process is initialised."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Returns this process's number; 0 in one process."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Returns how many processes work together; 1 in one process."""
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
        flat = torch.cat([t.reshape(-1) for t in same]).to(_device(same[0]))
        with _talking():
            dist.all_reduce(flat)
        for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _device(like: Tensor) -> torch.device:
    """Returns where a message must lie, since NCCL only moves memory of its graphics card."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else like.device


@contextmanager
def fail_together(what: str) -> Iterator[None]:
    """Runs work of each process on its own, after which all go on or none: an error of one is raised by all.

    Without it, a process with bad data would stop and the others would wait for it for ever.

    Args:
        what: The work in words, for the message on the processes that did not fail.

    Raises:
        DataError: Another process failed while this one did not; the message is the other's.

    >>> with fail_together("adding"):  # one process: nothing happens
    ...     1 + 1
    2
    """
    error: Exception | None = None
    try:
        yield
    except ProcessError:  # Nobody could be told.
        raise
    except Exception as caught:
        error = caught
    if is_distributed():
        notes = torch.zeros(world_size(), _NOTE_BYTES, dtype=torch.uint8)
        if error is not None:
            text = (f"{type(error).__name__}: {error}".encode() or b"?")[:_NOTE_BYTES]
            notes[rank(), : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        notes = notes.to(_device(notes))
        with _talking():
            dist.all_reduce(notes)
        if error is None and bool(notes.any()):
            failed = [(r, bytes(note[note > 0].tolist())) for r, note in enumerate(notes.cpu()) if bool(note.any())]
            causes = "; ".join(f"process {r}: {text.decode(errors='ignore')}" for r, text in failed)
            raise DataError(f"{len(failed)} of {world_size()} processes failed while {what}, so all stop. {causes}")
    if error is not None:
        raise error


def from_any_process(value: Item | None) -> Item | None:
    """Returns the value of the first process that has one, on every process; None where nobody has one.

    The value goes over the network as Python's pickle, which only reads what the processes of this run have sent.

    >>> from_any_process("here")
    'here'
    """
    if not is_distributed():
        return value
    has = torch.zeros(world_size(), dtype=torch.int64)
    has[rank()] = value is not None
    all_reduce_([has])
    if not bool(has.any()) or bool(has.all()):
        return value
    source, values = int(has.argmax()), [value]
    with _talking():
        dist.broadcast_object_list(values, src=source)
    return values[0]


def gathered(value: Item) -> list[Item]:
    """Returns the values of all processes, in their order.

    They go over the network as Python's pickle, which only reads what the processes of this run have sent.

    >>> gathered("here")
    ['here']
    """
    if not is_distributed():
        return [value]
    values = [value] * world_size()
    with _talking():
        dist.all_gather_object(values, value)
    return values


def broadcast_number(number: int) -> int:
    """Returns the number that process 0 has."""
    if not is_distributed():
        return number
    value = torch.tensor([number], dtype=torch.int64)
    value = value.to(_device(value))
    with _talking():
        dist.broadcast(value, src=0)
    return int(value)


def broadcast_(tensors: Sequence[Tensor]) -> None:
    """Gives every process the values of process 0, in place.

    >>> x = torch.ones(2)
    >>> broadcast_([x])  # one process: nothing happens
    """
    if is_distributed():
        with _talking():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


def distribute_work(
    costs: Sequence[float],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    work: Callable[[int], Sequence[Tensor]],
    like: Tensor,
) -> list[list[Tensor]]:
    """Does job i on one process only and gives its result to all; jobs go to the least loaded process, dearest first.

    Args:
        costs: One number per job.
        shapes: For each job the shapes of the tensors that it returns.
        work: A function that does job i, as ``work(i)``.
        like: A tensor that gives dtype and device of the results.

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
    with fail_together("decomposing factors"):
        for job, job_shapes in enumerate(shapes):
            if owner[job] == rank():
                results.append([t.contiguous() for t in work(job)])
            else:
                results.append([torch.empty(s, dtype=like.dtype, device=like.device) for s in job_shapes])
    for job, tensors in enumerate(results):
        for tensor in tensors:
            with _talking():
                dist.broadcast(tensor, src=owner[job])
    return results


@dataclass(frozen=True)
class Mesh:
    """The place of this process in a grid of data × samples.

    Processes with one ``sample_rank`` draw the same weights and should see different data; processes with one
    ``data_rank`` draw different weights and may see the same data.
    """

    data_rank: int
    data_size: int
    sample_rank: int
    sample_size: int


def make_mesh(sample_groups: int) -> Mesh:
    """Returns this process's place when the processes form ``sample_groups`` groups of equal size, consecutive ranks in each.

    Raises:
        InputError: The number of processes is not a multiple of ``sample_groups``.

    >>> make_mesh(1)
    Mesh(data_rank=0, data_size=1, sample_rank=0, sample_size=1)
    """
    world = world_size()
    if sample_groups < 1 or world % sample_groups:
        raise InputError(
            f"sample_groups={sample_groups} does not divide the {world} processes; allowed: "
            + ", ".join(str(d) for d in range(1, world + 1) if world % d == 0)
        )
    data_size = world // sample_groups
    return Mesh(rank() % data_size, data_size, rank() // data_size, sample_groups)


def is_sharded(tensor: Tensor) -> bool:
    """Tells whether a tensor is only a part, whose rest is held by other processes (FSDP2, tensor parallelism)."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module inside a DistributedDataParallel wrapper; any other module as it is.

    >>> net = nn.Linear(2, 1)
    >>> unwrapped(net) is net
    True
    """
    return model.module if isinstance(model, DistributedDataParallel) else model


def unsynchronised(model: nn.Module, block: AbstractContextManager[Item]) -> AbstractContextManager[Item]:
    """Returns a block inside which a DistributedDataParallel wrapper averages no gradients, because somebody else sums them."""
    return _within(model.no_sync(), block) if isinstance(model, DistributedDataParallel) else block


@contextmanager
def _within(outer: AbstractContextManager[object], block: AbstractContextManager[Item]) -> Iterator[Item]:
    with outer, block as entered:
        yield entered
