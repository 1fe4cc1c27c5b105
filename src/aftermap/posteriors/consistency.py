"""Whether the parts of a posterior that was read fit together: names, shapes, and numbers that must be finite or positive.

Shapes are compared by letters: in one block every letter stands for one number, so `"goo"` is a square matrix for each group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from aftermap.curvature.structures.base import Factors
from aftermap.curvature.structures.diagonal import DiagonalBlock, DiagonalBlockPosterior
from aftermap.curvature.structures.eigenbasis import DAMPINGS
from aftermap.curvature.structures.kron import KroneckerEigenvalues
from aftermap.curvature.structures.subnetwork import SubnetworkBlock, SubnetworkBlockPosterior
from aftermap.errors import DataError
from aftermap.posteriors.base import GaussianPosterior
from aftermap.posteriors.encoding import SAVED, described
from aftermap.posteriors.records import ADVICE
from aftermap.prior import Prior

__all__ = ["check_agreement", "check_values"]

# For each class the letters of its tensors: g groups, o outputs and i inputs of a layer, p all numbers of the block's
# parameters, s those of a subnetwork, k and r ranks. An entry may have one of several forms.
_LETTERS: dict[str, dict[str, tuple[str, ...]]] = {
    "KronBlock": {"inputs": ("gii", "gi"), "outputs": ("goo",), "rows": ("g",)},
    "EkfacBlock": {"basis.inputs": ("gii",), "basis.outputs": ("goo",), "values": ("goi",)},
    "FullBlock": {"matrix": ("pp",)},
    "LowRankBlock": {"vectors": ("pk",), "values": ("k",)},
    "SubnetworkBlock": {"matrix": ("ss",)},
    "KronBlockPosterior": {
        "basis.inputs": ("gii",),
        "basis.outputs": ("goo",),
        "eigen.table": ("goi",),
        "eigen.outputs": ("go",),
        "eigen.inputs": ("gi",),
        "prior": ("",),
        "scale": ("",),
    },
    "DiagonalBlockPosterior": {"scale": ("",)},
    "FullBlockPosterior": {
        "prior": ("p",),
        "whitener": ("p",),
        "values": ("p",),
        "vectors": ("pp",),
        "ratio": ("",),
        "scale": ("",),
    },
    "LowRankBlockPosterior": {
        "prior": ("p",),
        "basis": ("pr",),
        "values": ("r",),
        "whitener": ("p",),
        "ratio": ("",),
        "scale": ("",),
    },
    "SubnetworkBlockPosterior": {"scale": ("",)},
}


def _refuse(where: str, what: str) -> DataError:
    return DataError(f"{where}: {what}. {ADVICE}")


def check_agreement(
    posterior: GaussianPosterior, factors: Factors, parameters: Mapping[str, Mapping[str, Any]], where: str
) -> None:
    """Refuses parts whose names, shapes or words do not fit together. Values are not looked at, so that they need not be there.

    Args:
        posterior: The posterior that was read.
        factors: The sums over data that were read with it.
        parameters: The shape and the dtype of each parameter.
        where: The file, for messages.

    Raises:
        DataError: Something does not fit; the message says what.
    """
    saved = {n: described(v) for n, v in posterior.mean.items()}
    if saved != parameters or list(saved) != list(parameters):
        wrong = sorted(n for n in {*saved, *parameters} if saved.get(n) != parameters.get(n))
        raise _refuse(where, f"the mean does not fit the list of parameters: {', '.join(wrong[:5]) or 'their order'}")
    if not posterior.mean or not all(v.is_floating_point() for v in posterior.mean.values()):
        raise _refuse(where, "a posterior is over one or more parameters of floating point, and the mean is not")
    blocks: Iterable[tuple[str, Any]] = (("posterior", posterior.blocks), ("factors", factors.blocks))
    for what, listed in blocks:
        for place, block in enumerate(listed):
            _check_block(block, where, f"{what}.blocks.{place}")
        shapes = {n: tuple(s) for b in listed for n, s in b.shapes.items()}
        wrong = sorted(n for n in {*shapes, *posterior.names} if shapes.get(n) != posterior.shapes.get(n))
        if wrong or sum(len(b.shapes) for b in listed) != len(shapes):
            which = ", ".join(wrong[:5]) or "some belong to two"
            raise _refuse(where, f"the blocks of the {what} do not fit the parameters: {which}")
    _check_prior(posterior.prior, posterior.shapes, where)
    layered = [n for names in posterior.layers.values() for n in names]
    for what, names in (
        ("factors.names", factors.names),
        ("factors.treatment", factors.treatment),
        ("posterior.layers", layered),
    ):
        if sorted(names) != sorted(posterior.names):
            raise _refuse(where, f"{what} does not name each parameter once")
    if factors.names != posterior.names:
        raise _refuse(where, "factors.names has the parameters in another order than the mean")
    if posterior.damping not in DAMPINGS:
        raise _refuse(where, f"posterior.damping is {posterior.damping!r}, not one of {', '.join(map(repr, DAMPINGS))}")


def _check_block(block: Any, where: str, path: str) -> None:
    """Compares the tensors of a block, or of a block's posterior, with its layout or its sizes; blocks of your own are left alone."""
    name = type(block).__name__
    if SAVED.get(name) is not type(block):
        return
    source = getattr(block, "source_block", None)
    if source is not None:
        _check_block(source, where, f"{path}.source_block")
    layout = getattr(block, "layout", None)
    if layout is not None and source is not None and getattr(source, "layout", None) != layout:
        raise _refuse(where, f"{path}.layout is not that of its source_block")
    known = {} if layout is None else {"g": layout.groups, "o": layout.out, "i": layout.in_}
    known["p"] = sum(math.prod(s) for s in block.shapes.values())
    if isinstance(block, SubnetworkBlock):
        known["s"] = sum(len(v) if v.dim() == 1 else -1 for v in block.entries.values())
        wrong = [n for n, v in block.entries.items() if n not in block.sizes or v.dim() != 1 or v.dtype != torch.int64]
        if wrong:
            raise _refuse(where, f"{path}.entries are not places in the parameters: {', '.join(wrong[:5])}")
    for entry, forms in _LETTERS.get(name, {}).items():
        value = block
        for part in entry.split("."):
            value = getattr(value, part)
        # Posteriors are computed in float64; but for the basis of Kronecker factors, which is the network's.
        double = source is not None and not entry.startswith("basis.")
        if value is not None and not (_fits(value, forms, known) and (value.dtype == torch.float64 or not double)):
            shapes = " or ".join("[" + ", ".join(f) + "]" for f in forms)
            numbers = ", ".join(f"{k} = {v}" for k, v in known.items() if any(k in f for f in forms))
            raise _refuse(
                where,
                f"{path}.{entry} is {value.dtype} {list(value.shape)}, but should be {'float64' if double else 'floating point'} "
                f"{shapes}{' with ' if numbers else ''}{numbers}",
            )
    _check_rest(block, where, path)


