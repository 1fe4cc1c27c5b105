"""Attacks: the gradient of the log of the averaged predictive, exact steps, zero-range dimensions, what is refused."""

import pytest
import torch
from torch import nn

from aftermap.baselines import Deterministic, Ensemble, MCDropout, Particles
from aftermap.errors import DataError, InputError, ShapeError, UnsupportedError
from aftermap.evaluation import FGSM, PGD, TargetedAttack, input_range, log_probability_gradient
from aftermap.laplace import Laplace
from tests.baselines.test_contract import data, make_net, seeded


def log_mean(predictor, x, labels, options):
    mean = predictor.predict(x, generator=seeded(0), **options).mean
    return mean.gather(1, labels[:, None]).log().sum()


def predictors():
    net, (x, y) = make_net(), data()
    la = Laplace(net, "classification").fit([(x, y)])
    return {
        "map": (Deterministic(net), {}),
        "ensemble": (Ensemble([net, make_net(seed=4), make_net(seed=5)]), {}),
        "dropout": (MCDropout(net, samples=6), {}),
        "laplace_samples": (la, {"kind": "sampling", "weights": la.ensemble(5, seeded(1))}),
        "laplace_linearised": (la, {"link": "probit"}),
    }


@pytest.mark.parametrize("name", ["map", "ensemble", "dropout", "laplace_samples", "laplace_linearised"])
def test_gradient_against_finite_differences(name):
    predictor, options = predictors()[name]
    x, y = data(seed=7)
    gradient = log_probability_gradient(predictor, x, y, options=options)
    step = 1e-5
    for index in [(0, 0), (3, 1), (10, 2)]:
        shift = torch.zeros_like(x)
        shift[index] = step
        up, down = (log_mean(predictor, x + s * shift, y, options) for s in (1, -1))
        assert gradient[index].item() == pytest.approx(((up - down) / (2 * step)).item(), rel=1e-4, abs=1e-7)


def test_gradient_of_samples_of_a_convolutional_posterior():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 5)).double().eval()
    x = torch.randn(7, 2, 4, 5, dtype=torch.float64, generator=seeded())
    y = torch.randint(5, (7,), generator=seeded())
    la = Laplace(net, "classification").fit([(x, y)])
    fixed = Particles(net, la.ensemble(4, seeded(1)))
    direction = torch.randn(x.shape, dtype=torch.float64, generator=seeded(2))
    found = (log_probability_gradient(fixed, x, y) * direction).sum()
    up, down = (log_mean(fixed, x + s * 1e-5 * direction, y, {}) for s in (1, -1))
    torch.testing.assert_close(found, (up - down) / 2e-5, rtol=1e-5, atol=1e-8)


def test_gradient_is_of_the_log_of_the_mean():
    nets = [make_net(seed=s) for s in (0, 4, 5)]
    x, y = data(seed=7)
    found = log_probability_gradient(Ensemble(nets), x, y)
    point = x.clone().requires_grad_()
    logs = torch.stack([n(point).log_softmax(-1).gather(1, y[:, None])[:, 0] for n in nets])
    share = logs.detach().softmax(0)  # w_s = p_s / Σ p_s
    (expected,) = torch.autograd.grad((share * logs).sum(), point)
    torch.testing.assert_close(found, expected)
    (wrong,) = torch.autograd.grad(
        torch.stack([n(point).log_softmax(-1).gather(1, y[:, None])[:, 0] for n in nets]).mean(0).sum(), point
    )
    assert float((found - wrong).abs().max()) > 1e-3


def test_gradient_survives_saturation():
    # p rounds to one in float32; the direction must still be that of double precision.
    net = nn.Linear(3, 4)
    with torch.no_grad():
        net.weight.mul_(60)
    x = torch.randn(6, 3, generator=seeded())
    single = log_probability_gradient(Deterministic(net), x, None)
    double = log_probability_gradient(Deterministic(nn.Linear(3, 4).double().requires_grad_()), x.double(), None)
    assert single.shape == double.shape
    other = nn.Linear(3, 4).double()
    other.load_state_dict({n: t.double() for n, t in net.state_dict().items()})
    double = log_probability_gradient(Deterministic(other), x.double(), None)
    moved = double.abs().amax(1) > 1e-30
    assert torch.equal(single[moved].sign(), double[moved].sign().float())


