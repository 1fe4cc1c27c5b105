"""The files of a saved folder, read with suspicion: sizes first, checksums before content, bounds on everything that nests.

A checksum tells damage from content. It is no signature: who writes all of a folder writes its checksums, too. So what passes is
still read strictly, and nothing in a folder names code.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from aftermap import checks
from aftermap.errors import DataError
from aftermap.posteriors.records import ADVICE, ListOf, MapOf, Record, Text, Whole

__all__ = [
    "CHECKSUM",
    "DTYPES",
    "MAX_DEPTH",
    "MAX_JSON_BYTES",
    "check_file",
    "check_tensor_header",
    "content_digest",
    "depth_of",
    "existing_folder",
    "file_record",
    "parse_json",
    "plain_file",
    "read_json",
    "sealed",
    "unsealed",
]

CHECKSUM = "checksum"
MAX_JSON_BYTES = 64 << 20
MAX_DEPTH = 64
# The names that safetensors has for types, and ours.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_HEADER = MapOf(
    Record({"dtype": Text(), "shape": ListOf(Whole()), "data_offsets": ListOf(Whole(), length=2)}),
)


def existing_folder(folder: str | os.PathLike[str], what: str = "posterior") -> Path:
    """Returns the path of a folder that is there.

    Raises:
        DataError: There is none.
    """
    place = Path(folder).expanduser()
    try:
        if place.is_dir():
            return place
        there = place.exists()
    except (OSError, ValueError) as error:  # A name that is too long, or has a zero byte in it.
        raise DataError(f"there is no {what} at {str(place)[:200]!r}: {error}") from error
    raise DataError(f"there is no {what} at {place}: {'it is a file' if there else 'no such folder'}")


def plain_file(place: Path, name: str, why: str) -> Path:
    """Returns a file that lies in the folder itself: no link, no device, no pipe.

    Args:
        place: The folder.
        name: The name of the file, without any path.
        why: Why it should be there, for the message.

    Raises:
        DataError: It is missing, or not such a file.
    """
    file = place / name
    try:
        mode = file.lstat().st_mode
    except OSError as error:
        inside = sorted(str(path.parent) for path in place.glob(f"*/{name}"))
        advice = f"There is one in {', '.join(inside[:3])}: is that the folder that is meant?" if inside else ADVICE
        raise DataError(f"{file} is missing; {why}. {advice}") from error
    if stat.S_ISLNK(mode):
        raise DataError(
            f"{file} is a link to another place; a saved folder holds its files itself. Copy the folder with its files (cp -rL), and "
            "load the copy"
        )
    if not stat.S_ISREG(mode):
        raise DataError(f"{file} is not a plain file. {ADVICE}")
    return file


def read_json(file: Path) -> Any:
    """Returns what a JSON file holds, within bounds of size and nesting.

    Raises:
        DataError: It is no JSON, too large or too deep, has a number that is not finite or not a number of 64 bits, or a name
            twice in one object.
    """
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        raise DataError(f"{file} has {size:,} bytes, more than the {MAX_JSON_BYTES:,} that are read. {ADVICE}")
    try:
        with file.open("rb") as stream:  # The bound holds also for a file that grows.
            content = stream.read(MAX_JSON_BYTES)
        return parse_json(content.decode("utf-8"), str(file))
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is damaged: it is not JSON ({error}). {ADVICE}") from error


def parse_json(text: str, where: str) -> Any:
    """Returns the value that a JSON text stands for, as strictly as `read_json`.

    >>> parse_json('{"a": [1, 2.5]}', "here")
    {'a': [1, 2.5]}
    >>> parse_json('{"a": 1e999}', "here")
    Traceback (most recent call last):
    aftermap.errors.DataError: here is damaged: it is not JSON (the number 1e999 is not finite). The folder is damaged ...
    """
    if depth_of(text) > MAX_DEPTH:
        raise DataError(f"{where} is damaged: its values are nested deeper than {MAX_DEPTH} levels. {ADVICE}")
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite, parse_int=_whole
        )
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is damaged: it is not JSON ({error}). {ADVICE}") from error


def depth_of(text: str) -> int:
    """Returns how deeply brackets are nested, without reading the values.

    >>> depth_of('{"a": [[1], "]]]"]}')
    3
    """
    depth = deepest = 0
    for bracket in _BRACKETS.finditer(text):
        sign = bracket.group()[0]
        depth += (sign in "[{") - (sign in "]}")
        deepest = max(deepest, depth)
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [n for n, _ in pairs]
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"the name {twice[:40]!r} stands twice in one object")
    return content


def _constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is not finite")
    return value


def _whole(text: str) -> int:
    if len(text) > 21 or not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"the whole number {text[:20]}… is too large")
    return int(text)


def content_digest(config: Mapping[str, Any]) -> str:
    """Returns the checksum of a configuration without its own entry: of the content and its order, not of spaces."""
    content = {k: v for k, v in config.items() if k != CHECKSUM}
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def sealed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration with its checksum."""
    return {**config, CHECKSUM: content_digest(config)}


