"""A look at the model on two and three examples before the work: what is batched, what is independent, what is right.

The probe answers, for a model nobody has seen before: do the outputs of one example depend on others? Which dimension of
each layer's input is the batch? And do the rules give the true gradient, example by example? Where they do not (a weight
that is also used as a bare tensor, a layer without a batch dimension, a checkpointed segment), the parameter is treated
by exact per-example gradients instead, and the reason is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from aftermap.batches import Batch, call_model, take, tensors_of
from aftermap.curvature.capture import Call, capture, gradients_for
from aftermap.curvature.sites import Sites, find_sites
from aftermap.curvature.step import BatchStep
from aftermap.distributed import all_reduce_
from aftermap.errors import InputError, ShapeError, UnsupportedError
from aftermap.linalg import all_finite

__all__ = ["Probe", "agreed", "check_modes", "check_outputs", "probe"]

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3}
# Outputs of one example in batches of different size may differ by so much, relative to the largest.
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}


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


def check_modes(model: nn.Module) -> None:
    """Raises if a layer would make outputs random or dependent on other examples."""
    bad: list[str] = []
    for path, module in model.named_modules():
        dropout = _dropout(module) > 0
        if module.training and (dropout or isinstance(module, nn.modules.batchnorm._BatchNorm)):
            bad.append(f"{path or 'the model'} ({type(module).__name__})")
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            bad.append(f"{path or 'the model'} ({type(module).__name__} without running statistics)")
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise InputError(
            f"these layers are in training mode: {', '.join(bad[:5])}{more}. Batch statistics couple the examples and dropout "
            "makes outputs random, so there is no curvature of one datum. Call model.eval() first "
            "(a BatchNorm needs running statistics)"
        )


def _dropout(module: nn.Module) -> float:
    """How much a module drops in training mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return float(module.p)
    return float(module.dropout) if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else 0.0


def check_outputs(outputs: Tensor, size: int) -> None:
    """Raises unless outputs are finite floating-point numbers [size, ..., C]."""
    if outputs.dim() < 2 or outputs.shape[0] != size:
        raise ShapeError(
            f"the model returned shape {tuple(outputs.shape)} for {size} examples; allowed is [N, ..., C] with the batch first. "
            "For one output per example add a last dimension: model(x).unsqueeze(-1)"
        )
    if not outputs.is_floating_point():
        raise ShapeError(
            f"the model returned {outputs.dtype}; the outputs must be floating-point (logits, means, log rates)"
        )
    if not all_finite(outputs):
        bad = torch.nonzero(~torch.isfinite(outputs.detach()))[0].tolist()
        raise InputError(
            f"the model's outputs are not finite: {outputs[tuple(bad)].item()} at index {bad}. "
            "Check the weights and the scale of the inputs"
        )


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
