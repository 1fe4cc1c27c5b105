"""One mechanism for saving: frozen dataclasses as plain JSON values and a table of tensors, and back.

Only the classes of a registry are read or made; nothing in a file names code. A tensor that occurs in several places is
stored once and shared again after reading, and keeps its order in memory, so that products come out equal bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from aftermap.curvature.rules.base import Layout
from aftermap.curvature.structures.base import STRUCTURES, Factors, Treatment
from aftermap.curvature.structures.diagonal import DiagonalBlock, DiagonalBlockPosterior
from aftermap.curvature.structures.eigenbasis import KroneckerEigenbasis
from aftermap.curvature.structures.ekfac import EkfacBlock
from aftermap.curvature.structures.full import FullBlock, FullBlockPosterior
from aftermap.curvature.structures.kron import KronBlock, KronBlockPosterior, KroneckerEigenvalues
from aftermap.curvature.structures.low_rank import LowRankBlock, LowRankBlockPosterior
from aftermap.curvature.structures.subnetwork import SubnetworkBlock, SubnetworkBlockPosterior
from aftermap.errors import DataError, InputError
from aftermap.posteriors.base import GaussianPosterior
from aftermap.prior import Prior

__all__ = ["BLOCK_KINDS", "SAVED", "StateReader", "StateWriter", "described", "saved_classes"]

SAVED: dict[str, type[Any]] = {
    saved.__name__: saved
    for saved in (
        GaussianPosterior,
        KronBlockPosterior,
        DiagonalBlockPosterior,
        FullBlockPosterior,
        LowRankBlockPosterior,
        SubnetworkBlockPosterior,
        KroneckerEigenbasis,
        KroneckerEigenvalues,
        Prior,
        Factors,
        Treatment,
        KronBlock,
        EkfacBlock,
        DiagonalBlock,
        FullBlock,
        LowRankBlock,
        SubnetworkBlock,
    )
}
BLOCK_KINDS: dict[str, tuple[str, ...]] = {
    "KronBlock": ("kron", "kfra"),
    "EkfacBlock": ("ekfac",),
    "DiagonalBlock": ("diagonal",),
    "FullBlock": ("full", "hessian"),
    "LowRankBlock": ("low_rank",),
    "SubnetworkBlock": ("subset",),
}


def _with_basis(value: Mapping[str, Any], inputs: str, outputs: str) -> dict[str, Any]:
    """Puts two entries for eigenvectors into one for the basis."""
    others = {k: v for k, v in value.items() if k not in (inputs, outputs)}
    if inputs not in value or outputs not in value:
        return others  # The check of the entries says what is missing.
    return {**others, "basis": {"$class": "KroneckerEigenbasis", "inputs": value[inputs], "outputs": value[outputs]}}


# These are classes and entries that version 1 named differently.
_FROM_VERSION_1: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "EigenTable": lambda value: {**value, "$class": "KroneckerEigenvalues"},
    "EigenBlock": lambda value: {**_with_basis(value, "input_vectors", "output_vectors"), "$class": "EkfacBlock"},
    "KronBlockPosterior": lambda value: _with_basis(value, "inner", "outer"),
    "SubsetBlock": lambda value: {**value, "$class": "SubnetworkBlock"},
    "SubsetBlockPosterior": lambda value: {**value, "$class": "SubnetworkBlockPosterior"},
}


def saved_classes() -> dict[str, type[Any]]:
    """Returns the classes that a folder may name: those of the library, and those of every registered structure."""
    registered = (c for structure in STRUCTURES.values() for c in (*structure.blocks, *structure.posteriors))
    return {**SAVED, **{c.__name__: c for c in registered if c.__name__ not in SAVED}}


def described(tensor: Tensor, order: Sequence[int] | None = None) -> dict[str, Any]:
    """Returns shape and dtype of a tensor as it lies in the file, and the order of its dimensions there if it is another."""
    description: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if order is not None and list(order) != sorted(order):
        description["order"] = list(order)
    return description


@dataclass
class StateWriter:
    """Collects tensors while it turns objects into JSON values.

    Attributes:
        tensors: The tensors by key, contiguous, on the CPU, no two of them in one storage.
        table: The shape, dtype and order of each tensor, by key.

    >>> writer = StateWriter()
    >>> writer.encode({"a": torch.zeros(2, 3)}, "mean")
    {'$map': {'a': {'$tensor': 'mean.a'}}}
    >>> writer.table
    {'mean.a': {'shape': [2, 3], 'dtype': 'float32'}}
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    table: dict[str, dict[str, Any]] = field(default_factory=dict)
    _keys: dict[int, str] = field(default_factory=dict)
    _held: list[Tensor] = field(default_factory=list)

    def encode(self, value: Any, path: str) -> Any:
        """Returns JSON for a value; ``path`` says where it is and names its tensors.

        Raises:
            InputError: A class is not in the registry, or JSON cannot hold a number.
        """
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            if not math.isfinite(value):
                raise InputError(f"{path} is {value}, which cannot be saved; a fit should have only finite numbers")
            return value
        if isinstance(value, Tensor):
            return {"$tensor": self._add(value, path)}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, Layout):
            return {"$layout": value.to_config()}
        if isinstance(value, Mapping):
            return {"$map": {k: self.encode(v, f"{path}.{k}") for k, v in value.items()}}
        if isinstance(value, tuple | list):
            return [self.encode(v, f"{path}.{i}") for i, v in enumerate(value)]
        name = type(value).__name__
        if saved_classes().get(name) is type(value) and is_dataclass(value):
            parts = {f.name: self.encode(getattr(value, f.name), f"{path}.{f.name}") for f in fields(value)}
            return {"$class": name, **parts}
        raise InputError(f"{path} is a {name}, which cannot be saved; allowed are {', '.join(saved_classes())}")

    def _add(self, tensor: Tensor, key: str) -> str:
        if id(tensor) in self._keys:
            return self._keys[id(tensor)]
        value = tensor.detach()
        strides = value.stride()
        order = sorted(range(value.dim()), key=lambda d: -strides[d])
        if not value.permute(order).is_contiguous():  # An expanded or strided view is copied anyway.
            order = list(range(value.dim()))
        packed = value.permute(order).cpu().contiguous()
        if any(packed.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in self._shares(packed)):
            packed = packed.clone()
        self._keys[id(tensor)] = key
        self._held.append(tensor)  # An id is only unique as long as its object lives.
        self.tensors[key] = packed
        self.table[key] = described(packed, order)
        return key

    def _shares(self, packed: Tensor) -> list[Tensor]:
        """Returns tensors that may lie in the same storage; a view of a part counts as sharing with itself."""
        whole = packed.untyped_storage().nbytes() == packed.numel() * packed.element_size()
        return list(self.tensors.values()) if whole else [packed]


