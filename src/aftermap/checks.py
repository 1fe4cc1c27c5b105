"""The one place where options are judged: every check returns the value, or says what was got, what is allowed, what to do.

Constructors and public functions call these first, before any work, so that a wrong option never costs a pass over the data.
Checks of tensors stand in `aftermap.metrics.tensors`, checks of a network in `aftermap.models`.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, SupportsInt, TypeVar, cast

from torch import nn

from aftermap.errors import DataError, InputError

__all__ = [
    "choice",
    "choices",
    "count",
    "counted",
    "few",
    "fraction",
    "instance",
    "keywords",
    "memory",
    "module",
    "number",
    "repeatable",
]

T = TypeVar("T")


def count(name: str, value: object, least: int = 1, *, most: int | None = None, advice: str = "") -> int:
    """Returns a whole number that is at least ``least`` and at most ``most``.

    Args:
        name: What the user calls the option.
        value: What the user passed. Whole numbers of any type pass, also numpy's and 3.0; truth values do not.
        least: The smallest number that is allowed.
        most: The largest number that is allowed; None sets no bound.
        advice: A sentence that says what to do instead. Without one the nearest allowed number is proposed.

    Raises:
        InputError: The value is not such a number.

    >>> count("samples", 20)
    20
    >>> count("samples", 0)
    Traceback (most recent call last):
    aftermap.errors.InputError: samples=0 must be a whole number of at least 1. Pass for instance samples=1
    """
    nearest = least
    is_whole = isinstance(value, Integral) or (isinstance(value, Real) and float(value).is_integer())
    if is_whole and not isinstance(value, bool):
        whole = int(cast(SupportsInt, value))
        if whole >= least and (most is None or whole <= most):
            return whole
        nearest = least if whole < least or most is None else most
    allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise InputError(
        f"{name}={value!r} must be a whole number {allowed}. {advice or f'Pass for instance {name}={nearest}'}"
    )


def number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    infinite: bool = False,
    advice: str = "",
) -> float:
    """Returns a real number within bounds; NaN never passes, infinity only where it is allowed.

    Args:
        name: What the user calls the option.
        value: What the user passed.
        above: The number must be larger than this.
        least: The number must be at least this.
        below: The number must be smaller than this.
        most: The number must be at most this.
        infinite: Whether ±∞ is allowed, within the bounds.
        advice: A sentence that says what to do instead.

    Raises:
        InputError: The value is not such a number.

    >>> number("temperature", 0.5, above=0)
    0.5
    >>> number("temperature", 0, above=0)
    Traceback (most recent call last):
    aftermap.errors.InputError: temperature=0 must be a positive and finite number
    >>> number("momentum", 1, least=0, below=1, advice="Plain gradient descent has momentum=0")
    Traceback (most recent call last):
    aftermap.errors.InputError: momentum=1 must be a finite number of at least 0 and below 1. Plain gradient descent has momentum=0
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        v = float(value)
        within = (above is None or v > above) and (least is None or v >= least)
        within = within and (below is None or v < below) and (most is None or v <= most)
        if within and (math.isfinite(v) or (infinite and not math.isnan(v))):
            return v
    bounds = [("above", above), ("of at least", least), ("below", below), ("of at most", most)]
    words = [f"{word} {bound:g}" for word, bound in bounds if bound is not None]
    if above == 0 and len(words) == 1:
        allowed = "a positive number" if infinite else "a positive and finite number"
    else:
        allowed = " ".join(["a number" if infinite else "a finite number", " and ".join(words)]).strip()
    if isinstance(value, str) and not advice:
        advice = "Pass a number, not a text"
    raise InputError(f"{name}={value!r} must be {allowed}{f'. {advice}' if advice else ''}")


