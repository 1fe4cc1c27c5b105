"""Ctrl-C and requests to end: silent while the command line starts, an exception that cleans up while a command works."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

__all__ = ["begin_start_up", "end_start_up"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def begin_start_up() -> None:
    """Makes interrupts end the process at once, with exit code 130 (143 for SIGTERM) and without a word.

    While modules are imported there is nothing to clean up, and an exception could be lost in the middle of an import.
    Signals that the process was told to ignore stay ignored.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _leave)


def end_start_up() -> None:
    """Makes interrupts raise KeyboardInterrupt from now on, where `begin_start_up` was called; does nothing elsewhere."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _leave:
            signal.signal(number, _interrupt)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
