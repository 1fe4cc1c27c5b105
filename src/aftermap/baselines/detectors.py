"""Detectors of unusual inputs, rivals of a predictive uncertainty: one number per input, from the outputs or the features of one network.

They say nothing about probabilities. `aftermap.evaluation.evaluate(..., detectors=[...])` puts their numbers beside a predictor's own scores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, final

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.baselines.base import batches_of, read_inputs
from aftermap.baselines.features import (
    FeatureBatch,
    FeatureReader,
    class_labels,
    class_logits,
    outputs_of,
    read_features,
)
from aftermap.batches import Unpack, unpack_inputs
from aftermap.errors import NotFittedError
from aftermap.models import WeightsFingerprint

__all__ = ["GEN", "Detector", "Energy", "FeatureDetector"]

Statistics = TypeVar("Statistics")
D = TypeVar("D", bound="Detector")
F = TypeVar("F", bound="FeatureDetector[Any]")


class Detector(ABC):
    """A score of how unusual an input is for a network; higher is more unusual.

    A detector of your own is a subclass with a ``name``, ``fit`` and ``score``.

    Args:
        model: The network. It is run in eval mode, and never changed.

    Attributes:
        name: What the score is called in tables.
        needs_classes: Whether the network must be a classifier with outputs [N, C], its logits.
    """

    name: ClassVar[str]
    needs_classes: ClassVar[bool] = True

    def __init__(self, model: nn.Module):
        self.model = checks.module(type(self).__name__, model)

    @abstractmethod
    def fit(self: D, data: Iterable[Any], *, unpack: Unpack | None = None) -> D:
        """Learns what usual inputs look like.

        Args:
            data: Batches of (x, y) or (x, y, weight): the data that the network was trained on.
            unpack: A function that turns a batch of another form into (inputs, targets).

        Returns:
            The detector itself.
        """

    @abstractmethod
    def score(self, x: Any) -> Tensor:
        """Returns the scores of some inputs.

        Args:
            x: Inputs as the model takes them: a tensor, a tuple of positional or a mapping of keyword arguments.

        Returns:
            One number for each example [N], float64 on the CPU; higher is more unusual.
        """


class _LogitDetector(Detector):
    """A detector that looks at the logits alone; there is nothing to fit."""

    def fit(self: D, data: Iterable[Any], *, unpack: Unpack | None = None) -> D:
        """Looks at the labels of the first batch, to refuse what is no classification; there is nothing to learn.

        Args:
            data: Batches of (x, y) or (x, y, weight).
            unpack: A function that turns a batch of another form into (inputs, targets).

        Returns:
            The detector itself.

        Raises:
            UnsupportedError: The targets are no class labels, or the outputs no logits.
        """
        owner = type(self).__name__
        for batch in batches_of(self.model, data, unpack):
            logits = class_logits(owner, outputs_of(self.model, batch.inputs, batch.size))
            class_labels(owner, batch.targets, logits.shape[1])
            break
        return self

    def score(self, x: Any) -> Tensor:
        """Returns the scores of some inputs.

        Args:
            x: Inputs as the model takes them: a tensor, a tuple of positional or a mapping of keyword arguments.

        Returns:
            One number for each example [N], float64 on the CPU; higher is more unusual.

        Raises:
            UnsupportedError: The outputs are not the logits [N, C] of at least two classes.
        """
        inputs = read_inputs(self.model, x)
        outputs = outputs_of(self.model, inputs, unpack_inputs(inputs).size)
        return self._of_logits(class_logits(type(self).__name__, outputs))

    @abstractmethod
    def _of_logits(self, logits: Tensor) -> Tensor:
        """Returns the score [N] of logits [N, C], float64."""


@final
class Energy(_LogitDetector):
    r"""The free energy of the logits f: low where some logit is large.

    .. math::
        s(x) = -T \log \sum_c \exp(f_c(x) / T)

    A constant that is added to all logits changes no probability, but the energy: it relies on the network's own level of logits.

    Args:
        model: A classifier. It is never changed.
        temperature: The temperature T.

    References:
        Liu, Wang, Owens, Li 2020, Energy-based out-of-distribution detection. Its training with outliers is not part of this.

    >>> [round(s, 4) for s in Energy(nn.Identity()).score(torch.tensor([[9.0, 0.0], [0.0, 0.0]])).tolist()]
    [-9.0001, -0.6931]
    """

    name = "energy"

    def __init__(self, model: nn.Module, *, temperature: float = 1.0):
        super().__init__(model)
        self.temperature = checks.number("temperature", temperature, above=0)

    def _of_logits(self, logits: Tensor) -> Tensor:
        return -self.temperature * (logits / self.temperature).logsumexp(1)


@final
class GEN(_LogitDetector):
    r"""A generalised entropy of the M largest probabilities; a small γ makes it notice small departures from certainty.

    .. math::
        s(x) = \sum_{j=1}^{M} p_{(j)}^\gamma (1 - p_{(j)})^\gamma, \qquad p_{(1)} \ge p_{(2)} \ge \dots

    Args:
        model: A classifier. It is never changed.
        gamma: The exponent γ, in (0, 1).
        top: The number M of probabilities that count. None takes all, but at most 100.

    References:
        Liu, Lochman, Zach 2023, GEN: pushing the limits of softmax-based out-of-distribution detection.

    Differs from the paper: 1 − p of the most probable class is the sum of the other probabilities, made from the logits in float64.
    Rounded to 1 − 1 = 0, confident answers would tie at a score that their small probabilities alone decide.

    >>> GEN(nn.Identity(), gamma=0.5).score(torch.zeros(1, 2))
    tensor([1.], dtype=torch.float64)
    """

    name = "gen"

    def __init__(self, model: nn.Module, *, gamma: float = 0.1, top: int | None = None):
        super().__init__(model)
        self.gamma = checks.fraction("gamma", gamma, advice="The paper takes 0.1")
        self.top = None if top is None else checks.count("top", top)

    def _of_logits(self, logits: Tensor) -> Tensor:
        most = min(logits.shape[1], 100 if self.top is None else self.top)
        ordered = logits.sort(1, descending=True).values
        total = ordered.logsumexp(1, keepdim=True)
        log_p = ordered - total
        rest = (
            ordered[:, 1:].logsumexp(1, keepdim=True) - total
        )  # log(1 − p) of the first; the others are at most one half
        log_q = torch.cat([rest, torch.log1p(-log_p[:, 1:].exp().clamp_max(0.5))], 1)
        return (self.gamma * (log_p + log_q)[:, :most]).exp().sum(1)


@dataclass(frozen=True)
class _Fitted(Generic[Statistics]):
    reader: FeatureReader
    statistics: Statistics
    weights: WeightsFingerprint


class FeatureDetector(Detector, Generic[Statistics]):
    """A detector that compares features with those of the training data."""

    def __init__(self, model: nn.Module, *, layer: str | None = None):
        super().__init__(model)
        self.layer = layer
        self._fitted: _Fitted[Statistics] | None = None

    def fit(self: F, data: Iterable[Any], *, unpack: Unpack | None = None) -> F:
        """Passes over the training data once and keeps statistics of their features.

        Args:
            data: Batches of (x, y) or (x, y, weight): the data that the network was trained on, without random augmentation.
            unpack: A function that turns a batch of another form into (inputs, targets).

        Returns:
            The detector itself. After an error the detector is what it was before.

        Raises:
            DataError: The data are empty or not finite, or there are too few of them.
            UnsupportedError: The network has no last layer to read features at, or the targets are no class labels where the
                detector needs them.
        """
        reader, stream = read_features(self.model, data, self.layer, unpack)
        statistics = self._learn(reader, stream)
        self._fitted = _Fitted(reader, statistics, WeightsFingerprint.of(self.model))
        return self

    def score(self, x: Any) -> Tensor:
        """Returns the scores of some inputs.

        Args:
            x: Inputs as the model takes them: a tensor, a tuple of positional or a mapping of keyword arguments.

        Returns:
            One number for each example [N], float64 on the CPU; higher is more unusual.

        Raises:
            NotFittedError: There was no fit.
            InputError: The network's weights have changed since the fit.
            ShapeError: The features have another length than those of the fit.
        """
        fitted = self._state
        fitted.weights.check(self.model, advice="The detector knows the features of the old weights: fit it again")
        read = fitted.reader.read(unpack_inputs(read_inputs(self.model, x)))
        return self._of_features(fitted.statistics, read)

    @property
    def _state(self) -> _Fitted[Statistics]:
        if self._fitted is None:
            raise NotFittedError(f"{type(self).__name__} does not know the training data yet: call fit(train_loader)")
        return self._fitted

    @abstractmethod
    def _learn(self, reader: FeatureReader, batches: Iterator[FeatureBatch]) -> Statistics:
        """Returns the statistics of the training data's features that a fit keeps."""

    @abstractmethod
    def _of_features(self, statistics: Statistics, batch: FeatureBatch) -> Tensor:
        """Returns the score [N] of a batch."""
