"""`aftermap fit` makes a trained network Bayesian; `aftermap tune` gives it another prior, without a new fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import nn

from aftermap.batches import unpack_batch
from aftermap.cli import options as o
from aftermap.cli.console import Reporter, confirmed
from aftermap.cli.cost import say_tuning_cost
from aftermap.cli.models import import_object, make_model
from aftermap.cli.sources import Batches, DataFormat, Source, first_batch, open_parts, open_source
from aftermap.cli.store import Fitted, describe_fit, finish
from aftermap.curvature import STRUCTURES
from aftermap.curvature.passes.checkpoint import clear_checkpoint
from aftermap.distributed import fail_together, process_group
from aftermap.errors import AftermapError, InputError
from aftermap.laplace import Laplace, describe_costs
from aftermap.laplace import fit as fit_automatically
from aftermap.laplace.auto import predictions_after_fit
from aftermap.laplace.cost import FirstLook, rehearsed_cost, shape_costs
from aftermap.laplace.output_noise import residual_noise
from aftermap.likelihoods import Gaussian, Likelihood, infer_task, parse_likelihood
from aftermap.models import call_model
from aftermap.models import check_device as device_of_model
from aftermap.posteriors.io import FILES, check_replaceable

__all__ = [
    "PosteriorOptions",
    "StructureName",
    "TuneOptions",
    "build_for",
    "check_before_data",
    "check_structure_name",
    "fit",
    "fit_posterior",
    "likelihood_of",
    "prior_in_words",
    "resolve_task",
    "try_model",
    "tune",
]

_FalseAlarms = Annotated[float, o.option("The share of usual inputs that may be flagged."), o.Fraction()]


@dataclass(frozen=True)
class StructureName(o.OneOf):
    """A structure. The file that makes a network may register it, so the word is judged after that was imported."""

    allowed: tuple[str, ...] = ("auto", *(s.name for s in STRUCTURES.values() if s.saveable))

    def check(self, flag: str, value: str) -> None:
        """Refuses nothing yet; see `check_structure_name`."""


def check_structure_name(name: str) -> None:
    """Refuses a structure that nobody has registered, or whose posterior cannot be written to a folder.

    Raises:
        InputError: It is one of these.
    """
    if name in STRUCTURES and not STRUCTURES[name].saveable:
        raise InputError(
            f"--structure {name} has a posterior that cannot be written to a folder, because it needs the data again and "
            f"again. Choose another one, or use Laplace(model, likelihood, structure={name!r}) in Python"
        )
    allowed = ("auto", *(s.name for s in STRUCTURES.values() if s.saveable))
    if name not in allowed:
        raise InputError(
            f"--structure {name!r} is not known; allowed are {', '.join(allowed)}{o.where_said('structure', name)}"
        )


@dataclass(frozen=True)
class PosteriorOptions:
    """How a posterior is fitted."""

    panel: ClassVar[str] = "Posterior"
    structure: Annotated[str, o.option("The approximation of the curvature."), StructureName()] = "auto"
    params: Annotated[
        str,
        o.option("Which weights are uncertain: all, last_layer, last_block, or a regular expression for their names."),
    ] = "all"
    prior_precision: Annotated[
        float, o.option("The prior precision, or the value at which tuning starts."), o.Positive()
    ] = 1.0
    noise: Annotated[
        float | None,
        o.option(
            "The standard deviation of the noise of a regression, or the value at which tuning starts [that of the residuals]."
        ),
        o.Positive(),
    ] = None
    tune: Annotated[bool, o.option("Whether the prior (and the noise) is tuned after the fit.", "--tune/--no-tune")] = (
        True
    )
    method: Annotated[
        str,
        o.option(
            "How the prior is tuned. auto takes validation with --val, and otherwise a method that needs only the training data."
        ),
        o.OneOf(("auto", "validation", "self_consistent", "evidence", "grid")),
    ] = "auto"
    memory: Annotated[
        float,
        o.option("The most GB that the posterior may take. Larger structures are not considered."),
        o.Positive(),
    ] = 4.0
    seconds: Annotated[
        float | None,
        o.option("The most seconds that the fit may take. Structures that need longer are not considered."),
        o.Positive(),
    ] = None
    false_alarms: _FalseAlarms = 0.05
    checkpoint: Annotated[
        Path | None,
        o.option(
            "A folder that keeps the state of the fit, so that the same command continues if it was killed. It is emptied when "
            "the posterior is saved."
        ),
    ] = None
    every: Annotated[int, o.option("The number of batches after which --checkpoint is written.", min=1)] = 100


@dataclass(frozen=True)
class TuneOptions:
    """How the prior of a saved posterior is tuned."""

    panel: ClassVar[str] = "Posterior"
    prior_precision: Annotated[
        float | None, o.option("The prior precision to set, instead of searching for one."), o.Positive()
    ] = None
    method: Annotated[
        str,
        o.option(
            "How the prior is tuned. auto takes the rule of fit; where that needs the training data, and there is no --train, it says what it takes instead."
        ),
        o.OneOf(("auto", "validation", "self_consistent", "evidence", "lbfgs", "grid")),
    ] = "auto"
    false_alarms: _FalseAlarms = 0.05


def check_before_data(model: o.ModelOptions) -> None:
    """Finds a module or a file of weights that is not there before data are read; the module may register structures.

    Raises:
        InputError: One is missing.
    """
    if not model.model.startswith("builtin:"):
        import_object(model.model, "--model")
    if model.weights is not None and not model.weights.expanduser().is_file():
        raise InputError(f"--weights: there is no file {model.weights}")


def _check_held_out(method: str, there: bool) -> None:
    """Refuses a way of tuning that needs held-out data where there are none."""
    if method in ("validation", "grid") and not there:
        raise InputError(f"--method {method} needs held-out data: add --val")


def _check_trained(folder: Path, method: str, tuning: TuneOptions, held_out: bool) -> None:
    """Refuses what a posterior that training built cannot be tuned by."""
    if not held_out or tuning.method not in ("auto", "validation") or tuning.prior_precision is not None:
        raise InputError(
            f"{folder} was made by training with {method}, and is tuned on held-out data alone: add --val, and leave out --method and "
            "--prior-precision"
        )


def build_for(
    spec: str, weights: Any, source: Source, data_format: DataFormat, device: torch.device, seed: int
) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the network for some data, and what must be saved to build it again.

    Returns:
        The network, and {"spec", "options"}.
    """
    options: dict[str, Any] = {}
    if spec.startswith("builtin:"):
        if source.examples is None or source.examples.targets is None:
            raise InputError(
                f"--model {spec} is built for data in memory with targets; {source.spec} is a stream of batches"
            )
        targets = source.examples.targets
        classes = source.examples.is_classes and data_format.task in ("auto", "classification")
        if classes:
            source.check_labels(None)
            if data_format.task == "auto":
                source.check_are_classes()
            known = source.examples.classes
            outputs = max(int(targets.max()) + 1, len(known) if known else 0)
        else:
            outputs = 1 if targets.dim() == 1 else targets.shape[1]
        regression = not classes and data_format.task in ("auto", "regression")
        options = {"shape": list(source.examples.inputs.shape[1:]), "outputs": outputs, "rescale": regression}
    model = make_model(spec, options=options, weights=weights, device=device, seed=seed)
    return model, {"spec": spec, "options": options}


