"""Out-of-distribution detection: how well a score, of a prediction or of a detector, tells other data from the data that a network knows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aftermap.baselines.detectors import Detector
from aftermap.errors import InputError, ShapeError
from aftermap.evaluation.reference import FLAG_SCORES, Reference, available_scores
from aftermap.metrics import aupr, auroc, bootstrap_interval, fpr_at_tpr, labelled_scores
from aftermap.predictive import Prediction

__all__ = ["Detection", "DetectorScores", "check_detectors", "detection", "detections", "variance_ratio"]

# Columns of the table of inputs, which a detector's scores stand beside.
_TAKEN = (
    *(*FLAG_SCORES, "flag", "set", "index", "prediction"),
    *("confidence", "epistemic", "aleatoric", "nll", "target", "correct"),
)


@dataclass(frozen=True)
class Detection:
    """How well one score separates another set (the positives) from the usual data; a higher score means more unusual.

    Attributes:
        auroc: The area under the ROC curve, with its interval (value, lower, upper).
        aupr_out: The area under the precision-recall curve with the outside set as positives.
        aupr_in: The area under the precision-recall curve with the usual data as positives.
        fpr95: The share of false alarms when 95 % of the outside inputs are found.
        mean_inside: The mean score of the usual data.
        mean_outside: The mean score of the other set.
    """

    auroc: tuple[float, float, float]
    aupr_out: float
    aupr_in: float
    fpr95: float
    mean_inside: float
    mean_outside: float


def check_detectors(detectors: Sequence[Detector] | Mapping[str, Detector]) -> dict[str, Detector]:
    """Returns detectors by name: a mapping's own names, or each detector's.

    Raises:
        InputError: One of them is no detector, or a name is taken.
    """
    pairs = (
        list(detectors.items()) if isinstance(detectors, Mapping) else [(getattr(d, "name", ""), d) for d in detectors]
    )
    named: dict[str, Detector] = {}
    for name, detector in pairs:
        if not isinstance(detector, Detector):
            raise InputError(
                f"each of detectors must be a Detector, got {type(detector).__name__}. "
                "Pass for instance aftermap.baselines.KNN(model).fit(train)"
            )
        if name in named or name in _TAKEN or "/" in name:
            raise InputError(
                f"a detector cannot be called {name!r}: names must differ from each other, have no '/', and not be one of "
                f"{', '.join(_TAKEN)}. Name them with a mapping: detectors={{'knn_5': KNN(model, k=5).fit(train)}}"
            )
        named[name] = detector
    return named


class DetectorScores:
    """The scores of several detectors for a data set, batch by batch.

    Args:
        detectors: The detectors by name.

    Attributes:
        seconds: The time that they took so far.
    """

    def __init__(self, detectors: Mapping[str, Detector]):
        self.seconds = 0.0
        self._detectors = dict(detectors)
        self._parts: dict[str, list[Tensor]] = {name: [] for name in detectors}

    def add(self, inputs: Any) -> None:
        """Scores a batch of inputs."""
        started = time.perf_counter()
        for name, detector in self._detectors.items():
            scores = detector.score(inputs).detach().cpu().to(torch.float64)
            if scores.dim() != 1 or bool(scores.isnan().any()):
                raise ShapeError(
                    f"the detector {name!r} must return one number for each input [N], and no NaN; got shape {list(scores.shape)}"
                )
            self._parts[name].append(scores)
        self.seconds += time.perf_counter() - started

    def scores(self) -> dict[str, Tensor]:
        """Returns the scores [N] of each detector."""
        return {name: torch.cat(parts) for name, parts in self._parts.items()}


def detection(
    inside: Tensor,
    outside: Tensor,
    *,
    n_resamples: int = 200,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> Detection:
    """Judges how well scores tell usual data [N] from another set [M].

    Args:
        inside: The scores of the usual data [N].
        outside: The scores of the other set [M].
        n_resamples: The number of bootstrap resamples; 0 gives no interval.
        level: The confidence level of the interval.
        generator: The source of the random resamples.

    Returns:
        The areas and rates that describe the detection.

    Raises:
        DataError, ShapeError: A set is empty, has a NaN, or is no vector.

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
    others: Mapping[str, Mapping[str, Tensor]] | None = None,
    reference: Reference | None = None,
    n_resamples: int = 200,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> dict[str, dict[str, Detection]]:
    """Judges every score on every set, and returns for each set a mapping from the score's name to its `Detection`.

    Args:
        inside: The predictions for usual data.
        outside: The predictions for each other set.
        scores: The names of the scores. None takes all that the predictions have.
        others: More scores [N] by set and name, such as those of detectors; those of usual data are under "test".
        reference: The scores of held-out usual inputs, which add the score "either".
        n_resamples: The number of bootstrap resamples; 0 gives no interval.
        level: The confidence level of the interval.
        generator: The source of the bootstrap's random draws.

    Raises:
        ShapeError: The predictions have another shape.
    """
    beside = others or {}
    usual = available_scores(inside, scores, reference)
    names = list(usual)
    usual.update(beside.get("test", {}))
    result: dict[str, dict[str, Detection]] = {}
    for name, prediction in outside.items():
        if prediction.mean.shape[1:] != inside.mean.shape[1:]:
            raise ShapeError(
                f"the predictions for {name!r} have shape {list(prediction.mean.shape)}, those for the usual data "
                f"{list(inside.mean.shape)}; both sets must go through the same network"
            )
        available = available_scores(prediction, names, reference) if names else {}
        other = {**available, **beside.get(name, {})}
        result[name] = {
            s: detection(usual[s], other[s], n_resamples=n_resamples, level=level, generator=generator) for s in usual
        }
    return result


def variance_ratio(inside: Prediction, outside: Prediction) -> float | None:
    """Returns the median variance of the network's outputs on another set, divided by that on usual data.

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
