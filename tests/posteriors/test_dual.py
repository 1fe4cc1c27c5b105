"""The function-space covariance equals the weight-space one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from aftermap.curvature import reference
from aftermap.errors import InputError, ShapeError
from aftermap.posteriors import dual_covariance
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
