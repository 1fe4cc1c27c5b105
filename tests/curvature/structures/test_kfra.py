"""KFRA: exact at batch size one, the Hadamard identity, what residual connections lose, messages."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from aftermap.curvature import reference
from aftermap.curvature.structures.kfra import kfra_factors
from aftermap.errors import InputError, UnsupportedError
from aftermap.likelihoods import Categorical, Gaussian

TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def labels(*shape: int) -> Tensor:
    return torch.randint(4, shape, generator=generator(3))


def randomise(model: nn.Module) -> nn.Module:
    g = generator(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=g))
        for name, b in model.named_buffers():
            if "running" in name:
                b.copy_(0.5 + torch.rand(b.shape, generator=g))
    return model.double().eval()


def layers(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)]


def check_exact_one_by_one(model: nn.Module, x: Tensor, y: Tensor, likelihood=None) -> None:
    """The sum of KFRA over batches of one equals the exact factors of the whole."""
    likelihood = likelihood or Categorical()
    names = layers(model)
    parts = [kfra_factors(model, x[n : n + 1], likelihood, y[n : n + 1], names) for n in range(len(x))]
    assert names
    for name in names:
        _, B, _ = reference.kron_factors(name, model, x, likelihood, y)
        assert_close(sum(p[name] for p in parts), B, **TIGHT)


ACTIVATIONS = [
    nn.ReLU(), nn.ReLU(inplace=True), nn.Tanh(), nn.Sigmoid(), nn.GELU(), nn.ELU(inplace=True), nn.SiLU(),
    nn.Softplus(), nn.LeakyReLU(), nn.Hardtanh(), nn.PReLU(), nn.Identity(), nn.Softmax(-1), nn.LayerNorm(6),
]  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_exact_at_batch_size_one(activation: nn.Module):
    act = copy.deepcopy(activation)
    model = randomise(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 6), act, nn.Linear(6, 4)))
    check_exact_one_by_one(model, randn(3, 3), labels(3))
    check_exact_one_by_one(model, randn(3, 3), randn(3, 4, seed=2), Gaussian(0.3))


def test_a_batch_gives_the_hadamard_recursion():
    model = randomise(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 4)))
    x, y = randn(7, 3), labels(7)
    w = torch.linspace(0.5, 2, 7, dtype=torch.float64)
    factors = kfra_factors(model, x, Categorical(), y, ["0", "2", "4"], weight=w)
    with torch.no_grad():
        h0 = model[0](x)
        h2 = model[2](torch.tanh(h0))
        f = model[4](torch.sigmoid(h2))
        b0, s = 1 - torch.tanh(h0) ** 2, torch.sigmoid(h2)
        b2 = s * (1 - s)
        M = w.sum()
        H4 = torch.einsum("n,ncd->cd", w, Categorical().hessian(f, y)) / M
        H2 = (model[4].weight.T @ H4 @ model[4].weight) * (b2.T @ torch.diag(w) @ b2 / M)
        H0 = (model[2].weight.T @ H2 @ model[2].weight) * (b0.T @ torch.diag(w) @ b0 / M)
    for name, H in {"4": H4, "2": H2, "0": H0}.items():
        assert_close(factors[name], (M * H)[None], **TIGHT)
    exact = reference.kron_factors("0", model, x, Categorical(), y, weight=w)[1]
    assert float((factors["0"] - exact).norm()) > 1e-3 * float(exact.norm())
    zero = kfra_factors(model, x, Categorical(), y, ["2"], weight=torch.zeros(7))
    assert_close(zero["2"], torch.zeros(1, 6, 6).double())


def test_the_hadamard_identity():
    b, C = randn(9, 5), randn(5, 5, seed=1)
    mean = sum(torch.diag(v) @ C @ torch.diag(v) for v in b) / 9
    assert_close(mean, C * (b.T @ b / 9))


def test_exact_for_a_deep_linear_network_at_any_batch_size():
    model = randomise(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 6), nn.Linear(6, 4)))
    x, y = randn(7, 3), randn(7, 4, seed=1)
    factors = kfra_factors(model, x, Gaussian(0.3), y, layers(model))
    for name in layers(model):
        assert_close(factors[name], reference.kron_factors(name, model, x, Gaussian(0.3), y)[1], **TIGHT)


CONVOLUTIONAL: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "max pooling and groups": (
        lambda: [
            nn.Conv2d(2, 6, 3, padding=1, stride=(1, 2), groups=2), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
            nn.MaxPool2d((2, 1)), nn.Conv2d(6, 4, (2, 1), groups=2), nn.Tanh(), nn.Flatten(),
            nn.Dropout(0.4), nn.Linear(12, 4),
        ], (2, 4, 5)),
    "average pooling": (
        lambda: [
            nn.Conv2d(2, 3, 2, padding_mode="circular", padding=1), nn.AvgPool2d((1, 2)), nn.ELU(), nn.GroupNorm(1, 3),
            nn.Conv2d(3, 5, (1, 2), dilation=2, bias=False), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(),
            nn.Linear(5, 4),
        ], (2, 3, 6)),
    "one dimension": (
        lambda: [
            nn.Conv1d(2, 3, 3, stride=2), nn.BatchNorm1d(3), nn.SiLU(), nn.MaxPool1d(2), nn.Conv1d(3, 5, 2),
            nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(10, 4),
        ], (2, 14)),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(CONVOLUTIONAL))
def test_convolutional_networks_are_exact_at_batch_size_one(kind: str):
    build, shape = CONVOLUTIONAL[kind]
    model = randomise(nn.Sequential(*build()))
    check_exact_one_by_one(model, randn(3, *shape), labels(3))


def test_linear_operations_and_max_pooling_are_exact_in_a_batch_when_the_output_hessian_is_constant():
    features = [nn.Conv2d(2, 6, 2, groups=2), nn.BatchNorm2d(6), nn.AvgPool2d((1, 2)), nn.MaxPool2d((2, 1))]
    model = randomise(nn.Sequential(*features, nn.Flatten(), nn.Linear(12, 4)))
    x, y = randn(5, 2, 5, 4), randn(5, 4, seed=1)
    w = torch.linspace(0.5, 2, 5, dtype=torch.float64)
    factors = kfra_factors(model, x, Gaussian(0.3), y, ["0", "5"], weight=w)
    for name, B in factors.items():
        assert_close(B, reference.kron_factors(name, model, x, Gaussian(0.3), y, weight=w)[1], **TIGHT)


class Functional(nn.Module):
    """The forms that people write in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 2)
        self.second = nn.Conv2d(3, 5, 2)
        self.relu = nn.Linear(20, 6)  # a name that is also a method's
        self.last = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x), inplace=True)
        x = F.max_pool2d(x, (1, 2))
        x = F.dropout(torch.tanh(self.second(x)), training=self.training)
        x = x.permute(0, 2, 3, 1).contiguous()
        x = x.view(x.size(0), -1) * 0.5 + 1
        x = self.scale * torch.sigmoid(self.relu(x)).relu()
        return self.last(2 - x / 3)


