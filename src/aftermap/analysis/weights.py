"""Uncertainty by weight, and by filter or neuron (docs/mathematics/where.md).

For a weight w with posterior variance v and prior precision τ these are the signal-to-noise ratio |w|/√v, and the
contraction c = 1 − τv, which is 0 where the data said nothing and 1 where they said everything. The contraction
compares layers; the variance alone does not, since its scale goes with the width of a layer. Σ c over a layer is its
effective number of parameters γ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from aftermap.curvature.structures.layer_parts import LayerParts
from aftermap.params import Params
from aftermap.prior import Prior

__all__ = ["CONTRACTION_EDGES", "SNR_EDGES", "LayerWeights", "Units", "WeightMap", "summarise", "weight_maps"]

CONTRACTION_EDGES = tuple(i / 40 for i in range(41))
SNR_EDGES = tuple(-3 + i * 0.15 for i in range(41))  # These are edges of log₁₀ |w|/√v.
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, eq=False)
class WeightMap:
    """One parameter with the uncertainty of every entry; all tensors have the parameter's shape, in float64.

    Attributes:
        layer: The name of the layer.
        name: The name of the parameter.
        value: The posterior's mean w.
        variance: The posterior's variance v; zero where a weight is fixed.
        snr: The signal-to-noise ratio |w|/√v; NaN where a weight is fixed.
        contraction: The contraction 1 − τv; NaN where a weight is fixed.
        transposed: The number of groups of a transposed convolution, whose outputs are its second dimension; 0 for all
            others.
    """

    layer: str
    name: str
    value: Tensor
    variance: Tensor
    snr: Tensor
    contraction: Tensor
    transposed: int = 0

    @property
    def deviation(self) -> Tensor:
        """The standard deviation √v."""
        return self.variance.sqrt()

    def by_unit(self, values: Tensor) -> Tensor:
        """Returns the values with the entries of filter, neuron, channel or token u in row u: [units, entries]."""
        if values.dim() == 0:
            return values.reshape(1, 1)
        if self.transposed:
            grouped = values.unflatten(0, (self.transposed, -1)).transpose(1, 2)
            return grouped.flatten(0, 1).flatten(1)
        return values.reshape(len(values), -1)


@dataclass(frozen=True, eq=False)
class Units:
    """The filters, neurons, channels or tokens of a layer, in order; each tensor is [units].

    Attributes:
        parameters: The names of the parameters that the units are made of: a weight with its bias.
        count: The number of uncertain weights of each unit.
        variance: The mean of v in each unit.
        snr: The ratio √(mean w² / mean v) of each unit.
        contraction: The mean of 1 − τv; NaN for a unit without an uncertain weight.
        effective: The sum Σ (1 − τv) of each unit; they add up to the layer's γ.
    """

    parameters: tuple[str, ...]
    count: Tensor
    variance: Tensor
    snr: Tensor
    contraction: Tensor
    effective: Tensor


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The weights of a layer in few numbers.

    Attributes:
        count: The number of uncertain weights.
        trace: The sum Σ v over the weights.
        effective: The sum Σ (1 − τv) over the weights.
        contraction_counts: The number of weights between neighbouring `CONTRACTION_EDGES`; the first and the last also
            hold what is beyond.
        snr_counts: The number of weights between neighbouring `SNR_EDGES`, in the same way.
        parameters: One row per parameter: name, shape, quantiles.
        units: The groups of units; mostly one.
    """

    count: int
    trace: float
    effective: float
    contraction_counts: tuple[int, ...]
    snr_counts: tuple[int, ...]
    parameters: tuple[Mapping[str, object], ...]
    units: tuple[Units, ...] = field(default=())


def weight_maps(
    layer: str, parameters: Sequence[str], parts: Sequence[LayerParts], mean: Params, prior: Prior, model: nn.Module
) -> Iterator[WeightMap]:
    """Yields the maps of a layer's parameters, one at a time.

    Args:
        layer: The name of the layer.
        parameters: The names of the parameters, in the order wanted.
        parts: The parts of the posterior; each part's variances are made once.
        mean: The trained weights θ*.
        prior: The prior, which has the precisions τ.
        model: The network, which tells where transposed convolutions are.
    """
    owners = {n: part for part in parts for n in part.layers.get(layer, ())}
    variances: dict[int, Params] = {}
    for name in parameters:
        part = owners[name]
        if id(part) not in variances:
            variances = {id(part): part.variance(layer)}
        yield _weight_map(layer, name, variances[id(part)][name], mean[name], prior.precision[name], model)


