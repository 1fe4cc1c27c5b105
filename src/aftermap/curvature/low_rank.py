"""The leading eigenpairs of the generalised Gauss-Newton matrix, from products with it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aftermap.curvature.factors import Block
from aftermap.curvature.ggn_operator import GGNOperator
from aftermap.errors import InputError, NumericalWarning
from aftermap.krylov import Eigenpairs, lanczos_eigh, randomised_eigh

__all__ = ["METHODS", "LowRankBlock", "low_rank_ggn"]

METHODS = ("lanczos", "randomised")


def low_rank_ggn(
    operator: GGNOperator,
    rank: int,
    method: str = "lanczos",
    *,
    tolerance: float | None = None,
    max_matvecs: int | None = None,
    oversampling: int = 10,
    power_iterations: int = 3,
    dtype: torch.dtype = torch.float64,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """U diag(l) U^T, the best approximation of G of the given rank.

    Lanczos reaches an eigenpair to a residual; the randomised method does a fixed number of products, many
    columns at a time. Eigenvalues that are zero up to rounding are dropped, so k can be smaller than `rank`;
    none is negative. A truncated posterior precision is too small, hence its variance is never below that of
    the full matrix.

    Args:
        operator: products with G.
        rank: the most eigenpairs wanted, at most P.
        method: "lanczos" or "randomised".
        tolerance: Lanczos: residual relative to the largest eigenvalue; None means 1e-8, or what a float32
            network allows.
        max_matvecs: Lanczos: a budget of products.
        oversampling: randomised: further columns.
        power_iterations: randomised: each one sharpens the separation of the spectrum.
        dtype: of vectors and orthogonalisation; the network keeps its own.
        generator: for the random start.

    Returns:
        U [P, k] with orthonormal columns and l [k], descending and positive; k = 0 when G is zero.

    Raises:
        InputError: an unknown method or a rank that does not fit.

    Warns:
        NumericalWarning: Lanczos used up its budget before the residuals were small.

    References:
        Golub and Van Loan, Matrix Computations, chapter 10; Halko, Martinsson and Tropp 2011.

    >>> from aftermap.likelihoods import Gaussian
    >>> net = torch.nn.Linear(2, 1, bias=False)
    >>> G = GGNOperator(net, [(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1))], Gaussian(1.0))
    >>> low_rank_ggn(G, 2)[1]
    tensor([25.], dtype=torch.float64)
    """
    if method not in METHODS:
        raise InputError(f"got method {method!r}; allowed: {', '.join(METHODS)}")
    rounding = 100 * max(torch.finfo(operator.dtype).eps, torch.finfo(dtype).eps)
    pairs: Eigenpairs
    if method == "lanczos":
        goal = max(1e-8, 10 * rounding) if tolerance is None else tolerance
        pairs = lanczos_eigh(
            operator.mv,
            operator.size,
            rank,
            tolerance=goal,
            max_matvecs=max_matvecs,
            noise=rounding,
            generator=generator,
            dtype=dtype,
            device=operator.device,
        )
        if not pairs.converged:
            warnings.warn(
                f"Lanczos stopped after {pairs.matvecs} products with residuals up to "
                f"{float(pairs.residuals.max()):.3g} (wanted {goal:.3g} of {float(pairs.values[0]):.3g}); "
                "raise max_matvecs, lower the rank, or use method='randomised'",
                NumericalWarning,
                stacklevel=2,
            )
    else:
        pairs = randomised_eigh(
            operator.mv,
            operator.size,
            rank,
            oversampling=oversampling,
            power_iterations=power_iterations,
            generator=generator,
            dtype=dtype,
            device=operator.device,
        )
    largest = float(pairs.values.max()) if pairs.values.numel() else 0.0
    keep = pairs.values > max(rounding * largest, 0.0)
    return pairs.vectors[:, keep], pairs.values[keep]


@dataclass(frozen=True)
class LowRankBlock(Block):
    """U diag(l) Uᵀ.

    Attributes:
        label: a name for tables.
        sizes: parameters and shapes, in the order of the rows of U.
        vectors: U [P, k], orthonormal columns.
        values: l [k].
    """

    label: str
    sizes: Mapping[str, tuple[int, ...]]
    vectors: Tensor
    values: Tensor
    kind: str = "low_rank"

    @property
    def name(self) -> str:
        return self.label

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self.sizes)

    def tensors(self) -> dict[str, Tensor]:
        return {"vectors": self.vectors, "values": self.values}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> LowRankBlock:
        return replace(self, vectors=tensors["vectors"], values=tensors["values"])

    def scaled(self, factor: float) -> LowRankBlock:
        return replace(self, values=self.values * factor)

    def __add__(self, other: Block) -> Block:
        """The sum of two low-rank matrices, exactly: its rank is at most the sum of the ranks."""
        if not isinstance(other, LowRankBlock) or self.shapes != other.shapes:
            return super().__add__(other)
        roots = torch.cat([self.vectors * self.values.sqrt(), other.vectors * other.values.sqrt()], dim=1)
        vectors, singular, _ = torch.linalg.svd(roots, full_matrices=False)
        return replace(self, vectors=vectors, values=singular.square())

    def to_dense(self) -> Tensor:
        vectors = self.vectors.to(torch.float64)
        return (vectors * self.values.to(torch.float64)) @ vectors.T

    def diagonal(self) -> dict[str, Tensor]:
        entries = self.vectors.to(torch.float64).square() @ self.values.to(torch.float64)
        parts = entries.split([math.prod(s) for s in self.sizes.values()])
        return {n: p.reshape(s) for (n, s), p in zip(self.sizes.items(), parts, strict=True)}
