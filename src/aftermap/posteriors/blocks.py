"""Gaussian posteriors of single blocks: precision s·H + P₀ with the data's scale s and the prior's precision P₀.

A block posterior is made once from a curvature block; a new prior or scale costs no decomposition (`with_prior`).
The log determinants, which the evidence needs, are differentiable in s and P₀.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from aftermap.curvature.factors import Block
from aftermap.curvature.rows import budget
from aftermap.curvature.step import VectorStep
from aftermap.params import Params, flatten
from aftermap.posteriors.prior import Prior

__all__ = ["BlockPosterior"]


class BlockPosterior(ABC):
    """N(mean, (s·H + P₀)⁻¹) over some parameters; deviations from the mean are handled, never the mean itself.

    Batches of parameter values are dicts name -> [..., *shape] with the same leading dimensions.

    Attributes:
        scale: s, a 0-d float64 tensor.
    """

    scale: Tensor

    @property
    @abstractmethod
    def source(self) -> Block:
        """The curvature block H."""

    @abstractmethod
    def with_prior(self, prior: Prior, scale: Tensor) -> BlockPosterior:
        """The same curvature under another prior and scale; no new decomposition where the prior allows it."""

    @abstractmethod
    def log_det_ratio(self) -> Tensor:
        """log |s·H + P₀| − log |P₀|, without cancellation; differentiable."""

    @abstractmethod
    def log_det_prior(self) -> Tensor:
        """log |P₀|."""

    @abstractmethod
    def effective_parameters(self) -> Tensor:
        """γ = p − tr(P₀ Σ): how many directions the data determine (MacKay); 0 ≤ γ ≤ p."""

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator | None) -> Params:
        """Deviations from the mean: name -> [count, *shape]."""

    @abstractmethod
    def precision_mv(self, values: Params) -> Params:
        """(s·H + P₀) v for v [..., *shape]."""

    @abstractmethod
    def covariance_mv(self, values: Params) -> Params:
        """(s·H + P₀)⁻¹ v."""

    @abstractmethod
    def marginal_variance(self) -> Params:
        """The diagonal of the covariance."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its parameters."""
        return tuple(self.source.shapes)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Their shapes."""
        return self.source.shapes

    @property
    def size(self) -> int:
        """p."""
        return self.source.size

    def log_det_precision(self) -> Tensor:
        """log |s·H + P₀|."""
        return self.log_det_ratio() + self.log_det_prior()

    def to_dense(self) -> Tensor:
        """The precision [p, p] in float64, by products with unit vectors."""
        eye = torch.eye(self.size, dtype=torch.float64, device=self.scale.device)
        values, start = {}, 0
        for name, shape in self.shapes.items():
            size = int(torch.Size(shape).numel())
            values[name] = eye[:, start : start + size].reshape((self.size, *shape))
            start += size
        product = self.precision_mv(values)
        return torch.cat([product[n].reshape(self.size, -1) for n in self.names], dim=1)

    def functional_covariance(
        self, step: VectorStep, variants: Sequence[BlockPosterior], diagonal: bool
    ) -> list[Tensor]:
        """J Σ Jᵀ of this block for back-propagated outputs, under each of ``variants`` (the same curvature, other priors).

        Args:
            step: the outputs' vectors v at every site.
            variants: block posteriors made from this one by `with_prior`.
            diagonal: only the variances.

        Returns:
            For each variant [b, v, v], or [b, v].
        """
        found: list[list[Tensor]] = [[] for _ in variants]
        stride = budget(2 * step.vectors * self.size)
        for start in range(0, step.batch.size, stride):
            length = min(stride, step.batch.size - start)
            values = step.per_example(self.names, start, length)  # [v, b, *shape]
            left = flatten_batch(values, self.names)
            for place, variant in enumerate(variants):
                right = flatten_batch(variant.covariance_mv(values), self.names)
                if diagonal:
                    found[place].append((left * right).sum(-1).T)
                else:
                    found[place].append(torch.einsum("vbp,wbp->bvw", left, right))
        return [torch.cat(parts) for parts in found]


def flatten_batch(values: Params, names: Sequence[str]) -> Tensor:
    """[v, b, *shape] by name -> [v, b, p]."""
    return join_flat(values, names, 2)


def split_flat(vector: Tensor, shapes: dict[str, tuple[int, ...]]) -> Params:
    """[..., p] -> name -> [..., *shape]."""
    sizes = [int(torch.Size(s).numel()) for s in shapes.values()]
    return {
        n: part.reshape((*vector.shape[:-1], *s))
        for (n, s), part in zip(shapes.items(), vector.split(sizes, dim=-1), strict=True)
    }


def join_flat(values: Params, names: Sequence[str], lead: int) -> Tensor:
    """name -> [..., *shape] with ``lead`` leading dimensions -> [..., p]."""
    if lead == 0:
        return flatten(values, names)
    return torch.cat(
        [values[n].flatten(lead) if values[n].dim() > lead else values[n][..., None] for n in names], dim=-1
    )
