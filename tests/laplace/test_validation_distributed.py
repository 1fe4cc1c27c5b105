"""Two processes, one without training data, tune on validation labels: as one process does with all data, and both stop where one has to."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

import aftermap as am
from aftermap.errors import DataError, StatisticalWarning
from tests.laplace.problems import normal
from tests.processes import from_processes

CASES = (("classification", None), ("classification", "grid"), ("regression", None), (None, None))


def data(task: str | None) -> tuple[Tensor, Tensor]:
    x = normal(40, 2, seed=1)
    if task == "regression":
        return x, x.sin() + 0.2 * normal(40, 2, seed=2)
    return x, (x[:, 0] > 0).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()


def mine() -> slice:
    """All training data in the second process, and where there is only one."""
    return slice(30) if not dist.is_initialized() or dist.get_rank() else slice(0)


def batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(8), y.split(8), strict=True)) if len(x) else []


class TornInOneProcess:
    """Validation data that only the first process cannot read."""

    def __iter__(self) -> Iterator[Any]:
        if dist.get_rank() == 0:
            raise DataError("the tape is torn")
        return iter(batches(*data("classification")))


def tuned(task: str | None, method: str | None) -> Tensor:
    """Variances of predictions after a fit to this process's share and tuning on labels."""
    x, y = data(task)
    train, held_out = batches(x[mine()], y[mine()]), batches(x[30:], y[30:])
    if method is None:
        laplace = am.fit(network(), train, held_out, likelihood=task, structure="kron", verbose=False)
    else:
        laplace = am.Laplace(network(), task).fit(train, progress=False).tune(held_out, method=method)
    prediction = laplace.predict(normal(5, 2, seed=9))
    return torch.cat([prediction.mean, prediction.total.reshape(5, -1)], dim=1).detach()


def told(task: str, validation: Any, method: str | None) -> str:
    """The warning of validation data that were trained on, or the error."""
    x, y = data(task)
    laplace = am.Laplace(network(), task).fit(batches(x[mine()], y[mine()]), progress=False)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        try:
            laplace.tune(validation, method=method)
        except DataError as error:
            return str(error)
    return next((str(w.message).partition(":")[0] for w in record if "training inputs" in str(w.message)), "")


def work() -> dict[str, Any]:
    warnings.simplefilter("ignore", StatisticalWarning)
    seen = [
        told(task, batches(x[:30], y[:30]), method)
        for task, method in CASES[:3]
        if task is not None
        for x, y in [data(task)]
    ]
    found = {"tuned": [tuned(*case) for case in CASES], "seen": seen}
    if dist.is_initialized():
        found["torn"] = [told("classification", TornInOneProcess(), method) for method in (None, "grid")]
    return found


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_a_process_without_data_tunes_and_stops_with_the_other(tmp_path: Path) -> None:
    processes = from_processes(work, 2, tmp_path)
    with warnings.catch_warnings():
        alone = work()
    assert alone["seen"] == ["30 of 30 validation inputs are among the first 30 training inputs"] * 3
    for found in processes:
        assert found["seen"] == alone["seen"]
        for mine, other in zip(found["tuned"], alone["tuned"], strict=True):
            assert_close(mine, other, rtol=1e-6, atol=1e-12)
    assert processes[0]["torn"] == ["the tape is torn"] * 2
    told_of = (
        "1 of 2 processes failed while reading validation data, so all stop. process 0: DataError: the tape is torn"
    )
    assert processes[1]["torn"] == [told_of] * 2
