"""Deterministic, temperature, dropout and particles against brute force."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aftermap.baselines import (
    Deterministic,
    MCDropout,
    Particles,
    TemperatureScaling,
    dropout_modules,
    insert_dropout,
)
from aftermap.errors import InputError, NotFittedError, ShapeError, StatisticalWarning, UnsupportedError
from aftermap.laplace import Laplace
from aftermap.likelihoods import Gaussian
from tests.baselines.test_contract import data, make_net, seeded


def test_deterministic_is_softmax():
    net, (x, y) = make_net(), data()
    found = Deterministic(net).predict(x)
    torch.testing.assert_close(found.mean, net(x).softmax(-1).detach())
    torch.testing.assert_close(found.log_prob(y).mean(), -F.cross_entropy(net(x), y).detach())
    assert bool((found.epistemic == 0).all())


def test_deterministic_regression_has_only_noise():
    net, (x, _) = make_net(2), data("regression")
    found = Deterministic(net, Gaussian(noise=0.4)).predict(x)
    torch.testing.assert_close(found.total, torch.full((11, 2), 0.16, dtype=torch.float64))
    torch.testing.assert_close(found.mean, net(x).detach())


def test_deterministic_needs_a_module_and_outputs():
    with pytest.raises(InputError, match="needs a torch.nn.Module"):
        Deterministic("net")
    with pytest.raises(ShapeError, match="must be"):
        Deterministic(nn.Flatten(0)).predict(torch.ones(5, 3))


def test_temperature_is_the_minimum():
    generator = seeded()
    logits = 3 * torch.randn(200, 4, dtype=torch.float64, generator=generator)
    labels = torch.multinomial((logits / 2.5).softmax(-1), 1, generator=generator)[:, 0]
    found = TemperatureScaling(nn.Identity()).fit([(logits[:70], labels[:70]), (logits[70:], labels[70:])]).temperature
    nll = {t: F.cross_entropy(logits / t, labels).item() for t in (found * 0.999, found, found * 1.001)}
    assert min(nll, key=nll.get) == found
    grid = torch.linspace(0.5, 6, 400, dtype=torch.float64)
    best = grid[torch.stack([F.cross_entropy(logits / t, labels) for t in grid]).argmin()]
    assert abs(found - best) < 0.02
    assert abs(found - 2.5) < 0.5


def test_temperature_keeps_labels_and_divides_logits():
    net, (x, _) = make_net(), data()
    found = TemperatureScaling(net, temperature=1.6).predict(x)
    torch.testing.assert_close(found.mean, (net(x) / 1.6).softmax(-1).detach())
    assert torch.equal(found.labels, Deterministic(net).predict(x).labels)


def test_temperature_counts_weights_as_copies():
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0]], dtype=torch.float64)
    labels, weight = torch.tensor([0, 1]), torch.tensor([3.0, 1.0])
    repeated = (logits[[0, 0, 0, 1]], labels[[0, 0, 0, 1]])
    weighted = TemperatureScaling(nn.Identity()).fit([(logits, labels, weight)]).temperature
    assert weighted == pytest.approx(TemperatureScaling(nn.Identity()).fit([repeated]).temperature)


def test_temperature_binary():
    logits = torch.tensor([[2.0], [2.0], [2.0], [2.0]], dtype=torch.float64)
    labels = torch.tensor([[1.0], [1.0], [1.0], [0.0]], dtype=torch.float64)
    found = TemperatureScaling(nn.Identity(), "binary").fit([(logits, labels)])
    torch.testing.assert_close(found.predict(logits).mean, torch.full((4, 1), 0.75, dtype=torch.float64))


def test_temperature_bad_input():
    with pytest.raises(NotFittedError, match="call fit"):
        TemperatureScaling(make_net()).predict(data()[0])
    with pytest.raises(UnsupportedError, match="fit the noise instead"):
        TemperatureScaling(make_net(), "regression")
    with pytest.raises(InputError, match="temperature=0.0 must be a positive"):
        TemperatureScaling(make_net(), temperature=0.0)
    logits = torch.tensor([[9.0, 0.0], [0.0, 9.0]])
    with pytest.warns(StatisticalWarning, match="classified without error"):
        found = TemperatureScaling(nn.Identity()).fit([(logits, torch.tensor([0, 1]))])
    assert found.temperature == pytest.approx(1e-3)


def test_dropout_matches_a_loop_over_masks():
    net, (x, _) = make_net(), data()
    found = MCDropout(net, samples=6).predict(x, generator=seeded(4))
    seed = int(torch.randint(2**62, (1,), generator=seeded(4)))
    other = copy.deepcopy(net).eval()
    other[2].train()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        expected = torch.stack([other(x).softmax(-1) for _ in range(6)])
    torch.testing.assert_close(found.samples, expected)
    torch.testing.assert_close(found.mean, expected.mean(0))


def test_dropout_mean_and_covariance_in_closed_form():
    # w·(mask∘x)/(1-p): mean w·x, covariance p/(1-p) Σ_i x_i² w_i w_iᵀ.
    layer = nn.Linear(5, 2, bias=False).double()
    net, p = nn.Sequential(nn.Dropout(0.3), layer), 0.3
    x = torch.randn(3, 5, dtype=torch.float64, generator=seeded())
    found = MCDropout(net, "regression").predict(x, samples=20_000, generator=seeded())
    expected = p / (1 - p) * torch.einsum("ni,ci,di->ncd", x**2, layer.weight, layer.weight).detach()
    centred = found.samples - found.samples.mean(0)
    covariance = torch.einsum("snc,snd->ncd", centred, centred) / len(centred)
    torch.testing.assert_close(found.mean, layer(x).detach(), atol=0.03, rtol=0.03)
    torch.testing.assert_close(covariance, expected, atol=0.01, rtol=0.06)


def test_dropout_leaves_batch_norm_alone():
    net = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 4)).double().train()
    statistics = copy.deepcopy(net[1].state_dict())
    found = MCDropout(net, samples=3).predict(data()[0], generator=seeded())
    for name, value in net[1].state_dict().items():
        assert torch.equal(value, statistics[name])
    assert all(m.training for m in net.modules())
    assert float(found.epistemic.max()) > 0


def test_dropout_in_a_transformer_is_on():
    # In eval mode the layer takes a fused path that ignores the dropout modules inside.
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.4, batch_first=True)
    net = nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 5)).double().eval()
    x = torch.randn(4, 3, 8, dtype=torch.float64, generator=seeded())
    found = MCDropout(net, samples=5).predict(x, generator=seeded())
    assert float(found.samples.std(0).min()) > 1e-4


def test_dropout_warns_when_there_is_none():
    net = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.0))
    with pytest.warns(StatisticalWarning, match="no dropout module"):
        MCDropout(net)
    assert dropout_modules(net) == []


def test_dropout_inserted_in_a_copy():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3, 4)).double()
    changed = insert_dropout(net, 0.2)
    assert [type(m).__name__ for m in dropout_modules(changed)] == ["Dropout2d", "Dropout"]
    assert dropout_modules(net) == []
    x = torch.randn(6, 1, 5, 5, dtype=torch.float64, generator=seeded())
    torch.testing.assert_close(changed.eval()(x), net(x))
    assert MCDropout(net, insert=0.2, samples=3).predict(x).samples.shape == (3, 6, 4)
    with pytest.raises(InputError, match=r"in \(0, 1\)"):
        insert_dropout(net, 1.0)
    with pytest.raises(InputError, match="has 1 linear"):
        insert_dropout(nn.Linear(2, 3), 0.1)


def test_dropout_bad_counts():
    with pytest.raises(InputError, match="samples=.* must be a whole number"):
        MCDropout(make_net(), samples=0)
    with pytest.raises(InputError, match="samples=.* must be a whole number"):
        MCDropout(make_net()).predict(data()[0], samples=2.5)


def test_particles_average_probabilities_with_mixture():
    net, (x, _) = make_net(), data()
    sets = [{"3.weight": net[3].weight.detach() * s} for s in (1.0, -1.0, 2.0)]
    share = torch.tensor([1.0, 2.0, 1.0])
    found = Particles(net, sets, mixture=share).predict(x)
    expected = []
    for each in sets:
        other = copy.deepcopy(net)
        other[3].weight.data = each["3.weight"]
        expected.append(other(x).softmax(-1).detach())
    torch.testing.assert_close(found.mean, (expected[0] + 2 * expected[1] + expected[2]) / 4)
    torch.testing.assert_close(Particles(net, sets).predict(x, samples=2).mean, (expected[0] + expected[1]) / 2)


def test_particles_from_a_laplace_posterior():
    net, (x, y) = make_net(), data()
    la = Laplace(net, "classification").fit([(x, y)])
    fixed = Particles.from_posterior(net, la.posterior, 5, generator=seeded(2))
    expected = la.predict(x, kind="sampling", weights=la.ensemble(5, seeded(2)))
    torch.testing.assert_close(fixed.predict(x).mean, expected.mean)


def test_particles_bad_input():
    net = make_net()
    with pytest.raises(InputError, match="at least one set"):
        Particles(net, [])
    with pytest.raises(InputError, match="does not have"):
        Particles(net, [{"nothing": torch.ones(2)}])
    with pytest.raises(InputError, match="has shape"):
        Particles(net, [{"3.bias": torch.ones(2)}])
    own = {"3.bias": net[3].bias.detach()}
    with pytest.raises(InputError, match="mixture has shape"):
        Particles(net, [own], mixture=[0.5, 0.5])
    with pytest.raises(InputError, match="only 1 sets"):
        Particles(net, [own]).predict(data()[0], samples=2)