def test_functional_forms_are_exact_at_batch_size_one():
    check_exact_one_by_one(randomise(Functional()), randn(3, 2, 4, 7), labels(3))


def test_mean_over_positions_and_slices_are_linear():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 5), nn.Linear(5, 6), nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(F.gelu(self.a(x)))
            return self.c(torch.cat([x[:, 0], x.mean(dim=1)], dim=1))

    model = randomise(Tokens())
    x, y = randn(2, 4, 3), labels(2)
    last = kfra_factors(model, x[:1], Categorical(), y[:1], ["c"])
    assert_close(last["c"], reference.kron_factors("c", model, x[:1], Categorical(), y[:1])[1], **TIGHT)
    # x is used twice: the matrices of both uses are added, their cross terms are not.
    H = last["c"][0]
    with torch.no_grad():
        W = model.c.weight
        W0, W1 = W[:, :6], W[:, 6:] / 4
    expected = W0.T @ H @ W0 + 4 * W1.T @ H @ W1
    assert_close(kfra_factors(model, x[:1], Categorical(), y[:1], ["b"])["b"][0], expected, **TIGHT)


def test_outputs_with_positions():
    model = randomise(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)))
    x, y = randn(2, 3, 3), labels(2, 3)
    y[1, 2] = -100
    check_exact_one_by_one(model, x, y)


