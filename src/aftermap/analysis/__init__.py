"""Where the uncertainty sits, and pictures of it."""

from aftermap.analysis.neighbours import Neighbours, nearest_examples
from aftermap.analysis.where import Where, where

__all__ = ["Neighbours", "Where", "nearest_examples", "where"]
