"""`aftermap train`: training that ends with a posterior."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.cli import options as o
from aftermap.cli.builtin import Network, Standardise
from aftermap.cli.console import CHECK_FAILED, GOOD, Reporter, check_writable
from aftermap.cli.fit import build_for, check_before_data, likelihood_of, resolve_task, try_model
from aftermap.cli.models import save_weights
from aftermap.cli.sources import Source, open_parts
from aftermap.cli.store import Fitted, describe_fit, finish
from aftermap.cli.training import (
    CHECKPOINT,
    DAMPINGS,
    HISTORY,
    RATES,
    Optimizer,
    Recipe,
    Run,
    enough_epochs,
    make_optimizer,
    train_network,
    usual_rate,
)
from aftermap.data import Examples
from aftermap.distributed import fail_together, process_group, rank, world_size
from aftermap.errors import InputError
from aftermap.likelihoods import Gaussian, Likelihood
from aftermap.optim import TrainedPosterior
from aftermap.optim.base import VariationalOptimizer

__all__ = ["TrainOptions", "half_deviation", "standardise", "train"]


@dataclass(frozen=True)
class TrainOptions:
    """How a network is trained."""

    panel: ClassVar[str] = "Training"
    optimizer: Annotated[str, o.option("The optimiser. All but Adam end with a posterior."), o.OneOf(tuple(RATES))] = (
        "vogn"
    )
    epochs: Annotated[
        int | None,
        o.option("The number of passes over the training data [10, or as many as 500 steps need].", min=1),
    ] = None
    lr: Annotated[
        float | None,
        o.option("The learning rate at the start; it falls to 0 along a cosine [by optimiser and task]."),
        o.Positive(),
    ] = None
    prior_precision: Annotated[
        float,
        o.option("The prior precision of the weights; with Adam, N times the weight decay."),
        o.Positive(),
    ] = 10.0
    damping: Annotated[
        float | None,
        o.option("A number that is added to the curvature and steadies the optimiser [depends on the optimiser]."),
    ] = None
    mc_samples: Annotated[int, o.option("The number of draws of the weights in each step.", min=1)] = 1
    temperature: Annotated[
        float,
        o.option(
            "The temperature of the posterior, for vogn, ivon and noisy_kfac. 1 is Bayes' rule, with which networks that have more weights "
            "than data learn little; below 1 the data count for more."
        ),
        o.Positive(),
    ] = 0.1
    noise: Annotated[
        float | None,
        o.option(
            "The standard deviation of the noise of a regression, which then stays [half that of the targets in training, afterwards "
            "that of the residuals on validation data]."
        ),
        o.Positive(),
    ] = None
    tune: Annotated[
        bool,
        o.option("Whether the posterior is tuned on the validation data after training.", "--tune/--no-tune"),
    ] = True
    checkpoint_seconds: Annotated[float, o.option("The seconds between checkpoints within an epoch.")] = 30.0

    def of_recipe(self, n_data: int, batch_size: int, task: str) -> dict[str, Any]:
        """Returns what these options decide of a recipe; what was not said follows from the optimiser and the data."""
        return {
            "optimizer": self.optimizer,
            "epochs": self.epochs or enough_epochs(n_data, batch_size),
            "lr": usual_rate(self.optimizer, task) if self.lr is None else self.lr,
            "prior_precision": self.prior_precision,
            "damping": DAMPINGS[self.optimizer] if self.damping is None else self.damping,
            "mc_samples": self.mc_samples,
            "temperature": self.temperature,
        }


@o.command(without=("kind", "score"), by_all=True, batch_size=128, samples=32)
def train(
    output: Annotated[Path, o.option("The folder of the run.", "--output", "-o")],
    model: o.ModelOptions,
    sets: o.TrainData,
    data: o.DataOptions,
    training: TrainOptions,
    predictive: o.PredictiveOptions,
    run: o.RunOptions,
) -> int:
    """Train a network with a Bayesian optimiser (or Adam), on one process or with torchrun on many.

    The same command after an interruption goes on where it was. The folder gets model.safetensors, history.json and, with a
    Bayesian optimiser, posterior/ for predict, evaluate, report and where.
    """
    reporter, device = run.reporter, run.checked_device()
    _check_folder(output, run.force)
    check_before_data(model)
    # The batches of training are cut from data in memory; these are for looking at the data.
    data_format = replace(data.format(task=model.task), batch_size=512)
    with process_group(device):
        source, validation = open_parts(sets.train, sets.val, sets.data, data_format)
        examples = _in_memory(source)
        network, model_config = build_for(model.model, model.weights, source, data_format, device, run.seed)
        if model.weights is None:
            standardise(network, source)
        task = resolve_task(model.task, network, source)
        likelihood = likelihood_of(
            task, training.noise, lambda: half_deviation(source, try_model(network, source)[1].shape[-1])
        )
        # A noise that was said is not to be found.
        tuned = training.tune and validation is not None and training.noise is None
        for note in [*source.notes(), *_about_noise(likelihood, training.noise, tuned)]:
            reporter.note(note)
        noise = torch.as_tensor(likelihood.noise).tolist() if isinstance(likelihood, Gaussian) else None
        recipe = Recipe(
            model=model.model,
            options=model_config["options"],
            data=source.spec,
            n_data=len(examples),
            task=task,
            noise=noise,
            batch_size=data.batch_size,
            seed=run.seed,
            **training.of_recipe(len(examples), data.batch_size, task),
        )
        progress = Run(output, recipe)
        optimizer = _start(progress, network, likelihood, run.force, reporter)
        train_network(
            progress,
            network,
            optimizer,
            examples,
            likelihood,
            validation=None if validation is None else validation.examples,
            on_epoch=lambda numbers: _tell(reporter, numbers, recipe.epochs),
            every=training.checkpoint_seconds,
        )
        last = _epoch_in_words(progress.history[-1]).partition(": ")[2] if progress.history else "no epoch ended"
        reporter.line(f"trained {checks.counted(recipe.epochs, 'epoch')} with {recipe.optimizer}: {last}")
        weights, code = output / "model.safetensors", GOOD
        content: dict[str, Any] = {"run": str(output), "steps": progress.step, "history": progress.history}
        with fail_together("saving"):
            if rank() == 0:
                save_weights(network, weights)
            if not isinstance(optimizer, VariationalOptimizer):
                reporter.line(f"weights in {weights}; next:")
                reporter.line(f"  {_fit_command(model, weights, sets, data)}")
            else:
                extras = describe_fit(model_config, source, data_format, task, run.seed)
                fitted = Fitted(optimizer.posterior(likelihood), network, extras, {})
                held_out = validation if tuned else None
                options = fitted.predict_options("auto", predictive.samples)
                _tune(fitted, held_out, options, reporter)
                place, seed = output / "posterior", run.seed
                code, saved = finish(
                    fitted, place, validation=validation, options=options, seed=seed, overwrite=True, reporter=reporter
                )
                content |= saved
                if code == CHECK_FAILED:
                    reporter.line("more --epochs or a lower --temperature may help, or a posterior of these weights:")
                    reporter.line(f"  {_fit_command(model, weights, sets, data)}")
    reporter.result(content)
    return code


def _tune(fitted: Fitted, held_out: Source | None, options: Mapping[str, Any], reporter: Reporter) -> None:
    """Tunes a posterior for the predictive that suits it, and says what was found; nothing without data."""
    if isinstance(fitted.predictor, TrainedPosterior) and held_out is not None:
        fitted.predictor.tune(held_out.batches.named(""), **options)
        reporter.line(f"tuned: {fitted.predictor.tuning}")


def _tell(reporter: Reporter, numbers: Mapping[str, float], epochs: int, lines: int = 20) -> None:
    """Says how an epoch went; of many epochs about ``lines`` are told of, and the last one."""
    if numbers["epoch"] % math.ceil(epochs / lines) == 0 or numbers["epoch"] == epochs:
        reporter.note(_epoch_in_words(numbers, epochs))


def _fit_command(model: o.ModelOptions, weights: Path, sets: o.TrainData, data: o.DataOptions) -> str:
    """Returns the command that makes the trained network Bayesian with the same data; it can be pasted into a shell."""
    words = ["aftermap", "fit", "--model", model.model, "--weights", str(weights)]
    if model.task != "auto":
        words += ["--task", model.task]
    for options in (sets, data):
        for item in fields(options):
            value = getattr(options, item.name)
            if value != item.default and item.name not in ("batch_size", "download"):
                words += [f"--{item.name.replace('_', '-')}", str(value)]
    return f"{shlex.join(words)} -o posterior/"


def _epoch_in_words(numbers: Mapping[str, float], epochs: int | None = None) -> str:
    """Says in a line what the history holds about an epoch."""
    values = ", ".join(
        f"{name.replace('_', ' ')} {_short(value)}" for name, value in numbers.items() if name != "epoch"
    )
    return f"epoch {numbers['epoch']:.0f}{'' if epochs is None else f'/{epochs}'}: {values}"


def _in_memory(training: Source) -> Examples:
    if training.examples is None or training.examples.targets is None:
        raise InputError(
            "aftermap train needs data in memory with targets; for a loader of your own use aftermap.optim in Python"
        )
    return training.examples


def _start(run: Run, network: nn.Module, likelihood: Likelihood, force: bool, reporter: Reporter) -> Optimizer:
    """Makes the optimiser, and takes it up where the run stopped, if it did."""
    recipe, output = run.recipe, run.folder
    n_params = sum(p.numel() for p in network.parameters())
    reporter.note(
        f"{recipe.optimizer}, {n_params:,} parameters, {checks.counted(recipe.n_data, 'example')}, {checks.counted(recipe.steps, 'step')}"
        + (f" on {world_size()} processes" if world_size() > 1 else "")
    )
    with fail_together("preparing the run"):
        if force and rank() == 0:
            (output / CHECKPOINT).unlink(missing_ok=True)
    optimizer = make_optimizer(recipe, network, likelihood)
    if run.resume(network, optimizer):
        state = "is finished" if run.step >= recipe.steps else f"continues at step {run.step:,} of {recipe.steps:,}"
        reporter.note(f"the run in {output} {state}")
    return optimizer


def _check_folder(output: Path, force: bool) -> None:
    """Refuses a folder that is not of such a run; that of a run is gone on with."""
    check_writable(output)
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file; a run is a folder: choose another name with -o")
    first = {
        HISTORY,
        f".{HISTORY}.part",
        f".{CHECKPOINT}.part",
    }  # What a kill leaves before the first checkpoint is there.
    foreign = (
        output.is_dir() and not (output / CHECKPOINT).is_file() and any(p.name not in first for p in output.iterdir())
    )
    if foreign and not force:
        raise InputError(
            f"{output} exists and is not a run that can be continued. Choose another name with -o, or add --force"
        )


def _about_noise(likelihood: Likelihood, given: float | None, tuned: bool) -> list[str]:
    """Returns what a user should know about the noise of a regression that was not given."""
    if not isinstance(likelihood, Gaussian) or given is not None:
        return []
    values = torch.as_tensor(likelihood.noise).reshape(-1).tolist()
    taken = f"the noise is taken as {', '.join(map(_short, values))}, half the standard deviation of the targets, since there is no --noise"
    if tuned:
        return [f"in training {taken}; afterwards residuals on the validation data tell it"]
    return [f"{taken}. The widths of all intervals depend on it; held-out data (--val) would tell it"]


def _short(value: float) -> str:
    """Writes a number with at most four digits, or as a whole number with commas."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def half_deviation(training: Source, outputs: int = 1) -> float | Tensor:
    """Returns the noise that training assumes where none was said: half the standard deviation of the targets, of each of several outputs."""
    examples = training.examples
    if examples is None or examples.targets is None:
        return 1.0
    targets = examples.targets.double()
    deviation = 0.5 * targets.reshape(-1, outputs if targets.shape[1:] == (outputs,) else 1).std(0)
    deviation = torch.where(deviation > 0, deviation, 1.0)
    return float(deviation) if len(deviation) == 1 else deviation


def standardise(network: nn.Module, training: Source) -> None:
    """Makes built-in networks standardise their inputs by the training data, and give targets in their own units."""
    examples = training.examples
    if not isinstance(network, Network) or examples is None or examples.targets is None:
        return
    network.standardise.set_from(examples.inputs)
    if isinstance(network.scale, Standardise):
        network.scale.set_from(examples.targets.reshape(len(examples), -1))
