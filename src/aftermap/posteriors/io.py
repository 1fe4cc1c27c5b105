"""Saving and loading: a folder with config.json and safetensors, written whole or not at all. Never pickle.

config.json holds everything that a person may want to read (structure, blocks, prior, layers, treatment, versions, the hash
of the weights, the caller's own configuration); posterior.safetensors the mean, the prior, the decompositions and the sums
over data, so that a fit can go on after loading; reference.safetensors what the caller compares new inputs with.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from aftermap.curvature.structures.base import Factors
from aftermap.errors import DataError, InputError
from aftermap.params import Params, weights_hash
from aftermap.posteriors.base import GaussianPosterior
from aftermap.posteriors.encoding import StateReader, StateWriter, described

__all__ = [
    "FORMAT",
    "SCHEMA",
    "LoadedPosterior",
    "load_posterior",
    "read_model_state",
    "read_saved_config",
    "replaced_folder",
    "save_posterior",
]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
FORMAT = "aftermap posterior"
SCHEMA = 2
# Version 1 named some classes differently; `encoding` reads both.
_READABLE = (1, 2)
_CONFIG, _POSTERIOR, _REFERENCE = "config.json", "posterior.safetensors", "reference.safetensors"
_MODEL = "model.safetensors"
_FILES = (_CONFIG, _POSTERIOR, _REFERENCE, _MODEL, "report.html")


@contextmanager
def replaced_folder(target: str | os.PathLike[str], *, overwrite: bool, known: Collection[str]) -> Iterator[Path]:
    """Yields a temporary folder beside ``target`` that takes its place when the body has ended without an exception.

    Whatever is raised inside, or while flushing and moving, leaves an old ``target`` as it was and no temporary folder.

    Args:
        target: The path that the folder shall have; missing parents are made.
        overwrite: Whether an existing folder may be replaced.
        known: The names that a replaced folder may hold; one with other files in it is never deleted.

    Raises:
        InputError: The target exists and must not be replaced.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "result"
    >>> with replaced_folder(place, overwrite=False, known=["a.txt"]) as folder:
    ...     _ = (folder / "a.txt").write_text("done")
    >>> (place / "a.txt").read_text()
    'done'
    """
    place = Path(target).expanduser().resolve()  # This goes through a link, so that the link stays.
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
    # There are two renames: where the system has no exchange, a kill between them leaves the old folder under the name
    # `aside`.
    aside = place.parent / f".{place.name}.{uuid.uuid4().hex}.old"
    os.rename(place, aside)
    try:
        os.rename(source, place)
    except BaseException:
        os.rename(aside, place)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(source: Path, place: Path) -> bool:
    """Swaps two folders in one step (Linux), and returns False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(place), _RENAME_EXCHANGE) == 0)


@dataclass(frozen=True)
class LoadedPosterior:
    """The posterior and all else that a folder held.

    Attributes:
        posterior: The posterior, bit by bit the one that was saved.
        factors: The sums over data; adding factors of more data continues the fit.
        config: The configuration that the caller had given to :func:`save_posterior`.
        reference: The reference tensors by name, or None.
        weights_hash: The hash of the weights at the fit; compare with :func:`aftermap.params.weights_hash` of the
            model.
        versions: The versions of aftermap and torch that wrote it.
    """

    posterior: GaussianPosterior
    factors: Factors
    config: dict[str, Any]
    reference: dict[str, Tensor] | None
    weights_hash: str
    versions: dict[str, str]


