from __future__ import annotations

from collections import UserDict, namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aftermap.batches import Batch, check_inputs, iterate, take, tensors_of, unpack_batch
from aftermap.errors import DataError, InputError, ShapeError
from aftermap.models import call_model, check_device

X, Y = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 2, 0])
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "raw",
    [
        (X, Y),
        [X, Y],
        {"x": X, "labels": Y},
        {"x": X, "y": Y},
        UserDict({"x": X, "target": Y}),
        namedtuple("Pair", "first second")(X, Y),
        (X, Y.tolist()),
        (X, Y.numpy()),
    ],
)
def test_forms_that_are_understood(raw: Any) -> None:
    batch = unpack_batch(raw)
    assert batch.size == 4
    assert batch.weight is None
    torch.testing.assert_close(batch.targets, Y)
    inputs = batch.inputs["x"] if isinstance(batch.inputs, dict) else batch.inputs
    torch.testing.assert_close(inputs, X)


def test_weights_in_tuples_and_mappings() -> None:
    weight = torch.tensor([1.0, 0.0, 2.5, 1.0])
    for raw in ((X, Y, weight), {"x": X, "labels": Y, "weight": weight}, (X, Y, weight.tolist())):
        found = unpack_batch(raw)
        assert found.weight is not None
        torch.testing.assert_close(found.weight, weight)
        assert not isinstance(found.inputs, dict) or list(found.inputs) == ["x"]


def test_the_users_mapping_is_left_alone() -> None:
    raw = UserDict({"ids": X, "labels": Y, "weight": torch.ones(4)})
    unpack_batch(raw)
    assert sorted(raw) == ["ids", "labels", "weight"]


def test_nested_inputs() -> None:
    batch = unpack_batch(((X, {"mask": X > 3}), Y))
    assert isinstance(batch.inputs, tuple)
    assert batch.size == 4
    assert [t.shape for t in tensors_of(batch.inputs)] == [(4, 3), (4, 3)]
    assert unpack_batch(([X, X], Y)).inputs[1] is X


def test_unpack_adapts_anything() -> None:
    thing = SimpleNamespace(image=X, answer=Y)
    batch = unpack_batch(thing, lambda t: (t.image, t.answer, torch.ones(4)))
    assert batch.size == 4
    assert batch.weight is not None
    with pytest.raises(DataError, match="unpack= must return .* a list of 2 elements"):
        unpack_batch(thing, lambda t: [t.image, t.answer])  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    "raw, error, message",
    [
        (X, DataError, "a batch is a torch.Tensor"),
        ({"x": X}, DataError, r"keys \['x'\]"),
        ((np.zeros((4, 3)), Y), DataError, "numpy.ndarray"),
        ((X, Y[:3]), ShapeError, r"4 examples, but the targets have shape \(3,\)"),
        ((X, 1.0), ShapeError, r"the targets have shape \(\)"),
        ((X, ["a", "b", "c", "d"]), DataError, "a list of 4 elements that cannot be made into a tensor"),
        ((X, Y, torch.ones(3)), DataError, r"must be 4 finite numbers .* got shape \(3,\)"),
        ((X, Y, torch.tensor([1.0, -1.0, 0.0, 0.0])), DataError, "smallest -1"),
        ((X, Y, torch.tensor([1.0, torch.inf, 0.0, 0.0])), DataError, "finite"),
    ],
)
def test_bad_batches(raw: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        unpack_batch(raw)


def test_take_keeps_what_has_no_batch() -> None:
    inputs = {"x": X, "table": torch.ones(3, 2), "scale": torch.tensor(2.0), "mode": "fast"}
    found = take(inputs, torch.tensor([2, 0]), 4)
    torch.testing.assert_close(found["x"], X[[2, 0]])
    assert found["table"] is inputs["table"]
    assert found["scale"] is inputs["scale"]
    assert found["mode"] == "fast"


def test_call_model() -> None:
    assert call_model(lambda x: x, X) is X
    assert call_model(lambda x, y: y, (Y, X)) is X
    assert call_model(lambda *, ids: ids, {"ids": X}) is X
    assert call_model(lambda x: {"logits": x, "loss": None}, X) is X
    assert call_model(lambda x: SimpleNamespace(logits=x), X) is X
    assert call_model(lambda x: (x,), X) is X
    for outputs in ((X, X), {"a": X}, None, 3.0):
        with pytest.raises(ShapeError, match="it must return a tensor"):
            call_model(lambda x, out=outputs: out, X)


def test_batch_to_moves_everything() -> None:
    batch = Batch({"x": X, "n": 3}, Y, torch.ones(4), 4).to(torch.device("meta"))
    assert batch.inputs["x"].device.type == "meta"
    assert batch.inputs["n"] == 3
    assert batch.targets.device.type == "meta"
    assert batch.weight is not None
    assert batch.weight.device.type == "meta"


def test_check_device() -> None:
    assert check_device(nn.Linear(2, 3).double()) == (CPU, torch.float64)
    assert check_device(nn.ReLU()) == (CPU, torch.get_default_dtype())
    with pytest.raises(InputError, match="meta device"):
        check_device(nn.Linear(2, 3, device="meta"))
    with pytest.raises(InputError, match="several devices"):
        check_device(nn.Sequential(nn.Linear(2, 3, device="meta"), nn.Linear(3, 2)))


def test_iterate_skips_empty_batches_and_repeats() -> None:
    data = [(X, Y), (X[:0], Y[:0]), (X[:1], Y[:1])]
    for _ in range(2):
        assert [b.size for b in iterate(data, device=CPU, dtype=torch.float32)] == [4, 1]


def test_iterate_takes_inputs_of_any_integer_dtype() -> None:
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.bool):
        (batch,) = iterate([(X.to(dtype), Y)], device=CPU, dtype=torch.float32)
        assert batch.inputs.dtype == dtype


