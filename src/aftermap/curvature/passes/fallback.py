"""Exact per-example gradients for parameters without a rule: slower, never wrong.

The model is run on one example at a time, vectorised by torch.func where its operations allow that (`vmap`), in a plain
loop where they do not (recurrent layers, control flow that depends on data). The vectorised derivatives of a few operations
are silently wrong (`torch.cdist`, `nn.InstanceNorm2d`), so that one example of every call is made by the loop as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from aftermap.batches import Batch, Path
from aftermap.errors import UnsupportedError
from aftermap.linalg import differing
from aftermap.models import functional_outputs
from aftermap.params import named_parameters

__all__ = ["per_example_products"]


def per_example_products(
    model: nn.Module, names: Sequence[str], batch: Batch, vectors: Tensor, start: int, length: int
) -> dict[str, Tensor]:
    """Returns J_nᵀ v for examples ``start … start + length`` and each vector.

    Args:
        model: Any module; nothing of it is changed.
        names: The parameters that J is taken with respect to.
        batch: The inputs of b examples.
        vectors: The vectors [v, b, ..., c] at the outputs.
        start: The first example wanted.
        length: The number of examples wanted.

    Returns:
        For each name the products [v, length, *shape].
    """
    # This looks at the whole batch: a tensor that only happens to have as many rows as are chosen has no batch
    # dimension.
    dims = _batch_dims(batch, batch.inputs)
    chosen = batch.take(torch.arange(start, start + length)).inputs
    parts = vectors[:, start : start + length]
    try:
        products = _vectorised(model, names, chosen, dims, parts)
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        # An operation cannot be vectorised: the loop makes the same numbers, and raises what is really wrong.
        return _looped(model, names, chosen, dims, parts)
    return (
        products if _is_confirmed(products, model, chosen, dims, parts) else _looped(model, names, chosen, dims, parts)
    )


def _is_confirmed(products: Mapping[str, Tensor], model: nn.Module, inputs: Any, dims: Any, vectors: Tensor) -> bool:
    """Tells whether the loop gives the same sum over all vectors, with random signs and weights, for one of the examples."""
    parameters, (count, length) = named_parameters(model), vectors.shape[:2]
    if any(value.shape != (count, length, *parameters[name].shape) for name, value in products.items()):
        return False
    weights = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(vectors)
    combined = torch.tensordot(weights, vectors, 1)
    example = int(
        combined.reshape(length, -1).square().sum(1).argmax()
    )  # the one with the largest gradients, or nearly so
    chosen = _with_batch(_one(inputs, dims, example), dims)
    truth = _looped(model, list(products), chosen, dims, combined[None, example : example + 1])
    sums = {name: torch.tensordot(weights.to(value), value[:, example], 1) for name, value in products.items()}
    return not differing(sums, {name: value[0, 0] for name, value in truth.items()}, vectors.dtype)


def _vectorised(model: nn.Module, names: Sequence[str], inputs: Any, dims: Any, vectors: Tensor) -> dict[str, Tensor]:
    parameters = named_parameters(model)
    params = {n: parameters[n].detach() for n in names}

    def products(example: Any, rows: Tensor) -> dict[str, Tensor]:  # rows: [v, ..., c]
        single = _with_batch(example, dims)

        def outputs(chosen: Mapping[str, Tensor]) -> Tensor:
            return _only_row(functional_outputs(model, chosen, single))

        pull = vjp(outputs, params)[1]
        return vmap(lambda v: pull(v)[0])(rows)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        products_by_name = vmap(products, in_dims=(dims, 1), out_dims=1)(inputs, vectors)
    return dict(products_by_name)


def _looped(model: nn.Module, names: Sequence[str], inputs: Any, dims: Any, vectors: Tensor) -> dict[str, Tensor]:
    parameters = named_parameters(model)
    gradients: dict[str, list[Tensor]] = {n: [] for n in names}
    with torch.enable_grad():
        params = {n: parameters[n].detach().requires_grad_() for n in names}
        for example in range(vectors.shape[1]):
            single = _with_batch(_one(inputs, dims, example), dims)
            output = _only_row(functional_outputs(model, params, single))
            rows = []
            for number, vector in enumerate(vectors[:, example]):
                grads = torch.autograd.grad(
                    output,
                    list(params.values()),
                    vector,
                    retain_graph=number < len(vectors) - 1,
                    allow_unused=True,
                )
                rows.append(
                    [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params.values(), strict=True)]
                )
            for place, name in enumerate(names):
                gradients[name].append(torch.stack([row[place] for row in rows]))
    return {n: torch.stack(values, 1) for n, values in gradients.items()}


def _only_row(outputs: Tensor) -> Tensor:
    """Returns the output of the one example that the model was run on.

    Raises:
        UnsupportedError: There are several rows, or none: the first dimension is not that of the examples.
    """
    if outputs.dim() == 0 or outputs.shape[0] != 1:
        raise UnsupportedError(
            f"the model returned outputs of shape {list(outputs.shape)} for one example; gradients of single examples need them as [1, ...]: "
            "examples must come first in its inputs and outputs"
        )
    return outputs[0]


def _batch_dims(batch: Batch, inputs: Any, path: Path = ()) -> Any:
    """Returns 0 where a tensor holds one row for each example, None elsewhere, in the structure of the inputs."""
    if isinstance(inputs, Tensor):
        return 0 if batch.is_batched(path, inputs) else None
    if isinstance(inputs, Mapping):
        return {k: _batch_dims(batch, v, (*path, k)) for k, v in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_batch_dims(batch, v, (*path, place)) for place, v in enumerate(inputs))
    return None


def _one(inputs: Any, dims: Any, example: int) -> Any:
    """Returns one example, without a batch dimension."""
    if isinstance(inputs, Tensor):
        return inputs[example] if dims == 0 else inputs
    if isinstance(inputs, Mapping):
        return {k: _one(v, dims[k], example) for k, v in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_one(v, d, example) for v, d in zip(inputs, dims, strict=True))
    return inputs


def _with_batch(inputs: Any, dims: Any) -> Any:
    if isinstance(inputs, Tensor):
        return inputs[None] if dims == 0 else inputs
    if isinstance(inputs, Mapping):
        return {k: _with_batch(v, dims[k]) for k, v in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_with_batch(v, d) for v, d in zip(inputs, dims, strict=True))
    return inputs
