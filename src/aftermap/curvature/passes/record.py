"""Records every call of every layer in one forward pass; the only file with hooks.

A forward hook keeps the detached input and the *gradient edge* of the output, not the output itself: an activation that
works in place changes the tensor, but not the edge. Gradients are taken with respect to these edges, never with respect
to parameters: that is half the work of a backward pass. Whatever happens inside, the model is afterwards exactly what it
was: hooks, ``forward``, ``requires_grad``, ``.grad`` and modes.

The graph also tells how often a weight was used. A weight that has more uses than recorded calls is used somewhere that no
hook sees, and its gradient cannot be put together from the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from aftermap.batches import Batch, tensors_of
from aftermap.curvature.rules.attention import PackedProjectionRule, attention_forward
from aftermap.curvature.rules.base import InputRows, without_view
from aftermap.errors import UnsupportedError

if TYPE_CHECKING:
    from aftermap.curvature.passes.plan import Layer, ModelPlan

__all__ = [
    "ClosureRecord",
    "ForwardRecord",
    "LayerCall",
    "ModelCall",
    "ModuleCall",
    "RecordedCall",
    "Signature",
    "deepest_edges",
    "hook_model",
    "layer_calls",
    "outputs_replaced",
    "record_calls",
    "record_closure",
    "record_modules",
    "uses_in_graph",
]

# For each parameter: how many calls of its layers were recorded, how often the graph uses it, and for each call whether an
# example owns several rows along the batch dimension.
Signature = tuple[tuple[str, int, int, tuple[bool, ...]], ...]


@dataclass(frozen=True)
class RecordedCall:
    """One call of a layer.

    Attributes:
        layer: The number of the layer in the plan.
        module: The module that was called (modules with tied parameters share a layer, but not a stride).
        inputs: The input of the call, detached.
        version: The version of the input when it was seen.
        edge: The place in the graph where the output's gradient arrives.
        out_shape: The shape of the output.
        group: The group of the block that the call concerns; None for all.
    """

    layer: int
    module: nn.Module
    inputs: Tensor
    version: int
    edge: GradientEdge
    out_shape: tuple[int, ...]
    group: int | None = None

    def check_unchanged(self) -> None:
        """Raises an error if the input was overwritten after the call (autograd would refuse to train such a model, too)."""
        if self.inputs._version != self.version:
            raise UnsupportedError(
                f"the input of a {type(self.module).__name__} was changed in place after the call, so its curvature is lost. "
                "Use an operation that is not in place there"
            )


def _edge(output: Tensor) -> GradientEdge:
    node = output.grad_fn
    # Where nothing but C++ owns the graph, an edge is no more than this; PyTorch's function looks at every other case.
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)


@contextmanager
def record_calls(
    plan: ModelPlan, on_gradient: Callable[[int, Tensor], None] | None = None
) -> Iterator[list[RecordedCall]]:
    """Appends every call of the plan's layers inside to the list that is yielded.

    Args:
        plan: The plan that says which modules to listen to.
        on_gradient: A function that is called with a call's number and its output gradient as soon as a backward pass
            reaches it.

    >>> from aftermap.curvature.passes.plan import find_layers
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    >>> with record_calls(find_layers(net, ["0.weight", "2.weight"])) as calls:
    ...     out = net(torch.ones(4, 2))
    >>> [(c.layer, c.out_shape) for c in calls]
    [(0, (4, 3)), (1, (4, 1))]
    >>> len(net[0]._forward_hooks)
    0
    """
    calls: list[RecordedCall] = []

    def record(layer: int, module: nn.Module, inputs: Any, output: Any, group: int | None = None) -> None:
        # A call under no_grad passes no gradient on, and so contributes nothing.
        if isinstance(inputs, Tensor) and isinstance(output, Tensor) and output.requires_grad:
            detached = inputs.detach()
            calls.append(
                RecordedCall(layer, module, detached, detached._version, _edge(output), tuple(output.shape), group)
            )
            if on_gradient is not None:
                # This is registered before any in-place activation, so that the hook stays with the layer's own output.
                output.register_hook(partial(on_gradient, len(calls) - 1))

    def hook(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        plain = without_view(output)
        record(layer, module, args[0] if args else next(iter(kwargs.values()), None), plain)
        return plain

    with ExitStack() as stack:
        for module, layer in plan.hooked:
            handle = module.register_forward_hook(partial(hook, layer), with_kwargs=True)
            stack.callback(handle.remove)
        for attention, parts in plan.attention:
            stack.enter_context(_tapped(attention, parts, record))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield calls


@dataclass
class ModuleCall:
    """One call of any module.

    Attributes:
        path: The module's path in the network.
        module: The module.
        nodes: The nodes of the graph that made its outputs; none where no gradient comes from them.
    """

    path: str
    module: nn.Module
    nodes: tuple[Node, ...] = ()


@contextmanager
def record_modules(model: nn.Module) -> Iterator[list[ModuleCall]]:
    """Inside, every call of every module is appended to the list that is yielded, in the order in which they begin.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with record_modules(net) as calls:
    ...     out = net(torch.ones(4, 2))
    >>> [c.path for c in calls]
    ['', '0', '1']
    """
    calls: list[ModuleCall] = []
    running: list[ModuleCall] = []

    def begin(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            calls.append(ModuleCall(path, module))
            running.append(calls[-1])

        return hook

    def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = running.pop()
        call.nodes = tuple(t.grad_fn for t in tensors_of(output) if t.grad_fn is not None)

    with ExitStack() as stack:
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(begin(path)).remove)
            stack.callback(module.register_forward_hook(end).remove)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield calls


@contextmanager
def _tapped(module: nn.MultiheadAttention, parts: Mapping[str, int], record: Any) -> Iterator[None]:
    """Writes the attention's forward pass out inside, so that it reports its projections."""

    def tap(part: str, inputs: Tensor, output: Tensor, group: int | None) -> None:
        if part in parts:
            record(parts[part], module, inputs, output, group)

    attributes = module.__dict__
    had_forward = "forward" in attributes
    before = attributes.get("forward")
    try:
        attributes["forward"] = attention_forward(module, tap)
        yield
    finally:
        if had_forward:
            attributes["forward"] = before
        else:
            del attributes["forward"]