def _fits(value: Tensor, forms: tuple[str, ...], known: dict[str, int]) -> bool:
    for form in forms:
        bound = dict(known)
        if len(form) == value.dim() and all(
            bound.setdefault(c, n) == n for c, n in zip(form, value.shape, strict=True)
        ):
            known.update(bound)
            return value.is_floating_point()
    return False


def _check_rest(block: Any, where: str, path: str) -> None:
    """Checks what letters cannot say."""
    dtype = getattr(block, "dtype", None)
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        raise _refuse(where, f"{path}.dtype is {dtype}, but weights are drawn in floating point")
    damping = getattr(block, "damping", "exact")
    if damping not in DAMPINGS:
        raise _refuse(where, f"{path}.damping is {damping!r}, which is not one of {', '.join(map(repr, DAMPINGS))}")
    if getattr(block, "approach", "expand") not in ("expand", "reduce"):
        raise _refuse(where, f"{path}.approach is {block.approach!r}, which is neither 'expand' nor 'reduce'")
    eigen = getattr(block, "eigen", None)
    if isinstance(eigen, KroneckerEigenvalues):
        pair = (eigen.outputs is None) + (eigen.inputs is None)
        if pair == 1 or (eigen.table is None) != (pair == 0):
            raise _refuse(where, f"{path}.eigen must have either a table, or both of outputs and inputs")
    if isinstance(block, DiagonalBlock) and not all(v.is_floating_point() for v in block.values.values()):
        raise _refuse(where, f"{path}.values must be of floating point")
    if isinstance(block, DiagonalBlockPosterior):
        _check_by_name(block.prior, block.shapes, where, f"{path}.prior")
    if isinstance(block, SubnetworkBlockPosterior):
        _check_block(block.inner, where, f"{path}.inner")
        if sum(math.prod(s) for s in block.inner.shapes.values()) != block.source_block.size:
            raise _refuse(where, f"{path}.inner is not over the {block.source_block.size} numbers of source_block")


