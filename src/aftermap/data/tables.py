"""Tables of numbers and words: .csv, .tsv and what else separates cells by commas, semicolons, tabs or bars."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aftermap import checks
from aftermap.data.examples import Examples, existing_file
from aftermap.errors import DataError

__all__ = ["csv_rows", "read_csv"]

_DELIMITERS = ",;\t|"
_LARGEST = float(np.finfo(np.float32).max)
_FEWEST_COUNTED = 20  # rows from which on whole numbers that only rise look like those of an identifier
_MOST_ROUNDING = 0.01  # of the range of a column, by which 32 bits may change its numbers
_MANY_WORDS = 20  # different words, from which on they may be no classes, but texts or numbers that cannot be read
_WRITTEN_NUMBER = re.compile(r"[^\w]*\d[\d.,'’\s]*[^\w]*")  # digits and what people write between and beside them


def csv_rows(path: str | Path) -> tuple[list[str], list[list[str]], list[int]]:
    r"""Returns header, rows and their line numbers in the file; columns without a header are called column_1, column_2, ...

    The first line is the header if none of its cells is a number. The delimiter (comma, semicolon, tab or bar) is the one
    that occurs most often in the first line, outside quotes.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "table.csv"
    >>> _ = place.write_text("a;b\n1;2\n")
    >>> csv_rows(place)
    (['a', 'b'], [['1', '2']], [2])
    """
    table = _open_table(path, quick=False)
    return table.header, [table.cells(row) for row in table.rows], table.numbers


@dataclass(frozen=True)
class _Table:
    """A table whose rows are lines as they stand in the file, where nothing is quoted, or lists of cells."""

    file: Path
    delimiter: str
    header: list[str]
    rows: list[Any]  # of str or of list[str]
    numbers: list[int]

    def cells(self, row: str | Sequence[str]) -> list[str]:
        return row.split(self.delimiter) if isinstance(row, str) else list(row)

    def column(self, k: int) -> list[str]:
        right = len(self.header) - k  # From the right end, where targets mostly stand.
        return [
            (r.rsplit(self.delimiter, right)[1 if k else 0] if isinstance(r, str) else r[k]).strip() for r in self.rows
        ]

    def numeric(self, columns: list[int]) -> np.ndarray:
        """Returns the values of some columns [rows, columns] in float64; the first cell that float32 cannot hold is named."""
        values = self._parsed(columns)
        with np.errstate(over="ignore"):  # A number that float32 cannot hold becomes infinite.
            if np.isfinite(values.astype(np.float32)).all():
                return values
        # NumPy does not say which cell it was, and reads fewer ways to write a number than Python.
        for i, row in enumerate(self.rows):
            cells = self.cells(row)
            for j, k in enumerate(columns):
                values[i, j] = _cell(self.file, self.numbers[i], self.name(k), cells[k])
        return values

    def name(self, k: int) -> str:
        """Returns what messages call a column."""
        return repr(self.header[k]) if self.header[k] else f"{k + 1}, which has no name"

    def _parsed(self, columns: list[int]) -> np.ndarray:
        """Returns the values in float64, by NumPy; not a number where some cell is none."""
        shape = (len(self.rows), len(columns))
        try:
            if isinstance(self.rows[0], str):
                values = np.loadtxt(
                    self.rows,
                    np.float64,
                    delimiter=self.delimiter,
                    comments=None,
                    usecols=columns,
                    ndmin=2,
                    encoding=None,
                )
            else:
                values = np.array([[row[k] for k in columns] for row in self.rows], dtype=np.float64)
        except ValueError:
            return np.full(shape, np.nan)
        return values if values.shape == shape else np.full(shape, np.nan)


def _open_table(path: str | Path, *, quick: bool) -> _Table:
    """Reads a table and checks its form; ``quick`` leaves rows without quotes as lines, for NumPy to parse."""
    file = existing_file(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not text in UTF-8 ({error}); save it in this encoding, which spreadsheets call CSV UTF-8"
        ) from error
    except MemoryError as error:
        raise DataError(f"{file} does not fit into memory") from error
    first = re.sub('"[^"]*"', "", text.lstrip("\n").split("\n", 1)[0])
    delimiter = max(_DELIMITERS, key=first.count)
    numbered: list[tuple[int, Any]]
    if quick and '"' not in text:
        lines = enumerate(text.split("\n"), 1)
        numbered = [(number, line) for number, line in lines if line.replace(delimiter, " ").strip()]
    else:
        numbered = [(number, row) for number, row in _lines(file, text, delimiter) if any(cell.strip() for cell in row)]
    if not numbered:
        raise DataError(f"{file} is empty")
    top = numbered[0][1]
    header = [cell.strip() for cell in (top.split(delimiter) if isinstance(top, str) else top)]
    has_header = not any(_number(cell) is not None for cell in header)
    if has_header:
        numbered = numbered[1:]
    else:
        header = [f"column_{i + 1}" for i in range(len(header))]
    if not numbered:
        raise DataError(f"{file} has a header, but no rows")
    twice = sorted(name for name, times in Counter(header).items() if times > 1)
    if twice:
        raise DataError(f"{file} has two columns called {twice[0]!r}; give each its own name")
    for number, row in numbered:
        width = row.count(delimiter) + 1 if isinstance(row, str) else len(row)
        if width != len(header):
            columns = (
                f"there are {len(header)} columns" if len(header) > 1 else f"the first line has one, {header[0]!r}"
            )
            raise DataError(f"{file}, row {number}: {checks.counted(width, 'cell')}, but {columns}")
    return _Table(file, delimiter, header, [row for _, row in numbered], [number for number, _ in numbered])


def _lines(file: Path, text: str, delimiter: str) -> list[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows, first = [], 1  # A quoted cell may go over several lines: a row is where it begins.
    try:
        for row in reader:
            rows.append((first, row))
            first = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{file}, row {first}: it is not a table of cells: {error}") from error
    return rows


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def read_csv(
    path: str | Path,
    *,
    target: str | None = None,
    columns: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    classes: Sequence[str] | None = None,
    need_targets: bool = True,
) -> Examples:
    r"""Reads a table of numbers.

    Args:
        path: The file to read.
        target: The column with the targets: its name, or its number from 1 (-1 is the last). Whole numbers or words are
            classes, other numbers are regression targets.
        columns: The input columns, in this order. None means all but the target and ``drop``.
        drop: The columns that are no inputs, such as an identifier: names or numbers, as for the target.
        classes: The names of the classes, where they are known from the training data. None means the sorted words of
            the column.
        need_targets: Whether to refuse a table without targets. Where they are not needed, a column of targets that is there
            counts among the identifiers, too.

    Returns:
        The examples, with the names of their columns and classes; columns that are neither inputs nor targets are their
        identifiers.

    Raises:
        DataError: There is no such file or column, a cell is not a finite number (the message names its row and
            column), or a class is unknown.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "flowers.csv"
    >>> _ = place.write_text("length,width,kind\n5.1,3.5,iris\n6.0,2.9,rose\n")
    >>> flowers = read_csv(place, target="kind")
    >>> flowers.classes, flowers.targets
    (('iris', 'rose'), tensor([0, 1]))
    """
    file = Path(path).expanduser()
    table = _open_table(file, quick=True)
    header = table.header
    goal = None if target is None else _column(file, header, target, required=need_targets)
    if goal is None and need_targets:
        raise DataError(
            f"{file}: which column holds the targets? Name it with --target (target=); there are {', '.join(header)}"
        )
    dropped = {_column(file, header, name, required=True) for name in drop}
    chosen = list(columns) if columns is not None else [n for n in header if n != goal and n not in dropped]
    missing = [n for n in chosen if n not in header]
    if missing:
        which = "column" if len(missing) == 1 else "columns"
        raise DataError(f"{file} lacks the {which} {', '.join(missing[:8])}; it has {_listed(header)}")
    if not chosen:
        raise DataError(f"{file} has no input column beside the target {goal!r}")
    places = [header.index(n) for n in chosen]
    values = table.numeric(places)
    if columns is None:
        _check_digits(table, places, values)
    names = None if classes is None else tuple(classes)
    targets = None
    if goal is not None:
        targets, names = _targets(file, table.numbers, goal, table.column(header.index(goal)), names)
    spare = [n for n in header if n not in chosen and (n != goal or not need_targets)]
    identifiers = {n: tuple(cell.strip() for cell in table.column(header.index(n))) for n in spare}
    counting = tuple(n for n, column in zip(chosen, values.T, strict=True) if _counts_rows(column))
    inputs = torch.from_numpy(values.astype(np.float32))
    return Examples(inputs, targets, file.stem, names, tuple(chosen), identifiers, counting=counting)


def _check_digits(table: _Table, places: list[int], values: np.ndarray) -> None:
    """Refuses columns whose differences are lost in float32, such as identifiers of many digits."""
    least, most = values.min(axis=0), values.max(axis=0)
    rounding = np.abs(values.astype(np.float32) - values).max(axis=0)
    for j in np.flatnonzero(rounding > _MOST_ROUNDING * (most - least)):
        if most[j] > least[j]:
            raise DataError(
                f"{table.file}, column {table.name(places[j])}: its numbers, from {least[j]:.15g} to {most[j]:.15g}, would change by "
                f"up to {rounding[j]:.2g} in 32 bits. If they are identifiers, leave the column out with drop=; else subtract a number "
                "from all of them, such as the smallest, or scale them"
            )


def _counts_rows(values: np.ndarray) -> bool:
    """Tells whether a column may be an identifier: whole numbers that only rise, or that are those of a range in any order."""
    if len(values) < _FEWEST_COUNTED or not (values == np.round(values)).all():
        return False
    rises = bool((np.diff(values) > 0).all())
    return rises or (values.max() - values.min() == len(values) - 1 and len(np.unique(values)) == len(values))


def _column(file: Path, header: list[str], wanted: str, *, required: bool) -> str | None:
    if wanted in header:
        return wanted
    try:
        number = int(wanted)
    except ValueError:
        number = 0
    if number and -len(header) <= number <= len(header):
        return header[number - 1 if number > 0 else number]
    if not required:
        return None
    raise DataError(f"{file} has no column {wanted!r}; it has {_listed(header)}")


def _listed(header: list[str]) -> str:
    if len(header) == 1:
        return f"only one, {header[0]!r}: cells are separated by commas, semicolons, tabs or bars"
    return ", ".join(header)


_NO_INPUT = "Inputs are numbers: fill or correct the cell, turn words and dates into numbers, or leave the column out with drop="
_NO_TARGET = "Targets are numbers or classes: fill or correct the cell, or leave the row out"
_NO_SIGNS = "Numbers have a decimal point, nothing between thousands, and no unit: write them like 1234.5"


def _cell(file: Path, number: int, column: str, cell: str, advice: str = _NO_INPUT) -> float:
    value = _number(cell)
    if value is None or not abs(value) <= _LARGEST:
        got = f"{cell.strip()[:80]!r} is not a finite number" if cell.strip() else "the cell is empty"
        if value is not None and math.isfinite(value):
            got = f"{cell.strip()[:80]!r} is too large for a number of 32 bits"
        elif _WRITTEN_NUMBER.fullmatch(cell):
            advice = _NO_SIGNS
        raise DataError(f"{file}, row {number}, column {column}: {got}. {advice}")
    return value


def _targets(
    file: Path, lines: list[int], column: str, cells: list[str], classes: tuple[str, ...] | None
) -> tuple[torch.Tensor, tuple[str, ...] | None]:
    numbers = [_number(c) for c in cells]
    wrong = [i for i, n in enumerate(numbers) if n is None or not math.isfinite(n)]
    if classes is None and not wrong:
        targets = np.array(numbers, dtype=np.float64)
        far = np.flatnonzero(np.abs(targets) > _LARGEST)
        if len(far):
            _cell(file, lines[far[0]], repr(column), cells[far[0]], _NO_TARGET)
        if (
            (targets == np.round(targets)).all()
            and np.abs(targets).max() < 2**53
            and not any("." in c or "e" in c.lower() for c in cells)
        ):
            return torch.from_numpy(targets.astype(np.int64)), None
        return torch.from_numpy(targets.astype(np.float32)), None
    # A cell without a target, and a few words among numbers, are mistakes, not classes.
    empty = next((i for i, cell in enumerate(cells) if not cell), None)
    words = any(n is None for n in numbers)
    mistake = empty if empty is not None else wrong[0] if not words or len(wrong) < len(cells) // 2 else None
    if classes is None and mistake is not None:
        _cell(file, lines[mistake], repr(column), cells[mistake], _NO_TARGET)
    names = classes if classes is not None else tuple(sorted(set(cells)))
    if classes is None and len(names) > max(_MANY_WORDS, len(cells) // 2):
        if _WRITTEN_NUMBER.fullmatch(cells[wrong[0]]):
            _cell(file, lines[wrong[0]], repr(column), cells[wrong[0]])
        raise DataError(
            f"{file}, column {column!r}: {len(names):,} different words in {len(cells):,} rows, such as {cells[0][:80]!r}, are hardly classes"
        )
    index = {name: i for i, name in enumerate(names)}
    for i, cell in enumerate(cells):
        if cell not in index:
            raise DataError(
                f"{file}, row {lines[i]}, column {column!r}: the class {cell!r} is not one of {', '.join(names)}"
            )
    return torch.tensor([index[c] for c in cells]), names
