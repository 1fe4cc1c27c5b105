"""Tables: .csv and .tsv files with one example per row."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from aftermap.data.examples import Examples, existing_file
from aftermap.errors import DataError

__all__ = ["csv_rows", "read_csv"]

_DELIMITERS = ",;\t|"


def csv_rows(path: str | Path) -> tuple[list[str], list[list[str]], list[int]]:
    r"""Header, rows and their line numbers in the file; columns without a header are called column_1, column_2, ...

    The first line is the header if none of its cells is a number. The delimiter (comma, semicolon, tab or bar) is the one
    that occurs most often in the first line.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "table.csv"
    >>> _ = place.write_text("a;b\n1;2\n")
    >>> csv_rows(place)
    (['a', 'b'], [['1', '2']], [2])
    """
    file = existing_file(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is no text in UTF-8: {error}") from error
    first = text.lstrip("\n").split("\n", 1)[0]
    delimiter = max(_DELIMITERS, key=first.count)
    numbered = [(number, row) for number, row in _lines(text, delimiter) if any(cell.strip() for cell in row)]
    if not numbered:
        raise DataError(f"{file} is empty")
    header = [cell.strip() for cell in numbered[0][1]]
    has_header = not any(_number(cell) is not None for cell in header)
    if has_header:
        numbered = numbered[1:]
    else:
        header = [f"column_{i + 1}" for i in range(len(header))]
    if not numbered:
        raise DataError(f"{file} has a header, but no rows")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError(f"{file} has two columns called {twice[0]!r}; give each its own name")
    for number, row in numbered:
        if len(row) != len(header):
            raise DataError(f"{file}, row {number}: {len(row)} cells, but there are {len(header)} columns")
    return header, [row for _, row in numbered], [number for number, _ in numbered]


def _lines(text: str, delimiter: str) -> list[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    return [(reader.line_num, row) for row in reader]


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
        path: the file.
        target: the column with the targets: its name, or its number from 1 (-1: the last). Whole numbers or words are
            classes, other numbers are regression targets.
        columns: the input columns, in this order; None: all but the target and ``drop``.
        drop: columns that are no inputs, such as an identifier.
        classes: names of the classes, where they are known from the training data; None: the sorted words of the column.
        need_targets: refuse a table without targets.

    Returns:
        The examples, with the names of their columns and classes.

    Raises:
        DataError: no such file or column, a cell that is not a finite number (with its row and column), an unknown class.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "flowers.csv"
    >>> _ = place.write_text("length,width,kind\n5.1,3.5,iris\n6.0,2.9,rose\n")
    >>> flowers = read_csv(place, target="kind")
    >>> flowers.classes, flowers.targets
    (('iris', 'rose'), tensor([0, 1]))
    """
    file = Path(path).expanduser()
    header, rows, numbers = csv_rows(file)
    goal = None if target is None else _column(file, header, target, required=need_targets)
    if goal is None and need_targets:
        raise DataError(
            f"{file}: which column holds the targets? Name it with --target (target=); there are {', '.join(header)}"
        )
    for name in drop:
        _column(file, header, name, required=True)
    chosen = list(columns) if columns is not None else [n for n in header if n != goal and n not in drop]
    missing = [n for n in chosen if n not in header]
    if missing:
        raise DataError(f"{file} lacks the columns {', '.join(missing[:8])}; it has {', '.join(header)}")
    if not chosen:
        raise DataError(f"{file} has no input column beside the target {goal!r}")
    where = [header.index(n) for n in chosen]
    values = np.empty((len(rows), len(chosen)), dtype=np.float32)
    for i, row in enumerate(rows):
        for j, k in enumerate(where):
            values[i, j] = _cell(file, numbers[i], header[k], row[k])
    names = None if classes is None else tuple(classes)
    targets = None
    if goal is not None:
        cells = [row[header.index(goal)].strip() for row in rows]
        targets, names = _targets(file, numbers, goal, cells, names)
    return Examples(torch.from_numpy(values), targets, file.stem, names, tuple(chosen))


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
    raise DataError(f"{file} has no column {wanted!r}; it has {', '.join(header)}")


def _cell(file: Path, number: int, column: str, cell: str) -> float:
    value = _number(cell)
    if value is None or not math.isfinite(value):
        got = f"{cell.strip()!r} is not a finite number" if cell.strip() else "the cell is empty"
        raise DataError(
            f"{file}, row {number}, column {column!r}: {got}. Inputs are numbers: fill or correct the cell, "
            "turn words into numbers, or leave the column out with --drop (drop=)"
        )
    return value


def _targets(
    file: Path, lines: list[int], column: str, cells: list[str], classes: tuple[str, ...] | None
) -> tuple[torch.Tensor, tuple[str, ...] | None]:
    numbers = [_number(c) for c in cells]
    if classes is None and all(n is not None and math.isfinite(n) for n in numbers):
        found = np.array(numbers, dtype=np.float64)
        if (found == np.round(found)).all() and not any("." in c or "e" in c.lower() for c in cells):
            return torch.from_numpy(found.astype(np.int64)), None
        return torch.from_numpy(found.astype(np.float32)), None
    words = sum(n is None for n in numbers)
    if classes is None and 0 < words < len(cells) // 2:  # a few words among numbers are mistakes, not classes
        row = next(i for i, n in enumerate(numbers) if n is None)
        _cell(file, lines[row], column, cells[row])
    names = classes if classes is not None else tuple(sorted(set(cells)))
    index = {name: i for i, name in enumerate(names)}
    for i, cell in enumerate(cells):
        if cell not in index:
            raise DataError(
                f"{file}, row {lines[i]}, column {column!r}: the class {cell!r} is not one of {', '.join(names)}"
            )
    return torch.tensor([index[c] for c in cells]), names
