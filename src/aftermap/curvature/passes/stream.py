"""The stream: batches pass through the model once, vectors through its graph, and accumulators sum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Batch, Unpack, iterate
from aftermap.curvature.passes.backward import Accumulator, BatchStep, deliver
from aftermap.curvature.passes.plan import Probe
from aftermap.curvature.passes.record import Call, capture
from aftermap.curvature.passes.vectors import make_vectors, resolve_kind
from aftermap.curvature.rules.scale import keeping
from aftermap.errors import DataError
from aftermap.likelihoods import Likelihood
from aftermap.linalg import TERMS_PER_PART
from aftermap.models import call_model, check_device, check_outputs, gradients_for
from aftermap.progress import progress

__all__ = ["Seen", "Stream", "is_convolutional"]

# Back-propagated at once: so many numbers of gradients (8 MB in float32).
_GRADIENT_NUMBERS = 1 << 21
# Examples are worked on together while their layers' outputs hold at most this many numbers (8 MB in float32), but never
# fewer than so many: small pieces waste time on overhead.
_PIECE_NUMBERS = 1 << 21
_LEAST_EXAMPLES = 16


def is_convolutional(model: nn.Module) -> bool:
    """Whether vectors should go one by one: PyTorch's vectorised backward pass is slow for these layers."""
    slow = (nn.modules.conv._ConvNd, nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd, nn.RNNBase)
    return any(isinstance(m, slow) for m in model.modules())


@dataclass
class Seen:
    """What passed by: data (weights count as copies), Σ −log p, outputs per datum, the kind of vectors."""

    n_data: float = 0.0
    loss: float = 0.0
    n_outputs: int = 0
    kind: str = ""


@dataclass(frozen=True)
class Stream:
    """A model with its data, ready to be passed over.

    Attributes:
        curvature: kind of vectors, or "auto".
        samples: draws per datum for the random kinds.
        chunk: vectors at a time; None chooses by memory.
        passes: how often the data are gone through (an augmenting loader gives new samples of the same data).
        split: large batches may be worked on in pieces (not where a batch is averaged over, as in KFRA).
    """

    model: nn.Module
    data: Iterable[Any]
    likelihood: Likelihood
    names: Sequence[str]
    curvature: str = "auto"
    samples: int = 1
    chunk: int | None = None
    passes: int = 1
    unpack: Unpack | None = None
    generator: torch.Generator | None = None
    show_progress: bool | None = None
    split: bool = True

    def batches(self, description: str) -> Iterator[Batch]:
        """Every batch of every pass, checked."""
        device, dtype = check_device(self.model)
        for number in range(self.passes):
            label = description if self.passes == 1 else f"{description} {number + 1}/{self.passes}"
            bar = progress(self.data, description=label, enabled=self.show_progress)
            yield from iterate(bar, device=device, dtype=dtype, unpack=self.unpack)

    def pieces(self, found: Probe, description: str) -> Iterator[Batch]:
        """Batches in pieces whose gradients take little memory; sums over data do not notice."""
        size = min(TERMS_PER_PART, max(_LEAST_EXAMPLES, _PIECE_NUMBERS // max(1, found.numbers)))
        for batch in self.batches(description):
            if not self.split or batch.size <= size:
                yield batch
            else:
                count = math.ceil(batch.size / size)
                yield from batch.pieces(math.ceil(batch.size / count))

    def first(self) -> Batch:
        """The first batch; the data are asked anew for the rest."""
        device, dtype = check_device(self.model)
        for batch in iterate(self.data, device=device, dtype=dtype, unpack=self.unpack):
            return batch
        raise DataError("the data hold no example: every batch is empty")

    def run(self, found: Probe, accumulators: Sequence[Accumulator], description: str) -> Seen:
        """Passes over the data; returns what was seen, per pass."""
        seen = Seen()
        slow = is_convolutional(self.model)
        # One set of hooks for all batches, unless per-example gradients of the rest go through the model in between.
        once = not found.reasons and not found.sites.attention
        with gradients_for(self.model, self.names), keeping(), self._listening(found, once) as all_calls:
            for batch in self.pieces(found, description):
                with nullcontext(all_calls) if once else capture(found.sites) as calls:
                    calls.clear()
                    outputs = call_model(self.model, batch.inputs)
                self._count(outputs, batch, seen)
                step = BatchStep.make(self.model, batch, outputs, found.sites, found.by_parameter, calls, found.axes)
                calls.clear()
                self._vectors(step, batch, accumulators, seen, batched=not slow)
        seen.n_data /= self.passes
        seen.loss /= self.passes
        return seen

    def _listening(self, found: Probe, once: bool) -> AbstractContextManager[list[Call]]:
        return capture(found.sites) if once else nullcontext([])

    def run_loss(self) -> Seen:
        """Only counts the data and sums their loss."""
        seen = Seen(kind="exact")
        with torch.no_grad():
            for batch in self.batches("loss"):
                outputs = call_model(self.model, batch.inputs)
                self._count(outputs, batch, seen)
        seen.n_data /= self.passes
        seen.loss /= self.passes
        return seen

    def _count(self, outputs: Tensor, batch: Batch, seen: Seen) -> None:
        """Checks a batch's outputs and targets, and adds it to what was seen."""
        check_outputs(outputs, batch.size)
        if batch.targets is None:
            raise DataError("a batch has no targets; curvature is a curvature of the loss, which needs them")
        self.likelihood.check(outputs.detach(), batch.targets)
        losses = self.likelihood.nll(outputs.detach(), batch.targets)
        seen.n_data += batch.size if batch.weight is None else float(batch.weight.sum())
        seen.loss += float((losses if batch.weight is None else losses * batch.weight).sum())
        seen.n_outputs = math.prod(outputs.shape[1:])

    def _vectors(
        self, step: BatchStep, batch: Batch, accumulators: Sequence[Accumulator], seen: Seen, *, batched: bool
    ) -> None:
        outputs = step.outputs.detach()
        seen.kind = resolve_kind(self.curvature, outputs)
        for each in accumulators:
            each.on_batch(step)
        vectors = make_vectors(
            seen.kind,
            self.likelihood,
            outputs,
            batch.targets,
            weight=batch.weight,
            samples=self.samples,
            generator=self.generator,
        )
        for call in (c for calls in step.calls.values() for c in calls):
            call.reused = vectors.count > 2
        done = 0
        for part in vectors.chunks(self._chunk(step, batched=batched)):
            done += len(part)
            keep = done < vectors.count
            if not batched or len(part) == 1:
                deliver(step, part, accumulators, keep=keep)
                continue
            for moved in step.backpropagate(part, batched=True, keep=keep):
                for each in accumulators:
                    each.on_vectors(moved)
                del moved

    def _chunk(self, step: BatchStep, *, batched: bool) -> int:
        """How many vectors are made at a time, and back-propagated at a time where they go together."""
        if self.chunk is not None:
            return self.chunk
        calls = [call for calls in step.calls.values() for call in calls] if batched else []
        numbers = sum(math.prod(call.call.out_shape) for call in calls) + step.outputs.numel()
        return max(1, _GRADIENT_NUMBERS // max(1, numbers))
