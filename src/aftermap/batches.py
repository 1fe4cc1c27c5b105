"""Batches of any form: what goes into the model, what it should have answered, and how often it counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from aftermap.errors import DataError, ShapeError
from aftermap.linalg import all_finite

__all__ = [
    "Batch",
    "Path",
    "Unpack",
    "check_inputs",
    "describe",
    "in_dtype",
    "input_batches",
    "is_batches",
    "iterate",
    "take",
    "tensors_of",
    "unpack_batch",
    "unpack_inputs",
]

Path = tuple[Any, ...]  # where a tensor is among the inputs: keys of mappings and places in tuples
Unpack = Callable[[Any], tuple[Any, Any] | tuple[Any, Any, Any]]
_TARGET_KEYS = ("labels", "label", "targets", "target", "y")
_WEIGHT_KEYS = ("weight", "weights", "sample_weight")


@dataclass(frozen=True)
class Batch:
    """One batch, taken apart.

    Attributes:
        inputs: A tensor, a tuple (positional arguments) or a mapping (keyword arguments) for the model.
        targets: The labels or regression targets; None when the batch has none.
        weight: [N], how many copies of each datum this one stands for; None means one.
        size: The number N of examples.
        whole: The places among the inputs of tensors that belong to all examples together, although their first
            dimension may happen to be N. Any other tensor whose first dimension is N holds one row for each example.
    """

    inputs: Any
    targets: Any
    weight: Tensor | None
    size: int
    whole: frozenset[Path] = frozenset()

    def to(self, device: torch.device) -> Batch:
        """Returns the same batch on another device; tensors made in inference mode, which autograd refuses, are copied."""

        def move(_: Path, tensor: Tensor) -> Tensor:
            return tensor.to(device, copy=tensor.is_inference())

        inputs, targets, weight = (_map_paths(move, tree) for tree in (self.inputs, self.targets, self.weight))
        return replace(self, inputs=inputs, targets=targets, weight=weight)

    def pieces(self, size: int) -> Iterator[Batch]:
        """Yields the same examples, ``size`` at a time."""
        for start in range(0, self.size, size):
            yield self.take(torch.arange(start, min(start + size, self.size)))

    def take(self, index: Tensor) -> Batch:
        """Returns the chosen examples. What they share stays whole, also where it has as many rows as are chosen.

        >>> batch = Batch((torch.zeros(4, 2), torch.zeros(3, 3)), None, None, 4)
        >>> [len(t) for t in batch.take(torch.arange(3)).take(torch.arange(2)).inputs]
        [2, 3]
        """
        inputs = _map_paths(lambda path, t: t[index.to(t.device)] if self.is_batched(path, t) else t, self.inputs)
        weight = None if self.weight is None else self.weight[index.to(self.weight.device)]
        shared = frozenset(path for path, tensor in _walk(self.inputs) if not self.is_batched(path, tensor))
        return Batch(inputs, take(self.targets, index, self.size), weight, len(index), shared)

    @property
    def numbers_per_example(self) -> int:
        """How many numbers the inputs hold for each example."""
        return sum(t.numel() for path, t in _walk(self.inputs) if self.is_batched(path, t)) // max(1, self.size)

    def is_batched(self, path: Path, tensor: Tensor) -> bool:
        """Tells whether a tensor among the inputs holds one row for each example."""
        return tensor.dim() > 0 and tensor.shape[0] == self.size and path not in self.whole

    def tensors(self) -> list[tuple[Path, Tensor]]:
        """Returns every tensor among the inputs, and where it is."""
        return list(_walk(self.inputs))


def unpack_batch(batch: Any, unpack: Unpack | None = None) -> Batch:
    """Takes a batch apart.

    Understood as they are: ``(x, y)``, ``(x, y, weight)``, a mapping with a key for the targets
    (``labels``, ``label``, ``targets``, ``target`` or ``y``) such as a tokenizer's ``BatchEncoding``; x itself may be a
    tensor, a tuple of tensors or a mapping. Anything else: ``unpack``, a function that returns one of the first two.

    >>> unpack_batch((torch.zeros(4, 2), torch.zeros(4))).size
    4
    """
    if unpack is not None:
        batch = unpack(batch)
        if not isinstance(batch, tuple) or len(batch) not in (2, 3):
            raise DataError(
                f"unpack= must return (inputs, targets) or (inputs, targets, weight), but it returned {describe(batch)}"
            )
    weight: Any = None
    if isinstance(batch, Mapping):
        inputs, targets, weight = _split_mapping(batch)
    elif isinstance(batch, tuple | list) and len(batch) in (2, 3):
        inputs, targets = batch[0], batch[1]
        weight = batch[2] if len(batch) == 3 else None
    else:
        raise DataError(
            f"a batch is {describe(batch)}. Understood are (x, y), (x, y, weight) and mappings with one of the keys "
            f"{', '.join(_TARGET_KEYS)}; for anything else pass unpack=, a function that returns (inputs, targets)"
        )
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    size = _size(inputs)
    targets = _as_targets(targets)
    if isinstance(targets, Tensor) and (targets.dim() == 0 or targets.shape[0] != size):
        raise ShapeError(
            f"the inputs hold {size} examples, but the targets have shape {tuple(targets.shape)}; the first dimension must agree"
        )
    return Batch(inputs, targets, _check_weight(weight, size), size)


def _as_targets(targets: Any) -> Any:
    """Turns numbers and arrays into a tensor; None, and a mapping or sequence of tensors, stay as they are."""
    if targets is None or isinstance(targets, Mapping | Tensor) or any(True for _ in tensors_of(targets)):
        return targets
    try:
        return torch.as_tensor(targets)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the targets are {describe(targets)} that cannot be made into a tensor ({error}); "
            "pass a tensor of labels or values, or unpack= to make one"
        ) from error


def _split_mapping(batch: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    # BatchEncoding is a UserDict: copying into a dict keeps the user's object as it is.
    items = {k: batch[k] for k in batch}
    target = next((k for k in _TARGET_KEYS if k in items), None)
    if target is None:
        raise DataError(
            f"a batch is a mapping with the keys {sorted(map(str, items))}, none of which names the targets "
            f"({', '.join(_TARGET_KEYS)}). Rename one, or pass unpack="
        )
    weight = next((items.pop(k) for k in _WEIGHT_KEYS if k in items), None)
    return {k: v for k, v in items.items() if k != target}, items[target], weight


def _check_weight(weight: Any, size: int) -> Tensor | None:
    if weight is None:
        return None
    weight = torch.as_tensor(weight)
    if weight.shape != (size,) or not bool(torch.isfinite(weight).all()) or bool((weight < 0).any()):
        raise DataError(
            f"example weights must be {size} finite numbers that are not negative, one per example; "
            f"got shape {tuple(weight.shape)}" + (f", smallest {float(weight.min()):g}" if weight.numel() else "")
        )
    return weight


def describe(thing: Any) -> str:
    """Says what a value is, in a few words, for messages."""
    if isinstance(thing, tuple | list):
        return f"a {type(thing).__name__} of {len(thing)} elements"
    return f"a {type(thing).__module__}.{type(thing).__name__}"


def tensors_of(tree: Any) -> Iterable[Tensor]:
    """Returns every tensor in nested mappings, tuples and lists."""
    return (tensor for _, tensor in _walk(tree))


def in_dtype(tree: Any, dtype: torch.dtype) -> Any:
    """Returns inputs or targets with their floating-point tensors in this dtype; all others stay as they are."""
    return _map_paths(lambda _, t: t.to(dtype) if t.is_floating_point() else t, tree)


def _map_paths(function: Callable[[Path, Tensor], Any], tree: Any, path: Path = ()) -> Any:
    if isinstance(tree, Tensor):
        return function(path, tree)
    if isinstance(tree, Mapping):
        return {key: _map_paths(function, tree[key], (*path, key)) for key in tree}
    if isinstance(tree, tuple | list):
        return tuple(_map_paths(function, item, (*path, place)) for place, item in enumerate(tree))
    return tree


def _walk(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key in tree:
            yield from _walk(tree[key], (*path, key))
    elif isinstance(tree, tuple | list):
        for place, item in enumerate(tree):
            yield from _walk(item, (*path, place))


def _size(inputs: Any) -> int:
    sizes = [t.shape[0] for t in tensors_of(inputs) if t.dim() > 0]
    if not sizes:
        turned = "Pass plain numbers as a tensor, torch.tensor(x)"
        if hasattr(inputs, "__array__"):
            turned = "Pass plain numbers as a tensor, torch.from_numpy(x)"
        elif isinstance(inputs, Dataset):
            turned = "Pass it in batches, torch.utils.data.DataLoader(data, batch_size=...)"
        raise DataError(
            f"the inputs of a batch hold no tensor with a batch dimension: they are {describe(inputs)}. {turned}"
        )
    return sizes[0]


def take(inputs: Any, index: Tensor, size: int) -> Any:
    """Returns the chosen examples of a batch's inputs or targets; what has no batch dimension stays as it is."""
    return _map_paths(lambda _, t: t[index.to(t.device)] if t.dim() > 0 and t.shape[0] == size else t, inputs)


