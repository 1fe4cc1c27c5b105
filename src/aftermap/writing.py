"""Files and folders of users: written beside what they replace, private while they grow, then moved into place with sensible permissions."""

from __future__ import annotations

import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks.
    fcntl = None  # type: ignore[assignment]

__all__ = ["flush", "give_permissions", "remove", "remove_abandoned", "replaced_file", "temporary_folder"]

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
    """Yields a file to write to, which takes the place of ``file`` when the body has ended without an exception.

    It stands in a hidden folder of its own beside ``file``, so that whatever else a library lays beside it goes with the folder, after a
    kill with the next write. It is the user's alone while it is written. Then it gets the permissions of the file that it replaces,
    or those that the umask gives to a new one, whatever the program that wrote it thinks of them.

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
    folder = place.with_name(f".{place.name}.part")
    remove(folder)  # What a kill has left; a link under this name is not followed either.
    folder.mkdir()
    part = folder / place.name
    try:
        part.touch(exist_ok=False)
        wanted = _mode(place if place.exists() else part) & _OF_FILES
        _allow(part, _PRIVATE_FILE)
        _allow(folder, _PRIVATE_FOLDER)
        yield part
        _allow(part, wanted)
        flush(part)
        part.replace(place)
        flush(place.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove(path: Path) -> None:
    """Deletes a file, a link or a folder with all that it holds, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def temporary_folder(place: Path) -> Iterator[Path]:
    """Yields a new folder beside ``place``, and deletes what has its name at the end, if anything has.

    The folder is locked as long as this process lives, so that others can tell it from one that a killed process has left.
    """
    while True:
        folder = place.parent / f".{place.name}.{uuid.uuid4().hex}.tmp"
        folder.mkdir()
        with _locked(folder) as is_locked:
            if is_locked is False:  # Another process took it for an abandoned one, before it had its lock.
                continue
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return


def remove_abandoned(place: Path) -> None:
    """Deletes the temporary folders for ``place`` that killed processes have left; where there are no locks, none."""
    temporary = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{32}}\.tmp")
    for folder in place.parent.iterdir():
        if temporary.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
            with _locked(folder) as is_locked:
                if is_locked:
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Locks a folder inside, until this process ends in whatever way.

    Yields:
        Whether that succeeded: not if another process has locked or deleted it. None where there are no locks.
    """
    if fcntl is None:
        yield None
        return
    handle, is_locked = None, None
    try:
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = folder.exists()
    except (BlockingIOError, FileNotFoundError):
        is_locked = False
    except OSError:  # Some file systems have no locks, and some folders belong to somebody else.
        is_locked = None
    try:
        yield is_locked
    finally:
        if handle is not None:
            os.close(handle)


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
