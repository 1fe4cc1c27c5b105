"""The dual form of the linear model against the library's matrices over the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aftermap as am
from aftermap.laplace import linear_mode
from experiments.antoran2022.kernel import FullMatrix
from experiments.antoran2022.linear import LinearModel
from experiments.antoran2022.run import precisions

WEIGHT = 3.0


@pytest.fixture
def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    return model, torch.randn(30, 4).double(), torch.arange(30) % 3


@pytest.mark.parametrize("tau", [0.3, 20.0])
def test_mode_and_dimension_are_those_of_the_full_matrix(
    problem: tuple[nn.Module, torch.Tensor, torch.Tensor], tau: float
) -> None:
    model, x, y = problem
    la = am.Laplace(
        model, "classification", structure="full", curvature="exact", data_scale=WEIGHT, prior_precision=tau
    )
    la.fit([(x, y)], progress=False)
    wanted = linear_mode(la, iterations=2000)
    assert wanted.converged
    squared = sum(float(v.double().square().sum()) for v in wanted.mean.values())
    found, converged = LinearModel(model, x, y, WEIGHT).mode_squared(tau)
    assert converged
    assert found == pytest.approx(squared, rel=1e-4)
    matrix = FullMatrix(model, x, y, x[:5])
    assert matrix.gamma(tau, WEIGHT) == pytest.approx(sum(la.posterior.effective_parameters().values()), rel=1e-6)
    assert torch.allclose(matrix.covariance(tau, WEIGHT), _covariances(la, x[:5]), rtol=1e-6)


def _covariances(la: am.Laplace, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([la.joint(row)[1].reshape(3, 3) for row in x.split(1)])


def test_a_mode_that_is_not_reached_says_so(problem: tuple[nn.Module, torch.Tensor, torch.Tensor]) -> None:
    model, x, y = problem
    assert LinearModel(model, x, y, WEIGHT).mode_squared(0.3, iterations=1)[1] is False


def test_both_precisions_solve_their_equation() -> None:
    def gamma(tau: float) -> float:
        return 5 * 2 / (2 + tau)

    def mode(tau: float) -> tuple[float, bool]:
        return 4 / (1 + tau), True

    found = precisions(gamma, mode, norm=1.5, rounds=100)
    tau = found["weights"]["precision"]
    assert tau * 1.5 == pytest.approx(gamma(tau), rel=1e-9)
    tau = found["joint"]["precision"]
    assert tau * mode(tau)[0] == pytest.approx(gamma(tau), rel=0.03)
    assert found["joint"]["converged"] == 1.0
    assert precisions(gamma, mode, norm=1.5, rounds=1)["joint"]["converged"] == 0.0
    assert precisions(gamma, lambda t: (mode(t)[0], False), norm=1.5, rounds=100)["joint"]["converged"] == 0.0
