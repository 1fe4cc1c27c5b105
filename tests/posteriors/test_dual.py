"""The function-space covariance equals the weight-space one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from aftermap.curvature import reference
from aftermap.curvature.structures.flat import join_flat, split_flat
from aftermap.errors import InputError, ShapeError
from aftermap.posteriors import DualPosterior, dual, dual_covariance
from tests.posteriors.matrix_free_cases import CASES, Case, generator, latent, randn


def parts(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """J of the inputs asked about and of the data, and the roots with the data's weights."""
    J = reference.jacobian(case.model, case.x)
    root = case.likelihood.hessian_root(case.model(case.x).detach(), case.y)
    return reference.jacobian(case.model, case.asked), J, root * case.weight.sqrt()[:, None, None]


@pytest.mark.parametrize("kind", list(CASES))
def test_primal_equals_dual(kind: str) -> None:
    case = CASES[kind]()
    asked, J, root = parts(case)
    entries = torch.rand(J.shape[-1], generator=generator(2), dtype=torch.float64) + 0.4
    for prior in (0.8, entries):
        covariance = torch.linalg.inv(case.precision(prior, 1.7))
        found = dual_covariance(asked, J, root, prior, scale=1.7)
        assert_close(found, reference.linearised_covariance(asked, covariance), rtol=1e-9, atol=1e-12)
        joint = dual_covariance(asked, J, root, prior, scale=1.7, joint=True)
        flat = asked.flatten(0, 1)
        assert_close(joint.reshape(len(flat), -1), flat @ covariance @ flat.T, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", list(CASES))
def test_the_dual_equals_the_matrix_free_predictive(kind: str) -> None:
    case = CASES[kind]()
    asked, J, root = parts(case)
    found = dual_covariance(asked, J, root, 0.7, scale=1.3)
    assert_close(latent(case.model, case.matrix_free(), case.asked).cov, found, rtol=1e-6, atol=1e-9)


def test_a_singular_hessian_and_no_information() -> None:
    case = CASES["mlp softmax"]()
    asked, J, root = parts(case)
    Lambda = root @ root.mT
    assert float(torch.linalg.matrix_rank(Lambda, rtol=1e-9).max()) == 3  # of 4: the softmax does not see a shift
    nothing = dual_covariance(asked, J, torch.zeros_like(root), 0.8)
    assert_close(nothing, asked @ asked.mT / 0.8)
    weak = dual_covariance(asked, J, root, 0.8, scale=0.1)
    strong = dual_covariance(asked, J, root, 0.8, scale=10.0)
    assert float(torch.linalg.eigvalsh(weak - strong).min()) > -1e-12
    single = dual_covariance(asked.float(), J.float(), root.float(), 0.8)
    assert single.dtype == torch.float64


def test_bad_input_is_named() -> None:
    asked, J, root = randn(2, 3, 7), randn(4, 3, 7, seed=1), randn(4, 3, 2, seed=2)
    with pytest.raises(ShapeError, match=r"\(2, 3, 6\) and \(4, 3, 7\)"):
        dual_covariance(asked[..., :6], J, root, 1.0)
    with pytest.raises(ShapeError, match=r"\(4, 2, 2\).*\[N, D, K\]"):
        dual_covariance(asked, J, root[:, :2], 1.0)
    with pytest.raises(ShapeError, match=r"\(6,\).*\[7\]"):
        dual_covariance(asked, J, root, torch.ones(6))
    with pytest.raises(InputError, match="prior precision must be positive"):
        dual_covariance(asked, J, root, 0.0)
    with pytest.raises(InputError, match="scale must be positive"):
        dual_covariance(asked, J, root, 1.0, scale=-2.0)


@pytest.mark.parametrize("kind", list(CASES))
def test_the_posterior_in_dual_form_is_the_dense_one(kind: str) -> None:
    """Everything that it computes through a matrix over the data, against the inverse of the matrix over the weights."""
    case, scale = CASES[kind](), 1.7
    shapes = {n: p.shape for n, p in case.model.named_parameters()}
    entries = {n: torch.rand(s, generator=generator(2), dtype=torch.float64) + 0.4 for n, s in shapes.items()}
    posterior = DualPosterior.from_data(case.model, case.data, case.likelihood, entries, scale=scale)
    prior = torch.cat([v.flatten() for v in entries.values()])
    precision = case.precision(prior, scale)
    covariance, size = torch.linalg.inv(precision), len(prior)
    assert_close(posterior.to_dense(), precision, rtol=1e-9, atol=1e-12)

    lines = randn(5, size, seed=4)
    values = split_flat(lines, {n: tuple(s) for n, s in shapes.items()})
    for product, matrix in ((posterior.precision_mv, precision), (posterior.covariance_mv, covariance)):
        assert_close(join_flat(product(values), list(shapes), 1), lines @ matrix, rtol=1e-9, atol=1e-11)
    marginal = join_flat(posterior.marginal_variance(), list(shapes), 0)
    assert_close(marginal, covariance.diagonal(), rtol=1e-9, atol=1e-12)
    assert_close(posterior.log_det_precision(), torch.linalg.slogdet(precision)[1], rtol=1e-10, atol=1e-10)
    around = {n: values[n] + p.detach() for n, p in case.model.named_parameters()}
    gaussian = torch.distributions.MultivariateNormal(
        torch.zeros(size, dtype=torch.float64), precision_matrix=precision
    )
    assert_close(posterior.log_prob(around), gaussian.log_prob(lines), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", list(CASES))
def test_draws_of_the_dual_form_have_its_covariance(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws are linear in their numbers: those of the identity have exactly the covariance."""
    case, scale = CASES[kind](), 1.7
    posterior = DualPosterior.from_data(case.model, case.data, case.likelihood, 0.6, scale=scale)
    monkeypatch.setattr(dual, "normal_like", lambda like, generator: torch.eye(len(like), dtype=like.dtype))
    numbers = sum(p.numel() for p in case.model.parameters()) + len(posterior.rows)
    drawn = posterior.sample(numbers)
    deviations = torch.cat([(drawn[n] - p.detach()).flatten(1) for n, p in case.model.named_parameters()], 1)
    expected = torch.linalg.inv(case.precision(0.6, scale))
    assert_close(deviations.T @ deviations, expected, rtol=1e-9, atol=1e-12)
