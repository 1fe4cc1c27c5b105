"""Which layers of a network have a rule, where their batch is, and which parameters have none, with the reason.

The probe answers, for a model nobody has seen before: do the outputs of one example depend on others? Which dimension of
each layer's input is the batch? And do the rules give the true gradient, example by example? Where they do not (a weight
that is also used as a bare tensor, a layer without a batch dimension, a checkpointed segment), the parameter is treated
by exact per-example gradients instead, and the reason is kept.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import CheckpointError

from aftermap.batches import Batch, take, tensors_of
from aftermap.curvature.passes.backward import BatchStep
from aftermap.curvature.passes.record import ArrangedCall, Call, RootCall, Seen, capture
from aftermap.curvature.rules.attention import attention_sites
from aftermap.curvature.rules.base import LayerRule, Layout, find_rule
from aftermap.distributed import all_reduce_
from aftermap.errors import InputError, UnsupportedError
from aftermap.models import call_model, check_modes, check_outputs, gradients_for
from aftermap.params import named_parameters

__all__ = [
    "ROOT",
    "Arrived",
    "Plan",
    "Probe",
    "Site",
    "Sites",
    "agreed",
    "find_last_layer",
    "find_sites",
    "inputs_of",
    "is_low_precision",
    "outer_of_calls",
    "probe",
]

ROOT = "(model)"  # the name of a layer that is the whole model
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3}
# Outputs of one example in batches of different size may differ by so much, relative to the largest.
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}
Arrived = list[tuple[ArrangedCall, Tensor]]


@dataclass(frozen=True)
class Site:
    """A block of parameters with its rule. Modules that share all of its parameters share the site.

    Attributes:
        name: path of the first module (``encoder.0.attn.in_proj`` for a part of one).
        rule: how calls are read.
        named: role -> (parameter name, parameter); only selected parameters.
        layout: how they form a block.
    """

    name: str
    rule: LayerRule
    named: dict[str, tuple[str, Tensor]]
    layout: Layout

    @cached_property
    def reads_inputs(self) -> bool:
        """Whether the block depends on a call's input: not where only a bias is selected."""
        return set(self.named) != {"bias"}


@dataclass(frozen=True)
class Sites:
    """What was found in a model.

    Attributes:
        sites: in the order of the model's modules.
        hooked: (module, site number) for every module whose calls are recorded by a hook.
        attention: (module, {part: site number}) for every multi-head attention.
        reasons: for each selected parameter that no rule covers, why.
    """

    sites: list[Site] = field(default_factory=list)
    hooked: list[tuple[nn.Module, int]] = field(default_factory=list)
    attention: list[tuple[nn.MultiheadAttention, dict[str, int]]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def by_parameter(self) -> dict[str, list[int]]:
        """For each covered parameter the numbers of its sites: more than one where it is tied across kinds of layers."""
        found: dict[str, list[int]] = {}
        for number, site in enumerate(self.sites):
            for name in site.layout.names:
                found.setdefault(name, []).append(number)
        return found


def find_sites(model: nn.Module, names: Sequence[str], *, batch_statistics: bool = False) -> Sites:
    """Finds every module that owns selected parameters and gives each a rule, or a reason why it has none.

    Args:
        model: any module.
        names: the selected parameters.
        batch_statistics: also take BatchNorm layers that normalise with the statistics of the batch (training): their
            rule then reads those statistics as constants.
    """
    parameters = named_parameters(model)
    selected = {id(parameters[n]): n for n in names}
    found = Sites()
    known: dict[tuple[object, ...], int] = {}
    inside_attention: set[str] = set()
    for path, module in model.named_modules():
        if any(path.startswith(prefix) for prefix in inside_attention):
            continue
        if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
            inside_attention.add(f"{path}." if path else "")
            parts: dict[str, int] = {}
            for part, (rule, paths) in attention_sites(module).items():
                owned = {role: _attribute(module, where) for role, where in paths.items()}
                number = _add(found, known, f"{path}.{part}".lstrip("."), rule, module, owned, selected)
                if number is not None:
                    parts[part] = number
            found.attention.append((module, parts))
            continue
        own = {k: p for k, p in module._parameters.items() if p is not None and id(p) in selected}
        if not own:
            continue
        candidate = find_rule(module)
        why = f"no rule for {type(module).__name__}" if candidate is None else candidate.unsupported(module)
        if batch_statistics and candidate is not None and isinstance(module, nn.modules.batchnorm._BatchNorm):
            why = None
        if candidate is None or why is not None:
            found.reasons.update({selected[id(p)]: str(why) for p in own.values()})
            continue
        number = _add(found, known, path, candidate, module, {k: own.get(k) for k in candidate.roles}, selected)
        if number is not None:
            found.hooked.append((module, number))
    covered = found.by_parameter()
    for name in names:
        if name in covered:
            found.reasons.pop(name, None)
        else:
            found.reasons.setdefault(name, "no rule covers this parameter of its module")
    return found


def _add(
    found: Sites,
    known: dict[tuple[object, ...], int],
    path: str,
    rule: LayerRule,
    module: nn.Module,
    owned: dict[str, Tensor | None],
    selected: dict[int, str],
) -> int | None:
    named = {role: (selected[id(p)], p) for role, p in owned.items() if p is not None and id(p) in selected}
    if not named:
        return None
    name = path or ROOT
    layout = rule.layout(name, module, named)
    shape = (layout.groups, layout.out, layout.in_)  # a weight may be tied between convolutions with other groups
    key = (type(rule), shape, *((role, id(p)) for role, (_, p) in named.items()))
    if key not in known:
        known[key] = len(found.sites)
        found.sites.append(Site(name, rule, named, layout))
    return known[key]


def _attribute(module: nn.Module, path: str) -> Tensor | None:
    value: object = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, Tensor) else None