def iterate(
    data: Iterable[Any],
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    may_be_empty: bool = False,
) -> Iterable[Batch]:
    """Yields the batches of ``data``, taken apart, checked and moved to ``device``.

    Raises:
        DataError: There is no batch at all, unless ``may_be_empty``, an input is not finite, or a floating-point input has another dtype than
            the model.
    """
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise DataError(
            f"data is {describe(data)}, which gives single examples; batches are needed: DataLoader(data, batch_size=256)"
        )
    one_batch = isinstance(data, tuple) and unpack is None and all(isinstance(t, Tensor | np.ndarray) for t in data)
    if one_batch or isinstance(data, Tensor | Mapping | str | bytes) or not isinstance(data, Iterable):
        raise DataError(
            f"data must be an iterable of batches (a DataLoader or a list of (x, y)), but it is {describe(data)}. "
            "For two tensors pass [(x, y)]"
        )
    seen = False
    for raw in data:
        seen = True
        batch = unpack_batch(raw, unpack)
        if batch.size == 0:
            continue
        check_inputs(batch.inputs, dtype)
        yield batch.to(device)
    if not seen and not may_be_empty:
        raise DataError(
            "the data are empty: not a single batch came. Check the loader (drop_last? an exhausted generator?)"
        )


def unpack_inputs(inputs: Any, dtype: torch.dtype | None = None) -> Batch:
    """Returns the inputs alone, without targets: a tensor, an array, a table, a tuple of positional or a mapping of keyword arguments.

    Args:
        inputs: The inputs as the model takes them. NumPy arrays become tensors, and so do tables of pandas or polars.
        dtype: The dtype of floating-point numbers that come from arrays and tables; None keeps theirs.

    >>> unpack_inputs(np.zeros((3, 2)), torch.float32).inputs.dtype
    torch.float32
    """
    inputs = inputs if isinstance(inputs, Tensor) else _as_tensors(inputs, dtype)
    return Batch(inputs, None, None, _size(inputs))


