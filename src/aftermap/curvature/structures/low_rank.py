"""The leading eigenpairs of the generalised Gauss-Newton matrix, from products with it.

The low-rank posteriors have the precision s·U diag(l) Uᵀ + D over all parameters, cross-layer terms included.

With W = D^{-½} U √(s·l) = Q diag(σ) Rᵀ the precision is D^{½}(I + Q σ² Qᵀ)D^{½}. Directions outside U keep the prior, so the
variance is never below that of the full matrix.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from aftermap.curvature.passes.backward import LayerGradients
from aftermap.curvature.passes.products import GGNOperator
from aftermap.curvature.passes.stream import CurvatureProblem, DataCounts
from aftermap.curvature.rules.base import examples_per_chunk
from aftermap.curvature.structures.base import (
    Block,
    BlockPosterior,
    Structure,
    flatten_batch,
    join_flat,
    register_structure,
    split_flat,
)
from aftermap.curvature.structures.eigenbasis import Eigen
from aftermap.curvature.structures.full import PriorRatio
from aftermap.curvature.structures.layer_parts import CovarianceCollector, LayerCovariances, LayerParts, rows_of
from aftermap.curvature.structures.rounding import CurvatureSize, VarianceErrors, digits_tolerance
from aftermap.distributed import broadcast_number, is_distributed
from aftermap.draws import normal_like
from aftermap.errors import NumericalWarning
from aftermap.krylov import lanczos_eigh
from aftermap.params import Params
from aftermap.prior import Prior

# Gradients of some examples in one parameter that a covariance is made from at once (16 MB in float64).
_COVARIANCE_NUMBERS = 1 << 21
# The share of the prior's variance that a difference in float64 must leave: ten digits of it are right then.
_LEAST_SHARE = 1e-6

__all__ = ["LowRankBlock", "LowRankBlockPosterior", "low_rank_ggn"]


def low_rank_ggn(
    operator: GGNOperator,
    rank: int,
    *,
    tolerance: float | None = None,
    max_matvecs: int | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns U and l of U diag(l) U^T, the best approximation of G of the given rank, by Lanczos in float64.

    Products are made in the network's precision. A product J^T (Lambda (J v)) in float32 is known to 1e-7 of the largest
    eigenvalue only, but its error lies where J maps it: in the complement of the leading eigenvectors eigenvalues down to
    1e-13 of the largest are found (`aftermap.krylov.Rounding`). The rounding of products is measured. Eigenvalues that
    cannot be told from it are dropped, so k can be smaller than `rank`; none is negative. A truncated posterior precision
    is too small, hence its variance is never below that of the full matrix.

    Args:
        operator: Products with G.
        rank: The most eigenpairs wanted, at most P.
        tolerance: The residual of an eigenpair, relative to the geometric mean of its and the largest eigenvalue; None
            means 1e-8, or what products in float32 allow.
        max_matvecs: The most products with G; None means 20 * rank + 200.
        generator: The source of the random starts.

    Returns:
        The vectors U [P, k] with orthonormal columns and the values l [k], descending and positive, in float64; k = 0
        when G is zero.

    Raises:
        InputError: The rank does not fit.

    Warns:
        NumericalWarning: Lanczos used up its budget before the residuals were small.

    References:
        Golub and Van Loan, Matrix Computations, chapter 10.

    >>> from aftermap.likelihoods import Gaussian
    >>> net = torch.nn.Linear(2, 1, bias=False)
    >>> G = GGNOperator(net, [(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1))], Gaussian(1.0))
    >>> low_rank_ggn(G, 2)[1]
    tensor([25.], dtype=torch.float64)
    """
    noise = _product_noise(operator)
    goal = max(1e-8, noise) if tolerance is None else tolerance
    pairs = lanczos_eigh(
        operator.mv,
        operator.size,
        rank,
        tolerance=goal,
        max_matvecs=max_matvecs,
        noise=noise,
        factored=True,
        generator=generator,
        device=operator.device,
    )
    if not pairs.converged:
        warnings.warn(
            f"Lanczos stopped after {pairs.matvecs} products: of the {rank} eigenpairs of the curvature that were wanted, some "
            "may be missing or not exact, and the variance is too large there. Lower the rank, or use structure='kron' "
            "or 'full'",
            NumericalWarning,
            stacklevel=2,
        )
    return pairs.vectors, pairs.values


# Rounding of products differs from vector to vector; it may be this much larger than measured once.
_NOISE_MARGIN = 10.0