def try_model(model: nn.Module, source: Source) -> tuple[Any, torch.Tensor]:
    """Runs the first batch through the network; its targets and the outputs.

    Raises:
        InputError: The network does not take it.
    """
    device, dtype = device_of_model(model)
    batch = unpack_batch(first_batch(source)).to(device)
    if isinstance(batch.inputs, torch.Tensor) and batch.inputs.is_floating_point() and batch.inputs.dtype != dtype:
        raise InputError(
            f"the network's weights are {dtype}, but data are read as {batch.inputs.dtype}: build it with "
            f"model.to({batch.inputs.dtype}), or fit it in Python, with data of its own precision"
        )
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
    """Returns the task, by the targets and the outputs where it was not said.

    Raises:
        InputError: The model does not take the data, or the targets could be classes or numbers.
    """
    targets, outputs = try_model(model, source)
    if task != "auto":
        return task
    try:
        return infer_task(targets, outputs, "--task {}".format)
    except InputError as error:
        raise InputError(f"{source.spec}: {error}") from None


def likelihood_of(task: str, noise: float | None, estimate: Callable[[], float | torch.Tensor]) -> Likelihood:
    """Returns the likelihood of a task; ``estimate`` gives the noise of a regression where none was said.

    Raises:
        InputError: A noise for a task that has none.
    """
    if task == "regression":
        return Gaussian(noise=estimate() if noise is None else noise)
    if noise is not None:
        raise InputError(f"--noise belongs to a regression, but the task is {task}")
    return parse_likelihood(task)


