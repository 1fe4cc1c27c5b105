"""A fit and its tuning are rehearsed on few data: what they will take follows from what these took.

The rehearsal goes the very path of the fit, with its structure, options and accumulators, on a part of the first batch. Data that keep
a clock tell what was spent on a pass over them, which grows with their number; the rest is spent once. Large eigendecompositions
are counted and not done (`counted_decompositions`); what they take follows from two measured ones. So structures need no formula
of their own, whether they belong to the library or not, except for dense work that few data do not show (`Structure.drawn_work`).
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from aftermap.batches import Batch
from aftermap.curvature.passes.products import GGNOperator
from aftermap.curvature.structures.base import find_structure
from aftermap.laplace.dimension import draws_for, effective_dimension
from aftermap.laplace.regression import regression_work
from aftermap.linalg import DenseWork, counted_decompositions
from aftermap.posteriors import GaussianPosterior
from aftermap.posteriors.base import has_noise
from aftermap.progress import showing, waiting

if TYPE_CHECKING:
    from aftermap.laplace.fitted import Fitted
    from aftermap.laplace.laplace import Laplace

__all__ = ["Rehearsal", "decomposition_seconds", "dense_seconds", "rehearse", "seconds_per_input", "tuning_seconds"]

_LEAST, _MOST, _SHARE = 0.35, 2.0, 0.015  # seconds for the rehearsal of a fit: so many, or this share of it
_LEAST_SLOPE = 0.25  # of a proportional growth: clocks are noisy, and some of the work is for each example
_GROWTH = 4  # from one piece of the batch to the next
_TUNED = (8, 48)  # examples of the two rehearsals of a tuning
_MATCHED, _TRAINING, _VALIDATION = 300, 500, 1000  # the most data that tunings look at
# The products that find an effective dimension are with two vectors and go over batches of so many examples, at most so many times.
_MATCHED_BATCH, _MATCHED_STEPS = 50, 25
_MATCHED_PAIRS = 5  # Further products count as so many of these: noise, and eight draws of the posterior.
_SMALL_MATRIX, _LARGE_MATRIX = 128, 512  # widths whose decompositions are measured


@dataclass(frozen=True)
class Rehearsal:
    """What a fit, its tuning and its predictions are expected to take, and to hold.

    Attributes:
        fit: The seconds of the fit, with its decompositions.
        tuning: The seconds of the tuning.
        prediction: The seconds of the prediction of one input.
        bytes: The memory of the factors and of the posterior.
        n_params: The number of parameters.
        n_outputs: How many numbers the network returns for one datum.
    """

    fit: float
    tuning: float
    prediction: float
    bytes: float
    n_params: int
    n_outputs: int


class _ClockedData:
    """Some examples of a batch as a data set, which notes how long they took in each pass over it.

    Two single ones go before them: what is done seldom, such as a check of the layers on the first two batches, is done with those in
    the first pass.

    Attributes:
        passes: The seconds of every pass that was gone through to its end.
        singles: The seconds that the single ones took in later passes, where they stand for nothing.
    """

    def __init__(self, batch: Batch, size: int):
        self.parts = [batch.take(torch.arange(n)) for n in (1, 1, size)]
        self.passes: list[float] = []
        self.singles = 0.0

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        first = time.perf_counter()
        for single in self.parts[:-1]:
            yield _as_tuple(single)
        start = time.perf_counter()
        self.singles += start - first if self.passes else 0.0
        yield _as_tuple(self.parts[-1])
        self.passes.append(time.perf_counter() - start)


def _as_tuple(batch: Batch) -> tuple[Any, ...]:
    return (batch.inputs, batch.targets) if batch.weight is None else (batch.inputs, batch.targets, batch.weight)


@dataclass(frozen=True)
class _Spent:
    """What a piece of work took: on each pass over the data, on everything else, and on decompositions that it did not do."""

    passes: list[float]
    rest: float
    decompositions: float

    @property
    def total(self) -> float:
        return sum(self.passes) + self.rest


def _spent(work: Callable[[], Any], data: _ClockedData) -> _Spent:
    start = time.perf_counter()
    with counted_decompositions() as widths:
        work()
    total = time.perf_counter() - start
    rest = total - sum(data.passes) - data.singles
    return _Spent(list(data.passes), max(0.0, rest), decomposition_seconds(widths))


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Inside, no warning is shown and no bar, and the random state is restored afterwards."""
    with warnings.catch_warnings(), showing(False), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        yield


