from __future__ import annotations

import pytest
import torch

from aftermap.errors import NumericalError, NumericalWarning
from aftermap.linalg import (
    add_product_,
    all_finite,
    kron,
    psd_eigh,
    safe_cholesky,
    symmetrise,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_sums_in_another_dtype() -> None:
    rows = normal(5, 3).float()
    out = torch.zeros(3, 3, dtype=torch.float64)
    add_product_(out, rows, rows)
    torch.testing.assert_close(out, (rows.T @ rows).double())
    wide = torch.zeros(2, 3, 4, dtype=torch.float64)
    left, right = normal(2, 5, 3), normal(2, 5, 4, seed=1)
    add_product_(wide, left, right)
    torch.testing.assert_close(wide, left.transpose(-1, -2) @ right)


def test_symmetrise() -> None:
    matrix = normal(2, 3, 3)
    torch.testing.assert_close(symmetrise(matrix), symmetrise(matrix).transpose(-1, -2))
    torch.testing.assert_close(symmetrise(matrix).sum(), matrix.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_psd_eigh(dtype: torch.dtype) -> None:
    rows = normal(2, 3, 5)  # rank three of five
    matrix = (rows.transpose(-1, -2) @ rows).to(dtype)
    values, vectors = psd_eigh(matrix)
    assert values.dtype == vectors.dtype == torch.float64
    assert bool((values >= 0).all())
    again = (vectors * values[:, None]) @ vectors.transpose(-1, -2)
    torch.testing.assert_close(again, matrix.double(), rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12)
    torch.testing.assert_close(vectors.transpose(-1, -2) @ vectors, torch.eye(5).double().expand(2, 5, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_psd_eigh_is_that_of_the_symmetric_part_and_leaves_its_input(dtype: torch.dtype) -> None:
    rows = normal(2, 700, 601)  # more than one strip
    matrix = (rows.transpose(-1, -2) @ rows).to(dtype) + 1e-4 * normal(2, 601, 601, seed=1).to(dtype)
    before = matrix.clone()
    values, vectors = psd_eigh(matrix)
    assert torch.equal(matrix, before)
    expected = torch.linalg.eigh(symmetrise(matrix.double()))
    torch.testing.assert_close(values, expected[0].clamp_min(0.0), rtol=0, atol=1e-10)
    torch.testing.assert_close((vectors * values[:, None]) @ vectors.mT, symmetrise(matrix.double()), rtol=0, atol=1e-9)
    assert psd_eigh(torch.zeros(0, 3, 3))[1].shape == (0, 3, 3)


def test_psd_eigh_of_zero() -> None:
    values, _ = psd_eigh(torch.zeros(3, 3))
    torch.testing.assert_close(values, torch.zeros(3, dtype=torch.float64))


def test_psd_eigh_knows_that_long_sums_in_float64_round() -> None:
    """Float64 sums are their own totals: 200,000 rows added one after the other leave random errors of √200,000 · eps/2."""
    rows = normal(3, 100)  # rank three
    matrix = rows.T @ rows
    deviation = 200_000**0.5 * torch.finfo(torch.float64).eps / 2 * matrix.diagonal().sqrt()
    errors = 2**0.5 * symmetrise(normal(100, 100, seed=1)) * deviation[:, None] * matrix.diagonal().sqrt()
    rounded = matrix + errors
    values, _ = psd_eigh(rounded)
    torch.testing.assert_close(values[:97], torch.zeros(97, dtype=torch.float64), rtol=0, atol=1e-11)
    rounded[5] = rounded[:, 5] = 0.0
    rounded[5, 5] = -1e-10 * matrix.diagonal().sum()
    with pytest.raises(NumericalError, match="not positive semi-definite"):
        psd_eigh(rounded)


def test_psd_eigh_refuses_what_is_not_psd() -> None:
    with pytest.raises(NumericalError, match="the factor of fc is not positive semi-definite"):
        psd_eigh(torch.diag(torch.tensor([1.0, -0.5])), what="the factor of fc")
    with pytest.raises(NumericalError, match="not finite"):
        psd_eigh(torch.tensor([[1.0, torch.nan], [0.0, 1.0]]))


def test_psd_eigh_helps_a_decomposition_that_does_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = torch.linalg.eigh, []

    def once(matrix: torch.Tensor, *, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        calls.append(matrix)
        if len(calls) == 1:
            out[1].fill_(torch.nan)  # what a failed decomposition leaves behind is not the matrix
            raise torch.linalg.LinAlgError("did not converge")
        real(matrix, out=out)

    monkeypatch.setattr(torch.linalg, "eigh", once)
    with pytest.warns(NumericalWarning, match="did not converge.*no digit left.*larger prior precision"):
        values, _ = psd_eigh(torch.diag(torch.tensor([2.0, 1.0])))
    torch.testing.assert_close(values, torch.tensor([1.0, 2.0], dtype=torch.float64))


def test_safe_cholesky() -> None:
    rows = normal(7, 4)
    matrix = rows.T @ rows
    factor = safe_cholesky(matrix)
    torch.testing.assert_close(factor @ factor.T, matrix)
    torch.testing.assert_close(factor, factor.tril())


def test_safe_cholesky_climbs_a_ladder_and_says_so() -> None:
    rows = normal(2, 4)
    with pytest.warns(NumericalWarning, match="Cholesky of the prior needed.*no digit left.*larger prior precision"):
        factor = safe_cholesky(rows.T @ rows - 1e-13 * torch.eye(4, dtype=torch.float64), what="the prior")
    torch.testing.assert_close(factor @ factor.T, rows.T @ rows, rtol=0, atol=1e-5)
    with pytest.raises(NumericalError, match="not positive definite"):
        safe_cholesky(-torch.eye(3))
    with pytest.raises(NumericalError, match="not finite"):
        safe_cholesky(torch.full((2, 2), torch.inf))


def test_kron() -> None:
    a, b = normal(2, 3), normal(4, 5, seed=1)
    torch.testing.assert_close(kron(a, b), torch.kron(a, b))
    several = kron(normal(6, 2, 3), normal(6, 4, 5, seed=1))
    torch.testing.assert_close(several[3], torch.kron(normal(6, 2, 3)[3], normal(6, 4, 5, seed=1)[3]))


def test_kron_acts_on_row_major_matrices() -> None:
    B, A, W = normal(3, 3), normal(4, 4, seed=1), normal(3, 4, seed=2)
    torch.testing.assert_close(kron(B, A) @ W.reshape(-1), (B @ W @ A.T).reshape(-1))


def test_a_matrix_of_denormal_numbers_is_a_zero_matrix() -> None:
    rows = torch.tensor([[1e-22, -2e-22, 3e-22], [2e-22, 1e-22, -1e-22]])
    values, _ = psd_eigh(rows.T @ rows)
    assert float(values.max()) < 1e-37
    torch.testing.assert_close(
        psd_eigh(torch.diag(torch.tensor([1e-43, -1e-43])))[0], torch.zeros(2).double(), rtol=0, atol=1e-42
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_finite_looks_again_where_a_sum_overflows(dtype: torch.dtype) -> None:
    values = torch.full((30,), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(values)
    assert all_finite(values[:0])
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoilt = torch.cat([values, -values])
        spoilt[3] = bad
        assert not all_finite(spoilt)
