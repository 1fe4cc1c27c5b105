"""Arrays of numpy: .npz files with inputs and targets."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from aftermap.data.examples import Examples, as_inputs, as_targets, existing_file
from aftermap.errors import DataError

__all__ = ["read_npz"]

_INPUTS = ("x", "X", "inputs", "images", "data", "features", "arr_0")
_TARGETS = ("y", "Y", "targets", "labels", "target", "label", "arr_1")
_SUFFIXES = {"train": ("_train", "_tr"), "validation": ("_val", "_validation"), "test": ("_test", "_te")}


def read_npz(path: str | Path, *, part: str | None = None, need_targets: bool = True) -> Examples:
    """Reads inputs and targets from an .npz file.

    Args:
        path: the file. Inputs are called x, X, inputs, images, data or features; targets y, targets or labels. A file may
            hold several parts, such as x_train and x_test (or X_tr and X_te).
        part: "train", "validation" or "test", for a file with several parts.
        need_targets: refuse a file without targets.

    Returns:
        The examples; bytes are pixels and become numbers from 0 to 1.

    Raises:
        DataError: no such file, no .npz file, Python objects inside, or no array of a known name.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "data.npz"
    >>> np.savez(place, x=np.zeros((3, 2)), y=np.array([0, 1, 1]))
    >>> read_npz(place).targets
    tensor([0, 1, 1])
    """
    file = existing_file(path)
    try:
        content = np.load(file, allow_pickle=False)
        if isinstance(content, np.ndarray):
            raise DataError(f"{file} holds one array, no .npz archive; write it with numpy.savez(path, x=..., y=...)")
        with content:
            arrays = {name: content[name] for name in content.files if content[name].ndim}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} cannot be read as an .npz file: {error}") from error
    x, y = _find(arrays, _INPUTS, part), _find(arrays, _TARGETS, part)
    if x is None:
        raise DataError(
            f"{file} has no array of inputs: it holds {', '.join(arrays) or 'nothing'}; inputs are called {', '.join(_INPUTS[:-1])}"
        )
    if y is None and need_targets:
        raise DataError(
            f"{file} has no array of targets: it holds {', '.join(arrays)}; targets are called {', '.join(_TARGETS[:-1])}"
        )
    targets = None if y is None else as_targets(arrays[y], f"{file}: {y}")
    return Examples(as_inputs(arrays[x], f"{file}: {x}"), targets, file.stem)


def _find(arrays: dict[str, np.ndarray], names: tuple[str, ...], part: str | None) -> str | None:
    endings = _SUFFIXES.get(part or "", ())
    wanted = [n + e for e in endings for n in names] + list(names)
    return next((n for n in wanted if n in arrays), None)
