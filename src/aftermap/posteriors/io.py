"""Saving and loading: a folder with config.json and safetensors, written whole or not at all. Never pickle.

config.json holds everything that a person may want to read (structure, blocks, prior, layers, treatment, versions, the hash
of the weights, the caller's own configuration); posterior.safetensors the mean, the prior, the decompositions and the sums
over data, so that a fit can go on after loading; reference.safetensors what the caller compares new inputs with.
"""

from __future__ import annotations

import ctypes
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
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from aftermap.curvature.structures.base import Factors
from aftermap.errors import DataError, InputError
from aftermap.params import Params, weights_hash
from aftermap.posteriors.base import GaussianPosterior
from aftermap.posteriors.consistency import check_agreement, check_values
from aftermap.posteriors.encoding import FROM_VERSION_1, SAVED, StateReader, StateWriter, described
from aftermap.posteriors.files import (
    DTYPES,
    MAX_JSON_BYTES,
    check_file,
    check_tensor_header,
    existing_folder,
    file_record,
    parse_json,
    plain_file,
    read_json,
    sealed,
    unsealed,
)
from aftermap.posteriors.records import ADVICE, Anything, ListOf, MapOf, OrNone, Record, Text, Whole, shown
from aftermap.writing import flush, give_permissions, remove_abandoned, temporary_folder

__all__ = [
    "FILES",
    "FORMAT",
    "SCHEMA",
    "LoadedPosterior",
    "check_replaceable",
    "load_posterior",
    "read_model_state",
    "read_parameters",
    "read_reference",
    "read_saved_config",
    "replaced_folder",
    "save_posterior",
]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
FORMAT = "aftermap posterior"
SCHEMA = 3
# Version 1 named some classes differently; `encoding` reads both. From version 3 on config.json has a checksum of itself.
_READABLE = (1, 2, 3)
_FIRST_SEALED = 3
_CONFIG, _POSTERIOR, _REFERENCE = "config.json", "posterior.safetensors", "reference.safetensors"
_MODEL = "model.safetensors"
FILES = (_CONFIG, _POSTERIOR, _REFERENCE, _MODEL, "report.html")
_PARTS: dict[str, type[Any]] = {"posterior": GaussianPosterior, "factors": Factors}
_DTYPES = {str(d).removeprefix("torch."): d for d in DTYPES.values()}
_TENSOR = {"shape": ListOf(Whole()), "dtype": Text(tuple(_DTYPES))}
_HASH = Text(pattern="[0-9a-f]{64}", example="a SHA-256 checksum in 64 hexadecimal digits")
_FILE = Record({"bytes": Whole(), "sha256": _HASH})
_RECORD = Record(
    {
        "format": Text((FORMAT,)),
        "schema": Whole(),
        "versions": MapOf(Text()),
        "weights_hash": Text(pattern="sha256:[0-9a-f]{64}", example="the SHA-256 checksum of the weights"),
        "parameters": MapOf(Record(_TENSOR)),
        "laplace": MapOf(Anything()),
        "posterior": MapOf(Anything()),
        "factors": MapOf(Anything()),
        "tensors": MapOf(Record(_TENSOR, {"order": ListOf(Whole())})),
        "reference": OrNone(MapOf(Record(_TENSOR))),
        "files": Record({_POSTERIOR: _FILE}, {_REFERENCE: _FILE, _MODEL: _FILE}),
    }
)


