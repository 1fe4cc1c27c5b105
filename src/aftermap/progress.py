"""One policy for progress bars: on for a terminal, off in continuous integration, on rank 0 only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from tqdm import tqdm

from aftermap.errors import InputError

__all__ = ["announce", "in_seconds", "progress", "progress_enabled", "showing", "waiting"]

T = TypeVar("T")
_wish: ContextVar[bool | None] = ContextVar("wish", default=None)  # of a caller farther up


@contextmanager
def showing(enabled: bool | None) -> Iterator[None]:
    """Inside, bars that leave the choice to the policy are shown, or not, as the caller wishes; None changes nothing.

    >>> with showing(False):
    ...     progress_enabled()
    False
    """
    token = _wish.set(_wish.get() if enabled is None else enabled)
    try:
        yield
    finally:
        _wish.reset(token)


def progress_enabled(enabled: bool | None = None) -> bool:
    """Says whether this process shows progress bars.

    A bar is shown if and only if this is rank 0 (environment variable `RANK`, absent means 0) and either
    `enabled` is True, or `enabled` is None, standard error is a terminal and the environment variable `CI` is
    not set.

    Args:
        enabled: The caller's wish; None takes that of `showing`, or leaves the choice to the policy. True does not override
            the rank: several processes that draw on one terminal are unreadable.

    Returns:
        True if a bar is to be shown.

    >>> progress_enabled(False)
    False
    """
    # Read from the environment, as torchrun sets it: a bar must not need an initialised process group.
    if os.environ.get("RANK", "").strip() not in ("", "0"):
        return False
    enabled = _wish.get() if enabled is None else enabled
    if enabled is not None:
        return enabled
    if os.environ.get("CI", "").strip().lower() not in ("", "0", "false"):
        return False
    # Standard error is None under pythonw and in some services.
    return sys.stderr is not None and sys.stderr.isatty()


def progress(
    iterable: Iterable[T], *, description: str, total: int | None = None, enabled: bool | None = None
) -> Iterable[T]:
    """Iterates over `iterable` and shows how far it is.

    Args:
        iterable: The items to go through, which are passed on unchanged and in order.
        description: The words in front of the bar.
        total: The number of items; None takes `len(iterable)` where that exists.
        enabled: Whether to show the bar; see `progress_enabled`.

    Returns:
        The iterable itself when no bar is shown, so that the cost is nothing; else a tqdm bar around it.

    Raises:
        InputError: `iterable` is not iterable, or `total` is negative.

    >>> list(progress([2, 3, 5], description="primes", enabled=False))
    [2, 3, 5]
    """
    # Not by iter(): that would start the workers of a DataLoader.
    if not any(hasattr(iterable, method) for method in ("__iter__", "__getitem__")):
        raise InputError(
            f"progress: got {type(iterable).__name__} for iterable; pass something to loop over, "
            "such as a list or a DataLoader"
        )
    if total is not None and total < 0:
        raise InputError(f"progress: got total={total}; pass a number >= 0, or None to use the length")
    if not progress_enabled(enabled):
        return iterable
    bar: Iterable[T] = tqdm(iterable, desc=description, total=total, file=sys.stderr, leave=False, dynamic_ncols=True)
    return bar


@contextmanager
def waiting(description: str, *, enabled: bool | None = None) -> Iterator[None]:
    """Inside, a line says what is being done, under the same policy as a bar; afterwards it is gone.

    It is for work whose length nobody knows, such as reading a file.

    >>> with waiting("reading", enabled=False):
    ...     pass
    """
    if not progress_enabled(enabled):
        yield
        return
    with tqdm(desc=description, bar_format="{desc} …", file=sys.stderr, leave=False, dynamic_ncols=True):
        yield


def announce(message: str, *, enabled: bool | None = None) -> None:
    """Says one line on standard error, under the same policy as a bar.

    >>> announce("quiet here", enabled=False)
    """
    if progress_enabled(enabled):
        tqdm.write(message, file=sys.stderr)


def in_seconds(seconds: float) -> str:
    """Says a duration in words, in seconds, minutes, hours or days.

    >>> in_seconds(0.2), in_seconds(75), in_seconds(600), in_seconds(2e5), in_seconds(2e7)
    ('1 s', '75 s', '10 min', '55.6 h', '231 days')
    """
    if seconds < 1:
        return "1 s"
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
        if seconds < 100 * 3600
        else f"{seconds / 86400:,.0f} days"
    )
