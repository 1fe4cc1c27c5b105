"""Which prior, noise and data scale: by the evidence, by the effective dimension, or on validation data."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Subset

from aftermap.batches import check_device, iterate
from aftermap.errors import InputError, StatisticalWarning
from aftermap.laplace.check import CheckReport, check_predictive
from aftermap.laplace.dimension import DimensionResult, is_normalised, match_dimension
from aftermap.laplace.evidence import maximise_evidence
from aftermap.laplace.grid import tune_on_validation
from aftermap.posteriors import GaussianPosterior

if TYPE_CHECKING:
    from aftermap.laplace.laplace import Laplace

__all__ = ["METHODS", "choose_method", "dimension_applies", "reusable", "tune_laplace"]

_CHECKED = 200  # training data on which the matched predictive is compared with the network
METHODS = ("evidence", "lbfgs", "dimension", "validation")


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
