"""Products with the GGN, and its leading eigenpairs, against the dense reference."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from aftermap.curvature import reference
from aftermap.curvature.passes.products import GGNOperator, _ForwardModeContradicted
from aftermap.curvature.structures.low_rank import low_rank_ggn
from aftermap.errors import DataError, InputError, NumericalWarning, ShapeError
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian

TIGHT = {"rtol": 1e-10, "atol": 1e-11}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def labels(*shape: int, classes: int = 4) -> Tensor:
    return torch.randint(classes, shape, generator=generator(3))


def randomise(model: nn.Module) -> nn.Module:
    g = generator(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.6 * torch.randn(p.shape, generator=g))
    return model.double().eval()


class NoForwardMode(torch.autograd.Function):
    """tanh with neither forward mode nor vmap."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return g * (1 - y**2)


class OldTanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return NoForwardMode.apply(x)


def mlp(activation: nn.Module | None = None) -> nn.Module:
    return randomise(nn.Sequential(nn.Linear(3, 5), activation or nn.Tanh(), nn.Linear(5, 4)))


def cnn() -> nn.Module:
    features = [nn.Conv2d(2, 3, 2, stride=2), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d((1, 2))]
    return randomise(nn.Sequential(*features, nn.Flatten(), nn.Linear(12, 4)))


PROBLEMS = {
    "mlp softmax": (mlp(), randn(7, 3), labels(7), Categorical()),
    "mlp gaussian": (mlp(), randn(7, 3), randn(7, 4, seed=1), Gaussian(0.4)),
    "mlp bernoulli": (mlp(), randn(7, 3), labels(7, 4, classes=2), Bernoulli()),
    "class weights": (mlp(), randn(7, 3), labels(7), Categorical(weight=torch.tensor([1.0, 2.0, 0.5, 3.0]))),
    "positions": (mlp(), randn(7, 2, 3), labels(7, 2).index_fill(0, torch.tensor([2]), -100), Categorical()),
    "cnn": (cnn(), randn(7, 2, 5, 8), labels(7), Categorical()),
    "no forward mode": (mlp(OldTanh()), randn(7, 3), labels(7), Categorical()),
}


@pytest.mark.parametrize("kind", list(PROBLEMS))
def test_products_equal_the_dense_matrix(kind: str):
    model, x, y, likelihood = PROBLEMS[kind]
    w = torch.linspace(0.5, 2, 7, dtype=torch.float64)
    data = [(x[:4], y[:4], w[:4]), (x[4:], y[4:], w[4:])]
    operator = GGNOperator(model, data, likelihood, chunk_size=3)
    truth = reference.ggn(model, x, likelihood, y, weight=w)
    P = len(truth)
    assert operator.shape == (P, P)
    V = randn(P, 5, seed=4)
    assert_close(operator.mv(V), truth @ V, **TIGHT)
    assert_close(operator @ V[:, 2], truth @ V[:, 2], **TIGHT)
    assert_close(operator.to_dense(), truth, **TIGHT)
    assert operator.n_data == 7


def test_names_give_the_order_and_the_block():
    model, x, y, likelihood = PROBLEMS["mlp softmax"]
    names = ["2.bias", "0.weight"]
    operator = GGNOperator(model, [(x, y)], likelihood, names)
    assert operator.names == names
    assert_close(operator.to_dense(), reference.ggn(model, x, likelihood, y, names), **TIGHT)


def test_a_parameter_that_is_not_used_has_zero_curvature_in_both_modes():
    for activation in (nn.Tanh(), OldTanh()):
        model = mlp(activation)
        model.register_parameter("idle", nn.Parameter(torch.ones(2).double()))
        x, y = randn(5, 3), labels(5)
        G = GGNOperator(model, [(x, y)], Categorical(), ["idle", "0.bias"]).to_dense()
        assert_close(G[:2], torch.zeros(2, 7).double())
        assert_close(G[2:, 2:], reference.ggn(model, x, Categorical(), y, ["0.bias"]), **TIGHT)


