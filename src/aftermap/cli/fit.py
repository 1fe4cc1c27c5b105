"""`aftermap fit` makes a trained network Bayesian; `aftermap tune` gives it another prior, without a new fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from aftermap.batches import iterate, unpack_batch
from aftermap.cli import options as o
from aftermap.cli.console import CHECK_FAILED, GOOD, Speaker, confirmed, guarded
from aftermap.cli.models import check_device, make_model
from aftermap.cli.sources import DataOptions, Source, first_batch, open_source
from aftermap.cli.store import Fitted, calibrate, describe_data, load_fitted, save_fitted
from aftermap.distributed import process_group, rank, together, world_size
from aftermap.errors import AftermapError, InputError
from aftermap.laplace import CheckReport, Laplace, check_predictive, describe_costs, estimate_costs
from aftermap.laplace import fit as fit_automatically
from aftermap.likelihoods import Gaussian, Likelihood, parse_likelihood
from aftermap.models import call_model
from aftermap.models import check_device as device_of_model

__all__ = [
    "STRUCTURES",
    "FitSettings",
    "build_for",
    "fit",
    "fit_posterior",
    "open_parts",
    "prior_in_words",
    "resolve_task",
    "self_check",
    "try_model",
    "tune",
]

STRUCTURES = ("auto", "kron", "ekfac", "kfra", "diagonal", "full", "low_rank", "hessian")
_FIT = "Posterior"
_Structure = Annotated[
    str, typer.Option("--structure", rich_help_panel=_FIT, help=f"Of the curvature: {', '.join(STRUCTURES)}.")
]
_Params = Annotated[
    str, typer.Option("--params", rich_help_panel=_FIT, help="all, last_layer, or a regular expression for names.")
]
_Noise = Annotated[
    float | None,
    typer.Option("--noise", rich_help_panel=_FIT, help="Standard deviation of regression noise, before tuning."),
]
_Tune = Annotated[bool, typer.Option("--tune/--no-tune", rich_help_panel=_FIT, help="Find the prior (and noise).")]
_Method = Annotated[
    str, typer.Option("--method", rich_help_panel=_FIT, help="Of tuning: auto, evidence or validation.")
]
_Seconds = Annotated[float | None, typer.Option("--seconds", rich_help_panel=_FIT, help="That the fit may take.")]
_FalseAlarms = Annotated[
    float, typer.Option("--false-alarms", rich_help_panel=_FIT, help="Share of usual inputs that may be flagged.")
]
_PriorPrecision = Annotated[float, typer.Option("--prior-precision", rich_help_panel=_FIT, help="Before tuning.")]
_Memory = Annotated[float, typer.Option("--memory", rich_help_panel=_FIT, help="GB that the posterior may take.")]


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
    device, _ = device_of_model(model)
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
    device, dtype = device_of_model(model)
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
        return fit_automatically(
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
    device, dtype = device_of_model(predictor.model)
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


@guarded
def fit(
    model: o.Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the posterior.")],
    train: o.Train = None,
    val: o.Validation = None,
    data: o.DataSet = None,
    weights: o.Weights = None,
    task: o.Task = "auto",
    structure: _Structure = "auto",
    params: _Params = "all",
    prior_precision: _PriorPrecision = 1.0,
    noise: _Noise = None,
    tune: _Tune = True,
    method: _Method = "auto",
    memory: _Memory = 4.0,
    seconds: _Seconds = None,
    false_alarms: _FalseAlarms = 0.05,
    kind: o.Kind = "auto",
    samples: o.Samples = 100,
    target: o.Target = None,
    drop: o.Drop = None,
    data_dir: o.DataDir = None,
    download: o.Download = False,
    image_size: o.ImageSize = None,
    channels: o.Channels = None,
    limit: o.Limit = None,
    batch_size: o.BatchSize = 256,
    seed: o.Seed = 0,
    device: o.Device = "cpu",
    force: o.Force = False,
    as_json: o.Json = False,
    config: o.Config = None,
) -> int:
    """Make a trained network Bayesian: estimate the cost, fit, tune, check, save.

    The folder holds all that predict, evaluate, report and where need, the network's weights included. With torchrun each
    process takes its part of the training data.
    """
    speaker = Speaker(as_json)
    o.one_of("--structure", structure, STRUCTURES)
    o.one_of("--method", method, ("auto", "evidence", "validation"))
    if not 0 < false_alarms < 1:
        raise InputError(f"--false-alarms {false_alarms} must lie between 0 and 1; write 5 % as 0.05")
    overwrite = confirmed(output, force=force, what="fit")
    where = check_device(device)
    reading = o.data_options(
        target=target,
        drop=drop,
        data_dir=data_dir,
        download=download,
        image_size=image_size,
        channels=channels,
        limit=limit,
        batch_size=batch_size,
        task=task,
    )
    settings = FitSettings(structure, params, prior_precision, noise, tune, method, memory * 2**30, seconds)
    with process_group(where):
        training, held = open_parts(train, val, data, reading)
        network, told = build_for(model, weights, training, reading, where, seed)
        if weights is None:
            speaker.note(f"no --weights: the weights are those that {model} leaves; they should be trained ones")
        resolved = resolve_task(task, network, training)
        laplace = fit_posterior(network, training, held, resolved, settings, speaker, seed)
        extras = {"model": told, "data": describe_data(training, reading), "task": resolved, "seed": seed}
        with together("saving the posterior"):
            return _finish(laplace, extras, training, held, output, overwrite, false_alarms, (kind, samples), speaker)


def open_parts(
    train: str | None, val: str | None, data: str | None, reading: DataOptions
) -> tuple[Source, Source | None]:
    """Training data, and held-out data if there are any.

    Raises:
        InputError: none or both of --train and --data.
    """
    if (train is None) == (data is None):
        raise InputError("say which data: --train (and --val), or --data for a set that is cut into parts")
    if data is not None:
        if val is not None:
            raise InputError("--val goes with --train; --data has its own validation part")
        training = open_source(data, "train", reading)
        held = _known(reading, training)
        same_file = training.examples is not None and not _has_parts(data)
        if same_file or training.examples is None:
            raise InputError(f"--data {data} has no parts of its own: use --train and --val")
        return training, open_source(data, "validation", held)
    training = open_source(str(train), "train", reading, what="--train")
    if val is None:
        return training, None
    return training, open_source(val, "validation", _known(reading, training), what="--val")


def _has_parts(spec: str) -> bool:
    return not Path(spec).expanduser().exists() and not spec.endswith((":train", ":validation", ":test", ":all"))


def _known(reading: DataOptions, training: Source) -> DataOptions:
    """Columns and classes of later data are those of the training data."""
    examples = training.examples
    if examples is None:
        return reading
    return replace(reading, columns=examples.columns, classes=examples.classes)


def _finish(
    laplace: Laplace,
    extras: dict[str, Any],
    training: Source,
    held: Source | None,
    output: Path,
    overwrite: bool,
    false_alarms: float,
    predictive: tuple[str, int],
    speaker: Speaker,
) -> int:
    """Checks, chooses thresholds, saves and says so."""
    extras["processes"] = world_size()
    fitted = Fitted(laplace, laplace.model, extras, {})
    options = fitted.predict_options(*predictive)
    checked = self_check(laplace, training if held is None else held, options)
    extras["self_check"] = {
        "passed": not checked.collapsed,
        "on": "training data" if held is None else "validation data",
        "message": checked.message,
    }
    reference: dict[str, Any] = {}
    if held is not None:
        extras["thresholds"], reference = calibrate(
            laplace, held.batches.named("thresholds"), options, false_alarms, extras["seed"]
        )
    extras["predict"] = options
    if rank() == 0:
        save_fitted(laplace, output, extras, reference, overwrite=overwrite)
    chosen = f"{laplace.structure}, {laplace.posterior.n_params:,} parameters, {laplace.n_data:,g} data"
    speaker.line(f"fitted: {chosen}; {prior_in_words(laplace)}")
    state, style = ("passed", None) if not checked.collapsed else ("FAILED", "bold red")
    speaker.line(f"self-check on {extras['self_check']['on']} {state}: {checked.message}", style=style)
    threshold = fitted.threshold("entropy") or fitted.threshold("variance")
    if threshold is None:
        speaker.line("no threshold for flagging: add --val, held-out data to choose it on")
    else:
        speaker.line(
            f"flag above {threshold.value:.3g} {threshold.score.replace('_', ' ')} = {threshold.false_alarm_rate:.0%} false alarms "
            f"on data like the {threshold.n_data:,} of {held.name if held else ''}"
        )
    speaker.line(f"saved in {output}; next: aftermap report {output} --test DATA")
    speaker.result(
        {
            "posterior": str(output),
            "structure": laplace.structure,
            "n_params": laplace.posterior.n_params,
            "n_data": laplace.n_data,
            "data_scale": laplace.data_scale,
            "prior_precision": {n: float(v.mean()) for n, v in laplace.prior_precision.items()},
            "noise": float(laplace.observation.level) if laplace.observation.tunable else None,
            **{k: extras.get(k) for k in ("task", "self_check", "thresholds")},
        }
    )
    return CHECK_FAILED if checked.collapsed else GOOD


@guarded
def tune(
    posterior: o.Posterior,
    val: o.Validation = None,
    method: Annotated[str, typer.Option("--method", help="auto, evidence, lbfgs or validation.")] = "auto",
    prior_precision: Annotated[
        float | None, typer.Option("--prior-precision", help="Set it instead of searching for it.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the result; without it the posterior is replaced.")
    ] = None,
    false_alarms: Annotated[
        float, typer.Option("--false-alarms", help="Share of usual inputs that may be flagged.")
    ] = 0.05,
    model: o.OptionalModel = None,
    weights: o.Weights = None,
    trust_code: o.TrustCode = False,
    kind: o.Kind = "auto",
    samples: o.Samples = 100,
    target: o.Target = None,
    data_dir: o.DataDir = None,
    limit: o.Limit = None,
    batch_size: o.BatchSize = 256,
    seed: o.Seed = 0,
    device: o.Device = "cpu",
    force: o.Force = False,
    as_json: o.Json = False,
    config: o.Config = None,
) -> int:
    """Find the prior precision (and noise) of a fitted posterior: by the evidence, or on held-out data.

    No pass over the training data and no new decomposition: seconds.
    """
    speaker = Speaker(as_json)
    o.one_of("--method", method, ("auto", "evidence", "lbfgs", "validation"))
    if output is not None:
        confirmed(output, force=force, what="tune")
    fitted = load_fitted(posterior, model=model, weights=weights, device=check_device(device), trust_code=trust_code)
    laplace = fitted.predictor
    if not isinstance(laplace, Laplace):
        raise InputError(
            f"{posterior} was made by training with {laplace.method}; its prior cannot be tuned afterwards"
        )
    before = prior_in_words(laplace)
    reading = fitted.data_options(o.data_options(target=target, data_dir=data_dir, limit=limit, batch_size=batch_size))
    held = None if val is None else open_source(val, "validation", reading, what="--val")
    options = fitted.predict_options(kind, samples)
    if prior_precision is not None:
        laplace.with_prior(prior_precision)
    else:
        laplace.tune(
            None if held is None or method in ("evidence", "lbfgs") else held.batches,
            method=None if method == "auto" else method,
            kind=options["kind"],
        )
    extras = dict(fitted.extras)
    reference: dict[str, Tensor] = {}
    extras.pop("thresholds", None)  # they belonged to another posterior
    if held is not None:
        checked = self_check(laplace, held, options)
        extras["self_check"] = {"passed": not checked.collapsed, "on": "validation data", "message": checked.message}
        extras["thresholds"], reference = calibrate(
            laplace, held.batches.named("thresholds"), options, false_alarms, seed
        )
    place = output or posterior
    save_fitted(laplace, place, extras, reference, overwrite=True)
    return _say(laplace, before, place, extras, held is not None, speaker)


def _say(laplace: Laplace, before: str, place: Path, extras: dict[str, Any], checked: bool, speaker: Speaker) -> int:
    """What changed; the exit code."""
    passed = not checked or extras["self_check"]["passed"]
    speaker.line(f"{before} → {prior_in_words(laplace)}")
    if checked:
        state = "passed" if passed else "FAILED"
        said = f"self-check on validation data {state}: {extras['self_check']['message']}"
        speaker.line(said, style=None if passed else "bold red")
    else:
        speaker.line("thresholds for flagging are gone: they belong to the old prior. Add --val to choose new ones")
    speaker.line(f"saved in {place}")
    speaker.result(
        {
            "posterior": str(place),
            "prior_precision": {n: float(v.mean()) for n, v in laplace.prior_precision.items()},
            "data_scale": laplace.data_scale,
            "log_evidence": float(laplace.log_evidence()),
            "self_check": extras.get("self_check"),
            "thresholds": extras.get("thresholds"),
        }
    )
    return GOOD if passed else CHECK_FAILED
