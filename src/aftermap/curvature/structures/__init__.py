"""Structures: one file for each approximation of the curvature, with its accumulator, its block and the block's posterior."""

from __future__ import annotations

__all__: list[str] = []