def fraction(name: str, value: object, *, zero: bool = False, one: bool = False, advice: str = "") -> float:
    """Returns a share of a whole: a number between 0 and 1, with the ends only where they are allowed.

    Raises:
        InputError: The value is not such a number.

    >>> fraction("coverage", 1, one=True)
    1.0
    >>> fraction("level", 95)
    Traceback (most recent call last):
    aftermap.errors.InputError: level=95 must lie in (0, 1). Write 95 % as 0.95
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        share = float(value)
        if 0 < share < 1 or (zero and share == 0) or (one and share == 1):
            return share
    interval = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
    raise InputError(f"{name}={value!r} must lie in {interval}. {advice or 'Write 95 % as 0.95'}")


def choice(name: str, value: object, allowed: Iterable[str], *, because: str = "", otherwise: str = "") -> str:
    """Returns a word that is one of the allowed ones.

    Args:
        name: What the user calls the option.
        value: What the user passed.
        allowed: The words that are allowed.
        because: Why no other word is possible here, where the user's word exists but does not fit another option.
        otherwise: What is allowed beside words, for instance "a function of (prediction, generator)".

    Raises:
        InputError: The value is another word, or no word.

    >>> choice("strategy", "mass", ("width", "mass"))
    'mass'
    >>> choice("strategy", "mas", ("width", "mass"))
    Traceback (most recent call last):
    aftermap.errors.InputError: strategy='mas' is not known; allowed are 'width', 'mass'. Did you mean 'mass'?
    """
    words = list(allowed)
    if isinstance(value, str) and value in words:
        return value
    listed = ", ".join(map(repr, words)) + (f", or {otherwise}" if otherwise else "")
    if because:
        raise InputError(f"{name}={value!r} is not possible here, because {because}; allowed are {listed}")
    near = difflib.get_close_matches(value, words, n=1) if isinstance(value, str) else []
    hint = f". Did you mean {near[0]!r}?" if near else ""
    raise InputError(f"{name}={value!r} is not known; allowed are {listed}{hint}")


def choices(name: str, values: str | Iterable[str], allowed: Iterable[str]) -> tuple[str, ...]:
    """Returns one or several words that are among the allowed ones; a single word may be passed without a list.

    Raises:
        InputError: There is no word, or one that is not allowed.

    >>> choices("scores", ["entropy", "max_prob"], ("entropy", "max_prob", "epistemic"))
    ('entropy', 'max_prob')
    """
    words, chosen = list(allowed), (values,) if isinstance(values, str) else tuple(values)
    if not chosen:
        raise InputError(f"{name} is empty; allowed are one or several of {', '.join(map(repr, words))}")
    return tuple(choice(name, word, words) for word in chosen)


def keywords(owner: str, options: Iterable[str], allowed: Sequence[str]) -> None:
    """Raises unless every keyword that came through ``**options`` is one that ``owner`` knows.

    >>> keywords("HessianFree", ["deviaton"], ["deviation", "symmetric"])
    Traceback (most recent call last):
    aftermap.errors.InputError: HessianFree has no setting deviaton; allowed are deviation, symmetric. Did you mean deviation?
    """
    unknown = [name for name in options if name not in allowed]
    if unknown:
        near = difflib.get_close_matches(unknown[0], allowed, n=1)
        hint = f". Did you mean {near[0]}?" if near else ""
        raise InputError(f"{owner} has no setting {', '.join(unknown)}; allowed are {', '.join(allowed)}{hint}")


def counted(number: int, noun: str) -> str:
    """Writes a number of things, for a message.

    >>> counted(1, "epoch"), counted(2000, "step")
    ('1 epoch', '2,000 steps')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def few(names: Iterable[str], limit: int = 6) -> str:
    """Returns the first names of many in one line, for a message, and how many more there are.

    >>> few(["a", "b", "c"], limit=2)
    'a, b, … (1 more)'
    """
    listed = list(names)
    return ", ".join(listed[:limit]) + (f", … ({len(listed) - limit} more)" if len(listed) > limit else "")


def instance(name: str, value: object, kind: type[T], advice: str) -> T:
    """Returns an object of one class; ``advice`` says where the user gets one.

    >>> instance("optimizer", 3, dict, "Pass a dictionary")
    Traceback (most recent call last):
    aftermap.errors.InputError: optimizer must be a dict, got int. Pass a dictionary
    """
    if not isinstance(value, kind):
        raise InputError(f"{name} must be a {kind.__name__}, got {type(value).__name__}. {advice}")
    return value


def module(owner: str, value: object) -> nn.Module:
    """Returns a network; ``owner`` is the class or function that needs it.

    >>> module("Laplace", "resnet18")
    Traceback (most recent call last):
    aftermap.errors.InputError: Laplace needs a torch.nn.Module as its model, got str. Pass the network itself
    """
    if isinstance(value, nn.Module):
        return value
    is_class = isinstance(value, type) and issubclass(value, nn.Module)
    got = f"the class {value.__name__}" if is_class and isinstance(value, type) else type(value).__name__
    advice = "Pass an instance: call the class" if is_class else "Pass the network itself"
    raise InputError(f"{owner} needs a torch.nn.Module as its model, got {got}. {advice}")


def repeatable(name: str, data: Any, purpose: str) -> Any:
    """Returns data that can be read more than once: a DataLoader or a list, not a generator.

    Args:
        name: What the user calls the data.
        data: What the user passed.
        purpose: The work that reads the data repeatedly, the subject of the error's sentence, for instance
            "the calibration test".

    Raises:
        DataError: The data are an iterator, which is empty after one pass, or cannot be iterated over at all.

    >>> repeatable("data", iter([1, 2]), "training")
    Traceback (most recent call last):
    aftermap.errors.DataError: training reads data more than once, but list_iterator can be read only once. Pass a DataLoader or a list of batches
    """
    if isinstance(data, Iterable) and iter(data) is not data:
        return data
    problem = "can be read only once" if isinstance(data, Iterable) else "holds no batches"
    raise DataError(
        f"{purpose} reads {name} more than once, but {type(data).__name__} {problem}. Pass a DataLoader or a list of batches"
    )


def memory(what: str, size: int) -> int:
    """Returns a number of bytes that can be held in memory: no more than the machine has, or than this process may have.

    Args:
        what: What needs the memory, the subject of the error's sentence.
        size: The number of bytes.

    Raises:
        DataError: It is more.

    >>> memory("table.csv", 1000)
    1000
    >>> memory("table.csv", 10**18)
    Traceback (most recent call last):
    aftermap.errors.DataError: table.csv needs 1,000,000,000,000,000,000 bytes, more than the ... that this process can have. ...
    """
    limit = _memory_limit()
    if limit is not None and size > limit:
        raise DataError(
            f"{what} needs {size:,} bytes, more than the {limit:,} that this process can have. If that cannot be right, it is damaged: "
            "copy it again; else use a machine with more memory"
        )
    return size


def _memory_limit() -> int | None:
    """Returns the bytes that this process can have at most; None where the system does not say."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    try:
        import resource
    except ImportError:
        return whole
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return whole if limit == resource.RLIM_INFINITY else min(whole, limit)