def _product_noise(operator: GGNOperator) -> float:
    """Returns the rounding of products relative to the largest eigenvalue: G (3v) / 3 rounds differently from G v."""
    # Every process of a group must ask for the same product, so the vector has a seed of its own.
    vector = torch.randn(operator.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    product = operator.mv(torch.stack([vector, 3 * vector], dim=1).to(operator.device))
    once, thrice = product[:, 0], product[:, 1] / 3
    eps, size = torch.finfo(operator.dtype).eps, float(once.norm())
    measured = float((once - thrice).norm()) / size if size > 0 and math.isfinite(size) else 0.0
    return _NOISE_MARGIN * max(measured, eps)


@dataclass(frozen=True)
class LowRankBlock(Block):
    """The low-rank matrix U diag(l) Uᵀ.

    Attributes:
        label: The name of the block in tables.
        sizes: The parameters and their shapes, in the order of the rows of U.
        vectors: The matrix U [P, k] with orthonormal columns.
        values: The eigenvalues l [k].
    """

    label: str
    sizes: Mapping[str, tuple[int, ...]]
    vectors: Tensor
    values: Tensor
    kind: str = "low_rank"
    joins_layers = True
    never_overstates = True

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
        """Returns the sum of two low-rank matrices, exactly: its rank is at most the sum of the ranks."""
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
        return split_flat(entries, self.shapes)

    def posterior(
        self, prior: Prior, scale: Tensor, eigen: Sequence[Eigen], *, damping: str, dtype: torch.dtype, n_data: float
    ) -> LowRankBlockPosterior:
        return LowRankBlockPosterior.of(self, prior, scale, dtype)


@dataclass(frozen=True)
class LowRankBlockPosterior(BlockPosterior):
    """A low-rank block under a prior.

    Attributes:
        source_block: The curvature, U and l.
        prior: The prior's precisions D as a vector [p].
        basis: The orthonormal directions Q [p, k] that the data inform, in float64.
        values: The values σ² [k] for s = 1 and the prior of the decomposition.
        whitener: The roots √D at the time of the decomposition [p].
        ratio: The present prior relative to that of the decomposition, 0-d.
        scale: The factor s of the curvature, 0-d.
        dtype: The precision of samples.
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

    @staticmethod
    def of(block: LowRankBlock, prior: Prior, scale: Tensor, dtype: torch.dtype) -> LowRankBlockPosterior:
        """Whitens U and returns the posterior; for one prior precision U stays as it is."""
        vectors, values = block.vectors.to(torch.float64), block.values.to(torch.float64)
        compared = PriorRatio.of(prior, tuple(block.shapes), None, vectors.device)
        assert compared is not None  # A prior differs from itself by the factor 1.
        whitener = compared.vector.detach().sqrt()
        if prior.is_scalar(tuple(block.shapes)):
            basis, squares = vectors, values / whitener[0].square()
        else:
            basis, singular, _ = torch.linalg.svd(vectors * values.sqrt() / whitener[:, None], full_matrices=False)
            squares = singular.square()
        scale = scale.to(vectors.device)
        return LowRankBlockPosterior(block, compared.vector, basis, squares, whitener, compared.ratio, scale, dtype)

    def split_by_layer(self, layers: Mapping[str, tuple[str, ...]], prior: Prior) -> LayerParts:
        """Splits the low-rank covariance into layers; one layer alone is the block itself."""
        return super().split_by_layer(layers, prior) if len(layers) == 1 else LowRankLayerParts(layers, self)

    def with_prior(self, prior: Prior, scale: Tensor) -> LowRankBlockPosterior:
        scale = scale.to(self.basis.device)
        compared = PriorRatio.of(prior, self.names, self.whitener, self.basis.device)
        if compared is None:
            return LowRankBlockPosterior.of(self.source_block, prior, scale, self.dtype)
        return replace(self, prior=compared.vector, ratio=compared.ratio, scale=scale)

    @property
    def _gain(self) -> Tensor:
        """The value 1 + σ² for each informed direction."""
        return 1 + self.scale * self.values / self.ratio

    def log_det_ratio(self) -> Tensor:
        if self.prior.requires_grad and not self.ratio.requires_grad:
            # This is |I + s √l Uᵀ D⁻¹ U √l|, differentiable in every entry of D.
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
        """The roots √D of the prior's precisions [p]."""
        return self.whitener * self.ratio.sqrt()

    def informed_parts(self, white: Tensor) -> tuple[Tensor, Tensor]:
        """Splits [..., p]: coordinates in the directions that data inform [..., k], and the rest [..., p].

        Two projections are enough: after one the rest still holds what rounding left of the informed directions, which
        a weak prior would blow up.
        """
        first = white @ self.basis
        rest = white - first @ self.basis.T
        second = rest @ self.basis
        return first + second, rest - second @ self.basis.T

    def sample(self, count: int, generator: torch.Generator | None) -> Params:
        like = torch.empty(count, self.size, dtype=torch.float64, device=self.basis.device)
        inside, outside = self.informed_parts(normal_like(like, generator))
        white = outside + (inside * self._gain.detach().rsqrt()) @ self.basis.T
        return split_flat((white / self._root.detach()).to(self.dtype), self.shapes)

    def precision_mv(self, values: Params) -> Params:
        vector = self._joined(values) * self._root
        product = vector + (vector @ self.basis) * (self._gain - 1) @ self.basis.T
        return split_flat((product * self._root).to(next(iter(values.values())).dtype), self.shapes)

    def covariance_mv(self, values: Params) -> Params:
        inside, outside = self.informed_parts(self._joined(values) / self._root)
        product = outside + (inside / self._gain) @ self.basis.T
        return split_flat((product / self._root).to(next(iter(values.values())).dtype), self.shapes)

    def _joined(self, values: Params) -> Tensor:
        name = self.names[0]
        return join_flat(values, self.names, values[name].dim() - len(self.shapes[name])).to(torch.float64)

    def marginal_variance(self) -> Params:
        inside = self.basis.square()
        # 1 − Σ_k Q_jk² is the part of entry j that no data inform. Where little is left, the difference has no digits: the few
        # entries with less than 1/1000 (at most about k of them) are projected one by one.
        outside = (1 - inside.sum(1)).clamp_min(0.0)
        few = (outside < 1e-3).nonzero()[:, 0]
        for some in few.split(max(1, examples_per_chunk(2 * self.size))):
            units = torch.zeros(len(some), self.size, dtype=torch.float64, device=self.basis.device)
            units[torch.arange(len(some)), some] = 1.0
            outside[some] = self.informed_parts(units)[1].square().sum(1)
        variance = outside + inside @ (1 / self._gain.detach())
        return split_flat(variance / self._root.detach().square(), self.shapes)

    def output_covariance(self, gradients: Tensor, diagonal: bool) -> Tensor:
        """Sums squares in float64: k numbers per output in the informed directions, and the prior's variance of the rest."""
        white = gradients.to(torch.float64).transpose(0, 1) / self._root  # [b, v, p]
        coordinates, outside = self.informed_parts(white)
        inside = coordinates * self._gain.rsqrt()
        variance = inside.square().sum(-1) + outside.square().sum(-1)
        self._warn_of_lost_digits(gradients, coordinates.detach(), outside.detach(), variance)
        if diagonal:
            return variance.to(gradients.dtype)
        return (inside @ inside.transpose(1, 2) + outside @ outside.transpose(1, 2)).to(gradients.dtype)

    def _warn_of_lost_digits(self, gradients: Tensor, inside: Tensor, outside: Tensor, variance: Tensor) -> None:
        """Warns where rounding may have taken more than half of the digits of a variance [b, v]."""
        gain, root, dtype = self._gain.detach(), self._root.detach(), gradients.dtype
        size, prior = CurvatureSize.of(gain - 1), self.prior.detach()
        if not VarianceErrors.may_matter(size, gradients, prior, variance, 0.0, size.product_noise(dtype)):
            return
        informed = ((inside / gain) @ self.basis.T) / root
        marginal = torch.cat([v.reshape(-1) for v in self.marginal_variance().values()])
        curvature = (self.basis.square() @ (gain - 1)) * prior
        rows = gradients.detach().to(torch.float64).transpose(0, 1)
        products = informed + outside / root
        errors = VarianceErrors.of_gradients(size, dtype, rows, products, prior, marginal, curvature, informed)
        away = outside.square().sum(-1)
        errors.errors["eigenpairs"] = size.residual_errors(dtype, gain - 1, inside, away, self.size - len(gain))
        errors.warn()

    def functional_covariance(
        self, gradients: LayerGradients, variants: Sequence[Self], diagonal: bool
    ) -> list[Tensor]:
        """Returns J Σ Jᵀ layer by layer: the prior's variance less what the k directions explain.

        The difference cancels where little of the prior's variance is left. Such examples are computed as sums of squares.
        """
        parts: list[list[Tensor]] = [[] for _ in variants]
        size = gradients.record.size
        stride = examples_per_chunk(gradients.n_vectors * _largest(self.shapes), _COVARIANCE_NUMBERS)
        for start in range(0, size, stride):
            length = min(stride, size - start)
            known: dict[tuple[int, int], _Explained] = {}
            for covariances, variant in zip(parts, variants, strict=True):
                key = id(variant.basis), id(variant.whitener)
                if key not in known:
                    known[key] = _Explained.of(variant, gradients, start, length, diagonal)
                covariance = known[key].covariance(variant)
                if covariance is None:
                    covariance = variant._sums_of_squares(gradients, start, length, diagonal)
                covariances.append(covariance.to(gradients.vectors.dtype))
        return [torch.cat(covariances) for covariances in parts]

    def _sums_of_squares(self, gradients: LayerGradients, start: int, length: int, diagonal: bool) -> Tensor:
        """Returns J Σ Jᵀ of some examples without a difference, whatever the prior."""
        stride, end = examples_per_chunk(2 * gradients.n_vectors * self.size), start + length
        pieces = [(first, min(stride, end - first)) for first in range(start, end, stride)]
        rows = (self.gradient_rows(gradients.per_example(self.names, *piece)) for piece in pieces)
        return torch.cat([self.output_covariance(some, diagonal) for some in rows])


@dataclass(frozen=True)
class _Explained:
    """Gradients of some examples in the whitened coordinates of a decomposition.

    Attributes:
        prior: The covariance of the outputs under the prior of the decomposition [b, v, v], or the variance [b, v].
        inside: The coordinates in the directions that data inform [b, v, k].
        dtype: The precision of the gradients.
        diagonal: Whether only the variances are wanted.
    """

    prior: Tensor
    inside: Tensor
    dtype: torch.dtype
    diagonal: bool

    @staticmethod
    def of(
        posterior: LowRankBlockPosterior, gradients: LayerGradients, start: int, length: int, diagonal: bool
    ) -> _Explained:
        """Reads the gradients of one layer after another, in float64."""
        whitener, vectors = posterior.whitener, gradients.n_vectors
        rows = dict(zip(posterior.names, _places(posterior.shapes), strict=True))
        inside = whitener.new_zeros(length * vectors, posterior.basis.shape[1])
        prior = whitener.new_zeros((length, vectors) if diagonal else (length, vectors, vectors))
        room = whitener.new_empty(length * vectors * _largest(posterior.shapes))
        for names in gradients.record.plan.separate_names(posterior.names):
            for name, value in gradients.per_example(names, start, length).items():
                lines = value.transpose(0, 1).reshape(length, vectors, -1)
                white = room[: lines.numel()].view(lines.shape).copy_(lines)
                scale, common = whitener[rows[name]], 1.0
                if bool((scale == scale[0]).all()):  # most often: then the small products are divided instead
                    common = 1 / float(scale[0])
                else:
                    white /= scale
                inside.addmm_(white.flatten(0, 1), posterior.basis[rows[name]], alpha=common)
                square = white.square().sum(-1) if diagonal else white @ white.transpose(1, 2)
                prior.add_(square, alpha=common**2)
        return _Explained(prior, inside.unflatten(0, (length, vectors)), gradients.vectors.dtype, diagonal)

    def covariance(self, posterior: LowRankBlockPosterior) -> Tensor | None:
        """Returns J Σ Jᵀ under a prior and a scale; None where the difference, or rounding of the gradients, may have taken its digits."""
        size = CurvatureSize.of(posterior._gain - 1)
        tolerance = digits_tolerance(self.dtype)
        if size.data_rounding(self.dtype) > tolerance:
            return None
        shrunk = self.inside * (1 - 1 / posterior._gain)
        if self.diagonal:
            variance = covariance = self.prior - (shrunk * self.inside).sum(-1)
            whole = self.prior
        else:
            covariance = self.prior - shrunk @ self.inside.transpose(1, 2)
            variance, whole = (m.diagonal(dim1=1, dim2=2) for m in (covariance, self.prior))
        # With a larger share than eps the rounding of the gradient, at most 2u/√share of the variance, leaves half of the digits.
        least = max(_LEAST_SHARE, torch.finfo(self.dtype).eps)
        if bool((variance.detach() < least * whole).any()):
            return None
        eigenvalues, inside = posterior._gain.detach() - 1, self.inside.detach()
        if 2 * size.product_noise(self.dtype) * math.sqrt(size.largest) > tolerance:
            outside = whole.detach() - inside.square().sum(-1)
            directions = posterior.size - len(eigenvalues)
            residual = size.residual_errors(self.dtype, eigenvalues, inside, outside, directions)
            VarianceErrors(self.dtype, variance.detach(), {"eigenpairs": residual}).warn()
        return covariance / posterior.ratio


def _largest(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Returns how many numbers the largest parameter has."""
    return max(math.prod(s) for s in shapes.values())


def _places(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[slice]:
    """Returns where each parameter stands in a vector over all of them."""
    start = 0
    for shape in shapes.values():
        stop = start + math.prod(shape)
        yield slice(start, stop)
        start = stop


class LowRankLayerParts(LayerParts):
    """The layers under D½ (I + Q σ² Qᵀ) D½, where every version costs k numbers per output."""

    has_cross_terms = True
    has_conditionals = True

    def __init__(self, layers: Mapping[str, tuple[str, ...]], block: LowRankBlockPosterior):
        self.layers, self.block, self.kind = layers, block, block.source.kind
        self.root = block.prior.detach().sqrt()
        self.gain = block._gain.detach()
        self.rows = rows_of(layers, block.shapes, None)
        # P_ℓℓ = D½ (I + L σ² Lᵀ) D½ with Q_ℓ √(gain − 1) = L σ Rᵀ: its inverse is the prior's outside of L, and 1/(1 + σ²) in it.
        self.conditional: dict[str, tuple[Tensor, Tensor]] = {}
        for layer, rows in self.rows.items():
            scaled = block.basis[rows] * (self.gain - 1).clamp_min(0.0).sqrt()
            left, singular, _ = torch.linalg.svd(scaled, full_matrices=False)
            self.conditional[layer] = left, 1 + singular.square()

    def covariances(self, gradients: LayerGradients, diagonal: bool) -> LayerCovariances:
        block = self.block
        collector = CovarianceCollector(gradients, diagonal, block.size)
        # Sums over the informed directions and over the rest, never a difference of the two: it would cancel for a weak prior.
        for start, length in collector.chunks():
            lines = flatten_batch(gradients.per_example(block.names, start, length), block.names).to(self.root)
            white = lines / self.root
            inside, outside = block.informed_parts(white)  # [v, b, k] and [v, b, p]
            for layer, rows in self.rows.items():
                alone = torch.zeros_like(white)
                alone[..., rows] = white[..., rows]
                inside_alone, outside_alone = block.informed_parts(alone)
                collector.add("own", layer, inside_alone, inside_alone / self.gain)
                collector.add("own", layer, outside_alone, outside_alone)
                collector.add("cross", layer, inside_alone, (inside - inside_alone) / self.gain)
                collector.add("cross", layer, outside_alone, outside - outside_alone)
                left, gain = self.conditional[layer]
                known = white[..., rows] @ left
                rest = white[..., rows] - known @ left.T
                collector.add("conditional", layer, known, known / gain)
                collector.add("conditional", layer, rest, rest)
        return collector.covariances()

    def _split(self, layer: str, values: Tensor) -> Params:
        return split_flat(values, {n: self.block.shapes[n] for n in self.layers[layer]})

    def variance(self, layer: str) -> Params:
        variance = self.block.marginal_variance()
        return {n: variance[n] for n in self.layers[layer]}

    def effective(self) -> dict[str, float]:
        shrink = 1 - 1 / self.gain
        return {k: float((self.block.basis[rows].square() @ shrink).sum()) for k, rows in self.rows.items()}

    def half_effective(self, layer: str) -> float:
        return 0.5 * float((1 - 1 / self.conditional[layer][1]).sum())

    def information(self) -> tuple[dict[str, float], float]:
        half = (1 - 1 / self.gain).clamp_min(0.0).sqrt()
        eye = torch.eye(len(half), dtype=half.dtype, device=half.device)
        nats = {}
        for layer, rows in self.rows.items():
            root = self.block.basis[rows] * half
            nats[layer] = -0.5 * float(torch.linalg.slogdet(eye - root.T @ root)[1])
        return nats, 0.5 * float(self.block.log_det_ratio().detach())

    def draw(self, layer: str, count: int, generator: torch.Generator | None) -> Params:
        rows = self.rows[layer]
        noise = normal_like(self.root.new_empty(count, len(rows)), generator)
        left, gain = self.conditional[layer]
        known = noise @ left
        return self._split(layer, (noise + known * (gain.rsqrt() - 1) @ left.T) / self.root[rows])


def fit_low_rank(problem: CurvatureProblem) -> tuple[tuple[Block, ...], DataCounts]:
    """Fits the leading eigenpairs of the Gauss-Newton matrix of the data of all processes."""
    counts = problem.sum_loss()
    operator = GGNOperator(problem.model, problem.data, problem.likelihood, list(problem.names), problem.unpack)
    generator = problem.generator
    if is_distributed():  # Every process must walk through the same vectors.
        seed = broadcast_number(int(torch.randint(2**62, (), generator=generator)))
        generator = torch.Generator().manual_seed(seed)
    assert problem.rank is not None  # refused before the first batch
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
        blocks_are_global=True,
        reads_layers=False,
        needs_rank=True,
    )
)
