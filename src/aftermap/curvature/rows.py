"""Moved to `aftermap.curvature.rules`; the names stay importable from here for one release."""

from aftermap.curvature.rules.base import (
    InputRows,
    MatrixRows,
    append_ones,
    examples_per_chunk,
    merge_vectors,
    split_vectors,
    sum_into_,
)
from aftermap.curvature.rules.linear import DenseRows
from aftermap.curvature.rules.scale import ScaleRows

Rows = InputRows
budget = examples_per_chunk
merged_vectors = merge_vectors

__all__ = [
    "DenseRows",
    "MatrixRows",
    "Rows",
    "ScaleRows",
    "append_ones",
    "budget",
    "merged_vectors",
    "split_vectors",
    "sum_into_",
]
