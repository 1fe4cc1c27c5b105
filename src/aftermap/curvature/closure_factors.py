"""Kronecker sums of one layer from the calls of one closure, for optimisers."""

from __future__ import annotations

from torch import Tensor

from aftermap.curvature.closure_plan import Arrived
from aftermap.curvature.gram_sum import GramSum
from aftermap.curvature.kron import add_grad_gram_
from aftermap.curvature.layout import Layout
from aftermap.curvature.rows import MatrixRows
from aftermap.errors import UnsupportedError

__all__ = ["kron_sums"]


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