@pytest.mark.parametrize(
    "data, message",
    [
        ([], "the data are empty"),
        (iter([]), "the data are empty"),
        (X, "data must be an iterable of batches"),
        ([(X.double(), Y)], "inputs are torch.float64, but the model's parameters are torch.float32"),
        ([(X / 0, Y)], "inputs are not finite: nan at index \\[0, 0\\]"),
    ],
)
def test_iterate_refuses(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(iterate(data, device=CPU, dtype=torch.float32))


def test_mixed_dtypes_are_allowed_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found: list[Tensor] = [b.inputs for b in iterate([(X.double(), Y)], device=CPU, dtype=torch.float32)]
    assert len(found) == 1


@pytest.mark.parametrize(
    "inputs", [(X, torch.full((3, 3), -torch.inf)), {"x": X, "mask": torch.tensor([0.0, -torch.inf])}]
)
def test_a_mask_after_the_first_tensor_may_hold_minus_infinity(inputs: Any) -> None:
    check_inputs(inputs, torch.float32)


@pytest.mark.parametrize(
    "inputs",
    [
        torch.tensor([[0.0, -torch.inf]]),
        {"mask": torch.tensor([0.0, -torch.inf]), "x": X},
        (X, torch.tensor([0.0, torch.nan])),
        (X, torch.tensor([0.0, torch.inf])),
        (X, torch.tensor([-torch.inf, torch.nan])),
    ],
)
def test_other_inputs_that_are_not_finite_are_refused(inputs: Any) -> None:
    with pytest.raises(DataError, match="not finite.*Only an additive mask"):
        check_inputs(inputs, torch.float32)


def test_what_examples_share_stays_whole_in_parts_of_parts() -> None:
    batch = Batch({"x": X, "masks": [torch.eye(3), torch.eye(4)]}, Y, torch.arange(4.0), 4, frozenset({("masks", 1)}))
    part = batch.take(torch.tensor([3, 1, 0]))
    assert part.size == 3
    torch.testing.assert_close(part.inputs["x"], X[[3, 1, 0]])
    torch.testing.assert_close(part.targets, Y[[3, 1, 0]])
    torch.testing.assert_close(part.weight, torch.tensor([3.0, 1.0, 0.0]))
    for again in (part, part.take(torch.tensor([2])), next(part.pieces(2)), part.to(CPU)):
        assert [tuple(m.shape) for m in again.inputs["masks"]] == [(3, 3), (4, 4)]
    torch.testing.assert_close(part.take(torch.tensor([2])).inputs["x"], X[[0]])
