"""The idx reader on files written by hand, whole and damaged."""

import gzip
import struct

import pytest
import torch

from aftermap.data import read_idx
from aftermap.errors import DataError


def content(kind, shape, values):
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values


def test_plain_and_compressed(tmp_path):
    raw = content(0x08, (2, 3, 4), bytes(range(24)))
    expected = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    for name, data in (("plain", raw), ("packed", gzip.compress(raw))):
        (tmp_path / name).write_bytes(data)
        assert torch.equal(read_idx(tmp_path / name), expected)


@pytest.mark.parametrize(
    "kind, code, dtype", [(0x0C, "i", torch.int32), (0x0D, "f", torch.float32), (0x0E, "d", torch.float64)]
)
def test_byte_order(tmp_path, kind, code, dtype):
    (tmp_path / "file").write_bytes(content(kind, (3,), struct.pack(f">3{code}", 1, -2, 300)))
    assert torch.equal(read_idx(tmp_path / "file"), torch.tensor([1, -2, 300], dtype=dtype))


def test_damaged(tmp_path):
    raw = content(0x08, (2, 3), bytes(6))
    cases = {
        "short": (raw[:-1], "holds 5"),
        "long": (raw + b"x", "holds 7"),
        "header": (raw[:6], "cut short"),
        "other": (b"hello world", "not an idx file"),
        "empty": (b"", "begins with nothing"),
        "packed": (gzip.compress(raw)[:-9], "damaged gzip"),
    }
    for name, (data, message) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=message):
            read_idx(tmp_path / name)
    with pytest.raises(DataError, match="there is no file"):
        read_idx(tmp_path / "nowhere")


def test_a_shape_that_cannot_be_in_the_file(tmp_path):
    raw = content(0x08, (2**32 - 1, 2**32 - 1, 255), bytes(100))
    (tmp_path / "plain").write_bytes(raw)
    with pytest.raises(DataError, match="but holds 100"):
        read_idx(tmp_path / "plain")
    (tmp_path / "packed").write_bytes(gzip.compress(raw))
    with pytest.raises(DataError, match=r"takes [\d,]{20,} bytes, but holds a part of"):
        read_idx(tmp_path / "packed")
    (tmp_path / "bomb").write_bytes(gzip.compress(content(0x08, (2, 3), bytes(10**7))))
    with pytest.raises(DataError, match="which takes 6 bytes, but holds more"):
        read_idx(tmp_path / "bomb")
    (tmp_path / "deep").write_bytes(content(0x08, (1,) * 70, bytes(1)))
    with pytest.raises(DataError, match="not an idx file"):
        read_idx(tmp_path / "deep")
