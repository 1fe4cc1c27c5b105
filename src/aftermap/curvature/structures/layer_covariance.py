"""The covariance J Σ Jᵀ of one layer in the basis where Σ is diagonal, without a Jacobian (docs/mathematics/predictive.md).

With G_c the gradient of output c in the layer's block, U_Bᵀ G_c U_A = G̃_c and variances R in that basis,

    V[c, c'] = Σ_oi G̃_c,oi R_oi G̃_c',oi.

The root of R is put into G̃, so that one tensor is multiplied with itself.

Where a layer has no shared positions, G_c = g_c aᵀ and V[c, c'] = Σ_o g̃_c,o g̃_c',o (R ã²)_o: no [o, i] tensor at all. R ã² may be
zero, where a root has no derivative, so that it multiplies one side. Where the
layer is the last one, g_c is a unit vector and V = U_B diag(R ã²) U_Bᵀ.

Index legend: b example, v output, g group, t shared position, i feature in, o feature out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aftermap.curvature.passes.backward import LayerGradients
from aftermap.curvature.rules.base import examples_per_chunk, group_products
from aftermap.curvature.rules.linear import DenseRows, OneHotRows

__all__ = ["layer_covariance", "layer_of"]


def layer_of(gradients: LayerGradients, names: Sequence[str]) -> int | None:
    """Returns the layer whose rule alone accounts for exactly these parameters; None where there is none."""
    plan = gradients.record.plan.layers_of_parameter
    numbers = plan.get(names[0], [])
    if len(numbers) != 1 or any(plan.get(n) != numbers for n in names):
        return None
    layout = gradients.record.plan.layers[numbers[0]].layout
    return numbers[0] if set(layout.names) == set(names) else None


def layer_covariance(
    gradients: LayerGradients,
    layer: int,
    tables: Sequence[Tensor],
    outer: Tensor | None,
    inner: Tensor | None,
    diagonal: bool,
) -> list[Tensor]:
    """Returns the covariance of the outputs due to one layer.

    Args:
        gradients: The gradients of the outputs' unit vectors at every layer.
        layer: The number of the layer.
        tables: The variances R [g, o, i] in the basis, one per variant.
        outer: The eigenvectors U_B [g, o, o]; None for the identity.
        inner: The eigenvectors U_A [g, i, i]; None for the identity.
        diagonal: Whether to compute only the variances.

    Returns:
        The covariance [b, v, v], or the variances [b, v], for each table.
    """
    calls = gradients.by_layer[layer]
    if not calls:
        shape = (
            (gradients.record.size, gradients.n_vectors)
            if diagonal
            else (gradients.record.size, gradients.n_vectors, gradients.n_vectors)
        )
        return [gradients.vectors.new_zeros(shape) for _ in tables]
    call, grads = calls[0]
    if len(calls) == 1 and isinstance(call.rows, OneHotRows) and call.rows.shared < call.rows.features:
        return _of_tokens(call.rows, grads, tables, outer, diagonal)
    rows = call.rows.dense() if len(calls) == 1 and call.rows.shared == 1 else None
    if rows is None:
        return _with_sharing(gradients, layer, tables, outer, inner, diagonal)
    dtype = gradients.vectors.dtype
    inputs = rows[:, :, 0]  # [b, g, i]
    if inner is not None:
        inputs = torch.einsum("bgi,gij->bgj", inputs, inner.to(dtype))
    squares = inputs.square().transpose(0, 1)  # [g, b, i]
    weights = [(squares @ t.to(dtype).transpose(-1, -2)).transpose(0, 1) for t in tables]  # [b, g, o]
    if gradients.unit_vectors:
        basis = torch.eye(grads.shape[-1], dtype=dtype, device=inputs.device) if outer is None else outer[0].to(dtype)
        if diagonal:
            return [w[:, 0] @ basis.square().T for w in weights]
        return [(basis * w) @ basis.T for w in weights]  # The weights [b, 1, o] scale the columns.
    turned = grads[:, :, :, 0].transpose(0, 1)  # [b, v, g, o]
    if outer is not None:
        turned = torch.einsum("bvgo,gop->bvgp", turned, outer.to(dtype))
    return [_contract(turned * w[:, None], turned, diagonal) for w in weights]


def _with_sharing(
    gradients: LayerGradients,
    layer: int,
    tables: Sequence[Tensor],
    outer: Tensor | None,
    inner: Tensor | None,
    diagonal: bool,
) -> list[Tensor]:
    parts: list[list[Tensor]] = [[] for _ in tables]
    roots = [t.sqrt().to(gradients.vectors.dtype) for t in tables]
    layout = gradients.record.plan.layers[layer].layout
    stride = examples_per_chunk(2 * gradients.n_vectors * layout.size)
    for start in range(0, gradients.record.size, stride):
        length = min(stride, gradients.record.size - start)
        turned = _turned(gradients, layer, start, length, outer, inner)  # [b, v, g, o, i]
        for place, root in enumerate(roots):
            scaled = turned * root
            parts[place].append(_contract(scaled, scaled, diagonal))
    return [torch.cat(covariances) for covariances in parts]


def _of_tokens(
    rows: OneHotRows, grads: Tensor, tables: Sequence[Tensor], outer: Tensor | None, diagonal: bool
) -> list[Tensor]:
    """Returns the covariances of an embedding, whose gradients are zero but for the tokens of an example.

    The gradients of a token that comes several times in an example are summed at its first place.
    """
    index = rows.index
    same = index[:, :, None] == index[:, None, :]  # [b, t, t]
    is_first = ~same.tril(-1).any(-1) & (index >= 0)
    sums = (same & is_first[:, :, None]).to(grads.dtype)[:, None] @ grads[:, :, 0].transpose(0, 1)  # [b, v, t, o]
    if outer is not None:
        sums = sums @ outer[0].to(grads.dtype)
    places = index.clamp_min(0)
    sums = sums[:, :, None]  # [b, v, 1, t, o]
    scaled = [sums * table[0].sqrt().to(grads.dtype).T[places][:, None, None] for table in tables]
    return [_contract(s, s, diagonal) for s in scaled]


def _turned(
    gradients: LayerGradients, layer: int, start: int, length: int, outer: Tensor | None, inner: Tensor | None
) -> Tensor:
    """Returns U_Bᵀ G U_A of some examples [b, v, g, o, i]; each side is turned before or after the product over positions.

    Before it there is a row for every position, after it one for every feature of the other side: the fewer are turned.
    """
    calls = gradients.by_layer[layer]
    positions = sum(call.rows.shared for call, _ in calls)
    outer_first = outer is not None and positions < calls[0][0].rows.features
    total: Tensor | None = None
    inner_first = False
    for call, every in calls:
        grads = every[:, start : start + length]
        if outer is not None and outer_first:
            grads = _turned_outputs(grads, outer.to(grads.dtype))
        rows = call.rows.examples(start, length)
        if inner is not None and len(calls) == 1 and positions < gradients.n_vectors * grads.shape[-1]:
            turned = rows.turned(inner.to(grads.dtype))
            if turned is not None:
                rows, inner_first = DenseRows(turned, ones=False), True
        part = rows.per_example_gradients(grads)
        total = part if total is None else total + part
    assert total is not None  # A layer without calls has no covariance.
    total = total.transpose(0, 1)  # as it lies in memory
    if inner is not None and not inner_first:
        total = group_products(total, inner.to(total.dtype))
    if outer is not None and not outer_first:
        total = outer.to(total.dtype).transpose(-1, -2) @ total
    return total


def _turned_outputs(grads: Tensor, outer: Tensor) -> Tensor:
    """Returns gradients [v, b, g, t, o] times U_B [g, o, o], multiplied as they lie in memory."""
    if grads.stride(-2) != 1:
        return group_products(grads, outer)
    lines = grads.permute(1, 0, 2, 4, 3)  # A convolution's gradients lie feature by feature: [b, v, g, o, t].
    return (outer.transpose(-1, -2) @ lines).permute(1, 0, 2, 4, 3)


def _contract(left: Tensor, right: Tensor, diagonal: bool) -> Tensor:
    """Returns the sum over all but the first two dimensions of x_c y_c': [b, v, v], or [b, v] for c = c'.

    Args:
        left: x [b, v, g, ...], which may lie in memory with g before v.
        right: y, of the same shape.
        diagonal: Whether only c = c' is wanted.
    """
    if diagonal:
        return (left * right).flatten(2).sum(-1)
    x, y = (values.transpose(1, 2).flatten(3) for values in (left, right))
    return (x @ y.transpose(-1, -2)).sum(1)
