"""The Kronecker eigenbasis: rotations, decompositions and the three kinds of damping."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from aftermap.curvature.structures.eigenbasis import KroneckerEigenbasis, damped_eigenvalues, eigendecompose
from aftermap.errors import InputError, NumericalError
from aftermap.linalg import kron


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def factor(groups: int, width: int, seed: int = 0) -> Tensor:
    root = normal(groups, width, width + 2, seed=seed)
    return root @ root.transpose(-1, -2)


def layer() -> tuple[Tensor, Tensor, KroneckerEigenbasis, Tensor, Tensor]:
    """A [g, i, i], B [g, o, o], their basis, μ and λ."""
    a, b = factor(2, 4), factor(2, 3, seed=1)
    (mu, outputs), (lam, inputs) = eigendecompose([("B", b), ("A", a)])
    return a, b, KroneckerEigenbasis(inputs, outputs), mu, lam


def test_a_kronecker_product_is_diagonal_in_its_basis():
    a, b, basis, mu, lam = layer()
    block = normal(5, 2, 3, 4, seed=2)
    product = b @ block @ a  # (B ⊗ A) vec(W), row-major
    values = mu[:, :, None] * lam[:, None, :]
    assert_close(basis.rotate_back(values * basis.rotate(block)), product, rtol=1e-12, atol=1e-10)
    assert_close(basis.rotate_back(basis.rotate(block)), block, rtol=1e-12, atol=1e-12)
    diagonal = torch.stack([kron(b[g], a[g]).diagonal().reshape(3, 4) for g in range(2)])
    assert_close(basis.diagonal(values), diagonal, rtol=1e-12, atol=1e-12)
    assert basis.to(torch.float32).inputs.dtype == basis.to(torch.float32).outputs.dtype == torch.float32
    assert basis.rotate(block.float()).dtype == torch.float32


def test_one_hot_inputs_have_the_identity_as_their_basis():
    _, b, basis, mu, _ = layer()
    plain = KroneckerEigenbasis(None, basis.outputs)
    block, counts = normal(2, 3, 4), torch.arange(1.0, 9.0, dtype=torch.float64).view(2, 4)
    scaled = plain.rotate_back(mu[:, :, None] * counts[:, None] * plain.rotate(block))
    assert_close(scaled, b @ block * counts[:, None], rtol=1e-12, atol=1e-12)
    assert plain.to(torch.float32).inputs is None


def test_released_matrices_go_and_the_results_have_the_dtype_asked_for():
    matrices = [("first", factor(1, 3).float()), ("second", factor(1, 5, seed=1).float())]
    alive = [weakref.ref(m) for _, m in matrices]
    kept = eigendecompose(list(matrices), torch.float32)
    found = eigendecompose(matrices, torch.float32, release=True)
    assert matrices == []
    assert [a() for a in alive] == [None, None]
    for (values, vectors), (same_values, same_vectors) in zip(found, kept, strict=True):
        assert values.dtype == vectors.dtype == torch.float32
        assert torch.equal(values, same_values)
        assert torch.equal(vectors, same_vectors)
    assert eigendecompose([]) == []


def test_a_matrix_that_is_none_is_named():
    with pytest.raises(NumericalError, match="the output factor of conv is not positive semi-definite"):
        eigendecompose([("the output factor of conv", -factor(1, 3))])


def test_exact_damping_adds_the_prior_to_every_eigenvalue():
    a, b, basis, mu, lam = layer()
    values = damped_eigenvalues(mu, lam, scale=2.5, prior=0.7)
    block = normal(2, 3, 4, seed=2)
    expected = 2.5 * b @ block @ a + 0.7 * block
    assert_close(basis.rotate_back(values * basis.rotate(block)), expected, rtol=1e-12, atol=1e-10)


def test_factored_damping_is_equation_9():
    a, b, basis, mu, lam = layer()
    n_data, scale, prior = 11.0, 2.5, 0.7
    values = damped_eigenvalues(mu, lam, scale=scale, prior=prior, damping="factored", n_data=n_data)
    left = (scale / n_data) ** 0.5 * b + prior**0.5 * torch.eye(3, dtype=torch.float64)
    right = (scale * n_data) ** 0.5 * a + prior**0.5 * torch.eye(4, dtype=torch.float64)
    block = normal(2, 3, 4, seed=2)
    assert_close(basis.rotate_back(values * basis.rotate(block)), left @ block @ right, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("n_data", [1.0, 11.0])
def test_pi_balances_the_factors_and_does_not_know_their_scale(n_data: float):
    *_, mu, lam = layer()
    values = damped_eigenvalues(mu, lam, prior=0.7, damping="pi", n_data=n_data)
    assert_close(damped_eigenvalues(mu / 9, lam * 9, prior=0.7, damping="pi", n_data=n_data), values)
    pi = (lam.mean(1) / mu.mean(1)).sqrt()[:, None, None]  # of means over data: N cancels
    expected = (mu[:, :, None] + 0.7**0.5 / pi) * (lam[:, None, :] + 0.7**0.5 * pi)
    assert_close(values, expected, rtol=1e-12, atol=0)


def test_a_block_without_curvature_keeps_its_prior():
    zero, some = torch.zeros(1, 3), torch.ones(1, 2)
    assert_close(damped_eigenvalues(zero, some, prior=0.7, damping="pi"), torch.full((1, 3, 2), 0.7))
    with pytest.raises(InputError, match=r"damping='both'.*'exact', 'factored', 'pi'"):
        damped_eigenvalues(zero, some, prior=0.7, damping="both")
