"""The methods that are compared: each makes predictors for a task, one for every validation set that it is shown.

All go through the public interface. A fit is made once where it is expensive, and tuned again on each validation set: curvature and
outputs do not depend on labels that are held out.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import aftermap as am
from aftermap import baselines
from aftermap.errors import AftermapError, InputError
from aftermap.predictive import Prediction
from benchmarks.quality.identity import register_identity
from benchmarks.quality.measure import Made, Numbers, measure, measure_scores
from benchmarks.quality.training import Batches, Prepared

__all__ = ["METHODS", "Method", "Skip"]

SMALL = 1500  # parameters, up to which the grid is run on the full matrix
LARGEST_FULL = 3500  # parameters, up to which the full matrix is decomposed for the evidence
CLASSES, NUMBERS, ALL = ("classification", "binary"), ("regression",), ("classification", "binary", "regression")


class Skip(Exception):
    """A method does not apply to a task, or is not there; the message says why."""


@dataclass(frozen=True)
class Method:
    """A row of the tables.

    Attributes:
        label: What it is called there.
        likelihoods: The likelihoods that it is for.
        run: Gives the numbers of every predictor that it makes.
    """

    label: str
    likelihoods: tuple[str, ...]
    run: Callable[[Prepared, int | None], Iterator[Numbers]]


def _validation_sets(prepared: Prepared, resplits: int | None) -> Iterator[tuple[int, int, Batches]]:
    count = prepared.task.resplits if resplits is None else min(resplits, prepared.task.resplits)
    for n in prepared.task.validation_sizes():
        for split in range(count):
            yield n, split, prepared.validation(n, split)


class _Watch:
    """Processor seconds, and the first words of warnings, of what happens inside."""

    def __enter__(self) -> _Watch:
        self._catcher = warnings.catch_warnings(record=True)
        self._caught = self._catcher.__enter__()
        warnings.simplefilter("always")
        self._start = time.process_time()
        return self

    def __exit__(self, *error: Any) -> None:
        self.seconds = time.process_time() - self._start
        self.warnings = sorted({str(w.message)[:80] for w in self._caught or ()})
        self._catcher.__exit__(*error)

    @property
    def note(self) -> dict[str, Any]:
        return {"warnings": self.warnings} if self.warnings else {}


def _predicting(predictor: Any) -> Callable[[Tensor], Prediction]:
    """Predictions with the same random draws every time."""

    def predict(x: Tensor) -> Prediction:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return predictor.predict(x, generator=torch.Generator().manual_seed(0))

    return predict


def _noise(model: torch.nn.Module, data: Batches) -> float:
    with torch.no_grad():
        squares = torch.cat([(model(x) - y).double().square().flatten() for x, y in data])
    return max(float(squares.mean().sqrt()), 1e-6)


def _network(prepared: Prepared, resplits: int | None) -> Iterator[Numbers]:
    likelihood: Any = prepared.likelihood
    if likelihood == "regression":
        likelihood = am.likelihoods.Gaussian(_noise(prepared.model, prepared.train))
    yield measure(Made(_predicting(baselines.Deterministic(prepared.model, likelihood))), prepared)


def _temperature(prepared: Prepared, resplits: int | None) -> Iterator[Numbers]:
    for n, split, data in _validation_sets(prepared, resplits):
        with _Watch() as watch:
            scaled = baselines.TemperatureScaling(prepared.model, prepared.likelihood).fit(data)
        note = watch.note | {"temperature": round(scaled.temperature, 4)}
        yield measure(Made(_predicting(scaled), n, split, watch.seconds, note), prepared)


def _validation_noise(prepared: Prepared, resplits: int | None) -> Iterator[Numbers]:
    for n, split, data in _validation_sets(prepared, resplits):
        noisy = baselines.Deterministic(prepared.model, am.likelihoods.Gaussian(_noise(prepared.model, data)))
        yield measure(Made(_predicting(noisy), n, split), prepared)


def _described(laplace: Any) -> dict[str, Any]:
    """What a fit chose, where it can be told."""
    note: dict[str, Any] = {"structure": laplace.structure}
    if laplace.params != "all":
        note["params"] = str(laplace.params)
    note["data_scale"] = float(f"{laplace.data_scale:.4g}")
    if laplace.tuning is not None:
        note["tuning"] = type(laplace.tuning).__name__
    return note


def _default_with_labels(prepared: Prepared, resplits: int | None) -> Iterator[Numbers]:
    """`am.fit` with validation data. Where a fit is cheap it is made for every set, elsewhere once and tuned on the others."""
    laplace = None
    for n, split, data in _validation_sets(prepared, resplits):
        with _Watch() as watch:
            if laplace is None or prepared.task.group != "image":
                laplace = am.fit(
                    prepared.model, prepared.likelihood, prepared.train, data, verbose=False, **prepared.task.options()
                )
                call = "fit"
            else:
                laplace.tune(data)
                call = "tune"
        note = watch.note | _described(laplace) | {"call": call}
        yield measure(Made(_predicting(laplace), n, split, watch.seconds, note), prepared)


def _default_without_labels(prepared: Prepared, resplits: int | None) -> Iterator[Numbers]:
    with _Watch() as watch:
        laplace = am.fit(
            prepared.model, prepared.likelihood, prepared.train, None, verbose=False, **prepared.task.options()
        )
    note = watch.note | _described(laplace)
    yield measure(Made(_predicting(laplace), seconds=watch.seconds, note=note), prepared)


def _by_grid(laplace: am.Laplace, data: Batches) -> None:
    """The plain minimum of the validation NLL over a grid, under the name that this version has for it."""
    try:
        laplace.tune(data, method="grid")
    except InputError as error:
        if "method='grid' is not known" not in str(error):
            raise
        laplace.tune(data, method="validation")


def _tuned(
    structure: Callable[[Prepared], str], tune: Callable[[am.Laplace, Batches], Any]
) -> Callable[[Prepared, int | None], Iterator[Numbers]]:
    """One fit with a given structure, tuned on every validation set."""

    def run(prepared: Prepared, resplits: int | None) -> Iterator[Numbers]:
        with _Watch() as fitting:
            laplace = am.Laplace(
                prepared.model, prepared.likelihood, structure=structure(prepared), **prepared.task.options()
            ).fit(prepared.train, progress=False)
        for n, split, data in _validation_sets(prepared, resplits):
            with _Watch() as watch:
                tune(laplace, data)
            note = watch.note | _described(laplace)
            yield measure(Made(_predicting(laplace), n, split, fitting.seconds + watch.seconds, note), prepared)

    return run


def _size(prepared: Prepared) -> int:
    return sum(p.numel() for p in prepared.model.parameters())


def _grid_structure(prepared: Prepared) -> str:
    return "full" if _size(prepared) <= SMALL else "kron"


def _identity_structure(prepared: Prepared) -> str:
    return register_identity()


def _full_evidence(prepared: Prepared, resplits: int | None) -> Iterator[Numbers]:
    if _size(prepared) > LARGEST_FULL:
        raise Skip(f"the full matrix of {_size(prepared):,} parameters is not decomposed here")
    with _Watch() as watch:
        laplace = am.Laplace(prepared.model, prepared.likelihood, structure="full")
        laplace.fit(prepared.train, progress=False).tune(method="evidence")
    note = watch.note | _described(laplace)
    yield measure(Made(_predicting(laplace), seconds=watch.seconds, note=note), prepared)


def _ensemble(prepared: Prepared, resplits: int | None) -> Iterator[Numbers]:
    """Five networks; the noise of a regression is that of the ensemble's mean on the training data."""
    if not prepared.task.ensemble:
        raise Skip("four more trainings would take too long")
    members, seconds = prepared.members(5)
    likelihood: Any = prepared.likelihood
    if likelihood == "regression":
        likelihood = am.likelihoods.Gaussian(_noise(_Mean(members), prepared.train))
    yield measure(Made(_predicting(baselines.Ensemble(members, likelihood)), seconds=seconds), prepared)


