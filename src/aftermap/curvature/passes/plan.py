"""The plan of a network: which layers have a rule, where their batch is, and which parameters have none, with the reason.

A plan is made by a look at two and three examples, before the work, and answers for a model nobody has seen before: do the
outputs of one example depend on others? Which dimension of each layer's input is the batch? And do the rules give the true
gradient, example by example? Where they do not (a weight that is also used as a bare tensor, a layer without a batch
dimension, a checkpointed segment), the parameter is treated by exact per-example gradients instead, and the reason is kept.

A few examples do not represent the data. So `PlanCheck` looks at every batch that follows, and raises `PlanContradicted` as
soon as one of them uses the network in another way.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from aftermap.batches import Batch, Path, tensors_of
from aftermap.curvature.passes.backward import contradictions, vectors_agree
from aftermap.curvature.passes.record import ForwardRecord, ModelCall, RecordedCall, Signature, record_calls
from aftermap.curvature.rules.attention import attention_projections
from aftermap.curvature.rules.base import LayerRule, Layout, find_rule
from aftermap.distributed import all_reduce_
from aftermap.errors import AftermapError, InputError, UnsupportedError
from aftermap.models import autograd_errors_explained, call_model, check_modes, check_outputs, only_require_grad
from aftermap.params import named_parameters

__all__ = [
    "USED_OUTSIDE",
    "WHOLE_MODEL",
    "CheckedPlan",
    "Layer",
    "ModelPlan",
    "PlanCheck",
    "PlanContradicted",
    "find_layers",
    "inputs_of_call",
    "on_one_example",
    "plan_model",
    "run_recorded",
]

Result = TypeVar("Result")
WHOLE_MODEL = "(model)"  # This is the name of a layer that is the whole model.
# Outputs of one example in batches of different size may differ by this much, relative to the largest.
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}
# So many examples of a batch are run again where it uses the network in a new way, and on batches 1, 2, 4, 8, …. Their graph
# stands beside that of the batch: more of them would show in a fit's memory (python -m benchmarks.memory resnet20 "aftermap kron").
_EXAMPLES_TO_VERIFY = 4
# A model may raise these where an argument has another length than it expects.
_FAILURES = (RuntimeError, ValueError, IndexError, AssertionError, UnsupportedError)
_SLOW_TOGETHER = (nn.modules.conv._ConvNd, nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd, nn.RNNBase)
USED_OUTSIDE = "it is also used outside its layer's call"
_MIXES = "its layer works on the examples in another order, or mixes them"


@dataclass(frozen=True)
class Layer:
    """A block of parameters with its rule; modules that share all of its parameters share the layer.

    Attributes:
        name: The path of the first module (``encoder.0.attn.in_proj`` for a part of one).
        rule: The rule by which calls are read.
        named: For each role the name of its parameter and the parameter; only selected parameters.
        layout: The way in which they form a block.
        dtype: The dtype of its parameters.
    """

    name: str
    rule: LayerRule
    named: dict[str, tuple[str, Tensor]]
    layout: Layout
    dtype: torch.dtype


@dataclass(frozen=True)
class ModelPlan:
    """The layers of a network, their batch dimensions, and the parameters that no rule covers.

    Attributes:
        layers: The layers in the order of the model's modules.
        hooked: The pair (module, layer number) for every module whose calls are recorded by a hook.
        attention: The pair (module, {projection: layer number}) for every multi-head attention.
        vectors_go_together: Whether several vectors are back-propagated in one pass of PyTorch's vectorised autograd, which is
            slow for convolutions, pooling and recurrent layers, and wrong for a few operations.
        selected: The parameters whose curvature is wanted.
        uncovered: The reason for each selected parameter that no rule covers.
        batch_dimensions: For each (layer number, id of the module) the dimension of the batch in its inputs.
        unused: The parameters that the outputs of the first examples do not depend on.
        numbers: The number of numbers that the recorded layers put out for one of the first examples.
        input_numbers: The number of numbers in the inputs of one of the first examples.
        width: The number C of outputs at one position.
        whole_inputs: The places among the inputs of tensors that belong to all examples together.
        verified: The signature of the examples on which the rules were compared with autograd.
    """

    layers: list[Layer] = field(default_factory=list)
    hooked: list[tuple[nn.Module, int]] = field(default_factory=list)
    attention: list[tuple[nn.MultiheadAttention, dict[str, int]]] = field(default_factory=list)
    vectors_go_together: bool = True
    selected: Mapping[str, Tensor] = field(default_factory=dict)
    uncovered: Mapping[str, str] = field(default_factory=dict)
    batch_dimensions: Mapping[tuple[int, int], int] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    numbers: int = 0
    input_numbers: int = 1
    width: int = 0
    whole_inputs: frozenset[Path] = frozenset()
    verified: Signature = ()

    @cached_property
    def layers_of_parameter(self) -> dict[str, list[int]]:
        """For each covered parameter the numbers of its layers: more than one where it is tied across kinds of layers."""
        numbers: dict[str, list[int]] = {}
        for number, layer in enumerate(self.layers):
            for name in layer.layout.names:
                if name not in self.uncovered:
                    numbers.setdefault(name, []).append(number)
        return numbers

    @cached_property
    def covering_layers(self) -> tuple[int, ...]:
        """The layers that cover at least one parameter."""
        return tuple(sorted({k for numbers in self.layers_of_parameter.values() for k in numbers}))

    @cached_property
    def whole_layers(self) -> tuple[int, ...]:
        """The layers whose rule alone accounts for all of their parameters."""
        return tuple(
            number
            for number, layer in enumerate(self.layers)
            if all(self.layers_of_parameter.get(n) == [number] for n in layer.layout.names)
        )

    @cached_property
    def tied_layers(self) -> list[tuple[int, ...]]:
        """The covering layers in groups that share a parameter, directly or through others; most are alone."""
        group_of = {k: frozenset([k]) for k in self.covering_layers}
        for numbers in self.layers_of_parameter.values():
            merged = frozenset().union(*(group_of[k] for k in numbers))
            group_of.update(dict.fromkeys(merged, merged))
        return [tuple(sorted(g)) for g in sorted(set(group_of.values()), key=min)]

    def separate_names(self, names: Sequence[str]) -> list[list[str]]:
        """Returns the names in groups that no layer connects, those without a rule together: gradients can be asked for one by one."""
        group_of = {k: number for number, layers in enumerate(self.tied_layers) for k in layers}
        groups: dict[int, list[str]] = {}
        for name in names:
            layers = self.layers_of_parameter.get(name)
            groups.setdefault(-1 if layers is None else group_of[layers[0]], []).append(name)
        return list(groups.values())

    def numbers_per_example(self, batch: Batch) -> int:
        """Returns how many numbers the recorded layers put out for one example, which its gradients take; longer inputs take more."""
        return max(1, math.ceil(self.numbers * batch.numbers_per_example / max(1, self.input_numbers)))

    def without(self, reasons: Mapping[str, str]) -> ModelPlan:
        """Returns the same plan with these parameters uncovered."""
        return replace(self, uncovered={**self.uncovered, **reasons})

    def marked(self, batch: Batch) -> Batch:
        """Returns the batch, which now knows what among its inputs has no batch dimension, whatever its length."""
        return replace(batch, whole=batch.whole | self.whole_inputs) if self.whole_inputs else batch

    def agree_over_processes(self, names: Sequence[str]) -> ModelPlan:
        """Returns what all processes found: a rule is used only where it held on every one."""
        uncovered = torch.tensor([n not in self.layers_of_parameter for n in names], dtype=torch.int64)
        used = torch.tensor([n not in self.unused for n in names], dtype=torch.int64)
        all_reduce_([uncovered, used])
        elsewhere = [n for n, w in zip(names, uncovered.tolist(), strict=True) if w and n in self.layers_of_parameter]
        unused = frozenset(n for n, u in zip(names, used.tolist(), strict=True) if not u)
        reason = "its rule does not hold on the data of another process"
        return replace(self.without(dict.fromkeys(sorted(elsewhere), reason)), unused=unused)


class PlanContradicted(UnsupportedError):
    """A batch used a parameter in another way than the plan says.

    Attributes:
        reasons: The parameters, with what was noticed.
        batch: The number of the batch, from 1.
    """

    def __init__(self, reasons: Mapping[str, str], batch: int):
        self.reasons, self.batch = dict(reasons), batch
        name, reason = next(iter(self.reasons.items()))
        more = f" (and {len(self.reasons) - 1} more)" if len(self.reasons) > 1 else ""
        super().__init__(f"a batch used {name}{more} in another way than the batches before: {reason}")


class PlanCheck:
    """Notices batches that use a network in another way than its plan says.

    The *signature* of a batch (how often each weight was used and called) is counted always. One that is neither the plan's
    nor that of an earlier batch is verified at once, on some examples of the batch. On batches 1, 2, 4, 8, … some examples
    are run again, because a network may mix examples without any change in its signature. A weight with more uses than
    recorded calls is contradicted without a look at its gradient: the other use may be silent on this batch and speak on the next.

    Args:
        plan: What the batches are compared with.

    Attributes:
        used: The parameters that some batch has used.
    """

    def __init__(self, plan: ModelPlan) -> None:
        self.used: set[str] = set()
        still_covered = tuple(entry for entry in plan.verified if entry[0] in plan.layers_of_parameter)
        # Signatures, and whether there was more than one example.
        self._verified: set[tuple[Signature, bool]] = {(still_covered, True)}
        self._batches = 0

    def check(self, record: ForwardRecord) -> None:
        """Looks at a batch after its forward pass.

        Raises:
            PlanContradicted: The rules of some parameters do not hold on this batch.
            UnsupportedError: The output of an example changes with the other examples.
        """
        self._batches += 1
        signature, several = record.signature, record.size > 1
        self.used.update(name for name, uses in record.uses.items() if uses)
        reasons = dict(record.misfits)
        reasons.update({name: USED_OUTSIDE for name, calls, uses, _ in signature if uses > calls})
        is_new = (signature, several) not in self._verified
        if not reasons and (is_new or (several and (self._batches & (self._batches - 1)) == 0)):
            reasons = _contradictions_of_some(record, is_new)
            self._verified.add((signature, several))
        if reasons:
            raise PlanContradicted(reasons, self._batches)


def _contradictions_of_some(record: ForwardRecord, is_new: bool) -> dict[str, str]:
    """Runs the model again on some examples of a batch, in reverse order: what belongs to an example must stay with it.

    Args:
        record: The record of the batch.
        is_new: Whether gradients are compared, too; they always are where inputs have other shapes (a network that pads to the
            longest example) and so cannot be. Where some examples alone do not make the network do what the whole batch did,
            the gradients of the whole batch are compared.
    """
    if record.size == 1:
        return contradictions(record) if is_new else {}
    count = min(record.size, _EXAMPLES_TO_VERIFY)
    index = (torch.arange(count) * record.size // count).flip(0)
    some = record.batch.take(index)
    with record_calls(record.plan) as calls:
        outputs = call_model(record.model, some.inputs)
    index = index.to(outputs.device)
    _check_independent(outputs.detach(), record.outputs.detach()[index])
    again = ForwardRecord.make(record.model, some, outputs, record.plan, calls)
    reasons, comparable = dict(again.misfits), True
    for number, layer in enumerate(record.plan.layers):
        pairs = zip(record.calls.get(number, ()), again.calls.get(number, ()), strict=False)
        rows = [(first.inputs, second.inputs) for first, second in pairs]
        comparable = comparable and all(a.shape[1:] == b.shape[1:] for a, b in rows)
        if any(_is_of_other_examples(a, b, index) for a, b in rows):
            reasons.update(dict.fromkeys(layer.layout.names, _MIXES))
    reasons = {n: why for n, why in reasons.items() if n in record.plan.layers_of_parameter}
    if is_new or not comparable:
        reasons |= contradictions(again if again.signature == record.signature else record)
    return reasons


def _is_of_other_examples(inputs: Tensor, again: Tensor, index: Tensor) -> bool:
    """Tells whether a layer's input rows [b, ...] of some examples are others than in another batch, by more than rounding."""
    if inputs.shape[1:] != again.shape[1:] or not again.numel():
        return False  # They are padded to another length, say, or hold nothing: nothing can be compared.
    expected = inputs[index]
    if not inputs.is_floating_point():
        return not torch.equal(expected, again)
    size, error = _largest(expected), _largest(expected.sub_(again))  # in place: memory costs more than the numbers
    if not math.isfinite(size + error):
        expected = inputs[index]
        finite = expected.isfinite() & again.isfinite()
        same = (expected == again) | (expected.isnan() & again.isnan())
        if not bool((finite | same).all()):
            return True
        size, error = (_largest(torch.where(finite, t, 0.0)) for t in (expected, expected - again))
    return error > _ROUNDING.get(inputs.dtype, 5e-2) * size


