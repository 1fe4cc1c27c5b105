"""Named data sets from folders and by download from a server of our own."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import scipy.io
import torch

from aftermap.data import NAMED, data_folder, download_named, fetch, is_named, named, read_idx, sha256_of
from aftermap.data.named import NamedSet, _idx
from aftermap.errors import DataError, InputError

REAL = Path(__file__).resolve().parents[2] / "../shared/data"


def idx(shape: tuple[int, ...], values: bytes) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values


def mnist_like(folder: Path, n_train: int = 40, n_test: int = 7, ending: str = ".gz") -> dict[str, bytes]:
    """Files as MNIST has them; image i is filled with i."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for prefix, n in (("train", n_train), ("t10k", n_test)):
        pixels = b"".join(bytes([i]) * 6 for i in range(n))
        for name, raw in (
            (f"{prefix}-images-idx3-ubyte", idx((n, 3, 2), pixels)),
            (f"{prefix}-labels-idx1-ubyte", idx((n,), bytes(i % 10 for i in range(n)))),
        ):
            content = gzip.compress(raw) if ending else raw
            (folder / (name + ending)).write_bytes(content)
            files[name + ending] = content
    return files


@pytest.mark.parametrize("ending", [".gz", ""])
def test_idx_sets_and_their_validation_part(tmp_path: Path, ending: str) -> None:
    mnist_like(tmp_path / "mnist", ending=ending)
    parts = {p: named("mnist", p, folder=tmp_path) for p in ("train", "validation", "test")}
    assert {p: len(e) for p, e in parts.items()} == {"train": 36, "validation": 4, "test": 7}
    seen = torch.cat([parts["train"].inputs, parts["validation"].inputs])[:, 0, 0, 0].mul(255).round().sort().values
    assert torch.equal(seen, torch.arange(40.0))
    assert parts["test"].classes == tuple("0123456789")


def test_missing_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"mnist \(train\) is not in .*train-images-idx3-ubyte.gz is missing; fetch it \(12 MB\)"
    ):
        named("mnist", "train", folder=tmp_path)
    with pytest.raises(DataError, match="put its idx files there"):
        named("notmnist", "test", folder=tmp_path)
    with pytest.raises(InputError, match="no data set 'emnist'"):
        named("emnist", "test", folder=tmp_path)
    with pytest.raises(InputError, match="part='dev'"):
        named("mnist", "dev", folder=tmp_path)
    with pytest.raises(DataError, match="uci_yacht: no file of this name"):
        named("uci_yacht", "test", folder=tmp_path)
    assert not is_named("emnist")


def test_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERMAP_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    assert data_folder("x") == Path("x")


