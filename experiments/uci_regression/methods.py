"""The networks and posteriors of the UCI regressions: what is trained, what is chosen on validation data, what is measured.

Inputs and targets are standardised by the training part; log-likelihoods and errors are given back in the units of the data. Every
choice (weight decay, noise, dropping, the rate of VOGN) is made on the validation tenth of the training part.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import aftermap as am
from aftermap.likelihoods import Gaussian
from aftermap.predictive import Prediction, gaussian_prediction
from benchmarks.quality.networks import MLP
from benchmarks.quality.tasks import Training
from benchmarks.quality.training import cut, train_network
from experiments.framework import labelled, work_folder

__all__ = ["BASELINES", "LEVELS", "Split", "bayesian", "chosen_network", "load", "others"]

LEVELS = (0.5, 0.9, 0.95)
BASELINES = ("ensemble", "dropout", "vogn", "hfl")
Data = tuple[Tensor, Tensor]
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Split:
    """One standard split.

    Attributes:
        train, validation, test: Standardised inputs and targets [N, 1].
        unit: The standard deviation of the training targets.
        seed: The number of the split, which everything random starts from.
    """

    train: Data
    validation: Data
    test: Data
    unit: float
    seed: int


def load(name: str, number: int, rows: int | None, data_dir: Path) -> Split:
    """A standard split by its number; of the training part at most so many rows."""
    parts = {}
    for part in ("train", "validation", "test"):
        inputs, targets = labelled(data_dir, f"uci_{name}/{number}", part)
        parts[part] = (inputs.double(), targets.double().reshape(-1, 1))
    x, y = (values[:rows] for values in parts["train"])
    scale, unit = x.std(0), y.std()
    scale[scale < 1e-9] = 1.0
    made = {}
    for part, (inputs, targets) in parts.items():
        standard = ((inputs - x.mean(0)) / scale).float(), ((targets - y.mean()) / unit).float()
        made[part] = (standard[0][:rows], standard[1][:rows])
    return Split(made["train"], made["validation"], made["test"], float(unit), number)


def _trained(split: Split, settings: Any, decay: float, start: int, dropping: float = 0.0) -> nn.Module:
    """One hidden layer of ReLU units, trained by Adam on the mean of half the squared errors with decay/N · ½ the squared weights."""
    x, y = split.train
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 * (split.seed + 1) + start)
        model: nn.Module = MLP((settings.hidden,)).build(tuple(x.shape[1:]), 1)
    if dropping:
        model = am.MCDropout(model, "regression", insert=dropping).model
    epochs = max(settings.epochs, math.ceil(settings.steps * settings.batch / len(x)))
    training = Training(epochs, settings.rate, settings.batch, decay / len(x))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start)  # of the masks
        train_network(model, (x, y), training, "regression", torch.Generator().manual_seed(start))
    return model.eval()


def chosen_network(split: Split, settings: Any, name: str) -> tuple[nn.Module, float]:
    """The network with the decay that predicts the validation data best, and this decay; kept, since two jobs need it."""
    file = work_folder("networks") / f"{name}-{split.seed}.pt"
    if file.is_file():
        kept = torch.load(file, weights_only=True)
        model = MLP((settings.hidden,)).build(tuple(split.train[0].shape[1:]), 1)
        model.load_state_dict(kept["weights"])
        return model.eval(), float(kept["decay"])
    found = [(_error(m, split.validation), d, m) for d in settings.decays for m in [_trained(split, settings, d, 0)]]
    _, decay, model = min(found, key=lambda row: row[:2])
    torch.save({"weights": model.state_dict(), "decay": decay}, file)
    return model, decay


def _error(model: nn.Module, data: Data) -> float:
    with torch.no_grad():
        return float((model(data[0]) - data[1]).square().mean().sqrt())


def _measured(prediction: Prediction, y: Tensor, unit: float) -> Numbers:
    numbers = {
        "rmse": am.metrics.rmse(prediction.mean, y) * unit,
        "log_likelihood": float(prediction.log_prob(y).double().mean()) - math.log(unit),
    }
    for level in LEVELS:
        numbers[f"cover{level:.0%}".rstrip("%")] = am.metrics.coverage(*prediction.interval(level), y)
    return numbers


def _best_noise(outputs: Tensor, y: Tensor) -> float:
    """The noise under which the mixture of outputs [S, N, 1] gives the targets the highest likelihood, by golden section of its logarithm."""
    residuals = (outputs - y).double()

    def loss(log_noise: float) -> float:
        each = -0.5 * (residuals / math.exp(log_noise)).square() - log_noise
        return -float(torch.logsumexp(each, 0).mean())

    low, high, golden = -7.0, 2.0, (math.sqrt(5) - 1) / 2
    for _ in range(40):
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return math.exp((low + high) / 2)


def bayesian(split: Split, settings: Any, name: str) -> dict[str, Numbers]:
    """The network with a noise from its validation residuals, and linearised Laplace around it, as `aftermap.fit` tunes it."""
    model, decay = chosen_network(split, settings, name)
    x, y = split.test
    noise = _error(model, split.validation)
    found: dict[str, Any] = {"network": am.baselines.Deterministic(model, Gaussian(noise)).predict(x)}
    train, validation = cut(*split.train), cut(*split.validation)
    notes: dict[str, Numbers] = {"network": {"noise": noise, "decay": decay}}
    calls: dict[str, tuple[Any, dict[str, str]]] = {
        "fit": (validation, {}),
        "kron": (validation, {"structure": "kron"}),
        "full": (validation, {"structure": "full"}),
        "unlabelled": (None, {}),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for method, (labels, options) in calls.items():
            before = len(caught)
            la = am.fit(model, train, labels, "regression", verbose=False, **options)
            found[method] = la.predict(x)
            notes[method] = {"structure": la.structure, "warnings": len(caught) - before}
    return {method: _measured(p, y, split.unit) | notes[method] for method, p in found.items()}


def others(split: Split, settings: Any, name: str) -> dict[str, Numbers]:
    """Ensemble, dropout, VOGN, and Hessian-free Laplace on the first splits where the training data are few enough."""
    model, decay = chosen_network(split, settings, name)
    noise = _error(model, split.validation)
    found = {
        "ensemble": _ensemble(split, settings, model, decay),
        "dropout": _dropout(split, settings, decay),
        "vogn": _vogn(split, settings, decay, noise),
    }
    if len(split.train[0]) <= settings.hfl_rows and split.seed < settings.splits:
        found["hfl"] = _hessian_free(split, settings, model, decay, noise)
    return found


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _mixture(made: Callable[[Gaussian], Any], split: Split) -> tuple[Any, float, float]:
    """A baseline with the noise that is best for the validation data, that noise and its log-likelihood there."""
    x, y = split.validation
    samples = made(Gaussian(1.0)).predict(x, generator=_generator()).samples
    noise = _best_noise(samples, y)
    predictor = made(Gaussian(noise))
    return predictor, noise, float(predictor.predict(x, generator=_generator()).log_prob(y).mean())


def _ensemble(split: Split, settings: Any, model: nn.Module, decay: float) -> Numbers:
    members = [model, *(_trained(split, settings, decay, m) for m in range(1, settings.members))]
    predictor, noise, _ = _mixture(lambda likelihood: am.Ensemble(members, likelihood), split)
    return _measured(predictor.predict(split.test[0]), split.test[1], split.unit) | {"noise": noise}


def _dropout(split: Split, settings: Any, decay: float) -> Numbers:
    tried = []
    for p in settings.drops:
        model = _trained(split, settings, decay, 0, p)
        made = _mixture(lambda likelihood, m=model: am.MCDropout(m, likelihood, samples=settings.samples), split)
        tried.append((made[2], p, made))
    _, p, (predictor, noise, _) = max(tried, key=lambda row: row[:2])
    prediction = predictor.predict(split.test[0], generator=_generator())
    return _measured(prediction, split.test[1], split.unit) | {"noise": noise, "dropping": p}


def _vogn(split: Split, settings: Any, decay: float, noise: float) -> Numbers:
    """Trained from the start with the network's noise, and the prior that its decay stands for."""
    x, y = split.train
    tried = []
    for rate in settings.vogn_rates:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * (split.seed + 1))
            model = MLP((settings.hidden,)).build(tuple(x.shape[1:]), 1)
        likelihood, generator = Gaussian(noise), torch.Generator().manual_seed(split.seed)
        optimiser = am.optim.VOGN(
            model, rate, n_data=len(x), prior_precision=decay / noise**2, likelihood=likelihood, generator=generator
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, settings.vogn_steps)
        for _ in range(settings.vogn_steps):
            chosen = torch.randint(len(x), (min(settings.batch, len(x)),), generator=generator)
            optimiser.step(lambda m=model, c=chosen, like=likelihood: like.nll(m(x[c]), y[c]).mean())
            schedule.step()
        posterior = optimiser.posterior(likelihood)
        held = posterior.predict(split.validation[0], samples=settings.samples, generator=_generator())
        tried.append((float(held.log_prob(split.validation[1]).mean()), rate, posterior))
    _, rate, posterior = max(tried, key=lambda row: row[:2])
    prediction = posterior.predict(split.test[0], samples=settings.samples, generator=_generator())
    return _measured(prediction, split.test[1], split.unit) | {"rate": rate}


