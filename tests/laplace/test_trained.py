"""Tuning of a posterior that training has built: its rules against closed forms, and what it leaves alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.errors import DataError, InputError, StatisticalWarning
from aftermap.laplace import Laplace, load
from aftermap.laplace.trained import NoiseResult, fit_noise
from aftermap.laplace.validation import TemperatureResult, ValidationResult, search_temperature
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from aftermap.optim import OGN, VOGN, TrainedPosterior
from aftermap.posteriors import GaussianPosterior
from aftermap.posteriors.base import Hyperparameters
from aftermap.testing import ModelSnapshot, check_unchanged

DOUBLE = torch.float64
NOISE = torch.tensor([0.2, 3.0], dtype=DOUBLE)


def linear(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Data of a linear model with five inputs and two outputs, whose noises differ by a factor of 15."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=DOUBLE)
    weights = torch.arange(1.0, 11.0, dtype=DOUBLE).reshape(5, 2).cos() * NOISE
    return x, x @ weights + NOISE * torch.randn(n, 2, generator=generator, dtype=DOUBLE)


def regression(guess: float) -> tuple[TrainedPosterior, Tensor]:
    """The exact posterior of the linear model under noises that are wrong by a factor, and its inputs."""
    x, y = linear(25, 0)
    net = nn.Linear(5, 2, bias=False, dtype=DOUBLE)
    with torch.no_grad():
        net.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    likelihood = Gaussian(guess * NOISE)
    laplace = Laplace(net, likelihood, structure="full", prior_precision=1e-9).fit([(x, y)])
    assert isinstance(laplace.posterior, GaussianPosterior)
    return TrainedPosterior(net, laplace.posterior, laplace.factors, likelihood, "VOGN", {"weight": 0.0}), x


@pytest.mark.parametrize("kind, tolerance", [("linearised", 0.01), ("sampling", 0.05)])  # 400 draws
@pytest.mark.parametrize("guess", [0.1, 30.0])
def test_a_linear_regression_gets_the_noise_of_each_output(guess: float, kind: str, tolerance: float) -> None:
    trained, x = regression(guess)
    held_out, y = linear(1000, 1)  # all are looked at
    assert trained.tune([(held_out, y)], kind=kind, samples=400) is trained
    noise = torch.as_tensor(trained.likelihood.noise)  # type: ignore[attr-defined]
    # Residuals have the variance σ²(1 + h) of the exact predictive.
    inverse, new = torch.linalg.inv(x.T @ x), linear(3, 2)[0]
    leverage = 1 + torch.einsum("ni,ij,nj->n", held_out, inverse, held_out)[:, None]
    with torch.no_grad():
        residuals = y - trained.model(held_out)
    spread = residuals.square().mean(0).sqrt()
    assert_close(noise, spread * ((residuals / spread).square() / leverage).mean().sqrt(), rtol=tolerance, atol=0)
    if kind == "linearised":  # The covariance goes along with the noise.
        closed = torch.einsum("ni,ij,nj->n", new, inverse, new)[:, None] * NOISE.square()
        expected = closed * float((noise / NOISE).log().mean().exp()) ** 2
        assert_close(trained.predict(new, kind=kind).epistemic, expected, rtol=1e-6, atol=0)


def test_a_regression_trained_with_vogn_predicts_like_the_exact_posterior() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 4, generator=generator, dtype=DOUBLE)
    weights = torch.tensor([[1.0], [-2.0], [0.5], [3.0]], dtype=DOUBLE)
    held_out, test = (torch.randn(n, 4, generator=generator, dtype=DOUBLE) for n in (400, 2000))
    y, val, target = (
        v @ weights + 0.5 * torch.randn(len(v), 1, generator=generator, dtype=DOUBLE) for v in (x, held_out, test)
    )
    net = nn.Linear(4, 1, bias=False, dtype=DOUBLE)
    nn.init.zeros_(net.weight)
    assumed = Gaussian(2.0)
    opt = VOGN(net, lr=0.1, n_data=120, prior_precision=1e-3, damping=1e-3, curvature="ggn", likelihood=assumed)
    for step in range(400):
        opt.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / 400))
        opt.step(lambda: assumed.nll(net(x), y).mean())
    trained = opt.posterior(assumed)
    untuned = float(-trained.predict(test, samples=100, generator=generator).log_prob(target).mean())
    trained.tune([(held_out, val)])
    found = float(-trained.predict(test, samples=100, generator=generator).log_prob(target).mean())
    mean = torch.linalg.lstsq(x, y).solution
    variance = 0.25 * (1 + torch.einsum("ni,ij,nj->n", test, torch.linalg.inv(x.T @ x), test))[:, None]
    exact = float((0.5 * (2 * math.pi * variance).log() + (target - test @ mean).square() / (2 * variance)).mean())
    assert untuned > exact + 0.5
    assert found < exact + 0.02


def test_noises_go_with_the_units_of_each_output() -> None:
    generator = torch.Generator().manual_seed(3)
    residuals = torch.randn(60, 2, 3, generator=generator, dtype=DOUBLE)
    variance = 0.3 * torch.rand(60, 2, 3, generator=generator, dtype=DOUBLE)
    weights = torch.ones(60, dtype=DOUBLE)
    units = torch.tensor([1.0, 1e-3, 50.0], dtype=DOUBLE)
    one = fit_noise(residuals, variance, residuals, torch.tensor(1.0, dtype=DOUBLE), weights)
    two = fit_noise(units * residuals, units**2 * variance, units * residuals, units, weights)
    assert_close(two[0], units * one[0])
    assert two[1] == pytest.approx(one[1])
    assert two[3] == pytest.approx(one[3] + float(units.log().mean()))


def test_what_was_found_is_told_by_its_likelihoods() -> None:
    generator = torch.Generator().manual_seed(4)
    residuals = torch.randn(60, 2, 3, generator=generator, dtype=DOUBLE)
    variance = 0.3 * torch.rand(60, 2, 3, generator=generator, dtype=DOUBLE)
    weights, before = 1 + torch.arange(60, dtype=DOUBLE) % 3, torch.tensor(0.8, dtype=DOUBLE)
    noise, factor, constant, found = fit_noise(residuals, variance, residuals, before, weights)
    share = (weights / weights.sum())[:, None, None] / 6

    def nll(total: Tensor) -> float:
        return float(-(share * torch.distributions.Normal(0.0, total.sqrt()).log_prob(residuals)).sum())

    assert constant == pytest.approx(nll((6 * share * residuals.square()).sum((0, 1)).expand_as(residuals) / 2))
    assert found == pytest.approx(nll(noise.square() + factor * variance))
    assert found <= constant + 1e-9


def test_an_output_that_never_changes_takes_the_least_noise_of_the_others() -> None:
    residuals = torch.randn(40, 1, 3, generator=torch.Generator().manual_seed(5), dtype=DOUBLE)
    residuals[..., 1] = 0.0
    targets = residuals.clone()
    residuals[..., 2] *= 10
    noise = fit_noise(residuals, torch.zeros_like(residuals), targets, torch.ones(3, dtype=DOUBLE), torch.ones(40))[0]
    assert float(noise[1]) == pytest.approx(float(noise[0]))
    assert float(noise[2]) > float(noise[1]) > 0


def test_noise_where_residuals_say_little() -> None:
    zeros, weights = torch.zeros(30, 1, 2, dtype=DOUBLE), torch.ones(30, dtype=DOUBLE)
    before = torch.tensor([0.5, 2.0], dtype=DOUBLE)
    targets = torch.randn(30, 1, 2, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    exact = fit_noise(zeros, zeros, targets, before, weights)[0]  # reproduced exactly
    assert bool((exact > 0).all())
    assert bool((exact < 0.1).all())
    nothing = fit_noise(zeros, zeros, zeros, before, weights)[0]  # neither residuals nor targets tell
    assert float(nothing[1] / nothing[0]) == pytest.approx(4.0)
    assert float(nothing[0]) > 0
    few = fit_noise(targets[:5], zeros[:5], targets[:5], before, weights[:5])[0]  # the relation between outputs stays
    assert float(few[1] / few[0]) == pytest.approx(4.0)


def test_tuning_again_changes_nothing() -> None:
    trained, _ = regression(5.0)
    data = [linear(200, 1)]
    first = trained.tune(data, kind="linearised").tuning
    again = trained.tune(data, kind="linearised").tuning
    assert isinstance(again, NoiseResult)
    assert again.noise == pytest.approx(first.noise, rel=1e-6)
    assert again.factor == pytest.approx(1.0, rel=1e-6)


def classes(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator, dtype=DOUBLE)
    y = (x[:, 0] + 0.8 * torch.randn(n, generator=generator, dtype=DOUBLE) > 0).long() + (x[:, 1] > 1)
    return x, y


def classifier(optimiser: Any = VOGN) -> tuple[TrainedPosterior, nn.Module]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)).to(DOUBLE)
    x, y = classes(80, 0)
    opt = optimiser(net, lr=0.05, n_data=80, prior_precision=0.1)
    for _ in range(150):
        opt.step(lambda: F.cross_entropy(net(x), y))
    return opt.posterior(), net


def test_draws_get_the_temperature_of_the_least_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = 2 * torch.randn(7, 20_000, 3, generator=generator, dtype=DOUBLE)
    labels = torch.distributions.Categorical(logits=draws.mean(0))  # as if the temperature were one of the draws' mean
    torch.manual_seed(1)
    y, weight = labels.sample(), torch.ones(20_000, dtype=DOUBLE)
    found = search_temperature(draws, draws.mean(0), y, weight, Categorical())
    temperatures = [1.01**k for k in range(-40, 200)]

    def loss(t: float) -> float:
        return float(F.nll_loss((draws / t).softmax(-1).mean(0).log(), y))

    assert found.output_temperature == pytest.approx(min(temperatures, key=loss), rel=0.03)
    assert found.nll == pytest.approx(loss(found.output_temperature))
    assert found.untuned_nll == pytest.approx(loss(1.0))


def test_one_draw_of_two_classes_is_a_binary_network() -> None:
    generator = torch.Generator().manual_seed(0)
    logit = 3 * torch.randn(40, 1, generator=generator, dtype=DOUBLE)
    y = (torch.rand(40, generator=generator, dtype=DOUBLE) < 0.5).long()
    two, weight = torch.cat([-logit / 2, logit / 2], -1), torch.ones(40, dtype=DOUBLE)
    as_classes = search_temperature(two[None], two, y, weight, Categorical())
    binary = search_temperature(logit[None], logit, y, weight, Bernoulli())
    assert binary.output_temperature == pytest.approx(as_classes.output_temperature)
    assert binary.network_nll == pytest.approx(as_classes.network_nll)
    hot = search_temperature(2 * two[None], 2 * two, y, weight, Categorical(temperature=2.0))
    assert hot.output_temperature == pytest.approx(2 * as_classes.output_temperature)


def test_classes_by_draws_get_a_temperature_and_nothing_else(tmp_path: Path) -> None:
    trained, net = classifier()
    before, prior = ModelSnapshot.of(net), trained.as_prior()[1]
    posterior, x = trained.posterior, classes(5, 2)[0]
    own = trained.predictor.map_prediction(x).mean
    trained.tune([classes(500, 1)])
    check_unchanged(net, before)
    assert isinstance(trained.tuning, TemperatureResult)
    assert trained.posterior is posterior
    assert_close(trained.as_prior()[1], prior)
    assert_close(trained.predictor.map_prediction(x).mean, own)  # the network's own answers are not divided
    assert trained.likelihood.config() == Categorical(temperature=trained.tuning.output_temperature).config()
    assert trained.tuning.nll < trained.tuning.untuned_nll
    held_out = trained.predict(classes(500, 1)[0], samples=30, generator=torch.Generator().manual_seed(0))
    assert float(-held_out.log_prob(classes(500, 1)[1]).mean()) == pytest.approx(trained.tuning.nll, rel=1e-4)
    trained.save(tmp_path / "saved")
    again = load(tmp_path / "saved", net)
    assert again.likelihood.config() == trained.likelihood.config()
    one, two = (p.predict(x, generator=torch.Generator().manual_seed(0)).mean for p in (trained, again))
    assert_close(one, two)
    assert_close(again.predictor.map_prediction(x).mean, own)
    assert trained.tune([classes(500, 1)]).output_temperature == pytest.approx(again.likelihood.temperature)  # type: ignore[union-attr]


def test_the_linearised_predictive_is_tuned_like_a_laplace_approximation() -> None:
    trained, net = classifier(OGN)
    posterior, data = trained.posterior, [classes(300, 1)]
    laplace = Laplace(net, "classification", structure="diagonal")
    hyperparameters = Hyperparameters(posterior.prior, torch.ones((), dtype=DOUBLE), float(posterior.scale))
    laplace.restore(trained.factors, posterior, hyperparameters).tune(data)
    trained.tune(data, kind="linearised", samples=100)
    assert isinstance(trained.tuning, ValidationResult)
    assert trained.tuning == laplace.tuning
    x = classes(5, 2)[0]
    assert_close(trained.predict(x, kind="linearised", samples=100).mean, laplace.predict(x).mean)
    assert set(trained.as_prior()[1]) == set(posterior.names)  # of a prior that was found, damping is no part


def test_a_regression_is_saved_with_its_noise(tmp_path: Path) -> None:
    trained, _ = regression(5.0)
    trained.tune([linear(100, 1)], kind="linearised").save(tmp_path / "saved")
    again, x = load(tmp_path / "saved", trained.model), linear(4, 2)[0]
    one, two = (p.predict(x, kind="linearised") for p in (trained, again))
    assert_close(one.total, two.total)
    assert_close(one.epistemic, two.epistemic)


def test_counts_are_tuned_on_a_grid() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator, dtype=DOUBLE)
    y = torch.poisson((1 + x[:, :1]).exp(), generator=generator)
    net = nn.Linear(2, 1, dtype=DOUBLE)
    opt = OGN(net, lr=0.05, n_data=60, prior_precision=0.1)
    for _ in range(100):
        opt.step(lambda: Poisson().nll(net(x), y).mean())
    trained = opt.posterior(Poisson())
    untuned = trained.predict(x, kind="linearised")
    with pytest.warns(StatisticalWarning, match="the edge of the grid"):  # a linear model of two inputs needs no width
        trained.tune([(x, y)], kind="linearised")
    tuned = trained.predict(x, kind="linearised")
    assert float(tuned.log_prob(y).mean()) >= float(untuned.log_prob(y).mean()) - 1e-6


def test_mistakes() -> None:
    trained, net = classifier()
    with pytest.raises(InputError, match="kind='margin'"):
        trained.tune([classes(50, 1)], kind="margin")
    with pytest.raises(DataError, match="no targets"):
        trained.tune([(classes(50, 1)[0], None)])
    with pytest.warns(StatisticalWarning, match="only 5 validation labels"):
        trained.tune([classes(5, 1)])
    with pytest.warns(StatisticalWarning, match="only 3 validation examples"):
        regression(1.0)[0].tune([linear(3, 1)])
    with pytest.raises(DataError, match="no targets"):
        regression(1.0)[0].tune([(linear(3, 1)[0], None)])
    with torch.no_grad():
        next(net.parameters()).add_(1.0)
    with pytest.raises(InputError, match="call posterior"):
        trained.tune([classes(50, 1)])
