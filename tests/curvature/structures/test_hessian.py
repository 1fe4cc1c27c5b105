"""The streamed Hessian against the reference, and against the GGN where they must and must not agree."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.curvature import reference
from aftermap.curvature.structures.hessian import full_hessian
from aftermap.errors import DataError, InputError, NumericalError, NumericalWarning
from aftermap.likelihoods import Categorical, Gaussian

TIGHT = {"rtol": 1e-10, "atol": 1e-11}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def labels(*shape: int) -> Tensor:
    return torch.randint(4, shape, generator=generator(3))


def mlp(activation: nn.Module) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 5), activation, nn.Linear(5, 6), copy.deepcopy(activation), nn.Linear(6, 4))
    g = generator(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.6 * torch.randn(p.shape, generator=g))
    return model.double().eval()


class Square(torch.autograd.Function):
    """x^2 without a batching rule."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**2

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return ScaledTwice.apply(g, ctx.saved_tensors[0])


class ScaledTwice(torch.autograd.Function):
    @staticmethod
    def forward(g: Tensor, x: Tensor) -> Tensor:
        return 2 * g * x

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, h: Tensor) -> tuple[Tensor, Tensor]:
        g, x = ctx.saved_tensors
        if float(h.detach().abs().max()) == 0.0:  # a decision that depends on the values cannot be batched
            return torch.zeros_like(x), torch.zeros_like(x)
        return 2 * h * x, 2 * h * g


class SquareActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(0.5 * x)  # logits of a few units: saturated ones would leave only cancellation


@pytest.mark.filterwarnings("ignore::aftermap.errors.NumericalWarning")
@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(inplace=True), SquareActivation()])
@pytest.mark.parametrize("task", ["classes", "regression"])
def test_equals_the_reference_for_any_split_and_chunk(activation: nn.Module, task: str):
    model, x = mlp(activation), randn(5, 3)
    y = labels(5) if task == "classes" else randn(5, 4, seed=2)
    likelihood = Categorical() if task == "classes" else Gaussian(0.5)
    w = torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0], dtype=torch.float64)
    truth = reference.hessian(model, x, likelihood, y, weight=w)
    result = full_hessian(model, [(x, y, w)], likelihood)
    assert_close(result.matrix, truth, **TIGHT)
    assert result.n_data == 5
    split = [(x[:2], y[:2], w[:2]), (x[2:], y[2:], w[2:])]
    assert_close(full_hessian(model, split, likelihood, chunk_size=7).matrix, truth, **TIGHT)
    eigenvalues = torch.linalg.eigvalsh(truth)
    assert_close(result.min_eigenvalue, float(eigenvalues[0]), rtol=1e-8, atol=1e-9)
    assert_close(result.max_eigenvalue, float(eigenvalues[-1]), rtol=1e-8, atol=1e-9)
    assert result.indefinite == (float(eigenvalues[0]) < -1e-9)
    names = ["4.bias", "0.weight"]
    block = full_hessian(model, [(x, y, w)], likelihood, names).matrix
    assert_close(block, reference.hessian(model, x, likelihood, y, names, weight=w), **TIGHT)


def test_relu_blocks_equal_the_ggn_but_the_full_matrix_does_not():
    model, x, y = mlp(nn.ReLU()), randn(9, 3), labels(9)
    with pytest.warns(NumericalWarning, match=r"smallest eigenvalue is -.*use the GGN"):
        H = full_hessian(model, [(x, y)], Categorical())
    G = reference.ggn(model, x, Categorical(), y)
    assert H.indefinite
    start = 0
    for layer in (model[0], model[2], model[4]):
        stop = start + layer.weight.numel() + layer.bias.numel()
        assert_close(H.matrix[start:stop, start:stop], G[start:stop, start:stop], **TIGHT)
        start = stop
    assert float((H.matrix - G).abs().max()) > 0.1


def test_a_linear_model_is_definite_and_silent():
    model = nn.Linear(3, 2).double()
    x, y = randn(6, 3), randn(6, 2, seed=1)
    result = full_hessian(model, [(x, y)], Gaussian(0.3))
    assert not result.indefinite
    assert_close(result.matrix, reference.ggn(model, x, Gaussian(0.3), y), **TIGHT)


def test_a_float32_network_gives_a_float64_matrix():
    model, x, y = mlp(nn.Tanh()).float(), randn(5, 3), labels(5)
    with pytest.warns(NumericalWarning):
        result = full_hessian(model, [(x.float(), y)], Categorical())
    assert result.matrix.dtype == torch.float64
    truth = reference.hessian(copy.deepcopy(model).double(), x, Categorical(), y)
    assert_close(result.matrix, truth, rtol=1e-3, atol=1e-4)


def test_parameters_that_are_not_used_have_no_curvature():
    model, x, y = mlp(nn.Tanh()), randn(5, 3), labels(5)
    model.register_parameter("idle", nn.Parameter(torch.ones(2).double()))
    result = full_hessian(model, [(x, y)], Categorical(), ["idle", "4.bias"])
    assert_close(result.matrix[:2], torch.zeros(2, 6).double())
    assert_close(result.matrix[2:, 2:], reference.hessian(model, x, Categorical(), y, ["4.bias"]), **TIGHT)
    assert_close(full_hessian(model, [(x, y)], Categorical(), ["idle"]).matrix, torch.zeros(2, 2).double())


@pytest.mark.filterwarnings("ignore::aftermap.errors.NumericalWarning")
def test_the_model_is_untouched_also_after_an_error():
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 4)).double().train()
    model[2].eval()
    flags = [m.training for m in model.modules()]
    before = copy.deepcopy(model.state_dict())
    x, y = randn(6, 3), labels(6)
    full_hessian(model, [(x, y)], Categorical())
    with pytest.raises(RuntimeError):
        full_hessian(model, [(x, y), (x[:, :2], y)], Categorical())
    assert [m.training for m in model.modules()] == flags
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_bad_input_is_named():
    model, x, y = mlp(nn.Tanh()), randn(5, 3), labels(5)
    with pytest.raises(InputError, match=r"of 40,200 parameters.*12\.0 GiB.*20,000"):
        full_hessian(nn.Linear(200, 200), [(x, y)], Categorical())
    with pytest.raises(InputError, match=r"0\.wait"):
        full_hessian(model, [(x, y)], Categorical(), ["0.wait"])
    with pytest.raises(InputError, match="chunk_size=0"):
        full_hessian(model, [(x, y)], Categorical(), chunk_size=0)
    with pytest.raises(DataError, match="empty"):
        full_hessian(model, [], Categorical())
    with torch.no_grad():
        model[4].weight[0, 0] = float("inf")
    with pytest.raises((NumericalError, DataError), match="finite"):
        full_hessian(model, [(x, y)], Categorical())


def test_a_double_backward_that_is_wrong_is_refused():
    """PyTorch's second derivative of weight normalisation is not symmetric: no Hessian can be made of it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
        net = nn.Sequential(first, nn.Tanh(), nn.Linear(3, 2)).double()
    x, y = randn(6, 2), torch.randint(0, 2, (6,), generator=generator())
    with pytest.raises(NumericalError, match=r"not symmetric.*original.*double backward.*structure='full'"):
        full_hessian(net, [(x, y)], Categorical())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rounding_alone_is_no_asymmetry(dtype: torch.dtype):
    net = mlp(nn.Tanh()).to(dtype)
    x = randn(500, 3).to(dtype)
    with pytest.warns(NumericalWarning, match="indefinite"):
        matrix = full_hessian(net, [(x, labels(500))], Categorical()).matrix
    assert torch.equal(matrix, matrix.T)
