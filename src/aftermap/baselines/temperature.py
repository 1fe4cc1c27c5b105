"""The network as it is, the point of comparison for everything else, and temperature scaling, which makes confidences honest."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.baselines.base import Baseline, batches_of, eval_outputs, targets_of
from aftermap.batches import Unpack
from aftermap.errors import DataError, NotFittedError, StatisticalWarning, UnsupportedError
from aftermap.likelihoods import Likelihood
from aftermap.predictive import Prediction

__all__ = ["Deterministic", "TemperatureScaling"]

_KINDS = ("classification", "binary")
_WIDEST = 1e3  # Temperatures are looked for between its inverse and this.
_STEPS = 80


@final
class Deterministic(Baseline):
    """The trained network without any uncertainty about its weights (MAP).

    Its epistemic uncertainty is zero; what is left is the noise that the likelihood and the outputs say.

    Args:
        model: The network. Predictions are made in eval mode, and it is never changed.
        likelihood: The likelihood: "classification", "binary", "regression", "counts" or an object from
            `aftermap.likelihoods`.

    >>> net = torch.nn.Linear(3, 4)
    >>> Deterministic(net).predict(torch.ones(5, 3)).epistemic
    tensor([0., 0., 0., 0., 0.])
    """

    def outputs(self, inputs: Any, samples: int | None, generator: torch.Generator | None) -> Tensor:
        return eval_outputs(self.model, {}, inputs).unsqueeze(0)

    def prediction(self, outputs: Tensor) -> Prediction:
        return _without_epistemic(super().prediction(outputs), "map")


@final
class TemperatureScaling(Baseline):
    r"""A network whose logits are divided by a temperature T that minimises the negative log-likelihood of held-out data.

    .. math::
        \hat T = \arg\min_T -\sum_n \log p(y_n \mid f(x_n) / T)

    The sum is convex in β = 1/T, so that its derivative has one zero, which bisection finds. The most probable class never changes.

    Args:
        model: A trained classifier, which is never changed.
        likelihood: The likelihood: "classification" or "binary", or such an object.
        temperature: The temperature T, if it is known already; otherwise `fit` finds it.

    References:
        Guo, Pleiss, Sun, Weinberger 2017, On calibration of modern neural networks, eq. (9).

    >>> logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
    >>> labels = torch.tensor([0, 0, 1, 1])
    >>> round(TemperatureScaling(nn.Identity()).fit([(logits, labels)]).temperature, 4)  # odds of 3 to 1
    1.8205
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood = "classification",
        *,
        temperature: float | None = None,
    ):
        super().__init__(model, likelihood)
        if self.likelihood.kind not in _KINDS:
            raise UnsupportedError(
                f"temperature scaling divides logits, which {self.likelihood!r} does not have; it is for "
                f"{' and '.join(_KINDS)}. For a regression fit the noise instead"
            )
        self._temperature = None if temperature is None else checks.number("temperature", temperature, above=0)

    @property
    def temperature(self) -> float:
        """The temperature T of the softmax."""
        if self._temperature is None:
            raise NotFittedError("the temperature is not known yet: call fit(val_loader), or pass temperature=")
        return self._temperature

    def fit(self, data: Iterable[Any], *, unpack: Unpack | None = None) -> TemperatureScaling:
        """Finds the temperature on held-out data (not on the training data, where networks are overconfident).

        Args:
            data: Batches of (x, y) or (x, y, weight).
            unpack: A function that turns a batch of another form into (inputs, targets).

        Returns:
            This object, with its temperature.
        """
        logits, targets, weights = [], [], []
        with torch.no_grad():
            for batch in batches_of(self.model, data, unpack):
                values = eval_outputs(self.model, {}, batch.inputs)
                self.likelihood.check(values, targets_of(batch))
                logits.append(values.double())
                targets.append(targets_of(batch))
                weights.append(torch.ones(batch.size) if batch.weight is None else batch.weight.cpu())
        if not logits:
            raise DataError("the data hold no example; the temperature needs held-out data")
        values, labels = torch.cat(logits), torch.cat(targets)
        self._temperature = _best_temperature(self.likelihood, values, labels, torch.cat(weights).to(values))
        return self

    def outputs(self, inputs: Any, samples: int | None, generator: torch.Generator | None) -> Tensor:
        return (eval_outputs(self.model, {}, inputs) / self.temperature).unsqueeze(0)

    def prediction(self, outputs: Tensor) -> Prediction:
        return _without_epistemic(super().prediction(outputs), "temperature")


def _without_epistemic(prediction: Prediction, link: str) -> Prediction:
    """Returns the prediction of one network: its mutual information is zero, where rounding would leave ±1e-17."""
    epistemic = torch.zeros_like(prediction.epistemic)
    return replace(prediction, epistemic=epistemic, aleatoric=prediction.total, link=link)


def _best_temperature(likelihood: Likelihood, logits: Tensor, targets: Tensor, weights: Tensor) -> float:
    def slope(log_beta: float) -> float:
        """Returns the sign of the derivative of the loss in β at exp(log_beta)."""
        beta = torch.tensor(math.exp(log_beta), dtype=torch.float64, device=logits.device, requires_grad=True)
        loss = (likelihood.nll(beta * logits, targets) * weights).sum()
        return float(torch.autograd.grad(loss, beta)[0])

    low, high = -math.log(_WIDEST), math.log(_WIDEST)
    with torch.enable_grad():
        # The test is strict: where logits are zero the loss does not depend on β, and T = 1 is as good as any.
        if slope(low) == slope(high) == 0:
            return 1.0
        if slope(high) <= 0 or slope(low) >= 0:  # Saturated probabilities have a slope of exactly zero.
            edge = high if slope(high) <= 0 else low
            why = "classified without error" if edge == high else "worse than chance under the network"
            warnings.warn(
                f"the held-out data are {why}, so that the best temperature is {'zero' if edge == high else 'infinite'}; "
                f"{math.exp(-edge):g} is used. Check the data, or take more of them",
                StatisticalWarning,
                stacklevel=3,
            )
            return math.exp(-edge)
        for _ in range(_STEPS):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return math.exp(-0.5 * (low + high))
