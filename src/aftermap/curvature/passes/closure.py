"""Per-example statistics of a user's closure: what a natural-gradient optimiser needs from one training step.

The closure runs the model and returns a loss (or calls ``backward`` itself). Layer calls are recorded by hooks; as the
backward pass reaches a layer, its contribution to Σ g and Σ g² is made and its input let go, so memory stays that of the
activations plus a few per-example gradients of one layer.

The gradients are those of the loss as it is returned. For a mean over n examples an example's own gradient is n times
what arrives at its rows; the optimiser, which was told the reduction, knows that factor.

BatchNorm in training mode: the statistics of the batch couple the examples, so an example has no gradient of its own.
What is squared is then what arrives at an example's rows of a layer; the sum over examples is still the true gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from aftermap.batches import Batch
from aftermap.curvature.passes.fallback import per_example_products
from aftermap.curvature.passes.plan import Arrived, Plan, find_sites, inputs_of, is_low_precision, outer_of_calls, probe
from aftermap.curvature.passes.record import Call, RootCall, Seen, arrange, hook_root, last_edges, observe
from aftermap.curvature.rules.base import Layout, MatrixRows, add_grad_gram_, budget
from aftermap.errors import AftermapError, InputError, StatisticalWarning, UnsupportedError
from aftermap.linalg import GramSum
from aftermap.models import evaluation_mode
from aftermap.params import named_parameters

__all__ = [
    "ClosureWatch",
    "ClosureWatcher",
    "GradientReader",
    "Moments",
    "Reading",
    "kron_sums",
    "loss_of",
    "with_loss",
]

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 5e-3}


def kron_sums(layout: Layout, calls: Arrived) -> tuple[Tensor, Tensor, int]:
    """Σ a aᵀ [g, i, i] and Σ g gᵀ [g, o, o] over examples and shared positions (expand), and rows per example."""
    like = calls[0][1]
    inputs, outputs = (GramSum(layout.groups, width, like.dtype, like.device) for width in (layout.in_, layout.out))
    rows = 0
    for call, grads in calls:
        if not isinstance(call.rows, MatrixRows):
            raise UnsupportedError(f"{layout.name} has no weight matrix, so it has no Kronecker factors")
        call.rows.add_gram_(inputs)
        add_grad_gram_(outputs, grads)
        rows += max(call.rows.lengths())
    return inputs.full(), outputs.full(), rows


@dataclass
class Moments:
    """Sums over the examples of one closure, for the loss as it was returned.

    Attributes:
        sums: parameter -> Σ_n g_n; a parameter that the loss does not depend on is missing.
        squares: parameter -> Σ_n g_n²; empty where nobody asked for them.
        size: how many examples.
        factors: site -> (Σ a aᵀ [g, i, i], Σ g gᵀ [g, o, o], rows of one example), instead of squares.
    """

    sums: dict[str, Tensor]
    squares: dict[str, Tensor]
    size: int
    factors: dict[int, tuple[Tensor, Tensor, int]] = field(default_factory=dict)


class ClosureWatcher:
    """Watches closures that use a model; final.

    Args:
        model: any module; unchanged between closures.
        names: the parameters whose statistics are wanted.
        factors: layers with a weight matrix give their Kronecker factors instead of squares.
        passive: only gradients are taken; the calls stay as they are for somebody who reads the graph afterwards.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], *, factors: bool = False, passive: bool = False):
        self.model, self.names = model, list(names)
        self.parameters = {n: named_parameters(model)[n] for n in self.names}
        with evaluation_mode(model):  # whether BatchNorm has a rule must not depend on the mode
            self.sites = find_sites(model, self.names, batch_statistics=True)
        self.factors, self.passive = factors, passive
        self.plan: Plan | None = None
        self.verified = False
        self._warned: set[str] = set()

    @contextmanager
    def watching(self, size: int | None = None) -> Iterator[ClosureWatch]:
        """Inside, calls of the model are recorded; ``size`` overrides the number of examples."""
        watch = ClosureWatch(self, size)
        try:
            yield from self._watched(watch)
        except BaseException:
            watch.release()
            raise

    def _watched(self, watch: ClosureWatch) -> Iterator[ClosureWatch]:
        with observe(self.model, self.sites, watch.receive, {n: self.parameters[n] for n in self.leaves()}) as seen:
            watch.seen = seen
            yield watch

    def leaves(self) -> list[str]:
        """Parameters whose gradient comes from autograd: all in the first step, later those without a rule."""
        if self.plan is None or not self.verified or self.factors or self.passive:
            return self.names
        return list(self.plan.reasons)

    def prepare(self, watch: ClosureWatch) -> Plan:
        """The plan, made from the first closure's inputs: batch dimensions and rules, verified on three examples."""
        if self.plan is None:
            self.plan = self._look(watch)
            coupled = [
                path
                for path, m in self.model.named_modules()
                if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training
            ]
            if coupled:
                self._warn(
                    f"{len(coupled)} BatchNorm layers ({', '.join(coupled[:3])}…) are in training mode: batch statistics couple "
                    "the examples, so squared per-example gradients are those that arrive at an example's rows. Gradients "
                    "are exact. To avoid this, freeze the statistics with .eval() on these layers or use GroupNorm"
                )
        return self.plan

    def _look(self, watch: ClosureWatch) -> Plan:
        root = watch.root()
        inputs = None if root is None else inputs_of(self.model, root)
        if inputs is None:
            return Plan.make({}, self.sites, self.sites.reasons)
        try:
            with evaluation_mode(self.model), torch.random.fork_rng(enabled=True):
                found = probe(self.model, self.names, Batch(inputs, None, None, watch.size))
        except UnsupportedError as error:
            self._warn(f"{error}. Squares are those of what arrives at an example's rows of each layer")
            return Plan.make({}, self.sites, self.sites.reasons)
        except (AftermapError, RuntimeError, TypeError, ValueError):
            # Outputs of an unusual form: the batch is taken to come first, and the first step still checks the sums.
            return Plan.make({}, self.sites, self.sites.reasons)
        if [s.name for s in found.sites.sites] != [s.name for s in self.sites.sites]:
            return Plan.make({}, self.sites, self.sites.reasons)
        # A parameter that only training uses was not verified here; its sum is, in the first step.
        return Plan.make(found.axes, self.sites, {n: w for n, w in found.reasons.items() if n not in found.unused})

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, StatisticalWarning, stacklevel=6)

    def factored(self, plan: Plan, number: int) -> bool:
        """Whether a site gives Kronecker factors: it has a weight matrix and shares no parameter with another site."""
        site = self.sites.sites[number]
        matrix = self.factors and site.rule.matrix and not site.rule.one_hot
        return matrix and all(plan.by_parameter.get(n) == [number] for n in site.layout.names)

    def demote(self, names: Mapping[str, str]) -> None:
        """These parameters turned out to have no rule after all."""
        if self.plan is not None:
            self.plan = Plan.make(self.plan.axes, self.sites, {**self.plan.reasons, **names})


