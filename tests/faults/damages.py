"""Ways to damage files, each a function of a seeded source of chance: bytes of any file, and values of a JSON tree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

__all__ = ["BYTES", "FILES", "GIANT", "JSON_TEXTS", "JSON_VALUES", "damage_json"]

GIANT = 1 << 41

# Bytes of one file


def _flip_bit(data: bytearray, chance: Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _flip_bits(data: bytearray, chance: Random) -> None:
    for _ in range(chance.randrange(2, 200)):
        _flip_bit(data, chance)


def _set_byte(data: bytearray, chance: Random) -> None:
    data[chance.randrange(len(data))] = chance.randrange(256)


def _flip_bit_at_the_start(data: bytearray, chance: Random) -> None:
    data[chance.randrange(min(len(data), 64))] ^= 1 << chance.randrange(8)


def _truncate(data: bytearray, chance: Random) -> None:
    del data[chance.choice([0, 1, 7, 8, len(data) - 1, chance.randrange(len(data))]) :]


def _extend(data: bytearray, chance: Random) -> None:
    data.extend(chance.randbytes(chance.choice([1, 8, 1000])))


def _zeros(data: bytearray, chance: Random) -> None:
    start = chance.randrange(len(data))
    stop = min(len(data), start + chance.choice([1, 16, 512, 4096]))
    data[start:stop] = bytes(stop - start)


def _cut_out(data: bytearray, chance: Random) -> None:
    start = chance.randrange(len(data))
    del data[start : start + chance.choice([1, 5, 100])]


def _repeat(data: bytearray, chance: Random) -> None:
    start = chance.randrange(len(data))
    data[start:start] = data[start : start + chance.choice([1, 5, 100])]


def _chance(data: bytearray, chance: Random) -> None:
    data[:] = chance.randbytes(chance.choice([1, 10, len(data)]))


BYTES: dict[str, Callable[[bytearray, Random], None]] = {
    "one bit flipped": _flip_bit,
    "many bits flipped": _flip_bits,
    "one byte set": _set_byte,
    "a bit flipped at the start": _flip_bit_at_the_start,
    "truncated": _truncate,
    "extended": _extend,
    "a part of zeros": _zeros,
    "a part cut out": _cut_out,
    "a part repeated": _repeat,
    "random bytes": _chance,
}

# Whole files


def _empty(file: Path, others: list[Path], chance: Random) -> None:
    file.write_bytes(b"")


def _delete(file: Path, others: list[Path], chance: Random) -> None:
    file.unlink()


def _exchange(file: Path, others: list[Path], chance: Random) -> None:
    other = chance.choice(others)
    if other.parent == file.parent:
        mine, theirs = file.read_bytes(), other.read_bytes()
        file.write_bytes(theirs)
        other.write_bytes(mine)
    else:
        shutil.copyfile(other, file)


def _folder(file: Path, others: list[Path], chance: Random) -> None:
    file.unlink()
    file.mkdir()


def _link(file: Path, others: list[Path], chance: Random) -> None:
    target = chance.choice([*others, Path("/dev/zero"), Path("/etc/passwd"), file])
    file.unlink()
    file.symlink_to(target)


def _giant(file: Path, others: list[Path], chance: Random) -> None:
    with file.open("r+b") as stream:
        stream.truncate(chance.choice([GIANT, 1 << 36, 1 << 33]))


FILES: dict[str, Callable[[Path, list[Path], Random], None]] = {
    "emptied": _empty,
    "deleted": _delete,
    "another file in its place": _exchange,
    "a folder in its place": _folder,
    "a link in its place": _link,
    "a sparse giant": _giant,
}

# Values in JSON; texts that are no JSON of ours stand as marks, which are replaced after writing.

_DEEP: Any = []
for _ in range(5):
    _DEEP = [_DEEP]
JSON_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e308, 1e-320, 2**40, 2**63, "", "x", "exact", "kron", "cpu", "../../etc/passwd", "/etc/passwd",
    "\x00", "a\nb", "ß" * 50, "A" * 100_000, [], [1], ["x"], [[]], _DEEP, [0] * 1000, {}, {"a": 1}, {"$tensor": "x"}, {"$tensor": ["x"]},
    {"$class": "Prior"}, {"$class": ["x"]}, {"$class": "GaussianPosterior"}, {"$map": {}}, {"$map": []}, {"$dtype": "int8"}, {"$dtype": "nn"},
    {"$layout": {}}, {"$class": "os.system"},
)  # fmt: skip
JSON_TEXTS = (
    "NaN",
    "-Infinity",
    "1e999",
    "1" + "0" * 400,
    "1" * 5000,
    "[" * 200 + "]" * 200,
    "[" * 100_000,
    '{"a":1,"a":2}',
    "",
    "1 2",
    "nul",
)
_MARK = "@@the mark of the damage@@"


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [p for k, v in inside for p in _places(v, (*path, k))]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def damage_json(value: Any, chance: Random) -> tuple[str, Callable[[str], str]]:
    """Changes one place of a tree, and returns how, and what is done to its text afterwards."""
    # First a branch, then a place in it, so that small branches are met as often as large ones.
    branch = chance.choice(list(value))
    places = [p for p in _places(value) if p[0] == branch]
    path = chance.choice(places)
    parent, key = _at(value, path[:-1]), path[-1]
    old = parent[key]
    kind = chance.choice(["value", "value", "value", "text", "drop", "add", "rename", "number", "copy", "list"])
    if kind == "number" and isinstance(old, int | float) and not isinstance(old, bool):
        parent[key] = chance.choice([old + 1, -old, old * 1.5, float(old), old * 2, 0])
        return "a number changed", str
    if kind == "list" and isinstance(old, list) and old:
        parent[key] = chance.choice([old[:-1], old + old, old[::-1], [*old, old[0]], old[0], [old]])
        return "a list changed", str
    if kind == "copy":
        parent[key] = json.loads(json.dumps(_at(value, chance.choice(_places(value)))))
        return "a value from another place", str
    if kind == "text":
        parent[key], text = _MARK, chance.choice(JSON_TEXTS)
        return "no JSON of ours", lambda written: written.replace(f'"{_MARK}"', text)
    if kind == "drop":
        del parent[key]
        return "an entry dropped", str
    if kind == "add" and isinstance(parent, dict):
        parent[chance.choice(["extra", "", "$class", "$map", "../x", "__class__", "\x00"])] = chance.choice(JSON_VALUES)
        return "an entry added", str
    if kind == "rename" and isinstance(parent, dict):
        parent[chance.choice([str(key) + "x", str(key).upper(), "../" + str(key), ""])] = parent.pop(key)
        return "an entry renamed", str
    parent[key] = json.loads(json.dumps(chance.choice(JSON_VALUES)))
    return "a wrong value", str