def rehearse(
    laplace: Laplace,
    batch: Batch,
    n_data: int,
    *,
    validation: int | None = None,
    tuned: bool = True,
    fetch: float = 0.0,
) -> Rehearsal:
    """Rehearses a fit and its tuning on some examples.

    Args:
        laplace: The approximation as it will be fitted; it stays as it is.
        batch: The first batch of the training data.
        n_data: The number of training data.
        validation: The number of validation data that it will be tuned on; None tunes without them.
        tuned: Whether it will be tuned.
        fetch: The seconds that a batch takes to be loaded.
    """
    own = copy(laplace)
    with waiting("estimating the cost"), _unnoticed():
        _fit(own, _ClockedData(batch, 1))  # what is done once in a process is not measured
        points: list[tuple[int, _Spent]] = []
        size = 1
        while True:
            data = _ClockedData(batch, size)
            points.append((size, _spent(functools.partial(_fit, own, data), data)))
            seconds = _fit_seconds(own, points, batch.size, n_data)
            seconds += len(points[-1][1].passes) * fetch * n_data / batch.size
            most = max(_LEAST, min(_MOST, _SHARE * seconds))
            larger = _next_size(points, batch.size, most)
            if larger < min(2 * size, batch.size) or larger == size:
                break
            size = larger
        each = _seconds_per_prediction(own, batch, data, n_data / size, min(0.5 * most, 1.0))
        each += _missing_directions(own, size, n_data)
        tuning = _tuning_seconds(own, batch, n_data, validation, each, most) if tuned else 0.0
    held = sum(t.numel() * t.element_size() for b in own.factors.blocks for t in b.tensors().values())
    return Rehearsal(seconds, tuning, each, 3.0 * held, own.factors.n_params, own.factors.n_outputs)


def _fit(laplace: Laplace, data: _ClockedData) -> None:
    device = next(laplace.model.parameters()).device
    laplace.fit(data, progress=False, generator=torch.Generator(device).manual_seed(0))


def _sizes(most: int) -> Iterator[int]:
    """Yields the sizes of the pieces that are tried: 1, 4, 16 and so on, up to the whole batch."""
    size = 1
    while size < most:
        yield size
        size *= _GROWTH
    yield most


def _next_size(points: Sequence[tuple[int, _Spent]], whole: int, most: float) -> int:
    """Returns the next piece of a batch: a few examples, then as many as take no longer than ``most``; the last one again at the end."""
    size, last = points[-1]
    if len(points) == 1:
        return min(_GROWTH, whole) if last.total < _MOST else size
    if len(points) > 2:
        return size
    slope = _slope([(n, sum(spent.passes)) for n, spent in points])
    return min(whole, int(size + (most - last.total) / max(slope, 1e-9)))


def _for_batch(points: Sequence[tuple[int, float]], size: int) -> float:
    """Returns the seconds of a whole batch by a line through the last two pieces of it; of the first one where that is all."""
    here, last = points[-1]
    if here == size or len(points) == 1:
        return last * size / here
    return last + _slope(points) * (size - here)


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """Returns the seconds that each further example takes, by the last two pieces."""
    (before, former), (here, last) = points[-2:]
    return max(_LEAST_SLOPE * last / here, (last - former) / (here - before))


def _fit_seconds(laplace: Laplace, points: Sequence[tuple[int, _Spent]], batch: int, n_data: int) -> float:
    """Returns the seconds of a fit on all data, from fits on pieces of the first batch."""
    took = points[-1][1]

    def passes(these: slice, examples: int) -> float:
        """Returns the seconds of some of the passes over so many examples. How many there are may depend on the data: the last piece tells."""
        count = len(took.passes[these])
        each = [(n, sum(spent.passes[these]) / max(1, len(spent.passes[these]))) for n, spent in points]
        return count * _for_batch(each, batch) * examples / batch

    work_of = find_structure(laplace.structure).drawn_work
    if work_of is None:
        return took.rest + took.decompositions + passes(slice(None), n_data)
    drawn = min(laplace.subset_size, n_data)
    work = work_of(laplace.factors.n_params, drawn * _vectors(laplace), laplace.rank)
    return took.rest + passes(slice(None, -1), n_data) + passes(slice(-1, None), drawn) + dense_seconds(work)


