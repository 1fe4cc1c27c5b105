"""The curvature engine: exact sums over data of Kronecker factors, diagonals, full and low-rank matrices."""

from aftermap.curvature.fit import fit_curvature
from aftermap.curvature.passes.last_block import find_last_block, last_block
from aftermap.curvature.passes.per_example import per_example_gradients
from aftermap.curvature.passes.vectors import VECTOR_KINDS
from aftermap.curvature.rules.base import LayerRule, register, registered_rules
from aftermap.curvature.structures.base import STRUCTURES, Block, Factors, Structure, Treatment, register_structure

__all__ = [
    "STRUCTURES",
    "VECTOR_KINDS",
    "Block",
    "Factors",
    "LayerRule",
    "Structure",
    "Treatment",
    "find_last_block",
    "fit_curvature",
    "last_block",
    "per_example_gradients",
    "register",
    "register_structure",
    "registered_rules",
]
