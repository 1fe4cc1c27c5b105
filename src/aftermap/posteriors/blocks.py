"""Moved to `aftermap.curvature.structures`; the names stay importable from here for one release."""

from aftermap.curvature.structures.base import BlockPosterior, flatten_batch, join_flat, split_flat

__all__ = ["BlockPosterior", "flatten_batch", "join_flat", "split_flat"]
