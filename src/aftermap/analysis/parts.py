"""A posterior by layers: every block says what each of its layers contributes, and what the layers share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aftermap.curvature.passes.plan import WHOLE_MODEL
from aftermap.curvature.structures.base import join_flat
from aftermap.curvature.structures.layer_parts import DenseLayerParts, LayerParts, ProductLayerParts
from aftermap.errors import UnsupportedError
from aftermap.linalg import safe_cholesky, symmetrise
from aftermap.params import Params
from aftermap.posteriors import GaussianPosterior, MatrixFreePosterior, Posterior
from aftermap.prior import Prior

__all__ = ["PosteriorLayerParts", "split_by_layer"]


class PosteriorLayerParts(ProductLayerParts):
    """The layers of a posterior that has no blocks (matrix-free, dual), by solves or by fixed samples.

    Args:
        layers: For each layer the names of its parameters.
        posterior: Any `Posterior` with a `prior`.
    """

    def __init__(self, layers: Mapping[str, tuple[str, ...]], posterior: Any):
        super().__init__(layers, posterior.shapes)
        self.posterior = posterior

    def times_covariance(self, lines: Tensor) -> Tensor:
        return self.posterior.times_covariance(lines)

    def variance(self, layer: str) -> Params:
        variance = self.posterior.marginal_variance()
        return {n: variance[n] for n in self.layers[layer]}

    def effective(self) -> dict[str, float]:
        posterior = self.posterior
        if isinstance(posterior, MatrixFreePosterior):
            return posterior.effective_parameters()
        variance = join_flat(posterior.marginal_variance(), posterior.names, 0).cpu()
        gains = 1 - posterior.prior.vector(posterior.names).detach().cpu() * variance
        return {k: float(gains[rows].sum()) for k, rows in self.rows.items()}

    def information(self) -> tuple[dict[str, float], float]:
        posterior = self.posterior
        prior = posterior.prior.vector(posterior.names).detach().log().sum()
        ratio = float(posterior.log_det_precision().detach()) - float(prior)
        return dict.fromkeys(self.layers, math.nan), 0.5 * ratio

    def draw(self, layer: str, count: int, generator: torch.Generator | None) -> Params:
        drawn = self.posterior.sample(count, generator)
        return {n: drawn[n] - self.posterior.mean[n] for n in self.layers[layer]}


def _owner(name: str, model: nn.Module) -> str:
    """Returns the layer of a parameter: its module; a parameter that the network itself holds is a layer of its own."""
    path = name.rpartition(".")[0]
    if path:
        return path
    return WHOLE_MODEL if next(model.children(), None) is None else name


def _by_owner(names: Sequence[str], model: nn.Module) -> dict[str, tuple[str, ...]]:
    owners: dict[str, list[str]] = {}
    for name in names:
        owners.setdefault(_owner(name, model), []).append(name)
    return {k: tuple(v) for k, v in owners.items()}


def split_by_layer(posterior: object, model: nn.Module) -> list[LayerParts]:
    """Returns the independent parts of a posterior, each with the layers that it is over.

    Args:
        posterior: A Gaussian posterior: in blocks, matrix-free, or any `Posterior` with a `prior`.
        model: The network of the posterior, whose modules are the layers.

    Raises:
        UnsupportedError: The posterior is of another kind: particles and ensembles have no covariance to split.

    >>> from aftermap.laplace import Laplace
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> la = Laplace(net, "regression", structure="full").fit([(torch.ones(4, 2), torch.ones(4, 1))])
    >>> [list(part.layers) for part in split_by_layer(la.posterior, net)]
    [['0', '2']]
    """
    if isinstance(posterior, GaussianPosterior):
        prior = posterior.prior
        return [block.split_by_layer(_by_owner(block.names, model), prior) for block in posterior.blocks]
    if isinstance(posterior, MatrixFreePosterior):
        layers = {k: tuple(v) for k, v in posterior.layers.items()}
        if posterior.n_params > posterior.settings.dense_limit:
            return [PosteriorLayerParts(layers, posterior)]
        dense = symmetrise(posterior.to_dense().detach())
        root = safe_cholesky(dense, what="the posterior precision")
        precisions = posterior.prior.vector(posterior.names).detach().cpu()
        ratio = float(2 * root.diagonal().log().sum() - precisions.log().sum())
        return [DenseLayerParts(layers, torch.cholesky_inverse(root), dense, precisions, posterior.shapes, None, ratio)]
    if isinstance(posterior, Posterior) and isinstance(getattr(posterior, "prior", None), Prior):
        return [PosteriorLayerParts(_by_owner(posterior.names, model), posterior)]
    raise UnsupportedError(
        f"where() splits a Gaussian posterior into layers, and a {type(posterior).__name__} is none. Use Laplace, or the "
        "posterior of an optimiser (opt.posterior())"
    )
