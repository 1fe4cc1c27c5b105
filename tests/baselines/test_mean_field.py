"""Mean field: the KL and ELBO in closed form, local reparametrisation, and the exact answer of linear regression."""

import math

import pytest
import torch
from torch import distributions as td
from torch import nn

from aftermap.baselines import MeanField
from aftermap.baselines.mean_field import LocalNoise, gaussian_kl, local_layers
from aftermap.errors import InputError, NotFittedError, NumericalError
from aftermap.likelihoods import Gaussian
from aftermap.params import flatten
from tests.baselines.test_contract import conv_net, data, make_net, seeded


def test_kl_against_torch():
    mean = torch.randn(3, 5, dtype=torch.float64, generator=seeded())
    deviation = torch.rand(3, 5, dtype=torch.float64, generator=seeded()) + 0.1
    q, p = td.Normal(mean, deviation), td.Normal(torch.tensor(0.3, dtype=torch.float64), 2.5**-0.5)
    torch.testing.assert_close(gaussian_kl(mean, deviation, 0.3, 2.5), td.kl_divergence(q, p).sum())


def linear_regression():
    generator = seeded(8)
    x = torch.randn(40, 3, dtype=torch.float64, generator=generator)
    other = torch.randn(40, 1, dtype=torch.float64, generator=generator)
    x = torch.cat([x, 0.6 * x[:, :1] + 0.8 * other], 1)  # correlated: marginal variances are not 1 / diagonal
    y = x @ torch.randn(4, 2, dtype=torch.float64, generator=generator) + 0.5 * torch.randn(
        40, 2, dtype=torch.float64, generator=generator
    )
    return x, y


@pytest.mark.parametrize("estimator", ["local", "weights"])
def test_elbo_of_a_linear_model(estimator):
    x, y = linear_regression()
    net = nn.Linear(4, 2, bias=False).double()
    field = MeanField(net, Gaussian(noise=0.5), prior_precision=1.7, initial_scale=0.2, estimator=estimator)
    found = field.elbo([(x[:17], y[:17]), (x[17:], y[17:])], samples=4000, generator=seeded())
    # E‖y − Wx‖² = ‖y − Mx‖² + Σ σ² x², in both outputs.
    expected_square = (y - net(x)).square().sum() + 2 * 0.2**2 * x.square().sum()
    fit = -0.5 * expected_square / 0.25 - y.numel() * math.log(0.5 * math.sqrt(2 * math.pi))
    exact = (fit - gaussian_kl(net.weight, torch.full_like(net.weight, 0.2), 0.0, 1.7)).item()
    assert found == pytest.approx(exact, rel=0.01)


def test_exact_optimum_of_linear_regression():
    # Optimal mean-field: the posterior's mean, and variances 1 / diagonal of the precision (not the marginals).
    x, y = linear_regression()
    net = nn.Linear(4, 2, bias=False).double()
    field = MeanField(net, Gaussian(noise=0.5), prior_precision=1.3, initial_scale=0.05)
    field.fit([(x, y)], epochs=1500, lr=0.03, samples=2, generator=seeded())
    precision = x.T @ x / 0.25 + 1.3 * torch.eye(4, dtype=torch.float64)
    exact_mean = torch.linalg.solve(precision, x.T @ y / 0.25).T
    exact_deviation = precision.diagonal().rsqrt().expand(2, 4)
    torch.testing.assert_close(field.mean["weight"], exact_mean, atol=0.03, rtol=0.03)
    torch.testing.assert_close(field.deviation["weight"], exact_deviation, atol=0.0, rtol=0.08)


