"""What closures add up to: working in parts changes nothing but the memory, and bad numbers are noticed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aftermap.optim import IVON, KFAC, OGN, VOGN, base, vogn
from aftermap.optim.noise import in_chunks
from aftermap.optim.statistics import Collected, magnitudes
from tests.optim.problems import classifier


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_numbers_are_finite_and_only_bad_ones_are_not(dtype: torch.dtype) -> None:
    large = torch.full((50,), 0.5 * min(torch.finfo(dtype).max, 1e30), dtype=dtype)

    def collected(grad: Tensor, curvature: Tensor, loss: float = 1.0) -> Collected:
        grads = {"a": grad, "b": torch.ones(2)}  # of two dtypes
        return Collected(grads, {"a": curvature}, 1.0, 1.0, 4, torch.tensor(loss, dtype=torch.float64))

    assert collected(large, large).is_finite()
    assert not collected(large, large, math.nan).is_finite()
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = large.clone()
        spoilt[7] = bad
        assert not collected(spoilt, large).is_finite()
        assert not collected(large, spoilt).is_finite()
        # Gradients that the curvature implies are not looked at, unless there is no curvature, or new gradients have come.
        made_of_grads = collected(large, spoilt)
        made_of_grads.implied = True
        assert not made_of_grads.is_finite()
        alone = collected(large, large)
        alone.implied = True
        assert alone.is_finite()
        alone.grads["b"][1] = bad
        assert not alone.is_finite()
        changed = collected(large, large)
        changed.implied = True
        changed.replace_grads({"a": spoilt})
        assert not changed.is_finite()
        # Magnitudes that are known are believed where they are finite, and looked into where they are not.
        for curvature, fine in ((large, True), (spoilt, False)):
            measured = collected(torch.ones(2), curvature)
            measured.known = magnitudes([curvature])
            assert measured.is_finite() == fine
            measured.known = [torch.ones(())]
            assert measured.is_finite()
            measured.add(collected(torch.ones(2), torch.ones(50, dtype=dtype)))
            assert measured.is_finite() == fine


@pytest.mark.parametrize("with_prior", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda net: VOGN(net, lr=0.02, n_data=11, mc_samples=2),
        lambda net: VOGN(net, lr=0.02, n_data=11, curvature="reparametrised", initial_curvature=0.5),
        lambda net: OGN(net, lr=0.02, n_data=11),
        lambda net: IVON(net, lr=0.1, n_data=11, mc_samples=2, clip_radius=0.5),
        lambda net: KFAC(net, lr=0.02, n_data=11),
    ],
    ids=["VOGN", "VOGN reparametrised", "OGN", "IVON", "KFAC"],
)
def test_a_step_in_parts_is_the_same_step(
    make: Callable[[Any], Any], with_prior: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[Tensor]] = []
    for numbers in (None, 7):
        if numbers is not None:
            for module in (base, vogn):
                monkeypatch.setattr(module, "in_chunks", partial(in_chunks, numbers=numbers))
        net, x, y = classifier(norm=True)
        net.eval()
        torch.manual_seed(0)
        opt = make(net)
        if with_prior and not isinstance(opt, KFAC):
            weight = net[0].weight
            opt.set_prior({"0.weight": torch.ones_like(weight)}, {"0.weight": torch.full_like(weight, 2.0)})
        for _ in range(4):
            opt.step(lambda net=net, x=x, y=y: F.cross_entropy(net(x), y))
        states = [s for p in net.parameters() for s in opt.state[p].values() if isinstance(s, Tensor)]
        found.append([*(p.detach() for p in net.parameters()), *states])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
