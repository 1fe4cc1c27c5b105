"""Dense linear algebra that the rest stands on: sums that keep their digits, safe decompositions, Kronecker products.

Every decomposition is done in float64, whatever the dtype of its input: factors of neural networks are
often close to singular, and their small eigenvalues decide the posterior. For the same reason no sum over data is
carried on in single precision for more than `TERMS_PER_PART` terms: see `RunningSum`.

`GramSum` sums outer products, of which only one triangle is computed and held while data pass by.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from aftermap.errors import NumericalError, NumericalWarning

__all__ = [
    "GRADIENT_ROUNDING",
    "TERMS_PER_PART",
    "DenseWork",
    "GramSum",
    "RunningSum",
    "add_product_",
    "all_finite",
    "counted_decompositions",
    "differing",
    "kron",
    "norms",
    "psd_eigh",
    "safe_cholesky",
    "symmetrise",
    "take_like",
    "take_under",
]

# So many terms are summed in the data's own precision before they go into a total in float64. Some matrix kernels carry the
# running total through the product and add row after row, which loses about √terms · eps/2 of the largest entry: parts of 4,096
# terms lost up to 2e-6 on such a processor, parts of 1,024 lose 4e-7 and cost a fit of LeNet 6 % of its time.
TERMS_PER_PART = 1024
# The rows of a sum in float64 that rounding is allowed for: 2e-12 of the trace at most, far below what a matrix that is wrong would show.
_LONGEST_SUM = 2**20
# Two computations of the gradients of a network that works in this dtype may differ by so much of their size.
GRADIENT_ROUNDING = {torch.float64: 1e-7, torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
# Eigenvalues this many times further below zero than rounding alone would put them mean that a matrix is not p.s.d.
_ROUNDING_MARGIN = 16.0
# Rows of a strip: narrower ones save more of the lower triangle, but make thinner products. Strips start, and their rows lie, at
# multiples of so many numbers: products into other places are slower. `python -m benchmarks.gram` measures both.
_STRIP = 128
_ALIGNED = 16
_QUICK = 128  # matrices of this width are decomposed in about a millisecond, so that they need no counting


@dataclass(frozen=True)
class DenseWork:
    """The dense work of a fit or of a tuning that grows faster than the data.

    Attributes:
        products: The number of multiplications in products of matrices.
        decompositions: The widths of the matrices whose eigenvectors are found.
    """

    products: float = 0.0
    decompositions: tuple[int, ...] = ()


_counted: ContextVar[list[int] | None] = ContextVar("counted", default=None)


@contextmanager
def counted_decompositions() -> Iterator[list[int]]:
    """Inside, `psd_eigh` counts wide matrices instead of decomposing them, for a rehearsal of work whose time is to be estimated.

    What it returns for them is the decomposition of their diagonal. The yielded list holds the width of each.

    >>> with counted_decompositions() as widths:
    ...     values, vectors = psd_eigh(torch.eye(300))
    >>> widths
    [300]
    """
    widths: list[int] = []
    token = _counted.set(widths)
    try:
        yield widths
    finally:
        _counted.reset(token)


def add_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds leftᵀ right to ``out``, without a temporary where the dtypes allow it.

    The kernel may carry ``out`` through the product row by row: over many rows, add into a part of a `RunningSum`.
    """
    left = left.transpose(-1, -2)
    if out.dtype != left.dtype:
        if left.element_size() < 4:  # a product rounded to half precision would not be positive semi-definite
            left, right = left.to(out.dtype), right.to(out.dtype)
        out += left @ right
    elif out.dim() == 2:
        out.addmm_(left, right)
    else:
        out.baddbmm_(left, right)


