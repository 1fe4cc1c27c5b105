"""Records every call of every layer in one forward pass; the only file with hooks.

A forward hook keeps the detached input and the *gradient edge* of the output, not the output itself: an activation that
works in place changes the tensor, but not the edge. Gradients are taken with respect to these edges, never with respect
to parameters: that is half the work of a backward pass. Whatever happens inside, the model is afterwards exactly what it
was: hooks, ``forward``, ``requires_grad``, ``.grad`` and modes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from aftermap.curvature.rules.attention import PackedProjectionRule, attention_forward, unviewed
from aftermap.curvature.rules.base import Rows
from aftermap.errors import UnsupportedError

if TYPE_CHECKING:
    from aftermap.curvature.passes.plan import Site, Sites

__all__ = [
    "ArrangedCall",
    "Call",
    "RootCall",
    "Seen",
    "altered_outputs",
    "arrange",
    "arriving_gradients",
    "backpropagate",
    "capture",
    "hook_root",
    "last_edges",
    "observe",
]

_NOTHING = torch.empty(0)


@dataclass(frozen=True)
class Call:
    """One call of a layer.

    Attributes:
        site: number of its site.
        module: whose call it was (modules with tied parameters share a site, but not a stride).
        inputs: what went in, detached.
        version: the input's version when it was seen.
        edge: where in the graph the output's gradient arrives.
        out_shape: shape of the output.
        group: which group of the block the call concerns; None for all.
    """

    site: int
    module: nn.Module
    inputs: Tensor
    version: int
    edge: GradientEdge
    out_shape: tuple[int, ...]
    group: int | None = None

    def spent(self) -> Call:
        """The same call without its input, whose memory may go."""
        return Call(self.site, self.module, _NOTHING, self.version, self.edge, self.out_shape, self.group)

    def check_unchanged(self) -> None:
        """Raises if the input was overwritten after the call (autograd would refuse to train such a model, too)."""
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
def capture(sites: Sites, receive: Callable[[int, Tensor], None] | None = None) -> Iterator[list[Call]]:
    """Inside, every call at the sites is appended to the list that is yielded.

    Args:
        sites: where to listen.
        receive: given, it is called with a call's number and its output gradient as soon as a backward pass reaches it.

    >>> from aftermap.curvature.passes.plan import find_sites
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    >>> with capture(find_sites(net, ["0.weight", "2.weight"])) as calls:
    ...     out = net(torch.ones(4, 2))
    >>> [(c.site, c.out_shape) for c in calls]
    [(0, (4, 3)), (1, (4, 1))]
    >>> len(net[0]._forward_hooks)
    0
    """
    calls: list[Call] = []

    def record(site: int, module: nn.Module, inputs: Any, output: Any, group: int | None = None) -> None:
        # A call under no_grad passes no gradient on, and so contributes nothing.
        if isinstance(inputs, Tensor) and isinstance(output, Tensor) and output.requires_grad:
            kept = inputs.detach()
            calls.append(Call(site, module, kept, kept._version, _edge(output), tuple(output.shape), group))
            if receive is not None:
                number = len(calls) - 1
                # Registered before any in-place activation: the hook stays with the layer's own output.
                output.register_hook(lambda grad: receive(number, grad))

    def hook_for(site: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            plain = unviewed(output)
            record(site, module, args[0] if args else next(iter(kwargs.values()), None), plain)
            return plain

        return hook

    with ExitStack() as stack:
        for module, site in sites.hooked:
            handle = module.register_forward_hook(hook_for(site), with_kwargs=True)
            stack.callback(handle.remove)
        for attention, parts in sites.attention:
            stack.enter_context(_tapped(attention, parts, record))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield calls


@dataclass
class RootCall:
    """One call of the whole model.

    Attributes:
        args, kwargs: what it was called with.
        output: the tensor found in what it returned; None where there is not exactly one (or ``logits``).
        grad: the output's gradient, once a backward pass has reached it.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor | None
    grad: Tensor | None = None


@dataclass
class Seen:
    """What a user's closure did with a model: calls of layers, calls of the whole, gradients that reached parameters."""

    calls: list[Call]
    roots: list[RootCall] = field(default_factory=list)
    leaves: dict[str, Tensor] = field(default_factory=dict)

    def forget(self) -> None:
        """Lets go of the graph: its nodes hold hooks, and the hooks hold what they report to."""
        for root in self.roots:
            root.args, root.kwargs, root.output, root.grad = (), {}, None, None
        self.roots.clear()
        self.calls.clear()
        self.leaves.clear()


