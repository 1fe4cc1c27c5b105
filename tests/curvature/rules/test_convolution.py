"""Per-example gradients of convolutions: every method of computing them gives the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aftermap.curvature import fit_curvature, reference
from aftermap.curvature.rules import convolution
from aftermap.curvature.rules.base import find_rule
from aftermap.curvature.rules.convolution import ConvRows, Method
from aftermap.likelihoods import Categorical

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "plain": (nn.Conv2d(8, 16, 3, padding=1), (7, 6)),
    "strided": (nn.Conv2d(8, 24, 3, stride=2, padding=1), (9, 8)),
    "strided unevenly": (nn.Conv2d(8, 16, (3, 2), stride=(3, 2)), (11, 7)),
    "dilated": (nn.Conv2d(8, 16, 3, dilation=2, padding=2), (7, 6)),
    "dilated, many channels": (nn.Conv2d(16, 17, (3, 2), dilation=(1, 2)), (7, 6)),
    "one by one": (nn.Conv2d(16, 17, 1), (7, 6)),
    "one by one, strided": (nn.Conv2d(16, 17, 1, stride=2), (9, 8)),
    "grouped": (nn.Conv2d(16, 24, 3, groups=2, padding=1), (5, 6)),
    "circular": (nn.Conv2d(8, 16, 3, padding=1, padding_mode="circular"), (5, 6)),
    "same, one more at the end": (nn.Conv2d(8, 16, (2, 4), padding="same"), (5, 6)),
    "without a bias": (nn.Conv2d(16, 17, 3, bias=False), (5, 6)),
    "lines": (nn.Conv1d(8, 16, 3, padding=1), (7,)),
    "volumes": (nn.Conv3d(8, 16, 2, padding=1), (3, 4, 5)),
    "much padding": (nn.Conv2d(8, 16, (2, 3), padding=(3, 2)), (4, 5)),
    "no row of the kernel meets all rows": (nn.Conv2d(8, 16, 2, padding=1), (4, 5)),
    "strided along the width": (nn.Conv2d(8, 16, 3, stride=(1, 2), padding=1), (6, 7)),
    "few channels": (nn.Conv2d(2, 3, (5, 3), padding=2, dilation=(2, 1)), (9, 8)),
    "grouped, few channels": (nn.Conv2d(4, 6, 3, groups=2, padding=1), (9, 8)),
    "transposed lines": (nn.ConvTranspose1d(16, 17, 4, stride=2), (5,)),
    "transposed": (nn.ConvTranspose2d(8, 16, 3, stride=2, padding=1), (3, 4)),
}
# PyTorch tells that it copies such an input.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
METHODS: tuple[Method, ...] = ("grouped kernel", "kernel rows", "unfolded windows")


def rows_and_grads(name: str, dtype: torch.dtype) -> tuple[ConvRows, Tensor]:
    layer, space = LAYERS[name]
    layer = layer.to(dtype)
    generator = torch.Generator().manual_seed(1)
    channels: Any = layer.in_channels
    x = torch.randn(5, channels, *space, generator=generator, dtype=dtype)
    rule = find_rule(layer)
    assert rule is not None
    out = layer(x)
    named = {n: n for n, _ in layer.named_parameters()}
    rows = rule.rows(layer, x, tuple(out.shape[1:]), named)
    assert isinstance(rows, ConvRows)
    grads = rule.grads(layer, torch.randn(2, *out.shape, generator=generator, dtype=dtype))
    return rows, grads


def use(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(rows: ConvRows, out: int, grads: Tensor) -> Method:
        # Rows of the kernel need two dimensions and a stride of one between them; else windows are what is left.
        plain_slices = len(rows.kernel) == 2 and rows.stride[0] == 1 and not rows.flipped
        return "unfolded windows" if method == "kernel rows" and not plain_slices else method

    monkeypatch.setattr(convolution, "choose_method", chosen)


def brute_force(rows: ConvRows, grads: Tensor) -> Tensor:
    return torch.einsum("vbgto,bgti->vbgoi", grads, rows.dense())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", LAYERS)
def test_every_method_equals_the_product_with_all_windows(
    name: str, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, grads = rows_and_grads(name, torch.float64)
    expected = brute_force(rows, grads)
    use(method, monkeypatch)
    torch.testing.assert_close(rows.per_example_gradients(grads), expected)
    total, squares = rows.moments(grads)
    torch.testing.assert_close(total, expected.sum((0, 1)))
    torch.testing.assert_close(squares, expected.square().sum((0, 1)))
    for each in (rows, rows.cached()):
        added = torch.ones_like(squares)
        each.add_squares_(added, grads)
        torch.testing.assert_close(added, 1 + expected.square().sum((0, 1)))
        torch.testing.assert_close(each.examples(1, 3).per_example_gradients(grads[:, 1:4]), expected[:, 1:4])


@pytest.mark.parametrize("name", LAYERS)
def test_the_method_that_is_chosen_in_single_precision_is_right_too(name: str) -> None:
    rows, grads = rows_and_grads(name, torch.float32)
    exact, exact_grads = rows_and_grads(name, torch.float64)
    expected = brute_force(exact, exact_grads)
    found = rows.moments(grads)
    single = brute_force(rows, grads)
    torch.testing.assert_close(found[0], single.sum((0, 1)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], single.square().sum((0, 1)), rtol=1e-4, atol=1e-4)
    assert expected.shape == single.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_turned_rows_are_all_windows_times_the_matrix(name: str, dtype: torch.dtype) -> None:
    rows, _ = rows_and_grads(name, dtype)
    basis = torch.randn(rows.groups, rows.features, 7, generator=torch.Generator().manual_seed(2), dtype=dtype)
    expected = torch.einsum("bgti,gim->bgtm", rows.dense(), basis)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    torch.testing.assert_close(rows.turned(basis), expected, **tolerance)
    torch.testing.assert_close(rows.cached().turned(basis), expected, **tolerance)
    only_bias = replace(rows, weights=False, ones=True)
    torch.testing.assert_close(
        only_bias.turned(basis[:, :1]), basis[:, :1].expand(5, -1, -1, -1).expand(-1, -1, rows.shared, -1)
    )


def test_few_examples_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, grads = rows_and_grads("plain", torch.float64)
    expected = rows.moments(grads)
    use("grouped kernel", monkeypatch)
    monkeypatch.setattr("aftermap.curvature.rules.convolution._GROUPED_NUMBERS", 2 * 16 * 72)
    torch.testing.assert_close(rows.moments(grads), expected)


@pytest.mark.parametrize("curvature", ["empirical", "exact"])
@pytest.mark.parametrize("sums", [torch.float32, torch.float64])
def test_norm_layers_sum_over_batches_of_every_size(curvature: str, sums: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).eval()
    net[1].running_mean.normal_()
    net[1].running_var.uniform_(0.5, 2.0)
    x, y = torch.randn(9, 3, 6, 6), torch.randint(3, (9,))
    parts = [(x[:4], y[:4]), (x[4:8], y[4:8]), (x[8:], y[8:])]
    found = fit_curvature(
        net, parts, "classification", structure="diagonal", curvature=curvature, accumulate=sums
    ).diagonal()
    exact = net.double()
    if curvature == "exact":
        truth = reference.diagonal_ggn(exact, x.double(), Categorical(), y)
    else:
        truth = reference.sum_squared_gradients(exact, x.double(), Categorical(), y)
    for name, expected in truth.items():
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-4, atol=1e-5 * float(expected.max()))


def test_squared_gradients_of_a_network_in_single_precision() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 9, 4),
    ).eval()
    net[1].running_mean.normal_()
    net[1].running_var.uniform_(0.5, 2.0)
    x, y = torch.randn(7, 3, 6, 6), torch.randint(4, (7,))
    found = fit_curvature(net, [(x, y)], "classification", structure="diagonal", curvature="empirical").diagonal()
    exact = net.double()
    truth = reference.sum_squared_gradients(exact, x.double(), Categorical(), y)
    for name, expected in truth.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5 * float(expected.max()))


CHOICES: dict[str, tuple[nn.Module, tuple[int, ...], torch.dtype, Method]] = {
    "many positions in float32": (nn.Conv2d(16, 16, 3, padding=1), (16, 16), torch.float32, "grouped kernel"),
    "the same in float64": (nn.Conv2d(16, 16, 3, padding=1), (16, 16), torch.float64, "kernel rows"),
    "the same with a stride": (nn.Conv2d(16, 16, 3, stride=2), (16, 16), torch.float64, "unfolded windows"),
    "sixteen channels or more": (nn.Conv2d(17, 16, 3, padding=1), (16, 16), torch.float32, "grouped kernel"),
    "multiples of eight channels": (nn.Conv2d(8, 8, 3, padding=1), (16, 16), torch.float32, "grouped kernel"),
    "channels in between": (nn.Conv2d(8, 12, 3, padding=1), (16, 16), torch.float32, "kernel rows"),
    "few channels": (nn.Conv2d(1, 6, 5), (16, 16), torch.float32, "kernel rows"),
    "few positions": (nn.Conv2d(16, 16, 3, padding=1), (8, 8), torch.float32, "unfolded windows"),
    "one by one": (nn.Conv2d(16, 16, 1), (16, 16), torch.float32, "unfolded windows"),
    "just enough positions": (nn.Conv2d(16, 16, 3, padding=1), (8, 16), torch.float32, "grouped kernel"),
    "two positions less": (nn.Conv2d(16, 16, 3, padding=1), (7, 18), torch.float32, "kernel rows"),
    "most of few positions": (nn.Conv2d(16, 16, 3, padding=1), (8, 8), torch.float64, "unfolded windows"),
    "one position more": (nn.Conv2d(16, 16, 3, padding=1), (5, 13), torch.float64, "kernel rows"),
    "fifteen channels": (nn.Conv2d(15, 17, 3, padding=1), (16, 16), torch.float32, "kernel rows"),
    "eight and twenty-four": (nn.Conv2d(24, 8, 3, padding=1), (16, 16), torch.float32, "grouped kernel"),
    "twelve and twenty-four": (nn.Conv2d(12, 24, 3, padding=1), (16, 16), torch.float32, "kernel rows"),
    "twenty-four and twelve": (nn.Conv2d(24, 12, 3, padding=1), (16, 16), torch.float32, "kernel rows"),
    "gradients that just fit": (nn.Conv2d(16, 1024, (2, 4)), (12, 20), torch.float32, "grouped kernel"),
    "gradients that do not": (nn.Conv2d(16, 1025, (2, 4)), (12, 20), torch.float32, "kernel rows"),
    "a kernel of two": (nn.Conv2d(16, 16, (1, 2)), (16, 16), torch.float32, "grouped kernel"),
    "strided along the width": (nn.Conv2d(3, 5, 3, stride=(1, 2)), (16, 32), torch.float64, "kernel rows"),
    "lines": (nn.Conv1d(3, 5, 3), (300,), torch.float32, "unfolded windows"),
    "a transposed kernel": (nn.ConvTranspose2d(3, 5, 3), (16, 16), torch.float32, "unfolded windows"),
}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the grouped kernel is a part of oneDNN")
@pytest.mark.parametrize("name", CHOICES)
def test_the_method_follows_from_shapes_and_dtype(name: str) -> None:
    layer, space, dtype, expected = CHOICES[name]
    layer = layer.to(dtype)
    x = torch.randn(2, layer.in_channels, *space, dtype=dtype)
    out = layer(x)
    rule = find_rule(layer)
    assert rule is not None
    rows = rule.rows(layer, x, tuple(out.shape[1:]), {n: n for n, _ in layer.named_parameters()})
    assert isinstance(rows, ConvRows)
    assert convolution.choose_method(rows, out.shape[1], out) == expected
