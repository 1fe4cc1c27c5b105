"""The curvature engine: exact sums over data of Kronecker factors, diagonals, full and low-rank matrices."""

from aftermap.curvature.factors import Block, Factors, Treatment
from aftermap.curvature.fit import STRUCTURES, fit_curvature
from aftermap.curvature.layers import LayerRule, register, registered_rules
from aftermap.curvature.per_example import per_example_gradients
from aftermap.curvature.vectors import VECTOR_KINDS

__all__ = [
    "STRUCTURES",
    "VECTOR_KINDS",
    "Block",
    "Factors",
    "LayerRule",
    "Treatment",
    "fit_curvature",
    "per_example_gradients",
    "register",
    "registered_rules",
]
