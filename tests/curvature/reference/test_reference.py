"""The slow truth against hand formulas, autograd.functional, finite differences and the recursion."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.curvature import reference
from aftermap.errors import InputError, ShapeError, UnsupportedError
from aftermap.likelihoods import Categorical, Gaussian

LAYER_TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def randomise(model: nn.Module, seed: int = 7) -> nn.Module:
    g = generator(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.6 * torch.randn(p.shape, generator=g, dtype=torch.float64))
    return model.double().eval()


def mlp(activation: nn.Module) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 5), activation, nn.Linear(5, 6), copy.deepcopy(activation), nn.Linear(6, 4))
    randomise(model)
    return model


def labels(*shape: int, classes: int = 4) -> Tensor:
    return torch.randint(classes, shape, generator=generator(3))


def interleave(out: int, features: int) -> Tensor:
    """Where the entries of weight and bias, flattened one after the other, sit in vec([weight, bias])."""
    weight = [o * (features + 1) + i for o in range(out) for i in range(features)]
    return torch.tensor(weight + [o * (features + 1) + features for o in range(out)])


def summed_loss(model: nn.Module, x: Tensor, y: Tensor, likelihood: object, shapes: dict[str, torch.Size]):
    def loss(flat: Tensor) -> Tensor:
        pieces = flat.split([s.numel() for s in shapes.values()])
        params = {k: v.reshape(s) for (k, s), v in zip(shapes.items(), pieces, strict=True)}
        return likelihood.nll(torch.func.functional_call(model, params, (x,)), y).sum()

    return loss


def flat_problem(model: nn.Module, x: Tensor, y: Tensor, likelihood: object):
    params = dict(model.named_parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in params.values()])
    return flat, summed_loss(model, x, y, likelihood, {k: p.shape for k, p in params.items()})


def test_jacobian_of_a_linear_model_is_the_input():
    model = randomise(nn.Linear(3, 2))
    x = randn(5, 3)
    J = reference.jacobian(model, x)
    assert J.shape == (5, 2, 8)
    for n in range(5):
        expected = torch.cat([torch.kron(torch.eye(2, dtype=torch.float64), x[n : n + 1]), torch.eye(2).double()], 1)
        assert_close(J[n], expected)


def test_jacobian_against_finite_differences_and_for_every_kind_of_input():
    model = mlp(nn.Tanh())
    x = randn(4, 3)
    J = reference.jacobian(model, x, ["2.bias", "0.weight"])
    assert J.shape == (4, 4, 6 + 15)
    step = 1e-6
    with torch.no_grad():
        p = model.get_parameter("0.weight")
        p[1, 2] += step
        above = model(x)
        p[1, 2] -= 2 * step
        below = model(x)
        p[1, 2] += step
    assert_close(J[:, :, 6 + 1 * 3 + 2], (above - below) / (2 * step), rtol=1e-7, atol=1e-9)

    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return self.net(x + shift)

    names = ["net.2.bias", "net.0.weight"]
    both = TwoInputs().eval()
    half = x / 2
    assert_close(reference.jacobian(both, (half, half), names), J)
    assert_close(reference.jacobian(both, {"shift": half, "x": half}, names), J)


def test_jacobian_with_positions_runs_over_positions_then_outputs():
    model = randomise(nn.Linear(3, 2, bias=False))
    x = randn(4, 5, 3)
    J = reference.jacobian(model, x)
    assert J.shape == (4, 10, 6)
    assert_close(J[1, 2 * 2 + 1], torch.cat([torch.zeros(3).double(), x[1, 2]]))


def test_ggn_of_linear_regression_is_closed_form():
    model = randomise(nn.Linear(3, 2, bias=False))
    x, y = randn(7, 3), randn(7, 2, seed=1)
    w = torch.tensor([1.0, 2.0, 0.5, 0.0, 1.0, 3.0, 1.0], dtype=torch.float64)
    expected = torch.kron(torch.eye(2).double(), x.T @ (w[:, None] * x)) / 0.3**2
    likelihood = Gaussian(0.3)
    assert_close(reference.ggn(model, x, likelihood, y, weight=w), expected)
    assert_close(reference.hessian(model, x, likelihood, y, weight=w), expected)
    diagonal = reference.diagonal_ggn(model, x, likelihood, y, weight=w)
    assert_close(diagonal["weight"].reshape(-1), expected.diagonal())


def test_ggn_of_a_softmax_model_equals_its_hessian_when_linear():
    model = randomise(nn.Linear(3, 4))
    x, y = randn(6, 3), labels(6)
    G = reference.ggn(model, x, Categorical(), y)
    assert_close(G, reference.hessian(model, x, Categorical(), y), **LAYER_TOLERANCE)
    assert float(torch.linalg.eigvalsh(G).min()) > -1e-12


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.GELU()], ids=["tanh", "gelu"])
@pytest.mark.parametrize("task", ["classes", "regression"])
def test_hessian_equals_autograd_functional(activation: nn.Module, task: str):
    model, x = mlp(activation), randn(5, 3)
    y = labels(5) if task == "classes" else randn(5, 4, seed=2)
    likelihood = Categorical() if task == "classes" else Gaussian(0.5)
    flat, loss = flat_problem(model, x, y, likelihood)
    H = reference.hessian(model, x, likelihood, y)
    assert_close(H, torch.autograd.functional.hessian(loss, flat), **LAYER_TOLERANCE)
    assert_close(H, H.T, **LAYER_TOLERANCE)


def test_per_example_gradients_sum_to_the_gradient_and_square_per_example():
    model, x, y = mlp(nn.Tanh()), randn(5, 3), labels(5)
    flat, loss = flat_problem(model, x, y, Categorical())
    gradients = reference.per_example_gradients(model, x, Categorical(), y)
    g = torch.cat([v.reshape(5, -1) for v in gradients.values()], dim=1)
    assert_close(g.sum(0), torch.func.grad(loss)(flat))
    step = 1e-6
    i = 17
    unit = torch.zeros_like(flat).index_fill_(0, torch.tensor([i]), step)
    assert_close(g[:, i].sum(), (loss(flat + unit) - loss(flat - unit)) / (2 * step), rtol=1e-6, atol=1e-8)
    w = torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0], dtype=torch.float64)
    F = reference.empirical_fisher(model, x, Categorical(), y, weight=w)
    assert_close(F, g.T @ torch.diag(w) @ g)
    squares = reference.sum_squared_gradients(model, x, Categorical(), y, weight=w)
    assert_close(torch.cat([v.reshape(-1) for v in squares.values()]), F.diagonal())
    weighted = reference.per_example_gradients(model, x, Categorical(), y, weight=w)
    assert_close(weighted["0.bias"], w[:, None] * gradients["0.bias"])


def test_a_weight_of_two_is_a_datum_seen_twice():
    model, x, y = mlp(nn.Tanh()), randn(3, 3), labels(3)
    w = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)
    twice = torch.tensor([0, 1, 1, 2])
    for function in (reference.ggn, reference.hessian, reference.empirical_fisher):
        assert_close(function(model, x, Categorical(), y, weight=w), function(model, x[twice], Categorical(), y[twice]))
    weighted = reference.kron_factors("2", model, x, Categorical(), y, weight=w)
    assert_close(weighted, reference.kron_factors("2", model, x[twice], Categorical(), y[twice]))


def test_ggn_with_positions_adds_positions_and_skips_ignored_ones():
    model, x, y = mlp(nn.Tanh()), randn(3, 2, 3), labels(3, 2)
    total = reference.ggn(model, x, Categorical(), y)
    apart = sum(reference.ggn(model, x[:, r], Categorical(), y[:, r]) for r in range(2))
    assert_close(total, apart)
    y[1, 0] = -100
    keep = torch.tensor([True, True, False, True, True, True])
    kept = reference.ggn(model, x.reshape(6, 3)[keep], Categorical(), y.reshape(6)[keep])
    assert_close(reference.ggn(model, x, Categorical(), y), kept)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), nn.SiLU()], ids=["tanh", "relu", "silu"])
def test_recursion_gives_the_hessian_blocks_of_every_layer(activation: nn.Module):
    model, x, y = mlp(activation), randn(3, 3), labels(3)
    exact = reference.hessian_recursion(model, x, Categorical(), y)
    gauss_newton = reference.hessian_recursion(model, x, Categorical(), y, gauss_newton=True)
    assert set(exact) == {"0", "2", "4"}
    for n in range(3):
        one = (x[n : n + 1], Categorical(), y[n : n + 1])
        for name in exact:
            layer = model.get_submodule(name)
            A, B, rows = reference.kron_factors(name, model, *one)
            order = interleave(layer.out_features, layer.in_features)
            names = [f"{name}.weight", f"{name}.bias"]
            block = torch.kron(exact[name][n], A[0])[order][:, order]
            assert_close(block, reference.hessian(model, *one, names), **LAYER_TOLERANCE)
            assert_close(gauss_newton[name][n], B[0], **LAYER_TOLERANCE)
            assert rows == 1.0
            block = torch.kron(B[0], A[0])[order][:, order]
            assert_close(block, reference.ggn(model, *one, names), **LAYER_TOLERANCE)


def test_kron_is_exact_for_a_deep_linear_network_with_squared_loss():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2))
    randomise(model)
    x, y = randn(6, 3), randn(6, 2, seed=1)
    A, B, rows = reference.kron_factors("1", model, x, Gaussian(0.4), y)
    order = interleave(4, 5)
    G = reference.ggn(model, x, Gaussian(0.4), y, ["1.weight", "1.bias"])
    assert_close((torch.kron(B[0], A[0]) / rows)[order][:, order], G, **LAYER_TOLERANCE)
    assert rows == 6.0


CONVOLUTIONS = {
    "1d": (nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2), (9,)),
    "2d": (
        nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2, bias=False),
        (5, 7),
    ),
    "2d same": (nn.Conv2d(4, 6, (3, 2), padding="same", padding_mode="reflect"), (5, 6)),
    "2d circular": (nn.Conv2d(4, 6, (3, 2), padding=(2, 1), padding_mode="circular", groups=2), (5, 6)),
    "3d": (nn.Conv3d(4, 6, (2, 1, 3), padding=(1, 0, 2), padding_mode="replicate"), (3, 2, 4)),
    "valid": (nn.Conv1d(4, 6, 3, padding="valid", groups=2), (7,)),
}


@pytest.mark.parametrize("kind", list(CONVOLUTIONS))
def test_unfolded_input_times_weight_is_the_convolution(kind: str):
    layer, space = CONVOLUTIONS[kind]
    layer = randomise(copy.deepcopy(layer))
    x = randn(1, 4, *space)
    a = reference.unfold_input(layer, x)
    W = layer.weight.reshape(layer.groups, 6 // layer.groups, -1)
    if layer.bias is not None:
        W = torch.cat([W, layer.bias.reshape(layer.groups, -1, 1)], dim=-1)
    expected = layer(x)
    assert_close((W @ a.mT).reshape(expected.shape), expected)


@pytest.mark.parametrize("approach", ["expand", "reduce"])
def test_grouped_convolution_factors_have_the_right_scale(approach: str):
    conv = nn.Conv2d(4, 6, (2, 3), groups=2)
    model = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    randomise(model)
    x, y = randn(3, 4, 4, 5), randn(3, 5, seed=1)
    A, B, rows = reference.kron_factors("0", model, x, Gaussian(), y, approach=approach)
    assert A.shape == (2, 13, 13)
    assert B.shape == (2, 3, 3)
    assert rows == (27.0 if approach == "expand" else 243.0)
    G = reference.ggn(model, x, Gaussian(), y, ["0.weight"])
    per_group = 3 * 12
    for g in range(2):
        keep = torch.tensor([o * 13 + i for o in range(3) for i in range(12)])
        block = (torch.kron(B[g], A[g]) / rows)[keep][:, keep]
        exact = G[g * per_group : (g + 1) * per_group, g * per_group : (g + 1) * per_group]
        if approach == "reduce":  # exact: a linear network that ends in mean pooling
            assert_close(block, exact, **LAYER_TOLERANCE)
        else:
            assert float((block - exact).norm()) > 0.1 * float(exact.norm())


def test_a_layer_called_twice_counts_its_calls_as_positions():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.alias = self.inner
            self.head = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu_(self.alias(torch.tanh(self.inner(x)))))

    model = randomise(Twice())
    x, y = randn(5, 3), labels(5)
    A, B, rows = reference.kron_factors("inner", model, x, Categorical(), y)
    first = model.inner(x)
    second = torch.tanh(first)
    assert rows == 10.0
    ones = torch.ones(5, 1).double()
    a = torch.cat([torch.cat([x, ones], 1), torch.cat([second, ones], 1)]).detach()
    assert_close(A[0], a.T @ a)
    assert B.shape == (1, 3, 3)


def test_linearised_covariance_is_the_product():
    J, root = randn(3, 2, 5), randn(5, 5, seed=1)
    V = reference.linearised_covariance(J, root @ root.T)
    assert_close(V[2], (J[2] @ root) @ (J[2] @ root).T)


def test_the_model_is_untouched():
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 4))
    randomise(model)
    before = copy.deepcopy(model.state_dict())
    x, y = randn(3, 3), labels(3)
    reference.ggn(model, x, Categorical(), y)
    reference.hessian(model, x, Categorical(), y)
    reference.kron_factors("0", model, x, Categorical(), y)
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m.training or m._forward_hooks for m in model.modules())
    assert type(model[0]) is nn.Linear


def test_bad_input_is_named():
    model, x, y = mlp(nn.Tanh()), randn(3, 3), labels(3)
    with pytest.raises(InputError, match=r"0\.wait.*0\.weight"):
        reference.jacobian(model, x, ["0.wait"])
    with pytest.raises(ShapeError, match=r"\(2,\).*\(3,\)"):
        reference.ggn(model, x, Categorical(), y, weight=torch.ones(2))
    with pytest.raises(InputError, match=r"'shrink'.*expand, reduce"):
        reference.kron_factors("0", model, x, Categorical(), y, approach="shrink")
    with pytest.raises(UnsupportedError, match=r"'1' is a Tanh.*Linear"):
        reference.kron_factors("1", model, x, Categorical(), y)
    with pytest.raises(InputError, match=r"'7'"):
        reference.kron_factors("7", model, x, Categorical(), y)
    with pytest.raises(InputError, match="without a tensor"):
        reference.jacobian(model, ("a", "b"))
    with pytest.raises(UnsupportedError, match="not elementwise"):
        reference.hessian_recursion(nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1)).double(), x, Categorical(), y)
    with pytest.raises(InputError, match="no examples"):
        reference.hessian(model, x[:0], Categorical(), y[:0])