def unsealed(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Returns a configuration without its checksum, which has been compared.

    Raises:
        DataError: It is missing, or not that of the content.
    """
    if config.get(CHECKSUM) != content_digest(config):
        raise DataError(
            f"{file} is not what was saved: its {CHECKSUM} {'is missing' if CHECKSUM not in config else 'differs'}. It is damaged or was "
            "edited: copy it again from where it was saved; to change what it says, load it, and save it again"
        )
    return {k: v for k, v in config.items() if k != CHECKSUM}


def file_record(file: Path) -> dict[str, Any]:
    """Returns the size and the checksum of a file, for the configuration beside it."""
    return {"bytes": file.stat().st_size, "sha256": _digest(file)}


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while part := stream.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def check_file(file: Path, record: Mapping[str, Any]) -> None:
    """Refuses a file that is not the one that was saved: first by its size, then by its checksum.

    Args:
        file: A plain file.
        record: What `file_record` said when it was saved.

    Raises:
        DataError: Its size or checksum is another, or it cannot be held in memory.
    """
    size, expected = file.stat().st_size, record["bytes"]
    if size < expected:
        raise DataError(f"{file} is truncated: {size:,} bytes instead of {expected:,}. Copy it again, or fit again")
    if size > expected:
        raise DataError(
            f"{file} is too long: {size:,} bytes instead of {expected:,}. It is damaged or from another fit: copy it again, or fit again"
        )
    checks.memory(str(file), size)
    if _digest(file) != record["sha256"]:
        raise DataError(
            f"{file} is not the file that was saved with config.json: its checksum differs. It is damaged or from another fit: copy it "
            "again, or fit again"
        )


def check_tensor_header(file: Path, table: Mapping[str, Mapping[str, Any]] | None) -> None:
    """Compares the header of a safetensors file with what should be in it, before any tensor is read.

    Args:
        file: A plain file.
        table: The shape and the dtype of each tensor, by name; None where any tensors will do.

    Raises:
        DataError: It is not a safetensors file, its tensors do not fill it, or they are not those of the table.
    """
    header, room = _header(file)
    if table is not None and set(header) != set(table):
        missing, extra = sorted(set(table) - set(header)), sorted(set(header) - set(table))
        raise DataError(
            f"{file} does not fit config.json: it lacks {missing[:5] or 'nothing'} and has unknown {extra[:5] or 'nothing'}. {ADVICE}"
        )
    wrong, end = [], 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise DataError(f"{file}: {name} has the unknown type {entry['dtype'][:20]!r}. {ADVICE}")
        start, stop = entry["data_offsets"]
        if start != end or stop - start != math.prod(entry["shape"]) * dtype.itemsize:
            raise DataError(f"{file}: the place of {name} is not that of {dtype} {entry['shape'][:8]}. {ADVICE}")
        end = stop
        described = {"shape": entry["shape"], "dtype": str(dtype).removeprefix("torch.")}
        expected = described if table is None else {k: table[name].get(k) for k in described}
        if described != expected:
            wrong.append(
                f"{name} is {described['dtype']} {described['shape']}, should be {expected['dtype']} {expected['shape']}"
            )
    if wrong:
        raise DataError(f"{file} does not fit config.json: " + "; ".join(wrong[:5]) + f". {ADVICE}")
    if end != room:
        raise DataError(f"{file} has {room:,} bytes of values, but its tensors take {end:,}. {ADVICE}")


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Returns the header of a safetensors file, and the number of bytes behind it."""
    foreign = f"{file} is damaged or foreign: it is not a safetensors file"
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
            raise DataError(f"{foreign} (its header does not fit into it). {ADVICE}")
        content = stream.read(length)
    try:
        header = parse_json(content.decode("utf-8"), str(file))
    except (UnicodeDecodeError, DataError) as error:
        raise DataError(f"{foreign} (its header is not JSON). {ADVICE}") from error
    if isinstance(header, dict):
        header.pop("__metadata__", None)
    return _HEADER.read(header, f"{file}: the header"), size - 8 - length