@contextmanager
def observe(
    model: nn.Module, sites: Sites, receive: Callable[[int, Tensor], None], leaves: Mapping[str, Tensor]
) -> Iterator[Seen]:
    """Inside, layer calls at the sites and calls of the whole model are recorded, whoever makes them.

    Args:
        model: the whole model; its inputs and the gradient of its output are kept.
        sites: where to listen.
        receive: called with the number of a layer's call and its output gradient, during the backward pass.
        leaves: parameters whose gradients are kept as they arrive: before anybody clips or averages them.
    """
    with ExitStack() as stack:
        calls = stack.enter_context(capture(sites, receive))
        seen = Seen(calls)

        def keep_root(call: RootCall) -> None:
            def keep(grad: Tensor) -> None:
                call.grad = grad if call.grad is None else call.grad + grad

            seen.roots.append(call)
            if call.output is not None:
                call.output.register_hook(keep)

        def keep_leaf(name: str) -> Callable[[Tensor], None]:
            def keep(grad: Tensor) -> None:
                seen.leaves[name] = grad if name not in seen.leaves else seen.leaves[name] + grad

            return keep

        stack.callback(hook_root(model, keep_root).remove)
        for name, parameter in leaves.items():
            if parameter.requires_grad:
                stack.callback(parameter.register_hook(keep_leaf(name)).remove)
        yield seen


def hook_root(model: nn.Module, receive: Callable[[RootCall], None]) -> RemovableHandle:
    """Calls ``receive`` with every call of the whole model that a gradient can come from, until the handle is removed."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found = _only_tensor(output)
        if not torch.is_grad_enabled() or (found is not None and not found.requires_grad):
            return  # a look at the outputs, say for a metric
        receive(RootCall(args, kwargs, found))

    return model.register_forward_hook(hook, with_kwargs=True)


def _only_tensor(output: Any) -> Tensor | None:
    """The tensor that a model returned: itself, its ``logits``, or the only one of a sequence."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    tensors = [t for t in output if isinstance(t, Tensor)] if isinstance(output, tuple | list) else []
    return tensors[0] if len(tensors) == 1 else None


