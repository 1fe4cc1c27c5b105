"""Layer rules: how one kind of layer looks in the format [batch, group, shared, features]. Importing it registers them all."""

from aftermap.curvature.rules import attention, convolution, linear, scale
from aftermap.curvature.rules.base import LayerRule, Layout, find_rule, register, registered_rules

__all__ = [
    "LayerRule",
    "Layout",
    "attention",
    "convolution",
    "find_rule",
    "linear",
    "register",
    "registered_rules",
    "scale",
]
