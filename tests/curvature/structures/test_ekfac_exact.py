"""The eigenvalues of EKFAC against per-example gradients that are rotated one by one, on every path of the accumulator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.curvature import fit_curvature
from aftermap.curvature.structures.ekfac import EkfacBlock
from aftermap.curvature.structures.kron import KronBlock, decompose_bases


class Twice(nn.Module):
    """A layer that is called two times."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(torch.tanh(self.a(x)))))


def image(groups: int) -> nn.Module:
    """A convolution with more positions than outputs, so that its gradients, and not its rows, are rotated."""
    return nn.Sequential(nn.Conv2d(2, 4, 2, groups=groups), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 12, 3))


CASES = {
    "rows": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), (9, 5)),
    "positions": (lambda: image(1), (9, 2, 5, 4)),
    "groups": (lambda: image(2), (9, 2, 5, 4)),
    "calls": (Twice, (9, 4)),
    "words": (lambda: nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(12, 3)), None),
}


@pytest.mark.parametrize("case", CASES)
def test_eigenvalues_are_squares_of_rotated_gradients(case: str) -> None:
    torch.manual_seed(0)
    make, shape = CASES[case]
    net = make().double()
    generator = torch.Generator().manual_seed(1)
    x = (
        torch.randint(6, (9, 3), generator=generator)
        if shape is None
        else torch.randn(shape, generator=generator, dtype=torch.float64)
    )
    y = torch.arange(9) % 3
    factors = fit_curvature(
        net, [(x[:4], y[:4]), (x[4:], y[4:])], "classification", structure="ekfac", curvature="empirical"
    )
    parameters = dict(net.named_parameters())
    blocks = [b for b in factors.blocks if isinstance(b, EkfacBlock)]
    assert len(blocks) == 2
    for block in blocks:
        expected = torch.zeros(block.layout.groups, block.layout.out, block.layout.in_, dtype=torch.float64)
        for i in range(9):
            loss = nn.functional.cross_entropy(net(x[i : i + 1]), y[i : i + 1])
            grads = torch.autograd.grad(loss, [parameters[n] for n in block.shapes])
            matrix = block.layout.join(dict(zip(block.shapes, grads, strict=True)))
            for g in range(len(matrix)):
                rotated = block.basis.outputs[g].T @ matrix[g]
                rotated = rotated if block.basis.inputs is None else rotated @ block.basis.inputs[g]
                expected[g] += rotated.square()
        found = next(t for t in block.tensors().values() if t.shape == expected.shape)
        assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_new_bases_lie_in_memory_as_those_of_a_checkpoint_do() -> None:
    """A fit that goes on reads its bases from a file, row by row; products with columns that lie together round differently."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3))
    data = [(torch.randn(40, 20), torch.arange(40) % 3)]
    factors = fit_curvature(net, data, "classification", structure="kron")
    blocks = [b for b in factors.blocks if isinstance(b, KronBlock)]
    assert len(blocks) == 2
    for basis in decompose_bases(blocks, torch.float32, lambda make: make()):
        assert basis.outputs.is_contiguous()
        assert basis.inputs is not None
        assert basis.inputs.is_contiguous()
