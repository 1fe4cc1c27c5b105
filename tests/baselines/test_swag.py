"""SWAG: moments of the collected weights, covariance of the samples, BatchNorm."""

import pytest
import torch
from torch import nn

from aftermap.baselines import SWAG, MeanField
from aftermap.errors import DataError, InputError, NotFittedError, StatisticalWarning
from aftermap.models import update_bn
from tests.baselines.test_contract import conv_net, data, make_net, seeded


def collected(count=6, rank=4):
    net = nn.Linear(3, 2).double()
    swag, iterates = SWAG(net, rank=rank), []
    generator = seeded()
    for _ in range(count):
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(5 + torch.randn(p.shape, dtype=torch.float64, generator=generator))
        iterates.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        swag.collect(net)
    return swag, torch.stack(iterates)


def flat(params, lead=0):
    return torch.cat([v.flatten(lead) for v in params.values()], lead)


def test_moments_of_the_iterates():
    swag, iterates = collected()
    torch.testing.assert_close(flat(swag.mean), iterates.mean(0))
    torch.testing.assert_close(flat(swag.variance), iterates.var(0, correction=0))


def test_sample_mean_and_covariance():
    swag, iterates = collected()
    running = torch.stack([iterates[: i + 1].mean(0) for i in range(len(iterates))])
    columns = (iterates - running)[-4:]
    expected = 0.5 * (iterates.var(0, correction=0).diag() + columns.T @ columns / 3)  # Maddox et al., eq. (1)
    drawn = flat(swag.sample(60_000, seeded(4)), 1)
    torch.testing.assert_close(drawn.mean(0), iterates.mean(0), atol=0.02, rtol=0)
    torch.testing.assert_close(torch.cov(drawn.T), expected, atol=0.03, rtol=0.04)


def test_rank_zero_is_diagonal():
    swag, iterates = collected(rank=0)
    drawn = flat(swag.sample(40_000, seeded(4)), 1)
    expected = 0.5 * iterates.var(0, correction=0).diag()
    torch.testing.assert_close(torch.cov(drawn.T), expected, atol=0.02, rtol=0.04)


def test_fit_lowers_the_loss_and_leaves_the_model_alone():
    net, (x, y) = make_net(), data()
    before = [p.detach().clone() for p in net.parameters()]
    swag = SWAG(net, rank=3).fit([(x, y)], epochs=30, lr=0.05, collect_every=2)
    assert swag.collected == 15
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    better = swag.predict(x, samples=20, generator=seeded()).log_prob(y).mean()
    assert better > net(x).log_softmax(-1).gather(1, y[:, None]).mean()


def test_generator_governs_dropout():
    net, batch = make_net(), data()
    state = torch.get_rng_state()
    runs = [flat(SWAG(net).fit([batch], epochs=3, lr=0.05, generator=seeded(s)).mean) for s in (1, 1, 2)]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_batch_norm_of_each_particle():
    net = conv_net()
    x = torch.randn(11, 2, 4, 5, dtype=torch.float64, generator=seeded())
    y = torch.randint(5, (11,), generator=seeded())
    swag = SWAG(net, rank=2).fit([(x, y)], epochs=4, lr=0.05)
    particles = swag.particles(3, seeded(), data=[(x[:5], y[:5]), (x[5:], y[5:])])
    for weights in particles.weights:
        features = torch.nn.functional.conv2d(x, weights["0.weight"], weights["0.bias"])
        expected = torch.stack([features[:5].mean((0, 2, 3)), features[5:].mean((0, 2, 3))]).mean(0)
        torch.testing.assert_close(weights["1.running_mean"], expected)
    momentum = net[1].momentum
    update_bn(net, [(x, y)])
    assert net[1].momentum == momentum


def test_bad_input():
    net, (x, y) = make_net(), data()
    with pytest.raises(NotFittedError, match="no weights have been collected"):
        SWAG(net).predict(x)
    with pytest.raises(InputError, match="other parameters"):
        SWAG(net).collect().collect(make_net(5))
    with pytest.raises(InputError, match="rank=-1 must be"):
        SWAG(net, rank=-1)
    with pytest.warns(StatisticalWarning, match="fewer than two"):
        swag = SWAG(net).fit([(x, y)], epochs=1)
    assert swag.collected == 1


def test_data_that_can_be_read_once_are_refused_before_training() -> None:
    net = nn.Linear(3, 2)
    batch = (torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
    with pytest.raises(DataError, match="SWAG.*reads data more than once"):
        SWAG(net).fit((b for b in [batch]), epochs=2)
    with pytest.raises(DataError, match="mean-field training .* reads data more than once"):
        MeanField(net).fit((b for b in [batch]), epochs=1)