class Residual(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.stem, self.inner, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        y = torch.sigmoid(self.inner(x))
        if self.how == "torch":
            return self.head(torch.add(x, y))
        if self.how == "method":
            return self.head(x.add(y))
        if self.how == "alpha":
            return self.head(torch.add(x, y, alpha=2.0))
        if self.how == "in place":
            y = y * 1.0  # autograd keeps the sigmoid's own result
            y += x
            return self.head(y)
        return self.head(x + y)


@pytest.mark.parametrize("how", ["operator", "torch", "method", "in place"])
def test_residual_connections_drop_the_cross_terms_and_nothing_else(how: str):
    model = randomise(Residual(how))
    x, y = randn(1, 3), labels(1)
    factors = kfra_factors(model, x, Categorical(), y, layers(model))
    exact = {name: reference.kron_factors(name, model, x, Categorical(), y)[1][0] for name in layers(model)}
    assert_close(factors["inner"][0], exact["inner"], **TIGHT)  # inside the branch nothing is lost
    with torch.no_grad():
        h = model.stem(x)[0]
        a = torch.tanh(h)
        s = torch.sigmoid(model.inner(a))
        J = torch.diag(s * (1 - s)) @ model.inner.weight
        H = model.head.weight.T @ factors["head"][0] @ model.head.weight
        slope = torch.diag(1 - a**2)
    assert_close(factors["stem"][0], slope @ (H + J.T @ H @ J) @ slope, **TIGHT)
    assert_close(exact["stem"] - factors["stem"][0], slope @ (J.T @ H + H @ J) @ slope, **TIGHT)


def test_a_weighted_sum_and_a_doubled_value():
    model = randomise(Residual("alpha"))
    x, y = randn(1, 3), labels(1)
    exact = reference.kron_factors("inner", model, x, Categorical(), y)[1]
    assert_close(kfra_factors(model, x, Categorical(), y, ["inner"])["inner"], exact, **TIGHT)

    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.b(torch.tanh(x + x))

    check_exact_one_by_one(randomise(Double()), randn(2, 3), labels(2))


def test_a_layer_called_twice_adds_both_calls():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 4)
            self.alias = self.inner

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.alias(torch.tanh(self.inner(x)))))

    model = randomise(Twice())
    x, y = randn(1, 3), labels(1)
    exact = reference.kron_factors("inner", model, x, Categorical(), y)[1]
    for name in ("inner", "alias"):
        assert_close(kfra_factors(model, x, Categorical(), y, [name])[name], exact, **TIGHT)


def test_inputs_may_be_tuples_and_mappings():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor, shift: Tensor, factor: float = 2.0) -> Tensor:
            return self.b(torch.tanh(self.a(x)) + factor * shift)

    model = randomise(Two())
    x, shift, y = randn(6, 3), randn(6, 5, seed=1), labels(6)
    as_tuple = kfra_factors(model, (x, shift), Categorical(), y, ["a"])["a"]
    as_mapping = kfra_factors(model, {"shift": shift, "x": x}, Categorical(), y, ["a"])["a"]
    assert_close(as_tuple, as_mapping)
    one = kfra_factors(model, (x[:1], shift[:1]), Categorical(), y[:1], ["a"])["a"]
    assert_close(one, reference.kron_factors("a", model, (x[:1], shift[:1]), Categorical(), y[:1])[1], **TIGHT)
    with pytest.raises(InputError, match="'shift' is missing"):
        kfra_factors(model, x, Categorical(), y, ["a"])


