"""The temperature that tuning divides outputs by: the predictive has it; the network, the curvature and the evidence do not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import aftermap as am
from aftermap.laplace import Laplace, Mixture
from aftermap.laplace.stationarity import check_stationarity, refined_evidence
from aftermap.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from aftermap.posteriors.base import Hyperparameters, likelihood_with
from aftermap.predictive import gaussian_prediction
from aftermap.prior import Prior
from tests.laplace.problems import classes, generator, mlp, new_classes, normal, trained

T = 1.7
edges = pytest.mark.filterwarnings("ignore:the best point lies at the edge")
by_heart = pytest.mark.filterwarnings("ignore:matched to the effective dimension")


@cache
def network() -> nn.Module:
    return trained(mlp(), classes(), nn.CrossEntropyLoss(reduction="sum"), decay=0.3, steps=60)


def fitted(**options: object) -> Laplace:
    return Laplace(network(), "classification", **options).fit(classes(), progress=False)


def divided(laplace: Laplace, temperature: float = T) -> Laplace:
    """The same fit with another temperature and nothing else, as a tuning would set it."""
    at = replace(laplace.hyperparameters, output_temperature=temperature)
    posterior = at.applied_to(laplace.posterior, laplace.factors.curvature)
    laplace._fitted = replace(laplace.fitted, hyperparameters=at, posterior=posterior)
    return laplace


def test_the_predictive_has_it_and_the_networks_own_answers_do_not() -> None:
    plain, warm, x = fitted(), divided(fitted()), normal(9, 3, seed=8)
    assert warm.output_temperature == T
    assert warm.likelihood.config() == Categorical(temperature=T).config()
    assert warm.base_likelihood.config() == Categorical().config()
    one, two = plain.predict(x), warm.predict(x, generator=generator(3))
    assert_close(two.latent_mean, one.latent_mean / T, rtol=1e-12, atol=0)
    assert_close(two.latent_cov, one.latent_cov / T**2, rtol=1e-12, atol=1e-15)
    by_hand = gaussian_prediction(Categorical(), one.latent_mean / T, one.latent_cov / T**2, generator=generator(3))
    assert_close(two.mean, by_hand.mean, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        assert_close(warm.predictor.map_prediction(x).mean, torch.softmax(network()(x), 1), rtol=1e-12, atol=0)
    # Draws of weights give outputs, which are divided, too.
    weights = warm.ensemble(4, generator(1))
    outputs = torch.stack([torch.func.functional_call(network(), w, (x,)) for w in weights]).detach()
    assert_close(
        warm.predict(x, kind="sampling", weights=weights).mean,
        torch.softmax(outputs / T, -1).mean(0),
        rtol=1e-9,
        atol=1e-12,
    )


def test_the_evidence_and_what_it_rests_on_do_not_know_of_it() -> None:
    plain, warm = fitted(), divided(fitted())
    assert_close(warm.log_evidence(), plain.log_evidence(), rtol=0, atol=0)
    assert check_stationarity(warm) == check_stationarity(plain)
    one, two = refined_evidence(warm), refined_evidence(plain)
    assert (one.gain, one.converged) == (two.gain, two.converged)
    assert_close(one.log_evidence, two.log_evidence, rtol=0, atol=0)
    assert_close(Mixture([warm, plain]).weights, torch.full((2,), 0.5, dtype=torch.float64), rtol=1e-12, atol=0)


def test_what_a_layer_adds_to_the_training_loss_is_of_the_loss_it_was_trained_with() -> None:
    options = {"calibration": True, "draws": 5, "saliency": False, "top": 1}
    one, two = (la.where(classes(), generator=generator(2), **options) for la in (fitted(), divided(fitted())))
    for plain, warm in zip(one.calibration, two.calibration, strict=True):
        assert plain == warm


@edges
@by_heart
def test_every_tuning_starts_from_the_temperature_of_the_constructor() -> None:
    data = new_classes(60)
    grid = {"precisions": [0.1, 1.0, 10.0], "scales": [0.1, 1.0, 10.0]}
    fresh = fitted().tune(data, **grid)
    for warm in (divided(fitted()), fitted().tune(data)):
        assert warm.output_temperature != 1.0
        warm.tune(data, **grid)
        assert warm.tuning == fresh.tuning
        assert warm.output_temperature == 1.0
        assert warm.predictor.likelihood.config() == Categorical().config()
    for method in ("evidence", "lbfgs", "dimension", "self_consistent"):
        once = fitted().tune(method=method)
        warm = divided(fitted()).tune(method=method)
        assert warm.output_temperature == once.output_temperature
        assert_close(warm.log_evidence(), once.log_evidence(), rtol=1e-9, atol=0)
    trained_at_two = Laplace(network(), Categorical(temperature=2.0)).fit(classes(), progress=False)
    assert trained_at_two.output_temperature == 2.0
    assert divided(trained_at_two).tune(method="evidence").output_temperature == 2.0


def test_what_keeps_it_and_what_forgets_it() -> None:
    first, second = classes()
    laplace = divided(Laplace(network(), "classification").fit([first], progress=False))
    assert laplace.with_prior(3.0).output_temperature == T
    assert laplace.narrow(2.0).output_temperature == T
    assert laplace.fit([second], update=True, progress=False).output_temperature == T
    assert laplace.fit([second], progress=False).output_temperature == 1.0


def test_a_saved_posterior_keeps_it(tmp_path: Path) -> None:
    warm, x = divided(fitted()), normal(9, 3, seed=8)
    again = am.load(warm.save(tmp_path / "posterior"), network())
    assert again.output_temperature == T
    assert again.base_likelihood.config() == Categorical().config()
    assert torch.equal(again.predict(x, generator=generator(1)).mean, warm.predict(x, generator=generator(1)).mean)
    assert torch.equal(again.predictor.map_prediction(x).mean, warm.predictor.map_prediction(x).mean)
    assert again.tune(method="evidence").output_temperature == 1.0


def test_a_mixture_of_different_temperatures_predicts_and_has_no_one_likelihood() -> None:
    parts, x = [fitted(), divided(fitted())], normal(9, 3, seed=8)
    mixture = Mixture(parts, "uniform")
    means = [la.predict(x, generator=generator(3)).mean for la in parts]
    assert_close(mixture.predict(x, generator=generator(3)).mean, torch.stack(means).mean(0), rtol=0.02, atol=0.01)
    with pytest.raises(am.errors.UnsupportedError, match="their noise or temperature was tuned"):
        _ = mixture.likelihood


def test_the_likelihood_of_hyperparameters() -> None:
    at = Hyperparameters(Prior({}, {}, {}), torch.tensor(0.5, dtype=torch.float64), output_temperature=T)
    assert at.likelihood(Categorical(ignore_index=3)).config() == Categorical(ignore_index=3, temperature=T).config()
    assert at.likelihood(Bernoulli()).config() == Bernoulli(temperature=T).config()
    assert at.likelihood(Gaussian(2.0)).config() == Gaussian(1.0).config()
    assert at.likelihood(Poisson()).config() == Poisson().config()
    assert (
        likelihood_with(Categorical(temperature=T), torch.tensor(1.0), T).config()
        == Categorical(temperature=T).config()
    )