@contextmanager
def altered_outputs(changes: Mapping[nn.Module, Callable[[Tensor, Tensor], Tensor]]) -> Iterator[None]:
    """Inside, each of the modules returns what its function makes of (input, output).

    >>> net = nn.Linear(2, 3)
    >>> with altered_outputs({net: lambda x, out: 0 * out + x.sum()}):
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


@contextmanager
def _tapped(module: nn.MultiheadAttention, parts: dict[str, int], record: Any) -> Iterator[None]:
    def tap(part: str, inputs: Tensor, output: Tensor, group: int | None) -> None:
        if part in parts:
            record(parts[part], module, inputs, output, group)

    own = module.__dict__
    had = "forward" in own
    before = own.get("forward")
    try:
        own["forward"] = attention_forward(module, tap)
        yield
    finally:
        if had:
            own["forward"] = before
        else:
            del own["forward"]


def backpropagate(
    outputs: Tensor, edges: Sequence[GradientEdge], vectors: Tensor, *, batched: bool, keep: bool
) -> Iterator[list[Tensor | None]]:
    """Gradients at the edges for each vector, several at a time or one by one.

    Args:
        outputs: [b, ..., c].
        edges: of the layer outputs.
        vectors: [v, b, ..., c].
        batched: all vectors in one vectorised pass (faster for matrix products, slower for convolutions).
        keep: the graph is needed again afterwards.

    Yields:
        For some vectors at a time, a gradient [v', b, ...] per edge; None where the output does not depend on it.
    """
    if batched and len(vectors) > 1:
        with warnings.catch_warnings():
            # A missing batching rule makes PyTorch loop inside: slower, not wrong.
            warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
            yield list(
                torch.autograd.grad(
                    outputs, list(edges), vectors, is_grads_batched=True, retain_graph=keep, allow_unused=True
                )
            )
        return
    for number, vector in enumerate(vectors):
        last = number == len(vectors) - 1
        # Nothing may hold the gradients of one vector while the next one is on its way: that would double the memory.
        yield [
            None if g is None else g[None]
            for g in torch.autograd.grad(outputs, list(edges), vector, retain_graph=keep or not last, allow_unused=True)
        ]


def arriving_gradients(
    outputs: Tensor,
    edges: Sequence[GradientEdge],
    vectors: Tensor,
    receive: Callable[[int, Tensor], None],
    passed: Callable[[], None],
    *,
    keep: bool,
    last: Collection[int] | None = None,
) -> None:
    """Back-propagates one vector after another and hands out the gradient at each edge as soon as it is complete.

    Autograd holds the gradients that are asked of it until the pass is over. So it is asked only for the last edges, those
    with no other edge behind them; at the others, a hook on the node looks at what passes by.

    Args:
        outputs: [b, ..., c].
        edges: of the layer outputs.
        vectors: [v, b, ..., c].
        receive: called with an edge's number and its gradient; never for an edge that the outputs do not depend on.
        passed: called at the end of each vector's pass.
        keep: the graph is needed again afterwards.
        last: what `last_edges` finds, if that is known.
    """
    wanted = sorted(last_edges(edges) if last is None else last)
    asked = [edges[n] for n in wanted]

    def looking_at(number: int) -> Callable[[Sequence[Tensor | None]], None]:
        place = edges[number].output_nr

        def look(grads: Sequence[Tensor | None]) -> None:
            grad = grads[place]
            if grad is not None:
                receive(number, grad)

        return look

    def hand_out(found: Sequence[Tensor | None]) -> None:  # and forget: the next vector needs the memory
        for number, grad in zip(wanted, found, strict=True):
            if grad is not None:
                receive(number, grad)

    with ExitStack() as stack:
        for number, edge in enumerate(edges):
            if number not in wanted:
                stack.callback(edge.node.register_prehook(looking_at(number)).remove)
        for place, vector in enumerate(vectors):
            again = keep or place < len(vectors) - 1
            hand_out(torch.autograd.grad(outputs, asked, vector, retain_graph=again, allow_unused=True))
            passed()


def last_edges(edges: Sequence[GradientEdge]) -> set[int]:
    """Numbers of the edges from whose nodes no other edge's node can be reached."""
    nodes = {edge.node for edge in edges}
    last = set()
    for number, edge in enumerate(edges):
        seen, stack = {edge.node}, [edge.node]
        while stack:
            following = [n for n, _ in stack.pop().next_functions if n is not None and n not in seen]
            if any(n in nodes for n in following):
                break
            seen.update(following)
            stack += following
        else:
            last.add(number)
    return last


@dataclass
class ArrangedCall:
    """A call whose input has the batch as its first dimension; rows are made when first asked for.

    Attributes:
        pick: takes the gradient [v, *output] at the call's edge to [v, b, ...].
        edge: number of the edge.
        reused: several vectors will meet the rows.
    """

    site: Site
    call: Call
    inputs: Tensor
    space: tuple[int, ...]
    pick: Callable[[Tensor], Tensor]
    edge: int
    reused: bool = False
    _rows: Rows | None = field(default=None, repr=False)

    @property
    def rows(self) -> Rows:
        """Input rows, kept for the next vector."""
        if self._rows is None:
            rows = self.fresh_rows()
            self._rows = rows.for_reuse() if self.reused else rows
        return self._rows

    def fresh_rows(self) -> Rows:
        """Input rows, not kept: for what is done once per batch."""
        if self.site.reads_inputs:
            self.call.check_unchanged()
        rule, group = self.site.rule, self.call.group
        if group is not None and isinstance(rule, PackedProjectionRule):
            return rule.rows_of_group(self.inputs, group, self.site.named)
        return rule.rows(self.call.module, self.inputs, self.space, self.site.named)

    def grads(self, raw: Tensor) -> Tensor:
        """Gradient at the edge as [v, b, g, t, o]."""
        rule, group = self.site.rule, self.call.group
        picked = self.pick(raw)
        if group is not None and isinstance(rule, PackedProjectionRule):
            return rule.grads_of_group(picked, group)
        return rule.grads(self.call.module, picked)


def arrange(call: Call, site: Site, edge: int, axis: int, batch: int) -> Iterator[ArrangedCall]:
    """Brings a call to batch-first form.

    Args:
        call: as it was recorded.
        site: its site.
        edge: number of its edge.
        batch: how many examples there are.
        axis: which dimension of input and output holds the batch. Along axis 0 an example may own several consecutive
            rows (tokens or frames folded into the batch): they become shared positions, or calls of their own.
    """
    inputs, shape = call.inputs, call.out_shape
    if axis == 1:
        space = (shape[0], *shape[2:])
        yield ArrangedCall(site, call, inputs.movedim(1, 0), space, lambda raw: raw.movedim(2, 1), edge)
        return
    fold = shape[0] // batch
    if fold == 1:
        yield ArrangedCall(site, call, inputs, shape[1:], lambda raw: raw, edge)
        return
    unfolded = inputs.unflatten(0, (batch, fold))
    if site.rule.leading:
        pick = lambda raw: raw.unflatten(1, (batch, fold))  # noqa: E731
        yield ArrangedCall(site, call, unfolded, (fold, *shape[1:]), pick, edge)
        return
    for part in range(fold):

        def pick_part(raw: Tensor, part: int = part) -> Tensor:
            return raw.unflatten(1, (batch, fold))[:, :, part]

        yield ArrangedCall(site, call, unfolded[:, part], shape[1:], pick_part, edge)