def _vectors(laplace: Laplace) -> int:
    """Returns the number of vectors that are propagated back for a datum."""
    factors = laplace.factors
    return laplace.base_likelihood.columns(factors.n_outputs) if factors.curvature == "exact" else 1


def _missing_directions(laplace: Laplace, size: int, n_data: int) -> float:
    """Returns the seconds of a prediction for the directions that a fit on drawn examples has, and its rehearsal has not."""
    if find_structure(laplace.structure).drawn_work is None:
        return 0.0
    most = min(math.inf if laplace.rank is None else laplace.rank, laplace.factors.n_params)
    there, here = (min(most, min(laplace.subset_size, n) * _vectors(laplace)) for n in (n_data, size))
    return dense_seconds(DenseWork(laplace.factors.n_outputs * laplace.factors.n_params * (there - here)))


def _seconds_per_prediction(laplace: Laplace, batch: Batch, data: _ClockedData, times: float, most: float) -> float:
    """Returns the seconds of one prediction, as which passes over the data count where the posterior needs them."""
    noted: list[tuple[float, int]] = []
    before = len(data.passes)

    def predict(inputs: Any, size: int) -> None:
        del data.passes[before:]
        laplace.predict(inputs)
        noted.append((sum(data.passes[before:]), size))

    each = _grown(predict, batch, max(0.1, min(1.0, most)))
    in_passes, size = noted[-1]
    return each + (times - 1) * in_passes / size


def seconds_per_input(predictor: Any, batch: Batch, options: Mapping[str, Any], most: float = 0.5) -> float:
    """Returns the seconds that the prediction of one input takes, measured on some of a batch.

    Args:
        predictor: What predicts.
        batch: The inputs.
        options: The options of ``predict``; a generator among them is left alone.
        most: About how many seconds the measurement may take; larger pieces of the batch are tried as long as they fit.
    """
    options = {**options, "generator": None}
    with torch.random.fork_rng():
        return _grown(lambda inputs, _: predictor.predict(inputs, **options), batch, most)


def tuning_seconds(laplace: Laplace, batch: Batch, validation: int) -> float:
    """Returns the seconds that the tuning of a fitted approximation on held-out data takes, rehearsed on some of a batch.

    Args:
        laplace: The approximation, which stays as it is.
        batch: The first batch of the held-out data.
        validation: The number of held-out data.
    """
    own = copy(laplace)
    with _unnoticed():
        each = _grown(lambda inputs, _: own.predict(inputs), batch, 0.2)
        return _tuning_seconds(own, batch, int(own.n_data), validation, each, _LEAST)


def _grown(predict: Callable[[Any, int], Any], batch: Batch, most: float) -> float:
    """Returns the seconds for one example in a whole batch, from pieces of it that take no longer than ``most`` together."""

    def timed(size: int) -> float:
        inputs = batch.take(torch.arange(size)).inputs
        start = time.perf_counter()
        predict(inputs, size)
        return time.perf_counter() - start

    timed(1)  # the network is looked at once
    points: list[tuple[int, float]] = []
    for size in _sizes(batch.size):
        seconds = timed(size)
        if not points and seconds > most:  # the only piece: a machine that is busy for a moment must not decide
            seconds = min(seconds, timed(size))
        points.append((size, seconds))
        following = _for_batch(points[-2:], _GROWTH * size) if len(points) > 1 else 2 * points[-1][1]
        if (len(points) > 1 or points[0][1] > most) and sum(t for _, t in points) + following > most:
            break
    return _for_batch(points, batch.size) / batch.size