def _weight_map(layer: str, name: str, variance: Tensor, mean: Tensor, prior: Tensor, model: nn.Module) -> WeightMap:
    value = mean.detach().to(torch.float64)
    variance = variance.detach().to(value)
    fixed = variance == 0
    nan = torch.full_like(variance, math.nan)
    snr = torch.where(fixed, nan, value.abs() / torch.where(fixed, 1.0, variance).sqrt())
    contraction = torch.where(fixed, nan, 1 - prior.detach().to(value) * variance)
    path, _, leaf = name.rpartition(".")
    owner = dict(model.named_modules()).get(path)
    groups = owner.groups if isinstance(owner, _TRANSPOSED) and leaf == "weight" else 0
    return WeightMap(layer, name, value, variance, snr, contraction, groups)


def summarise(maps: Iterator[WeightMap]) -> LayerWeights:
    """Returns counts, quantiles and units of one layer; only one parameter's maps are alive at a time."""
    count, trace, effective = 0, 0.0, 0.0
    contraction = np.zeros(len(CONTRACTION_EDGES) - 1, dtype=np.int64)
    snr = np.zeros(len(SNR_EDGES) - 1, dtype=np.int64)
    rows: list[Mapping[str, object]] = []
    sums: dict[int, tuple[list[str], Tensor]] = {}
    for weight_map in maps:
        free = ~weight_map.contraction.isnan()
        own_c, own_s = weight_map.contraction[free].cpu().numpy(), weight_map.snr[free].cpu().numpy()
        count += len(own_c)
        trace += float(weight_map.variance.sum())
        effective += float(own_c.sum())
        contraction += _histogram(own_c, CONTRACTION_EDGES)
        snr += _histogram(np.log10(np.maximum(own_s, 1e-300)), SNR_EDGES)
        rows.append(_row(weight_map, free, own_c, own_s))
        moments = _moments(weight_map)
        names, total = sums.setdefault(len(moments), ([], torch.zeros_like(moments)))
        names.append(weight_map.name)
        total += moments
    units = tuple(_units(names, total) for names, total in sums.values())
    return LayerWeights(count, trace, effective, tuple(contraction.tolist()), tuple(snr.tolist()), tuple(rows), units)


def _histogram(values: np.ndarray, edges: Sequence[float]) -> np.ndarray:
    return np.histogram(np.clip(values, edges[0], edges[-1]), bins=np.asarray(edges))[0]


def _row(weight_map: WeightMap, free: Tensor, contraction: np.ndarray, snr: np.ndarray) -> Mapping[str, object]:
    def quantile(values: np.ndarray, q: float) -> float:
        return float(np.quantile(values, q)) if len(values) else math.nan

    deviation = weight_map.deviation[free].cpu().numpy()
    return {
        "layer": weight_map.layer,
        "parameter": weight_map.name,
        "shape": "×".join(map(str, weight_map.value.shape)) or "1",
        "weights": len(contraction),
        "median |w|": quantile(weight_map.value[free].abs().cpu().numpy(), 0.5),
        "median sd": quantile(deviation, 0.5),
        "median snr": quantile(snr, 0.5),
        "snr < 1 share": float((snr < 1).mean()) if len(snr) else math.nan,
        "contraction 5 %": quantile(contraction, 0.05),
        "contraction 50 %": quantile(contraction, 0.5),
        "contraction 95 %": quantile(contraction, 0.95),
    }


def _moments(weight_map: WeightMap) -> Tensor:
    """Returns [units, 4]: the number of uncertain weights, and Σ v, Σ w², Σ c over them."""
    contraction = weight_map.by_unit(weight_map.contraction)
    free = ~contraction.isnan()
    squares = weight_map.by_unit(weight_map.value).square()
    columns = [
        free.double(),
        weight_map.by_unit(weight_map.variance),
        squares * free,
        torch.where(free, contraction, 0.0),
    ]
    return torch.stack([c.sum(1) for c in columns], 1).cpu()


def _units(names: Sequence[str], sums: Tensor) -> Units:
    count, variance, squares, contraction = sums.unbind(1)
    return Units(
        tuple(names),
        count.long(),
        torch.where(count > 0, variance / count, math.nan),
        torch.where(variance > 0, (squares / variance).sqrt(), math.nan),
        torch.where(count > 0, contraction / count, math.nan),
        contraction,
    )
