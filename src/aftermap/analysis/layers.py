"""Uncertainty by layer: what the data told it, and what it adds to the variance of the outputs (docs/mathematics/where.md).

For each input x the layers' parts of the covariance of the outputs add up exactly (`parts`). Two sizes are kept of each:
tr V_ℓ, its part of the variance, and ½ tr(Λ V_ℓ) with Λ the curvature of the likelihood at x: its part of the mutual
information to first order, in nats. The second does not change when all logits move together; the first does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aftermap.analysis.weights import LayerWeights
from aftermap.batches import Batch
from aftermap.curvature.passes.backward import LayerGradients
from aftermap.curvature.passes.plan import CheckedPlan
from aftermap.curvature.passes.record import ForwardRecord
from aftermap.curvature.structures.layer_parts import LayerParts
from aftermap.likelihoods import Likelihood
from aftermap.params import Params
from aftermap.predictive.linearised import output_gradients

__all__ = ["Contributions", "Layer", "LayerResult", "LayerSums", "contributions", "layer_results", "layers_of"]

MAX_COVARIANCE = 64  # With more outputs only variances are taken.
KINDS = ("own", "cross", "conditional")


@dataclass(frozen=True)
class Layer:
    """A layer of the posterior, with the parameters that it is over.

    Attributes:
        name: The path of its module.
        kind: The class of the module, or "Parameter".
        parameters: The parameters of the layer that are uncertain.
        modules: Every path that uses the parameters, which is more than one where weights are tied.
        structure: The structure of its covariance: kron, ekfac, full, diagonal, low rank and so on.
    """

    name: str
    kind: str
    parameters: tuple[str, ...]
    modules: tuple[str, ...]
    structure: str


@dataclass(frozen=True)
class Contributions:
    """What the layers add for the n examples of a batch, at T output positions each (tokens, pixels; else T = 1).

    Attributes:
        mean: The outputs [n, ..., C].
        cov: The covariance of the outputs [n, ..., C, C]; None if only variances were taken.
        var: The variances of the outputs [n, ..., C].
        variance: For each kind (own, cross, conditional) the layers' parts of the variances [L, n, T, C] in float64,
            the layers in order.
        nats: For each kind ½ tr(Λ V_ℓ) [L, n, T]; empty if only variances were taken.
        calls: For each layer the number of times that its module was called for one input.
    """

    mean: Tensor
    cov: Tensor | None
    var: Tensor
    variance: dict[str, Tensor]
    nats: dict[str, Tensor]
    calls: dict[str, int]


def layers_of(parts: Sequence[LayerParts], model: nn.Module, order: Sequence[str], structure: str) -> tuple[Layer, ...]:
    """Returns the layers of a posterior, in the order of the model's parameters.

    Args:
        parts: The parts of the posterior.
        model: The network whose modules are the layers.
        order: The names of all parameters of the posterior.
        structure: The word for parts without blocks.
    """
    place = {n: i for i, n in enumerate(order)}
    parameters_of: dict[str, list[str]] = {}
    kinds: dict[str, list[str]] = {}
    for part in parts:
        for name, parameters in part.layers.items():
            parameters_of.setdefault(name, []).extend(parameters)
            kinds.setdefault(name, []).append(part.kind.replace("_", " ") or structure)
    modules = dict(model.named_modules())
    users = _users(model)
    layers = []
    for name, members in parameters_of.items():
        path = "" if name == "(model)" else name
        owner = modules.get(path, modules.get(path.rpartition(".")[0]) if path not in place else None)
        used = tuple(dict.fromkeys(u for n in members for u in users[n]))
        words = "+".join(dict.fromkeys(kinds[name]))
        module_kind = type(owner).__name__ if owner is not None else "Parameter"
        layers.append(Layer(name, module_kind, tuple(sorted(members, key=place.__getitem__)), used, words))
    return tuple(sorted(layers, key=lambda layer: place[layer.parameters[0]]))


def _users(model: nn.Module) -> dict[str, list[str]]:
    """Returns for each parameter the paths of every module that holds it, under all of its names."""
    names = {id(p): n for n, p in model.named_parameters()}
    users: dict[str, list[str]] = {n: [] for n in names.values()}
    for path, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None and path not in users[names[id(parameter)]]:
                users[names[id(parameter)]].append(path or "(model)")
    return users


def contributions(
    checked: CheckedPlan,
    parts: Sequence[LayerParts],
    layers: Sequence[Layer],
    batch: Batch,
    likelihood: Likelihood,
    *,
    diagonal: bool | None = None,
    targets: Tensor | None = None,
) -> Contributions:
    """Passes a batch through the network once, and returns every layer's part of the covariance of its outputs.

    Args:
        checked: The plan of the network, in eval mode.
        parts: The posterior, by layers.
        layers: The layers in order.
        batch: The inputs of the batch.
        likelihood: The likelihood that Λ is the curvature of.
        diagonal: Whether to take variances only. None does so for more than `MAX_COVARIANCE` outputs.
        targets: The targets, for a Λ that depends on them (class weights, ignored positions); None leaves these out.
    """
    kinds = [k for k in KINDS if k == "own" or _has(parts, k)]
    means: list[Tensor] = []
    total: dict[int, list[Tensor]] = {}
    variance: dict[str, dict[int, list[Tensor]]] = {k: {} for k in kinds}
    nats: dict[str, dict[int, list[Tensor]]] = {k: {} for k in kinds}
    calls: dict[str, int] = {}
    curvature = torch.empty(0)
    only = diagonal
    for part, position, values, gradients in output_gradients(checked, batch):
        only = values.shape[-1] > MAX_COVARIANCE if only is None else only
        if position == 0:
            means.append(values)
            calls = calls or _calls(gradients.record, layers)
            if not only:
                width = values.shape[-1]
                curvature = likelihood.hessian(values, None if targets is None else targets[part])
                curvature = curvature.to(torch.float64).reshape(len(values), -1, width, width)
        by_kind = _by_layer(parts, layers, gradients, only, kinds)
        whole = torch.stack([*by_kind["own"], *by_kind.get("cross", [])]).sum(0)
        total.setdefault(position, []).append(whole.to(values.dtype))
        for kind, covariances in by_kind.items():
            stacked = torch.stack(covariances).to(torch.float64)  # [L, b, v, v] or [L, b, v]
            variances = stacked if only else stacked.diagonal(dim1=-2, dim2=-1)
            variance[kind].setdefault(position, []).append(variances)
            if not only:
                weighted = 0.5 * (stacked * curvature[:, position]).sum((-2, -1))
                nats[kind].setdefault(position, []).append(weighted)
    mean = torch.cat(means)
    joined = torch.stack([torch.cat(v) for _, v in sorted(total.items())], 1)
    joined = joined.reshape(len(mean), *mean.shape[1:-1], *joined.shape[2:])
    var = joined if only else joined.diagonal(dim1=-2, dim2=-1)
    return Contributions(
        mean,
        None if only else joined,
        var.clamp_min(0.0),
        {k: _positions(v) for k, v in variance.items()},
        {k: _positions(v) for k, v in nats.items() if v},
        calls,
    )


def _has(parts: Sequence[LayerParts], kind: str) -> bool:
    if kind == "cross":
        return any(p.has_cross_terms for p in parts)
    return any(p.has_cross_terms for p in parts) and all(p.has_conditionals or not p.has_cross_terms for p in parts)


def _positions(chunks: dict[int, list[Tensor]]) -> Tensor:
    """Joins the chunks [L, b, ...] of each position to [L, n, T, ...]."""
    return torch.stack([torch.cat(v, 1) for _, v in sorted(chunks.items())], 2)


def _by_layer(
    parts: Sequence[LayerParts],
    layers: Sequence[Layer],
    gradients: LayerGradients,
    diagonal: bool,
    kinds: Sequence[str],
) -> dict[str, list[Tensor]]:
    """Returns for each kind one covariance per layer, summed over its parts."""
    sums: dict[str, dict[str, Tensor]] = {k: {} for k in kinds}
    for part in parts:
        covariances = part.covariances(gradients, diagonal)
        for kind in kinds:
            by_name = getattr(covariances, kind)
            if kind == "conditional" and not part.has_cross_terms:
                by_name = covariances.own  # For independent layers nothing changes when the others are held.
            for name, value in by_name.items():
                sums[kind][name] = sums[kind][name] + value if name in sums[kind] else value
    zero = torch.zeros_like(next(iter(sums["own"].values())))
    return {k: [by.get(layer.name, zero) for layer in layers] for k, by in sums.items()}


def _calls(record: ForwardRecord, layers: Sequence[Layer]) -> dict[str, int]:
    """Returns how often each layer was called for one example."""
    counted = {}
    for layer in layers:
        numbers = {k for n in layer.parameters for k in record.plan.layers_of_parameter.get(n, ())}
        counted[layer.name] = len({call.edge for k in numbers for call in record.calls[k]})
    return counted


class LayerSums:
    """The sums of contributions over batches, in float64."""

    def __init__(self) -> None:
        self.examples = self.positions = 0
        self.variance: dict[str, Tensor] = {}
        self.nats: dict[str, Tensor] = {}

    def add(self, contributions: Contributions) -> None:
        """Adds the contributions of a batch."""
        self.examples += len(contributions.mean)
        self.positions += contributions.mean[..., 0].numel()
        for kind, value in contributions.variance.items():
            now = value.sum((1, 2)).cpu()  # [L, C]
            self.variance[kind] = self.variance[kind] + now if kind in self.variance else now
        for kind, value in contributions.nats.items():
            now = value.sum((1, 2)).cpu()  # [L]
            self.nats[kind] = self.nats[kind] + now if kind in self.nats else now


@dataclass(frozen=True)
class LayerResult:
    """The results of one layer, in numbers.

    Attributes:
        layer: The layer that the numbers are of.
        n_parameters: The number of uncertain weights.
        effective: The number γ_ℓ of directions, of n_parameters, that the data determine.
        information: The nats gained in the layer's own marginal; NaN if unknown.
        variance: The trace tr Σ_ℓℓ of the layer's covariance.
        posterior_share: The share of Σ_ℓ tr Σ_ℓℓ that is the layer's.
        predictive_variance: The mean over inputs of tr V_ℓ (summed over outputs, averaged over positions).
        predictive_share: The share of the whole predictive variance; the shares and cross shares of all layers add up
            to one.
        cross_share: The signed share of the covariance with other layers; None where layers are independent.
        conditional_share: The share when all other layers are held, of the sum of these; None where it is not known.
        epistemic_share: The share of Σ ½ tr(Λ V) from the layer's own part; None where covariances were not taken.
        epistemic_cross_share: The signed share of Σ ½ tr(Λ V) from the part with other layers; None where there is
            none.
        nats: The mean over inputs of ½ tr(Λ V_ℓ).
        by_output: The mean variance of each output due to the layer [C].
        calls: The number of times that the layer is called for one input; 0 if nothing recorded it.
        weights: The layer's weights in few numbers.
    """

    layer: Layer
    n_parameters: int
    effective: float
    information: float
    variance: float
    posterior_share: float
    predictive_variance: float
    predictive_share: float
    cross_share: float | None
    conditional_share: float | None
    epistemic_share: float | None
    epistemic_cross_share: float | None
    nats: float | None
    by_output: tuple[float, ...]
    calls: int
    weights: LayerWeights

    @property
    def name(self) -> str:
        """The path of the layer's module."""
        return self.layer.name


