"""Moved to `aftermap.data.readers`; the name stays importable from here for one release."""

from aftermap.data.readers import read_idx

__all__ = ["read_idx"]
