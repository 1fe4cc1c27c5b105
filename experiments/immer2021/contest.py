"""What the parts share: fits at every prior precision, of which held-out data or the evidence choose one for each predictive.

Training and posterior have the same prior, as in the paper: a larger precision narrows the posterior and weakens the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import aftermap as am
from aftermap import metrics
from aftermap.baselines import Deterministic

__all__ = ["Chosen", "Pair", "contest", "network_probabilities", "predicted", "probabilities", "quality"]

Pair = tuple[Tensor, Tensor]
_BATCH = 500


@dataclass(frozen=True)
class Chosen:
    """The best of several.

    Attributes:
        precision: Its prior precision.
        predictor: What predicts.
        scores: The score of every precision, in their order.
    """

    precision: float
    predictor: Any
    scores: tuple[float, ...]


def contest(
    candidates: Iterable[tuple[float, Any]], scorers: Mapping[str, Callable[[Any], float]]
) -> dict[str, Chosen]:
    """The candidate with the least score, for each scorer; only those that lead are kept in memory.

    Args:
        candidates: Predictors by prior precision.
        scorers: What gives the score, by name.
    """
    best: dict[str, tuple[float, float, Any]] = {}
    scores: dict[str, list[float]] = {name: [] for name in scorers}
    for precision, candidate in candidates:
        for name, scorer in scorers.items():
            score = scorer(candidate)
            scores[name].append(score)
            if name not in best or score < best[name][0]:
                best[name] = (score, precision, candidate)
    return {name: Chosen(precision, found, tuple(scores[name])) for name, (_, precision, found) in best.items()}


def probabilities(prediction: am.Prediction) -> Tensor:
    """Probabilities of all classes [N, C], also of a single logit."""
    p = prediction.mean.double()
    return torch.cat([1 - p, p], -1) if prediction.kind == "binary" else p


def network_probabilities(model: nn.Module, likelihood: str, x: Tensor) -> Tensor:
    """What the network itself says."""
    network = Deterministic(model, likelihood)
    return torch.cat([probabilities(network.predict(part)) for part in x.split(_BATCH)])


def predicted(la: am.Laplace, kind: str, x: Tensor, samples: int, seed: int) -> Tensor:
    """What the posterior says, linearised with Monte-Carlo draws of the outputs, or by weight samples; the same ones for all inputs."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "sampling":
        weights = la.ensemble(samples, generator)
        return torch.cat([probabilities(la.predict(part, kind=kind, weights=weights)) for part in x.split(_BATCH)])
    parts = [la.predict(part, link="mc", samples=samples, generator=generator) for part in x.split(_BATCH)]
    return torch.cat([probabilities(part) for part in parts])


def quality(name: str, p: Tensor, y: Tensor) -> dict[str, float]:
    """NLL, ECE of ten bins and accuracy, with the name of the method before each."""
    return {
        f"{name}_nll": metrics.nll(p, y),
        f"{name}_ece": metrics.ece(p, y, n_bins=10),
        f"{name}_accuracy": metrics.accuracy(p, y),
    }
