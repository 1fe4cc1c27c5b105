"""H1 to H6 of the mathematics: Hessian-free variances against the dense inverse Hessian."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.hessian_free import HessianFree
from aftermap.likelihoods import Gaussian
from tests.hessian_free.problems import PRIOR, Problem, classification, curve, fresh
from tests.laplace.problems import linear_regression, normal

FULL = pytest.mark.parametrize("method", ["lbfgs", "newton_cg"])


def fitted(problem: Problem, model: nn.Module | None = None, **options: Any) -> HessianFree:
    model = problem.model if model is None else model
    return HessianFree(model, problem.likelihood, prior_precision=problem.prior, **options).fit(problem.data)


@FULL
@pytest.mark.parametrize("step", [1e-3, 100.0, None])
def test_h1_a_linear_model_is_exact_for_any_step(method: str, step: float | None) -> None:
    model, data, _, _, precision = linear_regression()
    x = normal(3, 4, seed=6)
    features = torch.cat([x, torch.ones(3, 1, dtype=torch.float64)], 1)
    truth = features @ torch.linalg.solve(precision, features.T)
    # The default tolerance of the minimiser, 1e-7, is that of the comparison: where it stops would decide.
    hf = HessianFree(model, Gaussian(0.6), prior_precision=1.4, method=method, step=step, tolerance=1e-9).fit(data)
    rtol = 1e-5 if step == 1e-3 else 1e-7  # a smaller step stands out less from rounding
    assert_close(hf.joint(x)[1].reshape(3, 3), truth, rtol=rtol, atol=1e-9)
    assert_close(hf.variance_of(lambda f: f(x)[1, 0]), truth[1, 1], rtol=rtol, atol=1e-9)
    one_sided = HessianFree(model, Gaussian(0.6), prior_precision=1.4, method=method, step=step, symmetric=False)
    assert_close(one_sided.fit(data).variance_of(lambda f: f(x)[1, 0]), truth[1, 1], rtol=1e-4, atol=0)


def test_h1_weights_temperature_and_priors_enter_once() -> None:
    model, data, _, _, _ = linear_regression()
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    features = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    weight = torch.linspace(0.5, 2.0, len(x), dtype=torch.float64)
    prior = torch.tensor([2.0, 2.0, 2.0, 2.0, 0.7], dtype=torch.float64)
    precision = features.T @ (features * weight[:, None]) / (0.36 * 1.7) + torch.diag(prior)
    mean = torch.tensor([0.3, 0.3, 0.3, 0.3, -0.2], dtype=torch.float64)
    mode = torch.linalg.solve(precision, features.T @ (weight * y[:, 0]) / (0.36 * 1.7) + prior * mean)
    with torch.no_grad():
        model.weight.copy_(mode[None, :4])
        model.bias.copy_(mode[4:])
    hf = HessianFree(
        model,
        Gaussian(0.6),
        prior_precision={"weight": 2.0, "bias": 0.7},
        prior_mean={"weight": torch.full((1, 4), 0.3), "bias": torch.full((1,), -0.2)},
        temperature=1.7,
        tolerance=1e-9,
    ).fit([(x[:5], y[:5], weight[:5]), (x[5:], y[5:], weight[5:])])
    assert hf.map_report is not None
    assert hf.map_report.decrement < 1e-6
    row = torch.tensor([[1.0, 0.5, -2.0, 0.3]], dtype=torch.float64)
    full = torch.cat([row[0], torch.ones(1, dtype=torch.float64)])
    assert_close(hf.variance_of(lambda f: f(row).sum()), full @ torch.linalg.solve(precision, full), rtol=1e-7, atol=0)


def errors(problem: Problem, steps: list[float], symmetric: bool) -> list[float]:
    gradient = problem.jacobian()[3]  # outside the data, where the network is most curved
    truth = float(problem.truth(gradient))
    found = []
    for step in steps:
        hf = fitted(problem, step=step, symmetric=symmetric, curvature_limit=math.inf, tolerance=1e-10)
        found.append(abs(float(hf.variance_of(lambda f: f(problem.asked)[3, 0])) - truth))
    return found


@pytest.mark.parametrize("symmetric", [True, False])
def test_h2_order_of_convergence(symmetric: bool) -> None:
    steps = [0.02, 0.04, 0.08] if not symmetric else [0.05, 0.1, 0.2]
    found = errors(curve(), steps, symmetric)
    slopes = [math.log(b / a) / math.log(2) for a, b in pairwise(found)]
    for slope in slopes:
        assert slope == pytest.approx(2 if symmetric else 1, abs=0.15), found


@FULL
def test_h3_equals_the_exact_hessian_and_not_the_gauss_newton_matrix(method: str) -> None:
    problem = curve()
    gradients = problem.jacobian()[:, 0]
    exact, ggn = problem.truth(gradients), problem.truth(gradients, problem.ggn())
    hf = fitted(problem, method=method, deviation=0.02)
    found = hf.joint(problem.asked)[1].reshape(4, 4)
    sd = exact.diagonal().sqrt()
    assert float(((found - exact) / sd / sd[:, None]).abs().max()) < 5e-4
    gap = ((ggn - exact) / exact).diagonal().abs()
    assert float(gap.max()) > 0.2  # the two posteriors differ, visibly
    assert float(((found.diagonal() - exact.diagonal()) / exact.diagonal()).abs().max()) < 0.02 * float(gap.max())


def test_h3_functionals_of_any_kind_and_their_covariance() -> None:
    problem = classification()
    x = problem.asked
    functionals = [
        lambda f: f(x)[0, 2] - f(x)[1, 0],
        lambda f: f(x).softmax(-1)[:, 1].mean(),
        lambda f: f(x)[2:].logsumexp(-1),
    ]
    truth = problem.truth(problem.gradients(*[lambda f, g=g: g(f).sum() for g in functionals]))
    hf = fitted(problem, deviation=0.02)
    found = hf.variance_of(functionals)
    sd = truth.diagonal().sqrt()
    assert float(((found - truth) / sd / sd[:, None]).abs().max()) < 1e-3
    assert_close(hf.variance_of(functionals[1]), truth[1, 1], rtol=1e-3, atol=0)
    assert hf.report is not None
    assert hf.report.ok
    assert "variance" in hf.report.summary()
    assert [r.status for r in hf.report.functionals] == ["ok"]


def test_h3_functionals_of_the_weights_themselves() -> None:
    problem = curve()
    truth = torch.linalg.inv(problem.hessian())[0, 0]
    found = fitted(problem, deviation=0.02).variance_of(lambda f: f.params["0.weight"][0, 0])
    assert_close(found, truth, rtol=1e-3, atol=0)


def moved(problem: Problem, distance: float) -> tuple[nn.Module, Tensor]:
    """The network a given number of posterior standard deviations away from its minimum."""
    direction = normal(len(problem.hessian()), seed=3)
    H = problem.hessian()
    direction = direction * distance / (direction @ H @ direction).sqrt()
    model, start = fresh(problem), 0
    with torch.no_grad():
        for p in model.parameters():
            p += direction[start : start + p.numel()].reshape(p.shape)
            start += p.numel()
    return model, direction


def test_h4_drift_of_weights_that_are_not_converged() -> None:
    problem = curve()
    model, direction = moved(problem, 0.2)
    gradient = problem.jacobian()[1, 0]
    truth = float(problem.truth(gradient[None]))
    hf = fitted(problem, model, deviation=0.05)
    assert hf.map_report is not None
    assert hf.map_report.decrement == pytest.approx(0.2, rel=0.05)
    found = float(hf.variance_of(lambda f: f(problem.asked)[1, 0]))
    assert hf.report is not None
    report = hf.report.functionals[0]
    assert found == pytest.approx(truth, rel=5e-3)  # both signs: the drift cancels
    assert (report.plus - report.control) / report.step == pytest.approx(truth, rel=0.05)  # one, against the control
    naive = (report.plus - report.value) / report.step
    drift = -float(gradient @ direction) / report.step
    assert abs(naive - truth) > 0.3 * truth  # one, against the trained weights: wrong by drift / λ
    assert naive - truth == pytest.approx(drift, rel=0.1)
    assert report.drift == pytest.approx(drift * report.step, rel=0.1)


def test_h4_drift_cancels_for_a_fixed_number_of_steps() -> None:
    """Plain gradient descent that stops early drifts by the same amount with and without a push."""
    model, data, _, _, precision = linear_regression()
    row = torch.tensor([[1.0, 0.5, -2.0, 0.3]], dtype=torch.float64)
    full = torch.cat([row[0], torch.ones(1, dtype=torch.float64)])
    truth = float(full @ torch.linalg.solve(precision, full))
    model.weight.data += 0.1
    batch = [(torch.cat([data[0][0], data[1][0]]), torch.cat([data[0][1], data[1][1]]))]
    options: dict[str, Any] = {"prior_precision": 1.4, "method": "sgd", "steps": 150, "max_decrement": 5.0}
    for symmetric in (True, False):
        hf = HessianFree(model, Gaussian(0.6), symmetric=symmetric, **options).fit(batch)
        found = float(hf.variance_of(lambda f: f(row).sum()))
        assert hf.report is not None
        report = hf.report.functionals[0]
        assert found == pytest.approx(truth, rel=0.02)
        assert abs((report.plus - report.value) / report.step - truth) > 0.2 * truth


@FULL
def test_h5_rows_are_symmetric(method: str) -> None:
    problem = curve()
    hf = fitted(problem, method=method, deviation=0.02)
    mean, joint = hf.joint(problem.asked)
    assert hf.report is not None
    assert 0 < hf.report.asymmetry < 1e-3
    assert hf.report.projected < 1e-6
    assert mean.shape == (4, 1)
    assert float(torch.linalg.eigvalsh(joint.reshape(4, 4)).min()) > -1e-12


def test_h6_scaling_and_shifting_a_functional() -> None:
    problem = curve()
    hf = fitted(problem)

    def psi(f: Any) -> Tensor:
        return f(problem.asked)[2, 0]

    covariance = hf.variance_of([psi, lambda f: -3.5 * psi(f) + 11.0])
    one = covariance[0, 0]
    assert_close(covariance[1, 1], 3.5**2 * one, rtol=1e-6, atol=0)
    assert_close(covariance[0, 1], -3.5 * one, rtol=1e-6, atol=0)


def test_predictions_of_classes_against_the_dense_hessian() -> None:
    problem = classification()
    J, covariance = problem.jacobian(), torch.linalg.inv(problem.hessian())
    truth = J @ covariance @ J.mT
    hf = fitted(problem, deviation=0.02, queries=5)
    prediction = hf.predict(problem.asked)
    assert prediction.latent_cov is not None
    assert_close(prediction.latent_cov, truth, rtol=2e-3, atol=2e-3 * float(truth.diagonal(dim1=1, dim2=2).min()))
    assert prediction.latent_mean is not None
    assert_close(prediction.latent_mean, problem.model(problem.asked).detach())
    _, joint = hf.joint(problem.asked[:2])
    flat = J[:2].flatten(0, 1)
    dense = (flat @ covariance @ flat.T).reshape(joint.shape)
    assert float((joint - dense).abs().max()) < 2e-3 * float(dense.abs().max())


def test_only_the_chosen_parameters_are_uncertain() -> None:
    problem = curve()
    last = HessianFree(problem.model, problem.likelihood, params="last_layer", prior_precision=PRIOR, deviation=0.02)
    found = last.fit(problem.data).joint(problem.asked)[1].reshape(4, 4)
    # The head is linear in its own weights: its block of the exact Hessian is that of the Gauss-Newton matrix.
    J, block = problem.jacobian()[:, 0, 12:], problem.ggn()[12:, 12:]
    assert_close(found, J @ torch.linalg.solve(block, J.T), rtol=1e-5, atol=1e-9)
