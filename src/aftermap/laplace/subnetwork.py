"""A subnetwork: the S most influential weights with their full covariance, all others fixed (Daxberger et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.curvature import Factors, fit_curvature
from aftermap.curvature.structures.full import MAX_FULL
from aftermap.curvature.structures.subnetwork import SubnetworkBlock, fit_entries
from aftermap.errors import InputError, UnsupportedError
from aftermap.likelihoods import Likelihood
from aftermap.params import Params, Selection, named_parameters, select
from aftermap.posteriors import GaussianPosterior
from aftermap.prior import PriorSpec

__all__ = [
    "SCORES",
    "Subnetwork",
    "chosen_entries",
    "fit_subnetwork",
    "is_subnetwork",
    "subnetwork_structure",
]

SCORES = ("variance", "magnitude")


@dataclass(frozen=True)
class Subnetwork:
    """A choice of the single weights that are uncertain.

    Attributes:
        size: The number S of weights; the covariance has S² numbers.
        score: The score to choose by: "variance" takes the largest marginal variances of a diagonal posterior fitted
            first (the choice that is nearest to the full posterior in Wasserstein distance among diagonal ones;
            Daxberger et al. 2021, section 5); "magnitude" takes the largest absolute values.
        params: The parameters to choose from.

    >>> Subnetwork(size=100)
    Subnetwork(size=100, score='variance', params='all')
    """

    size: int
    score: str = "variance"
    params: Selection = "all"

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or not 1 <= self.size <= MAX_FULL:
            raise InputError(
                f"a subnetwork needs a whole number of weights from 1 to {MAX_FULL:,}, got size={self.size!r}"
            )
        checks.choice("score", self.score, SCORES)


def is_subnetwork(factors: Factors) -> bool:
    """Tells whether factors are over single weights."""
    return isinstance(factors.blocks[0], SubnetworkBlock)


def subnetwork_structure(structure: str, damping: str) -> str:
    """Returns the structure of a subnetwork, always "full"; the default "kron" of a whole network gives way to it."""
    if structure not in ("kron", "full") or damping != "exact":
        raise InputError(
            f"a subnetwork has a full covariance: structure={structure!r} with damping={damping!r} is not possible; "
            "allowed are structure='full' and damping='exact'"
        )
    return "full"


def chosen_entries(
    subnetwork: Subnetwork,
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood,
    prior: PriorSpec,
    scale: Tensor,
    **options: Any,
) -> dict[str, Tensor]:
    """Returns for each parameter the places of the chosen weights in its flattened values, ascending; equal scores go by order.

    Args:
        subnetwork: The number of weights, and the score to choose by.
        model: The network whose weights are chosen.
        data: Batches for the diagonal fit of score="variance".
        likelihood: The likelihood of the targets.
        prior: The precision of the diagonal posterior's prior.
        scale: The factor of the diagonal posterior's curvature.
        options: Options that are passed to `fit_curvature`.
    """
    names = select(model, subnetwork.params)
    weights: Params = {n: named_parameters(model)[n].detach() for n in names}
    total = sum(w.numel() for w in weights.values())
    if subnetwork.size > total:
        raise InputError(f"a subnetwork of {subnetwork.size:,} weights cannot be chosen among {total:,}; lower size=")
    if subnetwork.score == "magnitude":
        scores: Mapping[str, Tensor] = {n: w.abs() for n, w in weights.items()}
    else:
        factors = fit_curvature(model, data, likelihood, structure="diagonal", params=names, **options)
        scores = GaussianPosterior.from_factors(factors, weights, prior, scale=scale).marginal_variance()
    flat = torch.cat([scores[n].reshape(-1).to(torch.float64).cpu() for n in names])
    best = torch.sort(flat, descending=True, stable=True).indices[: subnetwork.size].sort().values
    entries, start = {}, 0
    for name in names:
        size = weights[name].numel()
        offsets = best[(best >= start) & (best < start + size)] - start
        if len(offsets):
            entries[name] = offsets
        start += size
    return entries


def fit_subnetwork(
    subnetwork: Subnetwork | Selection,
    previous: Factors | None,
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood,
    prior: PriorSpec,
    scale: Tensor,
    *,
    checkpoint: Any = None,
    every: int = 100,
    **options: Any,
) -> Factors:
    """Chooses the weights, or keeps those of an earlier fit, and sums their curvature; there is no checkpoint of it.

    Raises:
        UnsupportedError: A checkpoint was asked for.
    """
    if checkpoint is not None:
        raise UnsupportedError(
            "checkpoint= keeps the sums of whole layers, not those of a Subnetwork: fit without checkpoint="
        )
    if previous is not None and isinstance(previous.blocks[0], SubnetworkBlock):
        entries: Mapping[str, Tensor] = previous.blocks[0].entries
    else:
        assert isinstance(subnetwork, Subnetwork)
        entries = chosen_entries(subnetwork, model, data, likelihood, prior, scale, **options)
    return fit_entries(model, data, likelihood, entries, **options)