@contextmanager
def replaced_folder(target: str | os.PathLike[str], *, overwrite: bool, known: Collection[str]) -> Iterator[Path]:
    """Yields a temporary folder beside ``target`` that takes its place when the body has ended without an exception.

    Whatever is raised inside, or while flushing and moving, leaves an old ``target`` as it was and no temporary folder.
    What a kill leaves is taken away by the next call for the same target. The folder is the user's alone while it is written; then it has the permissions of what it replaces, or those of the umask.

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
    check_replaceable(place, overwrite, known)
    place.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(place)
    with temporary_folder(place) as temporary:
        with give_permissions(temporary, place):
            yield temporary
        for file in temporary.iterdir():
            flush(file)
        flush(temporary)
        check_replaceable(place, overwrite, known)
        _move(temporary, place)  # After an exchange, what was replaced has the temporary name.
        flush(place.parent)


def check_replaceable(place: Path, overwrite: bool, known: Collection[str]) -> None:
    """Raises unless a folder may be written to a place: it is free, or what is there may be replaced.

    Args:
        place: The path that the folder shall have.
        overwrite: Whether an existing folder may be replaced.
        known: The names that a replaced folder may hold.

    Raises:
        InputError: There is a file, a folder that must not be replaced, or one with other files in it.
    """
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
    with replaced_folder(folder, overwrite=overwrite, known=FILES) as place:
        description["files"] = {_POSTERIOR: _write(place / _POSTERIOR, writer.tensors)}
        if reference is not None:
            copies = {n: v.detach().cpu().clone(memory_format=torch.contiguous_format) for n, v in reference.items()}
            description["files"][_REFERENCE] = _write(place / _REFERENCE, copies)
        if model_state is not None:  # Copies: safetensors refuses the shared memory of tied weights.
            state = {n: v.detach().cpu().clone(memory_format=torch.contiguous_format) for n, v in model_state.items()}
            description["files"][_MODEL] = _write(place / _MODEL, state)
        text = json.dumps(sealed(description), indent=1, ensure_ascii=False, allow_nan=False)
        if len(text) > MAX_JSON_BYTES // 4:  # A sign takes up to four bytes.
            raise InputError(
                f"{_CONFIG} would have {len(text):,} signs, too many to be read again; keep less in the configuration"
            )
        (place / _CONFIG).write_text(text + "\n", encoding="utf-8")
    return Path(folder)


def _version() -> str:
    try:
        return metadata.version("aftermap")
    except metadata.PackageNotFoundError:  # It runs from the sources, without installation.
        return "unknown"


def _plain(config: Mapping[str, Any]) -> Any:
    try:
        return parse_json(json.dumps(config, allow_nan=False), "the configuration")
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"the configuration must be of plain JSON values (text, finite numbers, lists, mappings), but {error}"
        ) from error


def _write(file: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    try:
        save_file(tensors, file)
    except SafetensorError as error:  # A full disk comes as this.
        raise OSError(f"{file.name} could not be written: {error}") from error
    return file_record(file)


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
        raise InputError(f"device={device!r} is not a device of torch, such as 'cpu' or 'cuda:0': {error}") from error
    place = existing_folder(folder)
    config = _read_config(place)
    where, table, parameters = str(place / _CONFIG), config["tensors"], config["parameters"]
    _check_shapes(config, where)
    for name, record in config["files"].items():
        if name != _MODEL:  # Whoever has the network need not have its weights here; `read_model_state` checks them.
            check_file(plain_file(place, name, f"{_CONFIG} says that it was saved"), record)
    tensors = _read_tensors(place / _POSTERIOR, table, target)
    reader = StateReader(tensors, table, where, config["schema"])
    posterior, factors = (reader.decode(config[k], k, kind) for k, kind in _PARTS.items())
    check_agreement(posterior, factors, parameters, where)
    check_values(posterior, factors, tensors, where)
    return LoadedPosterior(
        posterior,
        factors,
        config["laplace"],
        _read_reference(place, config, target),
        config["weights_hash"],
        dict(config["versions"]),
    )


def read_saved_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what the caller had given to :func:`save_posterior` as its configuration, without reading the posterior.

    Raises:
        DataError: There is no such folder, or no saved posterior in it.
    """
    config: dict[str, Any] = _read_config(existing_folder(folder))["laplace"]
    return config


