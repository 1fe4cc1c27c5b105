"""Data sets by name: those of scikit-learn, and public ones, from a folder or downloaded with their checksums."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aftermap import checks
from aftermap.data.download import fetch
from aftermap.data.examples import Examples, as_inputs, part_of, split
from aftermap.data.readers import array_names, read_arrays, read_idx, read_npz
from aftermap.errors import DataError, InputError
from aftermap.lazy import optional

__all__ = ["BUILTIN", "NAMED", "builtin", "data_folder", "download_named", "is_named", "named", "photograph_patches"]

_IDX = {"train": "train", "test": "t10k"}
_VALIDATION = 0.1  # This is the validation share of an official training part.
_CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_DIGITS = tuple("0123456789")


def _digits(datasets: Any) -> Examples:
    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    return Examples(images, torch.tensor(bunch.target), "digits", tuple(map(str, range(10))))


def _table(loader: str, name: str) -> Callable[[Any], Examples]:
    def load(datasets: Any) -> Examples:
        bunch = getattr(datasets, loader)()
        classes = tuple(map(str, bunch.target_names)) if hasattr(bunch, "target_names") else None
        target = torch.tensor(bunch.target) if classes else torch.tensor(bunch.target, dtype=torch.float32)
        columns = tuple(map(str, bunch.feature_names))
        return Examples(torch.tensor(bunch.data, dtype=torch.float32), target, name, classes, columns)

    return load


BUILTIN: dict[str, Callable[[Any], Examples]] = {
    "digits": _digits,
    "iris": _table("load_iris", "iris"),
    "wine": _table("load_wine", "wine"),
    "breast_cancer": _table("load_breast_cancer", "breast_cancer"),
    "diabetes": _table("load_diabetes", "diabetes"),
}


def builtin(name: str) -> Examples:
    """Returns one of scikit-learn's bundled data sets.

    Args:
        name: The data set: digits (8×8 grey images, from 0 to 1), iris, wine, breast_cancer (classes) or diabetes
            (regression).

    Raises:
        InputError: There is no data set of this name.
        UnsupportedError: The package scikit-learn is not installed.

    >>> builtin("digits").inputs.shape
    torch.Size([1797, 1, 8, 8])
    """
    key = name.replace("-", "_")
    if key not in BUILTIN:
        raise InputError(f"there is no built-in data set {name!r}; there are {', '.join(BUILTIN)}")
    return BUILTIN[key](optional("sklearn.datasets", "sklearn", "the built-in data sets"))


def photograph_patches(count: int, size: int, *, seed: int = 0) -> Examples:
    """Returns small grey patches of scikit-learn's two sample photographs, which no classifier of digits has seen.

    A patch of 4·size pixels is averaged down to ``size``, so that it shows more than a flat piece of sky, and its grey values are
    stretched from 0 to 1.

    >>> photograph_patches(3, 8).inputs.shape
    torch.Size([3, 1, 8, 8])
    """
    pictures = optional("sklearn.datasets", "sklearn", "sample photographs").load_sample_images().images
    generator = np.random.default_rng(seed)
    patches = []
    for _ in range(count):
        picture = np.asarray(pictures[generator.integers(len(pictures))], dtype=np.float32).mean(2)
        side = 4 * size
        top, left = (int(generator.integers(0, limit - side + 1)) for limit in picture.shape)
        patch = picture[top : top + side, left : left + side].reshape(size, 4, size, 4).mean((1, 3))
        low, high = float(patch.min()), float(patch.max())
        patches.append((patch - low) / max(high - low, 1e-6))
    return Examples(torch.from_numpy(np.stack(patches))[:, None], None, "photographs")


@dataclass(frozen=True)
class NamedSet:
    """Where a data set comes from, and how its parts are read.

    Attributes:
        reader: A function of a folder and a part, "train" or "test", that returns the examples.
        classes: The names of the classes.
        files: The SHA-256 hash of each file, as published; empty where there is no place to download from.
        places: The addresses to which the file's name is appended.
        size: The size of the download, in words.
    """

    reader: Callable[[Path, str], Examples]
    classes: tuple[str, ...]
    files: dict[str, str]
    places: tuple[str, ...] = ()
    size: str = ""


def _idx(folder: Path, part: str) -> Examples:
    arrays = {}
    for what in ("images-idx3", "labels-idx1"):
        files = [p for e in ("", ".gz") for p in sorted(folder.glob(f"{_IDX[part]}*-{what}-ubyte{e}"))]
        if not files:
            raise FileNotFoundError(f"{_IDX[part]}-{what}-ubyte.gz")
        arrays[what] = read_idx(files[0])
    inputs = as_inputs(arrays["images-idx3"].numpy(), str(folder))
    return Examples(inputs, arrays["labels-idx1"].long(), folder.name)


def _cifar10(folder: Path, part: str) -> Examples:
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if part == "train" else ["test_batch.bin"]
    archive = folder / "cifar-10-binary.tar.gz"
    if archive.is_file():
        try:
            with tarfile.open(archive) as tar:
                inside = {Path(m.name).name: m for m in tar.getmembers()}
                streams = [tar.extractfile(inside[n]) for n in names]
                raw = b"".join((s or io.BytesIO()).read() for s in streams)
        except (tarfile.TarError, EOFError, KeyError, OSError) as error:
            raise DataError(f"{archive} is damaged or another file: {error}") from error
    else:
        at = folder / "cifar-10-batches-bin" if (folder / "cifar-10-batches-bin").is_dir() else folder
        missing = [n for n in names if not (at / n).is_file()]
        if missing:
            raise FileNotFoundError(archive.name)
        raw = b"".join((at / n).read_bytes() for n in names)
    if not raw or len(raw) % 3073:
        raise DataError(f"{folder}: the {part} part of CIFAR-10 has {len(raw):,} bytes, no multiple of 3,073")
    rows = np.frombuffer(raw, np.uint8).reshape(-1, 3073)
    return Examples(
        as_inputs(rows[:, 1:].reshape(-1, 3, 32, 32), str(folder)),
        torch.from_numpy(rows[:, 0].astype(np.int64)),
        folder.name,
    )


def _svhn(folder: Path, part: str) -> Examples:
    file = folder / f"{part}_32x32.mat"
    if not file.is_file():
        raise FileNotFoundError(file.name)
    content = optional("scipy.io", "sklearn", "the .mat files of SVHN").loadmat(file)
    labels = content["y"].reshape(-1).astype(np.int64) % 10  # The digit 0 is stored as 10.
    return Examples(as_inputs(content["X"].transpose(3, 0, 1, 2), str(file)), torch.from_numpy(labels), folder.name)


_MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


_FASHION_FILES = {
    "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}


_KMNIST_FILES = {
    "train-images-idx3-ubyte.gz": "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4",
    "train-labels-idx1-ubyte.gz": "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17",
    "t10k-images-idx3-ubyte.gz": "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
    "t10k-labels-idx1-ubyte.gz": "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
}


_SVHN_FILES = {
    "train_32x32.mat": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
    "test_32x32.mat": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
}


NAMED: dict[str, NamedSet] = {
    "mnist": NamedSet(
        _idx,
        _DIGITS,
        _MNIST_FILES,
        ("https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/"),
        "12 MB",
    ),
    "fashion-mnist": NamedSet(
        _idx,
        _CLOTHES,
        _FASHION_FILES,
        (
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            "https://fashion-mnist.s3.eu-central-1.amazonaws.com/",
        ),
        "31 MB",
    ),
    "kmnist": NamedSet(
        _idx,
        ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
        _KMNIST_FILES,
        ("https://codh.rois.ac.jp/kmnist/dataset/kmnist/", "http://codh.rois.ac.jp/kmnist/dataset/kmnist/"),
        "21 MB",
    ),
    "notmnist": NamedSet(_idx, tuple("ABCDEFGHIJ"), {}),
    "cifar10": NamedSet(
        _cifar10,
        _CIFAR,
        {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
        ("https://www.cs.toronto.edu/~kriz/",),
        "170 MB",
    ),
    "svhn": NamedSet(_svhn, _DIGITS, _SVHN_FILES, ("http://ufldl.stanford.edu/housenumbers/",), "246 MB"),
}


def is_named(name: str) -> bool:
    """Tells whether a name is one of the public data sets.

    >>> is_named("mnist"), is_named("uci_yacht"), is_named("train.npz")
    (True, True, False)
    """
    return name in NAMED or name.startswith("uci_")


def data_folder(folder: str | Path | None = None) -> Path:
    """Returns where named data sets lie: the given folder, else AFTERMAP_DATA, else ~/.cache/aftermap."""
    return Path(folder or os.environ.get("AFTERMAP_DATA") or "~/.cache/aftermap").expanduser()


def named(name: str, part: str, *, folder: str | Path | None = None, download: bool = False) -> Examples:
    """Returns one part of a public data set.

    The validation part is a fixed tenth of the official training part, which is then not in "train".

    Args:
        name: The data set: mnist, fashion-mnist, kmnist, notmnist (idx files), cifar10 (the binary archive), svhn (.mat
            files), or uci_NAME and uci_NAME/K for split K (an .npz file with X, y and test_K). Every image set may also
            be train.npz and test.npz.
        part: The part to read: "train", "validation" or "test".
        folder: The folder that holds one folder per set. None means AFTERMAP_DATA, else ~/.cache/aftermap.
        download: Whether to download what is missing.

    Returns:
        Images [N, C, H, W] with values from 0 to 1, and their labels.

    Raises:
        InputError: The name or the part is unknown.
        DataError: Files are missing or damaged; the message says where they should be and how to get them.
    """
    checks.choice("part", part, ("train", "validation", "test"))
    at = data_folder(folder)
    if name.startswith("uci_"):
        return _uci(name, part, at)
    if name not in NAMED:
        raise InputError(f"there is no data set {name!r}; there are {', '.join(NAMED)}, and uci_NAME")
    known, official = NAMED[name], "test" if part == "test" else "train"
    try:
        if (at / name / f"{official}.npz").is_file():
            examples = read_npz(at / name / f"{official}.npz")
        else:
            examples = known.reader(at / name, official)
    except FileNotFoundError as error:
        if download and known.files:
            download_named(name, at)
            examples = known.reader(at / name, official)
        else:
            how = (
                f"fetch it ({known.size}) with --download (download=True)" if known.files else "put its idx files there"
            )
            raise DataError(f"{name} ({official}) is not in {at / name}: {error} is missing; {how}") from error
    examples = Examples(examples.inputs, examples.targets, name, known.classes)
    if official == "test":
        return examples
    return split(examples, validation=_VALIDATION, test=0.0)[part]


def download_named(name: str, folder: str | Path | None = None) -> list[Path]:
    """Fetches the files of a public data set and checks them; files that are there are kept.

    Raises:
        InputError: There is no place to download the set from.
        DataError: The download failed; see :func:`aftermap.data.fetch`.
    """
    known = NAMED.get(name)
    if known is None or not known.files:
        have = ", ".join(n for n, s in NAMED.items() if s.files)
        raise InputError(f"{name} cannot be downloaded; these can: {have}")
    at = data_folder(folder) / name
    return [fetch([p + f for p in known.places], at / f, digest) for f, digest in known.files.items()]


def _uci(name: str, part: str, at: Path) -> Examples:
    stem, _, number = name.removeprefix("uci_").partition("/")
    wanted = stem.lower().replace("_", "-")
    known: dict[str, Path] = {}
    for group in ("uci_regression", "uci_classification"):
        for file in sorted((at / group).glob("*.npz")):
            known.setdefault(file.stem.removesuffix("_presplit").lower().replace("_", "-"), file)
    if wanted not in known:
        have = f"there are {', '.join('uci_' + n for n in known)}" if known else "there are no files"
        raise DataError(f"{name}: no file of this name in {at}/uci_regression or {at}/uci_classification; {have}")
    file = known[wanted]
    classes = file.parent.name == "uci_classification"
    arrays = read_arrays(file, array_names(file))
    try:
        if "X_tr" in arrays:
            whole = {p: _uci_part(arrays[f"X_{p}"], arrays[f"y_{p}"], name, classes) for p in ("tr", "te")}
            train, test = whole["tr"], whole["te"]
        else:
            whole_set = _uci_part(arrays["X"], arrays["y"], name, classes)
            chosen = arrays.get(f"test_{number or 0}")
            if chosen is None:
                if number:
                    count = sum(k.startswith("test_") for k in arrays)
                    raise DataError(f"{name}: {file} has {count} splits, numbered from 0")
                return part_of(whole_set, part)
            inside = np.setdiff1d(np.arange(len(whole_set)), chosen)
            train = whole_set.take(torch.from_numpy(inside))
            test = whole_set.take(torch.from_numpy(chosen.astype(np.int64)))
    except KeyError as error:
        raise DataError(
            f"{file} has no array {error}; a UCI file holds X, y and test_K, or X_tr, y_tr, X_te, y_te"
        ) from error
    return test if part == "test" else split(train, validation=_VALIDATION, test=0.0)[part]


def _uci_part(x: np.ndarray, y: np.ndarray, name: str, classes: bool) -> Examples:
    targets = torch.from_numpy(np.ascontiguousarray(y.reshape(len(y), -1)[:, 0], dtype=np.float32))
    if classes:
        targets = torch.unique(targets, return_inverse=True)[1]
    return Examples(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)), targets, name)
