"""Ensembles: mixture moments, and members that depend on their seed only."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aftermap.baselines import Ensemble
from aftermap.errors import InputError, ShapeError
from aftermap.likelihoods import HeteroscedasticGaussian
from tests.baselines.test_contract import data, make_net, seeded


def factory():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def train(model, generator):
    x, y = data()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        order = torch.randperm(len(x), generator=generator)[:7]
        optimiser.zero_grad()
        F.cross_entropy(model(x[order]), y[order]).backward()
        optimiser.step()


def fail(model, generator):
    raise RuntimeError("no memory left")


def test_mixture_of_probabilities():
    nets, (x, _) = [make_net(seed=s) for s in range(3)], data()
    found = Ensemble(nets).predict(x)
    torch.testing.assert_close(found.mean, torch.stack([n(x).softmax(-1) for n in nets]).mean(0).detach())


def test_mixture_moments_of_a_regression():
    nets, (x, _) = [make_net(4, seed=s) for s in range(3)], data()
    likelihood = HeteroscedasticGaussian()
    found = Ensemble(nets, likelihood).predict(x)
    outputs = torch.stack([n(x) for n in nets]).detach()
    mean, variance = likelihood.mean(outputs), likelihood.variance(outputs)
    torch.testing.assert_close(found.mean, mean.mean(0))
    torch.testing.assert_close(found.total, (variance + mean**2).mean(0) - mean.mean(0) ** 2)


def test_members_depend_on_their_seed_only():
    state = torch.get_rng_state()
    three, two = Ensemble.train(factory, train, 3, seed=4), Ensemble.train(factory, train, 2, seed=4)
    assert torch.equal(state, torch.get_rng_state())
    for a, b in zip(two.models, three.models, strict=False):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    weights = [m[0].weight for m in three.models]
    assert not torch.equal(weights[0], weights[1])
    other = Ensemble.train(factory, train, 1, seed=5)
    assert not torch.equal(other.models[0][0].weight, weights[0])


def test_processes_give_the_same_members():
    here = Ensemble.train(factory, train, 2, seed=4)
    there = Ensemble.train(factory, train, 2, seed=4, processes=2)
    for a, b in zip(here.models, there.models, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    with pytest.raises(RuntimeError, match="no memory left"):
        Ensemble.train(factory, fail, 1, processes=1)


def test_bad_input():
    with pytest.raises(InputError, match="at least one model"):
        Ensemble([])
    with pytest.raises(InputError, match="needs a torch.nn.Module"):
        Ensemble([make_net(), "other"])
    with pytest.raises(ShapeError, match="outputs of one shape"):
        Ensemble([make_net(4), make_net(5)]).predict(data()[0])
    with pytest.raises(InputError, match="has 1 networks"):
        Ensemble([make_net()]).predict(data()[0], samples=3, generator=seeded())
    with pytest.raises(InputError, match="members=0 must be"):
        Ensemble.train(factory, train, 0)
