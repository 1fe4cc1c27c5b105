"""Multi-head attention: its projections against brute force, and its written-out forward pass against PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aftermap.curvature.passes.plan import find_layers
from aftermap.curvature.passes.record import record_calls
from aftermap.testing import check_layer_rule
from tests.curvature.layer_cases import normal, randomise

B, T, S, E = 5, 3, 6, 4


class Around(nn.Module):
    """Attention with fixed arguments, tanh and a fixed map to three outputs."""

    def __init__(
        self, attention: nn.MultiheadAttention, arguments: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> None:
        super().__init__()
        self.attention, self.arguments = attention, arguments
        self.batch_first = attention.batch_first
        self.register_buffer("head", normal(T * E, 3, seed=9))

    def forward(self, *inputs: Tensor) -> Tensor:
        args, kwargs = self.arguments(*inputs)
        if not self.batch_first:
            args = tuple(a.transpose(0, 1) for a in args)
        output, weights = self.attention(*args, **kwargs)
        output = output if self.batch_first else output.transpose(0, 1)
        result = torch.tanh(output).flatten(1) @ self.head
        return result if weights is None else result + weights.flatten(1).sum(-1, keepdim=True) * 0.1


def _self(x: Tensor) -> Any:
    return (x, x, x), {"need_weights": False}


def _self_weights(x: Tensor) -> Any:
    return (x, x, x), {}


def _cross(x: Tensor, y: Tensor) -> Any:
    return (x, y, y), {"need_weights": False}


def _three(x: Tensor, y: Tensor, z: Tensor) -> Any:
    return (x, y, z), {"need_weights": True, "average_attn_weights": False}


def _causal(x: Tensor) -> Any:
    mask = torch.ones(T, T, dtype=torch.bool).triu(1)
    return (x, x, x), {"attn_mask": mask, "is_causal": True, "need_weights": False}


def _float_mask(x: Tensor) -> Any:
    return (x, x, x), {"attn_mask": normal(T, T, seed=4)}


def _head_mask(x: Tensor) -> Any:
    mask = normal(2, T, T, seed=4)  # one mask per head, the same for every example
    return (x, x, x), {"attn_mask": mask.repeat(len(x), 1, 1)}


def _padding(x: Tensor, y: Tensor, pad: Tensor) -> Any:
    return (x, y, y), {"key_padding_mask": pad, "need_weights": False}


def _float_padding(x: Tensor, y: Tensor, pad: Tensor) -> Any:
    return (x, y, y), {"key_padding_mask": torch.where(pad, -2.5, 0.25).to(x), "need_weights": False}


X, Y, Z = normal(B, T, E), normal(B, S, E, seed=1), normal(B, S, E, seed=2)
PAD = torch.arange(S) >= torch.tensor([6, 4, 5, 2, 1])[:, None]
NARROW = (normal(B, S, 5, seed=1), normal(B, S, 6, seed=2))

CASES: dict[str, tuple[dict[str, Any], Any, tuple[Tensor, ...], tuple[str, ...]]] = {
    "self": ({}, _self, (X,), ()),
    "self_sequence_first": ({"batch_first": False}, _self, (X,), ()),
    "self_weights": ({}, _self_weights, (X,), ()),
    "self_no_bias": ({"bias": False}, _self, (X,), ()),
    "causal": ({}, _causal, (X,), ()),
    "float_mask": ({}, _float_mask, (X,), ()),
    "head_mask": ({}, _head_mask, (X,), ()),
    "cross": ({}, _cross, (X, Y), ()),
    "cross_sequence_first": ({"batch_first": False}, _cross, (X, Y), ()),
    "three": ({}, _three, (X, Y, Z), ()),
    "padding": ({}, _padding, (X, Y, PAD), ()),
    "float_padding": ({}, _float_padding, (X, Y, PAD), ()),
    "other_widths": ({"kdim": 5, "vdim": 6}, _three, (X, *NARROW), ("in_proj_bias",)),
    "other_widths_no_bias": ({"kdim": 5, "vdim": 6, "bias": False}, _three, (X, *NARROW), ()),
    "bias_rows": ({"add_bias_kv": True}, _padding, (X, Y, PAD), ("bias_k", "bias_v")),
    "zero_row": ({"add_zero_attn": True}, _causal, (X,), ()),
    "bias_and_zero": ({"add_bias_kv": True, "add_zero_attn": True}, _float_mask, (X,), ("bias_k", "bias_v")),
}


def _build(name: str) -> tuple[Around, tuple[Tensor, ...], tuple[str, ...]]:
    options, arguments, inputs, without = CASES[name]
    attention = nn.MultiheadAttention(E, 2, **{"batch_first": True, **options}).double()
    randomise(attention)
    return Around(attention, arguments).eval(), inputs, without


@pytest.mark.parametrize("name", CASES)
def test_forward_while_recording_is_the_original(name: str) -> None:
    model, inputs, _ = _build(name)
    expected = model(*inputs)
    names = [n for n, _ in model.named_parameters()]
    with record_calls(find_layers(model, names)) as calls:
        found = model(*inputs)
    assert calls
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(model(*inputs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("name", ["self", "causal"])
def test_unbatched_call_while_recording_is_the_original(name: str, weights: bool) -> None:
    model, _, _ = _build(name)
    attention = model.attention
    x = normal(T, E, seed=8)
    expected = attention(x, x, x, need_weights=weights)
    with record_calls(find_layers(attention, ["out_proj.weight"])):
        found = attention(x, x, x, need_weights=weights)
    torch.testing.assert_close(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None)
    if weights:
        torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    model, inputs, without = _build(name)
    attention, arguments = model.attention, model.arguments
    check_layer_rule(attention, *inputs, wrap=lambda layer: Around(layer, arguments), without_rule=without)
