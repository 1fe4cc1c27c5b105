"""What fit, tune and demo share: from model and data to a tuned, checked posterior with thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aftermap.batches import call_model, check_device, iterate, unpack_batch
from aftermap.cli.console import Speaker
from aftermap.cli.models import make_model
from aftermap.cli.sources import DataOptions, Source, first_batch
from aftermap.errors import AftermapError, InputError
from aftermap.laplace import CheckReport, Laplace, check_predictive, describe_costs, estimate_costs, fit
from aftermap.likelihoods import Gaussian, Likelihood, parse_likelihood

__all__ = ["FitSettings", "build_for", "fit_posterior", "prior_in_words", "resolve_task", "self_check", "try_model"]


@dataclass(frozen=True)
class FitSettings:
    """How a posterior is fitted.

    Attributes:
        structure: "auto", or a structure of `Laplace`.
        params: "all", "last_layer", or a regular expression.
        prior_precision: before tuning.
        noise: of a regression, before tuning; None: the residuals of the network.
        tune: whether.
        method: of tuning: "auto", "evidence" or "validation".
        memory: bytes that the posterior may take.
        seconds: that the fit may take.
    """

    structure: str = "auto"
    params: str = "all"
    prior_precision: float = 1.0
    noise: float | None = None
    tune: bool = True
    method: str = "auto"
    memory: float = 4 * 2**30
    seconds: float | None = None


def build_for(
    spec: str, weights: Any, source: Source, options: DataOptions, device: torch.device, seed: int
) -> tuple[nn.Module, dict[str, Any]]:
    """The network for some data, and what must be kept to build it again.

    Returns:
        The network, and {"spec", "options"}.
    """
    given: dict[str, Any] = {}
    if spec.startswith("builtin:"):
        if source.examples is None or source.examples.targets is None:
            raise InputError(
                f"--model {spec} is built for data in memory with targets; {source.spec} is a stream of batches"
            )
        targets = source.examples.targets
        classes = source.examples.is_classes and options.task in ("auto", "classification")
        if classes:
            known = source.examples.classes
            outputs = max(int(targets.max()) + 1, len(known) if known else 0)
        else:
            outputs = 1 if targets.dim() == 1 else targets.shape[1]
        regression = not classes and options.task in ("auto", "regression")
        given = {"shape": list(source.examples.inputs.shape[1:]), "outputs": outputs, "rescale": regression}
    model = make_model(spec, options=given, weights=weights, device=device, seed=seed)
    return model, {"spec": spec, "options": given}


def try_model(model: nn.Module, source: Source) -> tuple[Any, torch.Tensor]:
    """Runs the first batch through the network; its targets and the outputs.

    Raises:
        InputError: the network does not take it.
    """
    device, _ = check_device(model)
    batch = unpack_batch(first_batch(source)).to(device)
    try:
        with torch.no_grad():
            return batch.targets, call_model(model, batch.inputs)
    except AftermapError:
        raise
    except Exception as error:
        shape = list(batch.inputs.shape) if isinstance(batch.inputs, torch.Tensor) else "that form"
        raise InputError(
            f"the model does not take the data {source.spec}: a batch of shape {shape} made it fail with "
            f"{type(error).__name__}: {error}"
        ) from error


def resolve_task(task: str, model: nn.Module, source: Source) -> str:
    """The task by the targets and the outputs, where it was not said.

    Raises:
        InputError: the model does not take the data, or the targets could be classes or numbers.
    """
    targets, outputs = try_model(model, source)
    if task != "auto":
        return task
    if not isinstance(targets, torch.Tensor):
        raise InputError(f"{source.spec} has no targets")
    if targets.is_floating_point():
        return "regression"
    wide = outputs.shape[-1] if outputs.dim() > 1 else 1
    if wide == 1:
        if bool(((targets == 0) | (targets == 1)).all()):
            return "binary"
        raise InputError(
            f"{source.spec} has whole numbers as targets and the model one output: say --task regression, counts or binary"
        )
    return "classification"


def _likelihood(task: str, noise: float | None, model: nn.Module, train: Source) -> Likelihood:
    """With noise to start tuning from: the network's own residuals, so that the units of the targets do not matter."""
    if task != "regression":
        if noise is not None:
            raise InputError(f"--noise belongs to a regression, but the task is {task}")
        return parse_likelihood(task)
    return Gaussian(noise=_residual(model, train) if noise is None else noise)


