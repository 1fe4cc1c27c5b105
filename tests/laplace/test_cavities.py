"""Training data taken out of the posterior: cavities against inverses, what the check says of them, and what is corrected."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from aftermap.laplace.self_consistent import Cavities
from aftermap.likelihoods import Bernoulli, Categorical, Likelihood, Poisson
from aftermap.predictive.latent import normal_points
from tests.laplace.problems import contrast_root, gaussians, generator, normal


@pytest.mark.parametrize("narrowing", [1.0, 4.0])
def test_cavities_against_explicit_inverses(narrowing: float) -> None:
    given = gaussians(4, wide=0.5)
    V = given.covariances[0] / narrowing
    points = normal_points(32, 4, fixed=True)
    z = given.mean + torch.einsum("nij,sj->sni", contrast_root(V), torch.cat([points, -points])[:, :-1])
    p = torch.softmax(z, -1)
    curvature = (torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)).mean(0)
    gradient = p.mean(0) - nn.functional.one_hot(given.targets, 4).double()
    found = Cavities.of(given, Categorical(), narrowing)
    assert not bool(found.invalid.any())
    cavity = torch.linalg.inv(torch.linalg.inv(V) - curvature)
    assert_close(found.covariance, cavity, rtol=1e-6, atol=1e-8)
    away = (cavity @ gradient.unsqueeze(-1)).squeeze(-1)
    assert_close(found.mean, given.mean + away, rtol=1e-6, atol=1e-7)
    # Away from its own label.
    rows = torch.arange(80)
    before, after = (torch.softmax(m, 1)[rows, given.targets] for m in (given.mean, found.mean))
    assert bool((after <= before + 1e-12).all())


@pytest.mark.parametrize("likelihood", [Bernoulli(temperature=1.5), Poisson()])
def test_cavities_of_outputs_with_a_label_each(likelihood: Likelihood) -> None:
    targets = torch.randint(2, (80, 2), generator=generator(3)).double()
    given = gaussians(2, sure=0.5, wide=0.05, targets=targets)
    V = given.covariances[0]
    points = normal_points(32, 2, fixed=True)
    z = given.mean + torch.einsum("nij,sj->sni", torch.linalg.cholesky(V), torch.cat([points, -points]))
    if isinstance(likelihood, Poisson):
        rate = (given.mean + V.diagonal(dim1=1, dim2=2) / 2).exp()  # the mean of a log-normal variable
        gradient, diagonal = rate - targets, rate
    else:
        q = torch.sigmoid(z / 1.5)
        gradient, diagonal = (q - targets).mean(0) / 1.5, (q * (1 - q)).mean(0) / 1.5**2
    found = Cavities.of(given, likelihood, 1.0)
    cavity = torch.linalg.inv(torch.linalg.inv(V) - torch.diag_embed(diagonal))
    kept = ~found.invalid
    assert bool(kept.sum() > 60)
    assert_close(found.covariance[kept], cavity[kept], rtol=1e-6, atol=1e-8)
    away = (cavity @ gradient.unsqueeze(-1)).squeeze(-1)
    assert_close(found.mean[kept], (given.mean + away)[kept], rtol=1e-6, atol=1e-7)


def test_data_that_determine_more_than_they_can_are_counted() -> None:
    given = gaussians(3, sure=1.0)
    size = torch.ones(80, 1, 1, dtype=torch.float64)
    size[:20] = 1e4
    wide = replace(given, covariances=(size * given.covariances[0] * 0.05,), weight=torch.ones(80).double())
    found = Cavities.of(wide, Categorical(), 1.0)
    assert found.invalid[:20].float().mean() > 0.9
    assert not bool(found.invalid[20:].any())
    assert bool(torch.isfinite(found.covariance).all())
    assert bool((torch.linalg.eigvalsh(found.covariance) > -1e-6).all())
    check = found.check(Categorical())
    assert check.invalid == pytest.approx(float(found.invalid.double().mean()))
    assert not check.passed
    assert "% of the data determine more of the posterior than a single datum can" in check.message


def cavities(mean: Tensor, cov: float, targets: Tensor, invalid: int = 0) -> Cavities:
    count, width = mean.shape
    covariance = cov * torch.eye(width, dtype=torch.float64).expand(count, width, width)
    weight = torch.ones(count, dtype=torch.float64)
    return Cavities(mean, covariance, torch.arange(count) < invalid, mean, covariance, targets, weight)


def test_no_more_of_a_datum_is_taken_out_than_the_posterior_holds() -> None:
    given = gaussians(3, sure=1.0, wide=0.1)
    whole = Cavities.of(given, Categorical(), 1.0)
    half = Cavities.of(given, Categorical(), 1.0, 0.5)
    V = given.covariances[0]
    removed = torch.linalg.inv(V) - torch.linalg.inv(whole.covariance)
    assert_close(torch.linalg.inv(V) - torch.linalg.inv(half.covariance), removed / 2, rtol=1e-5, atol=1e-7)
    # A datum that counts a hundredth in a posterior a hundred times as wide is as harmless as a whole one in the narrow one.
    wide = replace(given, covariances=(100 * V,))
    assert Cavities.of(wide, Categorical(), 1.0).invalid.float().mean() > 0.5
    assert not bool(Cavities.of(wide, Categorical(), 1.0, 0.01).invalid.any())


def test_what_the_check_says() -> None:
    right = 4 * torch.eye(3, dtype=torch.float64).repeat(30, 1)
    y = torch.arange(3).repeat(30)
    worse = cavities(right, 9.0, y).check(Categorical())
    assert not worse.passed
    assert worse.difference > 0.05
    assert "the predictive is worse than the network" in worse.message
    better = cavities(right, 9.0, (y + (torch.arange(90) % 2)) % 3).check(Categorical())
    assert better.passed
    assert "the predictive is better than the network" in better.message
    same = cavities(right, 1e-8, y)
    assert same.check(Categorical()).passed
    assert "no difference that matters" in same.check(Categorical()).message
    assert "knows its data by heart, so they cannot judge" in same.check(Categorical(), curvature=3.0).message
    few = cavities(right, 1e-8, y, invalid=9).check(Categorical())
    assert (few.invalid, few.passed) == (pytest.approx(0.1), False)
    assert "10% of the data determine more" in few.message
    assert "at 90 training data that were taken out" in few.message


def test_the_difference_is_that_of_the_losses() -> None:
    given = gaussians(3, sure=1.0, wide=0.1)
    found = Cavities.of(given, Categorical(), 1.0)
    check = found.check(Categorical())
    drawn = torch.einsum("nij,snj->sni", torch.linalg.cholesky(found.covariance), normal(20_000, 80, 3, seed=5))
    rows = torch.arange(80)
    bayes = -torch.softmax(found.mean + drawn, -1).mean(0)[rows, given.targets].log()
    plain = nn.functional.cross_entropy(found.mean, given.targets, reduction="none")
    share = given.weight / given.weight.sum()
    assert check.difference == pytest.approx(float(share @ (bayes - plain)), abs=0.01)
    spread = (share.square() @ (bayes - plain - share @ (bayes - plain)).square()).sqrt()
    assert check.standard_error == pytest.approx(float(spread), rel=0.1)
    assert check.n_data == 80


def test_a_network_that_is_less_sure_than_it_should_be_is_sharpened() -> None:
    timid = 0.5 * torch.eye(3, dtype=torch.float64).repeat(30, 1)
    y = torch.arange(3).repeat(30)
    for likelihood in (Categorical(), Categorical(temperature=4.0)):
        width, sharper = cavities(timid, 1.0, y).corrected(likelihood, 1.0)
        assert sharper == 0.5
        assert width > 1
    # By the word of more than chance, and not of data that are known by heart.
    slightly = cavities(timid, 0.2, y)
    assert slightly.check(Categorical()).difference < 0.05
    assert slightly.corrected(Categorical(), 1.2)[1] == 0.5
    assert slightly.corrected(Categorical(), 1.3) == (1.0, 1.0)
    alarming = cavities(8 * timid, 9.0, y)
    assert alarming.check(Categorical()).difference > 0.05
    assert alarming.corrected(Categorical(), 1.3)[0] > 1
    assert cavities(20 * timid, 1.0, (y + torch.arange(90) % 2) % 3).corrected(Categorical(), 1.0) == (1.0, 1.0)
    assert cavities(timid[:3], 0.01, torch.tensor([0, 1, 1])).corrected(Categorical(), 1.0) == (1.0, 1.0)


def test_an_alarm_at_data_known_by_heart_brings_back_what_costs_next_to_nothing() -> None:
    """They cannot say which width is best, but the network may be right about them."""
    f = 4 * torch.eye(3, dtype=torch.float64).repeat(30, 1)
    y = torch.arange(3).repeat(30)
    found = cavities(f, 9.0, y)
    assert found.check(Categorical()).difference > 0.05
    width, sharper = found.corrected(Categorical(), 3.0)
    assert (width > 1, sharper) == (True, 1.0)

    def rise(divisor: float) -> float:
        drawn = normal(200_000, 3, seed=4) * math.sqrt(9.0 / divisor)
        bayes = torch.softmax(f[:3, None] + drawn, -1).mean(1)[range(3), range(3)].log()
        return float(-bayes.mean() - nn.functional.cross_entropy(f, y))

    assert rise(width) < 0.012
    assert rise(width / 2) > 0.01
    # Nothing is asked of the temperature, nor of a posterior without an alarm.
    assert cavities(f, 0.5, y).check(Categorical()).difference < 0.05
    assert cavities(f, 0.5, y).corrected(Categorical(), 3.0) == (1.0, 1.0)
    wrong = cavities(f, 9.0, (y + (torch.arange(90) % 2)) % 3)
    assert wrong.corrected(Categorical(), 3.0) == (1.0, 1.0)


def test_counts_known_by_heart_have_a_bound_too() -> None:
    y = torch.ones(90, 3, dtype=torch.float64)
    counts = cavities(torch.zeros(90, 3, dtype=torch.float64), 4.0, y)
    width, sharper = counts.corrected(Poisson(), 3.0)
    assert (width > 1, sharper) == (True, 1.0)


def test_counts_have_a_width_and_no_temperature() -> None:
    y = torch.ones(90, 3, dtype=torch.float64)
    counts = cavities(torch.zeros(90, 3, dtype=torch.float64), 4.0, y)
    assert not counts.check(Poisson()).passed
    width, sharper = counts.corrected(Poisson(), 1.0)
    assert (width, sharper) == (32.0, 1.0)
    assert counts.check(Poisson(), 1.0, width).difference < counts.check(Poisson()).difference / 10


def test_the_check_is_that_of_the_corrected_predictive() -> None:
    timid = 0.5 * torch.eye(3, dtype=torch.float64).repeat(30, 1)
    found = cavities(timid, 1.0, torch.arange(3).repeat(30))
    width, sharper = found.corrected(Categorical(), 1.0)
    check = found.check(Categorical(), 1.0, width, sharper)
    plain = nn.functional.cross_entropy(timid, torch.arange(3).repeat(30))
    drawn = normal(40_000, 1, 3, seed=4) * math.sqrt(1 / width)
    bayes = torch.softmax((timid[:3] + drawn) / sharper, -1).mean(0)[range(3), range(3)].log()
    assert check.difference == pytest.approx(float(-bayes.mean() - plain), abs=0.01)
    assert "better than the network" in check.message


def test_data_known_by_heart_raise_no_alarm() -> None:
    right = 4 * torch.eye(3, dtype=torch.float64).repeat(30, 1)
    found = cavities(right, 9.0, torch.arange(3).repeat(30))
    assert not found.check(Categorical(), 1.9).passed
    heart = found.check(Categorical(), 2.1)
    assert heart.passed
    assert "cannot judge" in heart.message


def test_data_known_by_heart_bring_back_the_widest_posterior_that_costs_them_next_to_nothing() -> None:
    sure, y = 6.5 * torch.eye(3, dtype=torch.float64).repeat(30, 1), torch.arange(3).repeat(30)
    found = cavities(sure, 9.0, y)
    plain = nn.functional.cross_entropy(sure[:3], y[:3])

    def cost(width: float) -> float:
        drawn = sure[:3] + normal(200_000, 1, 3, seed=4) * math.sqrt(9.0 / width)
        return float(-torch.softmax(drawn, -1).mean(0)[range(3), range(3)].log().mean() - plain)

    assert cost(4.0) > 0.012 > 0.008 > cost(8.0)  # a hundredth of a nat is allowed
    assert found.check(Categorical()).difference > 0.05
    assert found.corrected(Categorical(), 3.0) == (8.0, 1.0)