def _hessian_free(split: Split, settings: Any, model: nn.Module, decay: float, noise: float) -> Numbers:
    """The first test inputs only, since each takes two fine-tunings; the network and full Laplace at the same inputs stand beside."""
    x, y = (values[: settings.hfl_queries].double() for values in split.test)
    data = [tuple(values.double() for values in split.train)]
    likelihood, prior = Gaussian(noise), decay / noise**2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        hfl = am.HessianFree(
            model.double(),
            likelihood,
            prior_precision=prior,
            strict=False,
            tolerance=1e-3,
            max_steps=settings.hfl_steps,
        )
        hfl.fit(data, polish=True)
        # One by one: a row that runs away is then left out alone.
        found = [(*hfl.joint(row), hfl.report) for row in x.split(1)]
        full = am.Laplace(model, likelihood, structure="full", prior_precision=prior).fit(data).predict(x)
    known = torch.tensor([bool(covariance.isfinite().all()) for _, covariance, _ in found])
    queries = {"queries": len(x), "flagged": sum(report is None or not report.ok for *_, report in found)}
    if not bool(known.any()):
        return queries
    mean, variance = (torch.cat([row[k].reshape(1, 1) for row in found])[known] for k in (0, 1))
    prediction = gaussian_prediction(likelihood, mean, latent_var=variance)
    same = {f"same_{k}": v for k, v in _measured(full[known], y[known], split.unit).items()}
    return _measured(prediction, y[known], split.unit) | same | queries
