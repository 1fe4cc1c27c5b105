"""1, 2 and 4 processes agree, also with a process that has no data; wrapped networks work or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.laplace.wrapped_worker import data, everything, fit_all, network
from tests.processes import from_processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
]


@pytest.mark.parametrize("world", [2, 4])
def test_processes_agree_with_one(world: int, tmp_path: Path) -> None:
    expected = fit_all([data()], network())
    for found in from_processes(everything, world, tmp_path):
        assert found["plain"].keys() == expected.keys()
        for name, covariance in expected.items():
            error = float((found["plain"][name] - covariance).abs().max())
            assert error <= 1e-6 * float(covariance.abs().max()), name
        assert float((found["ddp"] - expected["kron"]).abs().max()) <= 1e-6 * float(expected["kron"].abs().max())
        if world == 4:  # Tuning by the training data needs some on every process, and all say so at once.
            assert "the data are empty" in found["tune"]
        for name in ("laplace", "curvature", "vogn"):
            assert "FSDP2 or tensor parallelism" in found[f"fsdp {name}"], name
