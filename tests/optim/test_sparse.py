"""Sparse gradients, as an embedding of many words gives them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.optim import IVON, KFAC, OGN, VOGN, NoisyKFAC
from aftermap.optim.base import VariationalOptimizer


@pytest.mark.parametrize("way", ["closure", "own backward pass", "blocks"])
@pytest.mark.parametrize("preset", [VOGN, OGN, IVON, KFAC, NoisyKFAC])
def test_a_sparse_embedding_trains_like_a_dense_one(preset: Callable[..., VariationalOptimizer], way: str) -> None:
    found: list[list[Tensor]] = []
    x, y = torch.tensor([[1, 2], [2, 2], [4, 0]]), torch.tensor([0, 2, 1])
    for sparse in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(6, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 3)).double()
        opt = preset(
            net, lr=0.05, n_data=9, **({} if preset in (OGN, KFAC) else {"generator": torch.Generator().manual_seed(5)})
        )

        def closure(net: nn.Module = net) -> Tensor:
            loss = F.cross_entropy(net(x), y)
            if way != "closure":
                loss.backward()
            return loss

        for _ in range(3):
            if way == "blocks":
                opt.zero_grad()
                for _ in range(2):
                    with opt.sampled_params():
                        closure()
                opt.step()
            else:
                opt.step(closure)
        found.append([p.detach() for p in net.parameters()])
    torch.testing.assert_close(found[1], found[0])
