"""Where the uncertainty sits, and pictures of it."""

from aftermap.analysis.where import Where, where

__all__ = ["Where", "where"]
