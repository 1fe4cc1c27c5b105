"""Samples of the training or validation data: some of the examples, chosen in one pass over any stream of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Batch
from aftermap.draws import uniform_like
from aftermap.errors import DataError, StatisticalWarning, warn_caller
from aftermap.likelihoods import Likelihood
from aftermap.models import call_model, evaluating, explain_model_errors

__all__ = ["FiniteExamples", "informative_examples", "random_examples"]

_TOLERATED = 0.05  # share of examples whose outputs may be not finite
_Part = tuple[Tensor, Tensor, Batch]  # priorities, weights of the choice, examples


class FiniteExamples:
    """Batches without the examples for which a network's outputs are not finite; those are counted, and told at the end.

    Args:
        model: The network.
        batches: The data.
        what: What the data are called in messages.
        quiet: Whether nothing is said of a few such examples, because it was said before.

    Raises:
        DataError: The outputs are not finite for more than one example in twenty.
        InputError: The network does not accept the inputs.

    Warns:
        StatisticalWarning: The outputs are not finite for a few examples.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Batch], what: str, *, quiet: bool = False):
        self.model, self.batches, self.what, self.quiet = model, batches, what, quiet
        self.seen = self.left_out = 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            with explain_model_errors(self.model, lambda given=batch.inputs: given), torch.no_grad():  # type: ignore[misc]
                outputs = call_model(self.model, batch.inputs)
            finite = torch.isfinite(outputs).flatten(1).all(1).cpu()
            count = int(finite.sum())
            self.seen, self.left_out = self.seen + batch.size, self.left_out + batch.size - count
            if count:
                yield batch if count == batch.size else batch.take(torch.nonzero(finite)[:, 0])
        self._tell()

    def _tell(self) -> None:
        problem = f"the network's outputs are not finite for {self.left_out} of {self.seen} {self.what} examples"
        if self.left_out > _TOLERATED * self.seen:
            raise DataError(f"{problem}. Look at these inputs and at the weights of the network")
        if self.left_out and not self.quiet:
            warn_caller(f"{problem}, which are left out. Look at them", StatisticalWarning)


def random_examples(batches: Iterable[Batch], limit: int, generator: torch.Generator | None = None) -> list[Batch]:
    """Draws some of the examples, each equally likely; all of them, in their order, where there are no more than ``limit``.

    Args:
        batches: The data; they are passed over once, and no more than the sample is held in memory.
        limit: The largest number of examples.
        generator: The source of the random choice.
    """
    parts: list[_Part] = []
    for batch in batches:
        priority = uniform_like(torch.empty(batch.size, dtype=torch.float64), generator)
        parts, _ = _largest([*parts, (priority, priority, batch)], limit, 0.0)
    return [batch for _, _, batch in _joined(parts)]


def informative_examples(
    model: nn.Module,
    batches: Iterable[Batch],
    likelihood: Likelihood,
    limit: int,
    generator: torch.Generator | None = None,
) -> list[Batch]:
    r"""Draws a sample of the data with weights, so that weighted sums over it estimate sums over all data without bias.

    Most training data of a fitted classifier have Λ_n ≈ 0 and say nothing. Priority sampling keeps the ``limit`` examples with
    the largest tr Λ_n / u_n, u_n uniform, and gives each the weight max(1, z / tr Λ_n) with z the largest priority left out.
    One pass and memory for the sample; with no more data than ``limit`` all are kept, with weight one.

    Args:
        model: The network.
        batches: The data.
        likelihood: The likelihood whose curvature Λ decides.
        limit: The largest number of examples.
        generator: The source of u.

    Returns:
        Batches with weights.

    Raises:
        DataError: The network is certain of everything: Λ = 0.

    References:
        Duffield, Lund and Thorup 2007, Priority sampling for estimation of arbitrary subset sums.
    """
    parts: list[_Part] = []
    left_out = 0.0
    with evaluating(model), torch.no_grad():
        for batch in batches:
            outputs = call_model(model, batch.inputs)
            likelihood.check(outputs, batch.targets)
            root = likelihood.hessian_root(outputs, batch.targets)
            trace = root.to(torch.float64).square().flatten(1).sum(1).cpu()
            if batch.weight is not None:
                trace = trace * batch.weight.to(trace)
            # In (0, 1]: a priority is finite.
            parts.append((trace / (1 - uniform_like(trace, generator)), trace, batch))
            parts, left_out = _largest(parts, limit, left_out)
    parts = [part for part in parts if bool((part[1] > 0).any())]
    if not parts:
        raise DataError(
            "the curvature of the loss is zero at every example (the network is certain of all its answers), so the data "
            "determine nothing. Use validation data: tune(val_loader)"
        )
    return [_weighted(trace, batch, left_out) for _, trace, batch in _joined(parts)]


def _largest(parts: list[_Part], limit: int, left_out: float) -> tuple[list[_Part], float]:
    """Returns the examples with the largest priorities, and the largest priority that was ever left out."""
    every = torch.cat([p for p, _, _ in parts])
    if len(every) <= limit:
        return parts, left_out
    threshold = float(every.topk(limit + 1).values[-1])
    largest = []
    for priority, trace, batch in parts:
        index = torch.nonzero(priority > threshold)[:, 0]
        if len(index) == len(priority):
            largest.append((priority, trace, batch))
        elif len(index):
            largest.append((priority[index], trace[index], batch.take(index)))
    return largest, max(left_out, threshold)


def _joined(parts: Sequence[_Part], size: int = 50) -> list[_Part]:
    """Joins few examples of many batches to larger batches, where their shapes agree."""
    joined: list[_Part] = []
    group: list[_Part] = []
    for part in (*parts, None):
        if part is not None and sum(b.size for _, _, b in group) < size:
            group.append(part)
            continue
        joined += _merged(group)
        group = [] if part is None else [part]
    return joined


def _merged(group: list[_Part]) -> list[_Part]:
    batches = [b for _, _, b in group]
    try:
        inputs, targets = (_cat([getattr(b, key) for b in batches]) for key in ("inputs", "targets"))
    except RuntimeError:  # sequences of different lengths stay apart
        return group
    whole = [torch.ones(b.size) if b.weight is None else b.weight.cpu() for b in batches]
    merged = Batch(inputs, targets, torch.cat(whole), sum(b.size for b in batches))
    return [(torch.cat([p for p, _, _ in group]), torch.cat([t for _, t, _ in group]), merged)]


def _cat(trees: Sequence[Any]) -> Any:
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.cat(list(trees)) if first.dim() else first
    if isinstance(first, Mapping):
        return {k: _cat([t[k] for t in trees]) for k in first}
    if isinstance(first, tuple | list):
        return tuple(_cat([t[i] for t in trees]) for i in range(len(first)))
    return first


def _weighted(trace: Tensor, batch: Batch, left_out: float) -> Batch:
    weights = torch.ones(batch.size, dtype=torch.float64) if batch.weight is None else batch.weight.to(trace)
    raised = weights * (left_out / trace.clamp_min(1e-300)).clamp_min(1.0) if left_out > 0 else weights
    # An example without curvature may sit in the sample of few data; its weight has no effect.
    return Batch(batch.inputs, batch.targets, torch.where(trace > 0, raised, weights), batch.size)