@dataclass(frozen=True)
class StateReader:
    """Reads what a :class:`StateWriter` wrote.

    Attributes:
        tensors: The tensors by key, as they lay in the file.
        table: The shape, dtype and order of each tensor, by key.
        where: The file that the values come from, for messages.
        version: The version of the format that the values were written in, 1 or 2.
    """

    tensors: Mapping[str, Tensor]
    table: Mapping[str, Mapping[str, Any]]
    where: str
    version: int = 2
    _tensors_read: dict[str, Tensor] = field(default_factory=dict)

    def decode(self, value: Any, path: str) -> Any:
        """Returns the object that JSON stands for.

        Raises:
            DataError: Something does not fit; the message says what, and where.
        """
        if isinstance(value, list):
            return tuple(self.decode(v, f"{path}.{i}") for i, v in enumerate(value))
        if not isinstance(value, dict):
            return value
        readers: dict[str, Callable[[Any, str], Any]] = {
            "$tensor": self._tensor,
            "$dtype": self._dtype,
            "$layout": self._layout,
            "$map": self._map,
        }
        if "$class" in value:
            return self._object(value, path)
        if len(value) == 1:
            tag, content = next(iter(value.items()))
            if tag in readers:
                return readers[tag](content, path)
        raise DataError(f"{self.where}: {path} is an object without a known tag ({', '.join(readers)}, $class)")

    def _tensor(self, key: Any, path: str) -> Tensor:
        if not isinstance(key, str) or key not in self.tensors:
            raise DataError(f"{self.where}: {path} refers to the tensor {key!r}, which is not in the file of tensors")
        if key not in self._tensors_read:
            tensor = self.tensors[key]
            order = self.table[key].get("order", list(range(tensor.dim())))
            if not isinstance(order, list) or sorted(order) != list(range(tensor.dim())):
                raise DataError(f"{self.where}: the order {order!r} of {key} is no order of {tensor.dim()} dimensions")
            inverse = sorted(range(len(order)), key=order.__getitem__)
            self._tensors_read[key] = tensor.permute(inverse)
        return self._tensors_read[key]

    def _dtype(self, name: Any, path: str) -> torch.dtype:
        dtype = getattr(torch, name, None) if isinstance(name, str) else None
        if not isinstance(dtype, torch.dtype):
            raise DataError(f"{self.where}: {path} is the dtype {name!r}, which torch does not know")
        return dtype

    def _layout(self, config: Any, path: str) -> Layout:
        try:
            return Layout.from_config(config)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{self.where}: {path} is no layout of a block ({error!r})") from error

    def _map(self, content: Any, path: str) -> dict[str, Any]:
        if not isinstance(content, dict):
            raise DataError(f"{self.where}: {path} should be a mapping, got {type(content).__name__}")
        return {k: self.decode(v, f"{path}.{k}") for k, v in content.items()}

    def _object(self, value: Mapping[str, Any], path: str) -> Any:
        if self.version == 1 and value["$class"] in _FROM_VERSION_1:
            value = _FROM_VERSION_1[value["$class"]](value)
        name, classes = value["$class"], saved_classes()
        if name not in classes:
            raise DataError(
                f"{self.where}: {path} is a {name!r}, a kind that this version does not know; known are "
                f"{', '.join(classes)}. If it is of a structure of your own, import the file that registers it before loading"
            )
        wanted = {f.name: str(f.type) for f in fields(classes[name])}
        entries = {k for k in value if k != "$class"}
        if entries != set(wanted):
            raise DataError(
                f"{self.where}: {path} ({name}) lacks {sorted(set(wanted) - entries) or 'nothing'} and has unknown "
                f"{sorted(entries - set(wanted)) or 'nothing'}"
            )
        if name in BLOCK_KINDS and value["kind"] not in BLOCK_KINDS[name]:
            raise DataError(
                f"{self.where}: {path} is a {name} of the unknown kind {value['kind']!r}; known are "
                f"{', '.join(map(repr, BLOCK_KINDS[name]))}"
            )
        parts = {k: self.decode(value[k], f"{path}.{k}") for k in wanted}
        for key, kind in wanted.items():
            if (
                kind.startswith("Tensor")
                and not isinstance(parts[key], Tensor)
                and not (parts[key] is None and kind.endswith("None"))
            ):
                raise DataError(f"{self.where}: {path}.{key} should be a tensor, got {parts[key]!r}")
        return classes[name](**parts)
