"""From `--train`, `--test` and their relatives to batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aftermap.cli.models import import_object
from aftermap.data import (
    BUILTIN,
    NAMED,
    TOYS,
    Examples,
    builtin,
    is_named,
    named,
    part_of,
    read_csv,
    read_idx,
    read_image_folder,
    read_npz,
    toy,
)
from aftermap.data.examples import as_inputs
from aftermap.distributed import rank, world_size
from aftermap.errors import DataError, InputError
from aftermap.progress import progress

__all__ = ["Batches", "DataOptions", "Source", "first_batch", "open_source", "parse_ood", "parse_size"]

_TABLES = (".csv", ".tsv", ".txt")
_WHOLE = ("classification",)


@dataclass(frozen=True)
class DataOptions:
    """How data are read.

    Attributes:
        target: column of a table.
        drop: columns that are no inputs.
        columns: input columns, where they are known from the training data.
        classes: names of the classes, where they are known.
        folder: of named data sets.
        download: fetch named data sets.
        batch_size: examples in a batch.
        image_size: to which images of a folder are resized.
        channels: of images of a folder.
        limit: use only so many examples.
        task: "auto", or what the targets are.
    """

    target: str | None = None
    drop: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None
    folder: str | None = None
    download: bool = False
    batch_size: int = 256
    image_size: tuple[int, int] | None = None
    channels: int | None = None
    limit: int | None = None
    task: str = "auto"


class Batches:
    """Batches that can be gone through again and again, with a bar if there is a terminal.

    Args:
        data: examples in memory, or any iterable of batches.
        size: examples in a batch of the former.
        description: of the bar.
        shared: under torchrun, give each process its own part.
    """

    def __init__(self, data: Examples | Iterable[Any], size: int, description: str = "", *, shared: bool = False):
        self.data, self.size, self.description = data, size, description
        self.step = world_size() if shared else 1
        self.start = rank() if shared else 0

    def __len__(self) -> int:
        if isinstance(self.data, Examples):
            mine = len(range(self.start, len(self.data), self.step))
            return -(-mine // self.size)
        if not isinstance(self.data, Sized):
            raise TypeError("these data have no length")
        return len(range(self.start, len(self.data), self.step))

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.data, Examples):
            mine = self.data if self.step == 1 else self.data.take(slice(self.start, None, self.step))
            batches: Iterable[Any] = mine.batches(self.size)
        else:
            batches = itertools.islice(iter(self.data), self.start, None, self.step)
        if self.description:
            sized = isinstance(self.data, Sized)
            return iter(progress(batches, description=self.description, total=len(self) if sized else None))
        return iter(batches)

    def named(self, description: str, *, shared: bool = False) -> Batches:
        """The same with another bar, or shared out over processes."""
        return Batches(self.data, self.size, description, shared=shared)


@dataclass(frozen=True)
class Source:
    """Data that were asked for.

    Attributes:
        spec: as typed.
        name: for tables.
        batches: of (x, y).
        examples: where they are in memory.
    """

    spec: str
    name: str
    batches: Batches
    examples: Examples | None


def open_source(
    spec: str, part: str, options: DataOptions, *, need_targets: bool = True, what: str = "--data"
) -> Source:
    """Opens data by what was typed.

    Args:
        spec: a .npz, .csv or .tsv file, idx images (labels are found beside them), a folder of images, `builtin:digits`,
            `toy:moons`, a named set such as `fashion-mnist`, or `pkg.module:loader`. A built-in or named set may end in
            `:train`, `:validation`, `:test` or `:all`; else it is the part that the flag stands for.
        part: "train", "validation" or "test".
        options: how.
        need_targets: refuse data without targets.
        what: the flag, for messages.

    Raises:
        InputError, DataError: nothing of that kind, or data that cannot be read.
    """
    chosen, _, ending = spec.rpartition(":")
    stem, own = (chosen, ending) if ending in ("train", "validation", "test", "all") and chosen else (spec, part)
    examples: Examples | None = None
    if stem.startswith("builtin:"):
        examples = part_of(builtin(stem.removeprefix("builtin:")), own)
    elif stem.startswith("toy:"):
        examples = part_of(toy(stem.removeprefix("toy:"), 600), own)
    elif is_named(stem) and not Path(stem).exists():
        examples = named(stem, own, folder=options.folder, download=options.download)
    elif Path(spec).expanduser().exists():
        examples = _from_path(Path(spec).expanduser(), part, options, need_targets)
    elif ":" in spec and not spec.endswith((".npz", *_TABLES)):
        loader = _from_code(spec, what)
        if not isinstance(loader, Examples):
            return Source(spec, spec.rpartition(":")[2], Batches(loader, options.batch_size), None)
        examples = loader
    else:
        raise InputError(
            f"{what} {spec}: there is no such file or folder. Data are .npz, .csv or idx files, folders of images, "
            f"builtin:{'|'.join(BUILTIN)}, toy:{'|'.join(TOYS)}, {', '.join(NAMED)}, uci_NAME, or pkg.module:loader"
        )
    if options.limit is not None:
        examples = examples.take(slice(0, options.limit))
    examples = _typed(examples, options.task, what)
    return Source(spec, examples.name, Batches(examples, options.batch_size), examples)


def _from_path(path: Path, part: str, options: DataOptions, need_targets: bool) -> Examples:
    if path.is_dir():
        return read_image_folder(
            path, size=options.image_size, channels=options.channels, classes=options.classes, need_targets=need_targets
        )
    if path.suffix == ".npz":
        return read_npz(path, part=part, need_targets=need_targets)
    if path.suffix in _TABLES:
        return read_csv(
            path,
            target=options.target,
            columns=options.columns,
            drop=options.drop if options.columns is None else (),
            classes=options.classes if need_targets or options.target else None,
            need_targets=need_targets,
        )
    if "idx" in path.name or path.suffix in (".gz", ".idx"):
        labels = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
        has_labels = labels != path and labels.is_file()
        if need_targets and not has_labels:
            raise DataError(
                f"{path}: there are no labels beside it, in {labels.name if labels != path else 'labels-idx1-ubyte'}"
            )
        inputs = as_inputs(read_idx(path).numpy(), str(path))
        return Examples(inputs, read_idx(labels).long() if has_labels else None, path.name.split("-images")[0])
    raise DataError(f"{path} has an unknown format; understood are .npz, .csv, .tsv, idx files and folders of images")


def _from_code(spec: str, what: str) -> Any:
    found = import_object(spec, what)
    if callable(found) and not isinstance(found, Iterable):
        try:
            found = found()
        except Exception as error:
            raise InputError(
                f"{what} {spec} failed: {type(error).__name__}: {error}. It is called without arguments"
            ) from error
    if isinstance(found, tuple) and len(found) == 2 and all(isinstance(t, Tensor) for t in found):
        return Examples(found[0], found[1], spec.rpartition(":")[2])
    if isinstance(found, Examples) or (isinstance(found, Iterable) and not isinstance(found, str | bytes | Tensor)):
        if isinstance(found, Iterator):
            found = list(found)  # a generator can be gone through only once
        return found
    raise InputError(
        f"{what} {spec} gave a {type(found).__name__}; it must give batches (a DataLoader or a list of (x, y)), or (x, y)"
    )


def _typed(examples: Examples, task: str, what: str) -> Examples:
    """Targets in the type that the task wants."""
    targets = examples.targets
    if targets is None or task == "auto":
        return examples
    if task in _WHOLE and targets.is_floating_point():
        if not bool((targets == targets.round()).all()):
            raise InputError(
                f"{what}: --task {task} needs class indices, but targets such as {targets[targets != targets.round()][0]:g} are no whole numbers"
            )
        return replace(examples, targets=targets.long())
    if task not in _WHOLE and not targets.is_floating_point():
        return replace(examples, targets=targets.to(torch.float32))
    return examples


def first_batch(source: Source) -> Any:
    """The first batch, whatever its form."""
    batch = next(iter(Batches(source.batches.data, source.batches.size)), None)
    if batch is None:
        raise DataError(f"{source.spec} holds no batch")
    return batch


def parse_ood(entries: Sequence[str]) -> dict[str, str]:
    """`name=data` pairs; without a name the data's own is taken.

    >>> parse_ood(["other=ood.npz", "kmnist"])
    {'other': 'ood.npz', 'kmnist': 'kmnist'}
    """
    found: dict[str, str] = {}
    for entry in entries:
        name, equals, spec = entry.partition("=")
        if not equals:
            name, spec = Path(entry).name.split(".")[0].rpartition(":")[2] or entry, entry
        if not name or not spec:
            raise InputError(f"--ood {entry!r} must be written name=data, such as other=ood.npz")
        if name in found or name == "test":
            raise InputError(f"--ood {entry!r}: the name {name!r} is taken; give each set its own: name=data")
        found[name] = spec
    return found


def parse_size(text: str | None, flag: str) -> tuple[int, ...] | None:
    """`28x28`, `3,32,32` or `28` as whole numbers.

    >>> parse_size("3x32x32", "--input-shape")
    (3, 32, 32)
    """
    if text is None:
        return None
    try:
        found = tuple(int(part) for part in text.lower().replace("×", ",").replace("x", ",").split(","))
    except ValueError:
        raise InputError(f"{flag} {text!r} must be whole numbers, such as 28x28") from None
    if any(n < 1 for n in found):
        raise InputError(f"{flag} {text!r} must be positive numbers, such as 28x28")
    return found
