"""Readers of the usual formats: tables (.csv, .tsv), .npz files, the idx format of MNIST, and folders of images."""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aftermap import checks
from aftermap.data.examples import Examples, as_inputs, as_targets, existing_file
from aftermap.errors import DataError
from aftermap.lazy import optional
from aftermap.progress import announce

__all__ = [
    "about_bytes",
    "array_names",
    "csv_rows",
    "own_parts",
    "read_arrays",
    "read_csv",
    "read_idx",
    "read_image_folder",
    "read_npz",
]

_DELIMITERS = ",;\t|"
_INPUTS = ("x", "X", "inputs", "images", "data", "features", "arr_0")
_TARGETS = ("y", "Y", "targets", "labels", "target", "label", "arr_1")
_SUFFIXES = {"train": ("_train", "_tr"), "validation": ("_val", "_validation"), "test": ("_test", "_te")}
_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_LARGEST = float(np.finfo(np.float32).max)
_MOST_DIMENSIONS = 16
_PACKED = 1100  # No byte of a compressed file stands for more: deflate, which gzip and zip use, reaches 1,032.
_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")


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
        """Returns the values of some columns [rows, columns] in float32; the first cell that is no finite number is named."""
        # A number that float32 cannot hold becomes infinite, and is then named as well.
        with np.errstate(over="ignore"):
            values = self._parsed(columns).astype(np.float32)
        if np.isfinite(values).all():
            return values
        # NumPy does not say which cell it was, and reads fewer ways to write a number than Python.
        for i, row in enumerate(self.rows):
            cells = self.cells(row)
            for j, k in enumerate(columns):
                values[i, j] = _cell(self.file, self.numbers[i], self.header[k], cells[k])
        return values

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
        raise DataError(f"{file} is not text in UTF-8: {error}") from error
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
            raise DataError(f"{file}, row {number}: {width} cells, but there are {len(header)} columns")
    return _Table(file, delimiter, header, [row for _, row in numbered], [number for number, _ in numbered])


