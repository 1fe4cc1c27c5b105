"""A posterior checks itself on held-out data, where it must not be worse than the network that it came from.

A badly scaled prior makes a predictive that is uncertain about everything. On held-out labels that shows in the likelihood and in the
accuracy, by more than chance. Training data cannot tell: a network that knows them by heart is always better there, so they are judged
at cavities instead (`aftermap.laplace.self_consistent`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aftermap.batches import Batch
from aftermap.errors import DataError
from aftermap.laplace.examples import FiniteExamples
from aftermap.likelihoods import Likelihood, at_temperature, temperature_of
from aftermap.predictive import PosteriorPredictor, Prediction, TrainedPosterior
from aftermap.predictive.links import gaussian_prediction
from aftermap.progress import progress

if TYPE_CHECKING:
    from aftermap.laplace.laplace import Laplace

__all__ = ["SelfCheck", "check_predictive", "network_at_chance"]

# A fall in accuracy, and a rise of the negative log-likelihood in nats per label, that is a collapse where it is more than chance.
_ACCURACY_DROP = 0.02
_NLL_RISE = {"classification": 0.05, "binary": 0.05}
_OTHER_NLL_RISE = 0.2  # of regressions and counts
_FEW = 20  # labelled data, below which nobody can tell chance from knowledge
_TEMPERATURES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # at which training data may show that a network knows something
_NOTHING = 1e-3  # a change of probabilities, or of a standard deviation relative to the noise, that nobody notices


@dataclass(frozen=True)
class SelfCheck:
    """The network's own answers against the Bayesian ones on some labelled data.

    Attributes:
        n_data: How many examples were used.
        map_nll: The network's mean negative log predictive probability of a label; an example may have several.
        bayes_nll: The Bayesian predictive's mean negative log predictive probability of a label.
        map_accuracy: The network's accuracy; None where there are no classes.
        bayes_accuracy: The Bayesian predictive's accuracy; None where there are no classes.
        map_confidence: The network's mean probability of the predicted class; None where there are no classes.
        bayes_confidence: The Bayesian predictive's mean probability of its predicted class; None where there are no classes.
        collapsed: Whether the predictive is worse than the network itself, by more than chance and by more than matters.
        message: The comparison in one sentence.
        difference: The rise of the negative log-likelihood, ``bayes_nll`` less ``map_nll``.
        standard_error: The standard error of the difference, example by example.
        adds_nothing: Whether the predictive is the network's own: the posterior has next to no variance on these data.
        at_chance: Whether the network itself knows no more than how frequent each class is, or what the targets are on average.
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
    difference: float = 0.0
    standard_error: float = 0.0
    adds_nothing: bool = False
    at_chance: bool = False

    @property
    def passed(self) -> bool:
        """Whether the predictive has not collapsed, and the network knows something."""
        return not self.collapsed and not self.at_chance

    @property
    def state(self) -> str:
        """The judgement in a word or two: "passed", "FAILED", or "passed, but it adds nothing"."""
        return "FAILED" if not self.passed else "passed, but it adds nothing" if self.adds_nothing else "passed"


