"""Sums that survive a kill: a pass over the data keeps them in files, with the examples that are in them.

A file holds the state of the accumulators of one process, bit by bit, and a hash of every example that was added. Which
examples remain is decided by these hashes and not by a position in the stream, so that a fit goes on also when the data come
in another order, or are shared out among another number of processes. Files are replaced in one move.

A *generation* is the work of one number of processes. When that number changes, process 0 takes over all sums in the first
file of a new generation, and the files of the old one are deleted after that.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aftermap import checks
from aftermap.batches import Batch, tensors_of
from aftermap.curvature.passes.counts import DataCounts
from aftermap.distributed import all_reduce_, fail_together, rank, world_size
from aftermap.errors import DataError, InputError
from aftermap.params import weights_hash
from aftermap.writing import remove, replaced_file

__all__ = ["Checkpoint", "HasState", "ResumablePass", "clear_checkpoint", "example_hashes"]

_FORMAT = "aftermap checkpoint 1"
_NAME = re.compile(r"(?P<what>\w+)-g(?P<generation>\d{4})-(?P<rank>\d+)of(?P<world>\d+)\.safetensors")
_OURS = re.compile(r"\.?\w+-(g\d{4}-\d+of\d+|kept)\.safetensors(\.tmp|\.part)?")


class HasState(Protocol):
    """Any object whose sums can be written down and taken up again."""

    def state(self) -> dict[str, Tensor]:
        """Returns all sums by name."""
        ...

    def add_state(self, state: dict[str, Tensor]) -> None:
        """Adds the sums of a state and takes them out of it; the first ones are taken over bit by bit."""
        ...


def example_hashes(batch: Batch) -> Tensor:
    """Returns one whole number of 64 bits for each example [N]: a hash of its inputs, targets and weight.

    >>> batch = Batch(torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([0, 0, 0]), None, 3)
    >>> first, second, third = example_hashes(batch).tolist()
    >>> first == third, first == second
    (True, False)
    """
    rows: list[tuple[bytes, Any]] = []
    shared = hashlib.blake2b(digest_size=8)
    inputs = [(repr(path), t, batch.is_batched(path, t)) for path, t in batch.tensors()]
    targets = [("targets", t, t.dim() > 0 and t.shape[0] == batch.size) for t in tensors_of(batch.targets)]
    weight = [] if batch.weight is None else [("weight", batch.weight, True)]
    for name, tensor, batched in (*inputs, *targets, *weight):
        # A copy, since one row of a strided tensor counts as contiguous with any stride.
        plain = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        header = f"{name} {plain.dtype} {tuple(plain.shape[1:] if batched else plain.shape)}".encode()
        lines = plain.reshape(batch.size if batched else 1, -1)
        bytes_of = lines.view(torch.uint8).numpy() if lines.numel() else None
        if batched and bytes_of is not None:
            rows.append((header, bytes_of))
        else:
            shared.update(header + (b"" if bytes_of is None else bytes_of.tobytes()))
    hashes = []
    for example in range(batch.size):
        digest = shared.copy()
        for header, lines in rows:
            digest.update(header)
            digest.update(lines[example].data)
        hashes.append(int.from_bytes(digest.digest(), "little", signed=True))
    return torch.tensor(hashes, dtype=torch.int64)


@dataclass(frozen=True)
class _Saved:
    """The content of one file: the record of a pass, and tensors."""

    record: dict[str, Any]
    tensors: dict[str, Tensor]
    checksum: str


@dataclass(frozen=True)
class Checkpoint:
    """A folder for the sums of a fit, and what must be the same for them to be taken up again.

    Attributes:
        folder: The folder; all processes must see it.
        every: The number of batches after which the sums are written.
        identity: The weights, the structure and the options of the fit, as words.
        given_up: The parameters whose rules the data have contradicted, and why.
    """

    folder: Path
    every: int
    identity: Mapping[str, str]
    given_up: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def open(folder: str | os.PathLike[str], every: int, identity: Mapping[str, str]) -> Checkpoint:
        """Returns the checkpoint in a folder, which is made where there is none.

        Raises:
            InputError: There are other files in it, or ``every`` is no positive number.
            DataError: It is of another fit, or damaged.
        """
        every = checks.count("every", every)
        place = Path(folder).expanduser()
        with fail_together("opening the checkpoint"):
            if place.exists() and not place.is_dir():
                raise InputError(f"checkpoint={str(place)!r} is a file; a checkpoint is a folder: choose another name")
            place.mkdir(parents=True, exist_ok=True)
            foreign = sorted(n for n in os.listdir(place) if not _OURS.fullmatch(n))
            if foreign:
                raise InputError(
                    f"checkpoint={str(place)!r} holds other files ({checks.few(foreign, 3)}); a checkpoint needs a folder of its own"
                )
            opened = Checkpoint(place, every, dict(identity))
            records = [_read(f).record for f in sorted(place.iterdir()) if f.suffix == ".safetensors"]
            for record in records:
                opened._check_identity(record)
        given_up = {n: why for record in records for n, why in record["given_up"].items()}
        return replace(opened, given_up=given_up)

    def start_pass(
        self,
        description: str,
        accumulators: Sequence[HasState],
        counts: DataCounts,
        batches: Callable[[], Iterable[Batch]],
        generator: torch.Generator | None,
    ) -> ResumablePass:
        """Takes up a pass where it was left, or starts it.

        Args:
            description: The name of the pass.
            accumulators: The accumulators, still empty.
            counts: The counts of this process, still empty.
            batches: A function that gives the batches of this process, to see which examples remain.
            generator: The source of random vectors.
        """
        what = re.sub(r"\W+", "_", description)
        with fail_together("reading the checkpoint"):
            for accumulator in accumulators:
                accumulator.state()  # One that has none is refused before the first batch.
            generation, files = self._latest(what)
            saved = {place: _read(file) for place, file in files.items()}
        self._check_same_everywhere(saved)
        done = [saved[place].tensors["examples"] for place in sorted(saved)]
        worlds = {world for _, world in saved}
        taken_over = bool(worlds) and worlds != {world_size()}
        resumed = ResumablePass(self, what, generation + taken_over, accumulators, counts, generator)
        with fail_together("taking up the checkpoint"):
            if taken_over:
                for place in sorted(saved) if rank() == 0 else ():
                    resumed.take_up(saved[place])
            elif (rank(), world_size()) in saved:
                resumed.take_up(saved[rank(), world_size()])
            if taken_over and rank() == 0:
                self._delete(f for f in self._files(what) if f[0] > generation)
                resumed.write()
                self._delete(f for f in self._files(what) if f[0] <= generation)
        if saved:
            resumed.claim(torch.cat(done), batches)
        return resumed

    def load_or_make(self, name: str, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Returns tensors that are made once in a fit: those of the folder, or new ones, which go there.

        Args:
            name: Their name.
            make: A function that makes them, the same on all processes.
        """
        file = self.folder / f"{name}-kept.safetensors"
        with fail_together("reading the checkpoint"):
            saved = _read(file) if file.exists() else None
        self._check_same_everywhere({} if saved is None else {(0, 0): saved})
        if saved is not None:
            return [saved.tensors[str(k)] for k in range(len(saved.tensors))]
        tensors = make()
        with fail_together("writing the checkpoint"):
            if rank() == 0:
                _write(file, self._record({}), {str(k): t for k, t in enumerate(tensors)})
        return tensors

    def without_rules(self, reasons: Mapping[str, str]) -> Checkpoint:
        """Returns an empty checkpoint of the same fit, in which further parameters are treated without their rules."""
        clear_checkpoint(self.folder)
        return replace(self, given_up={**self.given_up, **reasons})

    def _record(self, content: Mapping[str, Any]) -> dict[str, Any]:
        return {"identity": dict(self.identity), "given_up": dict(self.given_up), **content}

    def _check_identity(self, record: Mapping[str, Any]) -> None:
        saved = record["identity"]
        other = sorted(k for k in {*saved, *self.identity} if saved.get(k) != self.identity.get(k))
        if other:
            differences = "; ".join(
                f"{k} (kept: {_short(saved.get(k))}, now: {_short(self.identity.get(k))})" for k in other[:5]
            )
            raise DataError(
                f"the checkpoint in {self.folder} belongs to another fit, which differs in {differences}. Fit as before to continue, or use another "
                "folder, or delete this one to start again"
            )

    def _files(self, what: str) -> list[tuple[int, int, int, Path]]:
        """Returns the files of a pass: generation, process, number of processes, and path."""
        matches = [
            (m, f) for f in sorted(self.folder.iterdir()) if (m := _NAME.fullmatch(f.name)) and m["what"] == what
        ]
        return [(int(m["generation"]), int(m["rank"]), int(m["world"]), f) for m, f in matches]

    def _latest(self, what: str) -> tuple[int, dict[tuple[int, int], Path]]:
        """Returns the latest generation that counts, and its files by process.

        The first generation counts with any file, a later one only with that of process 0, which holds the earlier ones.
        """
        files = self._files(what)
        numbers = sorted({g for g, r, _, _ in files if r == 0 or g == 0}, reverse=True)
        latest = numbers[0] if numbers else 0
        return latest, {(r, w): f for g, r, w, f in files if g == latest}

    def _check_same_everywhere(self, saved: Mapping[tuple[int, int], _Saved]) -> None:
        """Raises where the processes do not see the same files, since one of them would then count examples twice."""
        text = json.dumps([[*place, saved[place].checksum] for place in sorted(saved)])
        seen = torch.zeros(world_size(), dtype=torch.int64)
        seen[rank()] = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        all_reduce_([seen])
        if len(set(seen.tolist())) > 1:
            raise DataError(
                f"the processes see different files in the checkpoint {self.folder}; it must lie on a disk that all of them share"
            )

    @staticmethod
    def _delete(files: Iterable[tuple[int, int, int, Path]]) -> None:
        for *_, file in files:
            file.unlink(missing_ok=True)


