"""The state of a Laplace approximation: what it starts from, what a fit gave, and what a tuning found. All are frozen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aftermap import checks
from aftermap.batches import Unpack
from aftermap.curvature import Factors
from aftermap.curvature.fit import PlannedLayers
from aftermap.errors import InputError
from aftermap.laplace.dimension import DimensionResult
from aftermap.laplace.evidence import EvidenceResult
from aftermap.laplace.grid import GridResult
from aftermap.laplace.regression_rule import RegressionResult
from aftermap.laplace.self_consistent import SelfConsistentResult
from aftermap.laplace.validation import ValidationResult
from aftermap.models import WeightsFingerprint
from aftermap.params import Params
from aftermap.posteriors.base import CurvaturePosterior, Hyperparameters, layers_of
from aftermap.prior import Prior, PriorSpec

if TYPE_CHECKING:
    from aftermap.laplace.auto import FitReport

__all__ = [
    "ChainedBatches",
    "Fitted",
    "Initial",
    "Tuned",
    "TuningResult",
    "check_numbers",
    "data_if_repeatable",
]


TuningResult = (
    EvidenceResult | DimensionResult | SelfConsistentResult | ValidationResult | RegressionResult | GridResult
)


@dataclass(frozen=True)
class Tuned:
    """What a tuning found, ready to be taken over.

    Attributes:
        posterior: The posterior under the new hyperparameters.
        hyperparameters: The prior, the noise and the scales that were found.
        result: How they were found, for the user.
        narrowing: By what the covariance was divided after the evidence had been maximised.
    """

    posterior: CurvaturePosterior
    hyperparameters: Hyperparameters
    result: TuningResult
    narrowing: float = 1.0


@dataclass(frozen=True)
class Initial:
    """What the constructor of `Laplace` was given to start every fit from.

    Attributes:
        prior_precision: The prior's precision, in any form that `Prior.make` takes.
        prior_mean: The prior's mean: a number, or tensors by parameter.
        noise: The noise σ that was split from the likelihood.
        data_scale: How many data each datum stands for.
        temperature: What the log-likelihood is divided by.
        output_temperature: What the outputs are divided by in the predictive: the temperature of the likelihood.
    """

    prior_precision: PriorSpec
    prior_mean: float | Params
    noise: Tensor
    data_scale: float
    temperature: float
    output_temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("data_scale", "temperature"):
            checks.number(name, getattr(self, name), above=0)
        # Which layers there are is known from the first batch on; what is no number at all is refused now.
        precisions, means = self.prior_precision, self.prior_mean
        for key, value in (precisions if isinstance(precisions, Mapping) else {"all layers": precisions}).items():
            check_numbers(f"the prior precision of {key}", value, positive=True)
        for key, value in (means if isinstance(means, Mapping) else {"all parameters": means}).items():
            check_numbers(f"the prior mean of {key}", value)

    def curvature_scale(self, curvature: str) -> Tensor:
        """Returns what the curvature is multiplied by before there is a fit; see `Hyperparameters.curvature_scale`."""
        nothing = Prior({}, {}, {})
        return Hyperparameters(nothing, self.noise, self.data_scale, self.temperature).curvature_scale(curvature)

    def check_layers(self, layers: PlannedLayers) -> None:
        """Raises unless the prior fits the layers of a fit, before the pass over the data."""
        prior = Prior.make(self.prior_precision, self.prior_mean, layers.names, layers.shapes)
        for layer in layers.with_one_precision:
            prior.scalar(list(layers.names[layer]))

    def resolve(self, factors: Factors, weights: Params) -> Hyperparameters:
        """Returns the hyperparameters of a new fit: the prior is spread over the layers of the curvature.

        Args:
            factors: The curvature of the fit.
            weights: The trained weights; where only some entries of a parameter are uncertain, the others are their own prior
                mean.
        """
        mean = factors.blocks[0].with_fixed_means(
            weights, self.prior_mean
        )  # A block with fixed weights is the only one.
        prior = Prior.make(self.prior_precision, mean, layers_of(factors), factors.shapes)
        return Hyperparameters(prior, self.noise, self.data_scale, self.temperature, self.output_temperature)


def check_numbers(what: str, value: object, *, positive: bool = False) -> None:
    """Raises unless a value is a number or numbers, finite, and positive where that is needed."""
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} must be a number or numbers, got {value!r}") from error
    if positive and not bool((torch.isfinite(numbers) & (numbers > 0)).all()):
        raise InputError(
            f"{what} must be positive and finite, got {float(numbers.min()):g}. "
            "It is 1/variance; a flat prior has no posterior here: use a small number such as 1e-6"
        )
    if not bool(torch.isfinite(numbers).all()):
        raise InputError(f"{what} must be finite; it has entries that are not")


@dataclass(frozen=True)
class Fitted:
    """A fit: everything that a `Laplace` knows from data. It is replaced as a whole, never changed.

    Attributes:
        factors: The curvature of the data.
        posterior: A `GaussianPosterior`, or a `MatrixFreePosterior`.
        hyperparameters: The prior, the noise and the scales that the posterior was formed with.
        weights: The fingerprint of the network's weights at the fit.
        data: The data of the fit where they can be passed over again, else None.
        unpack: What turns a batch of these data into inputs and targets, if it was given.
        tuning: What the last tuning gave; None before one.
        narrowing: By what the covariance was divided after the evidence had been maximised; the data scale that
            was found relative to that of the constructor.
        report: How `aftermap.fit` chose and checked this fit; None otherwise.
    """

    factors: Factors
    posterior: CurvaturePosterior
    hyperparameters: Hyperparameters
    weights: WeightsFingerprint
    data: Iterable[Any] | None = None
    unpack: Unpack | None = None
    tuning: TuningResult | None = None
    narrowing: float = 1.0
    report: FitReport | None = None

    def without_narrowing(self) -> Fitted:
        """Returns the same fit with the covariance that the evidence is of."""
        if self.narrowing == 1.0:
            return self
        hyperparameters = self.hyperparameters.narrowed(1 / self.narrowing)
        posterior = hyperparameters.applied_to(self.posterior, self.factors.curvature)
        return replace(self, posterior=posterior, hyperparameters=hyperparameters, narrowing=1.0)

    def with_data(self, train_loader: Iterable[Any] | None) -> Fitted:
        """Returns the same fit with training data that were handed over; as it is where there are none.

        Raises:
            InputError: They are a generator.
        """
        if isinstance(train_loader, Iterator):
            raise InputError(
                "train_loader is a generator, which is empty after one pass; tuning goes through the training data several times. Pass a "
                "list or a DataLoader"
            )
        return self if train_loader is None else replace(self, data=train_loader)


@dataclass(frozen=True)
class ChainedBatches:
    """Several collections of batches, one after the other, as often as they are asked for."""

    parts: tuple[Iterable[Any], ...]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.parts)


def data_if_repeatable(data: Iterable[Any], before: Fitted | None = None) -> Iterable[Any] | None:
    """Returns the data of a fit if they can be passed over again; None for a generator, which is empty by now.

    Args:
        data: The data of this fit.
        before: The fit that they are added to, if there is one; its data come first.

    >>> data_if_repeatable([1]), data_if_repeatable(iter([1]))
    ([1], None)
    """
    if isinstance(data, Iterator) or (before is not None and before.data is None):
        return None
    return data if before is None or before.data is None else ChainedBatches((before.data, data))
