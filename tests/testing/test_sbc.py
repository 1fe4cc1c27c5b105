"""Simulation-based calibration of the methods: uniform where they are exact, and the deviation where they are not."""

import pytest
import torch
from scipy import stats
from torch import nn

from aftermap.baselines import HMC, MeanField
from aftermap.errors import InputError, ShapeError
from aftermap.laplace import Laplace
from aftermap.likelihoods import Gaussian
from aftermap.testing import CalibrationRanks, simulation_based_calibration

INPUTS, N, NOISE, PRECISION = 3, 8, 0.7, 1.5


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def design(generator):
    x = torch.randn(N, INPUTS, dtype=torch.float64, generator=generator)
    return torch.cat(
        [x, x[:, :1] + 0.5 * x[:, 1:2] + 0.2 * torch.randn(N, 1, dtype=torch.float64, generator=generator)], 1
    )


def simulate_regression(generator):
    x = design(generator)
    theta = PRECISION**-0.5 * torch.randn(INPUTS + 1, dtype=torch.float64, generator=generator)
    y = (x @ theta + NOISE * torch.randn(N, dtype=torch.float64, generator=generator))[:, None]
    return theta, (x, y)


def regression_mode(x, y):
    matrix = x.T @ x / NOISE**2 + PRECISION * torch.eye(INPUTS + 1, dtype=torch.float64)
    net = nn.Linear(INPUTS + 1, 1, bias=False).double()
    net.weight.data = torch.linalg.solve(matrix, x.T @ y / NOISE**2).T.contiguous()
    return net


def laplace_sampler(structure):
    def sample(data, count, generator):
        net = regression_mode(*data)
        la = Laplace(net, Gaussian(noise=NOISE), structure=structure, prior_precision=PRECISION).fit([data])
        return la.sample(count, generator)["weight"].flatten(1)

    return sample


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac"])
def test_exact_on_linear_regression(structure):
    found = simulation_based_calibration(
        simulate_regression, laplace_sampler(structure), runs=150, n_samples=49, generator=seeded()
    )
    assert float(found.p_value().min()) > 0.01
    assert float((found.spread_ratio() - 1).abs().max()) < 0.12


def test_diagonal_is_overconfident_on_correlated_inputs():
    found = simulation_based_calibration(
        simulate_regression, laplace_sampler("diagonal"), runs=150, n_samples=49, generator=seeded()
    )
    assert float(found.spread_ratio()[0]) > 1.15
    assert float(found.p_value().min()) < 0.01


def test_mean_field_is_overconfident_on_correlated_inputs():
    # The best mean-field posterior in closed form: the right mean, variances 1 / diagonal of the precision.
    def sample(data, count, generator):
        x, y = data
        field = MeanField(regression_mode(x, y), Gaussian(noise=NOISE), prior_precision=PRECISION)
        precision = x.square().sum(0) / NOISE**2 + PRECISION
        field._rho["weight"].data = torch.log(torch.expm1(precision.rsqrt()))[None]
        return field.sample(count, generator)["weight"].flatten(1)

    found = simulation_based_calibration(simulate_regression, sample, runs=150, n_samples=49, generator=seeded())
    assert float(found.spread_ratio()[0]) > 1.15


def simulate_logistic(generator):
    x = 2 * design(generator)
    theta = PRECISION**-0.5 * torch.randn(INPUTS + 1, dtype=torch.float64, generator=generator)
    y = (torch.rand(N, dtype=torch.float64, generator=generator) < (x @ theta).sigmoid()).double()[:, None]
    return theta, (x, y)


def logistic_mode(x, y):
    net = nn.Linear(INPUTS + 1, 1, bias=False).double()
    nn.init.zeros_(net.weight)
    for _ in range(30):  # Newton's method
        p = net(x).sigmoid().detach()
        gradient = x.T @ (p - y) + PRECISION * net.weight.data.T
        hessian = x.T @ (p * (1 - p) * x) + PRECISION * torch.eye(INPUTS + 1, dtype=torch.float64)
        net.weight.data -= torch.linalg.solve(hessian, gradient).T
    return net


def test_laplace_is_nearly_exact_on_logistic_regression():
    def sample(data, count, generator):
        la = Laplace(logistic_mode(*data), "binary", structure="full", prior_precision=PRECISION).fit([data])
        return la.sample(count, generator)["weight"].flatten(1)

    found = simulation_based_calibration(simulate_logistic, sample, runs=150, n_samples=49, generator=seeded())
    # Not exact: the deviation is reported, and small.
    assert float(found.deviation().max()) < 0.15
    assert float((found.spread_ratio() - 1).abs().max()) < 0.2


@pytest.mark.slow
def test_hmc_is_exact_on_logistic_regression():
    pytest.importorskip("pyro")

    def sample(data, count, generator):
        net = logistic_mode(*data)
        hmc = HMC(net, "binary", prior_precision=PRECISION, chains=1, warmup=60, draws=4 * count, step_size=0.3)
        return hmc.fit([data], generator=generator).draw_table[0, ::4]

    found = simulation_based_calibration(simulate_logistic, sample, runs=40, n_samples=19, generator=seeded())
    assert float(found.p_value().min()) > 0.005


def test_deviation_and_p_value_against_scipy():
    ranks = torch.randint(100, (300, 2), generator=seeded())
    found = CalibrationRanks(ranks, 99)
    for column in range(2):
        # Jittered within their cell, ranks are continuous: scipy's statistic is then close.
        values = ((ranks[:, column] + torch.rand(300, generator=seeded(1))) / 100).numpy()
        expected = stats.kstest(values, "uniform")
        assert float(found.deviation()[column]) == pytest.approx(expected.statistic, abs=0.011)
    scaled = CalibrationRanks(torch.arange(100)[:, None].repeat(1, 1), 99)
    assert float(scaled.deviation()) == pytest.approx(0.0, abs=1e-12)
    assert float(scaled.p_value()) == 1.0
    assert float(scaled.spread_ratio()) == pytest.approx(1.0, abs=0.01)
    assert torch.equal(scaled.histogram(5), torch.full((1, 5), 20))


def test_bad_input():
    with pytest.raises(InputError, match="runs=3 must be a whole number of at least 10"):
        simulation_based_calibration(simulate_regression, laplace_sampler("full"), runs=3)
    with pytest.raises(ShapeError, match="sample"):
        simulation_based_calibration(simulate_regression, lambda data, count, generator: torch.zeros(count, 2), runs=10)
