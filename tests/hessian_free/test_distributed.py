"""Two processes share out the functionals: the same answers as one, and data that differ are refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch.testing import assert_close

from tests.hessian_free.worker import results, run


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_two_processes_equal_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run, args=(port, str(tmp_path)), nprocs=2, join=True)
    parts = [torch.load(tmp_path / f"{r}.pt", weights_only=True) for r in range(2)]
    alone = results()
    for part in parts:
        assert bool(part.pop("refused"))
        assert_close(part, alone, rtol=1e-8, atol=1e-12)
