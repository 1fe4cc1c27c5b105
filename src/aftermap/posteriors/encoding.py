"""One mechanism for saving: frozen dataclasses as plain JSON values and a table of tensors, and back.

Only the classes of a registry are read or made; nothing in a file names code. A tensor that occurs in several places is
stored once and shared again after reading, and keeps its order in memory, so that products come out equal bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

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
from aftermap.errors import AftermapError, DataError, InputError
from aftermap.posteriors.base import GaussianPosterior
from aftermap.posteriors.records import ADVICE, Anything, Flag, Kind, ListOf, MapOf, Number, Record, Text, Whole, shown
from aftermap.prior import Prior

__all__ = [
    "BLOCK_KINDS",
    "FROM_VERSION_1",
    "SAVED",
    "StateReader",
    "StateWriter",
    "declared",
    "described",
    "saved_classes",
]

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
_PLAIN: dict[Any, Kind] = {float: Number(), int: Whole(), str: Text(), bool: Flag()}
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_DECLARED: dict[type[Any], dict[str, Any]] = {}
_TAGS: dict[Any, str] = {Tensor: "$tensor", torch.dtype: "$dtype", Layout: "$layout"}
_TAG_WORDS = {"$tensor": "a tensor", "$dtype": "a dtype", "$layout": "a layout", "$map": "a mapping"}
_LAYOUT = Record(
    {
        "name": Text(),
        "groups": Whole(1),
        "out": Whole(1),
        "in": Whole(1),
        "pieces": ListOf(ListOf(Anything(), length=6)),
    }
)
_PIECE: dict[str, Kind] = {
    "name": Text(),
    "shape": ListOf(Whole()),
    "view": ListOf(Whole()),
    "order": ListOf(Whole()),
    "start": Whole(),
    "stop": Whole(),
}


def _with_basis(value: Mapping[str, Any], inputs: str, outputs: str) -> dict[str, Any]:
    """Puts two entries for eigenvectors into one for the basis."""
    others = {k: v for k, v in value.items() if k not in (inputs, outputs)}
    if inputs not in value or outputs not in value:
        return others  # The check of the entries says what is missing.
    return {**others, "basis": {"$class": "KroneckerEigenbasis", "inputs": value[inputs], "outputs": value[outputs]}}


# These are classes and entries that version 1 named differently.
FROM_VERSION_1: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
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
    _tensors_alive: list[Tensor] = field(default_factory=list)

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
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise InputError(
                f"{key} has entries that are not finite, which cannot be saved; a fit should have only finite numbers"
            )
        strides = value.stride()
        order = sorted(range(value.dim()), key=lambda d: -strides[d])
        if not value.permute(order).is_contiguous():  # An expanded or strided view is copied anyway.
            order = list(range(value.dim()))
        packed = value.permute(order).cpu().contiguous()
        if any(packed.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in self._shares(packed)):
            packed = packed.clone()
        self._keys[id(tensor)] = key
        self._tensors_alive.append(tensor)  # An id is only unique as long as its object lives.
        self.tensors[key] = packed
        self.table[key] = described(packed, order)
        return key

    def _shares(self, packed: Tensor) -> list[Tensor]:
        """Returns tensors that may lie in the same storage; a view of a part counts as sharing with itself."""
        whole = packed.untyped_storage().nbytes() == packed.numel() * packed.element_size()
        return list(self.tensors.values()) if whole else [packed]


@dataclass(frozen=True)
class StateReader:
    """Reads what a :class:`StateWriter` wrote, each entry as the type that its class declares.

    Attributes:
        tensors: The tensors by key, as they lay in the file.
        table: The shape, dtype and order of each tensor, by key.
        where: The file that the values come from, for messages.
        version: The version of the format that the values were written in.
    """

    tensors: Mapping[str, Tensor]
    table: Mapping[str, Mapping[str, Any]]
    where: str
    version: int = 3
    _tensors_read: dict[str, Tensor] = field(default_factory=dict)

    def decode(self, value: Any, path: str, hint: Any = Any) -> Any:
        """Returns the object that JSON stands for.

        Args:
            value: The JSON value.
            path: Its place in the file, for messages.
            hint: The type that it must have, as annotations write it; with Any the value says by itself what it is.

        Raises:
            DataError: Something does not fit; the message says what, and where.
        """
        origin, inner = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            kinds = [h for h in inner if h is not NoneType]
            if value is None and NoneType in inner:
                return None
            return self.decode(value, path, kinds[0] if len(kinds) == 1 else Any)
        if hint in _PLAIN:
            return _PLAIN[hint].read(value, f"{self.where}: {path}")
        if origin in (tuple, list, Sequence) and (origin is not tuple or inner[1:] == (Ellipsis,)):
            entries = ListOf(Anything()).read(value, f"{self.where}: {path}")
            return tuple(self.decode(v, f"{path}.{i}", inner[0]) for i, v in enumerate(entries))
        if origin in (dict, Mapping):
            return self._map(self._tagged(value, "$map", path), path, inner[1])
        if hint in _TAGS:
            return self._by_tag(_TAGS[hint], self._tagged(value, _TAGS[hint], path), path)
        if isinstance(hint, type):
            decoded = self._object(value, path)
            if not isinstance(decoded, hint):
                raise DataError(
                    f"{self.where}: {path} should be a {hint.__name__}, got a {type(decoded).__name__}. {ADVICE}"
                )
            return decoded
        return self._untyped(value, path)

    def _untyped(self, value: Any, path: str) -> Any:
        """Reads a value whose class does not say what it is."""
        if isinstance(value, list):
            return tuple(self._untyped(v, f"{path}.{i}") for i, v in enumerate(value))
        if not isinstance(value, dict):
            return value
        if "$class" in value:
            return self._object(value, path)
        if len(value) == 1:
            tag, content = next(iter(value.items()))
            if tag == "$map":
                return self._map(content, path, Any)
            if tag in _TAGS.values():
                return self._by_tag(tag, content, path)
        tags = ", ".join((*_TAGS.values(), "$map", "$class"))
        raise DataError(f"{self.where}: {path} is an object without a known tag ({tags}). {ADVICE}")

    def _tagged(self, value: Any, tag: str, path: str) -> Any:
        if not isinstance(value, dict) or list(value) != [tag]:
            raise DataError(f"{self.where}: {path} should be {_TAG_WORDS[tag]}, got {shown(value)}. {ADVICE}")
        return value[tag]

    def _by_tag(self, tag: str, content: Any, path: str) -> Any:
        return {"$tensor": self._tensor, "$dtype": self._dtype, "$layout": self._layout}[tag](content, path)

    def _tensor(self, key: Any, path: str) -> Tensor:
        if not isinstance(key, str) or key not in self.tensors:
            raise DataError(
                f"{self.where}: {path} refers to {shown(key).replace('the text', 'the tensor')}, which is not in the file of tensors. {ADVICE}"
            )
        if key not in self._tensors_read:
            tensor = self.tensors[key]
            order = self.table[key].get("order", list(range(tensor.dim())))
            if sorted(order) != list(range(tensor.dim())):
                raise DataError(
                    f"{self.where}: the order {order[:8]!r} of {key} is not an order of {tensor.dim()} dimensions. {ADVICE}"
                )
            inverse = sorted(range(len(order)), key=order.__getitem__)
            self._tensors_read[key] = tensor.permute(inverse)
        return self._tensors_read[key]

    def _dtype(self, name: Any, path: str) -> torch.dtype:
        if not isinstance(name, str) or name not in _DTYPES:
            raise DataError(f"{self.where}: {path} is the dtype {name!r}, which torch does not know. {ADVICE}")
        return _DTYPES[name]

    def _layout(self, config: Any, path: str) -> Layout:
        record = _LAYOUT.read(config, f"{self.where}: {path}")
        names = ("name", "shape", "view", "order", "start", "stop")
        pieces = [
            [_PIECE[n].read(v, f"{self.where}: {path}.pieces.{i}.{n}") for n, v in zip(names, piece, strict=True)]
            for i, piece in enumerate(record["pieces"])
        ]
        layout = Layout.from_config({**record, "pieces": pieces})
        end = 0
        for piece in layout.pieces:
            columns, numbers = piece.stop - piece.start, math.prod(piece.shape)
            fits = piece.start == end and sorted(piece.order) == list(range(len(piece.view)))
            if not fits or not numbers == math.prod(piece.view) == layout.groups * layout.out * columns:
                raise DataError(
                    f"{self.where}: {path} is not a layout of a block: its piece {piece.name!r} does not fit. {ADVICE}"
                )
            end = piece.stop
        if end != layout.in_ or not layout.pieces or len(layout.shapes) != len(layout.pieces):
            raise DataError(f"{self.where}: {path} is not a layout of a block: its pieces do not fill it. {ADVICE}")
        return layout

    def _map(self, content: Any, path: str, hint: Any) -> dict[str, Any]:
        entries = MapOf(Anything()).read(content, f"{self.where}: {path}")
        return {k: self.decode(v, f"{path}.{k}", hint) for k, v in entries.items()}

    def _object(self, value: Any, path: str) -> Any:
        name = value.get("$class") if isinstance(value, dict) else None
        if not isinstance(name, str):
            raise DataError(f"{self.where}: {path} should be an object with a $class, got {shown(value)}. {ADVICE}")
        if self.version == 1 and name in FROM_VERSION_1:
            value = FROM_VERSION_1[name](value)
            name = value["$class"]
        classes = saved_classes()
        if name not in classes:
            raise DataError(
                f"{self.where}: {path} is a {name!r}, a kind that this version does not know; known are "
                f"{', '.join(classes)}. If it is of a structure of your own, import the file that registers it before loading"
            )
        wanted = declared(classes[name])
        entries = {k for k in value if k != "$class"}
        if entries != set(wanted):
            raise DataError(
                f"{self.where}: {path} ({name}) lacks {sorted(set(wanted) - entries) or 'nothing'} and has unknown "
                f"{sorted(entries - set(wanted)) or 'nothing'}. {ADVICE}"
            )
        if name in BLOCK_KINDS and value["kind"] not in BLOCK_KINDS[name]:
            raise DataError(
                f"{self.where}: {path} is a {name} of the unknown kind {value['kind']!r}; known are "
                f"{', '.join(map(repr, BLOCK_KINDS[name]))}. {ADVICE}"
            )
        parts = {k: self.decode(value[k], f"{path}.{k}", hint) for k, hint in wanted.items()}
        try:
            return classes[name](**parts)
        except (
            AftermapError,
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:  # A class of your own may judge its entries.
            raise DataError(f"{self.where}: {path} is no {name}: {error}. {ADVICE}") from error


def declared(saved: type[Any]) -> dict[str, Any]:
    """Returns the types of the entries of a class; Any for all of them where its annotations cannot be read."""
    if saved not in _DECLARED:
        try:
            hints = get_type_hints(saved)
        except (NameError, TypeError):
            hints = {}
        _DECLARED[saved] = {f.name: hints.get(f.name, Any) for f in fields(saved)}
    return _DECLARED[saved]
