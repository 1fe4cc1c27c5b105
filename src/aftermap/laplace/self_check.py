"""A posterior checks itself: is the Bayesian predictive still as good as the network it came from?

A badly scaled prior makes a predictive that is uncertain about everything: on networks with normalisation the evidence can
choose one. The signs are plain on any labelled data: accuracy falls, or the mean confidence drops far below the accuracy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aftermap.batches import Batch
from aftermap.errors import DataError
from aftermap.predictive import PosteriorPredictor, Prediction

__all__ = ["SelfCheck", "check_predictive"]

# A fall in accuracy, and a mean confidence below the accuracy, by more than this is a collapse.
_ACCURACY_DROP = 0.02
_UNDERCONFIDENCE = 0.10
# Regression and counts: nats per datum by which the predictive may be worse.
_NLL_RISE = 0.2


@dataclass(frozen=True)
class SelfCheck:
    """The network's own answers against the Bayesian ones on some labelled data.

    Attributes:
        n_data: How many examples were used.
        map_nll: The network's mean negative log predictive probability.
        bayes_nll: The same of the Bayesian predictive.
        map_accuracy: The network's accuracy; None where there are no classes.
        bayes_accuracy: The same of the Bayesian predictive.
        map_confidence: The network's mean probability of the predicted class; None where there are no classes.
        bayes_confidence: The same of the Bayesian predictive.
        collapsed: Whether the predictive is useless beside the network itself.
        message: The comparison in one sentence.
    """

    n_data: int
    map_nll: float
    bayes_nll: float
    map_accuracy: float | None
    bayes_accuracy: float | None
    map_confidence: float | None
    bayes_confidence: float | None
    collapsed: bool
    message: str


def check_predictive(
    laplace: Any,
    batches: Iterable[Batch],
    *,
    limit: int = 1000,
    kind: str = "linearised",
    link: str = "auto",
    samples: int = 100,
) -> SelfCheck:
    """Compares the network's own answers with the Bayesian ones.

    Args:
        laplace: A fitted `Laplace`, the posterior of an optimiser, or a `PosteriorPredictor`.
        batches: Labelled data; held out if possible.
        limit: The largest number of examples to use.
        kind: The predictive to check: "linearised" or "sampling"; see `Laplace.predict`.
        link: How the linearised predictive turns the Gaussian over logits into probabilities.
        samples: The number of draws that the predictive averages over.
    """
    predictor = laplace if isinstance(laplace, PosteriorPredictor) else laplace.predictor
    plain: list[Prediction] = []
    bayes: list[Prediction] = []
    targets: list[Tensor] = []
    count = 0
    for batch in batches:
        if count >= limit:
            break
        plain.append(predictor.map_prediction(batch.inputs))
        seeded = torch.Generator().manual_seed(0)
        bayes.append(laplace.predict(batch.inputs, kind=kind, link=link, samples=samples, generator=seeded))
        targets.append(batch.targets)
        count += batch.size
    if not count:
        raise DataError("there are no labelled data to check the predictive on")
    return _compare(Prediction.concatenate(plain), Prediction.concatenate(bayes), torch.cat(targets))


def _compare(plain: Prediction, bayes: Prediction, targets: Tensor) -> SelfCheck:
    map_nll = -float(plain.log_prob(targets).to(torch.float64).mean())
    bayes_nll = -float(bayes.log_prob(targets).to(torch.float64).mean())
    if plain.kind not in ("classification", "binary"):
        collapsed = not bayes_nll <= map_nll + _NLL_RISE
        message = f"negative log-likelihood {map_nll:.3f} -> {bayes_nll:.3f}"
        return SelfCheck(len(plain), map_nll, bayes_nll, None, None, None, None, collapsed, message)
    hits = [_hits(p, targets) for p in (plain, bayes)]
    accuracy = [float(h.double().mean()) for h in hits]
    confidence = [_confidence(p) for p in (plain, bayes)]
    shift = max(0.0, accuracy[0] - confidence[0])
    collapsed = (
        not bayes_nll < float("inf")
        or (accuracy[1] < accuracy[0] - _ACCURACY_DROP and _significant(*hits))
        or accuracy[1] - confidence[1] > _UNDERCONFIDENCE + shift
    )
    message = (
        f"accuracy {accuracy[0]:.3f} -> {accuracy[1]:.3f}, negative log-likelihood {map_nll:.3f} -> {bayes_nll:.3f}, "
        f"mean confidence {confidence[0]:.3f} -> {confidence[1]:.3f}"
    )
    return SelfCheck(
        len(plain), map_nll, bayes_nll, accuracy[0], accuracy[1], confidence[0], confidence[1], collapsed, message
    )


def _hits(prediction: Prediction, targets: Tensor) -> Tensor:
    """Which of the labelled positions are predicted rightly."""
    if prediction.kind == "binary":
        return ((prediction.mean > 0.5) == (targets.reshape(prediction.mean.shape) > 0.5)).reshape(-1)
    labels = prediction.mean.argmax(-1)
    known = (targets >= 0) & (targets < prediction.mean.shape[-1])
    return (labels == targets)[known]


def _significant(plain: Tensor, bayes: Tensor) -> bool:
    """Whether fewer hits are more than chance: McNemar's test on the positions that changed, at two standard deviations."""
    changed = int((plain != bayes).sum())
    return int(plain.sum()) - int(bayes.sum()) > 2 * changed**0.5


def _confidence(prediction: Prediction) -> float:
    if prediction.kind == "binary":
        return float(torch.maximum(prediction.mean, 1 - prediction.mean).double().mean())
    return float(prediction.mean.amax(-1).double().mean())