def test_local_noise_has_the_moments_of_random_weights():
    layer = nn.Linear(3, 2).double()
    means = {n: p.detach() for n, p in layer.named_parameters()}
    deviations = {n: torch.rand(p.shape, dtype=torch.float64, generator=seeded()) for n, p in means.items()}
    x = torch.randn(5, 3, dtype=torch.float64, generator=seeded(3))
    layers = local_layers(layer, means, x)
    with LocalNoise(means, deviations, layers, seeded()):
        drawn = torch.stack([torch.func.functional_call(layer, means, (x,)) for _ in range(6000)])
    variance = x**2 @ deviations["weight"].T ** 2 + deviations["bias"] ** 2
    torch.testing.assert_close(drawn.mean(0), layer(x).detach(), atol=0.06, rtol=0)
    torch.testing.assert_close(drawn.var(0), variance, atol=0, rtol=0.08)
    # Draws of two examples are independent, those of one weight draw would not be.
    centred = drawn - drawn.mean(0)
    assert float((centred[:, 0] * centred[:, 1]).mean(0).abs().max()) < 0.08


def test_local_layers_are_used_once_and_on_vectors():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 4), nn.Linear(4, 2, bias=False)

        def forward(self, x):
            return self.c(self.b(self.a(self.a(x))))

    net = Net().double()
    params = dict(net.named_parameters())
    vectors = torch.ones(5, 3, dtype=torch.float64)
    assert local_layers(net, params, vectors) == {"b.weight": "b.bias", "c.weight": None}
    assert local_layers(net, params, vectors[:, None]) == {}


def test_sample_moments_and_particles():
    field = MeanField(make_net(), initial_scale=0.3)
    drawn = field.sample(20_000, seeded())
    flat = torch.cat([drawn[n].flatten(1) for n in field.mean], 1)
    covariance = torch.cov(flat.T)
    torch.testing.assert_close(flat.mean(0), flatten(field.mean), atol=0.015, rtol=0)
    torch.testing.assert_close(covariance, 0.09 * torch.eye(len(covariance), dtype=torch.float64), atol=0.006, rtol=0)
    assert len(field.particles(4, seeded())) == 4


def test_fit_leaves_the_model_alone_and_splits_agree():
    net, (x, y) = make_net(), data()
    before = {n: p.clone() for n, p in net.named_parameters()}
    field = MeanField(net, initial_scale=1e-6).fit([(x[:4], y[:4]), (x[4:], y[4:])], epochs=2, generator=seeded())
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())
    assert field.n_data == 11
    assert all(torch.equal(p, field.mean[n]) for n, p in field.model.named_parameters())
    assert not torch.equal(field.mean["3.bias"], before["3.bias"])
    # The KL is counted once for all data, whatever the batches: with weights that stand for copies too.
    weighted = MeanField(net, initial_scale=0.1)
    copies = weighted.elbo([(x, y, torch.full((11,), 2.0))], samples=1, generator=seeded())
    single = weighted.elbo([(x, y)], samples=1, generator=seeded())
    kl = weighted.kl().item()
    assert copies + kl == pytest.approx(2 * (single + kl))


def test_learns_with_convolutions_and_batch_norm():
    net = conv_net()
    x = torch.randn(11, 2, 4, 5, dtype=torch.float64, generator=seeded())
    y = torch.randint(5, (11,), generator=seeded())
    field = MeanField(net).fit([(x, y)], epochs=60, lr=0.02, generator=seeded())
    assert field.history[-1] < field.history[0]
    assert not torch.equal(field.model[1].running_mean, net[1].running_mean)


def test_bad_input():
    net, (x, y) = make_net(), data()
    with pytest.raises(NotFittedError, match="call fit"):
        MeanField(net).predict(x)
    with pytest.raises(InputError, match="estimator='flipout'"):
        MeanField(net, estimator="flipout")
    with pytest.raises(InputError, match="prior_precision=-1.0 must be"):
        MeanField(net, prior_precision=-1.0)
    with pytest.raises(InputError, match="epochs=0 must be"):
        MeanField(net).fit([(x, y)], epochs=0)
    with pytest.raises(NumericalError, match="lower lr"):
        MeanField(make_net(2), "regression").fit([(x, torch.full((11, 2), 1e200, dtype=torch.float64))], epochs=1)
