"""Where Kronecker factors are provably exact, and against factors by explicit loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aftermap.curvature import Factors, fit_curvature, reference
from aftermap.curvature.rules.base import InputRows
from aftermap.curvature.rules.linear import DenseRows, LinearRule
from aftermap.curvature.structures.kron import KronBlock
from aftermap.errors import InputError, UnsupportedError
from aftermap.likelihoods import Categorical, Gaussian, Likelihood
from tests.curvature.layer_cases import normal

CATEGORICAL = Categorical()


def fit(model: nn.Module, data: Any, likelihood: Likelihood, structure: str = "kron", **options: Any) -> Factors:
    options = {"curvature": "exact", "progress": False, **options}
    return fit_curvature(model, data, likelihood, structure=structure, **options)


def double(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers).double().eval()


def labels(n: int, classes: int) -> Tensor:
    return torch.randint(classes, (n,), generator=torch.Generator().manual_seed(4))


def block_mask(factors: Factors) -> Tensor:
    """True where two parameters belong to one block."""
    owner = {n: k for k, b in enumerate(factors.blocks) for n in b.shapes}
    group = torch.cat([torch.full((torch.Size(s).numel(),), owner[n]) for n, s in factors.shapes.items()])
    return group[:, None] == group


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def mlp() -> nn.Sequential:
    return double(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
@pytest.mark.parametrize("approach", ["expand", "reduce"])
def test_one_datum_is_exact(structure: str, approach: str) -> None:
    model, x, y = mlp(), normal(1, 4), labels(1, 3)
    found = fit(model, [(x, y)], CATEGORICAL, structure, approach=approach)
    truth = reference.ggn(model, x, CATEGORICAL, y) * block_mask(found)
    if structure == "kron":
        torch.testing.assert_close(found.to_dense(), truth, rtol=1e-10, atol=1e-13)
    else:  # the corrected values are those of the exact block, which B ⊗ A already diagonalises
        torch.testing.assert_close(found.to_dense(), truth, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
@pytest.mark.parametrize("noise", [1.0, 0.3])
def test_deep_linear_network_with_squared_loss_is_exact(structure: str, noise: float) -> None:
    model = double(nn.Linear(4, 5), nn.Linear(5, 6, bias=False), nn.Linear(6, 3))
    x, y, likelihood = normal(7, 4), normal(7, 3, seed=1), Gaussian(noise=noise)
    found = fit(model, [(x, y)], likelihood, structure)
    truth = reference.ggn(model, x, likelihood, y) * block_mask(found)
    torch.testing.assert_close(found.to_dense(), truth, rtol=1e-9, atol=1e-10)


def test_reduce_with_mean_pooling_is_exact_and_expand_is_not() -> None:
    model = double(nn.Conv2d(2, 4, 2, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    x, y, likelihood = normal(5, 2, 3, 4), normal(5, 3, seed=1), Gaussian()
    reduce = fit(model, [(x, y)], likelihood, approach="reduce")
    truth = reference.ggn(model, x, likelihood, y) * block_mask(reduce)
    torch.testing.assert_close(reduce.to_dense(), truth, rtol=1e-10, atol=1e-12)
    expand = fit(model, [(x, y)], likelihood, approach="expand").to_dense()
    assert float((expand - truth).norm() / truth.norm()) > 0.05


def test_reduce_for_tokens_with_mean_pooling_is_exact() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)).mean(1)

    model, x, y = Pooled().double(), normal(6, 2, 4), normal(6, 3, seed=1)
    found = fit(model, [(x, y)], Gaussian(), approach="reduce")
    truth = reference.ggn(model, x, Gaussian(), y) * block_mask(found)
    torch.testing.assert_close(found.to_dense(), truth, rtol=1e-10, atol=1e-12)


class TwoCalls(nn.Module):
    """A grouped convolution called twice, tokens, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.token, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(torch.tanh(self.conv(x))))
        return self.head(torch.relu(self.token(h.flatten(2))).mean(1))


def shared() -> tuple[nn.Module, Tensor, Tensor]:
    return TwoCalls().double(), normal(5, 4, 2, 3), labels(5, 3)


def test_ekfac_keeps_the_trace_and_is_closer_than_kfac() -> None:
    for model, x, y in (shared(), (mlp(), normal(7, 4), labels(7, 3))):
        kron, ekfac = (fit(model, [(x, y)], CATEGORICAL, s) for s in ("kron", "ekfac"))
        truth = reference.ggn(model, x, CATEGORICAL, y) * block_mask(kron)
        torch.testing.assert_close(ekfac.trace(), float(truth.trace()), rtol=1e-11, atol=0)
        for block in kron.blocks:
            names = list(block.shapes)
            exact = reference.ggn(model, x, CATEGORICAL, y, names)
            corrected = next(b for b in ekfac.blocks if b.name == block.name)
            error_ekfac = float((corrected.to_dense() - exact).norm())
            error_kron = float((block.to_dense() - exact).norm())
            assert error_ekfac <= error_kron * (1 + 1e-9)
            torch.testing.assert_close(corrected.trace(), float(exact.trace()), rtol=1e-11, atol=0)