def test_the_split_into_batches_does_not_matter():
    model, x, y, likelihood = PROBLEMS["mlp softmax"]
    v = randn(44, seed=2)
    whole = GGNOperator(model, [(x, y)], likelihood).mv(v)
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    assert_close(GGNOperator(model, loader, likelihood).mv(v), whole, **TIGHT)
    renamed = [{"image": x[i : i + 2], "answer": y[i : i + 2]} for i in range(0, 7, 2)]
    operator = GGNOperator(model, renamed, likelihood, unpack=lambda b: (b["image"], b["answer"]))
    assert_close(operator.mv(v), whole, **TIGHT)
    assert operator.n_data == 7


def test_float64_vectors_with_a_float32_network():
    model, x, y, likelihood = PROBLEMS["mlp softmax"]
    small = copy.deepcopy(model).float()
    operator = GGNOperator(small, [(x.float(), y)], likelihood)
    v = randn(44)
    product = operator.mv(v)
    assert product.dtype == torch.float64
    assert_close(product, reference.ggn(model, x, likelihood, y) @ v, rtol=1e-4, atol=1e-4)
    U, eigenvalues = low_rank_ggn(operator, 30, generator=generator())
    assert U.dtype == torch.float64
    assert len(eigenvalues) <= 21  # seven data with three columns each
    assert bool((eigenvalues > 0).all())


def test_attention_has_products_too():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(6, 2, batch_first=True)
            self.head = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x, x, x, need_weights=False)[0].mean(1))

    model = randomise(Attention())
    x, y = randn(3, 5, 6), labels(3)
    names = ["inner.out_proj.bias", "inner.in_proj_bias", "head.weight"]
    operator = GGNOperator(model, [(x, y)], Categorical(), names)
    assert_close(operator.to_dense(), reference.ggn(model, x, Categorical(), y, names), **TIGHT)


@pytest.mark.parametrize("kind", ["mlp softmax", "cnn", "no forward mode"])
def test_the_model_is_untouched_also_after_an_error(kind: str):
    model, x, y, likelihood = PROBLEMS[kind]
    model = copy.deepcopy(model).train()
    model[1].eval()
    flags = [m.training for m in model.modules()]
    before = copy.deepcopy(model.state_dict())
    GGNOperator(model, [(x, y)], likelihood).mv(randn(sum(p.numel() for p in model.parameters())))
    bad = GGNOperator(model, [(x, y), (x[:, :1], y)], likelihood)
    with pytest.raises(RuntimeError):
        bad.mv(randn(bad.size))
    assert [m.training for m in model.modules()] == flags
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", ["mlp softmax", "mlp gaussian", "cnn"])
def test_leading_eigenpairs(kind: str):
    model, x, y, likelihood = PROBLEMS[kind]
    truth = reference.ggn(model, x, likelihood, y)
    values, vectors = torch.linalg.eigh(truth)
    values, vectors = values.flip(0), vectors.flip(1)
    operator = GGNOperator(model, [(x[:3], y[:3]), (x[3:], y[3:])], likelihood)
    rank = 6
    U, eigenvalues = low_rank_ggn(operator, rank, generator=generator())
    assert_close(eigenvalues, values[:rank], rtol=1e-6, atol=0)
    assert_close(U.T @ U, torch.eye(rank).double(), atol=1e-9, rtol=0)
    projector = vectors[:, :rank] @ vectors[:, :rank].T
    if float(values[rank - 1] / values[rank]) > 1.05:
        assert_close(U @ U.T, projector, atol=1e-4, rtol=0)
    rest = truth - U @ torch.diag(eigenvalues) @ U.T  # Loewner order: truncation only takes away
    assert float(torch.linalg.eigvalsh(rest).min()) > -1e-6 * float(values[0])