def _residual(model: nn.Module, validation: Source | None, train: Source) -> float | torch.Tensor:
    """Returns the root mean squared error of the network, by output where there are several; 1 where it cannot be known."""
    outputs = try_model(model, train)[1].shape[-1]
    held_out = None if validation is None else validation.batches.named("")
    noise = residual_noise(model, outputs, held_out, train.batches.named("", shared=True))
    return 1.0 if noise is None else noise if outputs > 1 else float(noise)


def fit_posterior(
    model: nn.Module,
    train: Source,
    validation: Source | None,
    task: str,
    options: PosteriorOptions,
    reporter: Reporter,
    seed: int,
) -> Laplace:
    """Says the cost, fits and tunes; `.report` tells how it was chosen where that was left to the library."""
    # Tuning starts from the network's own residuals, so that the units of the targets do not matter.
    likelihood = likelihood_of(task, options.noise, lambda: _residual(model, validation, train))
    batches = train.batches.named("", shared=True)
    held_out = None if validation is None else validation.batches.named("")
    thresholds = 0 if held_out is None else held_out.n_examples() or 0
    if options.structure == "auto" and options.tune and options.method == "auto":
        return fit_automatically(
            model,
            likelihood,
            batches,
            held_out,
            params=options.params,
            memory_limit=options.memory * 2**30,
            time_limit=options.seconds,
            verbose=None,
            on_cost=reporter.note,
            predictions=thresholds,
            prior_precision=options.prior_precision,
            checkpoint=options.checkpoint,
            every=options.every,
        )
    structure = "kron" if options.structure == "auto" else options.structure
    laplace = Laplace(
        model, likelihood, structure=structure, params=options.params, prior_precision=options.prior_precision
    )
    _say_cost(laplace, batches, held_out, thresholds, options, reporter)
    laplace.fit(
        batches,
        generator=torch.Generator().manual_seed(seed),
        checkpoint=options.checkpoint,
        every=options.every,
    )
    if options.tune:
        labelled = options.method in ("auto", "validation", "grid")
        laplace.tune(held_out if labelled else None, method=None if options.method == "auto" else options.method)
    return laplace


def _say_cost(
    laplace: Laplace,
    batches: Batches,
    held_out: Batches | None,
    thresholds: int,
    options: PosteriorOptions,
    reporter: Reporter,
) -> None:
    """Says what a fit with a named structure will cost; raises where it needs more memory than is allowed."""
    look = FirstLook.at(laplace.model, batches, None)
    params, which = ("all", "last_layer") if options.params == "last_layer" else (options.params, "all")
    costs = shape_costs(laplace.model, look, laplace.likelihood, params=params)
    known = next((c for c in costs if (c.structure, c.params) == (laplace.structure, which)), None)
    if known is not None and known.bytes > options.memory * 2**30:
        raise InputError(
            f"{known}, more than --memory {options.memory:g} GB. Choose another --structure, or allow more"
        )
    validation = None if held_out is None else thresholds
    cost = rehearsed_cost(laplace, look, known, validation=validation, tuned=options.tune)
    checked = predictions_after_fit(held_out) if options.tune else thresholds
    others = [cost if c is known and cost is not None else c for c in costs]
    line = None if cost is None else describe_costs(cost, others, thresholds + checked)
    reporter.note(line or f"{laplace.structure}: no estimate of its cost")


