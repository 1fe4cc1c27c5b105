"""The result of every predictor: a mean, its uncertainty in two parts, and what follows from them.

Index legend: S samples, N examples, ... positions (tokens, pixels), C network outputs, D targets per position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch import distributions as td

from aftermap.errors import InputError, ShapeError, UnsupportedError
from aftermap.likelihoods import Categorical, parse_likelihood
from aftermap.likelihoods.base import aligned, sum_positions
from aftermap.predictive.display import prediction_html, prediction_text
from aftermap.predictive.latent import normal_quantile, shares
from aftermap.predictive.quadrature import (
    poisson_lognormal_log_prob,
    poisson_lognormal_rates,
    poisson_mixture_quantile,
    weighted_quantile,
)

__all__ = ["KINDS", "PROBABILITY_FLOOR", "SCORES", "Prediction"]

KINDS = ("classification", "binary", "regression", "counts", "custom")
SCORES = ("entropy", "mutual_information", "variance", "max_probability")

PROBABILITY_FLOOR = 1e-12  # The metrics use the same floor of a probability inside a logarithm.
_BY_SAMPLE = ("samples", "sample_variance")  # The first dimension of these fields is the sample, not the example.
_MAX_COUNT_PARAMETER = 1e8  # A negative binomial beyond this is a Poisson to eight digits.


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    r"""What a predictor says about N inputs.

    It is always true that ``total = epistemic + aleatoric``. Their units depend on the kind:

    - classification: nats per position, [N, ...]: mutual information I[y; f], expected entropy E H[p(y | f)], and
      the entropy H[E p(y | f)] of the mean;
    - binary: the same three of each output's Bernoulli, [N, ..., C];
    - regression: variances [N, ..., D]: Var f, the noise variance E σ², and their sum. The noise is in
      ``aleatoric`` and ``total`` only;
    - counts and custom: variances [N, ..., D] by the law of total variance,
      Var y = Var E[y | f] + E Var[y | f].

    Args:
        kind: The kind of targets, one of ``KINDS``.
        mean: The mean E y [N, ..., D]: probabilities, probability of 1 for each output, regression mean, or rate.
        epistemic: The uncertainty that the weights leave open.
        aleatoric: The uncertainty that the data leave open.
        total: The sum of both parts.
        latent_mean: The mean [N, ..., C] of the Gaussian over network outputs.
        latent_cov: The covariance of that Gaussian [N, ..., C, C].
        latent_var: The variances of that Gaussian [N, ..., C].
        samples: The samples of E[y | f] [S, N, ..., D]: probabilities, means or rates.
        sample_variance: The variance Var[y | f] of each sample [S, N, ..., D], for regression and custom.
        weights: The mixture weights [S] of the samples, summing to one; None means equal weights.
        concentration: The Dirichlet parameters α [N, ..., C] of the Laplace bridge.
        link: The way in which ``mean`` was made.
        ignore_index: The class index that marks positions without a label, that of the likelihood.

    Raises:
        InputError: The kind is unknown.
        ShapeError: The shape of ``mean`` is not [N, ..., D].

    >>> p = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    >>> nats = torch.special.entr(p).sum(-1)
    >>> Prediction("classification", p, torch.zeros(2), nats, nats, link="map")
    Prediction(kind='classification', link='map', mean=[2, 2], epistemic=[2], aleatoric=[2], total=[2])

    What it says about the first inputs is seen by ``print``, and in notebooks:

    >>> print(Prediction("classification", p, torch.zeros(2), nats, nats, link="map"))
    classification of 2 inputs: 2 classes (link map)
    input  class  confidence  epistemic  aleatoric
    ----------------------------------------------
        0      0       0.750     0.0000     0.5623
        1      0       0.500     0.0000     0.6931
    epistemic and aleatoric in nats
    """

    kind: str
    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor
    total: Tensor
    latent_mean: Tensor | None = None
    latent_cov: Tensor | None = None
    latent_var: Tensor | None = None
    samples: Tensor | None = None
    sample_variance: Tensor | None = None
    weights: Tensor | None = None
    concentration: Tensor | None = None
    link: str = "samples"
    ignore_index: int = -100

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"Prediction: kind is {self.kind!r}, but must be one of {', '.join(map(repr, KINDS))}.")
        if self.mean.dim() < 2:
            raise ShapeError(
                f"Prediction: mean must have shape [N, ..., D], got {list(self.mean.shape)}; "
                "add the last dimension with mean.unsqueeze(-1)."
            )

    # Container.

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _map(self, function: Callable[[str, Tensor], Tensor]) -> Prediction:
        changed = {name: function(name, value) for name, value in self._tensors().items()}
        return replace(self, **changed)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.mean.shape[0]

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor | npt.NDArray[np.generic]) -> Prediction:
        """Returns some of the examples; a single number keeps the dimension, so that the result is a Prediction of length 1."""
        if isinstance(index, tuple):
            raise InputError("Prediction: index the examples only, with a number, a slice, a mask or a list.")
        if isinstance(index, (int, np.integer)):
            if not -len(self) <= index < len(self):
                raise IndexError(f"Prediction: index {index} is out of range for {len(self)} examples.")
            index = slice(int(index), int(index) + 1 or None)
        elif not isinstance(index, slice):
            index = torch.as_tensor(index, device=self.mean.device)
        chosen = index

        def pick(name: str, value: Tensor) -> Tensor:
            if name == "weights":
                return value
            return value[:, chosen] if name in _BY_SAMPLE else value[chosen]

        return self._map(pick)

    @staticmethod
    def concatenate(predictions: Sequence[Prediction]) -> Prediction:
        """Joins predictions of several batches along the examples.

        Args:
            predictions: At least one prediction, all of one kind, link and sample count. A field that is missing in one
                of them is left out.

        Returns:
            One prediction of all examples.

        Raises:
            InputError: None is given, or kinds, links or mixture weights differ.
            ShapeError: The shapes do not join.

        >>> one = Prediction("regression", *(torch.ones(3, 2) for _ in range(4)))
        >>> len(Prediction.concatenate([one, one]))
        6
        """
        parts = list(predictions)
        if not parts:
            raise InputError("Prediction.concatenate needs at least one prediction, got an empty list.")
        for name in ("kind", "link"):
            values = sorted({getattr(part, name) for part in parts})
            if len(values) > 1:
                raise InputError(f"Prediction.concatenate needs predictions of one {name}, got {', '.join(values)}.")
        weights = [part.weights for part in parts if part.samples is not None and part.weights is not None]
        if any(not torch.equal(value, weights[0]) for value in weights) or 0 < len(weights) < len(parts):
            raise InputError("Prediction.concatenate: the mixture weights of the predictions differ.")
        tables = [part._tensors() for part in parts]
        shared = set.intersection(*(set(table) for table in tables)) - {"weights"}
        joined = {
            name: _join(name, [table[name] for table in tables]) if name in shared else None for name in tables[0]
        }
        return replace(parts[0], **{**joined, "weights": parts[0].weights})  # type: ignore[arg-type]

    def without_variance(self, lost: Tensor) -> Prediction:
        """Returns the same prediction with NaN for all that rests on a variance which is not known there.

        The latent means need no variance, and stay; so do the means of regressions that are not averages of samples.

        Args:
            lost: Whether the variance is unknown, at each position [N, ...].
        """
        closed = self.kind == "regression" and self.samples is None
        known = ("latent_mean", "mean") if closed else ("latent_mean",)

        def blank(name: str, value: Tensor) -> Tensor:
            if name in known or name == "weights":
                return value
            mask = lost.unsqueeze(0) if name in _BY_SAMPLE else lost
            return value.masked_fill(mask.reshape(*mask.shape, *[1] * (value.dim() - mask.dim())), float("nan"))

        return self._map(blank)

    def cpu(self) -> Prediction:
        """Returns the same prediction with every tensor on the CPU."""
        return self._map(lambda _, value: value.cpu())

    def detach(self) -> Prediction:
        """Returns the same prediction without its autograd graph."""
        return self._map(lambda _, value: value.detach())

    def to_numpy(self) -> dict[str, npt.NDArray[np.generic]]:
        """Returns every tensor that is there as a numpy array, by the name of its field."""
        half = (torch.float16, torch.bfloat16)  # numpy knows only one of the two.
        tensors = {name: value.detach().cpu() for name, value in self._tensors().items()}
        return {name: (value.float() if value.dtype in half else value).numpy() for name, value in tensors.items()}

    def __repr__(self) -> str:
        shapes = [f"{name}={list(value.shape)}" for name, value in self._tensors().items()]
        return f"Prediction(kind={self.kind!r}, link={self.link!r}, {', '.join(shapes)})"

    def __str__(self) -> str:
        return prediction_text(self)

    def _repr_html_(self) -> str:
        return prediction_html(self)

    # Classes.

    @property
    def labels(self) -> Tensor:
        """The most probable class [N, ...]; for binary outputs whether 1 is more probable than 0 [N, ..., C]."""
        self._need("labels", "classification", "binary")
        return self.mean.argmax(-1) if self.kind == "classification" else (self.mean > 0.5).long()

    @property
    def confidence(self) -> Tensor:
        """The probability of ``labels``, of the same shape."""
        self._need("confidence", "classification", "binary")
        return self.mean.amax(-1) if self.kind == "classification" else torch.maximum(self.mean, 1 - self.mean)

    def _need(self, what: str, *kinds: str) -> None:
        if self.kind not in kinds:
            raise UnsupportedError(f"Prediction: {what} needs kind {' or '.join(kinds)}, but this is {self.kind}.")

    # What follows from the moments, the samples and the latent Gaussian.

    def score(self, kind: str = "entropy") -> Tensor:
        """Returns one number per example, the higher, the more unusual; positions and outputs are averaged.

        ========================  ==========================================  =================================
        kind                      classification, binary                      regression
        ========================  ==========================================  =================================
        ``entropy``               ``total``                                   ½ log(2πe total)
        ``mutual_information``    ``epistemic``                               ½ log(total / aleatoric)
        ``variance``              latent variance, else that of the samples   ``epistemic``
        ``max_probability``       1 − max p                                   not defined
        ========================  ==========================================  =================================

        For counts and custom only ``variance`` is defined, and is ``epistemic``. The mean over several outputs is taken; only of ``variance`` does
        it depend on the units of the outputs.

        Args:
            kind: The score, one of ``SCORES``.

        Returns:
            The score of each example [N].

        Raises:
            InputError: The kind of score is unknown.
            UnsupportedError: The score is not defined here.

        >>> Prediction("regression", *(torch.ones(3, 2) for _ in range(4))).score("variance")
        tensor([1., 1., 1.])
        """
        if kind == "either":
            raise InputError(
                'score: "either" ranks inputs among held-out ones; use Reference.from_predictions(held_out).score(prediction) '
                "of aftermap.evaluation."
            )
        if kind not in SCORES:
            raise InputError(f"score: kind is {kind!r}, but must be one of {', '.join(map(repr, SCORES))}.")
        classes = self.kind in ("classification", "binary")
        if kind == "variance":
            values = self.epistemic if not classes else self._class_variance()
        elif classes:
            values = {"entropy": self.total, "mutual_information": self.epistemic}.get(kind, 1 - self.confidence)
        else:
            self._need(f"the score {kind!r}", *(KINDS[:2] if kind == "max_probability" else KINDS[:3]))
            ratio = 2 * math.pi * math.e * self.total if kind == "entropy" else self.total / self.aleatoric
            values = 0.5 * ratio.log()
        return values.reshape(len(self), -1).mean(1)

    def _class_variance(self) -> Tensor:
        if self.latent_var is not None:
            return self.latent_var
        if self.latent_cov is not None:
            return self.latent_cov.diagonal(dim1=-2, dim2=-1)
        if self.samples is None:
            raise UnsupportedError('the score "variance" needs latent_var or samples; predict with link="mc".')
        return (shares(self.samples, self.weights) * (self.samples - self.mean).square()).sum(0)

    def interval(self, level: float = 0.95, *, noise: bool = True) -> tuple[Tensor, Tensor]:
        """Returns the central interval that holds a share ``level``, for each output.

        - regression, custom: mean ∓ z s, with s² = ``total`` for a new target, ``epistemic`` for the function itself
          (``noise=False``);
        - counts: quantiles of the mixture of Poissons over the samples, or of the Poisson with a log-normal rate;
          ``noise=False`` gives those of the rate;
        - binary, classification: an interval for each **probability** E[y | f], whatever ``noise`` says: quantiles of
          the samples; for binary outputs with a latent Gaussian σ(m ∓ z √v), which is exact.

        Args:
            level: The probability inside the interval, in (0, 1).
            noise: Whether the interval is for a new target or for the function.

        Returns:
            The lower and the upper end, each [N, ..., D].

        Raises:
            InputError: The level lies outside (0, 1).
            UnsupportedError: There are no samples to take quantiles of.

        >>> lower, upper = Prediction("regression", *(torch.ones(3, 2) for _ in range(4))).interval()
        >>> round(upper[0, 0].item(), 4)
        2.96
        """
        if not 0.0 < level < 1.0:
            raise InputError(f"interval: level must lie in (0, 1), got {level}. Write 95 % as 0.95.")
        ends = (0.5 - level / 2, 0.5 + level / 2)
        lower, upper = (self._quantile(end, noise).to(self.mean.dtype) for end in ends)
        return lower, upper

    def _quantile(self, end: float, noise: bool) -> Tensor:
        z = normal_quantile(torch.tensor(end, dtype=torch.float64)).item()
        if self.kind in ("regression", "custom"):
            return self.mean + z * (self.total if noise else self.epistemic).sqrt()
        if self.kind == "counts" and noise:
            rates = self.samples if self.samples is not None else poisson_lognormal_rates(*self._latent())
            return poisson_mixture_quantile(rates, self.weights, end)
        if self.samples is not None and (self.kind == "classification" or self.latent_mean is None):
            return weighted_quantile(self.samples, self.weights, end)
        if self.kind == "classification":
            raise UnsupportedError(
                f'interval: link "{self.link}" keeps no samples of the probabilities; predict with link="mc", and fewer inputs at '
                "a time where their samples would take more than 256 MB."
            )
        mean, variance = self._latent()
        latent = mean + z * variance.sqrt()
        return latent.sigmoid() if self.kind == "binary" else latent.exp()

    def _latent(self) -> tuple[Tensor, Tensor]:
        if self.latent_mean is None or (self.latent_var is None and self.latent_cov is None):
            raise UnsupportedError("this prediction has neither samples nor a latent Gaussian; predict with samples.")
        return self.latent_mean, self._class_variance()

    def distribution(self) -> td.Distribution:
        """Returns the predictive distribution as a torch object, with batch shape [N, ...] or [N, ..., D].

        For classification it is ``Categorical(mean)``; for binary outputs ``Bernoulli(mean)``; for regression
        ``Normal(mean, √total)``, or the mixture of Normals over the samples; for counts the mixture of Poissons over
        the samples, or the ``NegativeBinomial`` with the same mean and variance (torch has no Poisson with log-normal
        rate; :meth:`log_prob` uses the exact one).

        Returns:
            The distribution. Outputs are independent in it.

        Raises:
            UnsupportedError: The prediction is of a likelihood of your own.

        >>> Prediction("regression", *(torch.ones(3, 2) for _ in range(4))).distribution()
        Normal(loc: torch.Size([3, 2]), scale: torch.Size([3, 2]))
        """
        self._need("distribution()", *KINDS[:-1])
        if self.kind == "classification":
            return td.Categorical(probs=self.mean)
        if self.kind == "binary":
            return td.Bernoulli(probs=self.mean.clamp(0, 1))
        if self.kind == "regression" and self.samples is None:
            return td.Normal(self.mean, self.total.sqrt())
        if self.samples is None:
            shape = (self.mean.square() / self.epistemic).clamp_max(_MAX_COUNT_PARAMETER).to(torch.float64)
            return td.NegativeBinomial(shape, logits=(self.mean / shape).log())
        components = self.samples.movedim(0, -1)
        share = shares(self.samples, self.weights).expand(self.samples.shape).movedim(0, -1)
        inner: td.Distribution
        if self.kind == "counts":
            inner = td.Poisson(components)
        else:
            noise = self.aleatoric.unsqueeze(0) if self.sample_variance is None else self.sample_variance
            inner = td.Normal(components, noise.movedim(0, -1).expand(components.shape).sqrt())
        return td.MixtureSameFamily(td.Categorical(probs=share), inner)

    def has_label(self, targets: Tensor) -> Tensor:
        """Tells which positions [N, ...] have a label: not those whose class index is ``ignore_index``."""
        return targets != self.ignore_index

    def log_prob(self, targets: Tensor, *, ignore_index: int | None = None) -> Tensor:
        """Returns the log-density of targets under the predictive, summed over positions and outputs.

        For classification and binary outputs it is the log of the mean probability, at least 1e-12; for regression that
        of the Gaussian with the total variance, or log Σ_s w_s N(y; μ_s, σ_s²) where there are samples; for counts that
        of the mixture of Poissons, or of the integral over the log-normal rate. Outputs and positions count as
        independent.

        Args:
            targets: The class indices [N, ...] for classification, otherwise targets [N, ..., D] (or [N, ...] if D is
                1).
            ignore_index: The class index of positions to leave out. None takes that of the prediction.

        Returns:
            The log-density of each example [N].

        Raises:
            ShapeError, DataError: The targets do not fit.
            UnsupportedError: The prediction is of a likelihood of your own.

        >>> Prediction("regression", *(torch.ones(3, 2) for _ in range(4))).log_prob(torch.ones(3, 2))
        tensor([-1.8379, -1.8379, -1.8379])
        """
        self._need("log_prob", *KINDS[:-1])
        if self.kind == "classification":
            index = self.ignore_index if ignore_index is None else ignore_index
            Categorical(ignore_index=index).check(self.mean, targets)
            ignored = (targets == index).unsqueeze(-1)
            picked = self.mean.gather(-1, torch.where(ignored, 0, targets.unsqueeze(-1)).long())
            values = torch.where(ignored, 0.0, picked.double().clamp_min(PROBABILITY_FLOOR).log())
        else:
            parse_likelihood(self.kind).check(self.mean, targets)
            y = aligned(self.mean, targets, self.mean.shape[-1], "Prediction.log_prob")
            if self.kind == "binary":
                p = self.mean.double()
                values = y * p.clamp_min(PROBABILITY_FLOOR).log() + (1 - y) * (1 - p).clamp_min(PROBABILITY_FLOOR).log()
            elif self.kind == "counts" and self.samples is None:
                values = poisson_lognormal_log_prob(y, *self._latent())
            else:
                values = self.distribution().log_prob(y)
        return sum_positions(values).sum(-1).to(self.mean.dtype)


def _join(name: str, values: list[Tensor]) -> Tensor:
    axis = 1 if name in _BY_SAMPLE else 0
    try:
        return torch.cat(values, axis)
    except RuntimeError:
        shapes = ", ".join(str(list(value.shape)) for value in values)
        raise ShapeError(f"Prediction.concatenate: {name} of shapes {shapes} do not join.") from None