def test_a_rank_above_the_true_one_returns_the_whole_matrix():
    model, x, y, likelihood = PROBLEMS["mlp softmax"]
    x, y = x[:4], y[:4]
    truth = reference.ggn(model, x, likelihood, y)
    U, eigenvalues = low_rank_ggn(GGNOperator(model, [(x, y)], likelihood), 40, generator=generator())
    assert len(eigenvalues) == 12  # four data, three columns each
    assert_close(U @ torch.diag(eigenvalues) @ U.T, truth, atol=1e-9, rtol=0)
    assert bool((eigenvalues > 0).all())


def test_repeated_eigenvalues_of_a_linear_regression():
    model = randomise(nn.Linear(5, 3, bias=False))
    x, y = randn(8, 5), randn(8, 3, seed=1)
    U, eigenvalues = low_rank_ggn(GGNOperator(model, [(x, y)], Gaussian()), 7, generator=generator())
    assert U.shape == (15, 7)
    once = torch.linalg.eigvalsh(x.T @ x).flip(0)
    assert_close(eigenvalues, once.repeat_interleave(3)[:7], rtol=1e-8, atol=0)


def test_zero_curvature_gives_no_pairs():
    model, x, y, likelihood = PROBLEMS["mlp softmax"]
    data = [(x, y, torch.zeros(7).double())]
    U, eigenvalues = low_rank_ggn(GGNOperator(model, data, likelihood), 3, generator=generator())
    assert U.shape == (44, 0)
    assert eigenvalues.shape == (0,)


@pytest.mark.parametrize(("length", "steep"), [(1.0, 1.0), (100.0, 1.0), (0.01, 0.01)])
def test_a_product_that_vanishes_is_judged_by_the_rounding_of_the_steepest_one(length: float, steep: float) -> None:
    """Where G v = 0 its energy is rounding of |G| |v|², however long v is; any more contradicts the forward mode."""
    operator = GGNOperator(nn.Linear(3, 1, bias=False), [(torch.ones(1, 3), torch.zeros(1, 1))], Gaussian(1.0))
    columns = torch.zeros(3, 2)
    columns[0, 0], columns[1, 1] = steep, length
    products = torch.tensor([[steep, 0.0], [0.0, 0.0], [0.0, 0.0]])  # G has the eigenvalues 1 and 0.
    unit = 64 * torch.finfo(torch.float32).eps * length**2
    operator._check_transposed(columns, products, torch.tensor([steep**2, 0.9 * unit]))
    with pytest.raises(_ForwardModeContradicted):
        operator._check_transposed(columns, products, torch.tensor([steep**2, 1.1 * unit]))


def test_bad_input_is_named():
    model, x, y, likelihood = PROBLEMS["mlp softmax"]
    operator = GGNOperator(model, [(x, y)], likelihood)
    with pytest.raises(ShapeError, match=r"\(43,\).*\[44\]"):
        operator.mv(torch.zeros(43))
    with pytest.raises(InputError, match=r"0\.wait"):
        GGNOperator(model, [(x, y)], likelihood, ["0.wait"])
    with pytest.raises(InputError, match=r"0\.bias.*each once"):
        GGNOperator(model, [(x, y)], likelihood, ["0.bias", "0.bias"])
    with pytest.raises(InputError, match="chunk_size=0"):
        GGNOperator(model, [(x, y)], likelihood, chunk_size=0)
    with pytest.raises(InputError, match="rank=45"):
        low_rank_ggn(operator, 45)
    with pytest.raises(DataError, match="empty"):
        low_rank_ggn(GGNOperator(model, [], likelihood), 2)
    once = GGNOperator(model, iter([(x, y)]), likelihood)
    assert once.n_data == 7
    with pytest.raises(DataError, match="empty"):
        once.mv(torch.zeros(44))
    shrinking = [(x, y)]
    shrinks = GGNOperator(model, shrinking, likelihood)
    assert shrinks.n_data == 7
    shrinking[0] = (x[:5], y[:5])
    with pytest.raises(DataError, match="gave 5 examples, an earlier one 7"):
        shrinks.mv(randn(44))
    with pytest.warns(NumericalWarning, match=r"after 13 products.*Lower the rank"):
        low_rank_ggn(operator, 9, tolerance=1e-14, max_matvecs=13, generator=generator())