@dataclass
class ClosureWatch:
    """One closure as it goes by."""

    watcher: ClosureWatcher
    given_size: int | None = None
    seen: Seen = field(default_factory=lambda: Seen([]))
    sums: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[int, tuple[Tensor, Tensor, int]] = field(default_factory=dict)
    _waiting: dict[int, list[tuple[Call, Tensor]]] = field(default_factory=dict)
    _expected: dict[int, int] | None = None
    _early: list[tuple[int, Tensor]] = field(default_factory=list)
    _got: set[int] = field(default_factory=set)
    _size: int = 0  # once it is asked for inside the backward pass, many times
    closed: bool = False

    def root(self) -> RootCall | None:
        """The one call of the whole model."""
        if len(self.seen.roots) > 1:
            raise UnsupportedError(
                f"the closure called the model {len(self.seen.roots)} times; per-example squares need one call per closure. "
                "For micro-batches use one `with opt.sampled_params():` block each and then opt.step()"
            )
        return self.seen.roots[0] if self.seen.roots else None

    @property
    def size(self) -> int:
        """How many examples the closure saw."""
        if self.given_size is not None:
            return self.given_size
        root = self.root()
        if root is not None:
            for value in [*root.args, *root.kwargs.values()]:
                if isinstance(value, Tensor) and value.dim() > 0:
                    return value.shape[0]
            if root.output is not None and root.output.dim() > 0:
                return root.output.shape[0]
        if self.seen.calls:
            return self.seen.calls[0].out_shape[0]
        raise InputError(
            "the closure did not call the model that the optimiser was built for, so the number of examples is unknown. "
            "Call that model inside the closure, or pass batch_size="
        )

    @property
    def gradients_came(self) -> bool:
        """Whether the closure ran a backward pass itself."""
        return bool(self._got or self.seen.leaves) or any(r.grad is not None for r in self.seen.roots)

    def receive(self, number: int, grad: Tensor) -> None:
        """Called by the backward pass."""
        if self.closed or self.watcher.passive:
            return
        if number in self._got:
            raise UnsupportedError(
                "a second backward pass went through the same forward pass; per-example squares need the sum of the losses "
                "before one backward pass"
            )
        self._got.add(number)
        if self.watcher.plan is None:
            self._early.append((number, grad))
        else:
            self._arrived(self.watcher.plan, number, grad)

    def _arrived(self, plan: Plan, number: int, grad: Tensor) -> None:
        call = self.seen.calls[number]
        cluster = plan.cluster.get(call.site)
        if cluster is None:
            return
        if self._expected is None:  # calls that a checkpoint makes later, during the backward pass, get no gradient
            self._expected = {}
            for each in self.seen.calls:
                place = plan.cluster.get(each.site, -1)
                self._expected[place] = self._expected.get(place, 0) + 1
        waiting = self._waiting.setdefault(cluster, [])
        waiting.append((call, grad))
        # The list is the last to hold the input: once the cluster is done its memory is free.
        self.seen.calls[number] = call.spent()
        if len(waiting) == self._expected[cluster]:
            self._process(plan, cluster)

    def _process(self, plan: Plan, cluster: int) -> None:
        arrived: dict[int, Arrived] = {}
        for call, grad in self._waiting.pop(cluster):
            arrived.setdefault(call.site, []).extend(self._arranged(plan, call, grad))
        with torch.no_grad():
            self.consume(plan, arrived)

    def _arranged(self, plan: Plan, call: Call, grad: Tensor) -> Arrived:
        site = self.watcher.sites.sites[call.site]
        axis = plan.axes.get((call.site, id(call.module)), 0)
        self._size = size = self._size or self.size
        if len(call.out_shape) <= axis or call.out_shape[axis] % size:
            raise UnsupportedError(
                f"{site.name} was called on a shape {tuple(call.inputs.shape)} that does not fit a batch of {size} "
                "examples. Pass batch_size= to step() if the number of examples was misread"
            )
        call.check_unchanged()
        dtype = next(iter(site.named.values()))[1].dtype
        if call.inputs.dtype != dtype and call.inputs.is_floating_point():  # autocast: sums in the parameters' dtype
            kept = call.inputs.to(dtype)
            call = replace(call, inputs=kept, version=kept._version)
        raw = grad.detach() if grad.dtype == dtype else grad.detach().to(dtype)
        return [(each, each.grads(raw[None])) for each in arrange(call, site, 0, axis, size)]

    def consume(self, plan: Plan, arrived: Mapping[int, Arrived]) -> None:
        """Adds the sums of one cluster of sites."""
        number, calls = next(iter(arrived.items()))
        if len(arrived) == 1 and number in plan.alone:
            layout = self.watcher.sites.sites[number].layout
            if self.watcher.factored(plan, number):
                self.factors[number] = kron_sums(layout, calls)
                return
            if len(calls) == 1:
                call, grads = calls[0]
                total, squares = call.rows.outer_moments(grads)
            else:
                total = calls[0][1].new_zeros(layout.groups, layout.out, layout.in_)
                squares = torch.zeros_like(total)
                stride = budget(layout.size)
                for start in range(0, self.size, stride):
                    each = outer_of_calls(calls, start, min(stride, self.size - start))
                    total += each.sum((0, 1))
                    squares += each.square_().sum((0, 1))
            found = layout.split(total)
            for name, value in layout.split(squares).items():
                if name in plan.by_parameter:
                    self.sums[name], self.squares[name] = found[name], value
            return
        self._consume_tied(plan, arrived)

    def _consume_tied(self, plan: Plan, arrived: Mapping[int, Arrived]) -> None:
        """A parameter with several kinds of uses: its per-example gradients add up before the square."""
        sites = self.watcher.sites.sites
        stride = budget(sum(sites[s].layout.size for s in arrived))
        for start in range(0, self.size, stride):
            found: dict[str, Tensor] = {}
            for number, calls in arrived.items():
                each = outer_of_calls(calls, start, min(stride, self.size - start))
                for name, value in sites[number].layout.split(each).items():
                    if name in plan.by_parameter:
                        found[name] = value if name not in found else found[name] + value
            for name, value in found.items():
                total, squares = value.sum((0, 1)), value.square().sum((0, 1))
                self.sums[name] = total if start == 0 else self.sums[name] + total
                self.squares[name] = squares if start == 0 else self.squares[name] + squares

    def differentiate(self, loss: Tensor, *, keep: bool = False) -> None:
        """One backward pass from the loss to the layers (and to parameters that need autograd's own gradient)."""
        watcher = self.watcher
        leaves = [watcher.parameters[n] for n in watcher.leaves() if watcher.parameters[n].requires_grad]
        edges = [c.edge for c in self.seen.calls]
        # Autograd holds what it is asked for until the end; on its way to the last edges it passes by all others.
        wanted: list[Any] = [edges[n] for n in sorted(last_edges(edges))] + leaves
        wanted += [r.output for r in self.seen.roots if r.output is not None and leaves]
        if wanted:  # the hooks take what arrives
            torch.autograd.grad(loss, wanted, retain_graph=keep, allow_unused=True)

    def release(self) -> None:
        """Lets go of the graph. Its nodes hold the hooks, the hooks hold this watch: a circle that Python cannot see."""
        self.closed = True
        self.seen.forget()
        self._early.clear()
        self._waiting.clear()

    def finish(self, *, scale: float = 1.0) -> Moments:
        """Completes the sums, after the hooks are gone and while the parameters are still those of the closure.

        Args:
            scale: of the loss that was differentiated against the one meant (a gradient scaler's).
        """
        self.closed = True
        watcher, leaves = self.watcher, self.seen.leaves
        plan = watcher.prepare(self)
        early, self._early = self._early, []
        for number, grad in early:
            self._arrived(plan, number, grad)
        for cluster in list(self._waiting):
            self._process(plan, cluster)
        if watcher.passive:
            return Moments({n: g.detach() / scale for n, g in leaves.items()}, {}, self.size)
        if not watcher.verified:
            self._verify(leaves)
            plan = watcher.prepare(self)
        rest = [n for n in watcher.names if n in plan.reasons and n in leaves]
        if rest:
            self.squares.update(self._fallback(rest))
        taken = [n for n in leaves if n not in self.sums]
        self.sums.update({n: leaves[n].detach().clone() if scale != 1.0 else leaves[n].detach() for n in taken})
        if scale != 1.0:
            for values, by in ((self.sums, scale), (self.squares, scale**2)):
                if values:  # K-FAC asks for no squares
                    torch._foreach_div_(list(values.values()), by)
            self.factors = {s: (a, b / scale**2, t) for s, (a, b, t) in self.factors.items()}
        return Moments(self.sums, self.squares, self.size, self.factors)

    def _verify(self, leaves: Mapping[str, Tensor]) -> None:
        """Compares the rules' sums with autograd's gradients, once."""
        watcher, wrong = self.watcher, {}
        for name, total in list(self.sums.items()):
            expected = leaves.get(name)
            if expected is None:
                continue
            expected = expected.detach().to(total.dtype)
            tolerance = 5e-2 if is_low_precision(self.seen) else _TOLERANCE.get(total.dtype, 5e-2)
            error, size = float((total - expected).norm()), float(expected.norm())
            if error > tolerance * size + 1e3 * torch.finfo(total.dtype).tiny:
                wrong[name] = "it is also used outside its layer's call"
        factored = {n for s in self.factors for n in watcher.sites.sites[s].layout.names}
        known = {*self.sums, *factored}
        wrong.update({n: "its layer's calls were not seen" for n in leaves if n not in known and n in self._covered()})
        watcher.verified = bool(leaves) or watcher.verified
        if wrong:
            for name in wrong:
                self.sums.pop(name, None)
                self.squares.pop(name, None)
            watcher.demote(wrong)

    def _covered(self) -> Mapping[str, Sequence[int]]:
        return {} if self.watcher.plan is None else self.watcher.plan.by_parameter

    def _fallback(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Σ g² of parameters without a rule: the model is run again, one example at a time, in evaluation mode."""
        root, watcher = self.root(), self.watcher
        reasons = {} if watcher.plan is None else watcher.plan.reasons
        inputs = None if root is None else inputs_of(watcher.model, root)
        if root is None or root.grad is None or inputs is None:
            raise UnsupportedError(
                f"{names[0]} has no layer rule ({reasons.get(names[0], 'unknown')}), and per-example gradients need the closure to "
                "call the whole model once and the model to return one tensor. Freeze the parameter, or use IVON or "
                "curvature='micro_batch'"
            )
        size = self.size
        squares = {n: torch.zeros_like(watcher.parameters[n]) for n in names}
        stride = budget(sum(watcher.parameters[n].numel() for n in names))
        vectors = root.grad.detach()[None]
        with torch.no_grad(), evaluation_mode(watcher.model):
            for start in range(0, size, stride):
                length = min(stride, size - start)
                found = per_example_products(watcher.model, names, inputs, size, vectors, start, length)
                for name, value in found.items():
                    squares[name] += value.square().sum((0, 1)).to(squares[name].dtype)
        return squares


class Reading(Protocol):
    """One closure as it goes by."""

    @property
    def gradients_came(self) -> bool:
        """Whether the closure ran a backward pass itself."""

    def differentiate(self, loss: Tensor, *, keep: bool = False) -> None:
        """Runs the backward pass for a closure that did not."""

    def finish(self, *, scale: float = 1.0) -> Moments:
        """The sums, for the loss divided by ``scale``."""

    def release(self) -> None:
        """Lets go of the graph."""


class GradientReader:
    """Reads gradients of parameters and nothing else.

    Args:
        model: tells how many examples a closure saw; None: every closure counts as one.
        parameters: by name.
    """

    def __init__(self, model: nn.Module | None, parameters: Mapping[str, Tensor]):
        self.model, self.parameters = model, dict(parameters)

    @contextmanager
    def watching(self, size: int | None = None) -> Iterator[GradientReading]:
        """Inside, the model's calls are counted."""
        reading = GradientReading(self, size)
        handle = None if self.model is None else hook_root(self.model, reading.seen.roots.append)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield reading
        finally:
            if handle is not None:
                handle.remove()


@dataclass
class GradientReading:
    """One closure, read by a `GradientReader`."""

    reader: GradientReader
    given_size: int | None
    seen: Seen = field(default_factory=lambda: Seen([]))
    sums: dict[str, Tensor] = field(default_factory=dict)

    @property
    def gradients_came(self) -> bool:
        """Whether the closure ran a backward pass itself."""
        return any(p.grad is not None for p in self.reader.parameters.values())

    @property
    def size(self) -> int:
        """How many examples, over every call of the model."""
        if self.given_size is not None:
            return self.given_size
        total = 0
        for root in self.seen.roots:
            tensors = [
                t for t in (*root.args, *root.kwargs.values(), root.output) if isinstance(t, Tensor) and t.dim() > 0
            ]
            total += tensors[0].shape[0] if tensors else 0
        return max(1, total)

    def differentiate(self, loss: Tensor, *, keep: bool = False) -> None:
        """Gradients of the loss in every parameter that requires one."""
        active = {n: p for n, p in self.reader.parameters.items() if p.requires_grad}
        # Through .grad, which is empty here: autograd hands that over faster than what `torch.autograd.grad` returns.
        torch.autograd.backward(loss, retain_graph=keep, inputs=list(active.values()))
        self.sums = {n: p.grad for n, p in active.items() if p.grad is not None}
        for p in active.values():
            p.grad = None

    def release(self) -> None:
        """Lets go of the graph."""
        self.seen.forget()

    def finish(self, *, scale: float = 1.0) -> Moments:
        """The gradients; no squares."""
        sums = self.sums
        if not sums:
            sums = {n: p.grad.detach() for n, p in self.reader.parameters.items() if p.grad is not None}
        sums = {n: g.to_dense() if g.is_sparse else g for n, g in sums.items()}
        if scale != 1.0:
            sums = {n: g / scale for n, g in sums.items()}
        return Moments(sums, {}, self.size)


def loss_of(result: Any) -> Tensor:
    """The loss in what a closure returned: a tensor, the first of a tuple or list, or the entry "loss" of a mapping.

    Raises:
        InputError: there is none, or it is not a single number.

    >>> float(loss_of((torch.tensor(2.0), "logits")))
    2.0
    """
    loss = result
    if isinstance(result, tuple | list) and result:
        loss = result[0]
    elif isinstance(result, Mapping):
        loss = result.get("loss")
    if not isinstance(loss, Tensor):
        raise InputError(
            f"the closure returned {type(result).__name__}, which holds no loss. Return the loss tensor, a tuple whose first "
            'entry is the loss, or a mapping with the key "loss"'
        )
    if loss.numel() != 1:
        raise InputError(
            f"the closure's loss has shape {tuple(loss.shape)}; reduce it to one number with .mean() or .sum()"
        )
    return loss


def with_loss(result: Any, loss: Tensor) -> Any:
    """What a closure returned, with another loss in the place of its own."""
    if isinstance(result, tuple | list):
        return type(result)([loss, *result[1:]]) if type(result) in (tuple, list) else (loss, *result[1:])
    if isinstance(result, Mapping):
        return {**result, "loss": loss}
    return loss
