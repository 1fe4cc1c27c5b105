"""Bayesian optimisation: acquisitions against integrals, gradients against differences, samples against their covariance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from aftermap.applications import (
    expected_improvement,
    log_expected_improvement,
    maximise,
    minimise,
    thompson_sample,
    upper_confidence_bound,
)
from aftermap.baselines import Deterministic
from aftermap.errors import DataError, InputError, NumericalError, ShapeError, UnsupportedError
from aftermap.laplace import Laplace
from aftermap.laplace.mixture import Mixture
from aftermap.likelihoods import Gaussian
from aftermap.predictive import Prediction
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import generator, linear_regression, mlp, normal, regression


def gaussian(mean: Tensor, sd: Tensor) -> Prediction:
    """A regression whose noise is large: improvement must not count it."""
    noise = torch.full_like(sd, 25.0)
    return Prediction("regression", mean, sd.square(), noise, sd.square() + noise)


def fitted(**options: object) -> Laplace:
    return Laplace(mlp(1, 6, 1), "regression", **options).fit(regression(), progress=False)


@pytest.mark.parametrize("upwards", [False, True])
def test_expected_improvement_is_the_integral(upwards: bool) -> None:
    mean, sd = normal(5, 3, seed=1), 0.2 + normal(5, 3, seed=2).abs()
    best = 0.3
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    f = mean[:, 2, None] + sd[:, 2, None] * z
    gain = (f - best if upwards else best - f).clamp_min(0)
    wanted = torch.trapezoid(gain * (-0.5 * z**2).exp() / math.sqrt(2 * math.pi), z, dim=1)
    found = expected_improvement(gaussian(mean, sd), best, maximise=upwards, output=2)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
    log = log_expected_improvement(gaussian(mean, sd), best, maximise=upwards, output=2)
    torch.testing.assert_close(log, wanted.log(), rtol=1e-6, atol=1e-8)
    sign = 1 if upwards else -1
    bound = upper_confidence_bound(gaussian(mean, sd), 1.5, maximise=upwards, output=2)
    torch.testing.assert_close(bound, sign * mean[:, 2] + 1.5 * sd[:, 2])


def test_log_expected_improvement_in_the_far_tail() -> None:
    """Against numbers of 60 digits (mpmath), across both seams; gradients are finite where the improvement is 0."""
    truth = {
        -0.99999: -2.48510198303640699,
        -1.00001: -2.48514006846107366,
        -50.0: -1258.74418286846085,
        -999.0: -499015.232451096500,
        -1001.0: -501015.236451085834,
    }
    z = torch.tensor(list(truth), dtype=torch.float64)[:, None].requires_grad_()
    found = log_expected_improvement(gaussian(-z, torch.ones_like(z)), 0.0)
    torch.testing.assert_close(found, torch.tensor(list(truth.values()), dtype=torch.float64), rtol=1e-12, atol=1e-11)
    (slope,) = torch.autograd.grad(found.sum(), z)
    near = log_expected_improvement(gaussian(-z.detach() - 1e-6, torch.ones_like(z)), 0.0)
    low = log_expected_improvement(gaussian(-z.detach() + 1e-6, torch.ones_like(z)), 0.0)
    torch.testing.assert_close(slope[:, 0], (near - low).detach() / 2e-6, rtol=1e-4, atol=1e-5)
    assert float(expected_improvement(gaussian(-z.detach(), torch.ones_like(z)), 0.0)[2]) == 0.0
    certain = gaussian(torch.zeros(1, 1), torch.zeros(1, 1))
    assert float(expected_improvement(certain, 2.0)) == pytest.approx(2.0)
    assert float(expected_improvement(certain, -2.0)) == 0.0


@pytest.mark.parametrize("structure", ["kron", "full", "diagonal"])
@pytest.mark.parametrize("name", ["ei", "log_ei", "ucb"])
def test_gradients_in_x_against_differences(structure: str, name: str) -> None:
    laplace = fitted(structure=structure)
    score = {
        "ei": lambda p: expected_improvement(p, -0.2),
        "log_ei": lambda p: log_expected_improvement(p, -0.2),
        "ucb": lambda p: upper_confidence_bound(p, 1.5),
    }[name]
    x = torch.linspace(-2.5, 2.5, 7, dtype=torch.float64)[:, None].requires_grad_()
    before = ModelSnapshot.of(laplace.model)
    (exact,) = torch.autograd.grad(score(laplace.predict(x, differentiable=True)).sum(), x)
    check_unchanged(laplace.model, before)
    step = 1e-5
    numeric = (score(laplace.predict(x.detach() + step)) - score(laplace.predict(x.detach() - step))) / (2 * step)
    torch.testing.assert_close(exact[:, 0], numeric, rtol=1e-5, atol=1e-7)


def test_thompson_samples_have_the_joint_mean_and_covariance() -> None:
    net, data, _, _, precision = linear_regression(0.6, 1.4)
    laplace = Laplace(net, Gaussian(0.6), structure="full", prior_precision=1.4).fit(data, progress=False)
    x = normal(4, 4, seed=9)
    wide = torch.cat([x, torch.ones(4, 1, dtype=torch.float64)], 1)
    cov = wide @ torch.linalg.inv(precision) @ wide.T
    drawn = thompson_sample(laplace, x, 2_500, generator=generator(2))
    # five standard errors of the mean and of each covariance
    error = 5 * (cov.diagonal() / 2_500).sqrt()
    assert bool(((drawn.values.mean(0) - net(x).detach()[:, 0]).abs() < error).all())
    spread = 5 * ((torch.outer(cov.diagonal(), cov.diagonal()) + cov.square()) / 2_500).sqrt()
    assert bool(((drawn.values.T.cov() - cov).abs() < spread).all())
    assert float(cov[0, 2]) > 5 * float(spread[0, 2])  # a correlation that independent draws would miss
    assert torch.equal(drawn.indices, drawn.values.argmin(1))
    high = thompson_sample(laplace, x, 100, maximise=True, generator=generator(2))
    assert torch.equal(high.indices, high.values.argmax(1))


def test_distinct_choices() -> None:
    laplace = fitted()
    x = torch.linspace(-2, 2, 12, dtype=torch.float64)[:, None]
    found = thompson_sample(laplace, x, 12, distinct=True, generator=generator(2))
    assert sorted(found.indices.tolist()) == list(range(12))
    assert int(found.indices[0]) == int(found.values[0].argmin())
    again = thompson_sample(laplace, x, 12, distinct=True, generator=generator(2))
    assert torch.equal(found.values, again.values)


def test_a_mixture_is_sampled_too() -> None:
    mixture = Mixture([fitted(), fitted(structure="full")], "uniform")
    assert thompson_sample(mixture, normal(5, 1), 3, generator=generator()).values.shape == (3, 5)


@pytest.mark.parametrize("name", ["log_ei", "ucb"])
def test_maximise_finds_the_best_of_a_fine_grid(name: str) -> None:
    laplace = fitted(structure="full", params="last_layer")
    score = {"log_ei": lambda p: log_expected_improvement(p, -0.2), "ucb": lambda p: upper_confidence_bound(p)}[name]
    before = ModelSnapshot.of(laplace.model)
    found = maximise(score, laplace, torch.tensor([[-2.0, 2.5]], dtype=torch.float64), raw=16, starts=6)
    check_unchanged(laplace.model, before)  # also the .grad of layers outside the posterior
    grid = torch.linspace(-2.0, 2.5, 4001, dtype=torch.float64)[:, None]
    values = score(laplace.predict(grid))
    assert found.value >= float(values.max()) - 1e-9
    assert -2.0 <= float(found.x) <= 2.5
    assert float(found.x) == pytest.approx(float(grid[values.argmax()]), abs=2e-3)
    assert found.points.shape == (6, 1)


def test_maximise_reaches_a_corner() -> None:
    net = nn.Linear(2, 1).double().eval()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, -2.0]]))
    found = maximise(
        lambda p: -p.mean[:, 0], Deterministic(net, "regression"), torch.tensor([[-1.0, 3.0], [0.0, 2.0]]).double()
    )
    torch.testing.assert_close(found.x, torch.tensor([-1.0, 2.0], dtype=torch.float64), rtol=0, atol=1e-5)


class Bumps:
    """Ridge regression on fixed radial features, at its mode: the same posterior as a Gaussian process of that kernel."""

    def __call__(self, x: Tensor, y: Tensor, generator: torch.Generator | None) -> Laplace:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("centres", torch.linspace(-0.2, 1.2, 15, dtype=torch.float64))
                self.out = nn.Linear(15, 1, bias=False).double()

            def forward(self, inputs: Tensor) -> Tensor:
                return self.out((-0.5 * ((inputs - self.centres) / 0.12).square()).exp())

        net = Net().eval()
        with torch.no_grad():
            features = (-0.5 * ((x - net.centres) / 0.12).square()).exp()
            precision = features.T @ features / 0.1**2 + 0.05 * torch.eye(15, dtype=torch.float64)
            net.out.weight.copy_(torch.linalg.solve(precision, features.T @ y / 0.1**2).T)
        return Laplace(net, Gaussian(0.1), structure="full", prior_precision=0.05).fit([(x, y)], progress=False)


def forrester(x: Tensor) -> Tensor:
    """Minimum −6.0207 at 0.7572."""
    return ((6 * x - 2).square() * (12 * x - 4).sin()).sum()


@pytest.mark.parametrize("strategy", ["expected_improvement", "upper_confidence_bound", "thompson"])
def test_minimise_finds_the_minimum_of_forrester(strategy: str) -> None:
    found = minimise(
        forrester,
        torch.tensor([[0.0, 1.0]], dtype=torch.float64),
        Bumps(),
        strategy=strategy,
        evaluations=13,
        initial=4,
        generator=generator(1),
    )
    assert found.best[1] < -5.9
    assert float(found.best[0]) == pytest.approx(0.7572, abs=0.02)
    assert len(found.y) == 13
    assert torch.equal(found.best_so_far, torch.stack([found.y[: i + 1].min() for i in range(13)]))
    assert len(found.x.unique()) == 13


def test_bad_input() -> None:
    laplace, box = fitted(), [[0.0, 1.0]]
    classes = Prediction("classification", torch.full((2, 2), 0.5), *(torch.ones(2) for _ in range(3)))
    with pytest.raises(UnsupportedError, match=r"needs a regression with outputs \[N, C\], got classification"):
        expected_improvement(classes, 0.0)
    one = gaussian(torch.zeros(2, 1), torch.ones(2, 1))
    with pytest.raises(InputError, match="output=1, but the prediction has 1 outputs"):
        upper_confidence_bound(one, output=1)
    with pytest.raises(InputError, match="beta=-1"):
        upper_confidence_bound(one, -1.0)
    with pytest.raises(UnsupportedError, match="Deterministic lacks"):
        thompson_sample(Deterministic(nn.Linear(1, 1), "regression"), torch.ones(2, 1))
    with pytest.raises(InputError, match="n=.* must be a whole number"):
        thompson_sample(laplace, normal(3, 1), 0)
    with pytest.raises(InputError, match="4 distinct choices were asked for, but there are 3"):
        thompson_sample(laplace, normal(3, 1), 4, distinct=True)
    with pytest.raises(ShapeError, match="output 2 is needed"):
        thompson_sample(laplace, normal(3, 1), output=2)
    for bad, error in (
        ([[1.0, 0.0]], InputError),
        ([0.0, 1.0], ShapeError),
        ("box", InputError),
        ([[0, math.inf]], InputError),
    ):
        with pytest.raises(error, match="bounds must be"):
            maximise(lambda p: p.mean[:, 0], laplace, bad)
    with pytest.raises(InputError, match="starts=.* must be a whole number"):
        maximise(lambda p: p.mean[:, 0], laplace, box, starts=0)
    wide = torch.tensor(box, dtype=torch.float64)
    with pytest.raises(ShapeError, match=r"one number per input, \[256\], got \[256, 1\]"):
        maximise(lambda p: p.mean, laplace, wide)
    with pytest.raises(NumericalError, match="finite at none"):
        maximise(lambda p: p.mean[:, 0] * math.nan, laplace, wide)
    with pytest.raises(InputError, match="strategy='ei' is not known; allowed are 'expected_improvement'"):
        minimise(forrester, box, Bumps(), strategy="ei", evaluations=5)
    with pytest.raises(InputError, match="initial=6 evaluations are more"):
        minimise(forrester, box, Bumps(), evaluations=5, initial=6)
    with pytest.raises(InputError, match="evaluations=0 must be"):
        minimise(forrester, box, Bumps(), evaluations=0)
    with pytest.raises(DataError, match="one finite number, got nan"):
        minimise(lambda x: math.nan, box, Bumps(), evaluations=5)
