"""From `--train`, `--test` and the like to batches."""

from __future__ import annotations

import itertools
import shlex
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
    own_parts,
    part_of,
    read_csv,
    read_idx,
    read_image_folder,
    read_npz,
    split,
    toy,
)
from aftermap.data.examples import as_inputs
from aftermap.data.readers import about_bytes
from aftermap.distributed import rank, world_size
from aftermap.errors import DataError, InputError
from aftermap.progress import progress, showing, waiting

__all__ = [
    "Batches",
    "DataFormat",
    "Source",
    "first_batch",
    "open_parts",
    "open_source",
    "parse_ood",
    "parse_size",
]

_TABLES = (".csv", ".tsv", ".txt")
_WHOLE = ("classification",)
_IGNORED = -100  # the label of examples that PyTorch's losses leave out
_MANY_CLASSES = 20  # whole numbers with more different values, and gaps, may be prices, ages or years
_PARTS = ("train", "validation", "test", "all")


@dataclass(frozen=True)
class DataFormat:
    """How data are read.

    Attributes:
        target: The column of a table that holds the targets.
        drop: The columns of a table that are no inputs.
        columns: The input columns, where they are known from the training data.
        classes: The names of the classes, where they are known from the training data.
        folder: The folder of named data sets.
        download: Whether named data sets that are not there are fetched.
        batch_size: The number of examples per batch.
        image_size: The height and width to which images of a folder are resized.
        channels: The channels of images of a folder.
        limit: The most examples that are used.
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
        data: Examples in memory, or any iterable of batches.
        size: The number of examples in a batch, where they are in memory.
        description: The words beside the bar.
        shared: Whether, under torchrun, each process gets its own part.
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
            batches: Iterable[Any] = ()  # Of few data a process may have none.
            if self.start < len(self.data):
                mine = self.data if self.step == 1 else self.data.take(slice(self.start, None, self.step))
                batches = mine.batches(self.size)
        else:
            batches = itertools.islice(iter(self.data), self.start, None, self.step)
        if self.description:
            sized = isinstance(self.data, Sized)
            return iter(progress(batches, description=self.description, total=len(self) if sized else None))
        return iter(batches)

    def n_examples(self) -> int | None:
        """Returns the number of examples in all batches of all processes; None where nobody knows."""
        return len(self.data) if isinstance(self.data, Examples) else None

    def named(self, description: str, *, shared: bool = False) -> Batches:
        """Returns the same source with another bar, or shared out over processes."""
        return Batches(self.data, self.size, description, shared=shared)


@dataclass(frozen=True)
class Source:
    """Data that were asked for.

    Attributes:
        spec: What the user typed.
        name: The name in tables.
        batches: The batches of (x, y).
        examples: The examples, where they are in memory.
    """

    spec: str
    name: str
    batches: Batches
    examples: Examples | None

    def note_of_bytes(self) -> list[str]:
        """Returns what a user should know where inputs were bytes; else nothing."""
        return [about_bytes(self.spec)] if self.examples is not None and self.examples.rescaled else []

    def notes(self) -> list[str]:
        """Returns what a user should know about how training data were read."""
        examples = self.examples
        if examples is None:
            return []
        notes = self.note_of_bytes()
        if "" in (examples.columns or ()):
            notes.append(
                f"a column of {self.spec} has no name and is taken as an input; if it only counts the rows, leave it out by its "
                "number, such as --drop 1"
            )
        notes.extend(
            f"column {name!r} of {self.spec} holds another whole number in each row, as an identifier does, and is taken as an input; "
            f"if it is one, leave it out with --drop {shlex.quote(name)}"
            for name in examples.counting
            if name
        )
        if examples.targets is not None and bool((examples.targets == examples.targets[:1]).all()):
            notes.append(
                f"all targets of {self.spec} are the same: a network learns nothing from them, and its uncertainty means nothing"
            )
        if examples.is_classes and examples.targets is not None and examples.targets.dim() == 1:
            missing = self.missing_classes(int(examples.targets.max()) + 1)
            if missing == [0]:
                why = ": are these labels that count from 1? Classes count from 0"
            else:
                why = ", although there are higher ones"
            if missing:
                notes.append(f"{self.spec} holds no example of {_named_classes(missing)}{why}")
        elif _are_whole(examples.targets):
            notes.append(
                f"the targets of {self.spec} are whole numbers in floating point and are taken as numbers (a regression) unless "
                "--task says otherwise; save classes as integers"
            )
        return notes

    def check_labels(self, outputs: int | None) -> None:
        """Refuses class labels that the network has no output for.

        Args:
            outputs: The number of classes that the network knows; None means that it will be built for these labels.

        Raises:
            DataError: There is such a label, other than the -100 that PyTorch ignores.
        """
        examples = self.examples
        if examples is None or examples.targets is None:
            return
        if not examples.is_classes:
            raise DataError(
                f"the targets of {self.spec} are {str(examples.targets.dtype).removeprefix('torch.')}, but classes are needed: whole numbers from 0, "
                "saved as integers (of one-hot labels, y.argmax(-1)). If they are classes, add --task classification"
            )
        negative = examples.targets[(examples.targets < 0) & (examples.targets != _IGNORED)]
        if negative.numel():
            raise DataError(
                f"{self.spec} holds the label {int(negative.min())}; classes count from 0. Leave examples without a label out"
            )
        largest = int(examples.targets.max())
        if outputs is not None and largest >= outputs:
            advice = (
                "the labels count from 1: save them less 1"
                if largest == outputs and 0 not in examples.targets
                else "give the network more outputs, or leave these examples out"
            )
            raise DataError(
                f"{self.spec} holds the label {largest}, but the network has {outputs} outputs, for the classes 0 to {outputs - 1}: {advice}"
            )

    def check_are_classes(self) -> None:
        """Refuses whole numbers that are hardly classes, before a network is built with an output for each.

        Raises:
            DataError: They are many different ones, with gaps between them, and nobody named them.
        """
        examples = self.examples
        if examples is None or examples.targets is None or not examples.is_classes or examples.classes:
            return
        values = examples.targets[examples.targets != _IGNORED].unique()
        if len(values) > _MANY_CLASSES and int(values.max()) + 1 > len(values):
            raise DataError(
                f"the targets of {self.spec} are {len(values):,} different whole numbers from {int(values.min()):,} to "
                f"{int(values.max()):,}, with gaps. If they are numbers to predict, add --task regression, or --task counts; "
                "if they are classes, add --task classification"
            )

    def missing_classes(self, outputs: int) -> list[int]:
        """Returns the classes below ``outputs`` of which there is no example; none where the data are a stream or no classes."""
        examples = self.examples
        if examples is None or examples.targets is None or not examples.is_classes:
            return []
        return sorted(set(range(outputs)) - set(examples.targets.unique().tolist()))

    def note_of_outputs(self, outputs: int) -> str | None:
        """Returns what a user should know where a network has outputs for classes above all that are in the data."""
        examples = self.examples
        if examples is None or examples.targets is None or examples.targets.dim() != 1:
            return None
        above = [c for c in self.missing_classes(outputs) if c > int(examples.targets.max())]
        if not above:
            return None
        note = f"{self.spec} holds no example of {_named_classes(above)}, of which the network has an output"
        if examples.classes:
            note += (
                f". Words are numbered in alphabetical order, from 0 for {examples.classes[0]!r}: if the network was trained with more "
                "classes, its numbers may be others"
            )
        return note


def _named_classes(classes: list[int]) -> str:
    listed = ", ".join(map(str, classes[:5])) + (" …" if len(classes) > 5 else "")
    return f"class {listed}" if len(classes) == 1 else f"the classes {listed}"


def _are_whole(targets: Any) -> bool:
    """Tells whether targets look like classes that were saved in floating point: few different whole numbers from 0."""
    if not isinstance(targets, torch.Tensor) or targets.dim() != 1 or not targets.is_floating_point():
        return False
    values = targets.unique()
    return 2 < len(values) <= 20 and bool((values == values.round()).all()) and float(values[0]) in (0.0, 1.0)


def open_source(
    spec: str, part: str, data_format: DataFormat, *, need_targets: bool = True, what: str = "--data"
) -> Source:
    """Opens data by what was typed.

    Args:
        spec: A .npz, .csv or .tsv file, idx images (labels are found beside them), a folder of images, `builtin:digits`,
            `toy:moons`, a named set such as `fashion-mnist`, or `pkg.module:loader`. It may end in `:train`, `:validation`,
            `:test` or `:all`: a built-in or named set is else the part that the flag stands for, a file or folder all of it.
        part: "train", "validation" or "test".
        data_format: How the data are read.
        need_targets: Whether data without targets are refused.
        what: The flag, for messages.

    Raises:
        InputError, DataError: There is nothing of that kind, or the data cannot be read.
    """
    with waiting(f"reading {spec}"):
        return _open(spec, part, data_format, need_targets, what)


def _open(spec: str, part: str, data_format: DataFormat, need_targets: bool, what: str) -> Source:
    before, _, ending = spec.rpartition(":")
    # `toy:test` is a toy problem called test, and no code in a module called toy; `loaders.py:test` is a function.
    has_part = ending in _PARTS and before not in ("", "builtin", "toy") and not before.endswith(".py")
    stem, named_part = (before, ending) if has_part else (spec, part)
    examples: Examples | None = None
    if stem.startswith("builtin:"):
        examples = part_of(builtin(stem.removeprefix("builtin:")), named_part)
    elif stem.startswith("toy:"):
        examples = part_of(toy(stem.removeprefix("toy:"), 600), named_part)
    elif is_named(stem) and not _exists(stem):
        examples = named(stem, named_part, folder=data_format.folder, download=data_format.download)
    elif _exists(spec) or _exists(stem):
        with showing(False):  # what is to be said, `Source.notes` says
            examples = (
                _from_path(Path(spec).expanduser(), part, data_format, need_targets)
                if _exists(spec)
                else _part_of_path(Path(stem).expanduser(), named_part, data_format, need_targets)
            )
    elif not before.endswith(".py") and _exists(before) and Path(before).expanduser().is_file():
        raise InputError(f"{what} {spec}: {before} has no part {ending!r}; its parts are {', '.join(_PARTS)}")
    elif ":" in spec and not spec.endswith((".npz", *_TABLES)):
        loader = _from_code(spec, what)
        if not isinstance(loader, Examples):
            return Source(spec, spec.rpartition(":")[2], Batches(loader, data_format.batch_size), None)
        examples = loader
    else:
        raise InputError(
            f"{what} {spec}: there is no such file or folder. Data are .npz, .csv or idx files, folders of images, "
            f"builtin:{'|'.join(BUILTIN)}, toy:{'|'.join(TOYS)}, {', '.join(NAMED)}, uci_NAME, or pkg.module:loader"
        )
    if data_format.limit is not None:
        examples = examples.take(slice(0, data_format.limit))
    examples = _typed(examples, data_format.task, what)
    return Source(spec, examples.name, Batches(examples, data_format.batch_size), examples)


def _exists(spec: str) -> bool:
    """Tells whether there is a file or folder of this name; a name that cannot be one has none."""
    try:
        return Path(spec).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def open_parts(
    train: str | None, val: str | None, data: str | None, data_format: DataFormat
) -> tuple[Source, Source | None]:
    """Opens the training data, and the validation data if there are any.

    Raises:
        InputError: Neither or both of --train and --data were given.
    """
    if (train is None) == (data is None):
        raise InputError("say which data: --train (and --val), or --data for a set that is split into parts")
    if data is not None and val is not None:
        raise InputError("--val goes with --train; --data has its own validation part")
    if data is not None and data.endswith(tuple(f":{part}" for part in _PARTS)):
        raise InputError(f"--data {data} is one part of a set, and --data is cut into parts: use --train and --val")
    spec = train if data is None else f"{data}:train" if _exists(data) else data
    training = open_source(str(spec), "train", data_format, what="--train" if data is None else "--data")
    examples = training.examples
    if data is not None and examples is None:
        raise InputError(f"--data {data} gives batches, which are not cut into parts: use --train and --val")
    if examples is not None:  # columns and classes of later data are those of the training data
        data_format = replace(data_format, columns=examples.columns, classes=examples.classes)
    held_out = val if data is None else f"{data}:validation" if _exists(data) else data
    return training, None if held_out is None else open_source(held_out, "validation", data_format, what="--val")


def _part_of_path(path: Path, part: str, data_format: DataFormat, need_targets: bool) -> Examples:
    """Opens one part of a file or folder: its own, of an .npz with several, or a cut that is always the same."""
    parts = own_parts(path) if path.suffix == ".npz" else ()
    if not parts or part == "all":
        return part_of(_from_path(path, part, data_format, need_targets), part)
    if "validation" in parts or part == "test":
        return read_npz(path, part=part, need_targets=need_targets)
    training = read_npz(path, part="train", need_targets=need_targets)
    return split(training, validation=0.2, test=0.0)[part]


def _from_path(path: Path, part: str, data_format: DataFormat, need_targets: bool) -> Examples:
    if path.is_dir():
        return read_image_folder(
            path,
            size=data_format.image_size,
            channels=data_format.channels,
            classes=data_format.classes,
            need_targets=need_targets,
        )
    if path.suffix == ".npz":
        return read_npz(path, part=part, need_targets=need_targets)
    if path.suffix in _TABLES:
        return read_csv(
            path,
            target=data_format.target,
            columns=data_format.columns,
            drop=data_format.drop if data_format.columns is None else (),
            classes=data_format.classes if need_targets or data_format.target else None,
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
        targets = read_idx(labels) if has_labels else None
        if targets is not None and (targets.dim() != 1 or targets.is_floating_point()):
            raise DataError(
                f"{labels} should hold one whole number per image, got {targets.dtype} {list(targets.shape)}"
            )
        return Examples(inputs, None if targets is None else targets.long(), path.name.split("-images")[0])
    raise DataError(f"{path} has an unknown format; understood are .npz, .csv, .tsv, idx files and folders of images")


def _from_code(spec: str, what: str) -> Any:
    data = import_object(spec, what)
    if callable(data) and not isinstance(data, Iterable):
        try:
            data = data()
        except Exception as error:
            raise InputError(
                f"{what} {spec} failed: {type(error).__name__}: {error}. It is called without arguments"
            ) from error
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(t, Tensor) for t in data):
        return Examples(data[0], data[1], spec.rpartition(":")[2])
    if isinstance(data, Examples) or (isinstance(data, Iterable) and not isinstance(data, str | bytes | Tensor)):
        if isinstance(data, Iterator):
            data = list(data)  # a generator can be gone through only once
        return data
    raise InputError(
        f"{what} {spec} gave a {type(data).__name__}; it must give batches (a DataLoader or a list of (x, y)), or (x, y)"
    )


def _typed(examples: Examples, task: str, what: str) -> Examples:
    """Returns targets in the type that the task wants."""
    targets = examples.targets
    if targets is None or task == "auto":
        return examples
    if task in _WHOLE and targets.is_floating_point():
        if not bool((targets == targets.round()).all()):
            raise InputError(
                f"{what}: --task {task} needs class indices, but targets such as {targets[targets != targets.round()][0]:g} are not whole numbers"
            )
        return replace(examples, targets=targets.long())
    if task not in _WHOLE and not targets.is_floating_point():
        return replace(examples, targets=targets.to(torch.float32))
    return examples


def first_batch(source: Source) -> Any:
    """Returns the first batch, whatever its form."""
    batch = next(iter(Batches(source.batches.data, source.batches.size)), None)
    if batch is None:
        raise DataError(f"{source.spec} holds no batch")
    return batch


def parse_ood(entries: Sequence[str]) -> dict[str, str]:
    """Reads `name=data` pairs; without a name the data's own is taken.

    >>> parse_ood(["other=ood.npz", "kmnist"])
    {'other': 'ood.npz', 'kmnist': 'kmnist'}
    """
    sets: dict[str, str] = {}
    for entry in entries:
        name, equals, spec = entry.partition("=")
        if not equals:
            name, spec = Path(entry).name.split(".")[0].rpartition(":")[2] or entry, entry
        if not name or not spec:
            raise InputError(f"--ood {entry!r} must be written name=data, such as other=ood.npz")
        if name in sets or name == "test":
            raise InputError(f"--ood {entry!r}: the name {name!r} is taken; give each set its own: name=data")
        sets[name] = spec
    return sets


def parse_size(text: str | None, flag: str) -> tuple[int, ...] | None:
    """Reads `28x28`, `3,32,32` or `28` as whole numbers.

    >>> parse_size("3x32x32", "--input-shape")
    (3, 32, 32)
    """
    if text is None:
        return None
    try:
        size = tuple(int(part) for part in text.lower().replace("×", ",").replace("x", ",").split(","))
    except ValueError:
        raise InputError(f"{flag} {text!r} must be whole numbers, such as 28x28") from None
    if any(n < 1 for n in size):
        raise InputError(f"{flag} {text!r} must be positive numbers, such as 28x28")
    return size