def _check_by_name(values: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], where: str, path: str) -> None:
    """Checks that there is one number, or one per entry, for each parameter."""
    for name in {*values, *shapes}:
        value, shape = values.get(name), shapes.get(name)
        if value is None or shape is None:
            raise _refuse(where, f"{path} does not have one entry for each parameter: {name}")
        if tuple(value.shape) not in ((), shape) or not value.is_floating_point():
            raise _refuse(
                where, f"{path}.{name} is {value.dtype} {list(value.shape)}; allowed are [] and {list(shape)}"
            )


def _check_prior(prior: Prior, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    if {n: tuple(s) for n, s in prior.shapes.items()} != dict(shapes):
        raise _refuse(where, "posterior.prior.shapes are not those of the parameters")
    for what, values in (("precision", prior.precision), ("mean", prior.mean)):
        _check_by_name(values, shapes, where, f"posterior.prior.{what}")


def check_values(posterior: GaussianPosterior, factors: Factors, tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuses numbers that no fit gives: any that are not finite, precisions and scales that are not positive.

    Args:
        posterior: The posterior that was read.
        factors: The sums over data that were read with it.
        tensors: All tensors of the two, by their key in the file.
        where: The file, for messages.

    Raises:
        DataError: A number is such a one; the message says which.
    """
    for key, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise _refuse(where, f"the tensor {key} has entries that are not finite")
    _check_positive(posterior, where)
    for source in (*factors.blocks, *(b.source for b in posterior.blocks)):
        if isinstance(source, SubnetworkBlock):
            _check_entries(source, where)
    if not bool(torch.isfinite(posterior.log_det_precision())):
        raise _refuse(where, "the precision of the posterior is not positive definite")
    if not factors.n_data > 0 or factors.n_outputs < 0:
        raise _refuse(where, f"factors.n_data is {factors.n_data!r} and must be positive")


def _check_positive(posterior: GaussianPosterior, where: str) -> None:
    parts: list[tuple[str, Any]] = [("posterior", posterior), ("posterior.prior", posterior.prior)]
    for place, block in enumerate(posterior.blocks):
        parts += [
            (f"posterior.blocks.{place}", block),
            (f"posterior.blocks.{place}.inner", getattr(block, "inner", None)),
        ]
    for path, part in parts:
        for entry in ("precision",) if part is posterior.prior else ("scale", "ratio", "whitener", "prior"):
            positive = getattr(part, entry, None)
            for name, value in positive.items() if isinstance(positive, Mapping) else (("", positive),):
                if isinstance(value, Tensor) and not bool((value > 0).all()):
                    raise _refuse(where, f"{path}.{entry}{'.' if name else ''}{name} must be positive, and is not")


def _check_entries(block: SubnetworkBlock, where: str) -> None:
    for name, places in block.entries.items():
        inside = len(places) == 0 or (int(places[0]) >= 0 and int(places[-1]) < math.prod(block.sizes[name]))
        if not inside or not bool((places.diff() > 0).all()):
            raise _refuse(where, f"the entries of {name} in {block.name} are not ascending places in the parameter")