class RunningSum:
    """A sum over data, of any number of terms, that keeps the digits of single precision.

    Terms are added to ``parts`` in the data's own precision. After `TERMS_PER_PART` of them the parts go into totals in
    float64 and start again from zero, so that the rounding error does not grow with the number of data, whatever the
    order in which a matrix kernel adds. Sums in float64 are their own totals.

    Args:
        parts: Tensors of zeros, one for each sum, which are taken over.

    >>> sums = RunningSum([torch.zeros(2)])
    >>> for _ in range(3):
    ...     sums.room_for(500)[0].add_(1.0)
    tensor([1., 1.])
    tensor([2., 2.])
    tensor([1., 1.])
    >>> sums.take()
    tensor([3., 3.])
    """

    def __init__(self, parts: Sequence[Tensor]):
        self.parts = list(parts)
        self._totals: list[Tensor] = []
        self._terms = 0

    def room_for(self, terms: int) -> list[Tensor]:
        """Returns the parts, ready to take so many more terms (at most `TERMS_PER_PART` keep the digits)."""
        if self._terms and self._terms + terms > TERMS_PER_PART:
            self._start_new_parts()
        self._terms += terms
        return self.parts

    def _start_new_parts(self) -> None:
        if not self.parts or self.parts[0].dtype == torch.float64:
            return
        if not self._totals:
            self._totals = [torch.zeros(p.shape, dtype=torch.float64, device=p.device) for p in self.parts]
        for total, part in zip(self._totals, self.parts, strict=True):
            total += part
            part.zero_()
        self._terms = 0

    def state(self) -> dict[str, Tensor]:
        """Returns the sums as they are, by name, for a file."""
        parts = {f"part.{k}": part for k, part in enumerate(self.parts)}
        totals = {f"total.{k}": total for k, total in enumerate(self._totals)}
        return {**parts, **totals, "terms": torch.tensor(self._terms)}

    def add_state(self, state: dict[str, Tensor]) -> None:
        """Adds sums that `state` gave, and takes them out of it; an empty sum takes them over bit by bit."""
        parts = [take_like(state, f"part.{k}", part) for k, part in enumerate(self.parts)]
        totals = [
            take_like(state, f"total.{k}", part, torch.float64) for k, part in enumerate(parts) if "total.0" in state
        ]
        terms = int(state.pop("terms"))
        if not self._terms and not self._totals:
            for part, saved in zip(self.parts, parts, strict=True):
                part.copy_(saved)
            self._totals, self._terms = totals, terms
            return
        self._start_new_parts()
        for saved_sums in (parts, totals):
            for total, saved in zip(self._totals or self.parts, saved_sums, strict=False):
                total += saved

    def take(self, place: int = -1) -> Tensor:
        """Returns one of the sums, in the dtype of its parts; it is given up, so that its memory can go."""
        part = self.parts.pop(place)
        return self._totals.pop(place).add_(part).to(part.dtype) if self._totals else part


