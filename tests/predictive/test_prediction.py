"""Predictions: mixtures of samples, intervals, densities, scores, and the container."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from aftermap.errors import DataError, InputError, ShapeError, UnsupportedError
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson
from aftermap.metrics import coverage, entropy_decomposition, pointwise_nll
from aftermap.predictive.links import gaussian_prediction, samples_prediction
from aftermap.predictive.prediction import SCORES, Prediction

F64 = torch.float64
WEIGHTS = torch.tensor([1.0, 2.0, 0.0, 4.0, 0.5, 0.5, 2.0], dtype=F64)
SHAPES = [(5, 4), (5, 3, 4), (2, 5, 3, 4)]
LIKELIHOODS: dict[str, Likelihood] = {
    "classification": Categorical(),
    "binary": Bernoulli(),
    "regression": Gaussian(noise=0.6),
    "heteroscedastic": HeteroscedasticGaussian(),
    "counts": Poisson(),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def outputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(7, *shape, generator=seeded(seed), dtype=F64)


def targets_for(pred: Prediction, seed: int = 1) -> Tensor:
    shape = pred.mean.shape
    if pred.kind == "classification":
        return torch.randint(shape[-1], shape[:-1], generator=seeded(seed))
    if pred.kind == "regression":
        return torch.randn(shape, generator=seeded(seed), dtype=F64)
    return torch.randint(2 if pred.kind == "binary" else 6, shape, generator=seeded(seed))


def gaussian(name: str, *shape: int, link: str = "auto") -> Prediction:
    mean = torch.randn(*shape, generator=seeded(3), dtype=F64)
    var = 0.1 + torch.rand(*shape, generator=seeded(4), dtype=F64)
    return gaussian_prediction(LIKELIHOODS[name], mean, latent_var=var, link=link, generator=seeded())


# Mixtures.


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_mixture_moments(name: str, weights: Tensor | None, shape: tuple[int, ...]) -> None:
    likelihood, f = LIKELIHOODS[name], outputs(*shape)
    pred = samples_prediction(likelihood, f, weights=weights)
    share = torch.full((7,), 1 / 7, dtype=F64) if weights is None else weights / weights.sum()
    mean, second = 0.0, 0.0
    for w, one in zip(share, f, strict=True):
        mean = mean + w * likelihood.mean(one)
        second = second + w * (likelihood.variance(one) + likelihood.mean(one).square())
    assert_close(pred.mean, mean)
    assert_close(pred.epistemic + pred.aleatoric, pred.total, rtol=0, atol=0)
    assert bool((pred.epistemic >= 0).all())
    if name not in ("classification", "binary"):
        assert_close(pred.total, second - mean.square())
        assert_close(pred.aleatoric, sum(w * likelihood.variance(one) for w, one in zip(share, f, strict=True)))
    if weights is not None:
        assert_close(pred.weights, share)


def test_entropies_of_a_mixture_are_those_of_the_metrics() -> None:
    f = outputs(5, 4)
    classes = samples_prediction(Categorical(), f)
    wanted = entropy_decomposition(f.softmax(-1))
    assert_close((classes.epistemic, classes.aleatoric), (wanted.epistemic, wanted.aleatoric))
    binary = samples_prediction(Bernoulli(), f)
    p = f.sigmoid()
    wanted = entropy_decomposition(torch.stack([p, 1 - p], -1))
    assert_close((binary.epistemic, binary.aleatoric), (wanted.epistemic, wanted.aleatoric))


def test_a_whole_weight_counts_as_a_repeated_sample() -> None:
    f = outputs(5, 4)[:2]
    for likelihood in LIKELIHOODS.values():
        weighted = samples_prediction(likelihood, f, weights=torch.tensor([1.0, 2.0], dtype=F64))
        repeated = samples_prediction(likelihood, f[[0, 1, 1]])
        for name in ("mean", "epistemic", "aleatoric"):
            assert_close(getattr(weighted, name), getattr(repeated, name))
        y = targets_for(weighted)
        assert_close(weighted.log_prob(y), repeated.log_prob(y))


def test_one_sample_has_no_epistemic_part() -> None:
    for likelihood in LIKELIHOODS.values():
        pred = samples_prediction(likelihood, outputs(5, 4)[:1])
        assert_close(pred.epistemic, torch.zeros_like(pred.epistemic), rtol=0, atol=1e-12)


def test_extreme_outputs_in_float32() -> None:
    f = torch.tensor([[[1e4, -1e4]], [[-1e4, 1e4]]], requires_grad=True)
    for likelihood in (Categorical(), Bernoulli()):
        pred = samples_prediction(likelihood, f)
        assert_close(pred.mean, torch.full((1, 2), 0.5))
        assert_close(pred.epistemic.flatten(), torch.full((pred.epistemic.numel(),), math.log(2)))
        (gradient,) = torch.autograd.grad(pred.total.sum() + pred.epistemic.sum(), f)
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize(
    "bad, weights, error, message",
    [
        (torch.zeros(5, 4), None, ShapeError, r"\[S, N, ..., C\] with samples first, got \[5, 4\]"),
        (torch.zeros(0, 5, 4), None, ShapeError, r"got \[0, 5, 4\]"),
        (torch.full((2, 5, 4), torch.nan), None, DataError, r"outputs\[0, 0, 0\] is nan"),
        (torch.full((2, 5, 4), torch.inf), None, DataError, r"outputs\[0, 0, 0\] is inf, but must be finite"),
        (torch.zeros(2, 5, 4), torch.ones(3), ShapeError, r"weights have shape \[3\], but there are 2 samples"),
        (torch.zeros(2, 5, 4), torch.tensor([1.0, -1.0]), DataError, r"weights\[1\] is -1.0"),
        (torch.zeros(2, 5, 4), torch.zeros(2), DataError, "weights are all zero"),
    ],
)
def test_bad_samples(bad: Tensor, weights: Tensor | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        samples_prediction(Categorical(), bad, weights=weights)


# Densities.


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_log_prob_is_that_of_the_distribution(name: str, shape: tuple[int, ...]) -> None:
    preds = [samples_prediction(LIKELIHOODS[name], outputs(*shape), weights=WEIGHTS)]
    preds += [gaussian(name, *shape)] if name != "counts" else []
    for pred in preds:
        y = targets_for(pred)
        each = pred.distribution().log_prob(y if pred.kind == "classification" else y.to(F64))
        assert_close(pred.log_prob(y), each.reshape(shape[0], -1).sum(1))


def test_log_prob_of_a_gaussian_mixture_by_hand() -> None:
    f, likelihood = outputs(5, 4), HeteroscedasticGaussian()
    pred = samples_prediction(likelihood, f, weights=WEIGHTS)
    y = targets_for(pred)
    density = torch.zeros(5, 2, dtype=F64)
    for w, one in zip(WEIGHTS / WEIGHTS.sum(), f, strict=True):
        normal = torch.distributions.Normal(likelihood.mean(one), likelihood.variance(one).sqrt())
        density += w * normal.log_prob(y).exp()
    assert_close(pred.log_prob(y), density.log().sum(-1))


def test_log_prob_of_classes_is_the_log_of_the_mean_probability() -> None:
    pred = samples_prediction(Categorical(), outputs(5, 4))
    y = targets_for(pred)
    assert_close(pred.log_prob(y), -pointwise_nll(pred.mean, y))
    sure = samples_prediction(Categorical(), torch.tensor([[[1e4, -1e4]]], dtype=F64))
    assert_close(sure.log_prob(torch.tensor([1])), torch.tensor([math.log(1e-12)], dtype=F64))


def test_ignored_positions_do_not_count() -> None:
    pred = samples_prediction(Categorical(), outputs(5, 3, 4))
    y = targets_for(pred)
    ignored = y.clone()
    ignored[:, 1] = -100
    rest = samples_prediction(Categorical(), outputs(5, 3, 4)[:, :, [0, 2]])
    assert_close(pred.log_prob(ignored), rest.log_prob(y[:, [0, 2]]))


def test_a_gaussian_log_rate_gives_the_same_density_as_many_samples() -> None:
    pred = gaussian("counts", 5, 4)
    many = gaussian_prediction(
        Poisson(), pred.latent_mean, latent_var=pred.latent_var, link="mc", samples=8192, generator=seeded()
    )
    y = targets_for(pred)
    assert_close(pred.log_prob(y), many.log_prob(y), rtol=0, atol=5e-3)


def test_the_negative_binomial_has_the_mean_and_variance_of_the_prediction() -> None:
    pred = gaussian("counts", 5, 4)
    assert_close(pred.distribution().mean, pred.mean)
    assert_close(pred.distribution().variance, pred.total)
    still = gaussian_prediction(Poisson(), torch.zeros(2, 3, dtype=F64), latent_var=torch.zeros(2, 3, dtype=F64))
    y = torch.tensor([[0.0, 1.0, 4.0], [2.0, 3.0, 7.0]], dtype=F64)
    poisson = torch.distributions.Poisson(torch.ones(2, 3, dtype=F64)).log_prob(y)
    assert_close(still.distribution().log_prob(y), poisson, rtol=1e-6, atol=1e-6)
    assert_close(still.log_prob(y), poisson.sum(-1))


@pytest.mark.parametrize("name", ["regression", "heteroscedastic", "counts"])
def test_mixture_distribution_has_the_moments_of_the_prediction(name: str) -> None:
    pred = samples_prediction(LIKELIHOODS[name], outputs(5, 4), weights=WEIGHTS)
    assert_close(pred.distribution().mean, pred.mean)
    assert_close(pred.distribution().variance, pred.total)


@pytest.mark.parametrize(
    "name, targets, message",
    [
        ("classification", torch.zeros(5, 4, dtype=torch.long), r"need class indices of shape \[5\]"),
        ("classification", torch.zeros(5), "targets must be integers"),
        ("classification", torch.full((5,), 4), r"targets\[0\] is 4, but must be in 0 ... 3"),
        ("regression", torch.zeros(4, 5), r"targets have shape \[4, 5\]"),
        ("regression", torch.full((5, 4), torch.nan), r"targets\[0, 0\] is nan, but must be a finite number"),
        ("binary", torch.full((5, 4), 2), r"targets\[0, 0\] is 2, but must be in \[0, 1\]"),
        ("counts", torch.full((5, 4), 0.5), "must be a whole number of 0 or more"),
    ],
)
def test_bad_targets(name: str, targets: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        samples_prediction(LIKELIHOODS[name], outputs(5, 4)).log_prob(targets)


# Intervals.


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_regression_intervals_cover_targets_and_function(level: float) -> None:
    g = seeded()
    mean = torch.randn(20_000, 3, generator=g, dtype=F64)
    var = torch.rand(20_000, 3, generator=g, dtype=F64)
    f = mean + var.sqrt() * torch.randn(20_000, 3, generator=g, dtype=F64)
    y = f + 0.6 * torch.randn(20_000, 3, generator=g, dtype=F64)
    pred = gaussian_prediction(Gaussian(noise=0.6), mean, latent_var=var)
    assert coverage(*pred.interval(level), y) == pytest.approx(level, abs=0.01)
    assert coverage(*pred.interval(level, noise=False), f) == pytest.approx(level, abs=0.01)
    assert coverage(*pred.interval(level, noise=False), y) < level - 0.05


@pytest.mark.parametrize("link", ["auto", "mc"])
def test_count_intervals_cover(link: str) -> None:
    g = seeded()
    mean = 3.0 + torch.randn(700, 2, generator=g, dtype=F64)
    var = torch.full_like(mean, 0.3)
    rate = (mean + var.sqrt() * torch.randn(700, 2, generator=g, dtype=F64)).exp()
    y = torch.poisson(rate, generator=g)
    pred = gaussian_prediction(Poisson(), mean, latent_var=var, link=link, samples=128, generator=g)
    covered = coverage(*pred.interval(0.9), y)
    assert 0.88 <= covered <= 0.95  # counts are whole: the smallest interval may hold a little more
    assert coverage(*pred.interval(0.9, noise=False), rate) == pytest.approx(0.9, abs=0.025)


def test_probability_intervals_cover_the_probability() -> None:
    g = seeded()
    mean, var = torch.randn(3000, 3, generator=g, dtype=F64), torch.ones(3000, 3, dtype=F64)
    p = mean + torch.randn(3000, 3, generator=g, dtype=F64)
    binary = gaussian_prediction(Bernoulli(), mean, latent_var=var)
    assert coverage(*binary.interval(0.8), p.sigmoid()) == pytest.approx(0.8, abs=0.02)
    classes = gaussian_prediction(Categorical(), mean, latent_var=var, link="mc", samples=512, generator=g)
    assert coverage(*classes.interval(0.8), p.softmax(-1)) == pytest.approx(0.8, abs=0.02)


def test_intervals_that_do_not_exist() -> None:
    with pytest.raises(UnsupportedError, match='link "pairwise" keeps no samples of the probabilities; predict with'):
        gaussian("classification", 5, 4, link="pairwise").interval()
    with pytest.raises(InputError, match=r"level must lie in \(0, 1\), got 95"):
        gaussian("regression", 5, 4).interval(95)
    bare = Prediction("counts", *(torch.ones(3, 2) for _ in range(4)))
    with pytest.raises(UnsupportedError, match="neither samples nor a latent Gaussian"):
        bare.interval()


# Scores and labels.


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_of_classes_are_one_number_per_example_and_higher_is_more_unusual(shape: tuple[int, ...]) -> None:
    sure, unsure = 8.0 * torch.eye(4, dtype=F64)[0].expand(shape), torch.zeros(shape, dtype=F64)
    for name in ("classification", "binary"):
        for kind in SCORES:
            low, high = (
                gaussian_prediction(
                    LIKELIHOODS[name], m, latent_var=torch.full(shape, v, dtype=F64), generator=seeded()
                )
                for m, v in ((sure, 0.1), (unsure, 2.0))
            )
            assert low.score(kind).shape == (shape[0],)
            assert bool((low.score(kind) < high.score(kind)).all())


def test_scores_of_numbers() -> None:
    pred = gaussian("regression", 5, 4)
    assert_close(pred.score("variance"), pred.epistemic.mean(-1))
    assert_close(pred.score("mutual_information"), 0.5 * (1 + pred.epistemic / 0.36).log().mean(-1))
    assert_close(pred.score("entropy"), pred.distribution().entropy().mean(-1))
    assert_close(gaussian("counts", 5, 4).score("variance"), gaussian("counts", 5, 4).epistemic.mean(-1))
    with pytest.raises(
        UnsupportedError, match="'max_probability' needs kind classification or binary, but this is reg"
    ):
        pred.score("max_probability")
    with pytest.raises(UnsupportedError, match="the score 'entropy' needs kind .* but this is counts"):
        gaussian("counts", 5, 4).score("entropy")
    with pytest.raises(InputError, match="kind is 'mi', but must be one of 'entropy', 'mutual_information'"):
        pred.score("mi")


def test_variance_of_classes_without_a_latent_gaussian_is_that_of_the_samples() -> None:
    f = outputs(5, 4)
    wanted = f.softmax(-1).var(0, correction=0).mean(-1)
    assert_close(samples_prediction(Categorical(), f).score("variance"), wanted)


@pytest.mark.parametrize("positions", [(), (3,)])
@pytest.mark.parametrize("full", [True, False])
def test_variance_of_classes_is_that_of_the_latent_gaussian(positions: tuple[int, ...], full: bool) -> None:
    """The mean over positions and classes, by loops; all dimensions differ, so that none is taken for another."""
    root = outputs(*positions, 4, 4, seed=3)
    cov = root @ root.mT
    variance = torch.zeros(7, *positions, 4, dtype=F64)
    for label in range(4):
        variance[..., label] = cov[..., label, label]
    latent = {"latent_cov": cov} if full else {"latent_var": variance}
    found = gaussian_prediction(Categorical(), outputs(*positions, 4), generator=seeded(), **latent)
    wanted = torch.stack([v.mean() for v in variance])
    assert_close(found.score("variance"), wanted)
    if full:  # as somebody may put a prediction together
        assert_close(replace(found, latent_var=None).score("variance"), wanted)


def test_labels_and_confidence() -> None:
    classes = samples_prediction(Categorical(), outputs(5, 3, 4))
    assert_close(classes.labels, classes.mean.argmax(-1))
    assert_close(classes.confidence, classes.mean.gather(-1, classes.labels.unsqueeze(-1)).squeeze(-1))
    binary = samples_prediction(Bernoulli(), outputs(5, 4))
    assert_close(binary.labels, (binary.mean > 0.5).long())
    assert bool((binary.confidence >= 0.5).all())
    with pytest.raises(UnsupportedError, match="labels needs kind classification or binary, but this is regression"):
        _ = gaussian("regression", 5, 4).labels