def _noise_in_words(laplace: Laplace) -> str:
    noise = torch.as_tensor(laplace.likelihood.config()["noise"])
    low, high = float(noise.min()), float(noise.max())
    return f"{low:.3g}" if noise.dim() == 0 else f"{low:.3g} to {high:.3g} by output"


def prior_in_words(laplace: Laplace) -> str:
    """Says prior precision, data scale, noise and temperature in one line."""
    values = [float(v.mean()) for v in laplace.prior_precision.values()]
    low, high = min(values), max(values)
    text = f"prior precision {low:.3g}" if high <= low * 1.001 else f"prior precision {low:.3g} to {high:.3g} by layer"
    if laplace.data_scale != 1.0:
        text += f", data scale {laplace.data_scale:.3g}"
    if laplace.has_noise:
        text += f", noise {_noise_in_words(laplace)}"
    if laplace.output_temperature != 1.0:
        text += f", temperature {laplace.output_temperature:.3g}"
    return text


@o.command(without=("score",), by_all=True)
def fit(
    output: Annotated[Path, o.option("The folder for the posterior.", "--output", "-o")],
    model: o.ModelOptions,
    sets: o.TrainData,
    data: o.DataOptions,
    posterior: PosteriorOptions,
    predictive: o.PredictiveOptions,
    run: o.RunOptions,
) -> int:
    """Make a trained network Bayesian: estimate the cost, fit, tune, check, save.

    The folder holds all that predict, evaluate, report and where need, the network's weights included. With torchrun each
    process takes its part of the training data.
    """
    reporter, device = run.reporter, run.checked_device()
    overwrite = confirmed(output, force=run.force, what="fit")
    check_replaceable(output, overwrite, FILES)
    data_format = data.format(task=model.task)
    check_before_data(model)
    check_structure_name(posterior.structure)
    _check_held_out(posterior.method, sets.val is not None or sets.data is not None)
    with process_group(device):
        training, validation = open_parts(sets.train, sets.val, sets.data, data_format)
        network, model_config = build_for(model.model, model.weights, training, data_format, device, run.seed)
        for note in training.notes():
            reporter.note(note)
        if model.weights is None:
            reporter.note(
                f"no --weights: the network keeps the weights with which {model.model} made it; these should be trained ones"
            )
        task = resolve_task(model.task, network, training)
        if validation is not None:
            try_model(network, validation)
        if task == "classification":
            outputs = try_model(network, training)[1].shape[-1]
            for source in (training, validation):
                if source is not None:
                    source.check_labels(outputs)
            spare = training.note_of_outputs(outputs)
            if spare is not None:
                reporter.note(spare)
        laplace = fit_posterior(network, training, validation, task, posterior, reporter, run.seed)
        reporter.line(
            f"fitted: {laplace.structure}, {laplace.posterior.n_params:,} parameters, {laplace.n_data:,g} data; "
            + prior_in_words(laplace)
        )
        if laplace.tuning is not None:
            reporter.line(str(laplace.tuning))
        fitted = Fitted(laplace, network, describe_fit(model_config, training, data_format, task, run.seed), {})
        with fail_together("saving the posterior"):
            code, content = finish(
                fitted,
                output,
                validation=validation,
                options=fitted.predict_options(predictive.kind, predictive.samples),
                false_alarms=posterior.false_alarms,
                seed=run.seed,
                overwrite=overwrite,
                reporter=reporter,
            )
        if posterior.checkpoint is not None:
            clear_checkpoint(posterior.checkpoint)
    reporter.result(
        {
            **content,
            **_describe(laplace),
            "structure": laplace.structure,
            "n_params": laplace.posterior.n_params,
            "n_data": laplace.n_data,
            "noise": laplace.likelihood.config()["noise"] if laplace.has_noise else None,
            "task": task,
        }
    )
    return code


