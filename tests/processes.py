"""Several processes for tests: a free port, and what each of them found."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn, start_processes

from aftermap.distributed import process_group

__all__ = ["free_port", "from_processes", "from_two_processes"]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def from_two_processes(run: Callable[[int, int, str], None], folder: Path) -> tuple[Any, Any]:
    """What ``run(rank, port, folder)`` wrote to ``folder``/rank.pt in each of two processes; a hang ends in gloo's time limit."""
    spawn(run, args=(free_port(), str(folder)), nprocs=2, join=True)
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2))
    return first, second


def from_processes(
    work: Callable[..., Any], world: int, folder: Path, *arguments: Any, method: str = "spawn"
) -> list[Any]:
    """What ``work(*arguments)`` returns in each of ``world`` processes of a gloo group; it must be importable by name.

    With ``method="fork"`` they need not import everything anew; the process that calls must have no threads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start_processes(
        _run, args=(world, free_port(), str(folder), work, arguments), nprocs=world, join=True, start_method=method
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _run(rank: int, world: int, port: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with process_group():
        torch.save(work(*arguments), os.path.join(folder, f"{rank}.pt"))
        dist.barrier()  # nobody leaves while others still speak