def take_like(state: dict[str, Tensor], name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Takes a tensor out of a state; it must have the shape of another one, and its dtype if none is given.

    Raises:
        ValueError: It is missing, or another one.
    """
    if name not in state:
        raise ValueError(f"{name} is missing")
    value, dtype = state.pop(name), dtype or like.dtype
    if value.shape != like.shape or value.dtype != dtype:
        raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)} instead of {dtype} {tuple(like.shape)}")
    return value.to(like.device)


def take_under(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Takes all tensors out of a state whose names begin in one way, under the rest of their names."""
    return {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}


def all_finite(values: Tensor) -> bool:
    """Tells whether every number is finite; a sum tells it in one pass, unless it overflows.

    >>> all_finite(torch.tensor([1e38, 3e38])), all_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    return math.isfinite(float(values.detach().sum())) or bool(torch.isfinite(values).all())


def norms(values: Sequence[Tensor]) -> list[float]:
    """Returns the Euclidean norms of all tensors, with one look at the device."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for number, value in enumerate(values):
        by_dtype.setdefault(value.dtype, []).append(number)
    lengths = [0.0] * len(values)
    for dtype, numbers in by_dtype.items():
        wide = torch.promote_types(dtype, torch.float32)
        lengths_of = torch._foreach_norm([values[n] for n in numbers], 2, dtype=wide)
        for number, length in zip(numbers, torch.stack(lengths_of).tolist(), strict=True):
            lengths[number] = length
    return lengths


def differing(gradients: Mapping[str, Tensor], truth: Mapping[str, Tensor | None], dtype: torch.dtype) -> set[str]:
    """Returns the names of gradients that differ from the true ones by more than rounding, or in shape.

    Args:
        gradients: The gradients to be checked, which are overwritten. One that is missing is zero.
        truth: The gradients of plain autograd, by name; None is zero.
        dtype: The dtype in which the network works.

    >>> one = torch.ones(2)
    >>> differing(
    ...     {"a": one.clone(), "b": 2 * one, "c": one[:1]}, {"a": one, "b": one, "c": one, "d": None}, torch.float32
    ... ) == {"b", "c"}
    True
    """
    dense = {n: t.to_dense() if t.is_sparse else t for n, t in truth.items() if t is not None}
    wrong = {n for n, g in gradients.items() if n in dense and g.shape != dense[n].shape}
    sizes = dict(zip(dense, norms(list(dense.values())), strict=True))
    # A gradient that cancels (a bias before a normalisation) is rounding noise on both sides.
    noise = 32 * torch.finfo(dtype).eps * max(sizes.values(), default=0.0)
    differences = {n: gradients[n].sub_(t) if n in gradients else t for n, t in dense.items() if n not in wrong}
    differences.update({n: g for n, g in gradients.items() if n not in dense})
    for name, error in zip(differences, norms(list(differences.values())), strict=True):
        # This is not "error > ...", since a NaN is wrong, too.
        if not error <= GRADIENT_ROUNDING[dtype] * sizes.get(name, 0.0) + noise:
            wrong.add(name)
    return wrong


def symmetrise(matrix: Tensor) -> Tensor:
    """Returns (M + Mᵀ)/2 over the last two dimensions, without what rounding made unsymmetric."""
    return (matrix + matrix.transpose(-1, -2)) / 2


def psd_eigh(
    matrix: Tensor, *, what: str = "matrix", precision: torch.dtype | None = None, whole: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the eigenvalues (clamped at 0) and eigenvectors of a p.s.d. matrix, in float64.

    A sum of outer products over many rows is p.s.d. up to rounding: random errors of √rows · eps/2 in each entry, relative to
    the diagonal, move eigenvalues by about √rows · eps/2 · trace/√D. What lies further below zero is no rounding.

    Args:
        matrix: [..., D, D], symmetric and p.s.d. up to rounding.
        what: A name for messages.
        precision: The dtype in which the matrix was summed; None means its own. Sums in float64 are their own totals, so that their
            error grows with the number of rows, of which a million are allowed for; others are sums of parts (`RunningSum`).
        whole: The traces [...] of matrices of which these are parts where others cancelled: they carry the rounding of the whole. None
            means that nothing cancelled.

    Returns:
        Eigenvalues [..., D] in ascending order, none negative, and eigenvectors [..., D, D] in columns.

    Raises:
        NumericalError: An entry is not finite, or an eigenvalue is further below zero than rounding explains.

    >>> values, vectors = psd_eigh(torch.diag(torch.tensor([4.0, 1.0])))
    >>> values
    tensor([1., 4.], dtype=torch.float64)
    """
    # Below its dtype's smallest normal number a matrix holds no digits, only rounding.
    floor = max(1e-300, torch.finfo(matrix.dtype).tiny)
    matrix = matrix.detach()
    work = _symmetric_columns(matrix)
    if work.numel() and not all(math.isfinite(v) for v in work.mT.aminmax()):
        raise NumericalError(f"{what} has entries that are not finite; check the data and the model's outputs")
    counted = _counted.get()
    if counted is not None and work.shape[-1] > _QUICK:
        counted += [work.shape[-1]] * math.prod(work.shape[:-2])
        # Those of the diagonal, which belong together: what is iterated with them ends.
        values, order = work.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sort(-1)
        return values, torch.eye(work.shape[-1], dtype=work.dtype, device=work.device)[order].mT.contiguous()
    values = work.new_empty(matrix.shape[:-1])
    # Eigenvectors take the place of the matrix: the decomposition itself needs room for two more.
    try:
        torch.linalg.eigh(work, out=(values, work))
    except RuntimeError:
        work = _symmetric_columns(matrix)
        jitter = 1e-12 * work.diagonal(dim1=-2, dim2=-1).mean()
        warnings.warn(
            f"eigendecomposition of {what} did not converge; {float(jitter):.1e} was added to its diagonal, and smaller eigenvalues have no "
            "digit left. A larger prior precision makes them matter less",
            NumericalWarning,
            stacklevel=2,
        )
        work.diagonal(dim1=-2, dim2=-1).add_(jitter)
        torch.linalg.eigh(work, out=(values, work))
    if values.numel():
        summed = matrix.dtype if precision is None else precision
        terms = _LONGEST_SUM if summed == torch.float64 else TERMS_PER_PART
        rounding = torch.finfo(summed).eps / 2 * math.sqrt(terms / matrix.shape[-1])
        trace = values.clamp_min(0.0).sum(-1)
        allowed = _ROUNDING_MARGIN * rounding * (trace if whole is None else torch.maximum(trace, whole)) + floor
        if bool((values.amin(-1) < -allowed).any()):
            raise NumericalError(
                f"{what} is not positive semi-definite: smallest eigenvalue {float(values.min()):.3e}, "
                f"largest {float(values.max()):.3e}. A Gauss-Newton or Fisher curvature always is; an exact Hessian need not be"
            )
    return values.clamp_min_(0.0), work


def _symmetric_columns(matrix: Tensor) -> Tensor:
    """Returns (M + Mᵀ)/2 in float64, stored column by column as LAPACK wants it; made in strips, so that no second copy exists."""
    lines = torch.empty(matrix.shape, dtype=torch.float64, device=matrix.device)
    size, step = matrix.shape[-1], 256
    for start in range(0, size, step):
        strip = slice(start, min(start + step, size))
        out = lines[..., strip, :]
        torch.add(matrix[..., strip, :].to(torch.float64), matrix[..., strip].mT.to(torch.float64), out=out).div_(2)
    return lines.mT


def safe_cholesky(matrix: Tensor, *, what: str = "matrix") -> Tensor:
    """Returns the lower Cholesky factor in float64; a ladder of jitters on failure, each one reported.

    Args:
        matrix: [D, D], symmetric positive definite up to rounding.
        what: The name of the matrix for messages.

    Returns:
        L [D, D] with L Lᵀ = matrix (+ jitter).

    Raises:
        NumericalError: The matrix is not positive definite even with a jitter of 1e-6 times the mean diagonal.

    >>> safe_cholesky(torch.tensor([[4.0]]))
    tensor([[2.]], dtype=torch.float64)
    """
    matrix = symmetrise(matrix.to(torch.float64))
    if not bool(torch.isfinite(matrix).all()):
        raise NumericalError(f"{what} has entries that are not finite; check the data and the model's outputs")
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info.max()) == 0:
        return factor
    scale = float(matrix.diagonal(dim1=-2, dim2=-1).abs().mean())
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for relative in (1e-14, 1e-12, 1e-10, 1e-8, 1e-6):
        factor, info = torch.linalg.cholesky_ex(matrix + relative * scale * eye)
        if int(info.max()) == 0:
            warnings.warn(
                f"Cholesky of {what} needed {relative * scale:.1e} on its diagonal (relative {relative:.0e}); smaller eigenvalues have no digit "
                "left. A larger prior precision, or a network and data in float64, keeps them",
                NumericalWarning,
                stacklevel=2,
            )
            return factor
    raise NumericalError(
        f"{what} is not positive definite, even with 1e-6 of its mean diagonal added. "
        "A larger prior precision makes a posterior precision positive definite"
    )


def kron(left: Tensor, right: Tensor) -> Tensor:
    """Returns the Kronecker product of two matrices (or batches of them): [..., M, N] ⊗ [..., P, Q] -> [..., MP, NQ].

    >>> kron(torch.eye(2), torch.ones(1, 2)).shape
    torch.Size([2, 4])
    """
    shape = (*left.shape[:-2], left.shape[-2] * right.shape[-2], left.shape[-1] * right.shape[-1])
    return torch.einsum("...mn,...pq->...mpnq", left, right).reshape(shape)


class GramSum:
    """Σ x xᵀ [g, D, D] as strips: rows s..e of the matrix with the columns s..D, so little more than half of it.

    Args:
        groups: The number g of groups.
        width: The width D of the rows.
        dtype: The dtype of the sums; see `RunningSum` for how they keep their digits.
        device: The device of the sums.
        diagonal: Whether only the diagonal [g, D] is wanted (one-hot rows).

    >>> x = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    >>> sums = GramSum(1, 2, torch.float32, torch.device("cpu"))
    >>> sums.add(x[None])
    >>> sums.full()
    tensor([[[1., 2.],
             [2., 5.]]])
    """

    def __init__(self, groups: int, width: int, dtype: torch.dtype, device: torch.device, *, diagonal: bool = False):
        self.groups, self.width, self.dtype, self.device = groups, width, dtype, device
        self.diagonal = torch.zeros(groups, width, dtype=torch.float64, device=device) if diagonal else None
        # Strips of even size: a narrow last one would be a thin product.
        count = max(1, round(width / _STRIP))
        ends = [round(width * k / count / _ALIGNED) * _ALIGNED for k in range(count)]
        self.bounds = [] if diagonal else list(pairwise([*ends, width]))
        self.strips = RunningSum([_strip(groups, e - s, width - s, dtype, device) for s, e in self.bounds])
        self._views: dict[tuple[int, int | None], list[tuple[int, int, Tensor]]] = {}
        self._ones: Tensor | None = None  # [g, D − 1] in float64: what a last feature that is always 1 adds, with ...
        self._count = 0.0  # ... so many rows

    def add(self, rows: Tensor, group: int | None = None) -> None:
        """Adds the outer products of rows [g, R, w], or [R, w] of one group; w ≤ D features, the first ones."""
        if group is None and self.groups == 1:
            rows, group = rows[0], 0
        for some in (rows,) if rows.shape[-2] <= TERMS_PER_PART else rows.split(TERMS_PER_PART, -2):
            self.strips.room_for(some.shape[-2])
            for start, end, block in self._blocks(rows.shape[-1], group):
                add_product_(block, some[..., start:end], some[..., start:])

    def _blocks(self, width: int, group: int | None) -> list[tuple[int, int, Tensor]]:
        """Returns (first row, row behind the last, view) of every strip for so many features; made once, as data come in many parts."""
        key = (width, group)
        if key not in self._views:
            self._views[key] = [
                (
                    start,
                    min(end, width),
                    (strip if group is None else strip[group])[..., : width - start, : width - start],
                )
                for (start, end), strip in zip(self.bounds, self.strips.parts, strict=True)
                if start < width
            ]
        return self._views[key]

    def add_products(self, products: Tensor) -> None:
        """Adds whole matrices [g, D, D]."""
        for (start, end), strip in zip(self.bounds, self.strips.room_for(1), strict=True):
            strip += products[:, start:end, start:]

    def add_ones(self, sums: Tensor, count: float) -> None:
        """Adds what a last feature that is always 1 makes of ``count`` rows whose other features sum to [g, D − 1]."""
        self._ones = sums.to(torch.float64, copy=True) if self._ones is None else self._ones.add_(sums)
        self._count += count

    def add_diagonal(self, values: Tensor) -> None:
        """Adds to the diagonal [g, D], where nothing else is held."""
        assert self.diagonal is not None
        self.diagonal += values

    def state(self) -> dict[str, Tensor]:
        """Returns the sums as they are, by name, for a file."""
        state = {f"strips.{name}": value for name, value in self.strips.state().items()}
        if self.diagonal is not None:
            state["diagonal"] = self.diagonal
        if self._ones is not None:
            state["ones"] = self._ones
        return {**state, "count": torch.tensor(self._count, dtype=torch.float64)}

    def add_state(self, state: dict[str, Tensor]) -> None:
        """Adds sums that `state` gave, and takes them out of it."""
        self.strips.add_state(take_under(state, "strips."))
        if self.diagonal is not None:
            self.diagonal += take_like(state, "diagonal", self.diagonal)
        ones = torch.empty(self.groups, self.width - 1, dtype=torch.float64, device=self.device)
        count = float(state.pop("count"))
        if "ones" in state:
            self.add_ones(take_like(state, "ones", ones), count)

    def full(self) -> Tensor:
        """Returns the symmetric matrices [g, D, D], or their diagonal [g, D]. Once: the strips are given up on the way."""
        if self.diagonal is not None:
            return self.diagonal.to(self.dtype)
        self._views.clear()
        gram = torch.empty(self.groups, self.width, self.width, dtype=self.dtype, device=self.device)
        for start, end in reversed(self.bounds):
            strip = self.strips.take()
            if self._ones is not None:
                part = self._ones[:, start:end]
                strip[:, : part.shape[1], -1].add_(part)
                strip[:, part.shape[1] :, -1].add_(self._count)  # the last row of the last strip
            gram[:, start:end, end:] = strip[:, :, end - start :]
            gram[:, end:, start:end] = strip[:, :, end - start :].transpose(-1, -2)
            corner = strip[:, :, : end - start]
            # The products of a square block may differ in their last digit across the diagonal.
            gram[:, start:end, start:end] = corner.triu() + corner.triu(1).transpose(-1, -2)
        return gram


def _strip(groups: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros [g, rows, columns] whose rows are a multiple of ``_ALIGNED`` numbers apart."""
    apart = -(-columns // _ALIGNED) * _ALIGNED
    return torch.zeros(groups, rows, apart, dtype=dtype, device=device)[..., :columns]