@dataclass
class ModelCall:
    """One call of the whole model.

    Attributes:
        args, kwargs: The arguments that it was called with.
        output: The tensor found in what it returned; None where there is not exactly one (or ``logits``).
        gradient: The output's gradient, once a backward pass has reached it.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor | None
    gradient: Tensor | None = None


@dataclass
class ClosureRecord:
    """The record of what a user's closure did with a model: calls of layers and of the whole, and gradients of parameters.

    Attributes:
        calls: Every call of a layer.
        model_calls: Every call of the whole model that a gradient can come from.
        parameter_gradients: Autograd's gradients by name, as they arrived.
        running: The number of calls of the whole model that have not returned yet.

    Not every gradient is that of the loss: a model may differentiate in its own forward pass (a force is the gradient of an
    energy), which then is still running, and a closure may use a gradient in its loss (a gradient penalty), by a pass that makes a graph
    of its own, in which gradients are on. Such gradients are not kept.
    """

    calls: list[RecordedCall] = field(default_factory=list)
    model_calls: list[ModelCall] = field(default_factory=list)
    parameter_gradients: dict[str, Tensor] = field(default_factory=dict)
    running: int = 0

    def release(self) -> None:
        """Lets go of the graph: its nodes hold hooks, and the hooks hold what they report to."""
        for call in self.model_calls:
            call.args, call.kwargs, call.output, call.gradient = (), {}, None, None
        self.model_calls.clear()
        self.calls.clear()
        self.parameter_gradients.clear()


@contextmanager
def record_closure(
    model: nn.Module,
    plan: ModelPlan,
    on_gradient: Callable[[int, Tensor], None],
    parameters: Mapping[str, Tensor],
) -> Iterator[ClosureRecord]:
    """Records calls of layers and calls of the whole model inside, whoever makes them.

    Args:
        model: The whole model, of which inputs and the gradient of the output are kept.
        plan: The plan that says which layers to listen to.
        on_gradient: A function that is called with the number of a layer's call and its output gradient, during the
            backward pass.
        parameters: The parameters whose gradients are kept as they arrive, before anybody clips or averages them.
    """
    with ExitStack() as stack:
        calls = stack.enter_context(record_calls(plan, on_gradient))
        record = ClosureRecord(calls)

        def keep_model_call(call: ModelCall) -> None:
            def keep(gradient: Tensor) -> None:
                if not record.running and not torch.is_grad_enabled():
                    call.gradient = gradient if call.gradient is None else call.gradient + gradient

            record.model_calls.append(call)
            if call.output is not None:
                call.output.register_hook(keep)

        def keep_gradient_of(name: str) -> Callable[[Tensor], None]:
            def keep(gradient: Tensor) -> None:
                gradients = record.parameter_gradients
                if not record.running and not torch.is_grad_enabled():
                    gradients[name] = gradient if name not in gradients else gradients[name] + gradient

            return keep

        for handle in hook_model(model, record, keep_model_call):
            stack.callback(handle.remove)
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                stack.callback(parameter.register_hook(keep_gradient_of(name)).remove)
        yield record


def hook_model(
    model: nn.Module, record: ClosureRecord, on_call: Callable[[ModelCall], None]
) -> tuple[RemovableHandle, RemovableHandle]:
    """Counts in ``record`` which calls of the whole model are running, until the handles are removed.

    Args:
        model: The whole model.
        record: What counts them.
        on_call: A function that is called after every call that a gradient can come from.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        record.running += -1 if output else 1  # A call without an output begins.
        if not output or output[0] is None or not torch.is_grad_enabled():
            return  # It begins or has failed, or is a look at the outputs, say for a metric.
        tensor = _only_tensor(output[0])
        if tensor is None or tensor.requires_grad:
            on_call(ModelCall(args, kwargs, tensor))

    before = model.register_forward_pre_hook(hook, with_kwargs=True)
    return before, model.register_forward_hook(hook, with_kwargs=True, always_call=True)


