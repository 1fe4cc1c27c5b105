"""Two processes for tests: a free port, and what each of them found."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

__all__ = ["free_port", "from_two_processes"]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def from_two_processes(run: Callable[[int, int, str], None], folder: Path) -> tuple[Any, Any]:
    """What ``run(rank, port, folder)`` wrote to ``folder``/rank.pt in each of two processes; a hang ends in gloo's time limit."""
    multiprocessing.spawn(run, args=(free_port(), str(folder)), nprocs=2, join=True)
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2))
    return first, second