class _Mean(torch.nn.Module):
    def __init__(self, members: list[torch.nn.Module]):
        super().__init__()
        self.members = torch.nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members]).mean(0)


def _laplace_torch(prepared: Prepared, resplits: int | None) -> Iterator[Numbers]:
    """laplace-torch as its readme shows it: the last layer with Kronecker factors, the prior by the marginal likelihood.

    A regression follows its regression example, which finds the noise by the marginal likelihood, too.
    """
    if importlib.util.find_spec("laplace") is None:
        raise Skip("laplace-torch is not installed; `make bench-quality` runs where it is")
    if prepared.likelihood == "binary":
        raise Skip("laplace-torch has no likelihood for one logit")
    from laplace import Laplace

    with _Watch() as watch:
        model = deepcopy(prepared.model)  # it leaves hooks
        fitted = Laplace(model, prepared.likelihood)
        fitted.fit(prepared.train)
        if prepared.likelihood == "regression":
            _marginal_likelihood(fitted)
        else:
            fitted.optimize_prior_precision(method="marglik")

    def predict(x: Tensor) -> Prediction:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            result = fitted(x)
        if prepared.likelihood == "regression":
            mean, variance = result[0].detach(), result[1].detach().reshape(len(x), -1)
            noise = (fitted.sigma_noise.detach() ** 2).expand_as(variance)
            return Prediction("regression", mean, variance, noise, variance + noise, link="glm")
        p = result.detach()
        p = p / p.sum(-1, keepdim=True)
        entropy = torch.special.entr(p).sum(-1)
        # Its probit link gives probabilities only: there is no mutual information.
        return Prediction("classification", p, torch.zeros_like(entropy), entropy, entropy, link="probit")

    yield measure(Made(predict, seconds=watch.seconds, note=watch.note), prepared)


