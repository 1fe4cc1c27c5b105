"""Two processes with uneven parts of the data against one process with all of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from aftermap.curvature import reference
from aftermap.params import flatten
from tests.posteriors.matrix_free_cases import CASES
from tests.posteriors.matrix_free_worker import SAMPLES, results, run
from tests.processes import from_two_processes


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_two_processes_equal_one(tmp_path: Path) -> None:
    first, second = from_two_processes(run, tmp_path)
    alone = results(0, 9)
    for found in (first, second):
        assert_close(found["solved"], alone["solved"], rtol=1e-6, atol=1e-8)
        assert_close(found["log_det"], alone["log_det"], rtol=1e-6, atol=1e-6)
    # One seed for all, whatever each process passed; the noise of the data is drawn by each for its own part.
    for name in ("samples", "fixed", "solved"):
        assert_close(first[name], second[name], rtol=0, atol=0)
    case = CASES["mlp softmax"]()
    deviations = first["samples"] - flatten({n: p.detach() for n, p in case.model.named_parameters()})
    white = deviations @ torch.linalg.cholesky(case.precision())
    tolerance = 5 * math.sqrt(2 / SAMPLES)
    assert_close(white.T @ white / SAMPLES, torch.eye(white.shape[1]).double(), rtol=0, atol=tolerance)
    # With fixed samples each process predicts for inputs of its own, here the first and the last ones.
    J = reference.jacobian(case.model, case.asked)
    variance = (J @ first["fixed"].T).square().mean(-1)
    assert_close(torch.cat([first["variance"], second["variance"]]), variance, rtol=1e-9, atol=1e-12)