def _as_tensors(tree: Any, dtype: torch.dtype | None) -> Any:
    """Turns arrays and tables among inputs into tensors, and lists into tuples."""
    if isinstance(tree, Tensor):
        return tree
    if hasattr(tree, "columns") and hasattr(tree, "to_numpy"):
        return _table_as_tensor(tree, dtype)
    if isinstance(tree, np.ndarray):
        if tree.dtype.kind not in "iufb":
            raise DataError(f"the inputs are an array of {tree.dtype}, which are not numbers a network takes")
        # PyTorch takes neither the other byte order nor, without a warning, what may not be written to.
        tensor = torch.from_numpy(np.require(tree, tree.dtype.newbyteorder("="), ["C", "W"]))
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    if isinstance(tree, Mapping):
        return {key: _as_tensors(tree[key], dtype) for key in tree}
    if isinstance(tree, tuple | list):
        return tuple(_as_tensors(item, dtype) for item in tree)
    return tree


def _table_as_tensor(table: Any, dtype: torch.dtype | None) -> Tensor:
    """Turns a table of numbers into a tensor [N, columns]; whole numbers become floating-point ones, since columns are quantities here."""
    wrong = [str(name) for name in table.columns if np.asarray(table[name]).dtype.kind not in "iufb"]
    if wrong:
        raise DataError(
            f"the columns {', '.join(wrong[:5])} of the table hold no numbers; leave them out or encode them as in training: "
            "table[columns_of_training]"
        )
    columns = [np.asarray(table[name], dtype=np.float64) for name in table.columns]
    if not columns:
        raise DataError("the table has no column")
    return torch.from_numpy(np.stack(columns, 1)).to(dtype or torch.get_default_dtype())


def is_batches(data: Any) -> bool:
    """Tells whether data are many batches (a DataLoader, a generator, a list of (x, y)) and not the inputs of one."""
    if isinstance(data, DataLoader):
        return True
    if isinstance(data, list):
        return bool(data) and all(isinstance(b, tuple | list | Mapping) for b in data)
    known = (Tensor, np.ndarray, Mapping, tuple, str, bytes)
    return isinstance(data, Iterable) and not isinstance(data, known) and not hasattr(data, "columns")


def input_batches(data: Iterable[Any], unpack: Unpack | None = None) -> Iterator[Any]:
    """Yields the inputs of batches whose targets, if they have any, do not matter.

    Args:
        data: Batches as for a fit, or inputs alone: x, (x,), or a mapping without targets.
        unpack: What turns a batch of another form into (inputs, targets).
    """
    for batch in data:
        labelled = isinstance(batch, Mapping) and any(k in batch for k in _TARGET_KEYS)
        if unpack is not None or labelled or (isinstance(batch, tuple | list) and len(batch) in (2, 3)):
            yield unpack_batch(batch, unpack).inputs if unpack is not None or labelled else batch[0]
        else:
            yield batch


def check_inputs(inputs: Any, dtype: torch.dtype | None) -> None:
    """Raises unless every floating-point input is finite and of the model's dtype.

    Tensors after the first may hold -inf: additive attention masks do.
    """
    for number, tensor in enumerate(tensors_of(inputs)):
        if not tensor.is_floating_point():
            continue
        if not all_finite(tensor):
            allowed = torch.isfinite(tensor) if number == 0 else tensor.isfinite() | tensor.isneginf()
            if not bool(allowed.all()):
                bad = torch.nonzero(~allowed)[0].tolist()
                raise DataError(
                    f"the inputs are not finite: {tensor[tuple(bad)].item()} at index {bad} of tensor {number + 1}. Clean or mask "
                    "them first. Only an additive mask, which is not the first tensor among the inputs, may hold -inf"
                )
        mixed = dtype is not None and tensor.dtype != dtype and not torch.is_autocast_enabled(tensor.device.type)
        if mixed:
            raise DataError(
                f"the inputs are {tensor.dtype}, but the model's parameters are {dtype}. "
                f"Convert one of them: x.to({dtype}) or model.to({tensor.dtype})"
            )
