"""One call for every posterior: variance_of against g Σ gᵀ with the dense covariance, and the order between posteriors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from aftermap.errors import InputError, NumericalWarning
from aftermap.hessian_free import HessianFree
from aftermap.laplace import Laplace
from aftermap.posteriors.dual import DualPosterior
from aftermap.predictive import PosteriorPredictor
from aftermap.testing import ModelSnapshot, check_posterior, check_unchanged
from tests.hessian_free.problems import PRIOR, Problem, classification, curve
from tests.laplace.problems import generator

SAMPLES = 250


def laplace(problem: Problem, **options: Any) -> Laplace:
    return Laplace(problem.model, problem.likelihood, prior_precision=PRIOR, **options).fit(
        problem.data, progress=False
    )


def exact(problem: Problem) -> Laplace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # of the data alone the Hessian is indefinite
        return laplace(problem, structure="hessian")


def sampled(problem: Problem) -> PosteriorPredictor:
    posterior = laplace(problem, structure="matrix_free").posterior.with_settings(kind="samples", samples=SAMPLES)
    return PosteriorPredictor(problem.model, posterior, problem.likelihood)


def dual(problem: Problem) -> PosteriorPredictor:
    posterior = DualPosterior.from_data(problem.model, problem.data, problem.likelihood, PRIOR)
    return PosteriorPredictor(problem.model, posterior, problem.likelihood)


def hessian_free(problem: Problem) -> HessianFree:
    return HessianFree(problem.model, problem.likelihood, prior_precision=PRIOR, deviation=0.02).fit(problem.data)


# method -> (how it is made, the precision it stands for; None: its own, relative tolerance in units of √(C_ii C_jj))
METHODS: dict[str, tuple[Callable[[Problem], Any], str | None, float]] = {
    "hessian_free": (hessian_free, "hessian", 1e-3),
    "exact Hessian": (exact, "hessian", 1e-8),
    "full": (lambda p: laplace(p, structure="full"), "ggn", 1e-8),
    "conjugate gradients": (lambda p: laplace(p, structure="matrix_free"), "ggn", 1e-6),
    "dual": (dual, "ggn", 1e-8),
    "low rank": (lambda p: laplace(p, structure="low_rank", rank=50), "ggn", 1e-6),
    "sample-then-optimise": (sampled, "ggn", 4.5 * math.sqrt(2 / SAMPLES)),
    "kron": (lambda p: laplace(p, structure="kron"), None, 1e-8),
    "ekfac": (lambda p: laplace(p, structure="ekfac"), None, 1e-8),
    "kfra": (lambda p: laplace(p, structure="kfra"), None, 1e-8),
    "diagonal": (lambda p: laplace(p, structure="diagonal"), None, 1e-8),
    "last layer": (lambda p: laplace(p, structure="full", params="last_layer"), None, 1e-8),
}


def functionals(x: Tensor) -> list[Any]:
    """An output, a contrast between inputs, a mean over a region, a function of outputs that is not linear."""
    return [
        lambda f: f(x)[0, 0],
        lambda f: f(x)[1, 0] - f(x)[2, 0],
        lambda f: f(x)[:, 0].mean(),
        lambda f: torch.sigmoid(f(x)[1:2, :1]),
    ]


def truth(problem: Problem, made: Any, which: str | None) -> Tensor:
    gradients = problem.gradients(*[lambda f, g=g: g(f).sum() for g in functionals(problem.asked)])
    if which is not None:
        return problem.truth(gradients, problem.hessian() if which == "hessian" else problem.ggn())
    names, start, places = made.posterior.names, 0, []
    for name, p in problem.model.named_parameters():
        places += list(range(start, start + p.numel())) if name in names else []
        start += p.numel()
    return problem.truth(gradients[:, places], made.posterior.to_dense())


@pytest.mark.parametrize("make", [curve, classification])
@pytest.mark.parametrize("method", list(METHODS))
def test_every_posterior_answers_the_same_call(method: str, make: Any) -> None:
    problem = make()
    build, which, tolerance = METHODS[method]
    made = build(problem)
    asked = functionals(problem.asked)
    before = ModelSnapshot.of(problem.model)
    covariance = made.variance_of(asked)
    expected = truth(problem, made, which)
    sd = expected.diagonal().sqrt()
    assert covariance.shape == (4, 4)
    assert covariance.dtype == torch.float64
    assert float(((covariance - expected) / sd / sd[:, None]).abs().max()) < tolerance
    single = made.variance_of(asked[1])
    assert single.shape == ()
    assert_close(single, covariance[1, 1], rtol=1e-6, atol=0)
    check_unchanged(problem.model, before)


def test_order_between_posteriors() -> None:
    problem = classification()
    asked = functionals(problem.asked)
    full = laplace(problem, structure="full").variance_of(asked)
    last = laplace(problem, structure="full", params="last_layer").variance_of(asked)
    truncated = laplace(problem, structure="low_rank", rank=5).variance_of(asked)
    # In the order of matrices, not only of their diagonals.
    assert float(torch.linalg.eigvalsh(full - last).min()) > -1e-10
    assert float(torch.linalg.eigvalsh(truncated - full).min()) > -1e-10
    assert float((full - last).diagonal().min()) > 0.01 * float(full.diagonal().min())
    assert float((truncated - full).diagonal().max()) > 0.01 * float(full.diagonal().max())
    prior = problem.gradients(*[lambda f, g=g: g(f).sum() for g in asked])
    assert float(torch.linalg.eigvalsh(prior @ prior.T / PRIOR - truncated).min()) > -1e-10


def test_outputs_agree_with_predictions() -> None:
    problem = classification()
    made = laplace(problem, structure="kron")
    cov = made.predict(problem.asked).latent_cov
    assert cov is not None
    found = made.variance_of([lambda f, k=k: f(problem.asked)[2, k] for k in range(4)])
    assert_close(found, cov[2], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("structure", ["kron", "matrix_free"])
def test_bad_functionals_are_named_by_every_posterior(structure: str) -> None:
    problem = curve()
    made = laplace(problem, structure=structure)
    with pytest.raises(InputError, match="not scalar"):
        made.variance_of(lambda f: f(problem.asked))
    with pytest.raises(InputError, match="does not depend on the parameters"):
        made.variance_of(lambda f: torch.ones(()))
    with pytest.raises(InputError, match="does not depend on the parameters 2.weight, 2.bias"):
        laplace(problem, structure="full", params="last_layer").variance_of(
            lambda f: problem.model[0](problem.asked).sum()  # type: ignore[index]
        )


@pytest.mark.parametrize("make", [curve, classification])
def test_the_dual_posterior_is_a_posterior(make: Any) -> None:
    problem = make()
    posterior = DualPosterior.from_data(problem.model, problem.data, problem.likelihood, PRIOR, scale=0.7)
    matrix = problem.ggn() - PRIOR * torch.eye(posterior.n_params, dtype=torch.float64)
    assert_close(posterior.to_dense(), 0.7 * matrix + PRIOR * torch.eye(len(matrix), dtype=torch.float64))
    check_posterior(posterior, generator(1))
    predictor = PosteriorPredictor(problem.model, posterior, problem.likelihood)
    full = Laplace(problem.model, problem.likelihood, structure="full", prior_precision=PRIOR, temperature=1 / 0.7)
    expected = full.fit(problem.data, progress=False).predict(problem.asked, generator=generator(3))
    assert_close(predictor.predict(problem.asked, generator=generator(3)).epistemic, expected.epistemic)
    assert_close(predictor.predict(problem.asked, diagonal=True).latent_var, expected.latent_var)
    with pytest.raises(InputError, match="scale"):
        DualPosterior.from_data(problem.model, problem.data, problem.likelihood, scale=0.0)