def test_cifar10_archive_and_files(tmp_path: Path) -> None:
    place = tmp_path / "cifar10"
    place.mkdir()
    rows = np.arange(3 * 3073, dtype=np.int64).reshape(3, 3073).astype(np.uint8)
    rows[:, 0] = [3, 0, 9]
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    with tarfile.open(place / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = rows.nbytes
            tar.addfile(info, io.BytesIO(rows.tobytes()))
    test = named("cifar10", "test", folder=tmp_path)
    assert test.targets is not None
    assert test.targets.tolist() == [3, 0, 9]
    expected = torch.from_numpy(rows[:, 1:].reshape(3, 3, 32, 32)).float() / 255
    torch.testing.assert_close(test.inputs, expected)
    assert len(named("cifar10", "train", folder=tmp_path)) == 13  # of 15
    (place / "cifar-10-binary.tar.gz").unlink()
    (place / "test_batch.bin").write_bytes(rows.tobytes())
    torch.testing.assert_close(named("cifar10", "test", folder=tmp_path).inputs, expected)
    (place / "test_batch.bin").write_bytes(rows.tobytes()[:-1])
    with pytest.raises(DataError, match="no multiple of 3,073"):
        named("cifar10", "test", folder=tmp_path)
    (place / "cifar-10-binary.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="is damaged or another file"):
        named("cifar10", "test", folder=tmp_path)


def test_svhn_mat(tmp_path: Path) -> None:
    (tmp_path / "svhn").mkdir()
    x = np.arange(32 * 32 * 3 * 2, dtype=np.int64).reshape(32, 32, 3, 2).astype(np.uint8)
    scipy.io.savemat(tmp_path / "svhn" / "test_32x32.mat", {"X": x, "y": np.array([[10], [4]], np.uint8)})
    found = named("svhn", "test", folder=tmp_path)
    assert found.targets is not None
    assert found.targets.tolist() == [0, 4]
    torch.testing.assert_close(found.inputs[1, 2], torch.from_numpy(x[:, :, 2, 1].copy()).float() / 255)


def test_any_image_set_may_be_npz(tmp_path: Path) -> None:
    (tmp_path / "svhn").mkdir()
    np.savez(tmp_path / "svhn" / "test.npz", x=np.zeros((4, 32, 32, 3), np.uint8), y=np.arange(4))
    assert named("svhn", "test", folder=tmp_path).inputs.shape == (4, 3, 32, 32)


def test_uci_splits(tmp_path: Path) -> None:
    (tmp_path / "uci_regression").mkdir()
    (tmp_path / "uci_classification").mkdir()
    x = np.arange(20.0)[:, None]
    np.savez(tmp_path / "uci_regression" / "power-plant.npz", X=x, y=x[:, 0] / 2, test_0=[0, 1], test_1=[5, 6, 7])
    assert named("uci_power-plant", "test", folder=tmp_path).inputs.flatten().tolist() == [0.0, 1.0]
    assert named("uci_power_plant/1", "test", folder=tmp_path).inputs.flatten().tolist() == [5.0, 6.0, 7.0]
    train = named("uci_power-plant/1", "train", folder=tmp_path)
    held = named("uci_power-plant/1", "validation", folder=tmp_path)
    assert sorted(train.inputs.flatten().tolist() + held.inputs.flatten().tolist()) == [
        i for i in range(20) if i not in (5, 6, 7)
    ]
    with pytest.raises(DataError, match="has 2 splits"):
        named("uci_power-plant/2", "test", folder=tmp_path)
    np.savez(tmp_path / "uci_classification" / "banana.npz", X=np.zeros((20, 2)), y=np.array([-1.0, 1.0] * 10))
    found = named("uci_banana", "train", folder=tmp_path)
    assert found.is_classes
    assert set(found.targets.tolist()) == {0, 1}
    np.savez(
        tmp_path / "uci_classification" / "heart_presplit.npz", X_tr=x, y_tr=x[:, 0] % 2, X_te=x + 1, y_te=x[:, 0] % 2
    )
    assert float(named("uci_heart", "test", folder=tmp_path).inputs.max()) == 20.0
    np.savez(tmp_path / "uci_classification" / "odd.npz", a=x)
    with pytest.raises(DataError, match="has no array 'X'"):
        named("uci_odd", "test", folder=tmp_path)


@pytest.mark.parametrize("name, n", [("mnist", 10000), ("kmnist", 10000), ("notmnist", 10000), ("uci_yacht", 31)])
def test_real_files(name: str, n: int) -> None:
    if not REAL.is_dir():
        pytest.skip("the real data are not beside the project")
    found = named(name, "test", folder=REAL)
    assert len(found) == n
    assert bool(torch.isfinite(found.inputs).all())


# Downloads


class Handler(BaseHTTPRequestHandler):
    """Serves files from memory; breaks off the first answer if asked to, and understands ranges if asked to."""

    files: ClassVar[dict[str, bytes]] = {}
    breaks: ClassVar[list[str]] = []
    ranges: ClassVar[bool] = True
    asked: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        given = self.headers.get("Range")
        type(self).asked.append(given)
        if name not in self.files:
            self.send_error(404)
            return
        content = self.files[name]
        start = int(given.removeprefix("bytes=").rstrip("-")) if given and self.ranges else 0
        if start and start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        if name in self.breaks:
            self.breaks.remove(name)
            body = body[: len(body) // 2]
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    class Own(Handler):
        files, breaks, asked, ranges = {}, [], [], True

    running = ThreadingHTTPServer(("127.0.0.1", 0), partial(Own))
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_address[1]}/", Own
    running.shutdown()
    running.server_close()
    thread.join()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_named_set_is_downloaded_once(
    tmp_path: Path, server: tuple[str, type[Handler]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, handler = server
    handler.files = mnist_like(tmp_path / "made")
    here = NamedSet(_idx, tuple("0123456789"), {n: digest(c) for n, c in handler.files.items()}, (address,), "1 kB")
    monkeypatch.setitem(NAMED, "mnist", here)
    found = named("mnist", "test", folder=tmp_path / "data", download=True)
    assert len(found) == 7
    assert torch.equal(read_idx(tmp_path / "data/mnist/t10k-labels-idx1-ubyte.gz").long(), found.targets)
    count = len(handler.asked)
    assert len(download_named("mnist", tmp_path / "data")) == 4
    assert len(handler.asked) == count  # everything was there
    assert not list((tmp_path / "data" / "mnist").glob("*.part"))


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_taken_up_again(tmp_path: Path, server: tuple[str, type[Handler]], ranges: bool) -> None:
    address, handler = server
    content = bytes(range(256)) * 1000
    handler.files, handler.breaks, handler.ranges = {"a.bin": content}, ["a.bin"], ranges
    place = fetch([address + "a.bin"], tmp_path / "deep" / "a.bin", digest(content))
    assert place.read_bytes() == content
    assert handler.asked[0] is None
    assert handler.asked[1] == f"bytes={len(content) // 2}-"


def test_an_interrupted_download_goes_on(tmp_path: Path, server: tuple[str, type[Handler]]) -> None:
    address, handler = server
    content = bytes(range(200))
    handler.files = {"a.bin": content}
    (tmp_path / "a.bin.part").write_bytes(content[:50])
    assert fetch([address + "a.bin"], tmp_path / "a.bin", digest(content)).read_bytes() == content
    assert handler.asked == ["bytes=50-"]
    (tmp_path / "b.bin.part").write_bytes(content)  # whole, but killed before it was moved
    handler.files["b.bin"] = content
    assert fetch([address + "b.bin"], tmp_path / "b.bin", digest(content)).read_bytes() == content


def test_wrong_checksums_and_addresses(tmp_path: Path, server: tuple[str, type[Handler]]) -> None:
    address, handler = server
    handler.files = {"a.bin": b"other", "good.bin": b"right"}
    with pytest.raises(DataError, match="the checksum of what came is"):
        fetch([address + "a.bin"], tmp_path / "a.bin", digest(b"right"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="404"):
        fetch([address + "none.bin"], tmp_path / "a.bin", digest(b"right"))
    # A second address is tried when the first has something else.
    found = fetch([address + "a.bin", address + "good.bin"], tmp_path / "a.bin", digest(b"right"))
    assert found.read_bytes() == b"right"
    assert sha256_of(found) == digest(b"right")
    with pytest.raises(DataError, match="is there, but its checksum is not"):
        fetch([address + "a.bin"], tmp_path / "a.bin", digest(b"else"))
    with pytest.raises(InputError, match="notmnist cannot be downloaded"):
        download_named("notmnist", tmp_path)


def test_checksums_are_whole() -> None:
    digests = [d for s in NAMED.values() for d in s.files.values()]
    assert len(digests) == len(set(digests)) == 15
    assert all(len(d) == 64 and int(d, 16) for d in digests)


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://example.org/a.bin", "data:,right", "a.bin"])
def test_only_addresses_of_the_web_are_fetched(tmp_path: Path, url: str) -> None:
    with pytest.raises(InputError, match=r"urls must begin with https:// or http://"):
        fetch([url], tmp_path / "a.bin", digest(b"right"))
    assert list(tmp_path.iterdir()) == []
