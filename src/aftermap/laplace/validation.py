r"""Tuning on validation labels: the labels set the temperature, a convention sets the width, and a small budget guards it.

The predictive of a classifier is a point of one family: z ~ N(f, V_r/c) and p = E softmax(z/T), with the prior precision r·c at
data scale c. The network itself (c → ∞, T = 1) and temperature scaling (c → ∞) belong to it. In the coordinates

    z/T = f/T + √w V̄_r^½ ε,    V̄_r with mean contrast variance 1 on the validation inputs,   c = v_r / (w T²),

the validation likelihood is nearly flat along w and r: some hundred labels decide one number, the temperature. Letting them decide all three
follows their noise. So the width w is as large as a budget of a thousandth of a nat or two allows, the ratio r as small, and
T is what the labels say. With few labels these are smoothed towards temperature scaling averaged over its posterior, which
one number of labels decides well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aftermap.laplace.golden import golden_section
from aftermap.laplace.latents import OutputGaussians
from aftermap.likelihoods import Categorical, Likelihood, temperature_of
from aftermap.predictive.latent import Latent, draw, draw_logits, normal_points
from aftermap.predictive.links import log_probabilities, uses_draws
from aftermap.predictive.prediction import PROBABILITY_FLOOR

__all__ = ["RATIOS", "WIDTHS", "TemperatureResult", "ValidationResult", "search_family", "search_temperature"]

RATIOS = (1e-3, 1e-2, 1e-1, 1.0)  # prior precision / data scale
WIDTHS = (2.0, 1.0, 0.5, 0.25, 0.1)  # mean variance of a contrast of the logits z/T
_RATIO_EXPONENT = 1 / 8  # a ratio ten times as small counts as much as a width 10^(1/8) times as large
_TEMPERATURES = tuple(1.1**k for k in range(-10, 17))
_LOG_TEMPERATURE, _LOG_DEVIATION = 0.2, 0.5  # of the prior of log T: trained networks are rather too sure than not
_PSEUDO_LABELS = 300.0  # how many labels the smoothing is worth
_BUDGET, _SHARE_OF_ENTROPY = 0.002, 0.02  # nats, and a share of the mean entropy
_NO_WIDTH = 1e-10  # the width of a posterior that gives nothing


@dataclass(frozen=True)
class ValidationResult:
    """What validation labels said, and what a rule decided where they said nothing.

    Attributes:
        ratio: The ratio r of prior precision to data scale.
        width: The width w: the mean variance of a contrast of the logits over T on the validation inputs.
        data_scale: The data scale c.
        precision: The prior precision r·c.
        output_temperature: The temperature T that the outputs are divided by.
        deterministic: Whether no width was within the budget, so that the predictive is the network's with a temperature.
        n_data: The number of labelled positions that were used.
        n_classes: The number of classes among their labels.
        network_nll: The mean negative log-likelihood of the validation labels under the network itself.
        temperature_nll: The same under temperature scaling.
        nll: The same under the predictive that was chosen.
        difference: ``nll`` less ``temperature_nll``.
        standard_error: The standard error of the difference, example by example.
        budget: By how much the smoothed loss was allowed to exceed that of temperature scaling, in nats.
        temperature: The temperature of temperature scaling.
        tried: A row (w, r, T, smoothed loss less that of temperature scaling) for every point that was tried.
    """

    ratio: float
    width: float
    data_scale: float
    precision: float
    output_temperature: float
    deterministic: bool
    n_data: int
    n_classes: int
    network_nll: float
    temperature_nll: float
    nll: float
    difference: float
    standard_error: float
    budget: float
    temperature: float
    tried: tuple[tuple[float, float, float, float], ...] = ()

    def __str__(self) -> str:
        numbers = (
            f"negative log-likelihood of {self.n_data:,} validation labels: {self.network_nll:.4f} by the network alone, "
            f"{self.temperature_nll:.4f} with a temperature, {self.nll:.4f} with the posterior too "
            f"(a change of {1000 * self.difference:+.1f} ± {1000 * self.standard_error:.1f} thousandths)"
        )
        if self.deterministic:
            return f"{numbers}. No posterior was as good as the temperature alone, so its variance is zero: it adds nothing here"
        if abs(self.difference) <= 2 * self.standard_error:
            decided = "The labels cannot tell how wide the posterior should be, so a fixed rule sets its width"
        elif self.difference < 0:
            decided = "The posterior predicts the labels better than the temperature alone, by more than chance"
        else:
            decided = "The posterior predicts the labels slightly worse than the temperature alone; the rule accepts that as the price of a width that shows unusual inputs"
        return f"{numbers}. {decided}"


@dataclass(frozen=True)
class TemperatureResult:
    """The temperature that validation labels ask for, of a network under draws of its weights.

    Attributes:
        output_temperature: The temperature T that the outputs are divided by.
        n_data: The number of labelled positions that were used.
        n_classes: The number of classes among their labels.
        network_nll: The mean negative log-likelihood of the validation labels under the network itself.
        untuned_nll: The same under the draws, at the temperature of training.
        nll: The same at T.
    """

    output_temperature: float
    n_data: int
    n_classes: int
    network_nll: float
    untuned_nll: float
    nll: float

    def __str__(self) -> str:
        return (
            f"negative log-likelihood of {self.n_data:,} validation labels: {self.network_nll:.4f} by the network alone, "
            f"{self.untuned_nll:.4f} by draws of its weights, {self.nll:.4f} with their outputs divided by "
            f"{self.output_temperature:.3g}"
        )


@dataclass(frozen=True)
class _Logits:
    """Labels over K classes with the logits of one network, or of S draws of one, for them; a single logit is written as two classes.

    Attributes:
        draws: [S, M, K].
        labels: The probabilities that the labels give [M, K].
        weight: [M], with sum 1.
        count: How many data the positions stand for.
    """

    draws: Tensor
    labels: Tensor
    weight: Tensor
    count: float

    @staticmethod
    def of(outputs: Tensor, targets: Tensor, weight: Tensor, likelihood: Likelihood) -> _Logits:
        """Makes it of outputs [S, M, C], targets [M] or [M, C] and how many data each position stands for [M]."""
        draws = outputs / (temperature_of(likelihood) or 1.0)
        if isinstance(likelihood, Categorical):
            labels = F.one_hot(targets.long(), draws.shape[-1]).to(draws)
        else:
            weight = weight.repeat_interleave(draws.shape[-1])
            one, logit = targets.to(draws).reshape(-1), draws.flatten(1)
            labels, draws = torch.stack([1 - one, one], -1), torch.stack([-logit / 2, logit / 2], -1)
        count = float(weight.sum())
        return _Logits(draws, labels, weight / count, count)

    def log_p(self, temperature: float = 1.0) -> Tensor:
        """Returns the logarithms of the probabilities at a temperature [M, K], averaged over the draws."""
        return F.log_softmax(self.draws / temperature, -1).logsumexp(0) - math.log(len(self.draws))

    def loss(self, log_p: Tensor, labels: Tensor) -> Tensor:
        """Returns −Σ_k y_k log p_k of each position [M] under smoothed labels."""
        return -(labels * log_p.clamp_min(-700.0)).sum(-1)

    def nll(self, log_p: Tensor) -> Tensor:
        """Returns the negative log-likelihood of the label of each position [M], as predictions and metrics report it."""
        return -(self.labels * log_p.clamp_min(math.log(PROBABILITY_FLOOR))).sum(-1)

    def average(self, values: Tensor) -> float:
        return float((self.weight * values).sum())


class _Family:
    """The predictive probabilities of a point (T, w, r) of the family, by the link that makes predictions.

    Args:
        gaussians: The Gaussians over outputs at c = 1, one for each ratio.
        likelihood: The likelihood.
        link: The link.
        samples: The number of its draws, which are the same at every point.
    """

    def __init__(self, gaussians: OutputGaussians, likelihood: Likelihood, link: str, samples: int):
        self.likelihood, self.link = likelihood, link
        base = temperature_of(likelihood) or 1.0
        self.mean = gaussians.mean / base
        self.covariances = [c / base**2 for c in gaussians.covariances]
        self.variances = [self._mean_contrast(cov, gaussians.weight) for cov in self.covariances]
        self._points = normal_points(samples, self.mean.shape[-1], fixed=True)
        self._drawn: dict[int, Tensor] = {}
        self._scaled: tuple[tuple[float, int], Tensor, Tensor | None] | None = None

    def _mean_contrast(self, cov: Tensor, weight: Tensor) -> float:
        """Returns v_r, the mean variance of a contrast of two logits; half that of a single logit, which is the difference of two."""
        variance = cov.diagonal(dim1=-2, dim2=-1)
        if isinstance(self.likelihood, Categorical):
            k = cov.shape[-1]
            contrast = (variance.sum(-1) - cov.sum((-2, -1)) / k) / (k - 1)
        else:
            contrast = variance.clamp_min(0.0).mean(-1) / 2
        return float((weight * contrast).sum() / weight.sum())

    def _deviations(self, i: int) -> Tensor:
        """Draws around zero [S, N, C] under the i-th ratio."""
        if i not in self._drawn:
            cov = self.covariances[i]
            latent = Latent(torch.zeros_like(self.mean), cov, cov.diagonal(dim1=-2, dim2=-1))
            drawn = draw_logits if isinstance(self.likelihood, Categorical) else draw
            self._drawn[i] = drawn(latent, self._points).float()
        return self._drawn[i]

    def _at(self, width: float, i: int) -> tuple[Tensor, Tensor | None]:
        """Returns the covariance of the logits over T at a width, and draws around zero where the link has any: the same for every T."""
        if self._scaled is None or self._scaled[0] != (width, i):
            scale, drawn = width / self.variances[i], None
            if uses_draws(self.likelihood, self.link):
                drawn = math.sqrt(scale) * self._deviations(i)
            self._scaled = (width, i), scale * self.covariances[i], drawn
        return self._scaled[1], self._scaled[2]

    def log_p(self, t: float, width: float, i: int) -> Tensor:
        """Returns the log-probabilities [M, K]."""
        mean, (cov, deviations) = self.mean / t, self._at(width, i)
        drawn = None if deviations is None else mean.float() + deviations
        latent = Latent(mean, cov, cov.diagonal(dim1=-2, dim2=-1).clamp_min(0.0))
        return log_probabilities(self.likelihood, latent, self.link, drawn).double().flatten(0, -2)


def _averaged_temperature(logits: _Logits) -> Tensor:
    """Returns the probabilities [M, K] of temperature scaling averaged over the posterior of its temperature."""
    temperatures = torch.tensor(_TEMPERATURES, dtype=torch.float64)
    fits = torch.stack(
        [
            -logits.count * (logits.weight * logits.loss(logits.log_p(float(t)), logits.labels)).sum()
            for t in temperatures
        ]
    )
    prior = -0.5 * ((temperatures.log() - _LOG_TEMPERATURE) / _LOG_DEVIATION).square()
    probabilities = torch.softmax(fits + prior, 0)
    mixed = torch.zeros_like(logits.labels)
    for share, t in zip(probabilities, temperatures, strict=True):
        mixed += share * logits.log_p(float(t)).exp()
    return mixed


def _smoothed_labels(logits: _Logits, averaged: Tensor) -> Tensor:
    return (logits.count * logits.labels + _PSEUDO_LABELS * averaged) / (logits.count + _PSEUDO_LABELS)


def _best_temperature(logits: _Logits, smoothed: Tensor) -> float:
    """Finds the T that minimises the smoothed loss at T, for one network convex in 1/T. 1 where T has no influence."""

    def loss(log_t: float) -> float:
        return logits.average(logits.loss(logits.log_p(math.exp(log_t)), smoothed))

    low, high = math.log(0.05), math.log(50.0)
    if abs(loss(low) - loss(high)) < 1e-12 and abs(loss(0.0) - loss(high)) < 1e-12:
        return 1.0
    return math.exp(golden_section(loss, low, high, 24))


def search_temperature(
    draws: Tensor, network: Tensor, targets: Tensor, weight: Tensor, likelihood: Likelihood
) -> TemperatureResult:
    """Finds the temperature of the outputs of a network under draws of its weights, by the rule that `search_family` starts from.

    With few labels these are smoothed towards the mean over the posterior of the temperature.

    Args:
        draws: The outputs under every draw [S, M, C].
        network: The network's own outputs [M, C].
        targets: The labels [M], or [M, C] where every output has its own.
        weight: How many data each position stands for [M].
        likelihood: A `Categorical` or a `Bernoulli`, at the temperature of training.
    """
    logits, own = (_Logits.of(outputs, targets, weight, likelihood) for outputs in (draws, network[None]))
    t = _best_temperature(logits, _smoothed_labels(logits, _averaged_temperature(logits)))
    network_nll, before, after = (
        logits.average(logits.nll(log_p)) for log_p in (own.log_p(), logits.log_p(), logits.log_p(t))
    )
    n_classes = int((logits.labels.sum(0) > 0).sum())
    base = temperature_of(likelihood) or 1.0
    return TemperatureResult(t * base, len(logits.labels), n_classes, network_nll, before, after)


def search_family(
    gaussians: OutputGaussians,
    likelihood: Likelihood,
    *,
    ratios: Sequence[float] = RATIOS,
    link: str = "auto",
    samples: int = 100,
) -> ValidationResult:
    r"""Finds the widest predictive of the family (r, c, T) whose smoothed validation loss is within a small budget of temperature scaling.

    With Q temperature scaling averaged over the posterior of its temperature and q = (n·y + m·Q)/(n + m) the smoothed labels, the
    loss L(p) = mean −Σ q log p is compared with its minimum over temperatures. Points (w, r) are tried in decreasing order of log w − (log r)/8,
    each with its best temperature; the first whose loss exceeds that minimum by no more than δ is taken.

    Args:
        gaussians: The Gaussians over the outputs of the validation inputs under each of ``ratios`` at data scale 1.
        likelihood: The likelihood that the curvature is of: a `Categorical` or a `Bernoulli`.
        ratios: The ratios of prior precision to data scale.
        link: The link that predictions will use; see `gaussian_prediction`.
        samples: The number of its draws. They are those of a prediction without a generator.
    """
    logits = _Logits.of(gaussians.mean[None], gaussians.targets, gaussians.weight, likelihood)
    averaged = _averaged_temperature(logits)
    smoothed = _smoothed_labels(logits, averaged)
    t0 = _best_temperature(logits, smoothed)
    least = logits.average(logits.loss(logits.log_p(t0), smoothed))
    entropy = logits.average(-(averaged * averaged.clamp_min(1e-300).log()).sum(-1))
    budget = min(_BUDGET, _SHARE_OF_ENTROPY * entropy)
    family = _Family(gaussians, likelihood, link, samples)
    order = sorted(
        ((w, i) for w in WIDTHS for i in range(len(ratios)) if family.variances[i] > 0),
        key=lambda point: math.log(point[0]) - _RATIO_EXPONENT * math.log(ratios[point[1]]),
        reverse=True,
    )
    tried: list[tuple[float, float, float, float]] = []
    chosen: tuple[float, int, float] | None = None
    for width, i in order:
        cost, t = _cheapest_temperature(
            lambda t, w=width, i=i: logits.average(logits.loss(family.log_p(t, w, i), smoothed)) - least,  # type: ignore[misc]
            t0 / (1.2 * math.sqrt(1 + math.pi * width / 8)),
            1.05 * t0,
        )
        tried.append((width, ratios[i], t, cost))
        if cost <= budget:
            chosen = (width, i, t)
            break
    deterministic = chosen is None
    width, i, t = (_NO_WIDTH, len(ratios) - 1, t0) if chosen is None else chosen
    losses = {
        "network": logits.nll(logits.log_p()),
        "temperature": logits.nll(logits.log_p(t0)),
    }
    losses["posterior"] = losses["temperature"] if deterministic else logits.nll(family.log_p(t, width, i))
    nlls = {name: logits.average(value) for name, value in losses.items()}
    differences = losses["posterior"] - losses["temperature"]
    spread = logits.weight.square() * (differences - logits.average(differences)).square()
    base = temperature_of(likelihood) or 1.0
    # Under a posterior without any variance on these inputs every scale is as good.
    scale = family.variances[i] / (width * t**2) if family.variances[i] > 0 else 1.0
    return ValidationResult(
        ratio=ratios[i],
        width=0.0 if deterministic else width,
        data_scale=scale,
        precision=ratios[i] * scale,
        output_temperature=t * base,
        deterministic=deterministic,
        n_data=len(logits.labels),
        n_classes=int((logits.labels.sum(0) > 0).sum()),
        network_nll=nlls["network"],
        temperature_nll=nlls["temperature"],
        nll=nlls["posterior"],
        difference=nlls["posterior"] - nlls["temperature"],
        standard_error=float(spread.sum().sqrt()),
        budget=budget,
        temperature=t0 * base,
        tried=tuple(tried),
    )


def _cheapest_temperature(cost: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Finds the least cost and its temperature: on five temperatures, then at the vertex of a parabola through the best three."""
    logs = [math.log(low) + k / 4 * math.log(high / low) for k in range(5)]
    costs = [cost(math.exp(x)) for x in logs]
    best = min(range(5), key=costs.__getitem__)
    middle = min(max(best, 1), 3)
    left, centre, right = costs[middle - 1 : middle + 2]
    bend = left - 2 * centre + right
    if bend > 0:
        step = logs[1] - logs[0]
        vertex = math.exp(logs[middle] + step * min(max(0.5 * (left - right) / bend, -1.0), 1.0))
        at_vertex = cost(vertex)
        if at_vertex < costs[best]:
            return at_vertex, vertex
    return costs[best], math.exp(logs[best])
