"""Options are judged in one place: values pass through, and every refusal says what was got, what is allowed, what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aftermap import checks
from aftermap.errors import DataError, InputError


@pytest.mark.parametrize("value", [3, 3.0, np.int64(3), np.float32(3)])
def test_a_count_is_an_int(value: Any) -> None:
    result = checks.count("samples", value)
    assert result == 3
    assert type(result) is int


@pytest.mark.parametrize("value", [0.5, np.float64(0.5), 1])
def test_a_number_is_a_float(value: Any) -> None:
    result = checks.number("lr", value, above=0)
    assert result == float(value)
    assert type(result) is float


def test_bounds_are_where_they_are_said_to_be() -> None:
    assert checks.count("n", 0, 0) == 0
    assert checks.count("n", 5, 1, most=5) == 5
    assert checks.number("x", 0, least=0) == 0
    assert checks.number("x", 2, most=2) == 2
    assert checks.number("x", math.inf, above=0, infinite=True) == math.inf
    assert checks.fraction("p", 0, zero=True) == 0
    assert checks.fraction("p", 1, one=True) == 1


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: checks.count("n", -1, 0), "n=-1 must be a whole number of at least 0. Pass for instance n=0"),
        (lambda: checks.count("n", 9, 1, most=5), "n=9 must be a whole number from 1 to 5. Pass for instance n=5"),
        (lambda: checks.count("n", True), "n=True must be a whole number of at least 1. Pass for instance n=1"),
        (lambda: checks.count("n", 2.5), "n=2.5 must be a whole number of at least 1. Pass for instance n=1"),
        (lambda: checks.count("n", math.nan), "n=nan must be a whole number of at least 1. Pass for instance n=1"),
        (lambda: checks.count("n", "3", advice="Use 3"), "n='3' must be a whole number of at least 1. Use 3"),
        (lambda: checks.number("x", math.inf, above=0), "x=inf must be a positive and finite number"),
        (lambda: checks.number("x", math.nan, above=0, infinite=True), "x=nan must be a positive number"),
        (lambda: checks.number("x", 1, above=1, most=2), "x=1 must be a finite number above 1 and of at most 2"),
        (lambda: checks.number("x", True), "x=True must be a finite number"),
        (lambda: checks.number("x", "1"), "x='1' must be a finite number. Pass a number, not a text"),
        (lambda: checks.fraction("p", 0), "p=0 must lie in (0, 1). Write 95 % as 0.95"),
        (lambda: checks.fraction("p", 1.5, zero=True, one=True), "p=1.5 must lie in [0, 1]. Write 95 % as 0.95"),
        (lambda: checks.fraction("p", math.nan), "p=nan must lie in (0, 1). Write 95 % as 0.95"),
        (lambda: checks.choice("kind", 1, ("a",)), "kind=1 is not known; allowed are 'a'"),
        (
            lambda: checks.choice("kind", "b", ("a",), otherwise="a function"),
            "kind='b' is not known; allowed are 'a', or a function",
        ),
        (
            lambda: checks.choice("damping", "pi", ("exact",), because="structure='full' offers no other"),
            "damping='pi' is not possible here, because structure='full' offers no other; allowed are 'exact'",
        ),
        (lambda: checks.choices("scores", [], ("a", "b")), "scores is empty; allowed are one or several of 'a', 'b'"),
        (lambda: checks.choices("scores", ["a", "c"], ("a", "b")), "scores='c' is not known; allowed are 'a', 'b'"),
        (
            lambda: checks.module("Laplace", nn.Linear),
            "Laplace needs a torch.nn.Module as its model, got the class Linear. Pass an instance: call the class",
        ),
    ],
)
def test_refusals_are_sentences(refused: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError) as error:
        refused()
    assert str(error.value) == message


def test_words_networks_and_data_pass_through() -> None:
    net, data = nn.Linear(1, 1), [(torch.zeros(1, 1), torch.zeros(1, 1))]
    assert checks.choice("kind", "a", {"a": 1}) == "a"
    assert checks.choices("scores", "a", ("a", "b")) == ("a",)
    assert checks.module("Laplace", net) is net
    assert checks.repeatable("data", data, "training") is data
    assert checks.instance("net", net, nn.Linear, "Pass a layer") is net
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(2)))
    assert checks.repeatable("data", loader, "training") is loader


def test_data_that_can_be_read_once_are_refused() -> None:
    with pytest.raises(DataError, match="training reads data more than once, but generator can be read only once"):
        checks.repeatable("data", (x for x in [1]), "training")
    with pytest.raises(DataError, match="training reads data more than once, but int holds no batches"):
        checks.repeatable("data", 3, "training")
