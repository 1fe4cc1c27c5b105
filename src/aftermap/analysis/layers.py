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

MAX_COVARIANCE = 64  # outputs; beyond it variances only
KINDS = ("own", "cross", "conditional")


@dataclass(frozen=True)
class Layer:
    """A layer of the posterior.

    Attributes:
        name: path of its module.
        kind: the module's class, or "Parameter".
        parameters: those that are uncertain.
        modules: every path that uses them: more than one where weights are tied.
        structure: of its covariance: kron, ekfac, full, diagonal, low rank …
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
        mean: outputs [n, ..., C].
        cov: their covariance [n, ..., C, C]; None if only variances were taken.
        var: their variances [n, ..., C].
        variance: kind -> [L, n, T, C] in float64, the layers in order; kinds are own, cross and conditional.
        nats: kind -> ½ tr(Λ V_ℓ) [L, n, T]; empty if only variances were taken.
        calls: layer -> how often its module was called for one input.
    """

    mean: Tensor
    cov: Tensor | None
    var: Tensor
    variance: dict[str, Tensor]
    nats: dict[str, Tensor]
    calls: dict[str, int]

    @property
    def whole(self) -> Tensor:
        """Each layer's part of the variances with its cross terms [L, n, T, C]: they add up to `var`."""
        own = self.variance["own"]
        return own + self.variance["cross"] if "cross" in self.variance else own


def layers_of(parts: Sequence[LayerParts], model: nn.Module, order: Sequence[str], structure: str) -> tuple[Layer, ...]:
    """The layers of a posterior, in the order of the model's parameters.

    Args:
        parts: of the posterior.
        model: the network.
        order: all parameters of the posterior.
        structure: a word for parts without blocks.
    """
    place = {n: i for i, n in enumerate(order)}
    found: dict[str, list[str]] = {}
    kinds: dict[str, list[str]] = {}
    for part in parts:
        for name, parameters in part.layers.items():
            found.setdefault(name, []).extend(parameters)
            kinds.setdefault(name, []).append(part.kind.replace("_", " ") or structure)
    modules = dict(model.named_modules())
    users = _users(model)
    layers = []
    for name, held in found.items():
        path = "" if name == "(model)" else name
        owner = modules.get(path, modules.get(path.rpartition(".")[0]) if path not in place else None)
        used = tuple(dict.fromkeys(u for n in held for u in users[n]))
        words = "+".join(dict.fromkeys(kinds[name]))
        own = tuple(sorted(held, key=place.__getitem__))
        layers.append(Layer(name, type(owner).__name__ if owner is not None else "Parameter", own, used, words))
    return tuple(sorted(layers, key=lambda layer: place[layer.parameters[0]]))


