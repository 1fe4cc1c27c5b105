"""What closures add up to: working in chunks changes nothing but the memory, and bad numbers are noticed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.optim import IVON, KFAC, OGN, VOGN, NoisyKFAC, base
from aftermap.optim.statistics import StepStatistics, parameter_chunks
from tests.optim.problems import classifier


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_numbers_are_finite_and_only_bad_ones_are_not(dtype: torch.dtype) -> None:
    large = torch.full((50,), 0.5 * min(torch.finfo(dtype).max, 1e30), dtype=dtype)

    def statistics(grad: Tensor, curvature: Tensor, loss: float = 1.0) -> StepStatistics:
        grads = {"a": grad, "b": torch.ones(2)}  # of two dtypes
        return StepStatistics(grads, {"a": curvature}, 1.0, 1.0, 4, torch.tensor(loss, dtype=torch.float64))

    assert statistics(large, large).is_finite()
    assert not statistics(large, large, math.nan).is_finite()
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = large.clone()
        spoilt[7] = bad
        assert not statistics(spoilt, large).is_finite()
        assert not statistics(large, spoilt).is_finite()
        changed = statistics(large, large)
        changed.replace_grads({"a": spoilt})
        assert not changed.is_finite()


def test_chunks_keep_order_and_bounds() -> None:
    named = [(str(i), torch.zeros(n)) for i, n in enumerate((3, 4, 9, 1, 1, 5, 2))]
    chunks = list(parameter_chunks(named, 7))
    assert [n for chunk in chunks for n, _ in chunk] == [n for n, _ in named]
    assert [[p.numel() for _, p in chunk] for chunk in chunks] == [[3, 4], [9], [1, 1, 5], [2]]
    assert list(parameter_chunks([], 7)) == []


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
def test_a_step_in_chunks_is_the_same_step(
    make: Callable[[Any], Any], with_prior: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[list[Tensor]] = []
    for numbers in (None, 7):
        if numbers is not None:
            monkeypatch.setattr(base, "parameter_chunks", partial(parameter_chunks, numbers=numbers))
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
        ends.append([*(p.detach() for p in net.parameters()), *states])
    assert_close(ends[0], ends[1], rtol=0, atol=0)


class Sequences(nn.Module):
    """Reads sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)).mean(1))
        return out


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("optimizer", [KFAC, NoisyKFAC])
def test_rows_of_micro_batches_of_different_length(optimizer: Any, order: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = [torch.randn(6, length, 3, generator=generator, dtype=torch.float64) for length in (3, 12)]
    net, targets = Sequences().to(torch.float64), torch.arange(6) % 2
    opt = optimizer(net, lr=1e-3, n_data=12)
    for number in order:
        with opt.sampled_params():
            F.cross_entropy(net(blocks[number]), targets).backward()
    opt.step()
    rows = torch.cat([F.pad(x.reshape(-1, 3), (0, 1), value=1.0) for x in blocks])
    assert_close(opt.state[net.first.weight]["factor_inputs"][0], rows.T @ rows / len(rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", [KFAC, NoisyKFAC])
def test_kronecker_factors_of_half_precision_are_float32(optimizer: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 30), torch.randint(3, (40,))

    def made() -> tuple[nn.Sequential, Any]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3)).to(dtype)
        return net, optimizer(net, lr=0.01, n_data=4000, damping=0.1, inverse_every=1)

    def train(net: nn.Module, opt: Any, steps: int) -> list[float]:
        return [float(opt.step(lambda: F.cross_entropy(net(x.to(dtype)), y))) for _ in range(steps)]

    net, opt = made()
    losses = train(net, opt, 6)
    assert losses[-1] < losses[0]
    state = opt.state[net[0].weight]
    factors = [v for k, v in state.items() if k.startswith(("factor", "basis", "values"))]
    assert [v.dtype for v in factors] == [torch.float32] * 6
    # A rounded factor would not be positive semi-definite, and a resumed run would be another one.
    again, other = made()
    again.load_state_dict(net.state_dict())
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(net, opt, 3)
    train(again, other, 3)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("optimizer", [VOGN, OGN, KFAC])
def test_a_skipped_first_step_does_not_count_in_the_correction_of_the_bias(optimizer: Any) -> None:
    ends = []
    for skip in (False, True):
        net, x, y = classifier()
        opt = optimizer(net, lr=0.02, n_data=11, momentum_form="normalised")
        if skip:
            with pytest.warns(UserWarning, match="skipped"):
                opt.step(lambda net=net, x=x, y=y: F.cross_entropy(net(x), y) * math.nan)
        opt.step(lambda net=net, x=x, y=y: F.cross_entropy(net(x), y))
        assert (opt.steps, opt.updates) == (1 + skip, 1)
        assert opt.state_dict()["aftermap"]["updates"] == 1
        ends.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.equal(ends[0], ends[1])
