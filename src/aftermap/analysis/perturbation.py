"""Is the map calibrated? Drawing one layer from its posterior must raise the training loss by ½γ_ℓ nats (docs/mathematics/where.md).

With the loss L = Σ −log p(y_n | f_n) and one layer's weights drawn from N(θ*_ℓ, C),

    E[L(θ_ℓ) − L(θ*)] ≈ ½ Σ_n tr(Λ_n J_ℓ C J_ℓᵀ) = ½ tr(H_ℓℓ C) = ½γ_ℓ / power,      C = (s·H_ℓℓ + P₀)⁻¹.

The first sign leaves out that the network is not linear in the layer: wide draws, and the residuals' curvature
Σ_n r_n ∇²f_n, which is zero for the last layer, and for the others of a ReLU network as far as no draw crosses a kink.
The second sign is the posterior's approximation of the curvature. Measured, linearised and ½γ are all given, so that a gap says
which of the two is at fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.analysis.layers import Layer, contributions, sampled_layer
from aftermap.batches import Batch
from aftermap.curvature.structures.layer_parts import LayerParts
from aftermap.errors import DataError
from aftermap.models import call_model
from aftermap.params import Params, swapped
from aftermap.predictive.predictor import PosteriorPredictor

__all__ = ["Perturbation", "perturbations"]

_NUMBERS = 1 << 26  # This many drawn weights are alive at once.


@dataclass(frozen=True)
class Perturbation:
    """What happens to the training loss when one layer is drawn from its posterior; in nats, summed over the data.

    Attributes:
        layer: The name of the layer.
        measured: The mean increase over the draws.
        standard_error: The standard error of the mean increase.
        linearised: The increase ½ Σ tr(Λ V_ℓ) that there would be if the network were linear in the layer.
        expected: The increase ½γ_ℓ / power, scaled to these data; NaN where the posterior does not know it.
        draws: The number of pairs of draws θ* ± δ.
    """

    layer: str
    measured: float
    standard_error: float
    linearised: float
    expected: float
    draws: int

    @property
    def ratio(self) -> float:
        """The measured over the expected increase, which is 1 for a calibrated map."""
        return self.measured / self.expected if self.expected else math.nan


def perturbations(
    predictor: PosteriorPredictor,
    parts: Sequence[LayerParts],
    layers: Sequence[Layer],
    batches: Callable[[], Iterable[Batch]],
    draws: int,
    power: float,
    n_data: float | None,
    generator: torch.Generator | None,
) -> tuple[Perturbation, ...]:
    """Measures for every layer how much the training loss rises when it is drawn.

    Args:
        predictor: The model with its posterior and likelihood.
        parts: The posterior, by layers.
        layers: The layers in order.
        batches: A function that hands out the training data anew.
        draws: The number of pairs of draws per layer. A pair θ* ± δ cancels the slope that the prior leaves in the loss
            at θ*.
        power: The factor of the log-likelihood in the posterior.
        n_data: The number of data that the posterior saw. None means that it saw these.
        generator: The source of the random draws.
    """
    count, linear = 0.0, torch.zeros(len(layers), dtype=torch.float64)
    for batch in batches():
        _need_targets(batch)
        checked, likelihood = predictor.plan(batch), predictor.network_likelihood  # whose curvature the posterior is of
        predicted = contributions(checked, parts, layers, batch, likelihood, diagonal=False, targets=batch.targets)
        weight = torch.ones(batch.size) if batch.weight is None else batch.weight.cpu()
        count += float(weight.sum())
        nats = predicted.nats.get("conditional", predicted.nats["own"])  # [L, n, T]
        linear += nats.sum(2).cpu() @ weight.to(torch.float64)
    results = []
    for i, layer in enumerate(layers):
        increases, half = _increases(predictor, parts, layer, batches, draws, generator)
        error = float(increases.std()) / math.sqrt(draws) if draws > 1 else math.nan
        share = 1.0 if n_data is None else count / n_data
        expected = half / power * share
        results.append(Perturbation(layer.name, float(increases.mean()), error, float(linear[i]), expected, draws))
    return tuple(results)


def _need_targets(batch: Batch) -> None:
    if not isinstance(batch.targets, Tensor):
        raise DataError(
            "calibration compares training losses, but a batch has no tensor of targets; pass (x, y) batches"
        )


def _increases(
    predictor: PosteriorPredictor,
    parts: Sequence[LayerParts],
    layer: Layer,
    batches: Callable[[], Iterable[Batch]],
    draws: int,
    generator: torch.Generator | None,
) -> tuple[Tensor, float]:
    """Returns the mean increase of each pair of draws [draws], and ½γ."""
    size = sum(predictor.posterior.mean[n].numel() for n in layer.parameters)
    stride = max(1, min(draws, _NUMBERS // size))
    increases, half = [], math.nan
    for start in range(0, draws, stride):
        some = min(stride, draws - start)
        deviations, half = sampled_layer(layer.name, parts, some, generator)
        increases.append(_pass(predictor, deviations, batches, some))
    return torch.cat(increases), half


@torch.no_grad()
def _pass(
    predictor: PosteriorPredictor, deviations: Params, batches: Callable[[], Iterable[Batch]], some: int
) -> Tensor:
    model, mean = predictor.model, predictor.posterior.mean
    increase = torch.zeros(some, dtype=torch.float64)
    for batch in batches():
        before = _loss(predictor, batch)
        for s in range(some):
            for sign in (1.0, -1.0):
                drawn = {n: mean[n] + sign * d[s].to(mean[n]) for n, d in deviations.items()}
                with swapped(model, drawn):
                    increase[s] += 0.5 * (_loss(predictor, batch) - before)
    return increase


def _loss(predictor: PosteriorPredictor, batch: Batch) -> float:
    outputs = call_model(predictor.model, batch.inputs)
    losses = predictor.network_likelihood.nll(outputs, batch.targets).to(torch.float64)
    return float(losses.sum() if batch.weight is None else losses @ batch.weight.to(losses))
