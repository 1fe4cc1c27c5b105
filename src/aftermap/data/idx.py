"""The idx format of MNIST and its relatives: a magic number, the shape, and the values."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from aftermap.errors import DataError

__all__ = ["read_idx"]

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | Path) -> Tensor:
    """Reads an idx file, plain or compressed with gzip.

    Args:
        path: the file; compression is seen from its first bytes, not from its name.

    Returns:
        The array, in its own type: images [N, H, W] in uint8, labels [N] in uint8.

    Raises:
        DataError: no such file, no idx file, or one that is cut short.

    References:
        LeCun, Cortes, Burges: The MNIST database (file formats).
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"there is no file {file}")
    content = file.read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{file} is a damaged gzip file: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES or content[3] == 0:
        raise DataError(f"{file} is not an idx file: it begins with {content[:4].hex(' ') or 'nothing'}")
    kind, dimensions = np.dtype(_TYPES[content[2]]), content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"{file} is cut short: its shape of {dimensions} numbers is missing")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    expected = math.prod(shape) * kind.itemsize
    if len(content) - start != expected:
        raise DataError(
            f"{file} says that its shape is {list(shape)}, which takes {expected:,} bytes, but holds {len(content) - start:,}"
        )
    values = np.frombuffer(content, kind, offset=start).reshape(shape)
    return torch.from_numpy(values.astype(kind.newbyteorder("="), copy=True))
