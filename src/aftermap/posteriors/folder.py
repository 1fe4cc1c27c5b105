"""Folders that appear whole or not at all: written beside their place, flushed to the disk, then moved."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from aftermap.errors import InputError

__all__ = ["replaced_folder"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def replaced_folder(target: str | os.PathLike[str], *, overwrite: bool, known: Collection[str]) -> Iterator[Path]:
    """A temporary folder beside ``target`` that takes its place when the body has ended without an exception.

    Whatever is raised inside, or while flushing and moving, leaves an old ``target`` as it was and no temporary folder.

    Args:
        target: where the folder shall be; missing parents are made.
        overwrite: whether an existing folder may be replaced.
        known: names that a replaced folder may hold; one with other files in it is never deleted.

    Raises:
        InputError: the target exists and must not be replaced.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "result"
    >>> with replaced_folder(place, overwrite=False, known=["a.txt"]) as folder:
    ...     _ = (folder / "a.txt").write_text("done")
    >>> (place / "a.txt").read_text()
    'done'
    """
    place = Path(target).expanduser().resolve()  # through a link, so that the link stays
    _check_replaceable(place, overwrite, known)
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.parent / f".{place.name}.{uuid.uuid4().hex}.tmp"
    try:
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            _flush(file)
        _flush(temporary)
        _check_replaceable(place, overwrite, known)
        _move(temporary, place)
        _flush(place.parent)
    finally:
        # After an exchange this is what was replaced.
        shutil.rmtree(temporary, ignore_errors=True)


def _check_replaceable(place: Path, overwrite: bool, known: Collection[str]) -> None:
    if not place.exists():
        return
    if not place.is_dir():
        raise InputError(f"{place} is a file; a posterior is saved as a folder: choose another name")
    inside = sorted(os.listdir(place))
    if not inside:
        return
    if not overwrite:
        raise InputError(
            f"{place} exists and is not empty; choose another folder, or pass overwrite=True to replace it"
        )
    foreign = [n for n in inside if n not in known]
    if foreign:
        raise InputError(
            f"{place} holds files that do not belong to a saved posterior ({', '.join(foreign[:5])}), so it is not "
            f"replaced; a posterior's folder holds only {', '.join(known)}. Choose another folder, or move them away"
        )


def _flush(path: Path) -> None:
    """Makes the disk hold what was written; folders cannot be opened for this on Windows."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _move(source: Path, place: Path) -> None:
    if not place.exists():
        os.rename(source, place)
        return
    if _exchange(source, place):
        return
    # Two renames: where the system has no exchange, a kill between them leaves the old folder under the name `aside`.
    aside = place.parent / f".{place.name}.{uuid.uuid4().hex}.old"
    os.rename(place, aside)
    try:
        os.rename(source, place)
    except BaseException:
        os.rename(aside, place)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(source: Path, place: Path) -> bool:
    """Swaps two folders in one step (Linux); False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(place), _RENAME_EXCHANGE) == 0)