def _marginal_likelihood(fitted: Any) -> None:
    log_prior, log_noise = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    optimiser = torch.optim.Adam([log_prior, log_noise], lr=1e-1)
    for _ in range(100):
        optimiser.zero_grad()
        loss = -fitted.log_marginal_likelihood(log_prior.exp(), log_noise.exp())
        loss.backward()
        optimiser.step()


def _detector(name: str) -> Callable[[Prepared, int | None], Iterator[Numbers]]:
    def run(prepared: Prepared, resplits: int | None) -> Iterator[Numbers]:
        kind = getattr(baselines, name, None)
        if kind is None:
            raise Skip(f"this version has no baselines.{name}")
        with _Watch() as watch:
            try:
                detector = kind(prepared.model).fit(prepared.train)
            except AftermapError as error:
                raise Skip(str(error)) from error
        yield measure_scores(detector.score, watch.seconds, prepared)

    return run


METHODS: dict[str, Method] = {
    "network": Method("network", ALL, _network),
    "temperature": Method("temperature scaling", CLASSES, _temperature),
    "validation_noise": Method("network, noise from validation data", NUMBERS, _validation_noise),
    "fit": Method("am.fit with labels", ALL, _default_with_labels),
    "fit_unlabelled": Method("am.fit without labels", ALL, _default_without_labels),
    "grid": Method("minimum over a grid", ALL, _tuned(_grid_structure, _by_grid)),
    "identity": Method("identity curvature", CLASSES, _tuned(_identity_structure, lambda la, data: la.tune(data))),
    "full_evidence": Method("full matrix, evidence", NUMBERS, _full_evidence),
    "laplace_torch": Method("laplace-torch, default", ALL, _laplace_torch),
    "ensemble": Method("ensemble of 5", ALL, _ensemble),
    **{
        name.lower(): Method(label, ("classification",), _detector(name))
        for name, label in {
            "Energy": "energy",
            "GEN": "GEN",
            "KNN": "nearest neighbours",
            "Mahalanobis": "Mahalanobis",
            "RelativeMahalanobis": "relative Mahalanobis",
            "ViM": "ViM",
        }.items()
    },
}
