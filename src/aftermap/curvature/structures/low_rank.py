"""The leading eigenpairs of the generalised Gauss-Newton matrix, from products with it.

Low-rank posteriors: precision s·U diag(l) Uᵀ + D over all parameters, cross-layer terms included.

With W = D^{-½} U √(s·l) = Q diag(σ) Rᵀ the precision is D^{½}(I + Q σ² Qᵀ)D^{½}. Directions outside U keep the prior, so the
variance is never below that of the full matrix.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aftermap.curvature.passes.backward import LayerGradients
from aftermap.curvature.passes.products import GGNOperator
from aftermap.curvature.passes.stream import CurvatureProblem, DataCounts
from aftermap.curvature.rules.base import budget
from aftermap.curvature.structures.base import (
    Block,
    BlockPosterior,
    Structure,
    flatten_batch,
    join_flat,
    register_structure,
    split_flat,
)
from aftermap.distributed import is_distributed, same_everywhere
from aftermap.draws import normal_like
from aftermap.errors import InputError, NumericalWarning
from aftermap.krylov import Eigenpairs, lanczos_eigh, randomised_eigh
from aftermap.params import Params
from aftermap.prior import Prior

__all__ = ["METHODS", "LowRankBlock", "LowRankBlockPosterior", "low_rank_block_posterior", "low_rank_ggn"]

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


@dataclass(frozen=True)
class LowRankBlockPosterior(BlockPosterior):
    """A low-rank block under a prior.

    Attributes:
        source_block: U and l.
        prior: D as a vector [p].
        basis: Q [p, k], float64, orthonormal.
        values: σ² for s = 1 and the decomposition's prior [k].
        whitener: √D of the decomposition [p].
        ratio: present prior over the decomposition's, 0-d.
        scale: s, 0-d.
        dtype: of samples.
    """

    source_block: LowRankBlock
    prior: Tensor
    basis: Tensor
    values: Tensor
    whitener: Tensor
    ratio: Tensor
    scale: Tensor
    dtype: torch.dtype

    @property
    def source(self) -> Block:
        return self.source_block

    def with_prior(self, prior: Prior, scale: Tensor) -> LowRankBlockPosterior:
        device = self.basis.device
        vector, scale = prior.vector(self.names, device), scale.to(device)
        ratio = vector / self.whitener.square()
        if float((ratio.detach() / ratio.detach()[0] - 1).abs().max()) < 1e-12:
            # A gradient may go through the ratio only if the prior is one number: else every entry has its own.
            common = ratio[0] if prior.is_shared(self.names) else ratio[0].detach()
            return replace(self, prior=vector, ratio=common, scale=scale)
        return low_rank_block_posterior(self.source_block, prior, scale, self.dtype)

    @property
    def _gain(self) -> Tensor:
        """1 + σ²."""
        return 1 + self.scale * self.values / self.ratio

    def log_det_ratio(self) -> Tensor:
        if self.prior.requires_grad and not self.ratio.requires_grad:
            # |I + s √l Uᵀ D⁻¹ U √l|, differentiable in every entry of D.
            half = self.source_block.vectors * self.source_block.values.sqrt()
            inner = half.T @ (half / self.prior[:, None]) * self.scale
            eye = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
            return 2 * torch.linalg.cholesky(inner + eye).diagonal().log().sum()
        return torch.log1p(self.scale * self.values / self.ratio).sum()

    def log_det_prior(self) -> Tensor:
        return self.prior.log().sum()

    def effective_parameters(self) -> Tensor:
        return (1 - 1 / self._gain).sum()

    @property
    def _root(self) -> Tensor:
        """√D [p]."""
        return self.whitener * self.ratio.sqrt()

    def sample(self, count: int, generator: torch.Generator | None) -> Params:
        like = torch.empty(count, self.size, dtype=torch.float64, device=self.basis.device)
        noise = normal_like(like, generator)
        shrunk = (noise @ self.basis) * (1 - self._gain.detach().rsqrt())
        return split_flat(((noise - shrunk @ self.basis.T) / self._root.detach()).to(self.dtype), self.shapes)

    def precision_mv(self, values: Params) -> Params:
        vector = self._joined(values) * self._root
        product = vector + (vector @ self.basis) * (self._gain - 1) @ self.basis.T
        return split_flat((product * self._root).to(next(iter(values.values())).dtype), self.shapes)

    def covariance_mv(self, values: Params) -> Params:
        vector = self._joined(values) / self._root
        product = vector - (vector @ self.basis) * (1 - 1 / self._gain) @ self.basis.T
        return split_flat((product / self._root).to(next(iter(values.values())).dtype), self.shapes)

    def _joined(self, values: Params) -> Tensor:
        name = self.names[0]
        return join_flat(values, self.names, values[name].dim() - len(self.shapes[name])).to(torch.float64)

    def marginal_variance(self) -> Params:
        shrink = self.basis.square() @ (1 - 1 / self._gain.detach())
        return split_flat((1 - shrink) / self._root.detach().square(), self.shapes)

    def functional_covariance(
        self, gradients: LayerGradients, variants: Sequence[BlockPosterior], diagonal: bool
    ) -> list[Tensor]:
        """J D⁻¹ Jᵀ minus what the data took away: k numbers per output, no covariance of parameters."""
        found: list[list[Tensor]] = [[] for _ in variants]
        stride = budget(2 * gradients.n_vectors * self.size)
        for start in range(0, gradients.record.size, stride):
            length = min(stride, gradients.record.size - start)
            lines = flatten_batch(gradients.per_example(self.names, start, length), self.names)  # [v, b, p]
            for place, variant in enumerate(variants):
                assert isinstance(variant, LowRankBlockPosterior)
                white = (lines / variant._root.to(lines.dtype)).transpose(0, 1)  # [b, v, p]
                inside = white @ variant.basis.to(lines.dtype)
                taken = inside * (1 - 1 / variant._gain).to(lines.dtype)
                if diagonal:
                    found[place].append(white.square().sum(-1) - (taken * inside).sum(-1))
                else:
                    found[place].append(white @ white.transpose(1, 2) - taken @ inside.transpose(1, 2))
        return [torch.cat(parts) for parts in found]


def low_rank_block_posterior(
    block: LowRankBlock, prior: Prior, scale: Tensor, dtype: torch.dtype
) -> LowRankBlockPosterior:
    """Whitens U; for one prior precision it stays as it is."""
    vectors, values = block.vectors.to(torch.float64), block.values.to(torch.float64)
    vector = prior.vector(tuple(block.shapes), vectors.device)
    whitener = vector.detach().sqrt()
    one = torch.ones((), dtype=torch.float64, device=vectors.device)
    if vector.requires_grad and prior.is_shared(tuple(block.shapes)):
        one = vector[0] / vector[0].detach()  # 1, with the gradient of the prior's one number
    if prior.is_scalar(tuple(block.shapes)):
        basis, squares = vectors, values / whitener[0].square()
    else:
        basis, singular, _ = torch.linalg.svd(vectors * values.sqrt() / whitener[:, None], full_matrices=False)
        squares = singular.square()
    return LowRankBlockPosterior(block, vector, basis, squares, whitener, one, scale.to(vectors.device), dtype)


def fit_low_rank(problem: CurvatureProblem) -> tuple[tuple[Block, ...], DataCounts]:
    """The leading eigenpairs of the Gauss-Newton matrix of the data of all processes."""
    counts = problem.sum_loss()
    operator = GGNOperator(problem.model, problem.data, problem.likelihood, list(problem.names), problem.unpack)
    generator = problem.generator
    if is_distributed():  # every process must walk through the same vectors
        seed = same_everywhere(int(torch.randint(2**62, (), generator=generator)))
        generator = torch.Generator().manual_seed(seed)
    vectors, values = low_rank_ggn(operator, min(problem.rank, operator.size), generator=generator)
    return (LowRankBlock("all", problem.shapes, vectors, values),), counts


register_structure(
    Structure(
        "low_rank",
        "The leading eigenvectors of the whole matrix; all other directions keep the prior.",
        fit_low_rank,
        (LowRankBlock,),
        passes=2,
        curvatures=("exact",),
        updatable=False,
        blocks_are_global=True,
    )
)