@dataclass(frozen=True)
class Probe:
    """What was learnt.

    Attributes:
        sites: where rules apply.
        axes: (site, id of the module) -> dimension of the batch in its inputs.
        by_parameter: parameter -> numbers of its sites; missing for parameters without a rule.
        reasons: parameter without a rule -> why.
        unused: parameters that the outputs do not depend on.
        numbers: how many numbers the recorded layers put out for one example: what its gradients take.
    """

    sites: Sites
    axes: dict[tuple[int, int], int]
    by_parameter: dict[str, list[int]]
    reasons: dict[str, str]
    unused: frozenset[str]
    numbers: int


def probe(model: nn.Module, names: Sequence[str], batch: Batch) -> Probe:
    """Looks at the model on copies of up to three examples of the first batch.

    Raises:
        UnsupportedError: the outputs of an example depend on the other examples of its batch.
        InputError: the outputs depend on none of the selected parameters.
    """
    check_modes(model)
    sites = find_sites(model, names)
    with gradients_for(model, names):
        # The pair holds the last two of the three, backwards: any influence of an example on another shows.
        pair, calls_of_pair = _run(model, sites, _copies(batch, [2, 1]))
        shapes_of_pair = [c.out_shape for c in calls_of_pair]
        pair = pair.detach()
        del calls_of_pair  # with them goes the graph of the pair
        three = _copies(batch, [0, 1, 2])
        outputs, calls = _run(model, sites, three)
        check_outputs(outputs, 3)
        check_outputs(pair, 2)
        _check_independent(pair, outputs[[2, 1]])
        if not outputs.requires_grad:
            raise InputError(
                f"the outputs depend on none of the selected parameters ({', '.join(list(names)[:5])}…); "
                "is part of the forward pass under torch.no_grad()?"
            )
        axes, unbatched = _find_axes(shapes_of_pair, calls, sites)
        reasons = dict(sites.reasons)
        for number in unbatched:
            for name in sites.sites[number].layout.names:
                reasons[name] = "its layer is called without a batch dimension"
        by_parameter = {n: s for n, s in sites.by_parameter().items() if n not in reasons}
        by_parameter, wrong, unused = _verify(model, names, three, outputs, calls, sites, axes, by_parameter)
    reasons.update(wrong)
    numbers = sum(math.prod(c.out_shape) for c in calls) // 3
    return Probe(sites, axes, by_parameter, reasons, unused, numbers)


def agreed(found: Probe, names: Sequence[str]) -> Probe:
    """What all processes found: a rule is used only where it held on every one. In one process: the same."""
    without = torch.tensor([n not in found.by_parameter for n in names], dtype=torch.int64)
    used = torch.tensor([n not in found.unused for n in names], dtype=torch.int64)
    all_reduce_([without, used])
    lost = {n for n, w in zip(names, without.tolist(), strict=True) if w and n in found.by_parameter}
    return replace(
        found,
        by_parameter={n: s for n, s in found.by_parameter.items() if n not in lost},
        reasons={
            **found.reasons,
            **dict.fromkeys(sorted(lost), "its rule does not hold on the data of another process"),
        },
        unused=frozenset(n for n, u in zip(names, used.tolist(), strict=True) if not u),
    )


def _copies(batch: Batch, places: Sequence[int]) -> Batch:
    """Chosen examples of a batch, repeated where it has fewer."""
    index = torch.tensor(places) % batch.size
    return Batch(take(batch.inputs, index, batch.size), None, None, len(places))


