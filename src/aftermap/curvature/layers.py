"""Moved to `aftermap.curvature.rules`; the names stay importable from here for one release."""

from aftermap.curvature.rules.base import LayerRule, Named, find_rule, matrix_layout, register, registered_rules

__all__ = ["LayerRule", "Named", "find_rule", "matrix_layout", "register", "registered_rules"]
