"""Moved to `aftermap.curvature.structures`; the names stay importable from here for one release."""

from aftermap.curvature.structures.base import BlockPosterior

__all__ = ["BlockPosterior"]