def _run(model: nn.Module, sites: Sites, batch: Batch) -> tuple[Tensor, list[Call]]:
    versions = [t._version for t in tensors_of(batch.inputs)]
    with capture(sites) as calls:
        outputs = call_model(model, batch.inputs)
    if versions != [t._version for t in tensors_of(batch.inputs)]:
        raise InputError(
            "the model changes its inputs in place, so a second pass over the same data would see others. "
            "Make a new tensor in its forward pass (x = x - mean instead of x -= mean; no inplace=True on the first layer)"
        )
    return outputs, calls


def _check_independent(alone: Tensor, together: Tensor) -> None:
    """Raises if outputs in a smaller batch differ from those in a larger one by more than rounding."""
    tolerance = _ROUNDING.get(together.dtype, 5e-2)
    if alone.shape != together.shape or float((alone - together).detach().abs().max()) > tolerance * float(
        together.detach().abs().max()
    ):
        raise UnsupportedError(
            "the output of an example changes with the other examples of its batch (or is random). Curvature needs independent "
            "examples: check for normalisation over the batch, dropout that is always on, or a model that mixes examples"
        )


def _find_axes(
    pair: Sequence[tuple[int, ...]], triple: Sequence[Call], sites: Sites
) -> tuple[dict[tuple[int, int], int], set[int]]:
    """The batch dimension by (site, module), and sites with a call that has none; of the pair only its output shapes."""
    axes: dict[tuple[int, int], int] = {}
    unbatched: set[int] = set()
    if len(pair) != len(triple):
        return axes, set(range(len(sites.sites)))
    for two, three in zip(pair, triple, strict=True):
        if two[0] * 3 == three.out_shape[0] * 2:
            axis = 0
        elif len(two) > 2 and (two[1], three.out_shape[1]) == (2, 3):
            axis = 1
        else:
            unbatched.add(three.site)
            continue
        if axes.setdefault((three.site, id(three.module)), axis) != axis:
            unbatched.add(three.site)
    return axes, unbatched


