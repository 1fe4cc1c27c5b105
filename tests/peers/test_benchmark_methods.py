"""What the benchmark times is the same quantity in every library: the traces agree on one batch."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from aftermap.curvature import fit_curvature

pytestmark = pytest.mark.peers

methods = pytest.importorskip("benchmarks.methods")
models = pytest.importorskip("benchmarks.models")
timing = pytest.importorskip("benchmarks.timing")


def trace(result: Any) -> float:
    """The trace of whatever a library returns: a diagonal, Kronecker factors, or an object that knows it."""
    if isinstance(result, Tensor):
        return float(result.sum())
    if isinstance(result, list):  # BackPACK: per parameter a diagonal, or its Kronecker factors
        kron = [math.prod(float(f.trace()) for f in factors) for factors in result if factors[0].dim() == 2]
        whole = all(f.dim() == 2 and f.shape[0] == f.shape[1] for factors in result for f in factors)
        return sum(kron) if whole else sum(float(f.sum()) for factors in result for f in factors)
    if hasattr(result, "kfacs"):  # laplace-torch
        return sum(math.prod(float(f.trace()) for f in factors) for factors in result.kfacs)
    return float(result.trace() if callable(result.trace) else result.trace)


CASES = [
    *((model, quantity) for model in ("mlp", "lenet") for quantity in methods.QUANTITIES if "random" not in quantity),
    *((model, quantity) for model in ("resnet20", "wrn16_2") for quantity in ("diagonal_exact", "squared_gradients")),
]


@pytest.mark.parametrize("model_name, quantity", CASES)
def test_methods_of_a_quantity_agree(model_name: str, quantity: str) -> None:
    model, data = models.make(model_name, size=3)
    found: dict[str, float] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' own
        for name, method in methods.METHODS.items():
            other = quantity == "kron_exact" and model_name == "lenet" and "backpack" in name
            if method.quantity != quantity or other:  # see test_backpack_mixes_expand_and_reduce
                continue
            try:
                found[name] = trace(method.make(model, data)())
            except (NotImplementedError, AssertionError, methods.Skip):
                assert method.library != "aftermap", name
    ours = next(value for name, value in found.items() if name.startswith("aftermap"))
    assert len(found) > 1, "no peer ran"
    for name, value in found.items():
        assert value == pytest.approx(ours, rel=2e-4), name


def test_backpack_mixes_expand_and_reduce() -> None:
    """BackPACK sums a convolution's gradients over positions first: cheaper than expand, and another approximation.

    Its first factor is that of reduce, its second that of expand without the division by the T positions.
    """
    model, data = models.make("lenet", size=3)
    options = {"structure": "kron", "curvature": "exact", "progress": False}
    expand = fit_curvature(model, data, "classification", **options)
    reduce = fit_curvature(model, data, "classification", approach="reduce", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = methods.METHODS["backpack kflr"].make(model, data)()
    for number, positions in ((0, 28 * 28), (1, 10 * 10)):
        outputs, inputs = theirs[2 * number]
        torch.testing.assert_close(outputs, reduce.blocks[number].outputs[0], rtol=1e-4, atol=1e-6)
        mean = expand.blocks[number].input_mean()[0, :-1, :-1].float()
        torch.testing.assert_close(inputs, positions * mean, rtol=1e-4, atol=1e-3)


def test_random_vectors_are_near_the_exact_trace() -> None:
    model, data = models.make("lenet", size=200)
    exact = trace(methods.METHODS["aftermap diagonal"].make(model, data)())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("aftermap diagonal rademacher", "backpack diag_ggn_mc"):
            value = trace(methods.METHODS[name].make(model, data)())
            assert value == pytest.approx(exact, rel=0.2), name


@pytest.mark.parametrize("name", models.MODELS)
def test_every_network_has_ten_classes_and_is_the_same_twice(name: str) -> None:
    model, data = models.make(name, batches=2, size=3)
    again, _ = models.make(name)
    assert len(data) == 2
    assert model(data[0][0]).shape == (3, 10)
    for mine, other in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_compare_interleaves_and_lets_slow_functions_sit_out() -> None:
    calls: list[str] = []
    functions = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    assert set(timing.compare(functions, 2)) == {"a", "b"}
    assert calls == ["a", "b"] * 3  # the first round warms up
    calls.clear()
    best = timing.compare(functions, 5, budget=-1.0)
    assert calls == ["a", "b"] * 2
    assert all(0 <= seconds < math.inf for seconds in best.values())


def test_ratios_are_medians_against_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second round runs on a machine that is ten times slower: neighbours share it.
    speed, calls, clock = [1.0], [0], [0.0]

    def spend(seconds: float) -> None:
        calls[0] += 1
        speed[0] = 10.0 if 8 <= calls[0] < 12 else 1.0
        clock[0] += seconds * speed[0]

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    functions = {"a": lambda: spend(3.0), "b": lambda: spend(5.0)}
    found, unit = timing.ratios(functions, lambda: spend(1.0), 3)
    assert {n: median for n, (median, _) in found.items()} == {"a": pytest.approx(3.0), "b": pytest.approx(5.0)}
    # Once "b" ran fast between a slow unit and a fast one: the minimum is fooled, the median is not.
    assert {n: least for n, (_, least) in found.items()} == {"a": pytest.approx(3.0), "b": pytest.approx(5 / 5.5)}
    assert unit == pytest.approx(1.0)
    assert calls[0] == 3 + 1 + 3 * 4  # warming up, the first unit, three rounds of two with a unit after each
