"""The main calls go through few files and functions, without deep nesting. The bounds may fall, and never rise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftermap as am
from tests.call_traces import Trace, trace

# The most that a call may go through: files, functions, depth.
BOUNDS = {
    "Laplace.fit": Trace(27, 193, 14),
    "Laplace.predict": Trace(21, 145, 15),
    "Laplace.tune": Trace(10, 46, 10),
    "VOGN.step": Trace(13, 90, 10),
    "IVON.step": Trace(10, 49, 9),
}


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    """A network with two layers and data of three classes."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(20, 2, generator=generator)
    return model, x, (x @ torch.randn(2, 3, generator=generator)).argmax(1)


def fit() -> Callable[[], Any]:
    model, x, y = problem()
    laplace = am.Laplace(model, "classification")
    return lambda: laplace.fit([(x, y)], progress=False)


def predict() -> Callable[[], Any]:
    model, x, y = problem()
    laplace = am.Laplace(model, "classification").fit([(x, y)], progress=False)
    return lambda: laplace.predict(x)


def tune() -> Callable[[], Any]:
    model, x, y = problem()
    laplace = am.Laplace(model, "classification").fit([(x, y)], progress=False)
    return lambda: laplace.tune(method="evidence")


def third_step(kind: type[Any]) -> Callable[[], Any]:
    """The first steps make buffers and plans; from the third on all are alike."""
    model, x, y = problem()
    optimizer = kind(model, lr=1e-3, n_data=20, generator=torch.Generator().manual_seed(0))

    def step() -> Any:
        return optimizer.step(lambda: nn.functional.cross_entropy(model(x), y))

    for _ in range(2):
        step()
    return step


CALLS: dict[str, Callable[[], Callable[[], Any]]] = {
    "Laplace.fit": fit,
    "Laplace.predict": predict,
    "Laplace.tune": tune,
    "VOGN.step": lambda: third_step(am.optim.VOGN),
    "IVON.step": lambda: third_step(am.optim.IVON),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_call_stays_within_its_bounds(name: str) -> None:
    CALLS[name]()()  # what is imported or made at the first use is not counted
    counted, bound = trace(CALLS[name]()), BOUNDS[name]
    assert min(counted) > 0
    assert all(c <= b for c, b in zip(counted, bound, strict=True)), f"{name}: {counted}, allowed are {bound}"


def test_the_count_sees_files_functions_and_depth() -> None:
    prediction = am.Prediction("regression", *(torch.ones(2, 1) for _ in range(4)))
    length = trace(lambda: len(prediction))
    assert length == Trace(1, 1, 1)
    assert trace(lambda: torch.ones(2).sum()) == Trace(0, 0, 0)
    picked = trace(lambda: prediction[0:1])
    assert picked.functions > length.functions
    assert picked.depth > length.depth
