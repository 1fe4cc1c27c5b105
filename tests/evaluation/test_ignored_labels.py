"""The class index of positions without a label is a name: another one, even that of a class, changes no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.baselines import Deterministic, MCDropout, TemperatureScaling
from aftermap.evaluation import evaluate
from aftermap.laplace import Laplace, Mixture
from aftermap.likelihoods import Categorical
from aftermap.predictive import Prediction

Batches = list[tuple[Tensor, Tensor]]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 4)).double().eval()


def data(index: int) -> Batches:
    """Three positions for each of 30 examples. Class 0 does not occur; an example has no label at all."""
    x = torch.randn(30, 3, 3, generator=seeded(), dtype=torch.float64)
    y = torch.randint(1, 4, (30, 3), generator=seeded(1))
    y[torch.rand(30, 3, generator=seeded(2)) < 0.3] = index
    y[4] = index
    return [(x[:12], y[:12]), (x[12:], y[12:])]


def metrics_of(predictor: Any, batches: Batches) -> dict[str, float]:
    return {n: v.value for n, v in evaluate(predictor, batches, n_resamples=0).metrics.items()}


def fitted(likelihood: Categorical, batches: Batches) -> Laplace:
    return Laplace(network(), likelihood).fit(batches, progress=False)


def tuned(method: str) -> Callable[[Categorical, Batches], Any]:
    def numbers(likelihood: Categorical, batches: Batches) -> Any:
        held_out = batches if method in ("grid", "validation") else None
        laplace = fitted(likelihood, batches).tune(held_out, method=method, generator=seeded())
        return [laplace.data_scale, laplace.output_temperature, *map(float, laplace.prior_precision.values())]

    return numbers


NUMBERS: dict[str, Callable[[Categorical, Batches], Any]] = {
    **{f"tune by {m}": tuned(m) for m in ("evidence", "self_consistent", "dimension", "validation", "grid")},
    "evaluate a posterior": lambda likelihood, batches: metrics_of(fitted(likelihood, batches), batches),
    "evaluate a mixture": lambda likelihood, batches: metrics_of(
        Mixture([fitted(likelihood, batches)] * 2, weights="uniform"), batches
    ),
    "evaluate the network": lambda likelihood, batches: metrics_of(Deterministic(network(), likelihood), batches),
    "evaluate dropout": lambda likelihood, batches: metrics_of(MCDropout(network(), likelihood, samples=3), batches),
    "evaluate with a temperature": lambda likelihood, batches: metrics_of(
        TemperatureScaling(network(), likelihood).fit(batches), batches
    ),
    "where, by class": lambda likelihood, batches: [str(fitted(likelihood, batches).where(batches).table("class"))],
    "self-check": lambda likelihood, batches: [
        getattr(am.fit(network(), likelihood, batches, batches, verbose=False).report.check, n)
        for n in ("map_nll", "bayes_nll", "map_accuracy", "bayes_accuracy", "at_chance")
    ],
}


@pytest.mark.filterwarnings("ignore::aftermap.errors.StatisticalWarning")  # the network is not trained
@pytest.mark.parametrize("what", NUMBERS)
def test_another_index_changes_nothing(what: str) -> None:
    expected = NUMBERS[what](Categorical(), data(-100))
    for index in (0, 255):  # that of a class, and that of many segmentations
        assert NUMBERS[what](Categorical(ignore_index=index), data(index)) == pytest.approx(expected, nan_ok=True)


def test_the_mutual_information_of_results_is_that_of_labelled_positions() -> None:
    batches = data(-100)
    laplace = fitted(Categorical(), batches)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    information = laplace.predict(x, link="pairwise").epistemic[y >= 0].mean().item()
    found = evaluate(laplace, batches, n_resamples=0, options={"link": "pairwise"})
    assert found["mutual_information"] == pytest.approx(information)


def test_a_prediction_knows_the_index() -> None:
    prediction = fitted(Categorical(ignore_index=0), data(0)).predict(data(0)[0][0])
    joined = Prediction.concatenate([prediction[:2], prediction[2:].cpu()])
    targets = data(0)[0][1]
    assert joined.has_label(targets).tolist() == (targets != 0).tolist()
    picked = joined.mean.gather(-1, targets[..., None])[..., 0].log()
    torch.testing.assert_close(joined.log_prob(targets), torch.where(targets == 0, 0.0, picked).sum(-1))
    every = joined.log_prob(targets, ignore_index=-100)
    torch.testing.assert_close(every, picked.sum(-1))