def _tuning_seconds(
    laplace: Laplace, batch: Batch, n_data: int, validation: int | None, prediction: float, most: float
) -> float:
    """Returns the seconds of the tuning: a line through two sizes, up to the number of data that tunings look at.

    Where one size takes long already, every further datum counts as a prediction.
    """
    fitted = laplace.fitted
    regression = has_noise(laplace.base_likelihood)
    looked_at, work = n_data, DenseWork()
    if regression:
        own = [p.numel() for p in laplace.model.parameters() if p.requires_grad]
        looked_at, work = regression_work(n_data, laplace.factors.n_outputs, max(sum(own), laplace.factors.n_params))
    elif validation is not None:
        looked_at = min(validation, _VALIDATION)
    else:
        posterior = laplace.posterior
        if isinstance(posterior, GaussianPosterior) and not posterior.has_every_term:
            return _matching_seconds(laplace, posterior, batch, n_data) + min(n_data, _TRAINING) * prediction
        looked_at = min(n_data, _TRAINING)
    points: list[tuple[int, _Spent]] = []
    for size in _TUNED:
        size = min(size, batch.size)
        if points and (size == points[0][0] or points[0][1].total > most):
            break
        data = _ClockedData(batch, size)
        own_fit = replace(fitted, data=data)

        def tune(own_fit: Fitted = own_fit, data: _ClockedData = data) -> None:
            laplace.fitted = own_fit
            laplace.tune(None if validation is None else [_as_tuple(data.parts[-1])])

        points.append((size, _spent(tune, data)))
    size, last = points[-1]
    each = prediction if len(points) == 1 else max(0.0, (last.rest - points[0][1].rest) / (size - points[0][0]))
    looked_at = max(looked_at, size) if regression else looked_at
    rest = max(0.0, last.rest + each * (looked_at - size)) + last.decompositions
    return rest + sum(last.passes) * n_data / size + dense_seconds(work)


def _matching_seconds(laplace: Laplace, posterior: GaussianPosterior, batch: Batch, n_data: int) -> float:
    """Returns the seconds in which the effective dimension is found, by the products of one of its batches.

    The passes are those of a Krylov method, whose number grows with the square root of the number of data.
    """

    def operator(size: int) -> GGNOperator:
        some = _as_tuple(batch.take(torch.arange(size)))
        return GGNOperator(laplace.model, [some], laplace.base_likelihood, list(posterior.names))

    size, generator = min(_MATCHED_BATCH, batch.size), torch.Generator().manual_seed(0)
    scale, prior = float(posterior.scale.detach()), posterior.prior.vector(posterior.names)
    effective_dimension(operator(1), prior, scale, steps=1, generator=generator)  # what is done once in a process
    products = operator(size)
    start = time.perf_counter()
    gamma, _, passes = effective_dimension(products, prior, scale, generator=generator)
    one_search = time.perf_counter() - start
    looked_at = min(n_data, _MATCHED)
    more = max(1.0, looked_at / size)
    # A small dimension is found a second time, by more draws; it grows with the data, though slower than they.
    draws, searches = draws_for(gamma.value * math.sqrt(more)), one_search
    if draws > draws_for(math.inf):
        effective_dimension(products, prior, scale, draws=draws, generator=generator)
        searches = time.perf_counter() - start
    each, steps = one_search / (passes + 1), min(_MATCHED_STEPS, passes * math.sqrt(more))
    return each * (steps * searches / one_search + _MATCHED_PAIRS) * more


def dense_seconds(work: DenseWork) -> float:
    """Returns the seconds of dense work on this machine."""
    products = work.products / _products_per_second() if work.products > 0 else 0.0
    return products + decomposition_seconds(work.decompositions)


def decomposition_seconds(widths: Sequence[int]) -> float:
    """Returns the seconds of eigendecompositions: a n² + b n³ through two that were measured, once in a process."""
    if not any(widths):
        return 0.0
    square, cube = _decomposition_costs()
    return sum(square * n**2 + cube * n**3 for n in widths)


@functools.cache
def _decomposition_costs() -> tuple[float, float]:
    small, large = (_eigh_seconds(n) / n**2 for n in (_SMALL_MATRIX, _LARGE_MATRIX))
    cube = max(0.0, (large - small) / (_LARGE_MATRIX - _SMALL_MATRIX))
    return max(0.0, small - cube * _SMALL_MATRIX), cube


def _eigh_seconds(width: int) -> float:
    rows = torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = rows @ rows.mT  # of full rank: others are decomposed sooner
    best = math.inf
    for _ in range(2):
        start = time.perf_counter()
        torch.linalg.eigh(matrix)
        best = min(best, time.perf_counter() - start)
    return best


@functools.cache
def _products_per_second() -> float:
    matrix = torch.ones(_LARGE_MATRIX, _LARGE_MATRIX, dtype=torch.float64)
    best = math.inf
    for _ in range(2):
        start = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - start)
    return _LARGE_MATRIX**3 / max(best, 1e-9)
