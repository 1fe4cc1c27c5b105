"""Two processes share out the functionals: the same answers as one, and data that differ are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from tests.hessian_free.worker import results, run
from tests.processes import from_two_processes


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_two_processes_equal_one(tmp_path: Path) -> None:
    parts = from_two_processes(run, tmp_path)
    alone = results()
    for part in parts:
        assert bool(part.pop("refused"))
        assert_close(part, alone, rtol=1e-8, atol=1e-12)
