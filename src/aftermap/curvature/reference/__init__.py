"""The slow truth: curvature by brute force, for small models and for tests."""

from aftermap.curvature.reference.curvature import (
    diagonal_ggn,
    empirical_fisher,
    ggn,
    hessian,
    jacobian,
    linearised_covariance,
    per_example_gradients,
    sum_squared_gradients,
)
from aftermap.curvature.reference.layers import Inputs, example, hessian_recursion, kron_factors, unfold_input

__all__ = [
    "Inputs",
    "diagonal_ggn",
    "empirical_fisher",
    "example",
    "ggn",
    "hessian",
    "hessian_recursion",
    "jacobian",
    "kron_factors",
    "linearised_covariance",
    "per_example_gradients",
    "sum_squared_gradients",
    "unfold_input",
]
