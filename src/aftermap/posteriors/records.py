"""Kinds of plain JSON values, so that a file is read strictly: what is missing, unknown, of the wrong type or out of range is named.

A kind is a description of what a value may be. `Record` and `MapOf` nest, so one expression describes a whole file:

>>> point = Record({"x": Number(), "label": Text(("a", "b"))}, {"n": Whole(least=1)})
>>> point.read({"x": 1, "label": "a"}, "points.json:")
{'x': 1, 'label': 'a'}
>>> point.read({"x": "1", "label": "a"}, "points.json:")
Traceback (most recent call last):
aftermap.errors.DataError: points.json: x should be a finite number, got the text '1'. The folder is damaged or foreign: ...
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aftermap.errors import DataError

__all__ = [
    "ADVICE",
    "Anything",
    "Flag",
    "Kind",
    "ListOf",
    "MapOf",
    "Number",
    "OrNone",
    "Record",
    "Text",
    "Whole",
    "shown",
]

ADVICE = "The folder is damaged or foreign: copy it again from where it was saved, or fit and save again"


def shown(value: Any) -> str:
    """Returns a few words about a value that was found in a file, whatever its size.

    >>> shown([1, 2, 3]), shown(None), shown("a" * 100)
    ('a list of 3', 'null', "the text 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…'")
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 40 else f"the text {value[:40] + '…'!r}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return f"an object with {len(value)} entries"
    return repr(value)[:40]


def _inside(path: str, name: object) -> str:
    """Returns the path of an entry; a path that ends in a colon is a file."""
    return f"{path} {name}" if path.endswith(":") else f"{path}.{name}"


class Kind(ABC):
    """What a value may be."""

    @property
    @abstractmethod
    def words(self) -> str:
        """The kind in words, for messages."""

    @abstractmethod
    def accepts(self, value: Any) -> bool:
        """Tells whether the value itself is of this kind; what is inside of it is judged by `read`."""

    def read(self, value: Any, path: str) -> Any:
        """Returns the value.

        Args:
            value: What was found.
            path: Where it was found: the file, and the fields down to the value.

        Raises:
            DataError: It is not of this kind.
        """
        if not self.accepts(value):
            raise DataError(f"{path} should be {self.words}, got {shown(value)}. {ADVICE}")
        return value


@dataclass(frozen=True)
class Anything(Kind):
    """Any JSON value: what callers keep of their own."""

    @property
    def words(self) -> str:
        return "a JSON value"

    def accepts(self, value: Any) -> bool:
        return True


@dataclass(frozen=True)
class Flag(Kind):
    """The values true and false."""

    @property
    def words(self) -> str:
        return "true or false"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True)
class Text(Kind):
    """A text: one of some words, or one that a regular expression matches as a whole, or any.

    Attributes:
        choices: The words that are allowed; empty allows all.
        pattern: The regular expression that it must match; None allows all.
        example: What to say about the pattern.
    """

    choices: tuple[str, ...] = ()
    pattern: str | None = None
    example: str = ""

    @property
    def words(self) -> str:
        if self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        return self.example or "a text"

    def accepts(self, value: Any) -> bool:
        if not isinstance(value, str) or (self.choices and value not in self.choices):
            return False
        return self.pattern is None or re.fullmatch(self.pattern, value) is not None


@dataclass(frozen=True)
class Number(Kind):
    """A finite number within bounds; truth values are none.

    Attributes:
        least: The number is at least this.
        above: The number is larger than this.
        most: The number is at most this.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None

    @property
    def words(self) -> str:
        bounds = [("of at least", self.least), ("above", self.above), ("of at most", self.most)]
        return " ".join(["a finite number", " and ".join(f"{w} {b:g}" for w, b in bounds if b is not None)]).strip()

    def accepts(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1.7e308 or value != value:
            return False
        least, above = (-math.inf if b is None else b for b in (self.least, self.above))
        return value >= least and value > above and value <= (math.inf if self.most is None else self.most)


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number within bounds; truth values and 3.0 are none.

    Attributes:
        least: The smallest number that is allowed.
        most: The largest number that is allowed.
    """

    least: int = 0
    most: int = 2**62

    @property
    def words(self) -> str:
        return f"a whole number of at least {self.least}" + ("" if self.most == 2**62 else f" and at most {self.most}")

    def accepts(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= self.most


@dataclass(frozen=True)
class OrNone(Kind):
    """A value of a kind, or null."""

    inner: Kind

    @property
    def words(self) -> str:
        return f"{self.inner.words} or null"

    def accepts(self, value: Any) -> bool:
        return value is None or self.inner.accepts(value)

    def read(self, value: Any, path: str) -> Any:
        super().read(value, path)
        return None if value is None else self.inner.read(value, path)


@dataclass(frozen=True)
class ListOf(Kind):
    """A list whose entries are of one kind."""

    inner: Kind
    length: int | None = None

    @property
    def words(self) -> str:
        return "a list" if self.length is None else f"a list of {self.length}"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, list) and self.length in (None, len(value))

    def read(self, value: Any, path: str) -> list[Any]:
        return [self.inner.read(v, _inside(path, i)) for i, v in enumerate(super().read(value, path))]


@dataclass(frozen=True)
class MapOf(Kind):
    """An object with any names, whose values are of one kind."""

    inner: Kind

    @property
    def words(self) -> str:
        return "an object"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, path: str) -> dict[str, Any]:
        return {k: self.inner.read(v, _inside(path, k)) for k, v in super().read(value, path).items()}


@dataclass(frozen=True)
class Record(Kind):
    """An object with known names.

    Attributes:
        required: The kinds of the entries that must be there.
        optional: The kinds of the entries that may be there.
        open: Whether entries with other names are left as they are; else they are refused.
    """

    required: Mapping[str, Kind]
    optional: Mapping[str, Kind] = field(default_factory=dict)
    open: bool = False

    @property
    def words(self) -> str:
        return "an object"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, path: str) -> dict[str, Any]:
        super().read(value, path)
        missing = [n for n in self.required if n not in value]
        if missing:
            raise DataError(f"{path} lacks {', '.join(missing)}. {ADVICE}")
        kinds = {**self.required, **self.optional}
        unknown = [] if self.open else [str(n)[:40] for n in value if n not in kinds]
        if unknown:
            raise DataError(
                f"{path} has the unknown entries {', '.join(map(repr, unknown[:5]))}; known are {', '.join(kinds)}. It is damaged, "
                "or was written by a later version of aftermap: copy it again, or update aftermap"
            )
        return {n: kinds[n].read(v, _inside(path, n)) if n in kinds else v for n, v in value.items()}
