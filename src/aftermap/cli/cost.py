"""What a command will take, said before it begins."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aftermap.baselines import Deterministic
from aftermap.batches import Batch, iterate
from aftermap.cli.console import Reporter
from aftermap.cli.sources import Batches, Source
from aftermap.cli.store import Fitted
from aftermap.evaluation import evaluate
from aftermap.laplace import Laplace
from aftermap.laplace.auto import predictions_after_fit
from aftermap.laplace.rehearsal import seconds_per_input, tuning_seconds
from aftermap.likelihoods import Bernoulli, Categorical
from aftermap.models import check_device as device_of_model
from aftermap.progress import in_seconds, showing, waiting

__all__ = ["say_evaluation_cost", "say_prediction_cost", "say_tuning_cost"]

_SAID = 1.0  # seconds of work from which its cost is said
_LONG = 5.0  # seconds from which the cheap way is offered
_LEAST_SCORED = 16  # examples of the smaller evaluation that is tried


def _first_batch(predictor: Any, batches: Batches) -> Batch:
    device, dtype = device_of_model(predictor.model)
    return next(iter(iterate(batches.named(""), device=device, dtype=dtype)))


def say_prediction_cost(fitted: Fitted, source: Source, options: Mapping[str, Any], reporter: Reporter) -> None:
    """Says what a prediction will take, beside the network alone, and the cheap way where it is long."""
    n = source.batches.n_examples()
    if n is None:
        return
    with waiting("estimating the cost"):
        batch = _first_batch(fitted.predictor, source.batches)
        seconds_each = seconds_per_input(fitted.predictor, batch, options)
        if seconds_each * n < _SAID:
            return
        alone = seconds_per_input(_network(fitted), batch, {}, most=0.1)
        line = f"{n:,} inputs: about {in_seconds(seconds_each * n)}, {1000 * seconds_each:.3g} ms each ({seconds_each / max(alone, 1e-12):.0f} times the network alone)"
        classes = isinstance(fitted.predictor.predictor.likelihood, Categorical | Bernoulli)
        if seconds_each * n >= _LONG and options["kind"] == "linearised" and classes:
            cheap = seconds_per_input(fitted.predictor, batch, {**options, "kind": "margin"}, most=0.1)
            line += f"; --kind margin takes about {in_seconds(cheap * n)}" if cheap < 0.7 * seconds_each else ""
    reporter.note(line)


def say_evaluation_cost(
    fitted: Fitted,
    sources: Sequence[Source],
    options: Mapping[str, Any],
    reporter: Reporter,
    *,
    n_resamples: int = 200,
    more: int = 0,
) -> None:
    """Says what the evaluation of a posterior and of its network will take: predictions of all data, and intervals of all scores.

    Args:
        fitted: The posterior.
        sources: The test data, and then the data that should look unusual.
        options: The options of ``predict``.
        reporter: What says it.
        n_resamples: The number of bootstrap resamples.
        more: How many inputs are predicted beside that by the posterior, such as those whose layers are looked at.
    """
    sizes = [source.batches.n_examples() for source in sources]
    if any(size is None for size in sizes):
        return
    with waiting("estimating the cost"):
        n = sum(size for size in sizes if size is not None)
        batch = _first_batch(fitted.predictor, sources[0].batches)
        network = _network(fitted)
        alone = seconds_per_input(network, batch, {}, most=0.1)
        seconds_each = seconds_per_input(fitted.predictor, batch, options)
        scores = 2 * _scoring_seconds(network, batch, alone, n_resamples, sizes[0] or 0)
        seconds = n * (alone + seconds_each) + more * seconds_each + scores
    if seconds >= _SAID:
        reporter.note(
            f"{n:,} inputs: about {in_seconds(seconds)}, of which {in_seconds(scores)} for intervals of the scores"
        )


def _scoring_seconds(network: Any, batch: Batch, alone: float, n_resamples: int, n: int) -> float:
    """Returns the seconds of an evaluation of n examples without its predictions: a line through two that were tried."""
    if not isinstance(batch.targets, torch.Tensor):
        return 0.0
    points: list[tuple[int, float]] = []
    with showing(False):
        for size in sorted({min(_LEAST_SCORED, batch.size), batch.size}):
            part = batch.take(torch.arange(size))
            start = time.perf_counter()
            evaluate(network, [(part.inputs, part.targets)], n_resamples=n_resamples)
            points.append((size, time.perf_counter() - start - size * alone))
    (first, least), (last, most) = points[0], points[-1]
    slope = (most - least) / (last - first) if last > first else 0.0
    return max(0.0, most) + max(0.0, slope) * (n - last)


def say_tuning_cost(
    laplace: Laplace, validation: Source | None, options: Mapping[str, Any], reporter: Reporter
) -> None:
    """Says what the tuning on held-out data will take, with the check and the thresholds that follow it."""
    n = None if validation is None else validation.batches.n_examples()
    if validation is None or n is None:
        return
    with waiting("estimating the cost"):
        batch = _first_batch(laplace, validation.batches)
        seconds_each = seconds_per_input(laplace, batch, options)
        seconds = tuning_seconds(laplace, batch, n) + (n + predictions_after_fit(validation.batches)) * seconds_each
    if seconds >= _SAID:
        reporter.note(f"tuning on {n:,} held-out data, with its check and thresholds: about {in_seconds(seconds)}")


def _network(fitted: Fitted) -> Deterministic:
    return Deterministic(fitted.model, fitted.predictor.predictor.network_likelihood)
