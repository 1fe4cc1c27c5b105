"""Every rule, in every configuration, against brute force; and a suite that can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aftermap.curvature import registered_rules
from aftermap.curvature.rules import base as layers_module
from aftermap.curvature.rules.base import InputRows
from aftermap.curvature.rules.linear import DenseRows, LinearRule
from aftermap.errors import InputError
from aftermap.testing import ModelSnapshot, check_layer_rule, check_unchanged
from tests.curvature.layer_cases import CASES, randomise


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    module, inputs = CASES[name]()
    check_layer_rule(randomise(module), *inputs)


def test_every_registered_module_has_a_configuration() -> None:
    covered = {type(make()[0]) for make in CASES.values()}
    assert set(registered_rules()) <= covered


@pytest.mark.parametrize(
    "make",
    [lambda: nn.LayerNorm(4, elementwise_affine=False), lambda: nn.GroupNorm(2, 4, affine=False), nn.ReLU],
)
def test_layers_without_parameters_are_refused_by_the_suite(make: Any) -> None:
    with pytest.raises(AssertionError, match="has no parameters"):
        check_layer_rule(make(), torch.randn(5, 4))


class _Scaled(nn.Linear):
    """A layer that its parent's rule does not describe; its own rules below are wrong, each in another way."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class _HalfRows(LinearRule):
    def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Any) -> InputRows:
        return super().rows(module, 0.5 * inputs, space, named)


class _WrongGram(DenseRows):
    def add_gram_(self, out: Tensor, weight: Tensor | None = None) -> None:
        super().add_gram_(out, weight)
        super().add_gram_(out, weight)


class _WrongTotal(DenseRows):
    def sum_over_positions(self) -> Tensor:
        return super().sum_over_positions() + 1.0


class _WrongSquares(DenseRows):
    def add_squares_(self, out: Tensor, grads: Tensor) -> None:
        out += (
            self.per_example_gradients(grads).sum(1).square().sum(0)
        )  # the sum over examples belongs outside the square


class _WrongLengths(DenseRows):
    def positions_per_group(self) -> tuple[int, ...]:
        return (7,) * self.groups


def _rule(kind: type[DenseRows]) -> LinearRule:
    class Rule(LinearRule):
        def rows(self, module: Any, inputs: Tensor, space: tuple[int, ...], named: Any) -> InputRows:
            right = super().rows(module, inputs, space, named)
            assert isinstance(right, DenseRows)
            return kind(right.data, right.ones)

    return Rule()


@pytest.mark.parametrize(
    "rule, message",
    [
        (_HalfRows(), "a rule was expected"),
        (_rule(_WrongGram), "the kron block for one datum|the input factor"),
        (_rule(_WrongTotal), "reduce"),
        (_rule(_WrongSquares), "the diagonal of the GGN"),
        (_rule(_WrongLengths), "the number of rows|the kron block"),
    ],
)
def test_the_suite_finds_wrong_rules(monkeypatch: pytest.MonkeyPatch, rule: LinearRule, message: str) -> None:
    monkeypatch.setitem(layers_module._RULES, _Scaled, rule)
    with pytest.raises(AssertionError, match=message):
        check_layer_rule(randomise(_Scaled(4, 3)), torch.randn(5, 4))


def test_the_suite_passes_a_right_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layers_module._RULES, _Scaled, LinearRule())
    module = randomise(_Scaled(4, 3))
    before = ModelSnapshot.of(module)
    check_layer_rule(module, torch.randn(5, 4))
    check_unchanged(module, before)


@pytest.mark.parametrize(
    "former, name", [("outer", "per_example_gradients"), ("total", "sum_over_positions"), ("narrow", "examples")]
)
def test_rows_with_a_former_method_are_refused_instead_of_ignoring_it(former: str, name: str) -> None:
    with pytest.raises(InputError, match=f"Old.{former} is called {name} now"):
        type("Old", (DenseRows,), {former: lambda self: None})


def test_unchanged_names_what_changed() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Dropout())
    before = ModelSnapshot.of(net)
    net[0].weight.data.add_(1.0)
    net[0].bias.grad = torch.zeros(3)
    net[0].bias.requires_grad_(False)
    net[1].extra = 1
    net[1].eval()
    handle = net[0].register_forward_hook(lambda *_: None)
    with pytest.raises(AssertionError) as caught:
        check_unchanged(net, before)
    handle.remove()
    for part in (
        "tensors of 0.weight",
        "grads of 0.bias",
        "requires_grad of 0.bias",
        "attributes of 1",
        "training of 1",
        "hooks of 0",
    ):
        assert part in str(caught.value)
