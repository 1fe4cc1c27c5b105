"""`aftermap fit`: a trained network becomes Bayesian."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from aftermap.cli import options as o
from aftermap.cli.console import CHECK_FAILED, GOOD, Speaker, confirmed, guarded
from aftermap.cli.fitting import FitSettings, build_for, fit_posterior, prior_in_words, resolve_task, self_check
from aftermap.cli.models import check_device
from aftermap.cli.sources import DataOptions, Source, open_source
from aftermap.cli.store import Fitted, calibrate, describe_data, save_fitted
from aftermap.distributed import process_group, rank, together, world_size
from aftermap.errors import InputError
from aftermap.laplace import Laplace

__all__ = ["STRUCTURES", "fit", "open_parts"]

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
