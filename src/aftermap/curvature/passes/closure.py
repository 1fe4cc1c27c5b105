"""Reading a user's closure: what a natural-gradient optimiser needs from one training step.

The closure runs the model and returns a loss (or calls ``backward`` itself). Layer calls are recorded by hooks; as the
backward pass reaches a layer, its contribution to Σ g and Σ g² is made and its input let go, so memory stays that of the
activations plus a few per-example gradients of one layer.

The gradients are those of the loss as it is returned. For a mean over n examples an example's own gradient is n times
what arrives at its rows; the optimiser, which was told the reduction, knows that factor.

With BatchNorm in training mode the statistics of the batch couple the examples, so an example has no gradient of its
own. What is squared is then what arrives at an example's rows of a layer; the sum over examples is still the true
gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Batch
from aftermap.curvature.passes.backward import Accumulator, BackwardPass, LayerGradients
from aftermap.curvature.passes.fallback import per_example_products
from aftermap.curvature.passes.gradient_reader import ClosureStatistics
from aftermap.curvature.passes.plan import USED_OUTSIDE, Layer, ModelPlan, find_layers, inputs_of_call, plan_model
from aftermap.curvature.passes.record import (
    ClosureRecord,
    ForwardRecord,
    ModelCall,
    Signature,
    deepest_edges,
    record_closure,
)
from aftermap.curvature.rules.base import examples_per_chunk
from aftermap.errors import AftermapError, InputError, StatisticalWarning, UnsupportedError
from aftermap.models import autograd_errors_explained, call_model, evaluation_mode
from aftermap.params import named_parameters

__all__ = [
    "ClosureReader",
    "ClosureReading",
    "GradientMoments",
]

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 5e-3}


class GradientMoments(Accumulator):
    """The sums Σ g and Σ g² over the examples of one batch, for a layer or for layers that share a parameter.

    Args:
        layers: The numbers of the layers.
        names: The covered parameters of the layers.
    """

    def __init__(self, layers: tuple[int, ...], names: Sequence[str]):
        self.layers: tuple[int, ...] = layers
        self.names = tuple(names)
        self.sums: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}

    def add(self, gradients: LayerGradients) -> None:
        if not any(gradients.by_layer.values()):
            return
        plan, number = gradients.record.plan, self.layers[0]
        calls = gradients.by_layer[number]
        if len(self.layers) == 1 and len(calls) == 1:
            layout = plan.layers[number].layout
            call, arrived = calls[0]
            total, squares = call.fresh_rows().moments(arrived)
            for values, block in ((self.sums, total), (self.squares, squares)):
                values.update({n: v for n, v in layout.split(block).items() if n in self.names})
            return
        # The per-example gradients of several uses of a weight add up before the square.
        size = gradients.record.size
        stride = examples_per_chunk(sum(plan.layers[k].layout.size for k in self.layers))
        for start in range(0, size, stride):
            some = gradients.per_example(self.names, start, min(stride, size - start))
            for name, value in some.items():
                total, squares = value.sum((0, 1)), value.square().sum((0, 1))
                self.sums[name] = total if start == 0 else self.sums[name] + total
                self.squares[name] = squares if start == 0 else self.squares[name] + squares


class ClosureReader:
    """Reads closures that use a model.

    Args:
        model: Any module, which is unchanged between closures.
        names: The parameters whose statistics are wanted.
        for_matrix: A function that makes the accumulator of a layer with a weight matrix, whose block is read instead
            of squares. With None all layers give squares.
        gradients_only: Whether only gradients are taken; the calls then stay as they are for somebody who reads the
            graph afterwards.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        *,
        for_matrix: Callable[[int, Layer], Accumulator] | None = None,
        gradients_only: bool = False,
    ):
        self.model, self.names = model, list(names)
        self.parameters = {n: named_parameters(model)[n] for n in self.names}
        with evaluation_mode(model):  # Whether BatchNorm has a rule must not depend on the mode.
            self.layers = find_layers(model, self.names, batch_statistics=True)
        self.for_matrix, self.gradients_only = for_matrix, gradients_only
        self.plan: ModelPlan | None = None
        self.without_block: set[str] = set()  # The layers of these parameters give squares instead of a block.
        self.verified: set[Signature] = set()
        self.compare_next = True  # This tells whether all gradients of the next closure are compared with autograd's.
        self._warned: set[str] = set()

    @contextmanager
    def reading(self, size: int | None = None) -> Iterator[ClosureReading]:
        """Records the calls of the model inside; ``size`` overrides the number of examples."""
        reading = ClosureReading(self, size)
        watched = {n: self.parameters[n] for n in self.from_autograd()}
        try:
            with record_closure(self.model, self.layers, reading.on_gradient, watched) as record:
                reading.record = record
                yield reading
        except BaseException:
            reading.release()
            raise

    def from_autograd(self) -> list[str]:
        """Returns the parameters whose gradient is autograd's: all until they are compared once, later those without a rule."""
        if self.plan is None or self.compare_next or self.for_matrix is not None or self.gradients_only:
            return self.names
        return [n for n in self.names if n in self.plan.uncovered]

    def make_plan(self, reading: ClosureReading) -> ModelPlan:
        """Makes the plan from the first closure's inputs: batch dimensions and rules, verified on three examples."""
        looked = self._look(reading)
        plan = self.layers.without(reading.unverified_folds()) if looked is None else looked
        self.plan = plan.agree_over_processes(self.names)
        norms = nn.modules.batchnorm._BatchNorm
        coupled = [path for path, m in self.model.named_modules() if isinstance(m, norms) and m.training]
        if coupled:
            self.warn(
                f"{len(coupled)} BatchNorm layers ({', '.join(coupled[:3])}…) are in training mode: batch statistics couple "
                "the examples, so squared per-example gradients are those that arrive at an example's rows. Gradients "
                "are exact. To avoid this, freeze the statistics with .eval() on these layers or use GroupNorm"
            )
        return self.plan

    def look_again(self, plan: ModelPlan, reading: ClosureReading) -> dict[str, str]:
        """Returns the parameters whose rule does not hold for a closure that uses the network in a new way, with the reason.

        That sums agree with autograd does not show which rows belong to which example, and squares need it.
        """
        looked = self._look(reading)
        if looked is None:
            reasons = reading.unverified_folds()
        else:
            reasons = dict(looked.uncovered)
            other = [k for k, d in looked.batch_dimensions.items() if plan.batch_dimensions.get(k, 0) != d]
            for number, _ in other:
                reasons.update(dict.fromkeys(plan.layers[number].layout.names, "its batch is in another dimension"))
        return {n: why for n, why in reasons.items() if n in plan.layers_of_parameter}

    def _look(self, reading: ClosureReading) -> ModelPlan | None:
        """Returns what a few examples of the closure show; None where the model cannot be run on them.

        Then the batch is taken to come first, and sums are still compared with autograd's.
        """
        call = reading.model_call()
        inputs = None if call is None else inputs_of_call(self.model, call)
        if call is None or inputs is None:
            return None
        batch = Batch(inputs, None, None, reading.size)
        try:
            with evaluation_mode(self.model), torch.random.fork_rng(enabled=True):
                plan = plan_model(self.model, self.names, batch, flat_outputs=True)
        except UnsupportedError as error:
            self.warn(f"{error}. Squares are those of what arrives at an example's rows of each layer")
            return None
        except (AftermapError, RuntimeError, TypeError, ValueError, IndexError):
            self._check_batch_comes_first(batch, call)
            return None
        if [layer.name for layer in plan.layers] != [layer.name for layer in self.layers.layers]:
            return None
        # A parameter that only training uses was not verified here; its sum is, in the first step.
        reasons = {n: why for n, why in plan.uncovered.items() if n not in plan.unused}
        known = replace(self.layers, batch_dimensions=plan.batch_dimensions, unused=plan.unused)
        return known.without(reasons)

    def _check_batch_comes_first(self, batch: Batch, call: ModelCall) -> None:
        """Raises where a few examples do not have their share of the rows of the outputs: the rows are not those of examples.

        Raises:
            UnsupportedError: The examples are not the first dimension of inputs and outputs.
        """
        if call.output is None or call.output.dim() == 0:
            return
        size, rows = batch.size, len(call.output)
        few = 3 if size == 2 else 2
        try:
            with evaluation_mode(self.model), torch.random.fork_rng(enabled=True), torch.no_grad():
                of_few = len(call_model(self.model, batch.take(torch.arange(few) % size).inputs))
            wrong, seen = of_few * size != rows * few, f"{of_few} for {few} of them"
        except (AftermapError, RuntimeError, TypeError, ValueError, IndexError):
            wrong, seen = rows % size != 0, "it cannot be run on a few of them"
        if wrong:
            raise UnsupportedError(
                f"the network returned {rows} rows for what seem to be {size} examples, and {seen}: squared gradients of single examples "
                "need examples in the first dimension of its inputs and outputs (a network that takes [time, batch, …] can be wrapped "
                "in one that transposes). Where the batch cannot come first, use IVON or curvature='micro_batch'"
            )

    def warn(self, message: str) -> None:
        """Warns once for each message."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, StatisticalWarning, stacklevel=6)

    def accumulators(self, plan: ModelPlan) -> list[Accumulator]:
        """Returns what reads the gradients of one closure."""
        accumulators: list[Accumulator] = []
        for numbers in plan.tied_layers:
            if self.for_matrix is not None and self.has_block(plan, numbers[0]):
                accumulators.append(self.for_matrix(numbers[0], plan.layers[numbers[0]]))
                continue
            names = dict.fromkeys(n for k in numbers for n in plan.layers[k].layout.names if n not in plan.uncovered)
            accumulators.append(GradientMoments(numbers, list(names)))
        return accumulators

    def has_block(self, plan: ModelPlan, number: int) -> bool:
        """Tells whether a layer gives a block of its own: it has a weight matrix and shares no parameter with another."""
        rule, names = plan.layers[number].rule, plan.layers[number].layout.names
        fits = rule.matrix and not rule.one_hot and number in plan.whole_layers
        return self.for_matrix is not None and fits and self.without_block.isdisjoint(names)

    def give_up(self, plan: ModelPlan, reasons: Mapping[str, str]) -> ModelPlan:
        """Returns the plan from now on: these parameters are used in another way than it says, and have no rule after all."""
        self.plan = plan.without(reasons)
        name, reason = next(iter(reasons.items()))
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        if self.verified:  # In the first step it is part of the plan, later it is news.
            self.warn(
                f"{name}{more} is used in another way than in the steps before: {reason}. Its gradient is autograd's from "
                "now on, and its squares are made example by example"
            )
        return self.plan


@dataclass
class ClosureReading:
    """The reading of one closure as it goes by."""

    reader: ClosureReader
    given_size: int | None = None
    record: ClosureRecord = field(default_factory=ClosureRecord)
    closed: bool = False
    _early: list[tuple[int, Tensor]] = field(default_factory=list)
    _received: set[int] = field(default_factory=set)
    _pass: BackwardPass | None = None
    _edges: dict[int, int] = field(default_factory=dict)  # From a recorded call's number to its edge.
    _accumulators: list[Accumulator] = field(default_factory=list)
    _signature: Signature | None = None
    _size: int = 0

    def model_call(self) -> ModelCall | None:
        """Returns the one call of the whole model."""
        if len(self.record.model_calls) > 1:
            raise UnsupportedError(
                f"the closure called the model {len(self.record.model_calls)} times; per-example squares need one call per "
                "closure. For micro-batches use one `with opt.sampled_params():` block each and then opt.step()"
            )
        return self.record.model_calls[0] if self.record.model_calls else None

    @property
    def size(self) -> int:
        """The number of examples that the closure saw."""
        if self.given_size is not None or self._size:
            return self.given_size or self._size
        call = self.model_call()
        values = [] if call is None else [*call.args, *call.kwargs.values(), call.output]
        shapes = [tuple(v.shape) for v in values if isinstance(v, Tensor) and v.dim() > 0]
        shapes += [c.out_shape for c in self.record.calls[:1]]
        if not shapes:
            raise InputError(
                "the closure did not call the model that the optimiser was built for, so the number of examples is unknown. "
                "Call that model inside the closure, or pass batch_size="
            )
        self._size = shapes[0][0]
        return self._size

    @property
    def gradients_came(self) -> bool:
        """Whether the closure ran a backward pass itself, which leaves its gradients in ``.grad``."""
        return any(p.grad is not None for p in self.reader.parameters.values())

    def on_gradient(self, number: int, gradient: Tensor) -> None:
        """Is called by the backward pass with the gradient at the output of a layer's call."""
        if self.closed or self.reader.gradients_only or self.record.running or torch.is_grad_enabled():
            return  # It is not wanted, or not that of the loss; see `ClosureRecord`.
        if number in self._received:
            raise UnsupportedError(
                "a second backward pass went through the same forward pass; per-example squares need the sum of the losses "
                "before one backward pass"
            )
        self._received.add(number)
        if self.reader.plan is None:
            self._early.append((number, gradient))
        else:
            self._deliver(self.reader.plan, number, gradient)

    def _deliver(self, plan: ModelPlan, number: int, gradient: Tensor) -> None:
        backward = self._start(plan, None) if self._pass is None else self._pass
        # Calls that a checkpoint makes later, during the backward pass, and calls without a rule have no edge here.
        edge = self._edges.get(number)
        if edge is not None:
            call = self.record.calls[number]
            self.record.calls[number] = replace(call, inputs=call.inputs.new_empty(0))  # Its memory may go.
            del call
            with torch.no_grad():
                backward.receive(edge, gradient.detach()[None])

    def _start(self, plan: ModelPlan, root: Tensor | None) -> BackwardPass:
        """Returns the pass that the gradients of this closure arrive at, once all calls are known.

        Args:
            plan: The plan that says how the layers are read.
            root: The tensor that is differentiated. It is None where the closure does that itself; then the graph of
                the model's output is looked at.
        """
        reader, call = self.reader, self.model_call()
        if call is not None and call.output is not None and (root is None or reader.for_matrix is not None):
            root = (
                call.output
            )  # With blocks all gradients are autograd's, and a penalty outside the model changes no block.
        batch = Batch(None, None, None, self.size)
        outputs = torch.zeros(()) if root is None else root
        forward = ForwardRecord.make(reader.model, batch, outputs, plan, self.record.calls)
        if root is not None:
            self._signature = forward.signature
            outside = {name: USED_OUTSIDE for name, calls, uses, _ in self._signature if uses > calls}
            contradictions = {**forward.misfits, **outside}
            if contradictions:
                plan = reader.give_up(plan, contradictions)
                forward = ForwardRecord.make(reader.model, batch, outputs, plan, self.record.calls)
        elif forward.misfits:
            reader.give_up(plan, forward.misfits)
        by_call = {id(c.call): c.edge for calls in forward.calls.values() for c in calls}
        self._edges = {n: by_call[id(c)] for n, c in enumerate(self.record.calls) if id(c) in by_call}
        self._accumulators = reader.accumulators(plan)
        for accumulator in self._accumulators:
            accumulator.start_batch(forward)
        forward.outputs = torch.zeros(())  # The graph belongs to the closure.
        self._pass = BackwardPass(forward, self._accumulators)
        dtype = next(iter(reader.parameters.values())).dtype
        self._pass.start_vectors(torch.empty(1, 0, dtype=dtype), for_the_last_time=True)
        return self._pass

    @autograd_errors_explained()
    def differentiate(self, loss: Tensor, *, keep: bool = False) -> None:
        """Runs one backward pass from the loss to the layers (and to parameters that need autograd's own gradient)."""
        reader = self.reader
        if reader.plan is not None and not reader.gradients_only and self.record.calls:
            self._start(reader.plan, loss)
        names = set(reader.from_autograd())
        if self._signature is not None and self._signature not in reader.verified:
            names = set(reader.names)
        parameters = {n: p for n, p in reader.parameters.items() if n in names and p.requires_grad}
        edges = [c.edge for c in self.record.calls]
        # Autograd holds what it is asked for until the end; on its way to the deepest edges it passes by all others.
        wanted: list[Any] = [edges[n] for n in sorted(deepest_edges(edges))]
        wanted += [c.output for c in self.record.model_calls if c.output is not None and parameters]
        if wanted or parameters:  # The hooks take what arrives at layers and outputs.
            gradients = torch.autograd.grad(loss, [*parameters.values(), *wanted], retain_graph=keep, allow_unused=True)
            for name, gradient in zip(parameters, gradients, strict=False):
                if gradient is not None:
                    self.record.parameter_gradients[name] = gradient

    def release(self) -> None:
        """Lets go of the graph: its nodes hold the hooks, and the hooks hold this reading, a circle that Python cannot see."""
        self.closed = True
        self.record.release()
        self._early.clear()
        self._pass = None
        self._accumulators = []

    def finish(self, *, scale: float = 1.0) -> ClosureStatistics:
        """Completes the sums, after the hooks are gone and while the parameters are still those of the closure.

        Args:
            scale: The scale of the loss that was differentiated against the one meant (a gradient scaler's).
        """
        self.closed = True
        reader, gradients = self.reader, self.record.parameter_gradients
        is_first = reader.plan is None
        plan = reader.make_plan(self) if reader.plan is None else reader.plan
        early, self._early = self._early, []
        for number, gradient in early:
            self._deliver(plan, number, gradient)
        del early
        if self._pass is not None:
            with torch.no_grad():
                self._pass.end_vectors()
        if reader.gradients_only:
            return ClosureStatistics({n: g.detach() / scale for n, g in gradients.items()}, {}, self.size)
        statistics = self._collect()
        plan = reader.plan or plan  # A rule may have been given up on the way.
        read = {*statistics.sums, *(n for k in statistics.blocks for n in plan.layers[k].layout.names)}
        unread = [n for n in plan.layers_of_parameter if n not in read and self._gradient_of(n) is not None]
        wrong = dict.fromkeys(unread, "its layer's calls were not seen")
        if self._signature is None or self._signature not in reader.verified:
            wrong |= (
                {} if is_first else self._reasons_against(plan)
            )  # The plan may just have been made from this closure.
            plan = self._compare(plan, statistics, gradients, wrong)
        elif wrong:
            plan = self._give_up(plan, statistics, wrong)
        rest = [n for n in reader.names if n in plan.uncovered and self._gradient_of(n) is not None]
        for name in rest:
            statistics.sums.pop(name, None)
            statistics.squares.pop(name, None)
        if rest:
            statistics.squares.update(self._squares_without_rule(rest))
        for name in reader.names:
            arrived = self._gradient_of(name) if name in rest else gradients.get(name)
            if arrived is not None and (name not in statistics.sums or reader.for_matrix is not None):
                arrived = arrived.to_dense() if arrived.is_sparse else arrived
                statistics.sums[name] = arrived.detach().clone() if scale != 1.0 else arrived.detach()
        if scale != 1.0:
            for values, by in ((statistics.sums, scale), (statistics.squares, scale**2)):
                if values:  # K-FAC asks for no squares.
                    torch._foreach_div_(list(values.values()), by)
            statistics.blocks = {
                k: b.with_tensors({**b.tensors(), "outputs": b.tensors()["outputs"] / scale**2})
                for k, b in statistics.blocks.items()
            }
        return statistics

    def _gradient_of(self, name: str) -> Tensor | None:
        """Returns autograd's gradient, as it arrived, or as the closure's own backward pass left it."""
        gradient = self.record.parameter_gradients.get(name)
        return self.reader.parameters[name].grad if gradient is None else gradient

    def _collect(self) -> ClosureStatistics:
        statistics = ClosureStatistics({}, {}, self.size)
        reached = {self.record.calls[number].layer for number in self._received}
        for accumulator in self._accumulators:
            if isinstance(accumulator, GradientMoments):
                statistics.sums.update(accumulator.sums)
                statistics.squares.update(accumulator.squares)
            elif accumulator.layers and accumulator.layers[0] in reached:
                (block,) = accumulator.blocks()
                statistics.blocks[accumulator.layers[0]] = block
        return statistics

    def _reasons_against(self, plan: ModelPlan) -> dict[str, str]:
        """Returns the parameters whose rows cannot be told apart by example, in a closure that uses the network in a new way."""
        return self.unverified_folds() if self._signature is None else self.reader.look_again(plan, self)

    def unverified_folds(self) -> dict[str, str]:
        """Returns the parameters of layers that were called on several rows for each example, nobody knows in which order."""
        folded = {c.layer for c in self.record.calls if c.out_shape and c.out_shape[0] != self.size}
        layers = self.reader.layers.layers
        reason = "it cannot be verified which rows of its layer belong to which example"
        return {name: reason for number in sorted(folded) for name in layers[number].layout.names}

    def _compare(
        self,
        plan: ModelPlan,
        statistics: ClosureStatistics,
        gradients: Mapping[str, Tensor],
        wrong: dict[str, str],
    ) -> ModelPlan:
        """Compares the rules' sums with autograd's gradients, and returns the plan without the rules that do not hold.

        Args:
            plan: The plan that the statistics were made with.
            statistics: The sums, squares and blocks.
            gradients: Autograd's gradients by name.
            wrong: The parameters whose rule is known not to hold, with the reason.
        """
        reader = self.reader
        for name, total in statistics.sums.items():
            if name not in gradients:
                continue
            gradient = gradients[name].detach()
            expected = (gradient.to_dense() if gradient.is_sparse else gradient).to(total.dtype)
            tolerance = 5e-2 if self._is_low_precision else _TOLERANCE.get(total.dtype, 5e-2)
            error, size = float((total - expected).norm()), float(expected.norm())
            # This is not "error > ...", since a NaN is wrong, too; but then autograd's is not finite either, and the
            # step is skipped.
            if error > tolerance * size + 1e3 * torch.finfo(total.dtype).tiny:
                wrong[name] = USED_OUTSIDE
        compared = bool(gradients)
        # A closure that ran its own backward pass shows autograd's gradients only to hooks that were there before. Where
        # it shows no graph either (no call of the whole model, or several outputs), every step is compared.
        reader.compare_next = not compared or self._signature is None
        if wrong:
            return self._give_up(plan, statistics, wrong)
        if compared and self._signature is not None:
            reader.verified.add(self._signature)
        return plan

    def _give_up(self, plan: ModelPlan, statistics: ClosureStatistics, wrong: Mapping[str, str]) -> ModelPlan:
        """Gives up rules that do not hold, with the blocks that were made by them."""
        spoilt = [k for k in statistics.blocks if not wrong.keys().isdisjoint(plan.layers[k].layout.names)]
        for number in spoilt:
            del statistics.blocks[number]
        return self.reader.give_up(plan, wrong)

    @property
    def _is_low_precision(self) -> bool:
        """Whether the outputs are 16-bit numbers (autocast)."""
        half = (torch.bfloat16, torch.float16)
        return any(c.output is not None and c.output.dtype in half for c in self.record.model_calls)

    def _squares_without_rule(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns Σ g² of parameters without a rule: the model is run again, one example at a time, in evaluation mode."""
        call, reader = self.model_call(), self.reader
        inputs = None if call is None else inputs_of_call(reader.model, call)
        if call is None or call.gradient is None or inputs is None:
            reason = "unknown" if reader.plan is None else reader.plan.uncovered.get(names[0], "unknown")
            raise UnsupportedError(
                f"{names[0]} has no layer rule ({reason}), and per-example gradients need the closure to "
                "call the whole model once and the model to return one tensor. Freeze the parameter, or use IVON or "
                "curvature='micro_batch'"
            )
        size = self.size
        squares = {n: torch.zeros_like(reader.parameters[n]) for n in names}
        stride = examples_per_chunk(sum(reader.parameters[n].numel() for n in names))
        vectors = call.gradient.detach()[None]
        batch = Batch(inputs, None, None, size)
        batch = batch if reader.plan is None else reader.plan.marked(batch)
        with torch.no_grad(), evaluation_mode(reader.model):
            for start in range(0, size, stride):
                length = min(stride, size - start)
                products = per_example_products(reader.model, names, batch, vectors, start, length)
                for name, value in products.items():
                    squares[name] += value.square().sum((0, 1)).to(squares[name].dtype)
        for name in names:
            gradient = self._gradient_of(name)
            if gradient is not None and bool(gradient.any()) and not bool(squares[name].any()):
                raise UnsupportedError(
                    f"{name} has a gradient that does not come through the model's outputs (it is used in the loss only, or only in "
                    "training mode), so it has no gradient of single examples. Use it inside the model, freeze it or leave it to "
                    "another optimiser, or use IVON or curvature='micro_batch'"
                )
        return squares