def test_only_what_is_needed_is_built():
    model = randomise(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(300, 5), nn.Tanh(), nn.Linear(5, 4)))
    x, y = randn(2, 2, 12, 12), labels(2)
    assert set(kfra_factors(model, x, Categorical(), y, ["2", "4"], max_features=5)) == {"2", "4"}
    with pytest.raises(UnsupportedError, match=r"Flatten '1' has 300 features.*At most 299"):
        kfra_factors(model, x, Categorical(), y, ["0"], max_features=299)


def test_the_model_is_untouched_also_after_an_error():
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(5, 4))
    model = model.double().train()
    model[3].eval()
    flags = [m.training for m in model.modules()]
    before = copy.deepcopy(model.state_dict())
    x, y = randn(6, 3), labels(6)
    inputs = x.clone()
    kfra_factors(model, inputs, Categorical(), y, ["0"])
    with pytest.raises(UnsupportedError):
        kfra_factors(model, inputs, Categorical(), y, ["0"], max_features=2)
    with pytest.raises(RuntimeError):
        kfra_factors(model, inputs[:, :2], Categorical(), y, ["0"])
    assert [m.training for m in model.modules()] == flags
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(inputs, x)


class Bad(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(5, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.how == "product":
            x = x * torch.sigmoid(x)
        if self.how == "cumsum":
            x = torch.cumsum(x, 1)
        if self.how == "branch" and x.sum() > 0:
            x = -x
        if self.how == "in place":
            x = x + torch.relu_(x)
        if self.how == "batch":
            x = x - x.transpose(0, 1).mean(1)
        if self.how == "statistics":
            x = self.norm(x)
        return (self.b(x), x) if self.how == "several" else self.b(x)


@pytest.mark.parametrize(
    "how, message",
    [
        ("product", r"no rule for function mul.*Supported: Linear, .*sums of branches.*kron"),
        ("cumsum", r"no rule for function cumsum"),
        ("branch", r"torch\.fx cannot trace Bad.*control flow"),
        ("in place", r"works in place"),
        ("batch", r"gives shape \(5,\).*6 examples in front"),
        ("statistics", r"BatchNorm1d 'norm' has no running statistics"),
        ("several", r"several values"),
    ],
)
def test_operations_without_a_rule_are_named(how: str, message: str):
    model = randomise(Bad(how))
    with pytest.raises(UnsupportedError, match=message):
        kfra_factors(model, randn(6, 3), Categorical(), labels(6), ["a"])


def test_bad_names_are_named():
    model = randomise(Bad("fine"))
    x, y = randn(6, 3), labels(6)
    with pytest.raises(InputError, match=r"'c'.*'a', 'b'"):
        kfra_factors(model, x, Categorical(), y, ["c"])
    with pytest.raises(UnsupportedError, match=r"'norm' is a BatchNorm1d"):
        kfra_factors(model, x, Categorical(), y, ["norm"])
    with pytest.raises(InputError, match="no examples"):
        kfra_factors(model, x[:0], Categorical(), y[:0], ["a"])
    model.add_module("idle", nn.Linear(2, 3))
    with pytest.raises(InputError, match="'idle' is never called"):
        kfra_factors(model, x, Categorical(), y, ["idle"])


class Counting(nn.Module):
    """Counts its forward passes; torch.fx makes one more to follow it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        self.total = self.total + 1
        return self.b(torch.relu(self.a(x)))


def test_a_trace_leaves_the_buffers_as_they_are():
    model = randomise(Counting())
    before = model.total
    kfra_factors(model, randn(6, 3), Categorical(), labels(6), ["a"])
    assert model.total is before
    assert_close(before, torch.zeros_like(before), rtol=0, atol=0)
