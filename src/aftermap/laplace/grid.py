"""The plain minimum over a grid of prior precisions and data scales, on the predictive log-likelihood of validation data.

(c, τ) and (1, τ/c) differ only by a factor 1/c of the whole covariance. So one pass through the network gives the
covariances for a row of ratios τ/c, and every c costs only the link. The random numbers of the link are the same at every
grid point.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aftermap import checks
from aftermap.batches import Batch
from aftermap.errors import DataError, InputError, NumericalError, StatisticalWarning, warn_caller
from aftermap.models import call_model
from aftermap.params import swapped
from aftermap.posteriors import GaussianPosterior
from aftermap.predictive import PosteriorPredictor, gaussian_prediction, latent_gaussians, samples_prediction
from aftermap.predictive.sampling import weight_samples

__all__ = ["GridResult", "search_grid"]

_EQUAL = 1e-9  # nats of the mean loss, relative to its size, by which no two grid points differ
_FIRST_STAGE = 500  # examples of the coarse stage
_KINDS = ("linearised", "sampling")  # A cheap prediction is made with what was tuned for the exact one.


@dataclass(frozen=True)
class GridResult:
    """What the grid over data scale and precision gave on validation data.

    Attributes:
        data_scale: The best data scale c.
        precision: The best prior precision τ.
        nll: The mean negative log predictive probability at the best point.
        table: A row (c, τ, nll) for every grid point of the last stage.
        n_data: How many validation examples were used.
    """

    data_scale: float
    precision: float
    nll: float
    table: list[tuple[float, float, float]]
    n_data: int

    def __str__(self) -> str:
        return (
            f"negative log-likelihood of {self.n_data:,} validation examples: {self.nll:.4f} at data scale {self.data_scale:.3g} and prior precision "
            f"{self.precision:.3g}, the best of {len(self.table)} points of a grid"
        )


def search_grid(
    predictor: PosteriorPredictor,
    batches: Iterable[Batch],
    base_scale: float,
    *,
    kind: str = "linearised",
    link: str = "auto",
    samples: int = 100,
    precisions: Sequence[float] | None = None,
    scales: Sequence[float] | None = None,
) -> GridResult:
    """Searches a grid of (c, τ) for the least mean negative log predictive probability.

    Args:
        predictor: The model, its posterior (whose prior is replaced by one precision for all) and the likelihood with its noise.
        batches: The validation data.
        base_scale: What multiplies the curvature at c = 1 (1/temperature, 1/σ²).
        kind: The predictive to score: "linearised" or "sampling".
        link: How the linearised predictive turns the Gaussian over logits into probabilities.
        samples: The number of draws that the predictive averages over.
        precisions: The ratios τ/c to try; None searches in two stages, coarse on 500 examples, then fine on all.
        scales: The values of c to try.
    """
    checks.choice("kind", kind, _KINDS)
    _check_grid(precisions=precisions, scales=scales)
    validation = [b for b in batches if b.targets is not None]
    if not validation:
        raise DataError(
            "the validation data are empty or have no targets; pass batches (x, y) that the network has not seen"
        )
    cs = list(scales) if scales is not None else [10 ** (k / 2) for k in range(-4, 9)]
    if precisions is not None:
        ratios = list(precisions)
        result = _stage(predictor, validation, base_scale, ratios, cs, kind, link, samples)
        if _is_flat(result):
            return _undecided(result)
        _warn_at_edge(result, cs, (min(ratios), max(ratios)) if len(ratios) > 2 else (0.0, math.inf))
        return result
    coarse = [10.0**k for k in range(-6, 6)]
    some = _limited(validation, _FIRST_STAGE)
    first = _stage(predictor, some, base_scale, coarse, cs, kind, link, samples)
    if _is_flat(first):
        return _undecided(first)
    centre = math.log10(first.precision / first.data_scale)
    fine = [10 ** (centre + d) for d in (-0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75)]
    near = cs if scales is not None else [first.data_scale * 10 ** (k / 4) for k in range(-4, 5)]
    result = _stage(predictor, validation, base_scale, fine, near, kind, link, samples)
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
        warn_caller(
            f"the best point lies at the edge of the grid ({', '.join(at_edge)}): the posterior wants to be narrower or wider than "
            "the grid allows. Pass scales= and precisions= to widen it, or look whether this posterior helps at all",
            StatisticalWarning,
        )


def _limited(validation: Sequence[Batch], limit: int) -> list[Batch]:
    some, count = [], 0
    for batch in validation:
        some.append(batch)
        count += batch.size
        if count >= limit:
            break
    return some


def _stage(
    predictor: PosteriorPredictor,
    validation: Sequence[Batch],
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
    for batch in validation:
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


def _is_flat(result: GridResult) -> bool:
    """Tells whether no two points of the grid differ by more than rounding."""
    values = [nll for _, _, nll in result.table]
    return len(values) > 1 and max(values) - min(values) <= _EQUAL * (1 + abs(result.nll))


def _undecided(result: GridResult) -> GridResult:
    """Returns the point of the grid that is nearest to data scale and precision one, where the data prefer none."""
    warn_caller(
        f"all {len(result.table)} grid points are equally good on {result.n_data} validation examples, so that these decide nothing: the "
        "posterior has no variance there. Look whether the network is constant, and choose other parameters with params=",
        StatisticalWarning,
    )
    c, precision, nll = min(result.table, key=lambda row: abs(math.log(row[0])) + abs(math.log(row[1])))
    return replace(result, data_scale=c, precision=precision, nll=nll)


def _linearised(
    predictor: PosteriorPredictor,
    posterior: GaussianPosterior,
    variants: Sequence[GaussianPosterior],
    batch: Batch,
    cs: Sequence[float],
    link: str,
    samples: int,
) -> Tensor:
    latents = latent_gaussians(predictor.plan(batch), posterior, batch, variants=variants)
    values = torch.empty(len(variants), len(cs), dtype=torch.float64)
    for i, latent in enumerate(latents):
        for j, c in enumerate(cs):
            prediction = gaussian_prediction(
                predictor.likelihood,
                latent.mean,
                None if latent.cov is None else latent.cov / c,
                latent_var=latent.var / c if latent.cov is None else None,
                link=link,
                samples=samples,
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