def _largest(values: Tensor) -> float:
    """Returns the largest absolute value; NaN where there is one."""
    return max(abs(float(value)) for value in values.aminmax())


class CheckedPlan:
    """A plan for predictions: it is checked on every batch, and gives up the rules that a batch contradicts.

    Args:
        model: The network.
        names: The parameters whose gradients are wanted.
        batch: The first batch, which the plan is made from.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], batch: Batch):
        self.model, self.names = model, list(names)
        self.plan = plan_model(model, self.names, batch)
        self._check = PlanCheck(self.plan)

    def record(self, batch: Batch) -> ForwardRecord:
        """Runs the model on a batch; a parameter whose rule is contradicted is treated by per-example gradients from now on.

        Call it where exactly the parameters `names` require a gradient (`only_require_grad`).
        """
        while True:
            with record_calls(self.plan) as calls:
                outputs = call_model(self.model, batch.inputs)
            check_outputs(outputs, batch.size)
            record = ForwardRecord.make(self.model, batch, outputs, self.plan, calls)
            try:
                self._check.check(record)
                return record
            except PlanContradicted as contradicted:
                self.plan = self.plan.without(contradicted.reasons)


def find_layers(model: nn.Module, names: Sequence[str], *, batch_statistics: bool = False) -> ModelPlan:
    """Finds every module that owns selected parameters and gives each a rule, or a reason why it has none.

    Args:
        model: Any PyTorch module.
        names: The selected parameters.
        batch_statistics: Whether to take also BatchNorm layers that normalise with the statistics of the batch
            (training): their rule then reads those statistics as constants.

    Returns:
        A plan that does not know the batch dimensions yet.
    """
    parameters = named_parameters(model)
    selected = {id(parameters[n]): n for n in names}
    together = not any(isinstance(module, _SLOW_TOGETHER) for module in model.modules())
    plan, uncovered = ModelPlan(vectors_go_together=together, selected={n: parameters[n] for n in names}), {}
    numbers: dict[tuple[object, ...], int] = {}
    inside_attention: set[str] = set()
    for path, module in model.named_modules():
        if any(path.startswith(prefix) for prefix in inside_attention):
            continue
        if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
            inside_attention.add(f"{path}." if path else "")
            parts: dict[str, int] = {}
            for part, (rule, paths) in attention_projections(module).items():
                owned = {role: _attribute(module, where) for role, where in paths.items()}
                number = _add_layer(plan, numbers, f"{path}.{part}".lstrip("."), rule, module, owned, selected)
                if number is not None:
                    parts[part] = number
            plan.attention.append((module, parts))
            continue
        chosen = {k: p for k, p in module._parameters.items() if p is not None and id(p) in selected}
        if not chosen:
            continue
        candidate = find_rule(module)
        reason = f"no rule for {type(module).__name__}" if candidate is None else candidate.unsupported(module)
        if batch_statistics and candidate is not None and isinstance(module, nn.modules.batchnorm._BatchNorm):
            reason = None
        if candidate is None or reason is not None:
            uncovered.update({selected[id(p)]: str(reason) for p in chosen.values()})
            continue
        roles = {k: chosen.get(k) for k in candidate.roles}
        number = _add_layer(plan, numbers, path, candidate, module, roles, selected)
        if number is not None:
            plan.hooked.append((module, number))
    covered = {name for layer in plan.layers for name in layer.layout.names}
    reasons = {n: uncovered.get(n, "no rule covers this parameter of its module") for n in names if n not in covered}
    return replace(plan, uncovered=reasons)


def _add_layer(
    plan: ModelPlan,
    numbers: dict[tuple[object, ...], int],
    path: str,
    rule: LayerRule,
    module: nn.Module,
    owned: Mapping[str, Tensor | None],
    selected: Mapping[int, str],
) -> int | None:
    """Returns the number of the layer that these parameters make; None where none of them is selected."""
    named = {role: (selected[id(p)], p) for role, p in owned.items() if p is not None and id(p) in selected}
    if not named:
        return None
    name = path or WHOLE_MODEL
    layout = rule.layout(name, module, named)
    shape = (layout.groups, layout.out, layout.in_)  # A weight may be tied between convolutions with other groups.
    key = (type(rule), shape, *((role, id(p)) for role, (_, p) in named.items()))
    if key not in numbers:
        numbers[key] = len(plan.layers)
        plan.layers.append(Layer(name, rule, named, layout, next(iter(named.values()))[1].dtype))
    return numbers[key]


def _attribute(module: nn.Module, path: str) -> Tensor | None:
    value: object = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, Tensor) else None


def plan_model(model: nn.Module, names: Sequence[str], batch: Batch, *, flat_outputs: bool = False) -> ModelPlan:
    """Looks at the model on copies of up to three examples of the first batch.

    Tensors with as many rows as the batch has examples are taken to hold one row for each. Where the model then fails on a
    few examples, some of them (an attention mask [N, N], say) belong to all examples together: those are left whole.

    Args:
        model: The network, in eval mode.
        names: The selected parameters.
        batch: The first batch.
        flat_outputs: Whether one output for each example [N] is allowed, as a loss may take it.

    Raises:
        UnsupportedError: The outputs of an example depend on the other examples of its batch.
        InputError: The outputs depend on none of the selected parameters, or it cannot be decided which arguments hold
            one row for each example.
    """
    try:
        return _plan_with(model, names, batch, flat_outputs)
    except _FAILURES as error:
        for choice in _possibly_whole(batch):
            try:
                return _plan_with(model, names, replace(batch, whole=batch.whole | choice), flat_outputs)
            except _FAILURES:
                continue
        _explain_ambiguity(model, batch, error)
        raise


def _possibly_whole(batch: Batch) -> list[frozenset[Path]]:
    """Returns which tensors may belong to all examples together: square matrices, any one, or all but the first."""
    batched = [(path, tensor) for path, tensor in batch.tensors() if batch.is_batched(path, tensor)][1:]
    squares = frozenset(path for path, t in batched if t.dim() == 2 and t.shape[0] == t.shape[1])
    choices = [squares, *(frozenset([path]) for path, _ in batched), frozenset(path for path, _ in batched)]
    return [choice for choice in dict.fromkeys(choices) if choice]


def _explain_ambiguity(model: nn.Module, batch: Batch, error: Exception) -> None:
    """Raises an error if the model accepts the whole batch, but no few examples of it, whatever is left whole."""
    choices = _possibly_whole(batch)
    if isinstance(error, AftermapError) or not choices:
        return
    try:
        with torch.no_grad():
            call_model(model, batch.inputs)
    except Exception:  # The model does not accept its inputs at all, and its own error says why.
        return
    arguments = ", ".join(".".join(map(str, path)) for path in sorted(choices[-1], key=str))
    raise InputError(
        f"the model accepts a batch of {batch.size} examples, but not a few examples of it: {error}. The arguments {arguments} "
        f"have {batch.size} rows, as many as the batch has examples, and nothing shows which of them hold one row for each. "
        "Bind what belongs to all examples together in a wrapper module (self.mask = mask), or use another batch size"
    ) from error


@autograd_errors_explained()
def _plan_with(model: nn.Module, names: Sequence[str], batch: Batch, flat_outputs: bool) -> ModelPlan:
    """Makes a plan, where it is known which of the inputs have a batch dimension."""
    check_modes(model)
    plan = find_layers(model, names)
    # Examples are repeated where the batch has fewer.
    three = replace(batch, targets=None, weight=None).take(torch.arange(3) % batch.size)
    with only_require_grad(model, names):
        # The pair holds the last two of the three, backwards, so that any influence of an example on another shows.
        pair, calls_of_pair = run_recorded(model, plan, three.take(torch.tensor([2, 1])))
        shapes_of_pair = [c.out_shape for c in calls_of_pair]
        pair = pair.detach()
        del calls_of_pair  # With them goes the graph of the pair.
        outputs, calls = run_recorded(model, plan, three)
        if flat_outputs and pair.dim() == outputs.dim() == 1:
            pair, outputs = pair.unsqueeze(-1), outputs.unsqueeze(-1)
        check_outputs(outputs, 3)
        check_outputs(pair, 2)
        _check_independent(pair, outputs.detach()[[2, 1]])
        if not outputs.requires_grad:
            raise InputError(
                f"the outputs depend on none of the selected parameters ({', '.join(list(names)[:5])}…); "
                "is part of the forward pass under torch.no_grad()?"
            )
        dimensions, unbatched = _find_batch_dimensions(shapes_of_pair, calls, plan)
        reason = "its layer is called without a batch dimension"
        plan = plan.without({n: reason for k in unbatched for n in plan.layers[k].layout.names})
        plan = replace(
            plan,
            batch_dimensions=dimensions,
            numbers=sum(math.prod(c.out_shape) for c in calls) // 3,
            input_numbers=three.numbers_per_example,
            width=outputs.shape[-1],
        )
        record = ForwardRecord.make(model, three, outputs, plan, calls)
        wrong = dict(record.misfits)
        wrong.update({name: USED_OUTSIDE for name, calls, uses, _ in record.signature if uses > calls})
        wrong |= contradictions(record)
        together = plan.vectors_go_together and bool(record.edges) and vectors_agree(record)
    # A parameter that is wrong spoils only itself: the others keep their rule, but not in a common block.
    unused = frozenset(n for n in names if not record.uses.get(n))
    # One row is broadcast, and may be one row for each example in another batch.
    whole = frozenset(p for p, t in batch.tensors() if t.dim() > 0 and t.shape[0] != 1 and not batch.is_batched(p, t))
    return replace(
        plan.without(wrong),
        vectors_go_together=together,
        unused=unused,
        whole_inputs=whole,
        verified=record.signature,
    )


def run_recorded(model: nn.Module, plan: ModelPlan, batch: Batch) -> tuple[Tensor, list[RecordedCall]]:
    """Runs the model on a batch, and returns its outputs and the calls of its layers.

    Raises:
        InputError: The model changes its inputs in place.
    """
    versions = [t._version for t in tensors_of(batch.inputs)]
    with record_calls(plan) as calls:
        outputs = call_model(model, batch.inputs)
    if versions != [t._version for t in tensors_of(batch.inputs)]:
        raise InputError(
            "the model changes its inputs in place, so a second pass over the same data would see others. "
            "Make a new tensor in its forward pass (x = x - mean instead of x -= mean; no inplace=True on the first layer)"
        )
    return outputs, calls


def _check_independent(outputs: Tensor, in_other_batch: Tensor) -> None:
    """Raises an error if the outputs of the same examples in two batches differ by more than rounding."""
    tolerance = _ROUNDING.get(outputs.dtype, 5e-2)
    if outputs.shape != in_other_batch.shape or float((outputs - in_other_batch).abs().max()) > tolerance * float(
        in_other_batch.abs().max()
    ):
        raise UnsupportedError(
            "the output of an example changes with the other examples of its batch (or is random). Curvature needs independent "
            "examples: check for normalisation over the batch, dropout that is always on, or a model that mixes examples"
        )


def _find_batch_dimensions(
    pair: Sequence[tuple[int, ...]], triple: Sequence[RecordedCall], plan: ModelPlan
) -> tuple[dict[tuple[int, int], int], set[int]]:
    """Returns the batch dimension by (layer, module), and layers with a call that has none; of the pair only its output shapes."""
    dimensions: dict[tuple[int, int], int] = {}
    unbatched: set[int] = set()
    if len(pair) != len(triple):
        return dimensions, set(range(len(plan.layers)))
    for two, three in zip(pair, triple, strict=True):
        if two[0] * 3 == three.out_shape[0] * 2:
            dimension = 0
        elif len(two) > 2 and (two[1], three.out_shape[1]) == (2, 3):
            dimension = 1
        else:
            unbatched.add(three.layer)
            continue
        if dimensions.setdefault((three.layer, id(three.module)), dimension) != dimension:
            unbatched.add(three.layer)
    return dimensions, unbatched


def inputs_of_call(model: nn.Module, call: ModelCall) -> Any:
    """Returns the arguments of a call as the inputs of a batch: a tensor, a tuple or a mapping; None if they cannot be told."""
    if not call.kwargs:
        return call.args[0] if len(call.args) == 1 else tuple(call.args)
    if not call.args:
        return dict(call.kwargs)
    try:
        return dict(inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments)
    except (TypeError, ValueError):
        return None


def on_one_example(batch: Batch, run: Callable[[Batch], Result]) -> Result:
    """Returns what a function of the first example gives; of the whole batch where an argument may belong to all examples together."""
    try:
        return run(batch.take(torch.arange(1)))
    except _FAILURES:
        if not _possibly_whole(batch):
            raise
        return run(batch)
