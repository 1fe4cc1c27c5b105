"""The minimum of a function of one number, without derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["golden_section"]

_SHARE = (math.sqrt(5) - 1) / 2


def golden_section(function: Callable[[float], float], low: float, high: float, steps: int) -> float:
    """Finds the least of a function with one minimum between two points.

    Args:
        function: The function, which is asked steps + 2 times.
        low: The lower end of the interval.
        high: The upper end of the interval.
        steps: The number of steps, each of which leaves 62 % of the interval.

    Returns:
        The lower one of the last two points inside.

    >>> round(golden_section(lambda x: (x - 0.3) ** 2, -1.0, 1.0, 30), 4)
    0.3
    """
    left, right = high - _SHARE * (high - low), low + _SHARE * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(steps):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _SHARE * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _SHARE * (high - low)
            at_right = function(right)
    return left if at_left <= at_right else right
