"""Every baseline, and everything else that predicts, through the public suite."""

import pytest
import torch
from torch import nn

from aftermap.baselines import (
    HMC,
    SWAG,
    Deterministic,
    Ensemble,
    MCDropout,
    MeanField,
    Particles,
    TemperatureScaling,
)
from aftermap.laplace import Laplace
from aftermap.likelihoods import Gaussian
from aftermap.testing import check_predictor

INPUTS, OUTPUTS, N = 3, 4, 11


def make_net(outputs=OUTPUTS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        net = nn.Sequential(nn.Linear(INPUTS, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, outputs)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return net.eval()


def conv_net():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout2d(0.4), nn.Flatten(), nn.Linear(3 * 6, 5)
        ).double()


def data(kind="classification", seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, INPUTS, dtype=torch.float64, generator=generator)
    if kind == "regression":
        return x, torch.randn(N, 2, dtype=torch.float64, generator=generator)
    return x, torch.randint(OUTPUTS, (N,), generator=generator)


def seeded(seed=5):
    return torch.Generator().manual_seed(seed)


def swag(net, likelihood, batches):
    with torch.random.fork_rng():
        return SWAG(net, likelihood, rank=3, samples=4).fit(batches, epochs=4, lr=0.01)


BUILDERS = {
    "deterministic": lambda net, lik, batches: Deterministic(net, lik),
    "dropout": lambda net, lik, batches: MCDropout(net, lik, samples=5),
    "ensemble": lambda net, lik, batches: Ensemble([net, make_net(net[-1].out_features, 9)], lik),
    "mean_field": lambda net, lik, batches: MeanField(net, lik, samples=5).fit(batches, epochs=3, generator=seeded()),
    "swag": swag,
    "particles": lambda net, lik, batches: Particles(
        net, [{n: p.detach() * s for n, p in net.named_parameters()} for s in (0.9, 1.0, 1.2)], lik
    ),
    "laplace": lambda net, lik, batches: Laplace(net, lik).fit(batches),
}


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("name", BUILDERS)
def test_contract(name, kind):
    net = make_net(OUTPUTS if kind == "classification" else 2)
    likelihood = "classification" if kind == "classification" else Gaussian(noise=0.4)
    check_predictor(BUILDERS[name](net, likelihood, [data(kind)]), data(seed=2)[0])


def test_contract_temperature():
    check_predictor(TemperatureScaling(make_net(), temperature=1.7), data(seed=2)[0])


def test_contract_hmc():
    pytest.importorskip("pyro")
    net = nn.Linear(INPUTS, OUTPUTS).double()
    hmc = HMC(net, chains=2, warmup=60, draws=60).fit([data()], generator=seeded())
    check_predictor(hmc, data(seed=2)[0])


@pytest.mark.parametrize("name", ["deterministic", "dropout", "mean_field", "swag", "particles"])
def test_contract_convolutions(name):
    # Convolutions and BatchNorm: a model in training mode must come back in training mode, statistics untouched.
    net = conv_net().train()
    x = torch.randn(N, 2, 4, 5, dtype=torch.float64, generator=seeded())
    y = torch.randint(5, (N,), generator=seeded())
    predictor = BUILDERS[name](net, "classification", [(x, y)])
    check_predictor(predictor, x)
    assert net.training
