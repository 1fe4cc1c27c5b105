"""Two processes tune a regression as one does with all data, also where one of them has few or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

import aftermap as am
from aftermap.laplace import Laplace, RegressionResult, regression
from tests.laplace.problems import normal
from tests.processes import from_processes

DOUBLE = torch.float64
FIRST = (23, 3, 0)  # how many of the 46 examples the first process has
UNITS = torch.tensor([1.0, 100.0], dtype=DOUBLE)


def data() -> tuple[Tensor, Tensor]:
    x = normal(46, 2, seed=1)
    return x, UNITS * (torch.stack([x[:, 0].sin(), x[:, 1]], 1) + 0.2 * normal(46, 2, seed=2))


def network() -> nn.Module:
    """A network of random features whose last layer is the best for all data, in evaluation mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    x, y = data()
    with torch.no_grad():
        features = torch.cat([model[:2](x), torch.ones(len(x), 1, dtype=DOUBLE)], 1)
        solution = torch.linalg.lstsq(features, y).solution
        model[2].weight.copy_(solution[:4].T)
        model[2].bias.copy_(solution[4])
    return model


def results() -> list[Tensor]:
    """What tuning gives in this process: all data, or its part of them."""
    x, y = data()
    found = []
    for count in FIRST:
        mine = slice(None)
        if dist.is_initialized():
            mine = slice(count, None) if dist.get_rank() else slice(count)
        batches = [(x[mine][k : k + 7], y[mine][k : k + 7]) for k in range(0, len(x[mine]), 7)]
        for structure in ("full", "kron"):
            laplace = am.fit(network(), "regression", batches, structure=structure, verbose=False)
            result = laplace.tuning
            assert isinstance(result, RegressionResult)
            new = laplace.predict(normal(5, 2, seed=9))
            found += [torch.tensor([result.ratio, result.noise, result.loo_nll, result.n_data]), new.total]
    return found


def some_of_many() -> Tensor:
    """How many examples are drawn where together they are too many, and how many there are."""
    x, y = data()
    mine = (
        slice(10, None) if dist.is_initialized() and dist.get_rank() else slice(10 if dist.is_initialized() else None)
    )
    regression._ALL_ROWS, regression._EXAMPLES = 40, 15  # two outputs: 20 examples at most are all taken
    model = nn.Sequential(nn.Linear(2, 2)).double().eval()
    laplace = Laplace(model, "regression").fit([(x[mine], y[mine])], progress=False)
    fitted = laplace.fitted
    batches = regression.iterate(fitted.data, device=torch.device("cpu"), dtype=DOUBLE)
    sample = regression._sample(batches, fitted, ["0.weight", "0.bias"], model, 0)
    inputs = torch.cat([b.inputs for b in sample.batches])
    rows = (inputs[:, None] == x).all(-1).nonzero()[:, 1]
    return torch.cat([torch.tensor([sample.seen, sample.size]), rows])


def work() -> list[Tensor]:
    return [*results(), some_of_many()]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_two_processes_equal_one(tmp_path: Path) -> None:
    first, second = from_processes(work, 2, tmp_path)
    for mine, other, alone in zip(first, second, results(), strict=False):
        assert_close(mine, alone, rtol=1e-6, atol=1e-12)
        assert_close(other, alone, rtol=1e-6, atol=1e-12)
    assert torch.equal(first[-1], second[-1])
    seen, size, *rows = first[-1].tolist()
    assert (seen, size, len(set(rows))) == (46, 15, 15)
    assert sum(row < 10 for row in rows) == 3  # the first process has 10 of the 46
