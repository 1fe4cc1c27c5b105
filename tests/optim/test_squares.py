"""Σ g and Σ g² of a closure against one gradient per example, for every kind of layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.curvature.fit import fit_curvature
from aftermap.curvature.passes.closure import ClosureReader
from aftermap.curvature.passes.gradient_reader import ClosureStatistics
from aftermap.curvature.passes.per_example import per_example_gradients
from aftermap.curvature.structures.diagonal import ggn_diagonal_of_closure
from aftermap.errors import StatisticalWarning, UnsupportedError
from aftermap.likelihoods import Categorical

N = 7


class Tied(nn.Module):
    """An embedding whose table is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 5)
        self.middle = nn.Linear(5, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.middle(self.table(tokens)).mean(1)), self.table.weight)


class TiedModules(nn.Module):
    """The same, with the output layer a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 5)
        self.head = nn.Linear(5, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(tokens).mean(1)))


class Reused(nn.Module):
    """One layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(5, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return x


class Bare(nn.Module):
    """A parameter that no layer rule knows, and a layer whose weight is also used as a bare tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.layer = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + self.layer.weight.mean()


class Attention(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first)
        self.batch_first = batch_first
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        out = self.attention(x, x, x, need_weights=False)[0]
        return self.head(out.mean(1 if self.batch_first else 0))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(5, 3, batch_first=True)
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])


def pooled(*layers: nn.Module, width: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 4))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 4)), (5,)),
    "linear on tokens": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Flatten(), nn.Linear(18, 4)), (3, 5)),
    "conv1d": (lambda: pooled(nn.Conv1d(4, 6, 3, groups=2, padding=1), nn.Tanh(), width=30), (4, 5)),
    "conv2d": (lambda: pooled(nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=1), nn.Tanh(), width=45), (2, 5, 4)),
    "conv2d circular": (
        lambda: pooled(nn.Conv2d(2, 3, 3, dilation=2, padding=2, padding_mode="circular"), nn.Tanh(), width=90),
        (2, 6, 5),
    ),
    "conv2d wide": (
        lambda: pooled(nn.Conv2d(16, 17, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(2), width=68),
        (16, 9, 8),
    ),
    "conv3d": (lambda: pooled(nn.Conv3d(2, 3, 2), nn.Tanh(), width=72), (2, 3, 4, 5)),
    "transposed": (
        lambda: pooled(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, output_padding=1), nn.Tanh(), width=6 * 80),
        (4, 4, 3),
    ),
    "layer norm": (lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4)), (5,)),
    "group norm": (lambda: pooled(nn.Conv2d(2, 6, 2), nn.GroupNorm(3, 6), nn.Tanh(), width=72), (2, 5, 4)),
    "rms norm": (lambda: nn.Sequential(nn.Linear(5, 6), nn.RMSNorm(6), nn.Linear(6, 4)), (5,)),
    "prelu": (lambda: nn.Sequential(nn.Linear(5, 6), nn.PReLU(6), nn.Linear(6, 4)), (5,)),
    "batch norm in eval": (
        lambda: pooled(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3).eval(), nn.Tanh(), width=36),
        (2, 5, 4),
    ),
    "reused": (Reused, (5,)),
    "bare tensors": (Bare, (5,)),
    "attention": (lambda: Attention(batch_first=True), (3, 6)),
    "attention, batch second": (lambda: Attention(batch_first=False), (7, 6)),
    "recurrent": (Recurrent, (3, 5)),
}
TOKENS: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Sequential(nn.Embedding(6, 5, padding_idx=2), nn.Flatten(), nn.Linear(20, 4)),
    "tied by tensor": Tied,
    "tied modules": TiedModules,
}


def make(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name in TOKENS:
        net, x = TOKENS[name](), torch.randint(6, (N, 4), generator=generator)
    else:
        build, shape = CASES[name]
        net, x = build(), torch.randn(N, *shape, generator=generator, dtype=torch.float64)
    net = net.to(torch.float64)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.4)
    return net, x, torch.randint(4, (N,), generator=generator)


def loop(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """One gradient per example, one at a time: [N, *shape]."""
    names, params = zip(*net.named_parameters(), strict=True)
    rows = []
    for n in range(len(x)):
        rows.append(torch.autograd.grad(F.cross_entropy(net(x[n : n + 1]), y[n : n + 1]), params))
    return {name: torch.stack([r[i] for r in rows]) for i, name in enumerate(names)}


def read(
    reader: ClosureReader, net: nn.Module, x: Tensor, y: Tensor, reduction: str, *, own: bool
) -> ClosureStatistics:
    with reader.reading() as reading:
        loss = F.cross_entropy(net(x), y, reduction=reduction)
        if own:
            loss.backward()
        else:
            reading.differentiate(loss)
    return reading.finish()


@pytest.mark.parametrize("name", [*CASES, *TOKENS])
def test_sums_and_squares_are_those_of_single_examples(name: str) -> None:
    net, x, y = make(name)
    expected = loop(net, x, y)
    reader = ClosureReader(net, list(expected))
    # The first closure verifies and falls back, the second uses rules alone, the third calls backward itself.
    for reduction, own, scale in (("mean", False, N), ("sum", False, 1), ("mean", True, N), ("sum", True, 1)):
        found = read(reader, net, x, y, reduction, own=own)
        assert found.size == N
        assert found.sums.keys() == found.squares.keys() == expected.keys()
        for key, each in expected.items():
            assert_close(found.sums[key] * scale, each.sum(0), rtol=1e-7, atol=1e-10)
            assert_close(found.squares[key] * scale**2, each.square().sum(0), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", [*CASES, *TOKENS])
def test_public_per_example_gradients(name: str) -> None:
    net, x, y = make(name)
    expected = loop(net, x, y)
    found = per_example_gradients(net.eval(), (x, y), "classification")
    assert found.keys() == expected.keys()
    for key, each in expected.items():
        assert_close(found[key], each, rtol=1e-7, atol=1e-10)


def test_weights_multiply_per_example_gradients() -> None:
    net, x, y = make("linear")
    weight = torch.linspace(0.0, 3.0, N, dtype=torch.float64)
    plain = per_example_gradients(net, (x, y), "classification")
    found = per_example_gradients(net, (x, y, weight), "classification")
    assert_close(found["0.weight"], plain["0.weight"] * weight[:, None, None])


def test_which_parameters_have_no_rule_is_known_after_the_first_closure() -> None:
    net, x, y = make("bare tensors")
    reader = ClosureReader(net, [n for n, _ in net.named_parameters()])
    read(reader, net, x, y, "mean", own=False)
    assert reader.plan is not None
    assert set(reader.plan.uncovered) == {"scale", "layer.weight"}


def test_batch_norm_in_training_has_exact_sums_and_squares_of_its_rows() -> None:
    net, x, y = make("batch norm in eval")
    net.train()
    names, params = zip(*net.named_parameters(), strict=True)
    before = {k: b.clone() for k, b in net.named_buffers()}
    reader = ClosureReader(net, list(names))
    with pytest.warns(StatisticalWarning, match="1 BatchNorm layers .* are in training mode"):
        found = read(reader, net, x, y, "sum", own=False)
    truth = torch.autograd.grad(F.cross_entropy(net(x), y, reduction="sum"), params)
    for key, each in zip(names, truth, strict=True):
        assert_close(found.sums[key], each)
    # One forward pass of the closure and one above: looking at the model left no trace in the statistics.
    assert int(net[1].num_batches_tracked) == int(before["1.num_batches_tracked"]) + 2
    read(reader, net, x, y, "sum", own=False)  # no second warning
    assert net.training


def test_two_calls_of_the_model_in_one_closure_are_refused() -> None:
    net, x, y = make("linear")
    reader = ClosureReader(net, [n for n, _ in net.named_parameters()])
    with reader.reading() as reading:
        reading.differentiate(F.cross_entropy(net(x), y) + F.cross_entropy(net(-x), y))
    with pytest.raises(UnsupportedError, match="called the model 2 times"):
        reading.finish()


def test_a_look_without_gradient_is_not_a_call() -> None:
    net, x, y = make("linear")
    reader = ClosureReader(net, [n for n, _ in net.named_parameters()])
    with reader.reading() as reading:
        with torch.no_grad():
            net(x[:3])
        reading.differentiate(F.cross_entropy(net(x), y))
    assert reading.finish().size == N


def test_nothing_of_the_model_changes() -> None:
    net, x, y = make("attention")
    before = {k: v.clone() for k, v in net.state_dict().items()}
    reader = ClosureReader(net, [n for n, _ in net.named_parameters()])

    def fail() -> None:
        with reader.reading():
            net(x)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    read(reader, net, x, y, "mean", own=False)
    assert all(not m._forward_hooks and "forward" not in m.__dict__ for m in net.modules())
    assert all(p.grad is None and p.requires_grad and not p._backward_hooks for p in net.parameters())
    assert net.training
    for key, value in net.state_dict().items():
        assert_close(value, before[key], rtol=0, atol=0)


def test_inputs_are_let_go_as_the_backward_pass_goes_on() -> None:
    net, x, y = make("linear")
    reader = ClosureReader(net, [n for n, _ in net.named_parameters()])
    read(reader, net, x, y, "mean", own=False)
    with reader.reading() as reading:
        loss = F.cross_entropy(net(x), y)
        assert [c.inputs.numel() for c in reading.record.calls] == [N * 5, N * 6]
        reading.differentiate(loss)
        assert [c.inputs.numel() for c in reading.record.calls] == [0, 0]


@pytest.mark.parametrize("name", ["linear", "conv2d", "bare tensors", "reused", "group norm"])
def test_the_ggn_of_a_closure_is_that_of_the_engine(name: str) -> None:
    net, x, y = make(name)
    names = [n for n, _ in net.named_parameters()]
    reader = ClosureReader(net, names, gradients_only=True)
    with reader.reading() as reading:
        loss = F.cross_entropy(net(x), y)
        reading.differentiate(loss, keep=True)
    reading.finish()
    found = ggn_diagonal_of_closure(reading, Categorical(), "exact", 1, None)
    expected = fit_curvature(net.eval(), [(x, y)], "classification", structure="diagonal", curvature="exact").diagonal()
    for key in names:
        assert_close(found[key], expected[key], rtol=1e-7, atol=1e-12)