def _users(model: nn.Module) -> dict[str, list[str]]:
    """Parameter -> paths of every module that holds it, under all of its names."""
    own = {id(p): n for n, p in model.named_parameters()}
    found: dict[str, list[str]] = {n: [] for n in own.values()}
    for path, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None and path not in found[own[id(parameter)]]:
                found[own[id(parameter)]].append(path or "(model)")
    return found


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
    """One pass of a batch through the network, with every layer's part of the covariance of its outputs.

    Args:
        checked: The plan of the network, in eval mode.
        parts: the posterior.
        layers: in order.
        batch: the inputs.
        likelihood: for Λ.
        diagonal: variances only; None: from `MAX_COVARIANCE` outputs on.
        targets: for a Λ that depends on them (class weights, ignored positions); None leaves these out.
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
        for kind, each in by_kind.items():
            stacked = torch.stack(each).to(torch.float64)  # [L, b, v, v] or [L, b, v]
            own = stacked if only else stacked.diagonal(dim1=-2, dim2=-1)
            variance[kind].setdefault(position, []).append(own)
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


def _positions(found: dict[int, list[Tensor]]) -> Tensor:
    """position -> chunks [L, b, ...] to [L, n, T, ...]."""
    return torch.stack([torch.cat(v, 1) for _, v in sorted(found.items())], 2)


def _by_layer(
    parts: Sequence[LayerParts],
    layers: Sequence[Layer],
    gradients: LayerGradients,
    diagonal: bool,
    kinds: Sequence[str],
) -> dict[str, list[Tensor]]:
    """Kind -> one covariance per layer, summed over its parts."""
    found: dict[str, dict[str, Tensor]] = {k: {} for k in kinds}
    for part in parts:
        covariances = part.covariances(gradients, diagonal)
        for kind in kinds:
            given = getattr(covariances, kind)
            if kind == "conditional" and not part.has_cross_terms:
                given = covariances.own  # independent layers: nothing changes when the others are held
            for name, value in given.items():
                found[kind][name] = found[kind][name] + value if name in found[kind] else value
    zero = torch.zeros_like(next(iter(found["own"].values())))
    return {k: [by.get(layer.name, zero) for layer in layers] for k, by in found.items()}


def _calls(record: ForwardRecord, layers: Sequence[Layer]) -> dict[str, int]:
    """How often each layer was called for one example."""
    counted = {}
    for layer in layers:
        numbers = {k for n in layer.parameters for k in record.plan.layers_of_parameter.get(n, ())}
        counted[layer.name] = len({call.edge for k in numbers for call in record.calls[k]})
    return counted


class LayerSums:
    """Sums of contributions over batches, in float64."""

    def __init__(self) -> None:
        self.examples = self.positions = 0
        self.variance: dict[str, Tensor] = {}
        self.nats: dict[str, Tensor] = {}

    def add(self, found: Contributions) -> None:
        """Adds a batch."""
        self.examples += len(found.mean)
        self.positions += found.mean[..., 0].numel()
        for kind, value in found.variance.items():
            now = value.sum((1, 2)).cpu()  # [L, C]
            self.variance[kind] = self.variance[kind] + now if kind in self.variance else now
        for kind, value in found.nats.items():
            now = value.sum((1, 2)).cpu()  # [L]
            self.nats[kind] = self.nats[kind] + now if kind in self.nats else now


@dataclass(frozen=True)
class LayerResult:
    """One layer in numbers.

    Attributes:
        layer: which.
        n_parameters: uncertain weights.
        effective: γ_ℓ, of n_parameters: how many directions the data determine.
        information: nats gained in the layer's own marginal; NaN if unknown.
        variance: tr Σ_ℓℓ.
        posterior_share: of Σ_ℓ tr Σ_ℓℓ.
        predictive_variance: mean over inputs of tr V_ℓ (over outputs; positions averaged).
        predictive_share: its share of the whole; the shares and cross shares of all layers add up to one.
        cross_share: signed share of the covariance with other layers; None where layers are independent.
        conditional_share: the share when all other layers are held, of the sum of these; None where it is not known.
        epistemic_share: share of Σ ½ tr(Λ V), own part; None where covariances were not taken.
        epistemic_cross_share: signed, the part with other layers; None where there is none.
        nats: mean over inputs of ½ tr(Λ V_ℓ).
        by_output: mean variance of each output due to the layer [C].
        calls: how often the layer is called for one input; 0 if nothing recorded it.
        weights: its weights in few numbers.
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
        """Path of its module."""
        return self.layer.name


def _add(found: Sequence[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in found:
        for name, value in each.items():
            total[name] = total.get(name, 0.0) + value
    return total


def layer_results(
    layers: Sequence[Layer],
    parts: Sequence[LayerParts],
    weights: Sequence[LayerWeights],
    sums: LayerSums,
    calls: dict[str, int],
) -> tuple[tuple[LayerResult, ...], float]:
    """The layers in numbers, and the nats that all of them gained together."""
    effective = _add([p.effective() for p in parts])
    told = [p.information() for p in parts]
    information, gained = _add([nats for nats, _ in told]), sum(total for _, total in told)
    traces = sum(w.trace for w in weights)
    own, cross = sums.variance["own"].sum(1), sums.variance.get("cross", torch.zeros(0, 1)).sum(1)
    whole = float(own.sum() + cross.sum())
    held = sums.variance["conditional"].sum(1) if "conditional" in sums.variance else None
    nats_all = float(sum(v.sum() for k, v in sums.nats.items() if k != "conditional")) if sums.nats else 0.0
    made = []
    for i, (layer, own_weights) in enumerate(zip(layers, weights, strict=True)):
        nats = float(sums.nats["own"][i]) if sums.nats else None
        made.append(
            LayerResult(
                layer,
                own_weights.count,
                effective[layer.name],
                information[layer.name],
                own_weights.trace,
                _ratio(own_weights.trace, traces),
                float(own[i]) / sums.positions,
                _ratio(float(own[i]), whole),
                _ratio(float(cross[i]), whole) if len(cross) else None,
                None if held is None else _ratio(float(held[i]), float(held.sum())),
                None if nats is None else _ratio(nats, nats_all),
                _ratio(float(sums.nats["cross"][i]), nats_all) if "cross" in sums.nats else None,
                None if nats is None else nats / sums.positions,
                tuple((sums.variance["own"][i] / sums.positions).tolist()),
                calls.get(layer.name, 0),
                own_weights,
            )
        )
    return tuple(made), float(gained)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def sampled_layer(
    layer: str, parts: Sequence[LayerParts], count: int, generator: torch.Generator | None
) -> tuple[Params, float]:
    """Deviations of one layer's weights [count, *shape], and ½γ of what they are drawn from (docs/mathematics/where.md)."""
    drawn: Params = {}
    half = 0.0
    for part in parts:
        if layer in part.layers:
            drawn.update(part.draw(layer, count, generator))
            half += part.half_effective(layer)
    return drawn, half