def check_predictive(
    laplace: Laplace | TrainedPosterior | PosteriorPredictor,
    batches: Iterable[Batch],
    *,
    limit: int = 1000,
    kind: str = "linearised",
    link: str = "auto",
    samples: int = 100,
    total: int | None = None,
) -> SelfCheck:
    """Compares the network's own answers with the Bayesian ones.

    Args:
        laplace: A fitted `Laplace`, the posterior of an optimiser, or a `PosteriorPredictor`.
        batches: Labelled data; held out if possible.
        limit: The largest number of examples to use.
        kind: The predictive to check: "linearised" or "sampling"; see `Laplace.predict`.
        link: How the linearised predictive turns the Gaussian over logits into probabilities.
        samples: The number of draws that the predictive averages over.
        total: The number of batches, for the bar; None where it is not known.
    """
    predictor = laplace.predictor
    plain: list[Prediction] = []
    bayes: list[Prediction] = []
    targets: list[Tensor] = []
    count = 0
    finite = FiniteExamples(predictor.model, batches, "labelled", quiet=True)
    for batch in progress(finite, description="self-check", total=total):
        if count >= limit:
            break
        plain.append(predictor.map_prediction(batch.inputs))
        seeded = torch.Generator().manual_seed(0) if kind == "sampling" else None
        bayes.append(laplace.predict(batch.inputs, kind=kind, link=link, samples=samples, generator=seeded))
        targets.append(batch.targets)
        count += batch.size
    if not count:
        raise DataError("there are no labelled data to check the predictive on")
    check = _compare(Prediction.concatenate(plain), Prediction.concatenate(bayes), torch.cat(targets))
    if not finite.left_out:
        return check
    return replace(check, message=f"{check.message}; {finite.left_out} left out, whose outputs are not finite")


def _compare(plain: Prediction, bayes: Prediction, targets: Tensor) -> SelfCheck:
    labels = _labels_of_an_example(plain, targets)
    losses = [-p.log_prob(targets).to(torch.float64).reshape(-1) / labels for p in (plain, bayes)]
    map_nll, bayes_nll = (float(loss.mean()) for loss in losses)
    change = losses[1] - losses[0]
    error = float(change.std() / len(change) ** 0.5) if len(change) > 1 else math.inf
    rise = _NLL_RISE.get(plain.kind, _OTHER_NLL_RISE)
    # Not "greater": a likelihood that is not a number is a collapse, too.
    collapsed = not (bayes_nll - map_nll <= max(rise, 2 * error) and math.isfinite(bayes_nll))
    message = f"negative log-likelihood {map_nll:.3f} -> {bayes_nll:.3f}"
    accuracy: list[float | None] = [None, None]
    confidence: list[float | None] = [None, None]
    if plain.kind in _NLL_RISE:
        hits = [_hits(p, targets) for p in (plain, bayes)]
        right = [float(h.double().mean()) for h in hits]
        confidence = [_confidence(p) for p in (plain, bayes)]
        accuracy = [*right]
        collapsed |= right[1] < right[0] - _ACCURACY_DROP and _significant(*hits)
        message = f"accuracy {right[0]:.3f} -> {right[1]:.3f}, {message}, mean confidence {confidence[0]:.3f} -> {confidence[1]:.3f}"
    at_chance = _at_chance(plain, targets, min(map_nll, bayes_nll))
    if at_chance:
        message += f"; {_chance_in_words(plain)}"
    nothing = _adds_nothing(plain, bayes)
    if nothing:
        message += "; the posterior adds nothing to the network's own answers; another structure, or more layers, may add something"
    return SelfCheck(
        n_data=len(plain),
        map_nll=map_nll,
        bayes_nll=bayes_nll,
        map_accuracy=accuracy[0],
        bayes_accuracy=accuracy[1],
        map_confidence=confidence[0],
        bayes_confidence=confidence[1],
        collapsed=collapsed,
        message=message,
        difference=bayes_nll - map_nll,
        standard_error=error,
        adds_nothing=nothing,
        at_chance=at_chance,
    )


def _labels_of_an_example(prediction: Prediction, targets: Tensor) -> float:
    """Returns how many labels an example has, on average: its positions, or its outputs where each has a target."""
    if prediction.kind != "classification":
        return max(1.0, targets.numel() / len(targets))
    return max(1.0, float(prediction.has_label(targets).sum()) / len(targets))


