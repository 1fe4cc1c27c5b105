"""Matrix-free linear algebra against dense linear algebra."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from aftermap.errors import InputError, NumericalError, ShapeError
from aftermap.krylov import (
    conjugate_gradient,
    lanczos,
    lanczos_eigh,
    randomised_eigh,
    stochastic_lanczos_quadrature,
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


def test_randomised_eigh_is_exact_for_low_rank_and_close_for_decay():
    A = symmetric([7.0, 7.0, 3.0, 1.0] + [0.0] * 35)
    pairs = randomised_eigh(lambda V: A @ V, 39, 4, generator=generator())
    assert pairs.converged
    assert_close(pairs.vectors * pairs.values @ pairs.vectors.T, A, atol=1e-12, rtol=0)
    B = symmetric(decaying(70))
    close = randomised_eigh(lambda V: B @ V, 70, 6, power_iterations=4, generator=generator())
    assert_close(close.values, decaying(70)[:6], rtol=1e-8, atol=0)
    crude = randomised_eigh(lambda V: B @ V, 70, 6, power_iterations=0, oversampling=1, generator=generator())
    assert bool((crude.values <= decaying(70)[:6] + 1e-12).all())
    assert not crude.converged


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


def test_log_det_by_quadrature_within_its_error():
    A = symmetric(decaying(120, 0.95) + 0.3)
    exact = float(torch.linalg.slogdet(A).logabsdet)
    estimate = stochastic_lanczos_quadrature(lambda v: A @ v, 120, samples=40, steps=40, generator=generator())
    assert abs(estimate.value - exact) < 4 * estimate.standard_error
    logarithm = symmetric((decaying(120, 0.95) + 0.3).log())
    off_diagonal = logarithm - torch.diag(logarithm.diagonal())
    predicted = float(off_diagonal.norm()) * math.sqrt(2 / 40)  # the variance of a Rademacher probe
    assert 0.6 * predicted < estimate.standard_error < 1.5 * predicted
    diagonal = torch.linspace(1, 3, 23, dtype=torch.float64)
    # Rademacher probes have no variance for a diagonal matrix, so a full recursion is exact.
    exact_one = stochastic_lanczos_quadrature(lambda v: diagonal * v, 23, samples=1, steps=23, generator=generator())
    assert_close(exact_one.value, float(diagonal.log().sum()), rtol=1e-9, atol=0)
    assert math.isnan(exact_one.standard_error)
    trace = stochastic_lanczos_quadrature(
        lambda v: diagonal * v, 23, function=lambda t: t**2, samples=3, steps=2, generator=generator()
    )
    assert_close(trace.value, float((diagonal**2).sum()), rtol=1e-9, atol=0)


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
        randomised_eigh(torch.clone, 8, 0)
    with pytest.raises(InputError, match="not zero"):
        lanczos(torch.clone, torch.zeros(3), 2)
    with pytest.raises(InputError, match="samples=0"):
        stochastic_lanczos_quadrature(torch.clone, 8, samples=0)
    with pytest.raises(ShapeError, match=r"\(2, 3, 4\)"):
        conjugate_gradient(torch.clone, torch.zeros(2, 3, 4))
    with pytest.raises(NumericalError, match="positive definite"):
        conjugate_gradient(torch.neg, torch.ones(5, dtype=torch.float64))
    with pytest.raises(NumericalError, match=r"eigenvalue -1.*positive"):
        stochastic_lanczos_quadrature(torch.neg, 5, generator=generator())
    with pytest.raises(NumericalError, match="not finite"):
        lanczos_eigh(lambda v: v * math.nan, 8, 2)
    with pytest.raises(NumericalError, match="not finite"):
        randomised_eigh(lambda v: v * math.inf, 8, 2)
