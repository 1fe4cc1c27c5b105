"""Values that stay the same while one fit passes over its data: made once instead of once per batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

__all__ = ["keeping", "kept"]

Value = TypeVar("Value")
_STORE: ContextVar[dict[Hashable, Any] | None] = ContextVar("aftermap_kept", default=None)


@contextmanager
def keeping() -> Iterator[None]:
    """Inside, what `kept` makes is made once; afterwards it is forgotten."""
    token = _STORE.set({})
    try:
        yield
    finally:
        _STORE.reset(token)


def kept(key: Hashable, make: Callable[[], Value]) -> Value:
    """``make()``, or what it returned before for this key inside the same `keeping`; outside of one, always anew.

    >>> with keeping():
    ...     kept("a", lambda: 1) + kept("a", lambda: 2)
    2
    >>> kept("a", lambda: 3)
    3
    """
    store = _STORE.get()
    if store is None:
        return make()
    if key not in store:
        store[key] = make()
    found: Value = store[key]
    return found