def _describe(laplace: Laplace) -> dict[str, Any]:
    return {
        "prior_precision": {n: float(v.mean()) for n, v in laplace.prior_precision.items()},
        "data_scale": laplace.data_scale,
        "output_temperature": laplace.output_temperature,
        "tuning": None if laplace.tuning is None else str(laplace.tuning),
    }


@o.command(without=("data", "score"))
def tune(
    saved: o.SavedPosterior,
    output: Annotated[
        Path | None,
        o.option(
            "The folder for the result. Without it the posterior itself is replaced, after a question.",
            "--output",
            "-o",
        ),
    ] = None,
    *,
    sets: o.TrainData,
    data: o.DataOptions,
    tuning: TuneOptions,
    predictive: o.PredictiveOptions,
    run: o.RunOptions,
) -> int:
    """Find the prior precision, temperature and noise of a fitted posterior: on held-out data, or on its training data.

    A posterior that training built is tuned on --val alone: its temperature, or the noise of a regression. No new curvature and no new
    decomposition. A regression, and classes without --val, are tuned on the training data (--train) by the rule
    of fit; without them the evidence decides, or a grid on --val, and a warning says so.
    """
    reporter = run.reporter
    overwrite = confirmed(output, force=run.force, what="tune")
    if output is not None:
        check_replaceable(output, overwrite, FILES)
    _check_held_out(tuning.method, sets.val is not None)
    fitted = saved.load(run.checked_device())
    laplace = fitted.predictor
    if not isinstance(laplace, Laplace):
        _check_trained(saved.posterior, laplace.method, tuning, sets.val is not None)
    if output is None and fitted.extras.get("thresholds"):
        state = "holds a prior and thresholds that were chosen on validation data"
        confirmed(saved.posterior, force=run.force, what="tune", state=state)
    data_format = fitted.complete(data.format())
    validation = None if sets.val is None else open_source(sets.val, "validation", data_format, what="--val")
    train = None if sets.train is None else open_source(sets.train, "train", data_format, what="--train")
    options = fitted.predict_options(predictive.kind, predictive.samples)
    before = prior_in_words(laplace) if isinstance(laplace, Laplace) else ""
    if not isinstance(laplace, Laplace):
        assert validation is not None  # _check_trained
        laplace.tune(validation.batches, kind=options["kind"], samples=options["samples"])
    elif tuning.prior_precision is not None:
        laplace.with_prior(tuning.prior_precision)
    else:
        unlabelled = validation is None or tuning.method in ("self_consistent", "evidence", "lbfgs")
        say_tuning_cost(laplace, validation, options, reporter)
        laplace.tune(
            None if unlabelled or validation is None else validation.batches,
            train_loader=None if train is None else train.batches,
            method=None if tuning.method == "auto" else tuning.method,
            kind=options["kind"],
        )
    if isinstance(laplace, Laplace):
        reporter.line(f"{before} → {prior_in_words(laplace)}")
    if laplace.tuning is not None:
        reporter.line(str(laplace.tuning))
    code, content = finish(
        fitted,
        output or saved.posterior,
        validation=validation,
        options=options,
        false_alarms=tuning.false_alarms,
        seed=run.seed,
        overwrite=True,
        reporter=reporter,
    )
    if isinstance(laplace, Laplace):
        content |= {**_describe(laplace), "log_evidence": float(laplace.log_evidence())}
    else:
        content |= {"output_temperature": laplace.output_temperature, "tuning": str(laplace.tuning)}
    reporter.result(content)
    return code
