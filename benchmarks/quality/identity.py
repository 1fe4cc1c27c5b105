"""A structure whose curvature is the identity: the posterior is the prior, and knows nothing of the data but its width.

Tuned in the same way as the others, it shows what the curvature is worth.
"""

from __future__ import annotations

import torch

from aftermap.curvature import Block, Structure, register_structure
from aftermap.curvature.passes.stream import CurvatureProblem, DataCounts
from aftermap.curvature.structures.base import STRUCTURES
from aftermap.curvature.structures.diagonal import DiagonalBlock

__all__ = ["register_identity"]


def _fit(problem: CurvatureProblem) -> tuple[tuple[Block, ...], DataCounts]:
    """One block over every layer's parameters, with 1 for each datum: sums of two data sets add up."""
    counts = problem.sum_loss()
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in problem.shapes.items():
        values = torch.full(shape, counts.n_data, dtype=torch.float64)
        layers.setdefault(name.rpartition(".")[0], {})[name] = values
    return tuple(DiagonalBlock(layer, values) for layer, values in layers.items()), counts


def register_identity() -> str:
    """Registers the structure, once, and returns its name."""
    if "identity" not in STRUCTURES:
        register_structure(Structure("identity", "The identity, without a look at the data.", _fit, (DiagonalBlock,)))
    return "identity"