def test_fgsm_steps_are_exact_and_scaled():
    net, (x, y) = make_net(), data()
    scale = torch.tensor([2.0, 0.0, 0.5], dtype=torch.float64)
    predictor = Deterministic(net)
    steps, moved, gradient = FGSM(scale=scale, steps=(0.0, 0.1)).inputs(predictor, x, y, 0, {})
    assert steps == [0.0, 0.1]
    torch.testing.assert_close(moved[0], x)
    torch.testing.assert_close(moved[1], x - 0.1 * scale * gradient.sign())
    assert torch.equal(moved[1][:, 1], x[:, 1])
    before, after = (predictor.predict(v).confidence for v in (x, x - 1e-4 * scale * gradient.sign()))
    assert bool((after < before).all())


def test_targeted_iterates_and_excludes():
    net, (x, y) = make_net(), data()
    predictor = Deterministic(net)
    own = predictor.predict(x).labels
    target = int(own[0])
    attack = TargetedAttack(target=target, step=0.05, iterations=4)
    curve = attack.run(predictor, [(x[:5], y[:5]), (x[5:], y[5:])])
    assert curve.excluded == int((own == target).sum())
    assert curve.n_data == 11 - curve.excluded
    assert curve.steps == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert curve.target[0] == 0.0
    assert curve.kept[0] == 1.0
    assert curve.accuracy[0] == pytest.approx((own == y)[own != target].double().mean().item())
    now = x[own != target]
    for _ in range(4):
        aim = torch.full((len(now),), target)
        now = now + 0.05 * log_probability_gradient(predictor, now, aim).sign()
    assert curve.target[-1] == pytest.approx((predictor.predict(now).labels == target).double().mean().item())
    assert curve.entropy[-1] == pytest.approx(predictor.predict(now).total.mean().item())


def test_pgd_stays_in_the_box_and_is_stronger_than_nothing():
    net, (x, y) = make_net(), data()
    predictor = Deterministic(net)
    scale = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    _, moved, _ = PGD(scale=scale, steps=(0.0, 0.3), iterations=6).inputs(predictor, x, y, 0, {})
    assert bool(((moved[1] - x).abs() <= 0.3 * scale + 1e-12).all())
    torch.testing.assert_close(moved[0], x)
    assert bool((predictor.predict(moved[1]).log_prob(y) < predictor.predict(x).log_prob(y)).all())


def test_clip():
    net, (x, y) = make_net(), data()
    _, moved, _ = FGSM(clip=(-0.5, 0.5), steps=(3.0,)).inputs(Deterministic(net), x, y, 0, {})
    assert float(moved[0].abs().max()) <= 0.5


def test_input_range_over_batches():
    x, y = data()
    expected = x.max(0).values - x.min(0).values
    torch.testing.assert_close(input_range([(x[:3], y[:3]), (x[3:], y[3:])]), expected)


def test_saturated_inputs_are_counted():
    net = nn.Linear(3, 4).double()
    with torch.no_grad():
        net.weight.zero_()
    curve = FGSM(steps=(0.1,)).run(Deterministic(net), [data()])
    assert curve.no_gradient == 1.0


class Constant:
    def __init__(self, detach):
        self.model, self.detach = make_net(), detach

    def predict(self, x, *, differentiable=False, generator=None):
        return Deterministic(self.model).predict(x, differentiable=differentiable and not self.detach)


class Old:
    def predict(self, x, *, generator=None):
        return Deterministic(make_net()).predict(x)


def test_refused():
    x, y = data()
    with pytest.raises(UnsupportedError, match="without a gradient in x"):
        FGSM().run(Constant(detach=True), [(x, y)])
    with pytest.raises(UnsupportedError, match="no argument differentiable"):
        FGSM().run(Old(), [(x, y)])
    with pytest.raises(UnsupportedError, match="attacks are for classification"):
        FGSM().run(Deterministic(make_net(), "regression"), [(x, y)])
    with pytest.raises(UnsupportedError, match="single floating-point tensor"):
        FGSM().run(Deterministic(make_net()), [((x, x), y)])
    with pytest.raises(DataError, match="class labels"):
        FGSM().run(Deterministic(make_net()), [(x, y.double())])
    with pytest.raises(ShapeError, match="one input has"):
        FGSM(scale=torch.ones(4)).run(Deterministic(make_net()), [(x, y)])
    with pytest.raises(InputError, match="steps must be"):
        FGSM(steps=(-0.1,)).run(Deterministic(make_net()), [(x, y)])
    with pytest.raises(InputError, match="iterations"):
        TargetedAttack(iterations=0, target=9).run(Deterministic(make_net()), [(x, y)])
