"""The methods that are compared: each makes predictors for a task, one for every validation set that it is shown.

All go through the public interface. A fit is made once where it is expensive, and tuned again on each validation set: curvature and
outputs do not depend on labels that are held out.
"""

from __future__ import annotations

import importlib.util
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import aftermap as am
from aftermap import baselines
from aftermap.errors import AftermapError
from aftermap.predictive import Prediction
from benchmarks.quality.identity import register_identity
from benchmarks.quality.kept import KeptOutputs
from benchmarks.quality.measure import Made, Numbers, measure, measure_scores
from benchmarks.quality.training import Batches, Prepared

__all__ = ["METHODS", "Method", "Skip"]

PATIENCE = 60  # seconds that another library is given for a task
SMALL = 1500  # parameters, up to which the grid is run on the full matrix
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
    """Predictions as a user gets them, without the warnings."""

    def predict(x: Tensor) -> Prediction:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return predictor.predict(x)

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
    """`am.fit` with validation data: called once, with the largest validation set, then tuned on each.

    The curvature does not depend on validation data, and the outputs of a classifier are kept, so that a tuning on another set costs
    little; `seconds` are those of the call.
    """
    sets = list(_validation_sets(prepared, resplits))
    with _Watch() as fitting:
        laplace = am.fit(
            prepared.model, prepared.likelihood, prepared.train, sets[-1][2], verbose=False, **prepared.task.options()
        )
    yield from _retuned(prepared, laplace, sets, fitting.seconds)


def _retuned(
    prepared: Prepared, laplace: am.Laplace, sets: list[tuple[int, int, Batches]], seconds: float
) -> Iterator[Numbers]:
    """The same fit, tuned by the rule on every validation set."""
    kept = None if prepared.likelihood == "regression" else KeptOutputs(laplace)
    for n, split, data in sets:
        with _Watch() as watch:
            if kept is None:
                laplace.tune(data)
            else:
                found = kept.tune(data)
        if kept is None:
            note = watch.note | _described(laplace)
            predict = _predicting(laplace)
        else:
            point = {"data_scale": found.data_scale, "ratio": found.ratio, "temperature": found.output_temperature}
            note = watch.note | {"structure": laplace.structure, "params": str(laplace.params)}
            note |= {name: float(f"{value:.4g}") for name, value in point.items()} | {"width": found.width}
            predict = partial(kept.predict, found=found)
        yield measure(Made(predict, n, split, seconds, note), prepared)


def _default_without_labels(prepared: Prepared, resplits: int | None) -> Iterator[Numbers]:
    with _Watch() as watch:
        laplace = am.fit(
            prepared.model, prepared.likelihood, prepared.train, None, verbose=False, **prepared.task.options()
        )
    note = watch.note | _described(laplace)
    yield measure(Made(_predicting(laplace), seconds=watch.seconds, note=note), prepared)


def _grid(prepared: Prepared, resplits: int | None) -> Iterator[Numbers]:
    """One fit, tuned on every validation set by the plain minimum over a grid."""
    structure = "full" if _size(prepared) <= SMALL else "kron"
    laplace, seconds = _fitted(prepared, structure)
    for n, split, data in _validation_sets(prepared, resplits):
        with _Watch() as watch:
            laplace.tune(data, method="grid")
        note = watch.note | _described(laplace)
        yield measure(Made(_predicting(laplace), n, split, seconds + watch.seconds, note), prepared)


def _identity(prepared: Prepared, resplits: int | None) -> Iterator[Numbers]:
    """A fit whose curvature is the identity, tuned like any other."""
    sets = list(_validation_sets(prepared, resplits))
    laplace, seconds = _fitted(prepared, register_identity())
    with _Watch() as watch:
        laplace.tune(sets[-1][2])
    yield from _retuned(prepared, laplace, sets, seconds + watch.seconds)


def _fitted(prepared: Prepared, structure: str) -> tuple[am.Laplace, float]:
    with _Watch() as watch:
        laplace = am.Laplace(prepared.model, prepared.likelihood, structure=structure, **prepared.task.options())
        laplace.fit(prepared.train, progress=False)
    return laplace, watch.seconds


def _size(prepared: Prepared) -> int:
    return sum(p.numel() for p in prepared.model.parameters())


def _full_evidence(prepared: Prepared, resplits: int | None) -> Iterator[Numbers]:
    """The full matrix with one precision and the noise by the evidence: in the dual form where data are fewer than weights."""
    rows, size = len(prepared.splits.train[0]), _size(prepared)
    options: dict[str, Any] = {"structure": "full"}
    if rows < size:
        options = {"structure": "subset", "subset_size": rows, "rank": None}
    with _Watch() as watch:
        laplace = am.Laplace(prepared.model, prepared.likelihood, **options)
        laplace.fit(prepared.train, progress=False).tune(method="evidence", per_layer=False)
    note = watch.note | _described(laplace)
    yield measure(Made(_predicting(laplace), seconds=watch.seconds, note=note), prepared)


def _ensemble(prepared: Prepared, resplits: int | None) -> Iterator[Numbers]:
    """Five networks; the noise of a regression is that of the ensemble's mean on the training data."""
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
    with _at_most(PATIENCE, "laplace-torch"):
        yield _by_laplace_torch(prepared)


@contextmanager
def _at_most(seconds: float, what: str) -> Iterator[None]:
    """Gives up after some processor seconds."""

    def stop(*_: Any) -> None:
        raise Skip(f"{what} did not finish within {seconds:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _by_laplace_torch(prepared: Prepared) -> Numbers:
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

    return measure(Made(predict, seconds=watch.seconds, note=watch.note), prepared)


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
    "grid": Method("minimum over a grid", ALL, _grid),
    "identity": Method("identity curvature", CLASSES, _identity),
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