def _verify(
    model: nn.Module,
    names: Sequence[str],
    three: Batch,
    outputs: Tensor,
    calls: Sequence[Call],
    sites: Sites,
    axes: dict[tuple[int, int], int],
    by_parameter: dict[str, list[int]],
) -> tuple[dict[str, list[int]], dict[str, str], frozenset[str]]:
    """Compares the rules with autograd for a vector that only the first example has."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.zeros(outputs.shape, dtype=outputs.dtype)
    vector[0] = torch.randn(outputs.shape[1:], generator=generator, dtype=outputs.dtype)
    vector = vector.to(outputs.device)
    own = dict(model.named_parameters())
    step = BatchStep.make(model, three, outputs, sites, by_parameter, calls, axes)
    asked: list[Any] = [*(own[n] for n in names), *step.edges]
    try:
        raw = torch.autograd.grad(outputs, asked, vector, allow_unused=True)
    except CheckpointError as mismatch:
        raise UnsupportedError(
            "a checkpointed segment of the model holds a layer whose forward pass is observed step by step "
            "(nn.MultiheadAttention), and cannot be computed again. Switch checkpointing off for the fit"
        ) from mismatch
    truth = [t.to_dense() if t is not None and t.is_sparse else t for t in raw[: len(names)]]
    unused = frozenset(n for n, t in zip(names, truth, strict=True) if t is None)
    moved = step.moved([None if g is None else g[None] for g in raw[len(names) :]], vector[None])
    found = moved.per_example(list(by_parameter), 0, 1)
    # The other examples must get no gradient anywhere; where one does, the layer mixes examples.
    others = [(s, g[:, 1:]) for s, calls_ in moved.grads.items() for _, g in calls_]
    reached = _lengths([g for _, g in others], 1)
    mixing = {s for (s, _), size in zip(others, reached, strict=True) if size != 0}
    tolerance = _TOLERANCE.get(outputs.dtype, 5e-2)
    sizes = dict(zip(names, _lengths([outputs.new_zeros(()) if t is None else t for t in truth]), strict=True))
    # A gradient that cancels (a bias before a normalisation) is rounding noise on both sides.
    noise = 32 * torch.finfo(outputs.dtype).eps * max(sizes.values(), default=0.0)
    away = {
        n: found[n][0, 0] if t is None else found[n][0, 0].sub_(t)
        for n, t in zip(names, truth, strict=True)
        if n in found
    }
    wrong: dict[str, str] = {}
    for name, error in zip(away, _lengths(list(away.values())), strict=True):
        # Not "error > ...": a NaN is wrong, too.
        if not error <= tolerance * sizes[name] + noise or mixing.intersection(by_parameter[name]):
            wrong[name] = "it is also used outside its layer's call (or the layer mixes examples)"
    # A parameter that is wrong spoils only itself: the others keep their rule, but not in a common block.
    return {n: s for n, s in by_parameter.items() if n not in wrong}, wrong, unused


def _lengths(values: Sequence[Tensor], order: float = 2) -> list[float]:
    """Norms of all, with one look at the device."""
    found: dict[torch.dtype, list[int]] = {}
    for number, value in enumerate(values):
        found.setdefault(value.dtype, []).append(number)
    lengths = [0.0] * len(values)
    for dtype, numbers in found.items():
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch._foreach_norm([values[n] for n in numbers], order, dtype=wide)
        for number, length in zip(numbers, torch.stack(norms).tolist(), strict=True):
            lengths[number] = length
    return lengths


@dataclass(frozen=True)
class Plan:
    """How each parameter is treated.

    Attributes:
        axes: (site, id of the module) -> dimension of the batch; missing: the first.
        by_parameter: parameter -> its sites.
        reasons: parameter without a rule -> why.
        cluster: site -> number of its cluster: sites that share a parameter are read together.
        alone: sites that share no parameter with another.
    """

    axes: Mapping[tuple[int, int], int]
    by_parameter: Mapping[str, Sequence[int]]
    reasons: Mapping[str, str]
    cluster: Mapping[int, int]
    alone: frozenset[int]

    @staticmethod
    def make(axes: Mapping[tuple[int, int], int], sites: Sites, reasons: Mapping[str, str]) -> Plan:
        """Joins sites that share a parameter; parameters with a reason have no rule."""
        by_parameter = {n: s for n, s in sites.by_parameter().items() if n not in reasons}
        cluster: dict[int, int] = {}
        for numbers in by_parameter.values():
            known = {cluster.get(s, s) for s in numbers}
            first = min(known)
            cluster.update({s: first for s, c in cluster.items() if c in known})
            cluster.update(dict.fromkeys(numbers, first))
        shared = {s for numbers in by_parameter.values() if len(numbers) > 1 for s in numbers}
        return Plan(dict(axes), by_parameter, dict(reasons), cluster, frozenset(range(len(sites.sites))) - shared)


def outer_of_calls(calls: Arrived, start: int, length: int) -> Tensor:
    """Per-example gradients [1, length, g, o, i] over every call."""
    total: Tensor | None = None
    for call, grads in calls:
        each = call.rows.narrow(start, length).outer(grads[:, start : start + length])
        total = each if total is None else total + each
    if total is None:
        raise InputError("no call of a layer was recorded")
    return total


def is_low_precision(seen: Seen) -> bool:
    """Whether the outputs are 16-bit numbers (autocast)."""
    return any(r.output is not None and r.output.dtype in (torch.bfloat16, torch.float16) for r in seen.roots)


def inputs_of(model: nn.Module, root: RootCall) -> Any:
    """The arguments of a call as the inputs of a batch: a tensor, a tuple or a mapping; None if they cannot be told."""
    if not root.kwargs:
        return root.args[0] if len(root.args) == 1 else tuple(root.args)
    if not root.args:
        return dict(root.kwargs)
    try:
        return dict(inspect.signature(model.forward).bind(*root.args, **root.kwargs).arguments)
    except (TypeError, ValueError):
        return None


def find_last_layer(model: nn.Module, batch: Batch) -> list[str]:
    """Names of the parameters of the last layer with a weight matrix.

    It is the layer whose output is returned as it is; failing that (a reshape or a scale follows), the last one called.

    Raises:
        InputError: a layer is in training mode whose outputs would be random or depend on other examples.
        UnsupportedError: no layer with a weight matrix was called.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> find_last_layer(net, Batch(torch.zeros(1, 2), None, None, 1))
    ['2.weight', '2.bias']
    """
    check_modes(model)  # before the first forward pass, which would move BatchNorm's statistics
    names = [n for n, p in named_parameters(model).items() if p.is_floating_point()]
    sites = find_sites(model, names)
    with gradients_for(model, names), capture(sites) as calls:
        outputs = call_model(model, take(batch.inputs, torch.arange(1), batch.size))
    matrix = [c for c in calls if sites.sites[c.site].rule.matrix]
    if not matrix:
        raise UnsupportedError(
            "params='last_layer' found no layer with a weight matrix in the forward pass; name the parameters with params=[...]"
        )
    edge = get_gradient_edge(outputs)
    last = next((c for c in matrix if c.edge == edge), matrix[-1])
    return list(sites.sites[last.site].layout.names)