def _only_tensor(output: Any) -> Tensor | None:
    """Returns the tensor that a model returned: itself, its ``logits``, or the only one of a sequence."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    tensors = [t for t in output if isinstance(t, Tensor)] if isinstance(output, tuple | list) else []
    return tensors[0] if len(tensors) == 1 else None


@contextmanager
def outputs_replaced(changes: Mapping[nn.Module, Callable[[Tensor, Tensor], Tensor]]) -> Iterator[None]:
    """Lets each of the modules return, inside, what its function makes of (input, output).

    >>> net = nn.Linear(2, 3)
    >>> with outputs_replaced({net: lambda x, out: 0 * out + x.sum()}):
    ...     net(torch.ones(1, 2))[0].tolist()
    [2.0, 2.0, 2.0]
    """

    def hook_for(change: Callable[[Tensor, Tensor], Tensor]) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            return change(args[0] if args else next(iter(kwargs.values())), output)

        return hook

    with ExitStack() as stack:
        for module, change in changes.items():
            stack.callback(module.register_forward_hook(hook_for(change), with_kwargs=True).remove)
        yield


@dataclass
class LayerCall:
    """A call in the format whose first dimension is the batch; its input rows are made when first asked for.

    Attributes:
        layer: The layer that was called.
        call: The call as it was recorded.
        inputs: The input [b, ...].
        space: The shape of the output without the batch.
        to_batch_first: A function that takes the gradient [v, *output] at the call's edge to [v, b, ...]; None where it is so already.
        edge: The number of the edge.
        cached: Whether the rows are kept, because several vectors will meet them.
    """

    layer: Layer
    call: RecordedCall
    inputs: Tensor
    space: tuple[int, ...]
    to_batch_first: Callable[[Tensor], Tensor] | None
    edge: int
    cached: bool = False
    _rows: InputRows | None = field(default=None, repr=False)

    @property
    def rows(self) -> InputRows:
        """The input rows, kept for the next vector."""
        if self._rows is None:
            rows = self.fresh_rows()
            self._rows = rows.cached() if self.cached else rows
        return self._rows

    def fresh_rows(self) -> InputRows:
        """Returns the input rows, which are not kept, for what is done once per batch."""
        if set(self.layer.named) != {"bias"}:  # The gradient of a bias does not depend on the input.
            self.call.check_unchanged()
        rule, group, inputs = self.layer.rule, self.call.group, self.inputs
        if inputs.is_floating_point():  # Under autocast, sums are made in the parameters' dtype.
            inputs = inputs.to(self.layer.dtype)
        if group is not None and isinstance(rule, PackedProjectionRule):
            return rule.rows_of_group(inputs, group, self.layer.named)
        return rule.rows(self.call.module, inputs, self.space, self.layer.named)

    def gradients(self, arrived: Tensor) -> Tensor:
        """Returns the gradient [v, *output] that arrived at the edge as [v, b, g, t, o]."""
        rule, group = self.layer.rule, self.call.group
        batch_first = arrived.to(self.layer.dtype)
        if self.to_batch_first is not None:
            batch_first = self.to_batch_first(batch_first)
        if group is not None and isinstance(rule, PackedProjectionRule):
            return rule.grads_of_group(batch_first, group)
        return rule.grads(self.call.module, batch_first)


def layer_calls(call: RecordedCall, layer: Layer, edge: int, batch_dimension: int, size: int) -> Iterator[LayerCall]:
    """Brings a call to the format whose first dimension is the batch.

    Args:
        call: The call as it was recorded.
        layer: The layer of the call.
        edge: The number of the call's edge.
        batch_dimension: The dimension of input and output that holds the batch. Along dimension 0 an example may own
            several consecutive rows (tokens or frames folded into the batch): they become shared positions, or calls of
            their own.
        size: The number of examples.
    """
    inputs, shape = call.inputs, call.out_shape
    if batch_dimension == 1:
        space = (shape[0], *shape[2:])
        yield LayerCall(layer, call, inputs.movedim(1, 0), space, lambda arrived: arrived.movedim(2, 1), edge)
        return
    fold = shape[0] // size
    if fold == 1:
        yield LayerCall(layer, call, inputs, shape[1:], None, edge)
        return
    unfolded = inputs.unflatten(0, (size, fold))
    if layer.rule.leading:
        yield LayerCall(
            layer, call, unfolded, (fold, *shape[1:]), lambda arrived: arrived.unflatten(1, (size, fold)), edge
        )
        return
    for part in range(fold):

        def take_part(arrived: Tensor, part: int = part) -> Tensor:
            return arrived.unflatten(1, (size, fold))[:, :, part]

        yield LayerCall(layer, call, unfolded[:, part], shape[1:], take_part, edge)


@dataclass
class ForwardRecord:
    """The record of a batch after its forward pass.

    Attributes:
        model: The network.
        batch: The batch that it was called with.
        outputs: The outputs that it returned [b, ..., c].
        plan: The plan that says how its layers are read.
        calls: For each layer number its calls; every layer that covers a parameter has an entry.
        edges: The gradient edges of the calls, numbered.
        misfits: The parameters of layers that were called on something that does not fit the batch, with the reason.
    """

    model: nn.Module
    batch: Batch
    outputs: Tensor
    plan: ModelPlan
    calls: dict[int, list[LayerCall]]
    edges: list[GradientEdge]
    misfits: dict[str, str]

    @staticmethod
    def make(
        model: nn.Module, batch: Batch, outputs: Tensor, plan: ModelPlan, recorded: Sequence[RecordedCall]
    ) -> ForwardRecord:
        """Brings the recorded calls of layers that cover a parameter into the batch-first format."""
        calls: dict[int, list[LayerCall]] = {number: [] for number in plan.covering_layers}
        edges: list[GradientEdge] = []
        misfits: dict[str, str] = {}
        for call in recorded:
            if call.layer not in calls:
                continue
            layer = plan.layers[call.layer]
            # A layer that was not called before has its batch first, as most have; that is verified like everything new.
            dimension = plan.batch_dimensions.get((call.layer, id(call.module)), 0)
            length = call.out_shape[dimension] if len(call.out_shape) > dimension else 0
            if length == 0 or length % batch.size:
                misfits.update(
                    dict.fromkeys(layer.layout.names, "its layer is called on something else than the whole batch")
                )
                continue
            calls[call.layer] += layer_calls(call, layer, len(edges), dimension, batch.size)
            edges.append(call.edge)
        return ForwardRecord(model, batch, outputs, plan, calls, edges, misfits)

    @property
    def size(self) -> int:
        """The number of examples."""
        return self.batch.size

    @cached_property
    def deepest_edges(self) -> list[int]:
        """The numbers of the edges behind which there is no other; the graph is the same for every vector."""
        return sorted(deepest_edges(self.edges))

    @cached_property
    def uses(self) -> dict[str, int]:
        """The number of times that the outputs use each selected parameter."""
        return uses_in_graph(self.outputs, self.plan.selected)

    @cached_property
    def signature(self) -> Signature:
        """The way in which this batch used the parameters that are covered by a rule."""
        names, uses, size = self.plan.layers_of_parameter, self.uses, self.batch.size
        folds = {
            number: tuple(call.call.out_shape[0] != size for call in calls if call.call.group is None)
            for number, calls in self.calls.items()
        }
        recorded = {number: len({id(call.call) for call in calls}) for number, calls in self.calls.items()}
        return tuple(
            (n, sum(recorded[k] for k in numbers), uses.get(n, 0), tuple(f for k in numbers for f in folds[k]))
            for n, numbers in names.items()
        )


def deepest_edges(edges: Sequence[GradientEdge]) -> set[int]:
    """Returns the numbers of the edges from whose nodes no other edge's node can be reached."""
    nodes = {edge.node for edge in edges}
    deepest = set()
    for number, edge in enumerate(edges):
        seen, stack = {edge.node}, [edge.node]
        while stack:
            following = [n for n, _ in stack.pop().next_functions if n is not None and n not in seen]
            if any(n in nodes for n in following):
                break
            seen.update(following)
            stack += following
        else:
            deepest.add(number)
    return deepest


def uses_in_graph(output: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Counts how often the graph of an output uses each parameter: the edges into its leaf, or into a node that only casts it.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> uses_in_graph((weight * 3 + weight).sum(), {"weight": weight})
    {'weight': 2}
    """
    by_id = {id(p): name for name, p in parameters.items()}
    uses = dict.fromkeys(parameters, 0)
    if output.grad_fn is None:
        return uses
    seen: set[Node] = {output.grad_fn}
    stack: list[Node] = [output.grad_fn]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None or node in seen:
                continue
            # Autocast keeps the casts of weights: the uses of a cast are uses of the weight.
            leaf = node.next_functions[0][0] if type(node).__name__ == "ToCopyBackward0" else node
            accumulates = type(leaf).__name__ == "AccumulateGrad"
            name = by_id.get(id(getattr(leaf, "variable", None))) if accumulates else None
            if name is None:
                seen.add(node)
                stack.append(node)
            else:
                uses[name] += 1
    return uses