LAYERS: dict[str, tuple[str, Any, tuple[int, ...]]] = {
    "linear": ("2", lambda: mlp(), (6, 4)),
    "tokens": ("1", lambda: double(nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(10, 3)), (6, 2, 4)),
    "conv1d": ("0", lambda: double(nn.Conv1d(2, 3, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3)), (4, 2, 7)),
    "conv2d": (
        "0",
        lambda: double(
            nn.Conv2d(2, 4, (2, 3), padding=1, groups=2, dilation=(1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)
        ),
        (4, 2, 3, 4),
    ),
    "conv3d": (
        "0",
        lambda: double(nn.Conv3d(2, 3, 2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)),
        (3, 2, 2, 2, 3),
    ),
}


@pytest.mark.parametrize("approach", ["expand", "reduce"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_factors_equal_explicit_loops(name: str, approach: str, weighted: bool) -> None:
    where, make, shape = LAYERS[name]
    model, x, y = make(), normal(*shape), labels(shape[0], 3)
    weight = normal(shape[0], seed=6).abs() if weighted else None
    A, B, rows = reference.kron_factors(where, model, x, CATEGORICAL, y, weight=weight, approach=approach)
    data = [(x, y)] if weight is None else [(x, y, weight)]
    block = next(b for b in fit(model, data, CATEGORICAL, approach=approach).blocks if b.name == where)
    assert isinstance(block, KronBlock)
    torch.testing.assert_close(block.inputs, A, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(block.outputs, B, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(block.rows, torch.full_like(block.rows, rows), rtol=1e-12, atol=0)


def test_factors_of_a_module_called_twice_equal_explicit_loops() -> None:
    model, x, y = shared()
    for approach in ("expand", "reduce"):
        A, B, rows = reference.kron_factors("conv", model, x, CATEGORICAL, y, approach=approach)
        block = next(b for b in fit(model, [(x, y)], CATEGORICAL, approach=approach).blocks if b.name == "conv")
        assert isinstance(block, KronBlock)
        torch.testing.assert_close(block.inputs, A, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(block.outputs, B, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(block.rows, torch.full_like(block.rows, rows))


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal", "full", "low_rank", "hessian"])
@pytest.mark.filterwarnings("ignore:the Hessian is indefinite")
def test_batch_split_order_and_passes_change_nothing(structure: str) -> None:
    model, x, y = shared()
    whole = fit(model, [(x, y)], CATEGORICAL, structure, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([3, 0, 4, 2, 1])
    cut = [(x[order][:1], y[order][:1]), (x[order][1:], y[order][1:])]
    for data, passes in ((cut, 1), ([(x, y)], 2), (cut, 3)):
        generator = torch.Generator().manual_seed(0)
        found = fit(model, data, CATEGORICAL, structure, passes=passes, generator=generator)
        torch.testing.assert_close(found.to_dense(), whole.to_dense(), rtol=1e-8, atol=1e-9)
        assert found.n_data == whole.n_data == 5
        torch.testing.assert_close(found.loss, whole.loss)
    torch.testing.assert_close(whole.loss, float(CATEGORICAL.nll(model(x).detach(), y).sum()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("approach", ["expand", "reduce"])
@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal", "full", "low_rank"])
def test_a_weight_of_two_is_a_datum_twice(structure: str, approach: str, dtype: torch.dtype) -> None:
    model, x, y = shared()
    weight = torch.tensor([2, 1, 3, 0, 1]).to(dtype)
    copies = torch.tensor([0, 0, 1, 2, 2, 2, 4])
    found = fit(model, [(x, y, weight)], CATEGORICAL, structure, approach=approach)
    expected = fit(model, [(x[copies], y[copies])], CATEGORICAL, structure, approach=approach)
    if (structure, approach) == ("ekfac", "reduce"):  # few rows: in the null space any basis is as good as another
        torch.testing.assert_close(found.trace(), expected.trace(), rtol=1e-10, atol=0)
    else:
        torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-9, atol=1e-10)
    assert found.n_data == 7
    torch.testing.assert_close(found.loss, expected.loss)


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full"])
def test_factors_add_and_scale(structure: str) -> None:
    model, x, y = shared()
    whole = fit(model, [(x, y)], CATEGORICAL, structure)
    parts = fit(model, [(x[:2], y[:2])], CATEGORICAL, structure) + fit(model, [(x[2:], y[2:])], CATEGORICAL, structure)
    torch.testing.assert_close(parts.to_dense(), whole.to_dense())
    assert parts.n_data == whole.n_data
    scaled = 2.5 * whole
    torch.testing.assert_close(scaled.to_dense(), 2.5 * whole.to_dense())
    torch.testing.assert_close(scaled.trace(), float(whole.to_dense().trace() * 2.5))
    diagonal = torch.cat([d.reshape(-1) for d in whole.diagonal().values()])
    torch.testing.assert_close(diagonal, whole.to_dense().diagonal())
    assert scaled.n_data == 12.5


def test_factors_that_do_not_fit_are_not_added() -> None:
    model, x, y = shared()
    kron, diagonal = (fit(model, [(x, y)], CATEGORICAL, s) for s in ("kron", "diagonal"))
    with pytest.raises(InputError, match="cannot be added"):
        kron + diagonal
    with pytest.raises(InputError, match="different eigenbases"):
        fit(model, [(x, y)], CATEGORICAL, "ekfac") + fit(model, [(x[:2], y[:2])], CATEGORICAL, "ekfac")
    with pytest.raises(InputError, match="not negative"):
        kron * -1.0
    ekfac = fit(model, [(x, y)], CATEGORICAL, "ekfac")
    torch.testing.assert_close((ekfac + ekfac).to_dense(), 2 * ekfac.to_dense())


def test_sums_of_rows_and_sums_of_totals_are_not_added() -> None:
    model, x, y = shared()
    expand, reduce = (fit(model, [(x, y)], CATEGORICAL, "kron", approach=a) for a in ("expand", "reduce"))
    with pytest.raises(InputError, match="fit both with the same approach"):
        expand + reduce


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal", "full"])
def test_accumulation_dtype(structure: str) -> None:
    model, x, y = shared()
    exact = fit(model, [(x, y)], CATEGORICAL, structure).to_dense()
    single, narrow = model.float(), [(x.float(), y)]
    for dtype in (None, torch.float32, torch.float64):
        found = fit(single, narrow, CATEGORICAL, structure, accumulate=dtype)
        wanted = torch.float32 if dtype is None else dtype
        wanted = torch.float64 if structure == "full" else wanted  # its small eigenvalues need the digits
        sums = [t for b in found.blocks for k, t in b.tensors().items() if k != "rows"]
        assert {t.dtype for t in sums} == {wanted}
        torch.testing.assert_close(found.to_dense(), exact, rtol=2e-3, atol=2e-5)


def test_small_block_decides_between_full_and_diagonal() -> None:
    model = double(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    x, y = normal(6, 4), labels(6, 3)
    kinds = [{b.name: b.kind for b in fit(model, [(x, y)], CATEGORICAL, small_block=s).blocks} for s in (10, 9)]
    assert kinds == [{"0": "kron", "1": "full", "2": "kron"}, {"0": "kron", "1": "diagonal", "2": "kron"}]
    block = next(b for b in fit(model, [(x, y)], CATEGORICAL).blocks if b.name == "1")
    truth = reference.ggn(model, x, CATEGORICAL, y, list(block.shapes))
    torch.testing.assert_close(block.to_dense(), truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ekfac_keeps_its_bases_in_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).to(dtype)
    x, y = torch.randn(7, 4, dtype=dtype, generator=torch.Generator().manual_seed(0)), torch.arange(7) % 2
    found = fit_curvature(model, [(x, y)], "classification", structure="ekfac", progress=False)
    assert len(found.blocks) == 2
    for block in found.blocks:
        for vectors in (block.basis.inputs, block.basis.outputs):
            assert vectors.dtype == dtype
            eye = torch.eye(vectors.shape[-1], dtype=torch.float64)
            atol = 1e-6 if dtype == torch.float32 else 1e-13
            torch.testing.assert_close((vectors.mT @ vectors)[0].double(), eye, rtol=0, atol=atol)


class RowsWithoutGram(InputRows):
    """Rows that make per-example gradients, and know nothing else."""

    def __init__(self, rows: DenseRows):
        self.rows = rows
        self.batch, self.groups, self.shared, self.features = rows.batch, rows.groups, rows.shared, rows.features

    def per_example_gradients(self, grads: Tensor) -> Tensor:
        return self.rows.per_example_gradients(grads)

    def examples(self, start: int, length: int) -> RowsWithoutGram:
        return RowsWithoutGram(self.rows.examples(start, length))


def test_a_matrix_whose_rows_have_no_gram_matrix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = mlp(), [(normal(7, 4), labels(7, 3))]
    diagonal = fit(model, data, CATEGORICAL, "diagonal").to_dense()
    plain = LinearRule.rows

    def rows(*inputs: Any) -> InputRows:
        made = plain(*inputs)
        assert isinstance(made, DenseRows)
        return RowsWithoutGram(made)

    monkeypatch.setattr(LinearRule, "rows", rows)
    with pytest.raises(
        UnsupportedError, match=r"the rule of 0 says .* have no Gram matrix. Derive them from MatrixRows"
    ):
        fit(model, data, CATEGORICAL)
    torch.testing.assert_close(fit(model, data, CATEGORICAL, "diagonal").to_dense(), diagonal)
