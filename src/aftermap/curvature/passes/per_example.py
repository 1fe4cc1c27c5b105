"""The gradients of a batch, example by example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from aftermap.batches import Unpack, unpack_batch
from aftermap.curvature.passes.backward import Accumulator, BackwardPass, LayerGradients
from aftermap.curvature.passes.plan import CheckedPlan
from aftermap.errors import DataError
from aftermap.likelihoods import parse_likelihood
from aftermap.likelihoods.base import Likelihood
from aftermap.models import check_device, only_require_grad
from aftermap.params import Selection, select

__all__ = ["per_example_gradients"]


def per_example_gradients(
    model: nn.Module,
    batch: Any,
    likelihood: str | Likelihood,
    params: Selection = "all",
    unpack: Unpack | None = None,
) -> dict[str, Tensor]:
    """Returns the gradient of −log p(y_n | f(x_n, θ)) in θ for every example n of a batch.

    It takes one forward and one backward pass to the layers' outputs; layers without a rule go by exact products, one
    example at a time.

    Args:
        model: A network with outputs [N, ..., C], in eval mode; it is unchanged afterwards.
        batch: The batch (x, y), (x, y, weight) or a mapping; the weight multiplies an example's gradient.
        likelihood: The likelihood: "classification", "binary", "regression", "counts", or a likelihood object.
        params: The parameters: "all", "last_layer", names, a regular expression, or a function of (name, parameter).
        unpack: A function that turns a batch of another form into (inputs, targets).

    Returns:
        For each parameter its gradients [N, *shape].

    Raises:
        InputError, DataError, UnsupportedError: The message says what is wrong and what to do.

    >>> import torch
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
    checked = CheckedPlan(model, names, data)
    with only_require_grad(model, names):
        record = checked.record(data)
        outputs = record.outputs.detach()
        chosen.check(outputs, data.targets)
        vector = chosen.gradient(outputs, data.targets)
        if data.weight is not None:
            vector = vector * data.weight.to(vector.dtype).reshape(-1, *[1] * (vector.dim() - 1))
        gradients = _PerExampleGradients(names)
        BackwardPass(record, [gradients]).run(vector[None], together=False)
    return gradients.values


class _PerExampleGradients(Accumulator):
    """The gradients of the named parameters, example by example."""

    def __init__(self, names: Sequence[str]):
        self.names = list(names)
        self.values: dict[str, Tensor] = {}

    def add(self, gradients: LayerGradients) -> None:
        per_example = gradients.per_example(self.names, 0, gradients.record.size)
        self.values = {n: g[0] for n, g in per_example.items()}
