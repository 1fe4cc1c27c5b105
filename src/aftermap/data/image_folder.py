"""Folders of images: one folder per class, or images without classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from aftermap.data.examples import Examples
from aftermap.errors import DataError
from aftermap.late import optional

__all__ = ["read_image_folder"]

_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")


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
        path: the folder; images that lie in it directly have no class.
        size: (height, width) to which images are resized; None: all must have the size of the first.
        channels: 1 (grey) or 3; None: 1 if every image is grey.
        classes: names of the subfolders in the order of the class indices; None: sorted.
        need_targets: refuse a folder without subfolders.

    Returns:
        Inputs [N, C, H, W] from 0 to 1, in the order of the names.

    Raises:
        DataError: no such folder, no images, a file that is no image, or images of different sizes.
        UnsupportedError: Pillow is not installed.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    image = optional("PIL.Image", "plot", "image folders")
    found = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    names = tuple(classes) if classes is not None else tuple(found)
    unknown = [n for n in found if n not in names]
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
    grey = channels == 1 or (channels is None and all(p.mode in ("1", "L", "I", "I;16") for p in opened))
    for (file, _), picture in zip(files, opened, strict=True):
        pixels = np.asarray(picture.convert("L" if grey else "RGB"), dtype=np.uint8)
        if arrays and pixels.shape != arrays[0].shape:
            one, other = ("×".join(map(str, s[:2])) for s in (pixels.shape, arrays[0].shape))
            raise DataError(
                f"{file} is {one} pixels, but {files[0][0]} is {other}; resize them with --image-size (size=)"
            )
        arrays.append(pixels)
    stack = torch.from_numpy(np.stack(arrays)).float().div_(255)
    inputs = stack[:, None] if grey else stack.permute(0, 3, 1, 2).contiguous()
    targets = torch.tensor([i for _, i in files]) if has_targets else None
    return Examples(inputs, targets, folder.name, names or None)


def _images(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_file() and p.suffix.lower() in _ENDINGS)


def _open(image: object, file: Path, size: tuple[int, int] | None):  # type: ignore[no-untyped-def]
    try:
        with image.open(file) as picture:  # type: ignore[attr-defined]
            picture.load()
            return picture if size is None else picture.resize((size[1], size[0]))
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{file} cannot be read as an image: {error}") from error
