"""Which prior, noise and data scale: by the evidence, by the effective dimension, or on validation data.

Tuning on validation data: the prior's precision τ and the data's scale c, on the predictive that will be used.

(c, τ) and (1, τ/c) differ only by a factor 1/c of the whole covariance (MATH 1.5). So one pass through the network gives the
covariances for a row of ratios τ/c, and every c costs only the link. The random numbers of the link are the same at every
grid point.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from aftermap.batches import Batch, iterate
from aftermap.errors import DataError, InputError, NumericalError, StatisticalWarning
from aftermap.laplace.check import CheckReport, check_predictive
from aftermap.laplace.dimension import DimensionResult, is_normalised, match_dimension
from aftermap.laplace.evidence import maximise_evidence
from aftermap.models import call_model, check_device
from aftermap.params import swapped
from aftermap.posteriors import GaussianPosterior
from aftermap.predictive import PosteriorPredictor, gaussian_prediction, latent_gaussians, samples_prediction
from aftermap.predictive.predictor import KINDS
from aftermap.predictive.sampling import weight_samples

if TYPE_CHECKING:
    from aftermap.laplace.laplace import Laplace

__all__ = [
    "METHODS",
    "GridResult",
    "choose_method",
    "dimension_applies",
    "reusable",
    "tune_laplace",
    "tune_on_validation",
]

_CHECKED = 200  # training data on which the matched predictive is compared with the network
METHODS = ("evidence", "lbfgs", "dimension", "validation")


@dataclass(frozen=True)
class GridResult:
    """What the grid gave.

    Attributes:
        data_scale: best c.
        precision: best τ.
        nll: mean negative log predictive probability at the best point.
        table: (c, τ, nll) for every grid point of the last stage.
        n_data: validation examples used.
    """

    data_scale: float
    precision: float
    nll: float
    table: list[tuple[float, float, float]]
    n_data: int


def tune_on_validation(
    predictor: PosteriorPredictor,
    batches: Iterable[Batch],
    base_scale: float,
    *,
    kind: str = "linearised",
    link: str = "auto",
    samples: int = 100,
    precisions: Sequence[float] | None = None,
    scales: Sequence[float] | None = None,
    first_stage: int = 500,
) -> GridResult:
    """Grid search over (c, τ) on the mean negative log predictive probability.

    Args:
        predictor: model, posterior (its prior is replaced by one precision for all) and likelihood with its noise.
        batches: validation data.
        base_scale: what multiplies the curvature at c = 1 (1/temperature, 1/σ²).
        kind: linearised or sampling.
        link: of the linearised predictive.
        samples: of the link, or weight samples.
        precisions: ratios τ/c to try; None: two stages, coarse on ``first_stage`` examples, then fine on all.
        scales: values of c to try.
        first_stage: examples of the coarse stage.
    """
    held = [b for b in batches if b.targets is not None]
    if not held:
        raise DataError("the validation data are empty or have no targets")
    if kind not in KINDS:
        raise InputError(f"kind={kind!r} is not known; allowed are {', '.join(map(repr, KINDS))}")
    _check_grid(precisions=precisions, scales=scales)
    cs = list(scales) if scales is not None else [10 ** (k / 2) for k in range(-4, 9)]
    if precisions is not None:
        ratios = list(precisions)
        result = _stage(predictor, held, base_scale, ratios, cs, kind, link, samples)
        _warn_at_edge(result, cs, (min(ratios), max(ratios)) if len(ratios) > 2 else (0.0, math.inf))
        return result
    coarse = [10.0**k for k in range(-6, 6)]
    some = _limited(held, first_stage)
    first = _stage(predictor, some, base_scale, coarse, cs, kind, link, samples)
    centre = math.log10(first.precision / first.data_scale)
    fine = [10 ** (centre + d) for d in (-0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75)]
    near = cs if scales is not None else [first.data_scale * 10 ** (k / 4) for k in range(-4, 5)]
    result = _stage(predictor, held, base_scale, fine, near, kind, link, samples)
    # The fine stage may look a little beyond the coarse one.
    _warn_at_edge(result, cs, (coarse[0] * 10**0.25, coarse[-1] / 10**0.25))
    return result


def _check_grid(**grids: Sequence[float] | None) -> None:
    for name, values in grids.items():
        if values is not None and (not len(values) or not all(math.isfinite(v) and v > 0 for v in values)):
            raise InputError(f"{name}={list(values)!r} must be some positive and finite numbers")


def _warn_at_edge(result: GridResult, cs: Sequence[float], ratios: tuple[float, float]) -> None:
    at_edge = []
    if len(cs) > 2 and (result.data_scale <= min(cs) or result.data_scale >= max(cs)):
        at_edge.append(f"data scale {result.data_scale:g}")
    ratio = result.precision / result.data_scale
    if ratio <= ratios[0] * (1 + 1e-9) or ratio >= ratios[1] * (1 - 1e-9):
        at_edge.append(f"precision ratio {ratio:g}")
    if at_edge:
        warnings.warn(
            f"the best point lies at the edge of the grid ({', '.join(at_edge)}): the posterior wants to be narrower or wider than "
            "the grid allows. Pass scales= and precisions= to widen it, or look whether this posterior helps at all",
            StatisticalWarning,
            stacklevel=4,
        )


def _limited(held: Sequence[Batch], limit: int) -> list[Batch]:
    some, count = [], 0
    for batch in held:
        some.append(batch)
        count += batch.size
        if count >= limit:
            break
    return some


def _stage(
    predictor: PosteriorPredictor,
    held: Sequence[Batch],
    base_scale: float,
    ratios: Sequence[float],
    cs: Sequence[float],
    kind: str,
    link: str,
    samples: int,
) -> GridResult:
    posterior = predictor.posterior
    if not isinstance(posterior, GaussianPosterior):
        raise InputError(f"a grid over priors needs a Gaussian posterior in blocks, got a {type(posterior).__name__}")
    variants = [posterior.with_prior(r, scale=base_scale) for r in ratios]
    sums = torch.zeros(len(ratios), len(cs), dtype=torch.float64)
    count = 0
    for batch in held:
        count += batch.size
        if kind == "linearised":
            sums += _linearised(predictor, posterior, variants, batch, cs, link, samples)
        else:
            sums += _sampled(predictor, variants, batch, cs, samples)
    means = sums / count
    table = [(c, ratio * c, float(means[i, j])) for i, ratio in enumerate(ratios) for j, c in enumerate(cs)]
    # A predictive that is not finite somewhere can never be the best.
    best = min(table, key=lambda row: row[2] if math.isfinite(row[2]) else math.inf)
    if not math.isfinite(best[2]):
        raise NumericalError(
            f"the predictive log-likelihood of the validation data is not finite at any of {len(table)} grid points; "
            "look at the outputs of the network on these data, and widen the grid with precisions= and scales="
        )
    return GridResult(best[0], best[1], best[2], table, count)


def _linearised(
    predictor: PosteriorPredictor,
    posterior: GaussianPosterior,
    variants: Sequence[GaussianPosterior],
    batch: Batch,
    cs: Sequence[float],
    link: str,
    samples: int,
) -> Tensor:
    found = latent_gaussians(predictor.plan(batch), posterior, batch, variants=variants)
    values = torch.empty(len(variants), len(cs), dtype=torch.float64)
    for i, latent in enumerate(found):
        for j, c in enumerate(cs):
            prediction = gaussian_prediction(
                predictor.likelihood,
                latent.mean,
                None if latent.cov is None else latent.cov / c,
                latent_var=latent.var / c if latent.cov is None else None,
                link=link,
                samples=samples,
                generator=torch.Generator().manual_seed(0),
            )
            values[i, j] = -prediction.log_prob(batch.targets).sum().to(torch.float64)
    return values


def _sampled(
    predictor: PosteriorPredictor,
    variants: Sequence[GaussianPosterior],
    batch: Batch,
    cs: Sequence[float],
    samples: int,
) -> Tensor:
    values = torch.empty(len(variants), len(cs), dtype=torch.float64)
    for i, variant in enumerate(variants):
        drawn: list[list[Tensor]] = [[] for _ in cs]
        for weights in weight_samples(variant, samples, torch.Generator().manual_seed(0)):
            for j, c in enumerate(cs):
                # A covariance divided by c is the same draw with a deviation divided by √c.
                near = {n: variant.mean[n] + (w - variant.mean[n]) / math.sqrt(c) for n, w in weights.items()}
                with torch.no_grad(), swapped(predictor.model, near):
                    drawn[j].append(call_model(predictor.model, batch.inputs))
        for j, outputs in enumerate(drawn):
            prediction = samples_prediction(predictor.likelihood, torch.stack(outputs))
            values[i, j] = -prediction.log_prob(batch.targets).sum().to(torch.float64)
    return values


@dataclass(frozen=True)
class _Chained:
    parts: tuple[Iterable[Any], ...]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.parts)


def reusable(data: Iterable[Any], before: Iterable[Any] | None = None, *, update: bool = False) -> Iterable[Any] | None:
    """The data of a fit if they can be passed over again; None for a generator, which is empty by now.

    Args:
        data: of this fit.
        before: of the fit that it adds to.
        update: whether it adds to one.

    >>> reusable([1]), reusable(iter([1])), list(reusable([2], [1], update=True))
    ([1], None, [1, 2])
    """
    if isinstance(data, Iterator) or (update and before is None):
        return None
    return _Chained((before, data)) if update and before is not None else data


def dimension_applies(laplace: Laplace) -> bool:
    """Whether the evidence would mislead and the effective dimension can be matched instead.

    That is: normalisation layers, several blocks that know nothing of each other, and the data of the fit at hand.
    """
    posterior = laplace.posterior
    blocks = len(posterior.blocks) if isinstance(posterior, GaussianPosterior) else 0
    return blocks > 1 and laplace.data is not None and is_normalised(laplace.model)


def choose_method(laplace: Laplace, val_loader: Iterable[Any] | None, method: str | None) -> str:
    """The method to tune with: the one asked for, or the default.

    Raises:
        InputError: an unknown method, or validation without data.
    """
    if method is None:
        if val_loader is not None:
            return "validation"
        return "dimension" if dimension_applies(laplace) else "evidence"
    method = "evidence" if method == "mackay" else method
    if method not in METHODS:
        listed = ", ".join(map(repr, METHODS[:-1]))
        raise InputError(f"method={method!r} is not known; allowed are {listed} and {METHODS[-1]!r}")
    if method == "validation" and val_loader is None:
        raise InputError("method='validation' needs validation data: tune(val_loader, method='validation')")
    return method


def tune_laplace(
    laplace: Laplace,
    data: Iterable[Any] | None,
    *,
    method: str | None,
    kind: str,
    link: str,
    samples: int,
    per_layer: bool,
    noise: bool,
    precisions: Sequence[float] | None,
    scales: Sequence[float] | None,
    generator: torch.Generator | None,
) -> None:
    """Sets what `Laplace.tune` finds; the arguments are described there. After an error the old values are back."""
    chosen = choose_method(laplace, data, method)
    before = laplace.observation, laplace.posterior, laplace.data_scale
    try:
        if chosen == "validation":
            assert data is not None  # choose_method
            _on_validation(laplace, data, kind, link, samples, noise, precisions, scales)
            return
        if isinstance(laplace.tuning, DimensionResult):
            # The evidence is that of the data, not of the width that was matched to them.
            laplace.data_scale /= laplace.tuning.factor
            laplace.move(None)
        how = "lbfgs" if chosen == "lbfgs" or laplace.damping != "exact" else "mackay"
        found = maximise_evidence(
            laplace.posterior,
            laplace.factors,
            laplace.observation,
            laplace.power,
            method=how,
            per_layer=per_layer,
            noise=noise,
        )
        laplace.move(found.precision, level=found.level)
        laplace.tuning = found
        if chosen == "dimension":
            _by_dimension(laplace, data, generator)
    except Exception:
        laplace.observation, laplace._posterior, laplace.data_scale = before
        raise


def _by_dimension(laplace: Laplace, data: Iterable[Any] | None, generator: torch.Generator | None) -> None:
    data = laplace.data if data is None else data
    if data is None:
        raise InputError(
            "method='dimension' passes over the training data again, and they are not at hand (a loaded posterior, or a fit on a "
            "generator): tune(train_loader, method='dimension')"
        )
    laplace.check_weights()
    device, dtype = check_device(laplace.model)
    found = match_dimension(
        laplace.model,
        iterate(data, device=device, dtype=dtype, unpack=laplace.unpack),
        laplace.observation.base,
        laplace.posterior,
        laplace.data_scale,
        generator=torch.Generator().manual_seed(0) if generator is None else generator,
    )
    laplace.data_scale = found.data_scale
    laplace.move({n: found.factor * p for n, p in laplace.posterior.prior.precision.items()})
    laplace.tuning = found
    checked = check_predictive(
        laplace, iterate(data, device=device, dtype=dtype, unpack=laplace.unpack), limit=_CHECKED
    )
    if checked.collapsed:
        _warn_too_wide(laplace, checked, data)


def _warn_too_wide(laplace: Laplace, checked: CheckReport, data: Iterable[Any]) -> None:
    """A fit on a part of the training data, or a network that knows them by heart: the data themselves do not tell which."""
    assert isinstance(laplace.tuning, DimensionResult)
    seen, held, counted = laplace.n_data, _held(data), laplace.data_scale / laplace.tuning.factor
    each = "" if counted == 1 else f", each counted as {counted:g}"
    hint = f" (the loader's dataset holds {held:,})" if held is not None and held > seen else ""
    warnings.warn(
        f"matched to the effective dimension of the {seen:g} data of this fit{each}, the predictive is much less sure of {checked.n_data} of "
        f"them than the network itself ({checked.message}). Either the network was trained on more data than these{hint}: then say how "
        f"many, Laplace(..., data_scale=N / {seen:g}) with N the number that it was trained on, or fit on all of them. Or it has learned "
        "few data by heart, and the wider predictive may be the better one. Validation data decide: tune(val_loader)",
        StatisticalWarning,
        stacklevel=2,
    )


def _held(data: Iterable[Any]) -> int | None:
    """The size of the dataset behind a loader, and behind a subset of it, if that can be known."""
    dataset = getattr(data, "dataset", None)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return len(dataset) if isinstance(dataset, Sized) else None


def _on_validation(
    laplace: Laplace,
    val_loader: Iterable[Any],
    kind: str,
    link: str,
    samples: int,
    noise: bool,
    precisions: Sequence[float] | None,
    scales: Sequence[float] | None,
) -> None:
    laplace.check_weights()
    if noise and laplace.observation.tunable:
        # The noise follows from the training residuals; the grid then decides on the rest.
        how = "mackay" if laplace.damping == "exact" else "lbfgs"
        found_noise = maximise_evidence(
            laplace.posterior, laplace.factors, laplace.observation, laplace.power, method=how, per_layer=False
        )
        laplace.move(None, level=found_noise.level)
    device, dtype = check_device(laplace.model)
    batches = iterate(val_loader, device=device, dtype=dtype, unpack=laplace.unpack)
    base = float(laplace.observation.curvature_scale()) / laplace.temperature
    found = tune_on_validation(
        laplace.predictor, batches, base, kind=kind, link=link, samples=samples, precisions=precisions, scales=scales
    )
    laplace.data_scale = found.data_scale
    laplace.move(found.precision)
    laplace.tuning = found