def read_parameters(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Returns the shape and the dtype of each parameter that a saved posterior is over, without reading the posterior.

    Raises:
        DataError: There is no such folder, or no saved posterior in it.
    """
    parameters: dict[str, dict[str, Any]] = _read_config(existing_folder(folder))["parameters"]
    return parameters


def read_model_state(folder: str | os.PathLike[str]) -> dict[str, Tensor] | None:
    """Returns the network's state dict that was saved beside a posterior, checked; None if there is none.

    Raises:
        DataError: The file is missing or damaged.
    """
    place = existing_folder(folder)
    record = _read_config(place)["files"].get(_MODEL)
    if record is None:
        return None
    file = plain_file(place, _MODEL, f"{_CONFIG} says that it was saved")
    check_file(file, record)
    return _read_tensors(file, None, torch.device("cpu"))


def read_reference(folder: str | os.PathLike[str]) -> dict[str, Tensor] | None:
    """Returns the reference tensors that were saved beside a posterior, checked; None if there are none.

    Raises:
        DataError: The file is missing or damaged.
    """
    place = existing_folder(folder)
    config = _read_config(place)
    if config["reference"] is not None:
        file = plain_file(place, _REFERENCE, f"{_CONFIG} says that it was saved")
        check_file(file, config["files"][_REFERENCE])
    return _read_reference(place, config, torch.device("cpu"))


def _read_reference(place: Path, config: Mapping[str, Any], device: torch.device) -> dict[str, Tensor] | None:
    table = config["reference"]
    return None if table is None else _read_tensors(place / _REFERENCE, table, device)


def _read_config(place: Path) -> dict[str, Any]:
    """Reads the configuration of a folder: its checksum first, then every entry as it must be."""
    file = plain_file(place, _CONFIG, f"a posterior's folder has {_CONFIG} and {_POSTERIOR}")
    config = read_json(file)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise DataError(f'{file} does not belong to a saved posterior: it has no entry "format": "{FORMAT}"')
    schema = config.get("schema")
    if not isinstance(schema, int) or schema not in _READABLE:
        versions = config.get("versions")
        writer = versions.get("aftermap") if isinstance(versions, dict) else None
        raise DataError(
            f"{file} has schema version {shown(schema)}, written by aftermap {str(writer)[:40]}; aftermap {_version()} reads versions "
            f"{', '.join(map(str, _READABLE))}. Load it with the version that wrote it, or fit again"
        )
    if schema >= _FIRST_SEALED:
        config = unsealed(config, file)
    record = _RECORD.read(config, f"{file}:")
    wanted = {_POSTERIOR} | ({_REFERENCE} if record["reference"] is not None else set())
    if set(record["files"]) - {_MODEL} != wanted:
        raise DataError(
            f"{file}: files names {', '.join(sorted(record['files'])) or 'nothing'}, but should name {', '.join(sorted(wanted))}. {ADVICE}"
        )
    return record


def _check_shapes(config: Mapping[str, Any], where: str) -> None:
    """Refuses tensors that do not fit together by their shapes alone, before any of them is read.

    A class of your own may compute when it is made, so a folder with one of these is judged when its tensors are there.
    """
    if not _classes(config["posterior"]) | _classes(config["factors"]) <= {*SAVED, *FROM_VERSION_1}:
        return
    table = config["tensors"]
    shapes = {k: torch.empty(v["shape"], dtype=_DTYPES[v["dtype"]], device="meta") for k, v in table.items()}
    reader = StateReader(shapes, table, where, config["schema"])
    posterior, factors = (reader.decode(config[k], k, kind) for k, kind in _PARTS.items())
    check_agreement(posterior, factors, config["parameters"], where)


def _classes(value: Any) -> set[str]:
    """Returns the names of all classes in a value."""
    if isinstance(value, list):
        return {name for v in value for name in _classes(v)}
    if not isinstance(value, dict):
        return set()
    inside = {name for v in value.values() for name in _classes(v)}
    return inside | {str(value["$class"])} if "$class" in value else inside


def _read_tensors(file: Path, table: Mapping[str, Mapping[str, Any]] | None, device: torch.device) -> dict[str, Tensor]:
    """Returns the tensors of a file whose checksum was compared, in the order of the table if there is one."""
    check_tensor_header(file, table)
    try:
        tensors = load_file(file)
        # Copies of their own, aligned as torch aligns them: products may depend on that in their last bit, and the file may
        # be replaced while they are in use.
        return {key: tensors[key].to(device, copy=True) for key in (tensors if table is None else table)}
    except SafetensorError as error:
        raise DataError(f"{file} is damaged or foreign: it is not a safetensors file ({error}). {ADVICE}") from error
    except (MemoryError, OSError) as error:
        raise DataError(f"{file} cannot be read: {error}. {ADVICE}") from error
