"""Moved to `aftermap.curvature.rules`; the names stay importable from here for one release."""

from aftermap.curvature.rules.base import (
    MatrixRows,
    Rows,
    append_ones,
    budget,
    merged_vectors,
    split_vectors,
    sum_into_,
)
from aftermap.curvature.rules.linear import DenseRows
from aftermap.curvature.rules.scale import ScaleRows

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
