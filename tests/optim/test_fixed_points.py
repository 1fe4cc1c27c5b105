"""Fixed points on Bayesian linear regression: what each estimate of the curvature converges to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from aftermap.likelihoods import Gaussian
from aftermap.optim import IVON, OGN, VOGN
from tests.optim.problems import Regression, make_regression, run


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def variance(opt: VOGN | OGN | IVON, weight: Tensor) -> Tensor:
    """σ² by the formula of equation (1), from the optimiser's state."""
    group = opt.param_groups[0]
    n, tau = opt.settings.n_effective, opt.temperature
    return tau / n / (opt.state[weight]["curvature"] + tau * group["prior_precision"] / n + group["damping"])


def ggn(problem: Regression, **options: object) -> tuple[VOGN, torch.nn.Linear]:
    net = problem.model()
    opt = VOGN(
        net,
        lr=0.1,
        n_data=problem.n_data,
        curvature="ggn",
        likelihood=Gaussian(noise=problem.noise),
        prior_precision=problem.prior,
        damping=0.0,
        momentum=0.0,
        generator=generator(),
        **options,  # type: ignore[arg-type]
    )
    return opt, net


def test_v1_ggn_finds_the_exact_posterior_of_an_orthogonal_design() -> None:
    problem = make_regression(orthogonal=True)
    opt, net = ggn(problem)
    (mean,) = run(opt, lambda: problem.loss(net), 1200, average_last=600)
    exact = torch.linalg.inv(problem.precision()).diagonal().expand(3, 4)
    assert_close(variance(opt, net.weight), exact, rtol=1e-8, atol=0)
    assert_close((mean - problem.mean()) / exact.sqrt(), torch.zeros_like(mean), rtol=0, atol=0.15)


def test_v2_ggn_finds_the_mean_field_optimum_of_a_correlated_design() -> None:
    problem = make_regression(orthogonal=False)
    opt, net = ggn(problem)
    run(opt, lambda: problem.loss(net), 20)
    precision = problem.precision()
    assert_close(variance(opt, net.weight), (1 / precision.diagonal()).expand(3, 4), rtol=1e-8, atol=0)
    marginal = torch.linalg.inv(precision).diagonal()
    assert bool((variance(opt, net.weight)[0] <= marginal).all())


def test_v3_squares_satisfy_their_fixed_point() -> None:
    problem = make_regression(orthogonal=False, prior=5.0)
    net = problem.model()
    with torch.no_grad():
        net.weight.copy_(problem.mean())  # far away the squares are huge and the way is long
    opt = VOGN(
        net,
        lr=0.05,
        n_data=problem.n_data,
        prior_precision=problem.prior,
        damping=0.0,
        momentum=0.0,
        new_curvature_weight=0.02,
        mc_samples=4,
        generator=generator(),
    )
    for _ in range(300):
        opt.step(lambda: problem.loss(net))
    opt.param_groups[0].update(lr=2e-3, new_curvature_weight=2e-3)
    found = torch.zeros_like(net.weight)
    for step in range(1500):
        opt.step(lambda: problem.loss(net))
        if step >= 700:
            found += opt.state[net.weight]["curvature"] / 800
    sigma2 = variance(opt, net.weight).detach()  # [3, 4]
    residual = (problem.x @ net.weight.detach().T - problem.y).square()  # [n, 3]
    spread = problem.x.square() @ sigma2.T
    expected = (residual + spread).T @ problem.x.square() / problem.noise**4 / problem.n_data
    assert_close(found, expected, rtol=0.03, atol=0)


@pytest.mark.parametrize("tau", [0.25, 3.0])
def test_v4_temperature_gives_the_tempered_posterior(tau: float) -> None:
    problem = make_regression(orthogonal=True, prior=40.0)
    opt, net = ggn(problem, temperature=tau)
    run(opt, lambda: problem.loss(net), 5)
    exact = (1 / problem.precision(tau).diagonal()).expand(3, 4)
    assert_close(variance(opt, net.weight), exact, rtol=1e-8, atol=0)


def test_v4_mean_of_the_tempered_posterior() -> None:
    problem = make_regression(orthogonal=True, prior=40.0)
    opt, net = ggn(problem, temperature=0.25, mc_samples=2)
    (mean,) = run(opt, lambda: problem.loss(net), 800, average_last=400)
    sd = float((1 / problem.precision(0.25).diagonal()).sqrt().min())
    assert_close(mean, problem.mean(0.25), rtol=0, atol=0.1 * sd)


def test_v4_the_posters_form_has_its_own_fixed_point() -> None:
    problem, tau = make_regression(orthogonal=True, prior=40.0), 0.25
    opt, net = ggn(problem, temperature=tau, form="published", new_curvature_weight=0.5)
    run(opt, lambda: problem.loss(net), 300)
    h = problem.x.square().sum(0) / problem.noise**2 / problem.n_data
    assert_close(opt.state[net.weight]["curvature"], (h / tau).expand(3, 4), rtol=1e-6, atol=0)
    assert opt.noise_scale() == pytest.approx(problem.n_data**-0.5)


def test_damping_narrows_the_posterior_and_leaves_the_mean() -> None:
    problem = make_regression(orthogonal=True)
    opt, net = ggn(problem)
    opt.param_groups[0]["damping"] = 0.3
    (mean,) = run(opt, lambda: problem.loss(net), 1500, average_last=700)
    (effective,) = opt.effective_prior_precision()
    assert effective == pytest.approx(problem.prior + problem.n_data * 0.3)
    wide = problem.precision().diagonal() - problem.prior + effective
    assert_close(variance(opt, net.weight), (1 / wide).expand(3, 4), rtol=1e-8, atol=0)
    assert_close((mean - problem.mean()) * wide.sqrt(), torch.zeros_like(mean), rtol=0, atol=0.15)


@pytest.mark.parametrize("tau", [1.0, 0.25])
def test_ivon_finds_the_mean_field_optimum(tau: float) -> None:
    problem = make_regression(orthogonal=False)
    net = problem.model()
    opt = IVON(
        net,
        lr=0.1,
        n_data=problem.n_data,
        prior_precision=problem.prior,
        initial_curvature=1.0,
        new_curvature_weight=0.02,
        rescale_lr=False,
        temperature=tau,
        mc_samples=2,
        generator=generator(),
    )
    run(opt, lambda: problem.loss(net), 800)
    opt.param_groups[0]["lr"] = 0.02
    opt.param_groups[0]["new_curvature_weight"] = 2e-3
    ratios = torch.zeros_like(net.weight)
    mean = torch.zeros_like(net.weight)
    for _ in range(2000):
        opt.step(lambda: problem.loss(net))
        ratios += variance(opt, net.weight) * problem.precision(tau).diagonal() / 2000
        mean += net.weight.detach() / 2000
    assert_close(ratios.mean(), torch.ones((), dtype=torch.float64), rtol=0.02, atol=0)
    sd = (1 / problem.precision(tau).diagonal()).sqrt()
    assert_close(mean / sd, problem.mean(tau) / sd, rtol=0, atol=0.25)


def test_ogn_finds_the_map() -> None:
    problem = make_regression(orthogonal=False)
    net = problem.model()
    opt = OGN(net, lr=0.3, n_data=problem.n_data, prior_precision=problem.prior, damping=1.0, momentum=0.5)
    for _ in range(1500):
        opt.step(lambda: problem.loss(net))
    assert_close(net.weight.detach(), problem.mean(), rtol=1e-4, atol=1e-5)
