"""The first steps of the optimisers, number by number, against loops that are written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.optim import KFAC, OGN
from tests.optim.problems import classifier


def gradients(net: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Per-example gradients [M, *shape] of the cross-entropy, one example at a time."""
    rows = [
        torch.autograd.grad(F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]), list(net.parameters()))
        for i in range(len(x))
    ]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("momentum_form", ["heavy_ball", "normalised"])
def test_three_steps_without_noise(momentum_form: str) -> None:
    net, x, y = classifier()
    lr, beta1, beta2, delta, n_data = 0.05, 0.8, 0.3, 2.0, 50
    opt = OGN(
        net, lr=lr, n_data=n_data, prior_precision=delta, momentum=beta1, new_curvature_weight=beta2, damping=0.1,
        momentum_form=momentum_form, initial_curvature=0.7,
    )  # fmt: skip
    twin, _, _ = classifier()
    mean = [p.detach().clone() for p in twin.parameters()]
    m, s = [torch.zeros_like(p) for p in mean], [torch.full_like(p, 0.7) for p in mean]
    for t in range(1, 4):
        opt.step(lambda: F.cross_entropy(net(x), y))
        with torch.no_grad():
            for p, value in zip(twin.parameters(), mean, strict=True):
                p.copy_(value)
        rows = gradients(twin, x, y)
        for k, g in enumerate(rows):
            pull = g.mean(0) + delta / n_data * mean[k]
            m[k] = beta1 * m[k] + (1 - beta1 if momentum_form == "normalised" else 1.0) * pull
            s[k] = (1 - beta2) * s[k] + beta2 * g.square().mean(0)
            rate = lr / (1 - beta1**t) if momentum_form == "normalised" else lr
            mean[k] = mean[k] - rate * m[k] / (s[k] + delta / n_data + 0.1)
        for p, value in zip(net.parameters(), mean, strict=True):
            assert_close(p.detach(), value, rtol=1e-10, atol=1e-12)


def test_the_factors_of_kfac_are_means_over_rows_and_examples() -> None:
    """A layer that is used at several positions has more rows than examples; weights of the running mean are those of eq. (9)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 3, 2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4)).double()
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(m, 2, 5, generator=generator, dtype=torch.float64), torch.arange(m) % 4) for m in (6, 9)]
    opt = KFAC(net, lr=0.0, n_data=20, new_curvature_weight=0.25)
    expected: list[Tensor] = []
    for x, y in batches:
        windows = x.unfold(2, 2, 1).permute(0, 2, 1, 3).reshape(-1, 4)  # [M · 4, in · kernel]
        hidden = net[0](x)
        grads = torch.autograd.grad(F.cross_entropy(net[3](net[2](net[1](hidden))), y, reduction="sum"), hidden)[0]
        lines = grads.permute(0, 2, 1).reshape(-1, 3)
        new = [windows.T @ windows / len(windows), lines.T @ lines / len(x)]
        expected = new if not expected else [0.75 * a + 0.25 * b for a, b in zip(expected, new, strict=True)]
        opt.step(lambda x=x, y=y: F.cross_entropy(net(x), y))
    state = opt.state[net[0].weight]
    assert_close(state["factor_inputs"][0], expected[0], rtol=1e-10, atol=1e-12)
    assert_close(state["factor_outputs"][0], expected[1], rtol=1e-10, atol=1e-12)