def _at_chance(prediction: Prediction, targets: Tensor, nll: float) -> bool:
    """Tells whether a network knows no more than the frequencies of these labels, or the mean of these targets.

    Both must hold of classes: it is right no more often than the most frequent class, and its likelihood (with a temperature, if one
    was found) is not above that of the frequencies. Where one class is rare, the first alone says little. Labels that are all the same
    cannot tell: nothing beats them.
    """
    if prediction.kind == "regression":
        y, mean = targets.reshape(prediction.mean.shape).double(), prediction.mean.double()
        residual, spread = (v.square().reshape(-1, mean.shape[-1]).sum(0) for v in (y - mean, y - y.mean(0)))
        varied = spread > 0
        # By likelihood with a variance of its own for each output: outputs may have units of their own.
        return len(y) >= _FEW and bool(varied.any()) and float((residual / spread)[varied].log().sum()) >= 0
    if prediction.kind not in _NLL_RISE or len(targets) < _FEW:
        return False
    hits = _hits(prediction, targets)
    if prediction.kind == "binary":
        ones = targets.reshape(prediction.mean.shape).double().reshape(-1, prediction.mean.shape[-1]).mean(0)
        shares, most = torch.stack([ones, 1 - ones]), torch.maximum(ones, 1 - ones)
        right, entropy = (
            float(most.mean()),
            float(torch.special.entr(shares).sum()) * len(hits) / len(targets) / len(ones),
        )
    else:
        labels = targets[prediction.has_label(targets)]
        shares = torch.unique(labels, return_counts=True)[1].double() / max(1, len(labels))
        right, entropy = float(shares.max()), float(torch.special.entr(shares).sum()) * len(labels) / len(targets)
    return entropy > 0 and float(hits.double().mean()) <= right and nll >= entropy


def _chance_in_words(prediction: Prediction) -> str:
    answer = "the most frequent class" if prediction.kind in _NLL_RISE else "the mean of the targets"
    return f"the network itself is no better than always answering with {answer}: did you load the trained weights?"


def network_at_chance(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> str | None:
    """Returns a sentence where a network knows no more of its training data than how frequent the classes are, or the mean of the targets; else None.

    Args:
        likelihood: The likelihood; classes count by their likelihood at the best of some temperatures.
        outputs: The network's outputs [M, ..., C].
        targets: Their targets.
    """
    warmth = temperature_of(likelihood)
    variants = [likelihood] if warmth is None else [at_temperature(likelihood, warmth * t) for t in _TEMPERATURES]
    plain = [gaussian_prediction(v, outputs, latent_var=torch.zeros_like(outputs)) for v in variants]
    nll = min(-float(p.log_prob(targets).double().mean()) / _labels_of_an_example(p, targets) for p in plain)
    return _chance_in_words(plain[0]) if _at_chance(plain[0], targets, nll) else None


def _adds_nothing(plain: Prediction, bayes: Prediction) -> bool:
    """Tells whether two predictions are the same to anybody who looks at them."""
    if plain.kind in _NLL_RISE:
        return bool((bayes.mean - plain.mean).abs().max() < _NOTHING and bayes.epistemic.max() < _NOTHING)
    return bool((bayes.epistemic <= _NOTHING**2 * bayes.total).all())


def _hits(prediction: Prediction, targets: Tensor) -> Tensor:
    """Tells which of the labelled positions are predicted rightly."""
    if prediction.kind == "binary":
        return ((prediction.mean > 0.5) == (targets.reshape(prediction.mean.shape) > 0.5)).reshape(-1)
    labels = prediction.mean.argmax(-1)
    return (labels == targets)[prediction.has_label(targets)]


def _significant(plain: Tensor, bayes: Tensor) -> bool:
    """Tells whether fewer hits are more than chance: McNemar's test on the positions that changed, at two standard deviations."""
    changed = int((plain != bayes).sum())
    return int(plain.sum()) - int(bayes.sum()) > 2 * changed**0.5


def _confidence(prediction: Prediction) -> float:
    if prediction.kind == "binary":
        return float(torch.maximum(prediction.mean, 1 - prediction.mean).double().mean())
    return float(prediction.mean.amax(-1).double().mean())
