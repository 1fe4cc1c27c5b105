"""Files and folders of users: written beside what they replace, private while they grow, then moved into place with sensible permissions."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["flush", "give_permissions", "replaced_file"]

_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
# Whatever the umask says, strangers do not write; and what is not a folder is not run.
_OF_FOLDERS, _OF_FILES = ~stat.S_IWOTH, 0o664


def flush(path: Path) -> None:
    """Makes the disk hold what was written to a file, or which files a folder has; Windows cannot open folders for this."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replaced_file(file: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a neighbour of ``file`` to write to, which takes its place when the body has ended without an exception.

    The neighbour is the user's alone while it is written. Then it gets the permissions of the file that it replaces, or
    those that the umask gives to a new one, whatever the program that wrote it thinks of them.

    Args:
        file: The path that the file shall have; missing folders are made.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with replaced_file(place) as part:
    ...     _ = part.write_text("done")
    >>> place.read_text()
    'done'
    """
    place = Path(file)
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f".{place.name}.part")
    part.unlink(missing_ok=True)  # What a kill has left; a link under this name is not followed either.
    part.touch(exist_ok=False)
    try:
        wanted = _mode(place if place.exists() else part) & _OF_FILES
        _allow(part, _PRIVATE_FILE)
        yield part
        _allow(part, wanted)
        flush(part)
        part.replace(place)
        flush(place.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def give_permissions(new: Path, old: Path) -> Iterator[None]:
    """Keeps a new, empty folder to the user while the body fills it, and then gives it the permissions of what it replaces.

    Where there is no ``old`` folder, the new one gets back those that the umask gave it. Its files get those of the folder.
    """
    wanted = _mode(old if old.is_dir() else new) & _OF_FOLDERS
    _allow(new, _PRIVATE_FOLDER)
    yield
    for place, folders, files in os.walk(new):
        for name in folders:
            _allow(Path(place, name), wanted)
        for name in files:
            _allow(Path(place, name), wanted & _OF_FILES)
    _allow(new, wanted)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _allow(path: Path, mode: int) -> None:
    with suppress(PermissionError):  # Some file systems have no permissions.
        path.chmod(mode)