def save_posterior(
    folder: str | os.PathLike[str],
    posterior: GaussianPosterior,
    factors: Factors,
    config: Mapping[str, Any],
    reference: Mapping[str, Tensor] | None = None,
    *,
    weights: Params | None = None,
    model_state: Mapping[str, Tensor] | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a posterior, its factors and a configuration into a folder.

    Args:
        folder: The folder to write; missing parents are made.
        posterior: A posterior over the parameters of ``factors``.
        factors: The sums over data that it was made from.
        config: The caller's own configuration of plain JSON values, which comes back under ``config``.
        reference: Tensors by name, for example quantiles of scores.
        weights: The tensors that are hashed as the MAP weights: all weights of the model where only some are in the
            posterior. None means the posterior's mean.
        model_state: The network's state dict, to be kept beside the posterior. With None it is not in the folder.
        overwrite: Whether to replace a posterior that is already there. It is swapped in one step; on any failure it
            stays.

    Returns:
        The path of the folder.

    Raises:
        InputError: The folder exists, the factors belong to other parameters, or the configuration is not plain JSON.
        OSError: The disk is full or not writable. Nothing is left behind.

    >>> import tempfile
    >>> from aftermap.curvature import fit_curvature
    >>> net = torch.nn.Linear(2, 3)
    >>> factors = fit_curvature(net, [(torch.randn(5, 2), torch.randn(5, 3))], "regression")
    >>> posterior = GaussianPosterior.from_factors(factors, dict(net.named_parameters()))
    >>> place = save_posterior(Path(tempfile.mkdtemp()) / "posterior", posterior, factors, {"noise": 0.5})
    >>> loaded = load_posterior(place)
    >>> loaded.config, bool(loaded.posterior.log_det_precision() == posterior.log_det_precision())
    ({'noise': 0.5}, True)
    """
    if factors.names != posterior.names:
        raise InputError(
            f"the factors are over {len(factors.names)} parameters ({', '.join(factors.names[:5])}) and the posterior over "
            f"{len(posterior.names)} ({', '.join(posterior.names[:5])}); save a posterior with the factors that it was made from"
        )
    writer = StateWriter()
    description: dict[str, Any] = {
        "format": FORMAT,
        "schema": SCHEMA,
        "versions": {"aftermap": _version(), "torch": str(torch.__version__)},
        "weights_hash": weights_hash(posterior.mean if weights is None else weights),
        "parameters": {n: described(v) for n, v in posterior.mean.items()},
        "laplace": _plain(config),
        "posterior": writer.encode(posterior, "posterior"),
        "factors": writer.encode(factors, "factors"),
        "tensors": writer.table,
        "reference": None if reference is None else {n: described(v) for n, v in reference.items()},
    }
    with replaced_folder(folder, overwrite=overwrite, known=_FILES) as place:
        description["files"] = {_POSTERIOR: _write(place / _POSTERIOR, writer.tensors)}
        if reference is not None:
            copies = {n: v.detach().cpu().clone(memory_format=torch.contiguous_format) for n, v in reference.items()}
            description["files"][_REFERENCE] = _write(place / _REFERENCE, copies)
        if model_state is not None:  # Copies: safetensors refuses the shared memory of tied weights.
            state = {n: v.detach().cpu().clone(memory_format=torch.contiguous_format) for n, v in model_state.items()}
            description["files"][_MODEL] = _write(place / _MODEL, state)
        text = json.dumps(description, indent=1, ensure_ascii=False, allow_nan=False)
        (place / _CONFIG).write_text(text + "\n", encoding="utf-8")
    return Path(folder)


def _version() -> str:
    try:
        return metadata.version("aftermap")
    except metadata.PackageNotFoundError:  # It runs from the sources, without installation.
        return "unknown"


def _plain(config: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(config, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the configuration must be of plain JSON values (text, finite numbers, lists, mappings), but {error}"
        ) from error


def _write(file: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    try:
        save_file(tensors, file)
    except SafetensorError as error:  # A full disk comes as this.
        raise OSError(f"{file.name} could not be written: {error}") from error
    return {"bytes": file.stat().st_size, "sha256": _digest(file)}


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while part := stream.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def load_posterior(folder: str | os.PathLike[str], device: torch.device | str | None = None) -> LoadedPosterior:
    """Reads what :func:`save_posterior` wrote, strictly.

    Args:
        folder: The folder as it was saved.
        device: The device where the tensors shall be. None means the CPU.

    Returns:
        The posterior, factors, configuration and reference, equal bit by bit.

    Raises:
        InputError: The device is unknown.
        DataError: A file is missing, damaged or foreign, or does not fit the others; the message says which and how.
    """
    try:
        target = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device={device!r} is no device of torch, such as 'cpu' or 'cuda:0': {error}") from error
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise DataError(f"there is no posterior at {place}: {'it is a file' if place.exists() else 'no such folder'}")
    config = _read_config(place / _CONFIG)
    where = str(place / _CONFIG)
    table, parameters = config["tensors"], config["parameters"]
    tensors = _read_tensors(place, _POSTERIOR, table, config["files"], target)
    reader = StateReader(tensors, table, where, config["schema"])
    posterior, factors = (reader.decode(config[k], k) for k in ("posterior", "factors"))
    for loaded, wanted, key in ((posterior, GaussianPosterior, "posterior"), (factors, Factors, "factors")):
        if not isinstance(loaded, wanted):
            raise DataError(f"{where}: {key} should be a {wanted.__name__}, got a {type(loaded).__name__}")
    _check_agreement(posterior, factors, parameters, where)
    reference = None
    if config["reference"] is not None:
        reference = _read_tensors(place, _REFERENCE, config["reference"], config["files"], target)
    return LoadedPosterior(
        posterior, factors, config["laplace"], reference, config["weights_hash"], dict(config["versions"])
    )


def read_saved_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what the caller had given to :func:`save_posterior` as its configuration, without reading the posterior.

    Raises:
        DataError: There is no such folder, or no saved posterior in it.
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise DataError(f"there is no posterior at {place}: {'it is a file' if place.exists() else 'no such folder'}")
    config: dict[str, Any] = _read_config(place / _CONFIG)["laplace"]
    return config


def read_model_state(folder: str | os.PathLike[str]) -> dict[str, Tensor] | None:
    """Returns the network's state dict that was saved beside a posterior, checked; None if there is none.

    Raises:
        DataError: The file is missing or damaged.
    """
    place = Path(folder).expanduser()
    expected = _read_config(place / _CONFIG)["files"].get(_MODEL)
    if expected is None:
        return None
    file = place / _MODEL
    if not file.is_file():
        raise DataError(f"{file} is missing; {_CONFIG} says that it was saved")
    if _digest(file) != expected.get("sha256"):
        raise DataError(
            f"{file} is not the file that was saved with {_CONFIG}: its checksum differs. It is damaged or from another fit"
        )
    tensors: dict[str, Tensor] = load_file(file)
    return tensors


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise DataError(f"{file} is missing; a posterior's folder has {_CONFIG} and {_POSTERIOR}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{file} is damaged: it is no JSON ({error})") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise DataError(f'{file} does not belong to a saved posterior: it has no entry "format": "{FORMAT}"')
    if config.get("schema") not in _READABLE:
        versions = config.get("versions")
        raise DataError(
            f"{file} has schema version {config.get('schema')!r}, written by {versions}; aftermap {_version()} reads versions "
            f"{' and '.join(map(str, _READABLE))}. Load it with the version that wrote it, or fit again"
        )
    wanted: dict[str, tuple[type, ...]] = {
        "versions": (dict,),
        "weights_hash": (str,),
        "parameters": (dict,),
        "laplace": (dict,),
        "posterior": (dict,),
        "factors": (dict,),
        "tensors": (dict,),
        "reference": (dict, type(None)),
        "files": (dict,),
    }
    wrong = [k for k, kinds in wanted.items() if k not in config or not isinstance(config[k], kinds)]
    if wrong:
        raise DataError(f"{file} is damaged: missing or of the wrong type are {', '.join(wrong)}")
    return config


def _read_tensors(
    place: Path,
    name: str,
    table: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, Mapping[str, Any]],
    device: torch.device,
) -> dict[str, Tensor]:
    """Returns the tensors of one file, checked from the plainest fault to the subtlest."""
    file = place / name
    if not file.is_file():
        raise DataError(f"{file} is missing, but {_CONFIG} says that it was saved")
    expected = files.get(name, {})
    size = file.stat().st_size
    if size < expected.get("bytes", size):
        raise DataError(
            f"{file} is truncated: {size:,} bytes instead of {expected['bytes']:,}. Copy it again, or fit again"
        )
    try:
        with safe_open(file, framework="pt") as opened:
            keys = set(opened.keys())
        tensors = load_file(file)
    except SafetensorError as error:
        raise DataError(f"{file} is damaged or foreign: it is no safetensors file ({error})") from error
    if keys != set(table):
        missing, extra = sorted(set(table) - keys), sorted(keys - set(table))
        raise DataError(
            f"{file} does not fit {_CONFIG}: it lacks {missing[:5] or 'nothing'} and has unknown {extra[:5] or 'nothing'}"
        )
    wrong = []
    for key, tensor in tensors.items():
        description = {k: v for k, v in table[key].items() if k != "order"}
        if described(tensor) != description:
            wrong.append(f"{key} is {_short(described(tensor))}, should be {_short(description)}")
    if wrong:
        raise DataError(f"{file} does not fit {_CONFIG}: " + "; ".join(wrong[:5]))
    if _digest(file) != expected.get("sha256"):
        raise DataError(
            f"{file} is not the file that was saved with {_CONFIG}: its checksum differs. It is damaged or from another fit"
        )
    # In the order of the configuration; copies of their own, aligned as torch aligns them: products may depend on that in
    # their last bit, and the file may be replaced while they are in use.
    return {key: tensors[key].to(device, copy=True) for key in table}


def _short(description: Mapping[str, Any]) -> str:
    return f"{description.get('dtype')} {description.get('shape')}"


def _check_agreement(
    posterior: GaussianPosterior, factors: Factors, parameters: Mapping[str, Mapping[str, Any]], where: str
) -> None:
    saved = {n: described(v) for n, v in posterior.mean.items()}
    if saved != parameters or list(saved) != list(parameters):
        wrong = sorted(n for n in {*saved, *parameters} if saved.get(n) != parameters.get(n))
        raise DataError(
            f"{where}: the mean does not fit the list of parameters: {', '.join(wrong[:5]) or 'their order'}"
        )
    covered = {n: s for b in posterior.blocks for n, s in b.shapes.items()}
    summed = {n: s for b in factors.blocks for n, s in b.shapes.items()}
    for what, shapes in (("blocks of the posterior", covered), ("blocks of the factors", summed)):
        wrong = sorted(n for n in {*shapes, *posterior.names} if shapes.get(n) != posterior.shapes.get(n))
        if wrong:
            raise DataError(f"{where}: the {what} do not fit the parameters: {', '.join(wrong[:5])}")
