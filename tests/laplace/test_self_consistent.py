"""Tuning without held-out labels: the fixed point against brute force, cavities against inverses, and what is said of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import expit
from torch import Tensor, nn
from torch.testing import assert_close

import aftermap as am
from aftermap.errors import InputError, StatisticalWarning
from aftermap.laplace import Laplace, SelfConsistentResult
from aftermap.laplace.evidence import EvidenceResult
from aftermap.laplace.latents import OutputGaussians
from aftermap.laplace.self_consistent import Cavities, averages_curvature, self_consistent_scale
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from aftermap.predictive.latent import normal_points
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import (
    Data,
    classes,
    contrast_root,
    generator,
    mlp,
    new_classes,
    normal,
    regression,
    trained,
)
from tests.laplace.self_consistent_worker import COUNT, results, run
from tests.processes import from_two_processes

mistrusted = pytest.mark.filterwarnings("ignore:the posterior that was found without held-out labels")


def gaussians(
    width: int,
    count: int = 80,
    sure: float = 4.0,
    wide: float = 1.0,
    targets: Tensor | None = None,
    seed: int = 0,
    shift: float = 0.0,
) -> OutputGaussians:
    roots = normal(count, width, width, seed=seed + 1) / math.sqrt(width)
    spread = 0.2 + 3 * torch.rand(count, 1, 1, generator=generator(seed + 2), dtype=torch.float64)
    cov = wide * spread * roots @ roots.mT
    y = torch.randint(width, (count,), generator=generator(seed + 3)) if targets is None else targets
    weight = 0.5 + torch.rand(count, generator=generator(seed + 4), dtype=torch.float64)
    return OutputGaussians(shift + sure * normal(count, width, seed=seed), (cov,), y, weight, count)


def fixed_point(ratio: Callable[[float], float]) -> float:
    """The c at which the averaged curvature is c times that at the mean, by bisection."""
    return math.exp(brentq(lambda log_c: ratio(math.exp(log_c)) - math.exp(log_c), -2, 5, xtol=1e-10))


# The fixed point


@pytest.mark.parametrize("dimension", [1.0, 3.0])
@pytest.mark.parametrize("sure", [1.0, 5.0])
def test_one_logit_against_quadrature(sure: float, dimension: float) -> None:
    given = gaussians(1, sure=sure, targets=torch.zeros(80, 1, dtype=torch.float64))
    f, v, weight = given.mean[:, 0].numpy(), given.covariances[0][:, 0, 0].numpy(), given.weight.numpy()
    nodes, shares = np.polynomial.hermite_e.hermegauss(150)
    shares = shares / shares.sum()

    def slope(z: np.ndarray) -> np.ndarray:
        return expit(z) * expit(-z)

    def ratio(c: float) -> float:
        z = f[:, None] + np.sqrt(v / (dimension * c))[:, None] * nodes
        return float((weight * v) @ (slope(z) @ shares) / ((weight * v) @ slope(f)))

    c, converged = self_consistent_scale(given, Bernoulli(), dimension)
    assert converged
    assert c == pytest.approx(fixed_point(ratio), rel=0.01)


def test_data_that_a_network_is_sure_of_count_for_more() -> None:
    """Where the curvature at the outputs is nearly zero, that around them is not."""
    c = [
        self_consistent_scale(gaussians(1, sure=0.1, shift=f, targets=torch.ones(80, 1).double()), Bernoulli())[0]
        for f in (0, 3, 8)
    ]
    assert c[0] < 1 < c[1] < c[2]
    assert c[2] > 2


@pytest.mark.parametrize("classes_", [3, 10])
def test_softmax_against_many_draws(classes_: int) -> None:
    given = gaussians(classes_, count=40)
    cov, f = given.covariances[0], given.mean
    drawn = torch.einsum("nij,snj->sni", torch.linalg.cholesky(cov), normal(4000, 40, classes_, seed=9))

    def traces(z: Tensor) -> Tensor:
        p = torch.softmax(z, -1)
        hessian = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
        return torch.einsum("...nij,nji->...n", hessian, cov)

    at_mean = float(given.weight @ traces(f))

    def ratio(c: float) -> float:
        parts = [traces(f + part / math.sqrt(c)).sum(0) for part in drawn.split(500)]
        return float(given.weight @ sum(parts)) / len(drawn) / at_mean

    c, converged = self_consistent_scale(given, Categorical())
    assert converged
    assert ratio(c) == pytest.approx(c, rel=0.05)
    # The iteration ends where its own draws agree.
    points = normal_points(32, classes_, fixed=True)
    own = torch.einsum("nij,sj->sni", contrast_root(cov), torch.cat([points, -points])[:, :-1])
    averaged = float(given.weight @ traces(f + own / math.sqrt(c)).mean(0)) / at_mean
    assert averaged == pytest.approx(c, rel=3e-3)


def test_counts_against_the_lognormal_mean() -> None:
    given = gaussians(2, sure=0.5, wide=0.1, targets=torch.ones(80, 2, dtype=torch.float64))
    f, v, weight = given.mean, given.covariances[0].diagonal(dim1=1, dim2=2), given.weight[:, None]

    def ratio(c: float) -> float:
        return float((weight * v * (f + v / (2 * c)).exp()).sum() / (weight * v * f.exp()).sum())

    c, converged = self_consistent_scale(given, Poisson())
    assert converged
    assert c > 1.1  # a rate is convex in its logarithm: its mean is above that of the mean
    assert c == pytest.approx(fixed_point(ratio), rel=2e-3)


def test_counts_with_a_long_tail() -> None:
    """Of a rate whose logarithm has the variance 2, sixty draws miss a tenth."""
    given = gaussians(1, sure=0.5, targets=torch.ones(80, 1, dtype=torch.float64))
    given = replace(given, covariances=(torch.full((80, 1, 1), 6.0, dtype=torch.float64),))
    c, converged = self_consistent_scale(given, Poisson())
    assert converged
    # All data alike: c = exp(v / 2c).
    assert c == pytest.approx(fixed_point(lambda value: math.exp(3.0 / value)), rel=2e-3)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Poisson()])
def test_under_little_variance_the_curvature_is_that_at_the_mean(likelihood: Likelihood) -> None:
    targets = None if isinstance(likelihood, Categorical) else torch.ones(80, 3, dtype=torch.float64)
    c, converged = self_consistent_scale(gaussians(3, sure=1.0, wide=1e-8, targets=targets), likelihood)
    assert converged
    assert c == pytest.approx(1.0, abs=1e-6)


def test_invariances() -> None:
    given = gaussians(4, sure=8.0)
    c, _ = self_consistent_scale(given, Categorical())
    # A covariance that is divided already.
    narrow = replace(given, covariances=(given.covariances[0] / 5,))
    assert self_consistent_scale(given, Categorical(), 5.0)[0] == pytest.approx(
        self_consistent_scale(narrow, Categorical())[0], rel=1e-9
    )
    # A temperature divides outputs.
    warm = replace(given, mean=2 * given.mean, covariances=(4 * given.covariances[0],))
    assert self_consistent_scale(warm, Categorical(temperature=2.0))[0] == pytest.approx(c, rel=1e-9)
    # Weights of classes are weights of examples, and these are copies.
    shares = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    by_class = self_consistent_scale(given, Categorical(weight=shares))[0]
    by_example = replace(given, weight=given.weight * shares[given.targets])
    assert by_class == pytest.approx(self_consistent_scale(by_example, Categorical())[0], rel=1e-9)
    twice = torch.cat([torch.arange(80), torch.arange(30)])
    copied = OutputGaussians(
        given.mean[twice], (given.covariances[0][twice],), given.targets[twice], torch.ones(110).double(), 110
    )
    weighted = replace(given, weight=torch.cat([2 * torch.ones(30), torch.ones(50)]).double())
    assert self_consistent_scale(copied, Categorical())[0] == pytest.approx(
        self_consistent_scale(weighted, Categorical())[0], rel=1e-9
    )
    assert abs(c - 1) > 0.05


def test_where_there_is_nothing_to_average() -> None:
    flat = gaussians(3)
    assert self_consistent_scale(replace(flat, covariances=(0 * flat.covariances[0],)), Categorical()) == (1.0, False)
    certain = replace(
        flat, mean=torch.tensor([1e6, 0.0, 0.0]).double().expand(80, 3), covariances=(1e-9 * flat.covariances[0],)
    )
    assert self_consistent_scale(certain, Categorical()) == (1.0, False)
    counts = replace(
        gaussians(1, targets=torch.ones(80, 1).double()), covariances=(torch.full((80, 1, 1), 1e8).double(),)
    )
    c, converged = self_consistent_scale(counts, Poisson())  # e^(10⁴) is no number
    assert (c, converged) == (1.0, False)


def test_which_likelihoods_it_is_for() -> None:
    assert all(averages_curvature(x) for x in (Categorical(), Bernoulli(), Poisson()))
    assert not averages_curvature(Gaussian(1.0))


# Cavities


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
    assert "% of the data determine more of the posterior than a datum can" in check.message


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
    assert "knows its data by heart, so that they cannot judge" in same.check(Categorical(), curvature=3.0).message
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


# Through the facade


@cache
def network(count: int = 150) -> nn.Module:
    return trained(mlp(), classes(count), nn.CrossEntropyLoss(reduction="sum"), decay=0.1, steps=60)


def fitted(structure: str = "full", **options: object) -> Laplace:
    laplace = Laplace(network(), "classification", structure=structure, **options)
    return laplace.fit(classes(150), generator=generator(), progress=False)


@mistrusted
@pytest.mark.parametrize("structure", ["full", "kron", "diagonal", "low_rank"])
def test_the_posterior_agrees_with_the_curvature_that_it_averages_over(structure: str) -> None:
    laplace = fitted(structure, rank=9)
    before, state = ModelSnapshot.of(laplace.model), torch.get_rng_state()
    assert laplace.tune() is laplace
    check_unchanged(laplace.model, before)
    assert torch.equal(state, torch.get_rng_state())
    found = laplace.tuning
    assert isinstance(found, SelfConsistentResult)
    assert found.converged
    assert found.n_data == 150
    # At the posterior that came out, the mean curvature is c times that at the network's outputs.
    x = torch.cat([b[0] for b in classes(150)])
    predicted = laplace.predict(x)
    T = laplace.output_temperature
    f, V = T * predicted.latent_mean, T**2 * predicted.latent_cov * found.correction
    noise = torch.einsum("nij,snj->sni", torch.linalg.cholesky(V + 1e-12 * torch.eye(4)), normal(1500, 150, 4, seed=3))
    curvature = Categorical().hessian(f)
    averaged = sum(Categorical().hessian(f + part) for part in noise) / len(noise)
    assert float((averaged * V).sum() / (curvature * V).sum()) == pytest.approx(found.curvature, rel=0.05)
    # And what is reported is what it has.
    assert (laplace.data_scale, laplace.output_temperature) == (found.data_scale, found.output_temperature)
    assert laplace.fitted.narrowing == pytest.approx(found.dimension * found.curvature * found.correction)
    assert found.data_scale == pytest.approx(found.dimension * found.curvature * found.correction)
    for layer, value in laplace.prior_precision.items():
        assert float(value) == pytest.approx(found.precision[layer])
    ratios = {k: found.precision[k] / (found.data_scale * found.evidence.precision[k]) for k in found.precision}
    assert max(ratios.values()) == pytest.approx(min(ratios.values()), rel=1e-6)
    assert (found.matched is None) == (structure == "full")
    assert found.dimension >= 1
    assert f"{found.check.message}" in str(found)


def test_a_full_matrix_of_which_no_direction_is_left_out_is_not_matched_and_a_low_rank_is() -> None:
    """What few directions leave to the prior counts as variance that the data would have taken away."""
    x, y = new_classes(1000)[0]

    def nll(laplace: Laplace) -> float:
        return float(-laplace.predict(x, generator=generator()).log_prob(y).mean())

    few = fitted("low_rank", rank=5)
    by_evidence = nll(few.tune(method="evidence"))
    tuned = nll(few.tune())
    assert few.tuning.dimension > 2
    assert tuned < by_evidence - 0.1
    assert fitted("full").tune().tuning.dimension == 1.0


@mistrusted
def test_the_sample_of_a_process_stands_for_all_of_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def looked_at(gaussians: OutputGaussians, *others: object) -> tuple[float, bool]:
        seen.append(gaussians)
        return 1.0, True

    monkeypatch.setattr("aftermap.laplace.tune._TRAINING_INPUTS", 40)
    monkeypatch.setattr("aftermap.laplace.tune.self_consistent_scale", looked_at)
    fitted().tune()
    assert seen[0].n_examples == 40
    assert float(seen[0].weight.sum()) == pytest.approx(150)


def test_a_warm_posterior_is_not_taken_for_one_that_lacks_its_data() -> None:
    """Dividing the log-likelihood by 20 is a wish; counting every datum as a twentieth is a mistake that shows."""
    warm = fitted(temperature=20.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StatisticalWarning)
        wished, mistaken = warm.tune().tuning.check, fitted(data_scale=0.05).tune().tuning.check
    assert wished.invalid == 0
    assert mistaken.invalid > 0


@mistrusted
def test_every_tuning_starts_anew() -> None:
    first = fitted(data_scale=1.5).tune()
    for other in (
        fitted(data_scale=1.5).tune(new_classes(100)).tune(),
        fitted(data_scale=1.5).tune(method="evidence").tune(),
        fitted(data_scale=1.5).narrow(9.0).tune(),
    ):
        assert other.data_scale == pytest.approx(first.data_scale, rel=0.02)
        assert_close(other.log_evidence(), first.log_evidence(), rtol=1e-3, atol=0)


def test_labels_and_batches_in_another_order() -> None:
    x, y = (torch.cat(t) for t in zip(*classes(150), strict=True))
    order = torch.randperm(150, generator=generator(2))
    data = list(zip(x[order].split(7), y[order].split(7), strict=True))
    one, two = fitted().tune(), Laplace(network(), "classification", structure="full").fit(data, progress=False).tune()
    assert one.data_scale == pytest.approx(two.data_scale, rel=1e-4)
    assert one.tuning.check.difference == pytest.approx(two.tuning.check.difference, rel=1e-3)


@mistrusted
@pytest.mark.parametrize("kind", ["binary", "counts"])
def test_binary_and_counts(kind: str) -> None:
    x = normal(200, 3, seed=1)
    signal = x @ normal(3, 2, seed=2)
    if kind == "binary":
        y = (signal + normal(200, 2, seed=3) > 0).double()
        loss: nn.Module = nn.BCEWithLogitsLoss(reduction="sum")
    else:
        y = torch.poisson((0.5 * signal).exp(), generator=generator(4))
        loss = nn.PoissonNLLLoss(reduction="sum")
    model = trained(mlp(3, 5, 2), [(x, y)], loss, decay=0.3, steps=60)
    laplace = Laplace(model, kind, structure="full").fit([(x, y)], progress=False).tune()
    found = laplace.tuning
    assert isinstance(found, SelfConsistentResult)
    assert found.converged
    assert found.check.n_data == 200
    assert math.isfinite(found.check.difference)
    assert bool(torch.isfinite(laplace.predict(x).mean).all())


def test_data_that_are_not_at_hand(tmp_path: Path) -> None:
    loaded = am.load(fitted().save(tmp_path / "posterior"), network())
    expected, streamed = fitted().tune(), fitted()
    streamed._fitted = replace(streamed.fitted, data=None)
    for laplace in (loaded, streamed):
        assert isinstance(laplace.tune().tuning, EvidenceResult)
        before = laplace.posterior
        with pytest.raises(InputError, match=r"not at hand .*tune\(train_loader, method='self_consistent'\)"):
            laplace.tune(method="self_consistent")
        assert laplace.posterior is before
        laplace.tune(classes(150), method="self_consistent")
        assert laplace.data_scale == pytest.approx(expected.data_scale, rel=1e-3)


def test_what_it_is_not_for() -> None:
    numbers = Laplace(mlp(1, 6, 1), "regression").fit(regression(), progress=False)
    with pytest.raises(InputError, match="that of Gaussian does not. Use tune\\(\\) without a method"):
        numbers.tune(method="self_consistent")
    free = Laplace(network(), "classification", structure="matrix_free").fit(classes(150), progress=False)
    with pytest.raises(InputError, match="needs a posterior in blocks, got a MatrixFreePosterior"):
        free.tune(method="self_consistent")


def test_a_posterior_that_is_not_to_be_trusted_is_told_of() -> None:
    # Each datum counted as a twentieth: the posterior is far too wide.
    with pytest.warns(StatisticalWarning, match="is to be mistrusted: .* Tune on validation data") as said:
        laplace = fitted(data_scale=0.05).tune()
    assert [w.filename for w in said] == [__file__]
    assert not laplace.tuning.check.passed
    assert laplace.tuning.check.message in str(said[0].message)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@mistrusted
def test_two_processes_equal_one(tmp_path: Path) -> None:
    first, second = from_two_processes(run, tmp_path)
    alone = results(classes(COUNT))
    messages = [bytes(found.pop("message").tolist()).decode() for found in (first, second)]
    assert_close(first, second, rtol=0, atol=0)
    assert_close(first["full"], alone["full"], rtol=1e-6, atol=1e-9)
    assert_close(first["full posterior"], alone["full posterior"], rtol=1e-6, atol=1e-9)
    # The draws of Kronecker factors' effective dimension are each process's own.
    assert_close(first["kron"][-1], alone["kron"][-1], rtol=0.5, atol=0)
    # An error of one is an error of both: neither waits for the other.
    assert "processes failed while looking at training data" in messages[0]
    assert "targets" in messages[1]


# Real data


def digits(count: int) -> tuple[Data, Tensor, Tensor]:
    pytest.importorskip("sklearn")
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=generator(1))
    inputs, labels = torch.from_numpy(x / 16).float()[order], torch.from_numpy(y).long()[order]
    return [(inputs[:count], labels[:count])], inputs[count:], labels[count:]


@mistrusted
def test_digits_that_a_network_knows_by_heart() -> None:
    """At data of which it is certain the curvature is nearly zero, and the evidence counts them as none at all."""
    train, x, y = digits(1000)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(800):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(train[0][0]), train[0][1]).backward()
        optimiser.step()
    model.eval().requires_grad_(True).zero_grad(set_to_none=True)
    with torch.no_grad():
        assert float(nn.functional.cross_entropy(model(train[0][0]), train[0][1])) < 0.01
        plain = float(nn.functional.cross_entropy(model(x), y))
    laplace = Laplace(model, "classification").fit(train, progress=False)

    def nll() -> float:
        return float(-laplace.predict(x, generator=generator()).log_prob(y).mean())

    laplace.tune(method="evidence")
    wide, at_train = nll(), laplace.predict(train[0][0]).latent_var.mean()
    laplace.tune()
    assert laplace.tuning.curvature > 1.25
    assert float(laplace.predict(train[0][0]).latent_var.mean()) < 0.8 * float(at_train)
    assert nll() < wide - 0.1
    assert nll() < plain + 0.01
