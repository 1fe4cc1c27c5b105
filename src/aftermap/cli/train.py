"""`aftermap train`: training that ends with a posterior."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from aftermap.cli import options as o
from aftermap.cli.builtin import Network, Standardise
from aftermap.cli.console import CHECK_FAILED, GOOD, Speaker, guarded
from aftermap.cli.fit import build_for, open_parts, resolve_task, self_check
from aftermap.cli.models import check_device, save_weights
from aftermap.cli.sources import Source
from aftermap.cli.store import Fitted, calibrate, describe_data, save_fitted
from aftermap.cli.training import (
    CHECKPOINT,
    OPTIMIZERS,
    Recipe,
    Run,
    damping_of,
    make_optimizer,
    rate_of,
    train_network,
)
from aftermap.data import Examples
from aftermap.distributed import process_group, rank, together, world_size
from aftermap.errors import InputError
from aftermap.likelihoods import Gaussian, Likelihood, parse_likelihood
from aftermap.optim import TrainedPosterior

__all__ = ["likelihood_of", "standardise", "train"]

_TRAIN = "Training"
_Optimizer = Annotated[str, typer.Option("--optimizer", rich_help_panel=_TRAIN, help=f"{', '.join(OPTIMIZERS)}.")]
_Lr = Annotated[float | None, typer.Option("--lr", rich_help_panel=_TRAIN, help="Learning rate; falls along a cosine.")]
_PriorPrecision = Annotated[
    float,
    typer.Option("--prior-precision", rich_help_panel=_TRAIN, help="Of the weights; with Adam weight decay times N."),
]
_Damping = Annotated[float | None, typer.Option("--damping", rich_help_panel=_TRAIN, help="Steadies the optimiser.")]
_Noise = Annotated[
    float | None,
    typer.Option(
        "--noise", rich_help_panel=_TRAIN, help="Standard deviation of regression noise [half that of the targets]."
    ),
]
_CheckpointSeconds = Annotated[
    float, typer.Option("--checkpoint-seconds", rich_help_panel=_TRAIN, help="Between checkpoints within an epoch.")
]
_Epochs = Annotated[int, typer.Option("--epochs", min=1, rich_help_panel=_TRAIN, help="Passes over the data.")]
_McSamples = Annotated[int, typer.Option("--mc-samples", min=1, rich_help_panel=_TRAIN, help="Draws per step.")]


@guarded
def train(
    model: o.Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the run.")],
    data: o.DataSet = None,
    train: o.Train = None,
    val: o.Validation = None,
    optimizer: _Optimizer = "vogn",
    epochs: _Epochs = 10,
    lr: _Lr = None,
    prior_precision: _PriorPrecision = 10.0,
    damping: _Damping = None,
    mc_samples: _McSamples = 1,
    noise: _Noise = None,
    checkpoint_seconds: _CheckpointSeconds = 30.0,
    weights: o.Weights = None,
    task: o.Task = "auto",
    samples: o.Samples = 32,
    target: o.Target = None,
    drop: o.Drop = None,
    data_dir: o.DataDir = None,
    download: o.Download = False,
    image_size: o.ImageSize = None,
    channels: o.Channels = None,
    limit: o.Limit = None,
    batch_size: o.BatchSize = 128,
    seed: o.Seed = 0,
    device: o.Device = "cpu",
    force: o.Force = False,
    as_json: o.Json = False,
    config: o.Config = None,
) -> int:
    """Train a network with a Bayesian optimiser (or Adam), on one process or with torchrun on many.

    The same command after an interruption goes on where it was. The folder gets model.safetensors, history.json and, with a
    Bayesian optimiser, posterior/ for predict, evaluate, report and where.
    """
    o.one_of("--optimizer", optimizer, OPTIMIZERS)
    speaker, where = Speaker(as_json), check_device(device)
    _check_folder(output, force)
    reading = o.data_options(
        target=target,
        drop=drop,
        data_dir=data_dir,
        download=download,
        image_size=image_size,
        channels=channels,
        limit=limit,
        batch_size=512,
        task=task,
    )
    with process_group(where):
        training, held = open_parts(train, val, data, reading)
        examples = _in_memory(training)
        network, told = build_for(model, weights, training, reading, where, seed)
        if weights is None:
            standardise(network, training)
        resolved = resolve_task(task, network, training)
        likelihood = likelihood_of(resolved, noise, training)
        recipe = Recipe(
            model=model,
            options=told["options"],
            data=training.spec,
            n_data=len(examples),
            task=resolved,
            noise=float(likelihood.noise) if isinstance(likelihood, Gaussian) else None,
            optimizer=optimizer,
            epochs=epochs,
            batch_size=batch_size,
            lr=rate_of(optimizer) if lr is None else lr,
            prior_precision=prior_precision,
            damping=damping_of(optimizer) if damping is None else damping,
            mc_samples=mc_samples,
            seed=seed,
        )
        run = Run(output, recipe)
        maker = _start(run, network, likelihood, force, speaker)
        train_network(run, network, maker, examples, likelihood, every=checkpoint_seconds)
        extras = {"model": told, "data": describe_data(training, reading), "task": resolved, "seed": seed}
        with together("saving"):
            return _finish(run, network, maker, likelihood, extras, held, samples, speaker)


def _in_memory(training: Source) -> Examples:
    if training.examples is None or training.examples.targets is None:
        raise InputError(
            "aftermap train needs data in memory with targets; for a loader of your own use aftermap.optim in Python"
        )
    return training.examples


def _start(
    run: Run, network: nn.Module, likelihood: Likelihood, force: bool, speaker: Speaker
) -> torch.optim.Optimizer:
    """The optimiser, where the run stopped if it did."""
    recipe, output = run.recipe, run.folder
    n_params = sum(p.numel() for p in network.parameters())
    speaker.note(
        f"{recipe.optimizer}, {n_params:,} parameters, {recipe.n_data:,} examples, {recipe.steps:,} steps"
        + (f" on {world_size()} processes" if world_size() > 1 else "")
    )
    with together("preparing the run"):
        if force and rank() == 0:
            (output / CHECKPOINT).unlink(missing_ok=True)
    maker = make_optimizer(recipe, network, likelihood)
    with together("reading the checkpoint"):
        resumed = run.resume(network, maker)
    if resumed:
        state = "is finished" if run.step >= recipe.steps else f"goes on at step {run.step:,} of {recipe.steps:,}"
        speaker.note(f"the run in {output} {state}")
    return maker


def _check_folder(output: Path, force: bool) -> None:
    """A folder of a run is gone on with; another one is not touched."""
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file; a run is a folder: choose another name with -o")
    foreign = output.is_dir() and any(output.iterdir()) and not (output / CHECKPOINT).is_file()
    if foreign and not force:
        raise InputError(f"{output} exists and is no run to go on with. Choose another name with -o, or add --force")


def likelihood_of(task: str, noise: float | None, training: Source) -> Likelihood:
    """The likelihood of a task; without a noise half the deviation of the targets."""
    if task != "regression":
        if noise is not None:
            raise InputError(f"--noise belongs to a regression, but the task is {task}")
        return parse_likelihood(task)
    if noise is None:
        examples = training.examples
        spread = 1.0 if examples is None or examples.targets is None else float(examples.targets.double().std())
        noise = 0.5 * spread if spread > 0 else 1.0
    return Gaussian(noise=noise)


def standardise(network: nn.Module, training: Source) -> None:
    """Built-in networks standardise their inputs by the training data, and give targets in their own units."""
    examples = training.examples
    if not isinstance(network, Network) or examples is None or examples.targets is None:
        return
    network.standardise.set_from(examples.inputs)
    if isinstance(network.scale, Standardise):
        network.scale.set_from(examples.targets.reshape(len(examples), -1))


def _finish(
    run: Run,
    network: nn.Module,
    optimizer: Any,
    likelihood: Likelihood,
    extras: dict[str, Any],
    held: Source | None,
    samples: int,
    speaker: Speaker,
) -> int:
    """Writes the weights and the posterior, and says what came out."""
    place, code = run.folder / "posterior", GOOD
    last = run.history[-1]["loss"] if run.history else float("nan")
    speaker.line(f"trained {run.recipe.epochs} epochs with {run.recipe.optimizer}: loss {last:.4g}")
    result: dict[str, Any] = {"run": str(run.folder), "steps": run.step, "history": run.history}
    if rank() == 0:
        save_weights(network, run.folder / "model.safetensors")
    if run.recipe.optimizer == "adam":
        speaker.line(f"weights in {run.folder / 'model.safetensors'}; next:")
        speaker.line(
            f"  aftermap fit --model {run.recipe.model} --weights {run.folder / 'model.safetensors'} --data {run.recipe.data} -o posterior/"
        )
        speaker.result(result)
        return code
    trained: TrainedPosterior = optimizer.posterior(likelihood)
    fitted = Fitted(trained, network, extras, {})
    options = fitted.predict_options("auto", samples)
    extras["predict"] = options
    extras["processes"] = world_size()
    reference: dict[str, torch.Tensor] = {}
    if held is not None and rank() == 0:
        checked = self_check(trained, held, options)
        extras["self_check"] = {"passed": not checked.collapsed, "on": "validation data", "message": checked.message}
        extras["thresholds"], reference = calibrate(
            trained, held.batches.named("thresholds"), options, 0.05, extras["seed"]
        )
        code = CHECK_FAILED if checked.collapsed else GOOD
        state = "passed" if code == GOOD else "FAILED"
        speaker.line(
            f"self-check on validation data {state}: {checked.message}", style=None if code == GOOD else "bold red"
        )
    if rank() == 0:
        save_fitted(trained, place, extras, reference, overwrite=True)
    speaker.line(f"posterior in {place}; next: aftermap report {place} --test DATA")
    speaker.result(
        {
            **result,
            "posterior": str(place),
            "self_check": extras.get("self_check"),
            "thresholds": extras.get("thresholds"),
        }
    )
    return code