def _add(counts: Sequence[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for count in counts:
        for name, value in count.items():
            total[name] = total.get(name, 0.0) + value
    return total


def layer_results(
    layers: Sequence[Layer],
    parts: Sequence[LayerParts],
    weights: Sequence[LayerWeights],
    sums: LayerSums,
    calls: dict[str, int],
) -> tuple[tuple[LayerResult, ...], float]:
    """Returns the layers in numbers, and the nats that all of them gained together."""
    effective = _add([p.effective() for p in parts])
    nats_by_part = [p.information() for p in parts]
    information, gained = _add([nats for nats, _ in nats_by_part]), sum(total for _, total in nats_by_part)
    traces = sum(w.trace for w in weights)
    alone, cross = sums.variance["own"].sum(1), sums.variance.get("cross", torch.zeros(0, 1)).sum(1)
    whole = float(alone.sum() + cross.sum())
    conditional = sums.variance["conditional"].sum(1) if "conditional" in sums.variance else None
    nats_all = float(sum(v.sum() for k, v in sums.nats.items() if k != "conditional")) if sums.nats else 0.0
    results = []
    for i, (layer, own_weights) in enumerate(zip(layers, weights, strict=True)):
        nats = float(sums.nats["own"][i]) if sums.nats else None
        results.append(
            LayerResult(
                layer,
                own_weights.count,
                effective[layer.name],
                information[layer.name],
                own_weights.trace,
                _ratio(own_weights.trace, traces),
                float(alone[i]) / sums.positions,
                _ratio(float(alone[i]), whole),
                _ratio(float(cross[i]), whole) if len(cross) else None,
                None if conditional is None else _ratio(float(conditional[i]), float(conditional.sum())),
                None if nats is None else _ratio(nats, nats_all),
                _ratio(float(sums.nats["cross"][i]), nats_all) if "cross" in sums.nats else None,
                None if nats is None else nats / sums.positions,
                tuple((sums.variance["own"][i] / sums.positions).tolist()),
                calls.get(layer.name, 0),
                own_weights,
            )
        )
    return tuple(results), float(gained)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def sampled_layer(
    layer: str, parts: Sequence[LayerParts], count: int, generator: torch.Generator | None
) -> tuple[Params, float]:
    """Returns drawn deviations of one layer's weights [count, *shape], and ½γ of what they are drawn from (docs/mathematics/where.md)."""
    drawn: Params = {}
    half = 0.0
    for part in parts:
        if layer in part.layers:
            drawn.update(part.draw(layer, count, generator))
            half += part.half_effective(layer)
    return drawn, half
