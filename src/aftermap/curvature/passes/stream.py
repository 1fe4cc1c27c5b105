"""The stream: batches pass through the model once, vectors through its graph, and accumulators sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Batch, Unpack, iterate
from aftermap.curvature.passes.backward import Accumulator, BackwardPass
from aftermap.curvature.passes.block import Block
from aftermap.curvature.passes.checkpoint import Checkpoint, ResumablePass
from aftermap.curvature.passes.counts import DataCounts
from aftermap.curvature.passes.plan import ModelPlan, PlanCheck, PlanContradicted
from aftermap.curvature.passes.record import ForwardRecord, record_calls
from aftermap.curvature.passes.vectors import make_vectors, resolve_kind
from aftermap.distributed import all_reduce_, fail_together, from_any_process, is_distributed
from aftermap.errors import DataError
from aftermap.likelihoods import Likelihood
from aftermap.likelihoods.discrete import are_probabilities
from aftermap.linalg import TERMS_PER_PART
from aftermap.models import (
    autograd_errors_explained,
    call_model,
    check_device,
    check_not_sharded,
    check_outputs,
    only_require_grad,
)
from aftermap.progress import progress

__all__ = ["Choose", "CurvatureProblem", "DataCounts", "first_batch"]

# This many numbers of gradients are back-propagated at once (8 MB in float32).
_GRADIENT_NUMBERS = 1 << 21
# Examples are worked on together while their layers' outputs hold at most this many numbers (8 MB in float32), but never
# fewer than so many: small pieces waste time on overhead.
_PIECE_NUMBERS = 1 << 21
_LEAST_EXAMPLES = 16
# A process without data plans with so many examples of another one: enough to tell a batch from its examples.
_FEW_EXAMPLES = 4
Choose = Callable[[Batch], Batch | None]  # some examples of a batch; None where none is chosen


def first_batch(model: nn.Module, data: Iterable[Any], unpack: Unpack | None, *, together: bool = False) -> Batch:
    """Returns the first batch that holds an example; the data are asked anew for the rest.

    Args:
        model: The network, for its device and dtype.
        data: The batches of this process.
        unpack: What turns a batch of another form into (inputs, targets).
        together: Whether all processes of a group call this at once. One without data then gets some examples of another.

    Raises:
        DataError: There is none; with ``together``, on no process.
    """
    if together and is_distributed():
        return _lent_batch(model, data, unpack)
    device, dtype = check_device(model)
    for batch in iterate(data, device=device, dtype=dtype, unpack=unpack):
        return batch
    raise DataError("the data hold no example: every batch is empty")


def _lent_batch(model: nn.Module, data: Iterable[Any], unpack: Unpack | None) -> Batch:
    """Returns the first batch of this process, or else some examples of the first process that has one."""
    check_not_sharded(model.parameters())
    device, dtype = check_device(model)
    first: Batch | None = None
    with fail_together("looking at the first batch"):
        batches = iterate(data, device=device, dtype=dtype, unpack=unpack, may_be_empty=True)
        first = next(iter(batches), None)
        few = (
            None if first is None else first.take(torch.arange(min(first.size, _FEW_EXAMPLES))).to(torch.device("cpu"))
        )
    lent: Batch | None = from_any_process(few)
    if lent is None:
        raise DataError("the data hold no example: every batch of every process is empty")
    return lent.to(device) if first is None else first


@dataclass(frozen=True)
class CurvatureProblem:
    """A model with its data, its plan and the options of a fit, ready to be passed over.

    Attributes:
        model: The network.
        data: Batches of (x, y).
        likelihood: The likelihood of the targets.
        names: The selected parameters.
        plan: The plan that says how the layers are read.
        curvature: The kind of vectors, or "auto".
        approach: The way in which Kronecker factors treat shared weights: "expand" or "reduce".
        samples: The number of draws for each datum, for the random kinds of vectors.
        chunk: The number of vectors at a time; None chooses by memory.
        passes: The number of times that the data are gone through (an augmenting loader gives new samples of the same
            data).
        rank: The rank of a low-rank approximation; None keeps all directions.
        subset_size: The number of examples that a structure draws which does not use all.
        small_block: The size up to which norm layers and parameters without a rule get a full block.
        sums_dtype: The dtype of the sums.
        unpack: A function that turns a batch of another form into (inputs, targets).
        generator: The source of the random kinds of vectors.
        show_progress: Whether to show a progress bar. None shows it on a terminal.
        checkpoint: The folder that keeps the sums, so that a fit that was killed goes on; None keeps none.
    """

    model: nn.Module
    data: Iterable[Any]
    likelihood: Likelihood
    names: Sequence[str]
    plan: ModelPlan
    curvature: str = "auto"
    approach: str = "expand"
    samples: int = 1
    chunk: int | None = None
    passes: int = 1
    rank: int | None = 50
    subset_size: int = 300
    small_block: int = 1024
    sums_dtype: torch.dtype = torch.float32
    unpack: Unpack | None = None
    generator: torch.Generator | None = None
    show_progress: bool | None = None
    checkpoint: Checkpoint | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The selected parameters and their shapes."""
        owned = dict(self.model.named_parameters())
        return {n: tuple(owned[n].shape) for n in self.names}

    @cached_property
    def device(self) -> torch.device:
        """The device of the model."""
        return check_device(self.model)[0]

    @property
    def model_dtype(self) -> torch.dtype:
        """The dtype of the model's parameters."""
        return check_device(self.model)[1]

    def load_or_make(self, name: str, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Returns tensors that are made once in a fit; after a kill they are those of the checkpoint."""
        return make() if self.checkpoint is None else self.checkpoint.load_or_make(name, make)

    @autograd_errors_explained()
    def run(
        self,
        accumulators: Sequence[Accumulator],
        description: str,
        *,
        whole_batches: bool = False,
        choose: Choose | None = None,
    ) -> tuple[tuple[Block, ...], DataCounts]:
        """Passes over the data with these accumulators, and returns their blocks.

        Args:
            accumulators: The accumulators that sum.
            description: The words beside the progress bar.
            whole_batches: Whether batches are not worked on in pieces (where a batch is averaged over, as in KFRA).
            choose: A function that takes some examples of a batch, or None for none of them; without it all pass by.

        Returns:
            The blocks of the accumulators and what passed by, both for one pass over the data of this process.

        Raises:
            PlanContradicted: A batch, of this process or of another, used the network in another way than the plan says.
        """
        counts, check = DataCounts(), PlanCheck(self.plan)
        reasons: dict[str, str] = {}
        batch_number = 1
        resumed = None if self.checkpoint is None else self._resumed(self.checkpoint, description, accumulators, counts)
        with fail_together(f"summing: {description}"):
            try:
                with only_require_grad(self.model, self.names):
                    for batch in self._pieces(description, whole_batches, choose, resumed):
                        with record_calls(self.plan) as calls:
                            outputs = call_model(self.model, batch.inputs)
                        self._count(outputs, batch, counts)
                        record = ForwardRecord.make(self.model, batch, outputs, self.plan, calls)
                        del calls, outputs
                        check.check(record)
                        counts.used = counts.used | check.used
                        self._back_propagate(record, accumulators, counts.kind)
                        del record
            except PlanContradicted as contradicted:
                reasons, batch_number = contradicted.reasons, contradicted.batch
        reasons = self._reasons_of_all_processes(reasons)
        if reasons:
            raise PlanContradicted(reasons, batch_number)
        blocks = tuple(block for accumulator in accumulators for block in accumulator.blocks())
        if self.passes > 1:
            blocks = tuple(block.scaled(1 / self.passes) for block in blocks)
            counts.n_data, counts.loss = counts.n_data / self.passes, counts.loss / self.passes
        if is_distributed():
            counts.agree_over_processes(self.names)
        return blocks, counts

    def sum_loss(self, look: Callable[[Batch, Tensor], None] | None = None) -> DataCounts:
        """Counts the data and sums their loss, and nothing else.

        Args:
            look: A function that is handed every batch of this process with its outputs.
        """
        counts = DataCounts(kind="exact", used=frozenset(self.names))
        with fail_together("summing the loss"), torch.no_grad():
            for batch in self._batches("loss"):
                outputs = call_model(self.model, batch.inputs)
                self._count(outputs, batch, counts)
                if look is not None:
                    look(batch, outputs)
        counts.n_data, counts.loss = counts.n_data / self.passes, counts.loss / self.passes
        if is_distributed():
            counts.agree_over_processes(self.names)
        return counts

    def _resumed(
        self, checkpoint: Checkpoint, description: str, accumulators: Sequence[Accumulator], counts: DataCounts
    ) -> ResumablePass:
        """Returns the pass that goes on from the checkpoint."""
        return checkpoint.start_pass(
            description, accumulators, counts, lambda: self._batches(f"{description}: comparing"), self.generator
        )

    def _batches(self, description: str) -> Iterator[Batch]:
        """Yields every batch of every pass, checked; a process may have none where others have some."""
        device, dtype = check_device(self.model)
        for number in range(self.passes):
            label = description if self.passes == 1 else f"{description} {number + 1}/{self.passes}"
            bar = progress(self.data, description=label, enabled=self.show_progress)
            batches = iterate(bar, device=device, dtype=dtype, unpack=self.unpack, may_be_empty=is_distributed())
            yield from map(self.plan.marked, batches)

    def _pieces(
        self, description: str, whole_batches: bool, choose: Choose | None, resumed: ResumablePass | None
    ) -> Iterator[Batch]:
        """Yields batches in pieces whose gradients take little memory; sums over data do not notice."""
        if resumed is not None and resumed.nothing_left:
            return
        batches = self._batches(description)
        for whole in batches if choose is None else filter(None, map(choose, batches)):
            batch = whole if resumed is None else resumed.rest_of(whole, whole_batches)
            if batch is None:
                continue
            fitting = _PIECE_NUMBERS // self.plan.numbers_per_example(batch)
            size = min(TERMS_PER_PART, max(_LEAST_EXAMPLES, fitting))
            if whole_batches or batch.size <= size:
                yield batch
            else:
                yield from batch.pieces(math.ceil(batch.size / math.ceil(batch.size / size)))
            if resumed is not None:
                resumed.finish_batch()  # The accumulators have had all pieces when the next one is asked for.
        if resumed is not None:
            resumed.finish()

    def _count(self, outputs: Tensor, batch: Batch, counts: DataCounts) -> None:
        """Checks a batch's outputs and targets, and adds it to what passed by."""
        check_outputs(outputs, batch.size)
        if batch.targets is None:
            raise DataError("a batch has no targets; curvature is a curvature of the loss, which needs them")
        self.likelihood.check(outputs.detach(), batch.targets)
        losses = self.likelihood.nll(outputs.detach(), batch.targets)
        if not counts.n_outputs:
            counts.probabilities = are_probabilities(self.likelihood, outputs)
        counts.n_data += batch.size if batch.weight is None else float(batch.weight.sum())
        counts.loss += float((losses if batch.weight is None else losses * batch.weight).sum())
        counts.n_outputs = math.prod(outputs.shape[1:])
        counts.kind = resolve_kind(self.curvature, outputs)

    def _back_propagate(self, record: ForwardRecord, accumulators: Sequence[Accumulator], kind: str) -> None:
        """Sends the vectors of a batch through its graph, one by one or all together."""
        batch, outputs, together = record.batch, record.outputs.detach(), self.plan.vectors_go_together
        for accumulator in accumulators:
            accumulator.start_batch(record)
        vectors = make_vectors(
            kind,
            self.likelihood,
            outputs,
            batch.targets,
            weight=batch.weight,
            samples=self.samples,
            generator=self.generator,
        )
        calls = [call for calls in record.calls.values() for call in calls]
        for call in calls:
            call.cached = vectors.count > 2
        numbers = outputs.numel() + (sum(math.prod(c.call.out_shape) for c in calls) if together else 0)
        chunk = self.chunk or max(1, _GRADIENT_NUMBERS // max(1, numbers))
        backward, done = BackwardPass(record, accumulators), 0
        for part in vectors.chunks(chunk):
            done += len(part)
            with torch.no_grad():
                backward.run(part, together=together, keep_graph=done < vectors.count)

    def _reasons_of_all_processes(self, reasons: dict[str, str]) -> dict[str, str]:
        """Returns what any process noticed, since all of them must begin again with the same plan."""
        contradicted = torch.tensor([n in reasons for n in self.names], dtype=torch.int64)
        all_reduce_([contradicted])
        elsewhere = "its rule does not hold on the data of another process"
        return {n: reasons.get(n, elsewhere) for n, c in zip(self.names, contradicted.tolist(), strict=True) if c}