def _lines(file: Path, text: str, delimiter: str) -> list[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        return [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise DataError(f"{file}, row {reader.line_num}: it is not a table of cells: {error}") from error


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
        raise DataError(f"{file} lacks the columns {', '.join(missing[:8])}; it has {', '.join(header)}")
    if not chosen:
        raise DataError(f"{file} has no input column beside the target {goal!r}")
    values = table.numeric([header.index(n) for n in chosen])
    names = None if classes is None else tuple(classes)
    targets = None
    if goal is not None:
        targets, names = _targets(file, table.numbers, goal, table.column(header.index(goal)), names)
    spare = [n for n in header if n not in chosen and (n != goal or not need_targets)]
    identifiers = {n: tuple(cell.strip() for cell in table.column(header.index(n))) for n in spare}
    return Examples(torch.from_numpy(values), targets, file.stem, names, tuple(chosen), identifiers)


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


_NO_INPUT = "Inputs are numbers: fill or correct the cell, turn words into numbers, or leave the column out with drop="
_NO_TARGET = "Targets are numbers or classes: fill or correct the cell, or leave the row out"


def _cell(file: Path, number: int, column: str, cell: str, advice: str = _NO_INPUT) -> float:
    value = _number(cell)
    if value is None or not abs(value) <= _LARGEST:
        got = f"{cell.strip()[:80]!r} is not a finite number" if cell.strip() else "the cell is empty"
        if value is not None and math.isfinite(value):
            got = f"{cell.strip()[:80]!r} is too large for a number of 32 bits"
        raise DataError(f"{file}, row {number}, column {column!r}: {got}. {advice}")
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
            _cell(file, lines[far[0]], column, cells[far[0]], _NO_TARGET)
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
        _cell(file, lines[mistake], column, cells[mistake], _NO_TARGET)
    names = classes if classes is not None else tuple(sorted(set(cells)))
    index = {name: i for i, name in enumerate(names)}
    for i, cell in enumerate(cells):
        if cell not in index:
            raise DataError(
                f"{file}, row {lines[i]}, column {column!r}: the class {cell!r} is not one of {', '.join(names)}"
            )
    return torch.tensor([index[c] for c in cells]), names


def about_bytes(source: object) -> str:
    """Says what a user should know where inputs are bytes."""
    return f"{source} holds bytes, which are taken as pixels and divided by 255; save floating-point numbers for another scale"


def read_npz(path: str | Path, *, part: str | None = None, need_targets: bool = True) -> Examples:
    """Reads inputs and targets from an .npz file.

    Args:
        path: The file to read. Inputs are called x, X, inputs, images, data or features; targets y, targets or labels.
            A file may hold several parts, such as x_train and x_test (or X_tr and X_te).
        part: The part to read, "train", "validation" or "test", of a file with several parts.
        need_targets: Whether to refuse a file without targets.

    Returns:
        The examples; bytes are pixels and become numbers from 0 to 1, which is said on a terminal, and in `Examples.rescaled`.

    Raises:
        DataError: There is no such file, it is no .npz file, it has Python objects inside, or no array has a known
            name.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "data.npz"
    >>> np.savez(place, x=np.zeros((3, 2)), y=np.array([0, 1, 1]))
    >>> read_npz(place).targets
    tensor([0, 1, 1])
    """
    file = existing_file(path)
    names = array_names(file)
    x, y = _find(names, _INPUTS, part), _find(names, _TARGETS, part)
    if x is None:
        raise DataError(
            f"{file} has no array of inputs: it holds {checks.few(names) or 'nothing'}; inputs are called {', '.join(_INPUTS[:-1])}"
        )
    if y is None and need_targets:
        raise DataError(
            f"{file} has no array of targets: it holds {checks.few(names)}; targets are called {', '.join(_TARGETS[:-1])}"
        )
    arrays = read_arrays(file, [name for name in (x, y) if name is not None])
    targets = None if y is None else as_targets(arrays[y], f"{file}: {y}")
    rescaled = arrays[x].dtype == np.uint8
    if rescaled:
        announce(about_bytes(file))
    return Examples(as_inputs(arrays[x], f"{file}: {x}"), targets, file.stem, rescaled=rescaled)


def own_parts(path: str | Path) -> tuple[str, ...]:
    """Returns the parts that an .npz file holds under their own names, such as x_train: "train", "validation" or "test"."""
    names = array_names(existing_file(path))
    return tuple(p for p, endings in _SUFFIXES.items() if any(n + e in names for n in _INPUTS for e in endings))


def array_names(file: Path) -> list[str]:
    """Returns the names of the arrays in an .npz file, without numbers that stand alone.

    What the headers say is judged, so that no memory is taken for arrays that cannot be in the file.

    Raises:
        DataError: It is no such file, or damaged, or holds Python objects.
    """
    try:
        return _members(file)
    except DataError:
        raise
    except Exception as error:  # What numpy, zipfile and the decompressors raise for damaged files is of many kinds.
        raise DataError(f"{file} cannot be read as an .npz file: {_named(error)}") from error


def read_arrays(file: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns arrays of an .npz file whose headers `array_names` has judged.

    Raises:
        DataError: They are damaged.
    """
    try:
        with np.load(file, allow_pickle=False) as content:
            return {name: content[name] for name in names}
    except Exception as error:
        raise DataError(f"{file} cannot be read as an .npz file: {_named(error)}") from error


def _members(file: Path) -> list[str]:
    if not zipfile.is_zipfile(file):
        with file.open("rb") as stream:
            if stream.read(6) == b"\x93NUMPY":
                raise DataError(
                    f"{file} holds one array, no .npz archive; write it with numpy.savez(path, x=..., y=...)"
                )
        raise DataError(f"{file} cannot be read as an .npz file: it is not a zip archive")
    names, total = [], 0
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if not entry.filename.endswith(".npy"):
                continue
            name = entry.filename.removesuffix(".npy")
            shape, size = _header(archive, entry)
            deflated = entry.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            if size != entry.file_size or (deflated and size > _PACKED * max(entry.compress_size, 1)):
                raise DataError(
                    f"{file}: {name} says that it has shape {list(shape)[:8]}, but what is in the file is not as large. It is damaged: "
                    "copy it again"
                )
            total += size
            if shape:
                names.append(name)
    checks.memory(str(file), total)
    return names


def _header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> tuple[tuple[int, ...], int]:
    """Returns the shape of an array, and the bytes that it takes with its header."""
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        # Version 3 is version 2 with names in UTF-8.
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
        if dtype.hasobject:
            raise ValueError("it holds Python objects, which could run code")
        if any(n < 0 for n in shape):
            raise ValueError(f"the shape {shape} has a negative number")
        return shape, stream.tell() + math.prod(shape) * dtype.itemsize


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}" if str(error) else type(error).__name__


def _find(arrays: Sequence[str], names: tuple[str, ...], part: str | None) -> str | None:
    endings = _SUFFIXES.get(part or "", ())
    wanted = [n + e for e in endings for n in names] + list(names)
    return next((n for n in wanted if n in arrays), None)


def read_idx(path: str | Path) -> Tensor:
    """Reads an idx file, plain or compressed with gzip.

    Args:
        path: The file to read; compression is seen from its first bytes, not from its name.

    Returns:
        The array, in its own type: images [N, H, W] in uint8, labels [N] in uint8.

    Raises:
        DataError: There is no such file, it is no idx file, or it is cut short.

    References:
        LeCun, Cortes, Burges: The MNIST database (file formats).
    """
    file = existing_file(path)
    with file.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    size = file.stat().st_size
    try:
        with gzip.open(file) if packed else file.open("rb") as stream:
            kind, shape = _idx_header(file, stream.read(4), stream)
            expected, there = math.prod(shape) * kind.itemsize, size - 4 - 4 * len(shape)
            if expected > (_PACKED * size if packed else there):
                content, actual = b"", f"a part of {size:,}" if packed else f"{there:,}"
            else:  # One byte more, to see whether there are too many.
                content = stream.read(checks.memory(str(file), expected) + 1)
                actual = f"{there:,}" if not packed else f"{len(content):,}" if len(content) <= expected else "more"
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        what = "is a damaged gzip file" if packed else "cannot be read"
        raise DataError(f"{file} {what}: {_named(error)}") from error
    if len(content) != expected:
        raise DataError(
            f"{file} says that its shape is {list(shape)}, which takes {expected:,} bytes, but holds {actual}"
        )
    values = np.frombuffer(content, kind).reshape(shape)
    return torch.from_numpy(values.astype(kind.newbyteorder("="), copy=True))


def _idx_header(
    file: Path, start: bytes, stream: gzip.GzipFile | io.BufferedReader
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in _TYPES or not 0 < start[3] <= _MOST_DIMENSIONS:
        raise DataError(f"{file} is not an idx file: it begins with {start.hex(' ') or 'nothing'}")
    shape = stream.read(4 * start[3])
    if len(shape) < 4 * start[3]:
        raise DataError(f"{file} is cut short: its shape of {start[3]} numbers is missing")
    return np.dtype(_TYPES[start[2]]), struct.unpack(f">{start[3]}I", shape)


def read_image_folder(
    path: str | Path,
    *,
    size: tuple[int, int] | None = None,
    channels: int | None = None,
    classes: Sequence[str] | None = None,
    need_targets: bool = True,
) -> Examples:
    """Reads a folder with one subfolder of images per class.

    Args:
        path: The folder to read; images that lie in it directly have no class.
        size: The (height, width) to which images are resized. With None all must have the size of the first.
        channels: The number of channels, 1 (grey) or 3. None means 1 if every image is grey, else 3.
        classes: The names of the subfolders in the order of the class indices. None sorts them.
        need_targets: Whether to refuse a folder without subfolders.

    Returns:
        The inputs [N, C, H, W] with values from 0 to 1, in the order of the names.

    Raises:
        DataError: There is no such folder, it has no images, a file is no image, or images have different sizes.
        UnsupportedError: The package Pillow is not installed.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    image = optional("PIL.Image", "plot", "image folders")
    folders = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    names = tuple(classes) if classes is not None else tuple(folders)
    unknown = [n for n in folders if n not in names]
    if unknown:
        raise DataError(
            f"{folder} has the subfolder {unknown[0]!r}, which is not one of the classes {', '.join(names)}"
        )
    files = [(p, i) for i, name in enumerate(names) for p in _images(folder / name)]
    has_targets = bool(files)
    if not files:
        files = [(p, -1) for p in _images(folder)]
    if not files:
        raise DataError(f"{folder} holds no images; understood are {', '.join(_ENDINGS)}")
    if need_targets and not has_targets:
        raise DataError(f"{folder} holds images, but no subfolder per class, so that their classes are unknown")
    arrays: list[np.ndarray] = []
    opened = [_open(image, p, size) for p, _ in files]
    grey = channels == 1 or (channels is None and all(p.mode in ("1", "L") for p in opened))
    for (file, _), picture in zip(files, opened, strict=True):
        pixels = _pixels(picture, file, "L" if grey else "RGB")
        if arrays and pixels.shape != arrays[0].shape:
            one, other = ("×".join(map(str, s[:2])) for s in (pixels.shape, arrays[0].shape))
            raise DataError(
                f"{file} is {one} pixels, but {files[0][0]} is {other}; resize them with --image-size (size=)"
            )
        arrays.append(pixels)
    stack = torch.from_numpy(np.stack(arrays)).float().div_(255)
    inputs = stack[:, None] if grey else stack.permute(0, 3, 1, 2).contiguous()
    targets = torch.tensor([i for _, i in files]) if has_targets else None
    places = {"file": tuple(str(p.relative_to(folder)) for p, _ in files)}
    return Examples(inputs, targets, folder.name, names or None, identifiers=places)


def _images(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_file() and p.suffix.lower() in _ENDINGS)


def _open(image: Any, file: Path, size: tuple[int, int] | None) -> Any:
    existing_file(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image.DecompressionBombWarning)  # Far more pixels than bytes: refused, too.
            with image.open(file) as opened:
                opened.load()
                picture = _of_bytes(image, opened, file)
                return picture if size is None else picture.resize((size[1], size[0]))
    except DataError:
        raise
    except Exception as error:  # Each of Pillow's readers has its own kinds of errors for damaged files.
        raise DataError(f"{file} cannot be read as an image: {_named(error)}") from error


def _of_bytes(image: Any, picture: Any, file: Path) -> Any:
    """Returns a grey picture of 16 bits as one of 8, which Pillow would cut off at 255; others as they are."""
    if picture.mode not in ("I", "F") and not picture.mode.startswith("I;16"):
        return picture
    if picture.mode == "F" or (picture.mode == "I" and picture.format not in ("PNG", "PPM")):
        raise DataError(
            f"{file} has pixels of 32 bits, of which it is not known what is white; save it with 8 or 16 bits"
        )
    return image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))


def _pixels(picture: Any, file: Path, mode: str) -> np.ndarray:
    try:
        return np.asarray(picture.convert(mode), dtype=np.uint8)
    except Exception as error:
        raise DataError(f"{file} cannot be read as an image: {_named(error)}") from error
