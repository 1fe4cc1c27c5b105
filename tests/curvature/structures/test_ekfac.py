"""EKFAC holds the exact curvature along every vector of its basis, whatever form the inputs of a layer have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.curvature import fit_curvature
from aftermap.curvature.structures.ekfac import EkfacBlock
from aftermap.errors import InputError


class Words(nn.Module):
    """An embedding whose tokens are averaged, so that weights are shared over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(tokens)).mean(1))


def problem() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    model = Words().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    tokens = torch.randint(0, 5, (7, 4), generator=generator)
    return model, [(tokens, torch.randint(0, 2, (7,), generator=generator))]


@pytest.mark.parametrize("approach", ["expand", "reduce"])
def test_eigenvalues_are_the_curvature_along_the_basis(approach: str) -> None:
    model, data = problem()
    blocks = fit_curvature(model, data, "classification", structure="ekfac", approach=approach).blocks
    for block in blocks:
        assert isinstance(block, EkfacBlock)
        exact = fit_curvature(model, data, "classification", structure="full", params=list(block.shapes)).to_dense()
        layout, basis = block.layout, block.basis
        inputs = torch.eye(layout.in_, dtype=torch.float64) if basis.inputs is None else basis.inputs[0]
        vectors = torch.kron(basis.outputs[0].contiguous(), inputs.contiguous())
        place = layout.positions()
        along = (vectors.T @ exact[place[:, None], place] @ vectors).diagonal()
        assert_close(block.values.reshape(-1), along, rtol=1e-10, atol=1e-12)


def test_blocks_of_different_bases_are_not_added() -> None:
    model, data = problem()
    block = fit_curvature(model, data, "classification", structure="ekfac").blocks[0]
    assert isinstance(block, EkfacBlock)
    assert block.basis.inputs is None
    turned = replace(block.basis, inputs=torch.eye(5, dtype=torch.float64)[None])
    for left, right in ((block, replace(block, basis=turned)), (replace(block, basis=turned), block)):
        with pytest.raises(InputError, match="different eigenbases"):
            left + right
    assert_close((block + block).to_dense(), 2 * block.to_dense())
