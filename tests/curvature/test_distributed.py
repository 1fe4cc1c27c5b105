"""Two processes with uneven parts of the data against one process with all of it."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from aftermap.curvature import reference
from aftermap.distributed import (
    all_reduce_,
    broadcast_number,
    distribute_work,
    fail_together,
    is_distributed,
    rank,
    world_size,
)
from aftermap.errors import DataError
from aftermap.likelihoods import Categorical
from aftermap.metrics.streaming import StreamingAccuracy, StreamingBrier, StreamingECE, StreamingNLL
from tests.curvature.distributed_worker import STRUCTURES, data, fit_all, run, scores, switching
from tests.processes import from_two_processes

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


@functools.cache
def everything() -> tuple[Any, Any]:
    """What each of two processes says to every job; a hang ends in gloo's own time limit."""
    with tempfile.TemporaryDirectory() as folder:
        return from_two_processes(run, Path(folder))


def both(job: str) -> tuple[Any, Any]:
    first, second = everything()
    return first[job], second[job]


@pytest.mark.filterwarnings("ignore:the Hessian is indefinite")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two_processes_equal_one(dtype: str) -> None:
    kind = getattr(torch, dtype)
    alone = fit_all([data(kind)], kind)
    first, second = both(dtype)
    tolerance = 1e-6 if dtype == "float32" else 1e-10
    for structure in STRUCTURES:
        expected = alone[structure]
        scale = float(expected["dense"].abs().max())
        for found in (first[structure], second[structure]):
            # EKFAC: a float32 sum in another order turns an eigenbasis; low rank stops at a residual of its own.
            loose = {"ekfac": 1e-4, "low_rank": 1e-5}.get(structure, 0.0) if dtype == "float32" else 1e-8 / scale
            error = float((found["dense"] - expected["dense"]).abs().max())
            assert error <= max(tolerance, loose) * scale, structure
            assert found["n_data"] == 7
            torch.testing.assert_close(found["loss"], expected["loss"], rtol=tolerance, atol=0)
        torch.testing.assert_close(first[structure]["dense"], second[structure]["dense"], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:the Hessian is indefinite")
def test_a_process_without_data_changes_nothing() -> None:
    alone = fit_all([data(torch.float64)], torch.float64)
    for structure in STRUCTURES:
        expected = alone[structure]
        scale = float(expected["dense"].abs().max())
        for found in both("all_on_one"):
            assert float((found[structure]["dense"] - expected["dense"]).abs().max()) <= 1e-8 * max(scale, 1.0)
            assert found[structure]["n_data"] == 7
            assert found[structure]["loss"] == pytest.approx(expected["loss"], rel=1e-10)
            assert found[structure]["n_outputs"] == 3
            assert found[structure]["curvature"] == expected["curvature"]


def test_without_any_data_all_processes_stop() -> None:
    for told in both("no_data"):
        for structure in STRUCTURES:
            assert told[structure].startswith(
                "DataError: the data hold no example: every batch of every process is empty"
            )


def test_bad_data_in_a_later_batch_stops_all() -> None:
    first, second = both("bad_later")
    for structure in STRUCTURES:
        assert "process 1" in first[structure]
        assert "not finite" in first[structure]
        assert "not finite: nan at index [1, 0, 0, 0]" in second[structure]


def test_processes_agree_on_where_rules_hold() -> None:
    first, second = both("disagree")
    model, x, y = switching()
    truth = reference.ggn(model, x, Categorical(), y)
    for found in (first, second):
        torch.testing.assert_close(found["dense"], truth, rtol=1e-10, atol=1e-12)
    assert "another process" in first["notes"]["a.weight"]
    assert second["notes"]["a.weight"]


def test_one_process_is_a_no_op() -> None:
    assert (is_distributed(), rank(), world_size(), broadcast_number(5)) == (False, 0, 1, 5)
    x = torch.ones(2)
    all_reduce_([x])
    torch.testing.assert_close(x, torch.ones(2))
    done = distribute_work([1.0, 2.0], [[(1,)], [(1,)]], lambda i: [torch.full((1,), float(i))], x)
    assert [float(t[0]) for t in done] == [0.0, 1.0]
    with pytest.raises(DataError, match="mine"), fail_together("working"):
        raise DataError("mine")


def test_metrics_over_processes_are_those_of_all_data() -> None:
    probs, labels = scores()
    kinds = (StreamingNLL, StreamingECE, StreamingAccuracy, StreamingBrier)
    expected = {kind.__name__: kind().update(probs, labels).result() for kind in kinds}
    for found in both("metrics"):
        assert found == pytest.approx(expected, rel=1e-12)
