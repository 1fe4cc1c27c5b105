"""Whether the code that a posterior folder names may run.

A folder says how its network is built: `builtin:cnn`, or a factory such as `mypkg.nets:build`, which is code. A folder may come from
anybody, so its factory runs only if the user names it again with `--model`, allows it with `--trust-code`, or saved this very
folder with this very code on this machine. The last is remembered by a hash of the factory's name, its file with the content, and
the folder's config.json, in a file outside the folder that only the user may write.

Only the factory's own file is hashed, not what it imports.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

from aftermap.errors import InputError

__all__ = ["check_factory", "find_factory_file", "memory_file", "remember", "search_working_folder_first"]


def check_factory(spec: str, folder: Path) -> None:
    """Refuses to run a factory that only the folder names.

    Args:
        spec: How the folder says that its network is built.
        folder: The folder of the posterior.

    Raises:
        InputError: The factory is code, and nothing says that the user trusts it.
    """
    if spec.startswith("builtin:"):
        return
    file = find_factory_file(spec)
    if file is not None and _fingerprint(spec, file, folder) in _remembered():
        return
    place = "which is not found from here" if file is None else f"which is code in {file}"
    raise InputError(
        f"{folder} says that its network is built by {spec}, {place}. A folder may come from anybody, so its code runs only if "
        "you saved the folder yourself on this machine and neither its config.json nor the code has changed since. Look at "
        f"the code, and then add --trust-code, or name a factory yourself: --model {spec}"
    )


def remember(spec: str, folder: Path) -> None:
    """Notes that the user saved this folder with this factory.

    Raises:
        OSError: The memory cannot be written.
    """
    file = None if spec.startswith("builtin:") else find_factory_file(spec)
    if file is None:
        return
    fingerprint = _fingerprint(spec, file, folder)
    if fingerprint in _remembered():
        return
    memory = memory_file()
    memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # One write at the end of the file, so that processes that save at the same time do not lose each other's lines.
    descriptor = os.open(memory, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write(fingerprint + "\n")


def memory_file() -> Path:
    """Returns the file with the fingerprints: in the folder that AFTERMAP_STATE names, or in the folder `aftermap` of the user's state folder."""
    chosen, state = os.environ.get("AFTERMAP_STATE"), Path(os.environ.get("XDG_STATE_HOME", ""))
    folder = (
        Path(chosen) if chosen else (state if state.is_absolute() else Path.home() / ".local" / "state") / "aftermap"
    )
    return folder / "trusted_posteriors"


def _remembered() -> set[str]:
    memory = memory_file()
    try:
        private = _only_the_user_writes(memory.parent) and _only_the_user_writes(memory)
        return set(memory.read_text(encoding="ascii").split()) if private else set()
    except (OSError, UnicodeDecodeError):
        return set()


def _only_the_user_writes(place: Path) -> bool:
    status = place.stat()
    return not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)


def _fingerprint(spec: str, file: Path, folder: Path) -> str:
    contents = [hashlib.sha256(f.read_bytes()).hexdigest() for f in (file, folder / "config.json")]
    return hashlib.sha256(json.dumps([spec, str(file), *contents]).encode()).hexdigest()


def find_factory_file(spec: str) -> Path | None:
    """Finds the file that would be run for `file.py:name` or `pkg.module:name`, without running anything.

    (`importlib.util.find_spec` would not do: it imports the packages around a module.)

    >>> find_factory_file("json.decoder:JSONDecoder").name
    'decoder.py'
    >>> find_factory_file("no.such.module:name")
    """
    place = spec.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).resolve() if Path(place).is_file() else None
    parts = place.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    search_working_folder_first()
    first = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    module = next((s for find in first if find is not None and (s := find(parts[0], None)) is not None), None)
    for part in parts[1:]:
        module = None if module is None else _find_below(module, part)
    return Path(module.origin).resolve() if module is not None and module.has_location and module.origin else None


def _find_below(package: ModuleSpec, part: str) -> ModuleSpec | None:
    """Finds a module of a package that is not imported, as the import system would find it in the package's folders."""
    name = f"{package.name}.{part}"
    namespace = ModuleSpec(name, None, is_package=True)
    folders = list(package.submodule_search_locations or ())
    for finder in (pkgutil.get_importer(folder) for folder in folders):
        module = None if finder is None else finder.find_spec(name)
        if module is not None and module.loader is not None:
            return module
        if module is not None and namespace.submodule_search_locations is not None:
            namespace.submodule_search_locations += list(module.submodule_search_locations or ())
    return namespace if namespace.submodule_search_locations else None


def search_working_folder_first() -> None:
    """Imports see the working folder, as they do for a script there."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
