"""Where the uncertainty of a network sits, in a few numbers: shares by layer, and their centre."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import aftermap as am
from benchmarks.quality.training import cut

__all__ = ["PRIORS", "by_layer", "centre", "fitted", "generator", "tuned"]

# The prior of training, the same for every layer; and the precisions that `tune` finds, one for each layer.
PRIORS = ("trained", "tuned")


def generator(seed: int = 0) -> torch.Generator:
    """The source of random draws."""
    return torch.Generator().manual_seed(seed)


def fitted(model: nn.Module, data: tuple[Tensor, Tensor], prior: float, structure: str = "kron") -> am.Laplace:
    """A Laplace approximation with the prior of training."""
    return am.Laplace(model, "classification", structure=structure, prior_precision=prior).fit(
        cut(*data), progress=False
    )


def tuned(la: am.Laplace) -> am.Laplace:
    """The same, tuned by the default rule without labels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return la.tune()


def centre(shares: Sequence[float]) -> float:
    """The mean place of the uncertainty: 0 if all of it is in the first layer, 1 if all is in the last."""
    last = max(len(shares) - 1, 1)
    return sum(share * place / last for place, share in enumerate(shares))


def by_layer(la: am.Laplace, x: Tensor) -> dict[str, Any]:
    """Shares of the epistemic uncertainty and of the variance of the logits by layer, their centres, and what the data determine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = la.where([(x, None)], top=1, saliency=False)
    shares = [float(layer.epistemic_share or 0.0) for layer in found.layers]
    logits = [layer.predictive_share for layer in found.layers]
    return {
        "kinds": [layer.layer.kind for layer in found.layers],
        "parameters": [layer.n_parameters for layer in found.layers],
        "effective": [layer.effective for layer in found.layers],
        "shares": shares,
        "logit_shares": logits,
        "posterior_shares": [layer.posterior_share for layer in found.layers],
        "nats": sum(float(layer.nats or 0.0) for layer in found.layers),
        "centre": centre(shares),
        "logit_centre": centre(logits),
    }
