"""Per-example gradients, and the diagonal of the Gauss-Newton matrix of a closure's batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from aftermap.batches import Batch, Unpack, unpack_batch
from aftermap.curvature.passes.backward import BatchStep, VectorStep
from aftermap.curvature.passes.closure import ClosureWatch
from aftermap.curvature.passes.plan import inputs_of, probe
from aftermap.curvature.passes.record import capture
from aftermap.curvature.passes.vectors import make_vectors
from aftermap.curvature.rules.base import budget
from aftermap.errors import DataError, UnsupportedError
from aftermap.likelihoods import parse_likelihood
from aftermap.likelihoods.base import Likelihood
from aftermap.models import call_model, check_device, check_outputs, gradients_for
from aftermap.params import Selection, select

__all__ = ["ggn_squares", "per_example_gradients"]


def per_example_gradients(
    model: nn.Module,
    batch: Any,
    likelihood: str | Likelihood,
    params: Selection = "all",
    unpack: Unpack | None = None,
) -> dict[str, Tensor]:
    """The gradient of −log p(y_n | f(x_n, θ)) in θ for every example n of a batch.

    One forward and one backward pass to the layers' outputs; layers without a rule by exact products, one example at a time.

    Args:
        model: a network with outputs [N, ..., C], in eval mode; it is unchanged afterwards.
        batch: (x, y), (x, y, weight) or a mapping; the weight multiplies an example's gradient.
        likelihood: "classification", "binary", "regression", "counts", or a likelihood object.
        params: "all", "last_layer", names, a regular expression, or a function of (name, parameter).
        unpack: turns a batch of another form into (inputs, targets).

    Returns:
        Parameter name -> [N, *shape].

    Raises:
        InputError, DataError, UnsupportedError: with what is wrong and what to do.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.zeros_(net.weight)
    >>> x, y = torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.tensor([[1.0], [3.0]])
    >>> per_example_gradients(net, (x, y), "regression")["weight"].flatten(1)
    tensor([[-1., -2.],
            [-6., -3.]])
    """
    names = select(model, params)
    device, _ = check_device(model)
    data = unpack_batch(batch, unpack).to(device)
    chosen = parse_likelihood(likelihood)
    if data.targets is None:
        raise DataError("the batch has no targets; a gradient of the loss needs them")
    found = probe(model, names, data)
    with gradients_for(model, names):
        with capture(found.sites) as calls:
            outputs = call_model(model, data.inputs)
        check_outputs(outputs, data.size)
        chosen.check(outputs.detach(), data.targets)
        vector = chosen.gradient(outputs.detach(), data.targets)
        if data.weight is not None:
            vector = vector * data.weight.to(vector.dtype).reshape(-1, *[1] * (vector.dim() - 1))
        step = BatchStep.make(model, data, outputs, found.sites, found.by_parameter, calls, found.axes)
        moved = next(iter(step.backpropagate(vector[None], batched=False, keep=False)))
        return {n: g[0] for n, g in moved.per_example(names, 0, data.size).items()}


def ggn_squares(
    watch: ClosureWatch, likelihood: Likelihood, kind: str, samples: int, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """The diagonal of Σ_n J_nᵀ Λ_n J_n at the outputs of a closure (MATH 1.2 b): the curvature of the sum loss.

    Must run while the graph is alive and the parameters are those of the closure.

    Args:
        watch: of the closure.
        likelihood: gives Λ.
        kind: of vectors: exact, rademacher, sampled or auto.
        samples: for the random kinds.
        generator: for the random kinds.

    Returns:
        Parameter name -> [*shape].
    """
    watch.closed = True
    watcher = watch.watcher
    plan = watcher.prepare(watch)
    root = watch.root()
    inputs = None if root is None else inputs_of(watcher.model, root)
    if root is None or root.output is None or inputs is None:
        raise UnsupportedError(
            "curvature='ggn' needs a closure that calls the whole model once, with one output tensor"
        )
    batch = Batch(inputs, None, None, watch.size)
    by_parameter = {n: list(s) for n, s in plan.by_parameter.items()}
    axes = {(c.site, id(c.module)): plan.axes.get((c.site, id(c.module)), 0) for c in watch.seen.calls}
    step = BatchStep.make(watcher.model, batch, root.output, watcher.sites, by_parameter, watch.seen.calls, axes)
    vectors = make_vectors(kind, likelihood, root.output.detach(), None, samples=samples, generator=generator)
    squares = {n: torch.zeros_like(p) for n, p in watcher.parameters.items() if p.requires_grad}
    alone = {s for s in step.calls if all(by_parameter.get(n) == [s] for n in watcher.sites.sites[s].layout.names)}
    for part in vectors.chunks(1):
        for moved in step.backpropagate(part, batched=False, keep=True):
            _add_squares(squares, moved, alone)
    return squares


def _add_squares(squares: dict[str, Tensor], moved: VectorStep, alone: set[int]) -> None:
    """Adds Σ_nv (J_nᵀ v)²: one call of a layer by its rows, everything else example by example."""
    rest = set(squares)
    for number, calls in moved.grads.items():
        layout = moved.batch.sites.sites[number].layout
        if number in alone and len(calls) == 1:
            call, grads = calls[0]
            block = grads.new_zeros(layout.groups, layout.out, layout.in_)
            call.rows.add_outer_squared_(block, grads)
            for name, value in layout.split(block).items():
                squares[name] += value
            rest.difference_update(layout.names)
    names = [n for n in squares if n in rest]
    stride = budget(sum(squares[n].numel() for n in names))
    for start in range(0, moved.batch.size, stride) if names else ():
        found = moved.per_example(names, start, min(stride, moved.batch.size - start))
        for name, value in found.items():
            squares[name] += value.square().sum((0, 1))
