"""HMC on conjugate models against the exact posterior; diagnostics; what is refused."""

import pytest
import torch
from torch import nn

from aftermap.baselines import HMC
from aftermap.errors import InputError, NotFittedError, StatisticalWarning, UnsupportedError
from aftermap.likelihoods import Gaussian
from tests.baselines.test_contract import data, make_net, seeded

pytest.importorskip("pyro")


def regression():
    generator = seeded(6)
    x = torch.randn(15, 3, dtype=torch.float64, generator=generator)
    return x, x @ torch.randn(3, 2, dtype=torch.float64, generator=generator)


def exact(x, y, noise, precision):
    """Mean [P] and covariance [P, P] of the row-major weights [2, 3]."""
    matrix = x.T @ x / noise**2 + precision * torch.eye(3, dtype=torch.float64)
    mean = torch.linalg.solve(matrix, x.T @ y / noise**2).T
    return mean.flatten(), torch.block_diag(*[torch.linalg.inv(matrix)] * 2)


@pytest.mark.parametrize("kernel, warmup, draws", [("nuts", 100, 400), ("hmc", 300, 900)])
def test_linear_regression_is_exact(kernel, warmup, draws):
    x, y = regression()
    net = nn.Linear(3, 2, bias=False).double()
    nn.init.constant_(net.weight, 0.2)
    hmc = HMC(net, Gaussian(noise=0.7), prior_precision=2.0, kernel=kernel, chains=2, warmup=warmup, draws=draws)
    hmc.fit([(x[:6], y[:6]), (x[6:], y[6:])], generator=seeded())
    mean, covariance = exact(x, y, 0.7, 2.0)
    drawn = hmc.draw_table.flatten(0, 1)
    torch.testing.assert_close(drawn.mean(0), mean, atol=0.05, rtol=0)
    torch.testing.assert_close(torch.cov(drawn.T), covariance, atol=0.012, rtol=0.2)
    diagnostics = hmc.diagnostics
    assert float(diagnostics.r_hat.max()) < 1.05
    assert float(diagnostics.effective_samples.min()) > 80
    assert min(diagnostics.acceptance) > 0.5
    # The predictive: variance of x·w, noise in total only.
    fresh = torch.randn(4, 3, dtype=torch.float64, generator=seeded(2))
    found = hmc.predict(fresh)
    variance = torch.einsum("ni,ij,nj->n", fresh, covariance[:3, :3], fresh)
    torch.testing.assert_close(found.epistemic, variance[:, None].expand(4, 2), atol=0.02, rtol=0.25)
    torch.testing.assert_close(found.total, found.epistemic + 0.49)


def test_energy_is_the_negative_log_posterior():
    x, y = data()
    net = make_net()
    hmc = HMC(net, prior_precision=0.5, params="last_layer")
    theta = torch.randn(28, dtype=torch.float64, generator=seeded())
    found = hmc.energy(theta, [_batch(x, y)])
    other = make_net()
    other[3].weight.data, other[3].bias.data = theta[:24].reshape(4, 6), theta[24:]
    expected = torch.nn.functional.cross_entropy(other(x), y, reduction="sum") + 0.25 * theta.square().sum()
    torch.testing.assert_close(found, expected.detach())


def _batch(x, y):
    from aftermap.batches import unpack_batch

    return unpack_batch((x, y))


def test_seed_repeats_and_particles_thin():
    net, batch = nn.Linear(3, 4).double(), data()
    runs = [HMC(net, chains=1, warmup=20, draws=20).fit([batch], generator=seeded(3)) for _ in range(2)]
    assert torch.equal(runs[0].draw_table, runs[1].draw_table)
    assert len(runs[0].particles(7)) == 7
    with pytest.raises(InputError, match="only 20 samples"):
        runs[0].particles(21)


def test_chains_that_disagree_warn():
    x, y = regression()
    hmc = HMC(
        nn.Linear(3, 2).double(),
        Gaussian(noise=0.01),
        chains=2,
        warmup=0,
        draws=4,
        spread=3.0,
        step_size=1e-6,
        kernel="hmc",
    )
    with pytest.warns(StatisticalWarning, match="chains disagree"):
        hmc.fit([(x, y)], generator=seeded())
    assert float(hmc.diagnostics.output_r_hat.max()) > 1.1


def test_refused():
    net = make_net()
    with pytest.raises(UnsupportedError, match="refuses BatchNorm"):
        HMC(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    with pytest.raises(UnsupportedError, match="max_params=20"):
        HMC(net, max_params=20)
    with pytest.raises(InputError, match="kernel='gibbs'"):
        HMC(net, kernel="gibbs")
    with pytest.raises(NotFittedError, match="call fit"):
        HMC(net).predict(data()[0])
