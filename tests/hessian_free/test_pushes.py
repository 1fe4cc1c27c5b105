"""How hard to push: the variance is right by default, and a report that contradicts it is said aloud."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from aftermap.errors import NumericalWarning
from aftermap.hessian_free import HessianFree
from aftermap.likelihoods import Categorical
from tests.hessian_free.problems import Problem
from tests.laplace.problems import mlp, normal, trained

DECAY = 0.5


@cache
def noisy_classes() -> Problem:
    """Fifty points in the plane with three noisy classes, and inputs far outside: a push soon leaves the quadratic regime."""
    x = normal(50, 2, seed=100)
    labels = (x[:, 0] + 0.5 * normal(50, seed=101) > 0).long() + (x[:, 1] + 0.5 * normal(50, seed=102) > 0.7).long()
    data = [(x, labels)]
    model = trained(mlp(2, 6, 3, seed=10), data, nn.CrossEntropyLoss(reduction="sum"), decay=DECAY, steps=6000)
    return Problem(model, data, Categorical(), 2 * normal(6, 2, seed=103), prior=DECAY)


class Tied(nn.Module):
    """An embedding that is also the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3, dtype=torch.float64)
        self.inside = nn.Linear(3, 3, dtype=torch.float64)
        self.out = nn.Linear(3, 5, bias=False, dtype=torch.float64)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.inside(self.words(x).mean(1))))
        return result


@cache
def tied() -> Problem:
    generator = torch.Generator().manual_seed(4)
    torch.manual_seed(0)
    x, y = (torch.randint(0, 5, shape, generator=generator) for shape in ((60, 3), (60,)))
    model = trained(Tied(), [(x, y)], nn.CrossEntropyLoss(reduction="sum"), decay=1.0, steps=6000)
    return Problem(model, [(x, y)], Categorical(), torch.randint(0, 5, (4, 3), generator=generator), prior=1.0)


def fitted(problem: Problem, **settings: object) -> HessianFree:
    hf = HessianFree(problem.model, problem.likelihood, prior_precision=problem.prior, **settings)
    return hf.fit(problem.data, polish=True)


def error(problem: Problem, covariance: Tensor) -> float:
    rows = problem.jacobian().flatten(0, 1)
    width = covariance.shape[-1]
    full = problem.truth(rows).reshape(-1, width, len(rows) // width, width)
    truth = torch.diagonal(full, dim1=0, dim2=2).movedim(-1, 0)
    return float((covariance - truth).abs().max() / truth.abs().max())


@pytest.mark.parametrize("make", [noisy_classes, tied])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_default_push_stays_where_the_loss_is_quadratic(make: object, symmetric: bool) -> None:
    problem: Problem = make()  # type: ignore[operator]
    hf = fitted(problem, symmetric=symmetric)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prediction = hf.predict(problem.asked)
    assert hf.report is not None
    assert hf.report.ok
    assert prediction.latent_cov is not None
    assert error(problem, prediction.latent_cov) < 0.02
    assert all(abs(r.bias) <= 0.01 for r in hf.report.functionals)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_rise_of_the_loss_tells_the_error_of_a_variance(symmetric: bool) -> None:
    problem = noisy_classes()
    rows = problem.jacobian().flatten(0, 1)
    truth = problem.truth(rows).diagonal()
    hf = fitted(problem, symmetric=symmetric, deviation=0.02, bias_limit=1e9)
    hf.predict(problem.asked)
    assert hf.report is not None
    measured = torch.tensor([r.variance for r in hf.report.functionals], dtype=torch.float64) / truth - 1
    estimated = torch.tensor([r.bias for r in hf.report.functionals], dtype=torch.float64)
    assert measured.abs().max() > 1e-3  # there is something to estimate
    assert (estimated - measured).abs().max() < 0.2 * measured.abs().max()


def test_a_push_out_of_the_quadratic_regime_is_said() -> None:
    problem = noisy_classes()
    hf = fitted(problem, deviation=0.3, max_halvings=0, curvature_limit=1e9)
    with pytest.warns(NumericalWarning, match=r"leaves the region.*off by about.*deviation"):
        hf.predict(problem.asked)
    assert hf.report is not None
    assert not hf.report.ok
    assert max(abs(r.bias) for r in hf.report.functionals) > 0.01


def test_a_push_finds_its_size_where_no_halving_is_allowed() -> None:
    """The first push is sized by the prior's variance, the second by the variance that the first one gave."""
    net = nn.Linear(2, 1, bias=False).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    asked = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    hf = HessianFree(net, "regression", prior_precision=0.5, deviation=0.1, max_halvings=0)
    variance = hf.fit([(x, x[:, :1])], polish=True).variance_of(lambda f: f(asked)[0, 0])
    assert hf.report is not None
    (report,) = hf.report.functionals
    precision = x.T @ x + 0.5 * torch.eye(2, dtype=torch.float64)
    assert float(variance) == pytest.approx(float(asked @ torch.linalg.inv(precision) @ asked.T), rel=1e-4)
    assert report.attempts == 2
    assert report.deviation == pytest.approx(0.1, rel=1e-3)


def test_what_is_missing_is_added_and_not_subtracted() -> None:
    """Where the data say nothing the curvature is the prior's, and the bound on what is missing is exact."""
    net = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(net.weight)
    data = [(torch.zeros(4, 2, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64))]
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    hf = HessianFree(net, "regression", prior_precision=2.0, method="sgd", steps=12, lr=0.1, average=0.0, momentum=0.0)
    hf.fit(data)
    with pytest.warns(NumericalWarning, match="too small, by up to"):
        variance = hf.variance_of(lambda f: f(x)[0, 0])
    assert hf.report is not None
    (report,) = hf.report.functionals
    assert float(variance) < 0.8 * 5 / 2
    assert float(variance) * (1 + report.missing) == pytest.approx(5 / 2, rel=1e-6)
    assert abs(report.bias) < 1e-6  # not converged, but quadratic: these two are told apart
