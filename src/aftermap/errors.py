"""The errors and warnings of aftermap.

Every error that a user can cause is an `AftermapError`, and most are also the built-in error a Python
programmer would expect, so `except ValueError` keeps working. A message says what was got, what is allowed
and how to fix it.

>>> issubclass(ShapeError, ValueError)
True
"""

from __future__ import annotations

import sys
import warnings

__all__ = [
    "AftermapError",
    "DataError",
    "InputError",
    "NotFittedError",
    "NumericalError",
    "NumericalWarning",
    "ProcessError",
    "ShapeError",
    "StatisticalWarning",
    "UnsupportedError",
    "warn_caller",
]

_INSIDE = ("aftermap", "torch")  # the decorators of torch stand between a method and its caller


class AftermapError(Exception):
    """The base of every error that aftermap raises on purpose.

    >>> try:
    ...     raise InputError("structure: got 'krn'; allowed: 'kron', 'diagonal'")
    ... except AftermapError as error:
    ...     print(error)
    structure: got 'krn'; allowed: 'kron', 'diagonal'
    """


class InputError(AftermapError, ValueError):
    """An argument has a value that is not allowed."""


class ShapeError(InputError):
    """A tensor has a shape that does not fit the others or the model."""


class DataError(InputError):
    """The data cannot be used: empty, not finite, labels out of range, or a batch of an unknown form."""


class UnsupportedError(AftermapError):
    """The request is well formed, but the model or the method does not allow it."""


class NotFittedError(AftermapError, RuntimeError):
    """A result was asked for before `fit`."""


class NumericalError(AftermapError, ArithmeticError):
    """A computation broke down: a matrix that is not positive definite, or a result that is not finite."""


class ProcessError(AftermapError, RuntimeError):
    """Another process of the group has ended or does not answer, so that nothing can be summed over all of them."""


class NumericalWarning(UserWarning):
    """A computation went through, but lost accuracy or needed help such as jitter."""


class StatisticalWarning(UserWarning):
    """A result is well defined, but its assumptions look broken: it may not mean what it seems to."""


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warns, and points to the line outside of this package that called it, however deep the package is in its own calls.

    Args:
        message: What is to be said.
        category: Such as `StatisticalWarning` or `NumericalWarning`.
    """
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
