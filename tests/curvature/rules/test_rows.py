"""The laws of input rows: all that is summed over examples follows from the gradients of single ones, whatever is computed at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from aftermap.curvature.rules import base, convolution, linear
from aftermap.curvature.rules.base import InputRows, find_rule
from aftermap.curvature.rules.linear import DenseRows, OneHotRows
from tests.curvature.layer_cases import CASES, normal, randomise


def rows_of_layer(name: str) -> tuple[InputRows, Tensor]:
    """The rows of a layer's parameters on its inputs, and gradients [v, b, g, t, o] that it could meet."""
    module, inputs = CASES[name]()
    module = randomise(module).double().eval()
    output = module(*inputs)
    rule = find_rule(module)
    assert rule is not None
    named = {n: (n, p.detach()) for n, p in module.named_parameters()}
    return rule.rows(module, inputs[0], output.shape[1:], named), rule.grads(module, normal(2, *output.shape, seed=4))


def packed(ones: bool, shared: int) -> tuple[InputRows, Tensor]:
    """Three groups that share one tensor of rows."""
    return DenseRows(normal(5, 1, shared, 4).expand(-1, 3, -1, -1), ones), normal(2, 5, 3, shared, 2, seed=4)


ROWS = {
    **{name: lambda name=name: rows_of_layer(name) for name in CASES if not name.startswith("conv2d_shift")},
    "packed": lambda: packed(False, 3),
    "packed with bias": lambda: packed(True, 3),
    "packed, one position": lambda: packed(True, 1),
    "bias alone": lambda: (DenseRows(normal(5, 2, 3, 0), True), normal(2, 5, 2, 3, 4, seed=4)),
    "words": lambda: (
        OneHotRows(torch.tensor([[1, 4, 1, -1], [0, 0, 0, 0], [2, -1, -1, 4]]), 6, torch.float64),
        normal(2, 3, 1, 4, 5, seed=4),
    ),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("vectors", [1, 2])
@pytest.mark.parametrize("at_once", [2, None])
@pytest.mark.parametrize("name", ROWS)
def test_sums_follow_from_single_examples(
    name: str, at_once: int | None, vectors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether two examples fit into the working memory, or all of them."""
    if at_once is not None:
        for module in (base, convolution, linear):
            monkeypatch.setattr(module, "examples_per_chunk", lambda *_: at_once)
    rows, grads = ROWS[name]()
    grads = grads[:vectors]
    single = rows.per_example_gradients(grads)
    assert single.shape[:2] == grads.shape[:2]
    total, squares = rows.moments(grads)
    assert_close(total, single.sum((0, 1)))
    assert_close(squares, single.square().sum((0, 1)))
    added = normal(*squares.shape, seed=5)
    expected = added + squares
    for _ in range(2):
        rows.cached().add_squares_(added, grads)
    assert_close(added, expected + squares)
    assert_close(rows.examples(1, 2).per_example_gradients(grads[:, 1:3]), single[:, 1:3])
    assert_close(rows.examples(1, 2).moments(grads[:, 1:3])[1], single[:, 1:3].square().sum((0, 1)))


@pytest.mark.parametrize("name", ["packed", "packed with bias", "packed, one position", "linear_tokens", "words"])
def test_gradients_are_products_of_gradients_and_rows(name: str) -> None:
    rows, grads = ROWS[name]()
    dense = rows.dense()
    if isinstance(rows, OneHotRows):
        dense = F.one_hot(rows.index.clamp_min(0), rows.features).double() * (rows.index >= 0)[..., None]
        dense = dense[:, None]
    assert dense is not None
    assert_close(rows.per_example_gradients(grads), torch.einsum("vbgto,bgti->vbgoi", grads, dense))
