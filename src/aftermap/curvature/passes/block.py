"""The block that a fit gives back for some parameters: a symmetric matrix, as a sum over data."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from aftermap.errors import InputError
from aftermap.params import Params
from aftermap.prior import Prior

__all__ = ["Block", "same_names"]


class Block(ABC):
    """A symmetric matrix over some parameters, in the order of `shapes`, each parameter row-major.

    Attributes:
        kind: The word for tables and saved folders.
        dampings: The ways in which a posterior may add the prior to the block.
        joins_layers: Whether a block may hold several layers with the terms between them.
        is_complete: Whether a block holds its matrix with every term, and leaves no direction to the prior.
        never_overstates: Whether no direction has more curvature in the block than in the matrix that it stands for, beyond the rounding
            of that matrix.
        one_precision: Whether the prior can have only one precision for all parameters of the block.
    """

    kind: str
    dampings: ClassVar[tuple[str, ...]] = ("exact",)
    joins_layers: ClassVar[bool] = False
    is_complete: ClassVar[bool] = False
    never_overstates: ClassVar[bool] = False
    one_precision: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The name for tables: the layer's path, or the first parameter."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters and their shapes."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Returns everything that adds up over data."""

    @abstractmethod
    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Block:
        """Returns the same block with other sums."""

    @abstractmethod
    def scaled(self, factor: float) -> Block:
        """Returns the block times a number."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """Returns the matrix [p, p] in float64."""

    @abstractmethod
    def diagonal(self) -> dict[str, Tensor]:
        """Returns the diagonal by parameter, in float64."""

    def matrices_to_decompose(self, prior: Prior) -> list[tuple[str, Tensor]]:
        """Returns the matrices [g, D, D] whose eigendecompositions `posterior` needs, with names for messages.

        They are collected over all blocks and shared out over processes.
        """
        return []

    @abstractmethod
    def posterior(
        self,
        prior: Prior,
        scale: Tensor,
        eigen: Sequence[tuple[Tensor, Tensor]],
        *,
        damping: str,
        dtype: torch.dtype,
        n_data: float,
    ) -> Any:  # A `BlockPosterior`, which is to the right of this module.
        """Returns the `BlockPosterior` with precision s·H + P₀ of this block H.

        Args:
            prior: The prior, with precisions P₀ at least over the parameters of the block.
            scale: The factor s of the curvature, 0-d float64.
            eigen: The eigenvalues and eigenvectors of `matrices_to_decompose`, in its order, in float64.
            damping: How a Kronecker product and the prior are added: one of `dampings`, or "exact".
            dtype: The precision of samples and of gradients that the posterior will meet: the network's own.
            n_data: The number of data that the block is a sum over.
        """

    def with_fixed_means(self, weights: Params, prior_mean: float | Params) -> float | Params:
        """Returns the prior's mean, in which every weight that the block holds fixed is its own mean: it adds nothing to the prior's energy.

        Args:
            weights: The trained weights.
            prior_mean: The mean of the prior: a number, or tensors by name.
        """
        return prior_mean

    @property
    def size(self) -> int:
        """The number P of parameters in the block."""
        return sum(math.prod(s) for s in self.shapes.values())

    def trace(self) -> float:
        """Returns the sum of the diagonal."""
        return float(sum(d.sum() for d in self.diagonal().values()))

    def __add__(self, other: Block) -> Block:
        """Returns the sum, in the coarser of two precisions: its dtype says how far its digits can be trusted."""
        same_names(self, other)
        mine, theirs = self.tensors(), other.tensors()
        return self.with_tensors({k: (mine[k] + theirs[k]).to(_coarser_dtype(mine[k], theirs[k])) for k in mine})


def _coarser_dtype(left: Tensor, right: Tensor) -> torch.dtype:
    """Returns the dtype of the two tensors with the larger rounding."""
    if left.dtype == right.dtype:
        return left.dtype
    return max(left.dtype, right.dtype, key=lambda dtype: torch.finfo(dtype).eps)


def same_names(left: Block, right: Block) -> None:
    """Raises an error unless two blocks are of one kind and over the same parameters."""
    if type(left) is not type(right) or left.shapes != right.shapes:
        raise InputError(
            f"a {left.kind} block over {list(left.shapes)} and a {right.kind} block over {list(right.shapes)} cannot be added; "
            "fit both with the same structure and parameters"
        )
