"""Moved to `aftermap.curvature.rules`; the names stay importable from here for one release."""

from aftermap.curvature.rules.base import LayerRule, Named, find_rule, matrix_layout, register, registered_rules
from aftermap.curvature.rules.convolution import ConvRule, ConvTransposeRule
from aftermap.curvature.rules.linear import EmbeddingRule, LinearRule
from aftermap.curvature.rules.scale import BatchNormRule, GroupNormRule, LayerNormRule, PReLURule, RMSNormRule

__all__ = [
    "BatchNormRule",
    "ConvRule",
    "ConvTransposeRule",
    "EmbeddingRule",
    "GroupNormRule",
    "LayerNormRule",
    "LayerRule",
    "LinearRule",
    "Named",
    "PReLURule",
    "RMSNormRule",
    "find_rule",
    "matrix_layout",
    "register",
    "registered_rules",
]
