"""Cuts a posterior into independent parts, and these into layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from aftermap.analysis.joint import DensePart, LowRankPart, SolvedPart
from aftermap.analysis.parts import Part, WholePart
from aftermap.curvature.ekfac import EigenBlock
from aftermap.curvature.kron import KronBlock
from aftermap.curvature.sites import ROOT
from aftermap.errors import UnsupportedError
from aftermap.linalg import safe_cholesky, symmetrise
from aftermap.posteriors import GaussianPosterior, MatrixFreePosterior, Posterior
from aftermap.posteriors.blocks import BlockPosterior, join_flat, split_flat
from aftermap.posteriors.full import FullBlockPosterior
from aftermap.posteriors.low_rank import LowRankBlockPosterior
from aftermap.posteriors.prior import Prior
from aftermap.posteriors.subset import SubsetBlockPosterior

__all__ = ["cut"]

_CONDITIONAL_LIMIT = 5_000  # a dense part beyond this has no conditional version: it would double the memory


def _owner(name: str, model: nn.Module) -> str:
    """The layer of a parameter: its module; one that the network itself holds is a layer of its own."""
    path = name.rpartition(".")[0]
    if path:
        return path
    return ROOT if next(model.children(), None) is None else name


def _by_owner(names: Sequence[str], model: nn.Module) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_owner(name, model), []).append(name)
    return {k: tuple(v) for k, v in found.items()}


def _dense(block: BlockPosterior, layers: Mapping[str, tuple[str, ...]], prior: Prior) -> DensePart:
    entries = block.source_block.entries if isinstance(block, SubsetBlockPosterior) else None
    inner = block.inner if isinstance(block, SubsetBlockPosterior) else block
    eye = torch.eye(inner.size, dtype=torch.float64, device=block.scale.device)
    covariance = join_flat(inner.covariance_mv(split_flat(eye, inner.shapes)), inner.names, 1).detach()
    vector = prior.vector(block.names, eye.device).detach()
    if isinstance(block, SubsetBlockPosterior):
        vector = vector[block.source_block.places.to(vector.device)]
    precision = inner.to_dense().detach() if inner.size <= _CONDITIONAL_LIMIT else None
    ratio = float(block.log_det_ratio().detach())
    return DensePart(layers, covariance, precision, vector, block.shapes, entries, ratio)


def _part_of(block: BlockPosterior, model: nn.Module, prior: Prior) -> Part:
    layers = _by_owner(block.names, model)
    if isinstance(block.source, KronBlock | EigenBlock):
        return WholePart(block.source.name, block)
    if isinstance(block, SubsetBlockPosterior):
        return _dense(block, layers, prior)
    if isinstance(block, FullBlockPosterior | LowRankBlockPosterior) and len(layers) > 1:
        return _dense(block, layers, prior) if isinstance(block, FullBlockPosterior) else LowRankPart(layers, block)
    # A block that is named after its one parameter, or "all" over one module, belongs to that module.
    named = block.source.name not in block.shapes and not isinstance(block, FullBlockPosterior | LowRankBlockPosterior)
    return WholePart(block.source.name if named or len(layers) > 1 else next(iter(layers)), block)


def cut(posterior: object, model: nn.Module) -> list[Part]:
    """The independent parts of a posterior, each cut into layers.

    Args:
        posterior: a Gaussian one: in blocks, matrix-free, or any `Posterior` with a `prior`.
        model: its network; layers are its modules.

    Raises:
        UnsupportedError: another kind of posterior: particles and ensembles have no covariance to cut.

    >>> from aftermap.laplace import Laplace
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> la = Laplace(net, "regression", structure="full").fit([(torch.ones(4, 2), torch.ones(4, 1))])
    >>> [list(part.layers) for part in cut(la.posterior, net)]
    [['0', '2']]
    """
    if isinstance(posterior, GaussianPosterior):
        return [_part_of(block, model, posterior.prior) for block in posterior.blocks]
    if isinstance(posterior, MatrixFreePosterior):
        layers = {k: tuple(v) for k, v in posterior.layers.items()}
        if posterior.n_params > posterior.settings.dense_limit:
            return [SolvedPart(posterior, layers)]
        dense = symmetrise(posterior.to_dense().detach())
        root = safe_cholesky(dense, what="the posterior precision")
        prior = posterior.prior.vector(posterior.names).detach().cpu()
        ratio = float(2 * root.diagonal().log().sum() - prior.log().sum())
        return [DensePart(layers, torch.cholesky_inverse(root), dense, prior, posterior.shapes, None, ratio)]
    if isinstance(posterior, Posterior) and isinstance(getattr(posterior, "prior", None), Prior):
        return [SolvedPart(posterior, _by_owner(posterior.names, model))]
    raise UnsupportedError(
        f"where() cuts a Gaussian posterior into layers, and a {type(posterior).__name__} is none. Use Laplace, or the "
        "posterior of an optimiser (opt.posterior())"
    )
