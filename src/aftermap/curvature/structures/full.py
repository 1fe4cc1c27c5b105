"""Dense curvature over some parameters: G = Σ_n Σ_v (J_nᵀ v)(J_nᵀ v)ᵀ, cross-layer terms included.

The dense posteriors have the precision s·M + D with a diagonal prior D, in the eigenbasis of the whitened matrix.

With D^{-½} M D^{-½} = V diag(l) Vᵀ the precision is D^{½} V (s·l + 1) Vᵀ D^{½}. A prior that only rescales D and any new
s reuse V and l; another shape of D costs one decomposition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aftermap.curvature.passes.backward import PerExampleAccumulator, PerExampleSum
from aftermap.curvature.passes.stream import CurvatureProblem, DataCounts
from aftermap.curvature.structures.base import (
    Block,
    BlockPosterior,
    Structure,
    join_flat,
    register_structure,
    split_flat,
)
from aftermap.curvature.structures.eigenbasis import Eigen
from aftermap.curvature.structures.layer_parts import DenseLayerParts, LayerParts
from aftermap.curvature.structures.rounding import CurvatureSize, VarianceErrors, unit_roundoff
from aftermap.draws import normal_like
from aftermap.errors import NumericalError
from aftermap.linalg import GramSum, psd_eigh, symmetrise
from aftermap.params import Params
from aftermap.prior import Prior

__all__ = [
    "MAX_FULL",
    "FullBlock",
    "FullBlockPosterior",
    "FullSum",
    "PriorRatio",
]


MAX_FULL = 20_000  # A dense matrix has at most this many parameters: 3 GiB in double precision.


@dataclass(frozen=True)
class PriorRatio:
    """A diagonal prior relative to the one that a matrix was whitened with.

    Attributes:
        vector: The prior's precisions [p].
        ratio: The factor of the prior in comparison, 0-d; it carries a gradient only if the prior is one number.
    """

    vector: Tensor
    ratio: Tensor

    @staticmethod
    def of(prior: Prior, names: Sequence[str], whitener: Tensor | None, device: torch.device) -> PriorRatio | None:
        """Compares a prior with whitener²; None where they differ by more than one common factor.

        Args:
            prior: The new prior.
            names: The parameters in the order of the matrix.
            whitener: The roots of the precisions that the matrix was whitened with [p]. None means those of ``prior``
                itself.
            device: The device of the matrix.
        """
        vector = prior.vector(names, device)
        ratio = vector / (vector.detach() if whitener is None else whitener.square())
        if float((ratio.detach() / ratio.detach()[0] - 1).abs().max()) >= 1e-12:
            return None
        # A gradient may go through the ratio only if the prior is one number; otherwise every entry has its own.
        return PriorRatio(vector, ratio[0] if prior.is_shared(names) else ratio[0].detach())


@dataclass(frozen=True)
class FullBlock(Block):
    """A dense symmetric matrix over some parameters.

    Attributes:
        label: The name of the block in tables.
        sizes: The parameters and their shapes, in the order of the matrix.
        matrix: The sum over data [p, p]; in float64 since gradients of any precision are multiplied there.
    """

    label: str
    sizes: Mapping[str, tuple[int, ...]]
    matrix: Tensor
    kind: str = "full"
    joins_layers = True
    is_complete = True

    @property
    def name(self) -> str:
        return self.label

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self.sizes)

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> FullBlock:
        return replace(self, matrix=tensors["matrix"])

    def scaled(self, factor: float) -> FullBlock:
        return replace(self, matrix=self.matrix * factor)

    def to_dense(self) -> Tensor:
        return symmetrise(self.matrix.to(torch.float64))

    def diagonal(self) -> dict[str, Tensor]:
        entries = self.matrix.diagonal().to(torch.float64)
        return split_flat(entries, self.shapes)

    def posterior(
        self, prior: Prior, scale: Tensor, eigen: Sequence[Eigen], *, damping: str, dtype: torch.dtype, n_data: float
    ) -> FullBlockPosterior:
        """Decomposes the whitened matrix; see `FullBlockPosterior.of`."""
        return FullBlockPosterior.of(self, prior, scale, dtype)


class FullSum(PerExampleSum):
    """Sums the outer products of per-example gradients over all of its parameters, in float64.

    A sum in single precision would know the matrix to 1e-7 of its largest eigenvalue. The gradients themselves, squared, know
    it to 1e-14, and a weak prior needs these digits.
    """

    def __init__(self, label: str, shapes: Mapping[str, tuple[int, ...]], device: torch.device):
        self.label, self.shapes, self.names = label, dict(shapes), tuple(shapes)
        size = sum(math.prod(s) for s in shapes.values())
        self.sums = GramSum(1, size, torch.float64, device)

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        parts = (gradients[n] for n in self.names)
        lines = torch.cat([g.reshape(math.prod(g.shape[:2]), -1) for g in parts], dim=1)
        self.sums.add(lines[None].to(torch.float64))

    def block(self) -> FullBlock:
        return FullBlock(self.label, self.shapes, self.sums.full()[0])


@dataclass(frozen=True)
class FullBlockPosterior(BlockPosterior):
    """A dense block under a prior.

    Attributes:
        source_block: The curvature M.
        prior: The prior's precisions D as a vector [p].
        whitener: The roots √D at the time of the decomposition [p]; the present prior is ratio · whitener².
        values: The eigenvalues l [p] of the whitened matrix, in float64.
        vectors: Its eigenvectors V [p, p], in float64.
        ratio: The present prior relative to that of the decomposition, 0-d.
        scale: The factor s of the curvature, 0-d.
        dtype: The precision of samples.
    """

    source_block: FullBlock
    prior: Tensor
    whitener: Tensor
    values: Tensor
    vectors: Tensor
    ratio: Tensor
    scale: Tensor
    dtype: torch.dtype

    @property
    def source(self) -> Block:
        return self.source_block

    @staticmethod
    def of(block: FullBlock, prior: Prior, scale: Tensor, dtype: torch.dtype) -> FullBlockPosterior:
        """Decomposes the whitened matrix and returns the posterior.

        Raises:
            NumericalError: The matrix s·M + D is not positive definite (possible for an exact Hessian only).
        """
        matrix = block.to_dense()
        scale = scale.to(matrix.device)
        compared = PriorRatio.of(prior, tuple(block.shapes), None, matrix.device)
        assert compared is not None  # A prior differs from itself by the factor 1.
        whitener = compared.vector.detach().sqrt()
        white = matrix / whitener / whitener[:, None]
        if block.kind == "hessian":
            values, vectors = torch.linalg.eigh(symmetrise(white))
            _check_positive(block, values, scale)
        else:
            what = f"the full curvature of {block.name}"
            values, vectors = psd_eigh(white, what=what, precision=block.matrix.dtype)
        return FullBlockPosterior(block, compared.vector, whitener, values, vectors, compared.ratio, scale, dtype)

    def split_by_layer(self, layers: Mapping[str, tuple[str, ...]], prior: Prior) -> LayerParts:
        """Splits the dense covariance into layers; one layer alone is the block itself."""
        if len(layers) == 1:
            return super().split_by_layer(layers, prior)
        return DenseLayerParts.of(self, layers, self.shapes, None)

    def with_prior(self, prior: Prior, scale: Tensor) -> FullBlockPosterior:
        scale = scale.to(self.vectors.device)
        compared = PriorRatio.of(prior, self.names, self.whitener, self.vectors.device)
        if compared is None:
            return FullBlockPosterior.of(self.source_block, prior, scale, self.dtype)
        _check_positive(self.source_block, self.values, scale / compared.ratio)
        return replace(self, prior=compared.vector, ratio=compared.ratio, scale=scale)

    @property
    def _gain(self) -> Tensor:
        """The eigenvalues s·l/ratio + 1 of the whitened precision."""
        return self.scale * self.values / self.ratio + 1

    def log_det_ratio(self) -> Tensor:
        if self.prior.requires_grad and not self.ratio.requires_grad:
            # The eigenvalues depend on the entries of D, so a Cholesky factor is differentiated instead.
            matrix = self.scale * self.source_block.to_dense() + torch.diag(self.prior)
            factor = torch.linalg.cholesky(symmetrise(matrix))
            return 2 * factor.diagonal().log().sum() - self.prior.log().sum()
        return torch.log1p(self.scale * self.values / self.ratio).sum()

    def log_det_prior(self) -> Tensor:
        return self.prior.log().sum()

    def effective_parameters(self) -> Tensor:
        return (1 - 1 / self._gain).sum()

    def _deviation(self) -> Tensor:
        """Returns D^{-½} V / √gain, a root of the covariance [p, p]."""
        root = (self.whitener * self.ratio.sqrt())[:, None]
        return (self.vectors / self._gain.sqrt()) / root

    def sample(self, count: int, generator: torch.Generator | None) -> Params:
        like = torch.empty(count, self.size, dtype=torch.float64, device=self.vectors.device)
        noise = normal_like(like, generator)
        return split_flat((noise @ self._deviation().detach().T).to(self.dtype), self.shapes)

    def precision_mv(self, values: Params) -> Params:
        vector = self._joined(values)
        product = vector @ (self.scale * self.source_block.to_dense()) + vector * self.prior
        return split_flat(product.to(next(iter(values.values())).dtype), self.shapes)

    def covariance_mv(self, values: Params) -> Params:
        vector = self._joined(values)
        root = self._deviation()
        return split_flat(((vector @ root) @ root.T).to(next(iter(values.values())).dtype), self.shapes)

    def output_covariance(self, gradients: Tensor, diagonal: bool) -> Tensor:
        """Computes by a root of the covariance: a sum of squares, in float64."""
        rows = gradients.to(torch.float64).transpose(0, 1)  # [b, v, p]
        turned = rows @ self._deviation()
        variance = turned.square().sum(-1)
        self._warn_of_lost_digits(gradients, rows, turned, variance)
        return (variance if diagonal else turned @ turned.transpose(1, 2)).to(gradients.dtype)

    def _warn_of_lost_digits(self, gradients: Tensor, rows: Tensor, turned: Tensor, variance: Tensor) -> None:
        """Warns where rounding may have taken more than half of the digits of a variance [b, v]."""
        size, arithmetic = CurvatureSize.of(self._gain - 1), self.source_block.matrix.dtype
        decomposition, prior = unit_roundoff(arithmetic), self.prior.detach()
        if not VarianceErrors.may_matter(size, gradients, prior, variance, decomposition, 0.0):
            return
        products = turned.detach() @ self._deviation().detach().T
        marginal, curvature = (
            torch.cat([v.reshape(-1) for v in by_name.values()])
            for by_name in (self.marginal_variance(), self.source_block.diagonal())
        )
        curvature = float(self.scale.detach()) * curvature
        errors = VarianceErrors.of_gradients(size, gradients.dtype, rows.detach(), products, prior, marginal, curvature)
        errors.errors["decomposition"] = decomposition * size.largest * (products.square() @ prior)
        errors.warn(arithmetic)

    def _joined(self, values: Params) -> Tensor:
        name = self.names[0]
        lead = values[name].dim() - len(self.shapes[name])
        return join_flat(values, self.names, lead).to(torch.float64)

    def marginal_variance(self) -> Params:
        return split_flat(self._deviation().detach().square().sum(1), self.shapes)


def _check_positive(block: FullBlock, values: Tensor, factor: Tensor) -> None:
    """Raises an error unless all of 1 + factor · l are positive; only an exact Hessian can fail."""
    if block.kind != "hessian":
        return
    smallest = float((factor.detach() * values + 1).min())
    if smallest <= 0:
        raise NumericalError(
            f"the Hessian plus the prior is not positive definite (smallest eigenvalue relative to the prior: {smallest:.3g}), "
            "so it is not a precision. Train longer, use a larger prior precision, or structure='full' (the GGN)"
        )


def fit_full(problem: CurvatureProblem) -> tuple[tuple[Block, ...], DataCounts]:
    """Fits one dense matrix over all selected parameters."""
    size = sum(math.prod(s) for s in problem.shapes.values())
    matrix = FullSum("all", problem.shapes, problem.device)
    return problem.run([PerExampleAccumulator([matrix], size)], "full curvature")


register_structure(
    Structure(
        "full",
        "One dense matrix over all weights, with the terms between layers.",
        fit_full,
        (FullBlock,),
        streams_sums=True,
        max_parameters=MAX_FULL,
    )
)
