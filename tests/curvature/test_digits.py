"""Sums over a million rows keep the digits of single precision, on any CPU.

Some matrix kernels carry the running total through a product and add one row after the other; others start from zero and
add in blocks. `RowByRow` makes every machine one of the first kind.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import aftermap as am
from aftermap.curvature import fit_curvature

N_ROWS = 1_000_000


def row_by_row(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, added term after term in single precision."""
    terms = (left.mT[..., :, None] * right[..., :, None, :]).numpy()  # [..., k, m, n]
    axis = terms.ndim - 3
    if total is not None:
        terms = np.concatenate([np.expand_dims(total.numpy(), axis), terms], axis)
    return torch.from_numpy(np.add.accumulate(terms, axis=axis, dtype=np.float32).take(-1, axis))


class RowByRow(TorchFunctionMode):
    """Inside, products of single precision are summed row by row, and products into a total carry the total along."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        products = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.bmm)
        if function in (torch.Tensor.addmm_, torch.Tensor.baddbmm_) and args[0].dtype == torch.float32:
            return args[0].copy_(row_by_row(args[0], args[1], args[2]))
        if function in products and args[0].dtype == args[1].dtype == torch.float32 and not args[0].requires_grad:
            product = row_by_row(None, args[0], args[1])
            out = (kwargs or {}).get("out")
            return product if out is None else out.copy_(product)
        return function(*args, **(kwargs or {}))


def softmax_layer() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3)).eval()
    x = torch.randn(N_ROWS, 4) + 1.0
    return net, list(zip(x.split(5_000), torch.randint(3, (N_ROWS,)).split(5_000), strict=True))


def convolution() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 99, 3)).eval()
    x = torch.rand(N_ROWS // 99, 1, 10, 12)
    return net, list(zip(x.split(500), torch.randint(3, (len(x),)).split(500), strict=True))


def relative_error(factors: am.curvature.Factors, exact: am.curvature.Factors) -> float:
    return max(
        float((value.double() - truth.tensors()[name]).abs().max() / truth.tensors()[name].abs().max())
        for block, truth in zip(factors.blocks, exact.blocks, strict=True)
        for name, value in block.tensors().items()
    )


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full"])
@pytest.mark.parametrize("problem", [softmax_layer, convolution])
def test_a_million_rows_keep_their_digits(problem: Callable[[], Any], structure: str) -> None:
    net, data = problem()
    options: dict[str, Any] = {"structure": structure, "curvature": "empirical"}
    if problem is convolution and structure == "full":
        options["params"] = ["0.weight", "0.bias", "1.weight"]
    wide = [(x.double(), y) for x, y in data]
    exact = fit_curvature(copy.deepcopy(net).double(), wide, "classification", **options)
    with RowByRow():
        factors = fit_curvature(net, data, "classification", **options)
    assert relative_error(factors, exact) < 1e-6
    with RowByRow():
        am.Laplace(net, "classification", **{k: v for k, v in options.items() if k != "curvature"}).fit(data[:20])


def test_ekfac_keeps_its_digits() -> None:
    net, data = softmax_layer()
    with RowByRow():
        (block,) = fit_curvature(net, data, "classification", structure="ekfac").blocks
    values = block.tensors()["values"].double()
    # In any orthogonal basis the eigenvalues sum to the trace, which is the sum of the diagonal.
    wide = [(x.double(), y) for x, y in data]
    exact = fit_curvature(copy.deepcopy(net).double(), wide, "classification", structure="diagonal")
    trace = sum(float(v.sum()) for b in exact.blocks for v in b.diagonal().values())
    assert abs(float(values.sum()) / trace - 1) < 1e-6


def test_the_emulated_kernel_is_a_bad_one() -> None:
    """Without parts the same kernel loses digits, so the tests above can fail."""
    rows = torch.rand(200_000, 3)
    exact = rows.double().T @ rows.double()
    total = torch.zeros(3, 3)
    with RowByRow():
        for part in rows.split(500):
            total.addmm_(part.T, part)
    assert float(((total - exact) / exact).abs().max()) > 3e-6
