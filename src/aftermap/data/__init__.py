"""Readers of data files."""

from aftermap.data.idx import read_idx

__all__ = ["read_idx"]
