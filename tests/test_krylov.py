"""Matrix-free linear algebra against dense linear algebra."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from aftermap.errors import InputError, NumericalError, ShapeError
from aftermap.krylov import (
    Rounding,
    conjugate_gradient,
    lanczos,
    lanczos_eigh,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def symmetric(eigenvalues: list[float] | Tensor, seed: int = 1) -> Tensor:
    values = torch.as_tensor(eigenvalues, dtype=torch.float64)
    random = torch.randn(len(values), len(values), generator=generator(seed), dtype=torch.float64)
    Q = torch.linalg.qr(random).Q
    return Q @ torch.diag(values) @ Q.T


def decaying(size: int, rate: float = 0.8) -> Tensor:
    return 10 * rate ** torch.arange(size, dtype=torch.float64)


def test_lanczos_keeps_orthogonality_and_tridiagonalises():
    A = symmetric(decaying(60))
    start = torch.randn(60, generator=generator(), dtype=torch.float64)
    result = lanczos(lambda v: A @ v, start, 40)
    Q = result.basis
    assert Q.shape == (60, 40)
    assert not result.exhausted
    assert_close(Q.T @ Q, torch.eye(40).double(), atol=1e-12, rtol=0)
    T = torch.diag(result.diagonal) + torch.diag(result.off_diagonal, 1) + torch.diag(result.off_diagonal, -1)
    assert_close(Q.T @ A @ Q, T, atol=1e-12, rtol=0)


def test_lanczos_stops_when_the_space_is_exhausted():
    A = symmetric([5.0, 3.0, 2.0] + [0.0] * 14)
    result = lanczos(lambda v: A @ v, A[:, 2], 17)
    assert result.exhausted
    assert result.basis.shape[1] == 3
    assert_close(result.eigh()[0], torch.tensor([2.0, 3.0, 5.0]).double())


@pytest.mark.parametrize("rank", [1, 4, 13])
def test_lanczos_eigh_finds_the_leading_pairs(rank: int):
    A = symmetric(decaying(80))
    pairs = lanczos_eigh(lambda v: A @ v, 80, rank, generator=generator())
    assert pairs.converged
    assert_close(pairs.values, decaying(80)[:rank], rtol=1e-9, atol=0)
    assert_close(A @ pairs.vectors, pairs.vectors * pairs.values, atol=1e-7, rtol=0)
    assert_close(pairs.vectors.T @ pairs.vectors, torch.eye(rank).double(), atol=1e-10, rtol=0)


def test_lanczos_eigh_finds_every_copy_of_a_repeated_eigenvalue():
    values = [9.0, 9.0, 9.0, 4.0, 4.0, 2.0, 2.0, 2.0, 2.0, 1.0] + [0.1] * 10 + [0.0] * 9
    A = symmetric(values)
    for rank in (2, 4, 7, 10):
        pairs = lanczos_eigh(lambda v: A @ v, len(values), rank, generator=generator(rank))
        assert_close(pairs.values, torch.tensor(values[:rank], dtype=torch.float64), rtol=1e-8, atol=0)
    everything = lanczos_eigh(lambda v: A @ v, len(values), len(values), generator=generator())
    assert_close(everything.values, torch.tensor(values[:20], dtype=torch.float64), rtol=1e-8, atol=0)
    assert everything.converged


def test_lanczos_eigh_of_zero_and_a_budget_that_is_too_small():
    nothing = lanczos_eigh(torch.zeros_like, 7, 3, generator=generator())
    assert nothing.values.numel() == 0
    assert nothing.converged
    A = symmetric(torch.linspace(1, 2, 90, dtype=torch.float64))
    assert not lanczos_eigh(lambda v: A @ v, 90, 8, max_matvecs=14, generator=generator()).converged


def test_factored_products_in_single_precision_find_eigenvalues_below_their_rounding():
    """RᵀR with eigenvalues over eight orders of magnitude: products in float32 round at 1e-7 of the largest."""
    singular = torch.logspace(0, -4, 40, dtype=torch.float64)
    left = torch.linalg.qr(torch.randn(60, 40, generator=generator(2), dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(40, 40, generator=generator(3), dtype=torch.float64)).Q
    root = ((left * singular) @ right.T).float()
    truth = torch.linalg.svdvals(root.double()).square()

    def product(v: Tensor) -> Tensor:
        return (root.T @ (root @ v.float())).double()

    pairs = lanczos_eigh(product, 40, 40, tolerance=1e-6, noise=1e-6, factored=True, generator=generator())
    assert len(pairs.values) == 40
    # A value l is known to 1e-7 · √(l · largest), up to a constant.
    assert float(((pairs.values - truth).abs() / (truth * truth[0]).sqrt()).max()) < 1e-6
    plain = lanczos_eigh(product, 40, 40, tolerance=1e-6, noise=1e-6, generator=generator())
    assert len(plain.values) < 35
    singular[20:] = 0.0
    root = ((left * singular) @ right.T).float()
    rank = lanczos_eigh(product, 40, 40, tolerance=1e-6, noise=1e-6, factored=True, generator=generator())
    assert len(rank.values) == 20  # rounding is not taken for eigenvalues


def test_conjugate_gradient_solves_every_column_and_reports_the_true_residual():
    A = symmetric(decaying(31, 0.9) + 0.5)
    rhs = torch.randn(31, 4, generator=generator(), dtype=torch.float64)
    rhs[:, 2] = 0
    result = conjugate_gradient(lambda V: A @ V, rhs, tolerance=1e-11)
    assert result.converged
    assert_close(result.solution, torch.linalg.solve(A, rhs), rtol=1e-8, atol=1e-10)
    assert_close(result.residual[0], (rhs[:, 0] - A @ result.solution[:, 0]).norm() / rhs[:, 0].norm())
    assert float(result.residual.max()) <= 1e-10
    one = conjugate_gradient(lambda v: A @ v, rhs[:, 1], tolerance=1e-11)
    assert_close(one.solution, result.solution[:, 1], rtol=1e-8, atol=1e-10)
    short = conjugate_gradient(lambda V: A @ V, rhs, tolerance=1e-11, max_iterations=3)
    assert not short.converged
    assert short.iterations == 3
    assert float(short.residual.max()) > 1e-6


def test_a_good_preconditioner_saves_iterations():
    scales = torch.logspace(0, 5, 47, dtype=torch.float64)
    A = torch.diag(scales) + 0.1 * symmetric(torch.linspace(0, 1, 47, dtype=torch.float64))
    rhs = torch.randn(47, generator=generator(), dtype=torch.float64)
    plain = conjugate_gradient(lambda v: A @ v, rhs, tolerance=1e-9)
    helped = conjugate_gradient(lambda v: A @ v, rhs, preconditioner=lambda r: r / scales, tolerance=1e-9)
    assert helped.converged
    assert helped.iterations < plain.iterations / 3
    assert_close(helped.solution, torch.linalg.solve(A, rhs), rtol=1e-6, atol=1e-9)


def test_the_generator_decides_and_the_global_seed_is_left_alone():
    A = symmetric(decaying(40))
    before = torch.random.get_rng_state()
    first = lanczos_eigh(lambda v: A @ v, 40, 3, generator=generator(5))
    second = lanczos_eigh(lambda v: A @ v, 40, 3, generator=generator(5))
    assert torch.equal(first.vectors, second.vectors)
    assert torch.equal(before, torch.random.get_rng_state())


def test_bad_input_is_named():
    with pytest.raises(InputError, match=r"rank=9.*size 8"):
        lanczos_eigh(torch.clone, 8, 9)
    with pytest.raises(InputError, match="max_matvecs=0"):
        lanczos_eigh(torch.clone, 8, 2, max_matvecs=0)
    with pytest.raises(InputError, match="rank=0"):
        lanczos_eigh(torch.clone, 8, 0)
    with pytest.raises(InputError, match="not zero"):
        lanczos(torch.clone, torch.zeros(3), 2)
    with pytest.raises(ShapeError, match=r"\(2, 3, 4\)"):
        conjugate_gradient(torch.clone, torch.zeros(2, 3, 4))
    with pytest.raises(NumericalError, match="positive definite"):
        conjugate_gradient(torch.neg, torch.ones(5, dtype=torch.float64))
    with pytest.raises(NumericalError, match="not finite"):
        lanczos_eigh(lambda v: v * math.nan, 8, 2)


@pytest.mark.parametrize("budget", [1, 9, 14, 40])
def test_no_more_products_are_made_than_were_allowed(budget: int) -> None:
    """Three rounds are needed, since each finds one vector of an eigenvalue that is there three times."""
    A, made = symmetric([5.0] * 3 + [4.0] * 3 + [1.0] * 34), 0

    def product(v: Tensor) -> Tensor:
        nonlocal made
        made += 1
        return A @ v

    lanczos_eigh(product, 40, 6, max_matvecs=budget, generator=generator())
    assert made <= budget


def test_what_rounding_drowns() -> None:
    """Products Rᵀ(R q) hold eigenvalues down to the square of their error, and no eigenvalue in float64 below its own rounding."""
    least = 100 * torch.finfo(torch.float64).eps
    assert Rounding(1e-3).floor == 1e-3
    assert Rounding(1e-3, factored=True).floor == pytest.approx(1e-6)
    assert Rounding(1e-12, factored=True).floor == least
    values = torch.tensor([4.0, 1e-4, -1.0], dtype=torch.float64)
    assert_close(Rounding(1e-3).relative(values, 9.0), torch.full((3,), 9.0, dtype=torch.float64))
    expected = torch.tensor([36.0, 9e-4, 9e-6 * 9], dtype=torch.float64).sqrt()
    assert_close(Rounding(1e-3, factored=True).relative(values, 9.0), expected)


def test_copies_of_an_eigenvalue_beyond_the_rank_are_not_looked_for() -> None:
    """Each round finds one copy of the only eigenvalue; after three, a fourth sees that no larger one is left, in spite of rounding."""
    for seed in range(20):
        A = symmetric([5.0] * 40, seed)
        pairs = lanczos_eigh(lambda v, A=A: A @ v, 40, 3, generator=generator(seed))
        assert_close(pairs.values, torch.full((3,), 5.0, dtype=torch.float64))
        assert pairs.matvecs == 4


def test_a_copy_that_shows_late_is_found() -> None:
    """After a few steps of the second round no Ritz value is above the threshold, but the residuals say that one may come."""
    dense = torch.linspace(5.0, 0.0, 300, dtype=torch.float64)
    values = torch.cat([torch.tensor([5.02, 5.02], dtype=torch.float64), dense])
    A = torch.diag(values)
    pairs = lanczos_eigh(lambda v: A @ v, len(values), 2, max_matvecs=2000, generator=generator())
    assert pairs.converged
    assert_close(pairs.values, values[:2])


def test_one_step_of_lanczos_is_the_rayleigh_quotient():
    A = symmetric(decaying(9))
    start = torch.randn(9, generator=generator(), dtype=torch.float64)
    result = lanczos(lambda v: A @ v, 5 * start, 1)
    assert result.basis.shape == (9, 1)
    assert_close(result.basis[:, 0], start / start.norm())
    assert_close(result.diagonal, (start @ A @ start / (start @ start))[None])
    assert result.off_diagonal.shape == (0,)
    assert not result.exhausted
    residual = A @ result.basis[:, 0] - result.diagonal * result.basis[:, 0]
    assert result.remainder == pytest.approx(float(residual.norm()))


@pytest.mark.parametrize("columns", [None, 3])
def test_conjugate_gradients_need_as_many_products_as_there_are_eigenvalues(columns: int | None):
    A, products = symmetric([4.0] * 5 + [1.0] * 3 + [9.0]), []
    shape = (9,) if columns is None else (9, columns)
    rhs = torch.randn(shape, generator=generator(), dtype=torch.float64)

    def matvec(v: Tensor) -> Tensor:
        products.append(v)
        return A @ v

    result = conjugate_gradient(matvec, rhs, tolerance=1e-10)
    assert result.iterations == 3
    assert len(products) == 4  # and one to check
    assert result.converged
    assert_close(A @ result.solution, rhs)
    # With a limit it ends there, and tells the residual that is left.
    short = conjugate_gradient(matvec, rhs, tolerance=1e-10, max_iterations=1)
    assert short.iterations == 1
    assert not short.converged
    assert_close(short.residual, (rhs - A @ short.solution).norm(dim=0) / rhs.norm(dim=0))
    # The first step is the steepest descent that goes as far as it falls.
    step = rhs.square().sum(0) / (rhs * (A @ rhs)).sum(0)
    assert_close(short.solution, step * rhs)
    exact = conjugate_gradient(lambda v: A @ v, rhs, preconditioner=lambda v: torch.linalg.solve(A, v))
    assert exact.iterations == 1
    nothing = conjugate_gradient(matvec, torch.zeros_like(rhs))
    assert nothing.iterations == 0
    assert nothing.converged
    assert_close(nothing.solution, torch.zeros_like(rhs))
    assert_close(nothing.residual, torch.zeros(shape[1:], dtype=torch.float64))
