"""Readers of the usual formats: .npz files, the idx format of MNIST, and folders of images."""

from __future__ import annotations

import gzip
import io
import math
import struct
import warnings
import zipfile
import zlib
from collections.abc import Sequence
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
    "own_parts",
    "read_arrays",
    "read_idx",
    "read_image_folder",
    "read_npz",
]

_INPUTS = ("x", "X", "inputs", "images", "data", "features", "arr_0")
_TARGETS = ("y", "Y", "targets", "labels", "target", "label", "arr_1")
_SUFFIXES = {"train": ("_train", "_tr"), "validation": ("_val", "_validation"), "test": ("_test", "_te")}
_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MOST_DIMENSIONS = 16
_PACKED = 1100  # No byte of a compressed file stands for more: deflate, which gzip and zip use, reaches 1,032.
_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")


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