def _residual(model: nn.Module, train: Source, most: int = 2000) -> float:
    """Root mean squared error of the network on some training data."""
    device, dtype = check_device(model)
    squares = count = 0.0
    for batch in iterate(train.batches.named(""), device=device, dtype=dtype):
        with torch.no_grad():
            outputs = call_model(model, batch.inputs)
        if not isinstance(batch.targets, torch.Tensor) or batch.targets.numel() != outputs.numel():
            return 1.0  # the fit says what is wrong
        squares += float((outputs - batch.targets.reshape(outputs.shape)).double().square().sum())
        count += outputs.numel()
        if count >= most:
            break
    return (squares / count) ** 0.5 if squares > 0 else 1.0


def fit_posterior(
    model: nn.Module, train: Source, val: Source | None, task: str, settings: FitSettings, speaker: Speaker, seed: int
) -> Laplace:
    """Says the cost, fits and tunes; `.report` tells how it was chosen where that was left to the library."""
    likelihood = _likelihood(task, settings.noise, model, train)
    batches = train.batches.named("", shared=True)
    held = None if val is None else val.batches.named("")
    if settings.method == "validation" and held is None:
        raise InputError("--method validation needs held-out data: add --val")
    if settings.structure == "auto" and settings.tune and settings.method == "auto":
        return fit(
            model,
            batches,
            held,
            likelihood,
            params=settings.params,
            memory_limit=settings.memory,
            time_limit=settings.seconds,
            verbose=None,
            on_cost=speaker.note,
            prior_precision=settings.prior_precision,
        )
    structure = "kron" if settings.structure == "auto" else settings.structure
    params = "all" if settings.params == "last_layer" else settings.params
    costs = estimate_costs(model, batches, likelihood, params=params)
    which = "last_layer" if settings.params == "last_layer" else "all"
    chosen = next((c for c in costs if (c.structure, c.params) == (structure, which)), None)
    speaker.note(f"{structure}: no estimate of its cost" if chosen is None else describe_costs(chosen, costs))
    if chosen is not None and chosen.bytes > settings.memory:
        raise InputError(
            f"{chosen}, more than --memory {settings.memory / 2**30:g} GB. Choose another --structure, or allow more"
        )
    laplace = Laplace(
        model, likelihood, structure=structure, params=settings.params, prior_precision=settings.prior_precision
    )
    laplace.fit(batches, generator=torch.Generator().manual_seed(seed))
    if settings.tune:
        laplace.tune(held, method=None if settings.method == "auto" else settings.method)
    return laplace


def self_check(predictor: Any, source: Source, options: Mapping[str, Any]) -> CheckReport:
    """MAP against Bayesian on at most 1,000 examples."""
    device, dtype = check_device(predictor.model)
    return check_predictive(
        predictor, iterate(source.batches.named("self-check"), device=device, dtype=dtype), **options
    )


def prior_in_words(laplace: Laplace) -> str:
    """Prior precision, noise and data scale in one line."""
    values = [float(v.mean()) for v in laplace.prior_precision.values()]
    low, high = min(values), max(values)
    said = f"prior precision {low:.3g}" if high <= low * 1.001 else f"prior precision {low:.3g} to {high:.3g} by layer"
    if laplace.data_scale != 1.0:
        said += f", data scale {laplace.data_scale:.3g}"
    if laplace.observation.tunable:
        said += f", noise {float(laplace.observation.level):.3g}"
    return said
