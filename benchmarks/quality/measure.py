"""The numbers of one predictor on one task: accuracy, NLL, calibration, errors and unusual inputs found, coverage, time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import aftermap as am
from aftermap import metrics
from aftermap.predictive import Prediction
from benchmarks.quality.training import BATCH, Prepared

__all__ = ["LEVELS", "Made", "hindsight", "measure", "measure_scores", "predict_all", "probabilities"]

LEVELS = (50, 90, 95)  # percent, of intervals
SCORES = ("entropy", "mutual_information")
REFERENCE = 300  # usual inputs, at most, that ranks are taken among

Numbers = dict[str, Any]


@dataclass(frozen=True)
class Made:
    """A predictor that is ready to be measured.

    Attributes:
        predict: Gives the prediction for inputs.
        n: How many validation labels it has seen.
        split: Which of the validation sets of that size.
        seconds: Processor seconds that making it took.
        note: What else is worth keeping: the structure, the hyperparameters, warnings.
    """

    predict: Callable[[Tensor], Prediction]
    n: int = 0
    split: int = 0
    seconds: float = 0.0
    note: dict[str, Any] = field(default_factory=dict)


def predict_all(predict: Callable[[Tensor], Prediction], x: Tensor, size: int = BATCH) -> Prediction:
    """The prediction for all inputs, batch by batch, without what fills memory."""
    parts = []
    for piece in x.split(size):
        p = predict(piece).detach()
        parts.append(Prediction(p.kind, p.mean, p.epistemic, p.aleatoric, p.total, link=p.link))
    return Prediction.concatenate(parts)


def probabilities(prediction: Prediction) -> Tensor:
    """Probabilities of the classes [N, C] in float64; one logit has two classes."""
    mean = prediction.mean.double()
    p = torch.cat([1 - mean, mean], -1) if prediction.kind == "binary" else mean
    return p / p.sum(-1, keepdim=True)


def _labels(targets: Tensor) -> Tensor:
    return targets.reshape(-1).long()


@lru_cache(maxsize=2)
def _logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(piece) for piece in x.split(BATCH)]).double()


@lru_cache(maxsize=1)
def hindsight(prepared: Prepared) -> float:
    """The NLL on the test data that a method is compared with.

    A classification: the smaller one of the network's and of the network's with the best temperature, chosen on the test data
    themselves. A regression: the network with a constant noise from the whole validation pool.
    """
    x, y = prepared.test
    outputs = _logits(prepared.model, x)
    if prepared.likelihood == "regression":
        pool_x, pool_y = prepared.splits.pool
        noise = float((_logits(prepared.model, pool_x) - pool_y).square().mean().sqrt())
        return float(am.likelihoods.Gaussian(noise).nll(outputs, y.double()).mean())
    likelihood = am.likelihoods.parse_likelihood(prepared.likelihood)

    def loss(log_temperature: float) -> float:
        return float(likelihood.nll(outputs / math.exp(log_temperature), y).mean())

    low, high, golden = -4.0, 4.0, (math.sqrt(5) - 1) / 2
    for _ in range(60):  # convex in 1/T, so that there is one minimum
        left, right = high - golden * (high - low), low + golden * (high - low)
        if loss(left) < loss(right):
            high = right
        else:
            low = left
    return min(loss(0.0), loss((low + high) / 2))


def _area(scores: Tensor, positive: Tensor) -> float | None:
    """AUROC; None where there is nothing to find."""
    if not 0 < int(positive.sum()) < len(positive):
        return None
    return metrics.auroc(scores, positive)


def measure(made: Made, prepared: Prepared) -> Numbers:
    """All numbers of a predictor on the test data and on the unusual inputs."""
    x, y = prepared.test
    start = time.process_time()
    prediction = predict_all(made.predict, x)
    per_input = (time.process_time() - start) / len(x)
    nll = -float(prediction.log_prob(y).double().mean())
    row: Numbers = {"n": made.n, "split": made.split, "nll": nll, "d": nll - hindsight(prepared)}
    if prepared.likelihood == "regression":
        row |= _regression(prediction, y)
    else:
        row |= _classification(made, prediction, prepared)
    return row | {"seconds": made.seconds, "ms_per_input": 1000 * per_input, "note": made.note}


def _regression(prediction: Prediction, y: Tensor) -> Numbers:
    row: Numbers = {"rmse": metrics.rmse(prediction.mean, y)}
    for level in LEVELS:
        lower, upper = prediction.interval(level / 100)
        row[f"cover{level}"] = metrics.coverage(lower, upper, y)
    return row


def _classification(made: Made, prediction: Prediction, prepared: Prepared) -> Numbers:
    p, labels = probabilities(prediction), _labels(prepared.test[1])
    wrong = metrics.misclassified(p, labels)
    row: Numbers = {
        "accuracy": metrics.accuracy(p, labels),
        "ece": metrics.ece(p, labels, n_bins=15),
        "error_auroc": _area(1 - p.amax(-1), wrong),
        "ood": {},
    }
    if not prepared.ood:
        return row
    ranked = _ranks(made, prediction, prepared)
    for name, inputs in prepared.ood.items():
        other = predict_all(made.predict, inputs)
        outside = torch.cat([torch.zeros(len(prediction)), torch.ones(len(other))]).bool()
        scores = {s: (prediction.score(s), other.score(s)) for s in SCORES}
        if ranked is not None:
            scores["either"] = (ranked(prediction), ranked(other))
        # Mutual information that is zero everywhere finds nothing: the network's has no number.
        row["ood"][name] = {
            s: _area(torch.cat(pair), outside) for s, pair in scores.items() if bool(torch.cat(pair).any())
        }
    return row


def _ranks(made: Made, prediction: Prediction, prepared: Prepared) -> Callable[[Prediction], Tensor] | None:
    """The score "either", where the library has it and the two scores differ: ranks among usual inputs, without their labels."""
    reference = getattr(am.evaluation, "Reference", None)
    if reference is None or not bool(prediction.epistemic.any()):
        return None
    shown = prepared.validation(made.n, made.split) if made.n else prepared.whole_pool()
    usual = torch.cat([x for x, _ in shown])[:REFERENCE]
    known = reference.from_predictions(predict_all(made.predict, usual))
    return lambda other: known.score(other, "either")


def measure_scores(score: Callable[[Tensor], Tensor], seconds: float, prepared: Prepared) -> Numbers:
    """The numbers of a detector, which has scores and no probabilities: errors and unusual inputs found."""
    x, y = prepared.test
    start = time.process_time()
    usual = torch.cat([score(piece) for piece in x.split(BATCH)])
    per_input = (time.process_time() - start) / len(x)
    outputs = _logits(prepared.model, x)
    labels = (outputs[:, 0] > 0).long() if outputs.shape[-1] == 1 else outputs.argmax(-1)
    row: Numbers = {"n": 0, "split": 0, "error_auroc": _area(usual, labels != _labels(y)), "ood": {}}
    for name, inputs in prepared.ood.items():
        other = torch.cat([score(piece) for piece in inputs.split(BATCH)])
        outside = torch.cat([torch.zeros(len(usual)), torch.ones(len(other))]).bool()
        row["ood"][name] = {"own": _area(torch.cat([usual, other]), outside)}
    return row | {"seconds": seconds, "ms_per_input": 1000 * per_input, "note": {}}
