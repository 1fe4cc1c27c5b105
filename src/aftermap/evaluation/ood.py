"""Out-of-distribution detection: can a score tell other data from the data a network knows?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aftermap.errors import ShapeError
from aftermap.evaluation.reference import Reference, available_scores
from aftermap.metrics import aupr, auroc, bootstrap_interval, fpr_at_tpr, labelled_scores
from aftermap.predictive import Prediction

__all__ = ["Detection", "detection", "detections", "variance_ratio"]


@dataclass(frozen=True)
class Detection:
    """How well one score separates a set from the usual data; outside = positive, higher = more unusual.

    Attributes:
        auroc: area under the ROC curve, with its interval (value, lower, upper).
        aupr_out: area under the precision-recall curve, outside as positive.
        aupr_in: the same with inside as positive.
        fpr95: false alarms when 95 % of the outside inputs are found.
        mean_inside: mean score of usual data.
        mean_outside: mean score of the other set.
    """

    auroc: tuple[float, float, float]
    aupr_out: float
    aupr_in: float
    fpr95: float
    mean_inside: float
    mean_outside: float


def detection(
    inside: Tensor,
    outside: Tensor,
    *,
    n_resamples: int = 200,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> Detection:
    """Judges scores of usual data [N] and of another set [M].

    Args:
        inside: scores of usual data.
        outside: scores of the other set.
        n_resamples: of the bootstrap; 0: no interval.
        level: of the interval.
        generator: for the bootstrap.

    Returns:
        The numbers.

    Raises:
        DataError, ShapeError: an empty set, NaN, or what is no vector.

    >>> detection(torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4]), n_resamples=0).auroc
    (1.0, 1.0, 1.0)
    """
    scores, flags = labelled_scores(inside, outside)
    area = auroc(scores, flags)
    interval = (area, area, area)
    if n_resamples:
        boot = bootstrap_interval(
            auroc, scores, flags, n_resamples=n_resamples, level=level, strata=flags, generator=generator
        )
        interval = (area, boot.lower, boot.upper)
    return Detection(
        interval,
        aupr(scores, flags),
        aupr(-scores, ~flags),
        fpr_at_tpr(scores, flags),
        inside.double().mean().item(),
        outside.double().mean().item(),
    )


def detections(
    inside: Prediction,
    outside: Mapping[str, Prediction],
    *,
    scores: Iterable[str] | None = None,
    reference: Reference | None = None,
    n_resamples: int = 200,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> dict[str, dict[str, Detection]]:
    """Every score on every set: set -> score -> Detection. With a reference "either" is one of the scores."""
    usual = available_scores(inside, scores, reference)
    result: dict[str, dict[str, Detection]] = {}
    for name, prediction in outside.items():
        if prediction.mean.shape[1:] != inside.mean.shape[1:]:
            raise ShapeError(
                f"the predictions for {name!r} have shape {list(prediction.mean.shape)}, those for the usual data "
                f"{list(inside.mean.shape)}; both sets must go through the same network"
            )
        other = available_scores(prediction, usual, reference)
        result[name] = {
            s: detection(usual[s], other[s], n_resamples=n_resamples, level=level, generator=generator) for s in usual
        }
    return result


def variance_ratio(inside: Prediction, outside: Prediction) -> float | None:
    """The median variance of the network's outputs on another set, divided by that on usual data.

    A posterior can tell inputs apart by what it adds to the network only where this is not 1. Labels are not needed.

    Args:
        inside: The prediction for usual inputs.
        outside: The prediction for others, of the same network.

    Returns:
        The ratio; NaN where the variance of usual data is 0, and None where the predictions have no variance of outputs: of a
        plain network, of a regression, or where only probabilities were sampled.

    >>> p, v = torch.full((3, 2), 0.5), torch.ones(3)
    >>> usual = Prediction("classification", p, v, v, 2 * v, latent_mean=p, latent_var=p)
    >>> variance_ratio(usual, Prediction("classification", p, v, v, 2 * v, latent_mean=p, latent_var=3 * p))
    3.0
    """
    medians = []
    for prediction in (outside, inside):
        latent = prediction.latent_mean is not None and (
            prediction.latent_var is not None or prediction.latent_cov is not None
        )
        if prediction.kind not in ("classification", "binary") or not latent:
            return None
        medians.append(prediction.score("variance").double().median().item())
    return medians[0] / medians[1] if medians[1] > 0 else math.nan