class ResumablePass:
    """One pass over the data whose sums are written now and then.

    Args:
        checkpoint: Where they are written.
        what: The name of the pass in files.
        generation: The number of the generation.
        accumulators: The sums.
        counts: The counts of this process.
        generator: The source of random vectors, whose state is kept with the sums.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        what: str,
        generation: int,
        accumulators: Sequence[HasState],
        counts: DataCounts,
        generator: torch.Generator | None,
    ):
        self.checkpoint, self.accumulators, self.counts, self.generator = checkpoint, accumulators, counts, generator
        name = f"{what}-g{generation:04d}-{rank()}of{world_size()}.safetensors"
        self.file = checkpoint.folder / name
        self._examples: list[Tensor] = []
        self._skip: Counter[int] = Counter()
        self._waiting = 0
        self.nothing_left = False

    def take_up(self, saved: _Saved) -> None:
        """Adds the sums, counts and examples of a file."""
        try:
            tensors, counts = dict(saved.tensors), dict(saved.record["counts"])
            first = not self._examples
            self._examples.append(tensors.pop("examples"))
            state = tensors.pop("generator", None)
            for number, accumulator in enumerate(self.accumulators):
                prefix = f"{number}."
                sums = {n.removeprefix(prefix): tensors.pop(n) for n in list(tensors) if n.startswith(prefix)}
                accumulator.add_state(sums)
                if sums:
                    raise ValueError(f"there is no place for {sorted(sums)[:3]}")
            if tensors or set(counts) != {f.name for f in fields(DataCounts)}:
                raise ValueError(f"its entries {sorted(tensors)[:3]} or counts are not those of this fit")
            self.counts.add(DataCounts(**{**counts, "used": frozenset(counts["used"])}))
            if first and self.generator is not None and state is not None:
                self.generator.set_state(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"the checkpoint in {self.checkpoint.folder} does not fit this network ({error}). Delete the folder to start again"
            ) from error

    def claim(self, done: Tensor, batches: Callable[[], Iterable[Batch]]) -> None:
        """Finds out which examples of this process are in the sums already: each one counts once over all processes.

        Args:
            done: The hashes of all examples that are in the sums of any process.
            batches: A function that gives the batches of this process.

        Raises:
            DataError: Some of them are not among the data.
        """
        with fail_together("comparing the data with the checkpoint"):
            present = torch.cat([torch.empty(0, dtype=torch.int64), *(example_hashes(b) for b in batches())])
        left = Counter(done.tolist())
        for process, hashes in enumerate(_gathered(present)):
            claimed = Counter(hashes.tolist()) & left
            left -= claimed
            if process == rank():
                self._skip = claimed
        if missing := sum(left.values()):
            raise DataError(
                f"{missing:,} of the {len(done):,} examples in the checkpoint {self.checkpoint.folder} are not among the data: it was made "
                "from other data, or from a loader that changes its examples (augmentation, padding to the batch's length), whose sums "
                "cannot be taken up. Give the same data, or delete the folder to start again"
            )
        self.nothing_left = sum(self._skip.values()) == len(present)

    def rest_of(self, batch: Batch, whole_batches: bool) -> Batch | None:
        """Returns the examples of a batch that are not in the sums yet; None where all are.

        Raises:
            DataError: Some are and some are not, although whole batches are needed.
        """
        hashes = example_hashes(batch)
        rest = []
        for place, value in enumerate(hashes.tolist()):
            if self._skip[value] > 0:
                self._skip[value] -= 1
            else:
                rest.append(place)
        if not rest:
            return None
        if len(rest) < batch.size:
            if whole_batches:
                raise DataError(
                    f"{batch.size - len(rest)} of the {batch.size} examples of a batch are in the checkpoint {self.checkpoint.folder} and the others "
                    "are not, but this structure averages over whole batches. Give the data in the same batches, or delete the folder"
                )
            index = torch.tensor(rest)
            batch, hashes = batch.take(index), hashes[index]
        self._examples.append(hashes)
        return batch

    def finish_batch(self) -> None:
        """Notes that a batch is in the sums, and writes them when it is time."""
        self._waiting += 1
        if self._waiting >= self.checkpoint.every:
            self.write()

    def finish(self) -> None:
        """Writes what was not written yet."""
        if +self._skip and not self.nothing_left:
            raise DataError(
                f"{sum(self._skip.values()):,} examples of the checkpoint {self.checkpoint.folder} did not come again: the data are others each "
                "time they are gone through. Delete the folder to start again, and give data that stay the same"
            )
        if self._waiting:
            self.write()

    def write(self) -> None:
        """Replaces the file of this process."""
        tensors = {"examples": torch.cat([torch.empty(0, dtype=torch.int64), *self._examples])}
        if self.generator is not None:
            tensors["generator"] = self.generator.get_state()
        for number, accumulator in enumerate(self.accumulators):
            tensors.update({f"{number}.{name}": value for name, value in accumulator.state().items()})
        counts = {**asdict(self.counts), "used": sorted(self.counts.used)}
        _write(self.file, self.checkpoint._record({"counts": counts}), tensors)
        self._waiting = 0


def clear_checkpoint(folder: str | os.PathLike[str]) -> None:
    """Deletes the files of a checkpoint, and nothing else in its folder; all processes call it together."""
    with fail_together("deleting the checkpoint"):
        place = Path(folder).expanduser()
        if rank() == 0 and place.is_dir():
            for file in [f for f in place.iterdir() if _OURS.fullmatch(f.name)]:
                remove(file)


def _gathered(hashes: Tensor) -> list[Tensor]:
    """Returns the hashes of every process, in the order of processes."""
    sizes = torch.zeros(world_size(), dtype=torch.int64)
    sizes[rank()] = len(hashes)
    all_reduce_([sizes])
    everybody = torch.zeros(int(sizes.sum()), dtype=torch.int64)
    start = int(sizes[: rank()].sum())
    everybody[start : start + len(hashes)] = hashes
    all_reduce_([everybody])
    return list(everybody.split(sizes.tolist()))


def _part(file: Path) -> str:
    """Returns the part of a fit that a file holds, as its name says."""
    return file.name.partition("-")[0]


def _short(text: object) -> str:
    return str(text) if len(str(text)) <= 40 else str(text)[:39] + "…"


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    return hashlib.sha256(f"{text}\n{weights_hash(tensors)}".encode()).hexdigest()


def _write(file: Path, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes a file that is there whole or not at all."""
    text = json.dumps({"format": _FORMAT, "part": _part(file), **record})
    # Sums may share memory with each other; the file wants each for itself.
    plain = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    with replaced_file(file) as part:
        save_file(plain, part, {"record": text, "checksum": _checksum(text, plain)})


def _read(file: Path) -> _Saved:
    """Returns what a file holds.

    Raises:
        DataError: It is damaged, or no checkpoint.
    """
    advice = "Delete the folder to start again"
    if file.is_symlink() or not file.is_file():
        raise DataError(f"{file} is not a plain file, so it is no part of a checkpoint. {advice}")
    checks.memory(str(file), file.stat().st_size)
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        text, checksum = metadata["record"], metadata["checksum"]
        if checksum != _checksum(text, tensors):
            raise DataError(f"{file} is damaged: its checksum differs. {advice}")
        record = json.loads(text)
        typed = all(isinstance(record[k], dict) for k in ("identity", "given_up"))
        if record["format"] != _FORMAT or not typed:
            raise DataError(f"{file} is a checkpoint of another version. {advice}")
        if record.get("part", _part(file)) != _part(file):  # Earlier versions did not write it.
            raise DataError(f"{file} holds another part of the fit, {record['part']}. {advice}")
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} is damaged or foreign: it is no checkpoint ({error}). {advice}") from error
    return _Saved(record, tensors, checksum)
