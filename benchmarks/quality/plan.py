"""What a run measures unless it is told otherwise: which seeds, how many validation sets, and what is left out for its cost.

It was fixed from the costs of single predictors before any result was looked at; the page says what was left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.quality.tasks import Task

__all__ = ["Plan", "plan_of"]

_DETECTORS = ("energy", "gen", "knn", "mahalanobis", "relativemahalanobis", "vim")
_CHEAP = ("network", "temperature", "validation_noise", *_DETECTORS)


@dataclass(frozen=True)
class Plan:
    """How much of a method is measured on a task.

    Attributes:
        seeds: The seeds; none where it is left out.
        resplits: How many validation sets of each size.
        reason: Why it is left out.
    """

    seeds: tuple[int, ...]
    resplits: int
    reason: str = ""


def plan_of(task: Task, method: str) -> Plan:
    """The plan of a method on a task."""
    if method == "ensemble" and not task.ensemble:
        return Plan((), 0, "four more trainings would take too long")
    if task.group == "image":
        if method == "grid" and not task.cheap:
            return Plan((), 0, "19 priors and 200 points for every validation set would take too long on convolutions")
        return Plan((0,), min(task.resplits, 1 if method == "grid" else 5))
    if task.group == "regression":
        every = method in (*_CHEAP, "fit", "fit_unlabelled")
        return Plan((0, 1, 2) if every else (0,), min(task.resplits, 2 if every else 1))
    every = method in (*_CHEAP, "fit", "fit_unlabelled", "identity")
    return Plan((0, 1, 2) if every else (0,), min(task.resplits, 2 if method == "grid" else 5))
