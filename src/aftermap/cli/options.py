"""The flags that several commands share, and a TOML file that says what the flags say; a flag on the command line wins."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from aftermap.cli.sources import DataOptions, parse_size
from aftermap.errors import InputError
from aftermap.lazy import optional

__all__ = [
    "BatchSize",
    "Channels",
    "Config",
    "DataDir",
    "DataSet",
    "Device",
    "Download",
    "Drop",
    "Force",
    "ImageSize",
    "Json",
    "Kind",
    "Limit",
    "Model",
    "Ood",
    "OptionalModel",
    "Posterior",
    "Samples",
    "Score",
    "Seed",
    "Target",
    "Task",
    "Test",
    "Train",
    "TrustCode",
    "Validation",
    "Weights",
    "apply_config",
    "data_options",
    "one_of",
]

_DATA, _MODEL, _RUN = "Data", "Model", "Running"
_SPEC = "npz, csv, idx, image folder, builtin:digits, fashion-mnist, pkg.module:loader"
Model = Annotated[
    str,
    typer.Option(
        "--model", metavar="SPEC", rich_help_panel=_MODEL, help="pkg.module:factory, or builtin:mlp|cnn|lenet|resnet20."
    ),
]
OptionalModel = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="SPEC", rich_help_panel=_MODEL, help="pkg.module:factory, or builtin:mlp|cnn|lenet|resnet20."
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        rich_help_panel=_MODEL,
        help="Safetensors, npz, or a checkpoint of torch.save (read without running code).",
    ),
]
TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        rich_help_panel=_MODEL,
        help="Run the factory that the folder names, although the folder may come from somebody else.",
    ),
]
Posterior = Annotated[Path, typer.Argument(metavar="POSTERIOR", help="Folder written by fit or train.")]
Train = Annotated[
    str | None, typer.Option("--train", metavar="DATA", rich_help_panel=_DATA, help=f"Training data: {_SPEC}.")
]
Validation = Annotated[
    str | None,
    typer.Option("--val", metavar="DATA", rich_help_panel=_DATA, help="Held-out data: for tuning and thresholds."),
]
Test = Annotated[str | None, typer.Option("--test", metavar="DATA", rich_help_panel=_DATA, help="Test data.")]
DataSet = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="DATA",
        rich_help_panel=_DATA,
        help="One set for all parts: train, validation and test are cut from it.",
    ),
]
Ood = Annotated[
    list[str] | None,
    typer.Option(
        "--ood",
        metavar="NAME=DATA",
        rich_help_panel=_DATA,
        help="Data that should look unusual; may be given several times.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option("--target", rich_help_panel=_DATA, help="Column of a csv with the targets: its name or number."),
]
Drop = Annotated[
    str | None,
    typer.Option("--drop", metavar="A,B", rich_help_panel=_DATA, help="Columns of a csv that are no inputs."),
]
DataDir = Annotated[
    str | None,
    typer.Option(
        "--data-dir",
        envvar="AFTERMAP_DATA",
        rich_help_panel=_DATA,
        help="Folder of named data sets [~/.cache/aftermap].",
    ),
]
Download = Annotated[
    bool, typer.Option("--download", rich_help_panel=_DATA, help="Fetch a named data set that is not there.")
]
ImageSize = Annotated[
    str | None, typer.Option("--image-size", metavar="HxW", rich_help_panel=_DATA, help="Resize images of a folder.")
]
Channels = Annotated[
    int | None, typer.Option("--channels", rich_help_panel=_DATA, help="1 (grey) or 3, for images of a folder.")
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, rich_help_panel=_DATA, help="Use only the first examples of each set.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, rich_help_panel=_RUN, help="Examples in a batch.")]
Task = Annotated[
    str, typer.Option("--task", rich_help_panel=_MODEL, help="auto, classification, binary, regression or counts.")
]
Kind = Annotated[str, typer.Option("--kind", rich_help_panel=_RUN, help="Predictive: auto, linearised or sampling.")]
Samples = Annotated[int, typer.Option("--samples", min=2, rich_help_panel=_RUN, help="Draws for the predictive.")]
Score = Annotated[
    str,
    typer.Option(
        "--score",
        rich_help_panel=_RUN,
        help="What is flagged: entropy, mutual_information, variance or max_probability.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, rich_help_panel=_RUN, help="Of everything random.")]
Device = Annotated[str, typer.Option("--device", rich_help_panel=_RUN, help="cpu, cuda, cuda:1, mps or auto.")]
Json = Annotated[bool, typer.Option("--json", rich_help_panel=_RUN, help="One JSON value on standard output.")]
Force = Annotated[bool, typer.Option("--force", rich_help_panel=_RUN, help="Replace what is there.")]


def apply_config(context: typer.Context, value: Path | None) -> Path | None:
    """Makes the entries of a TOML file the defaults of the command's options.

    Keys are the long names of the flags (``batch-size = 64`` or ``batch_size = 64``); those in a table with the name of the
    command (``[fit]``) are for it alone. A flag that may be given several times is a list; ``[ood]`` may be a table.
    """
    if value is None or context.resilient_parsing:
        return value
    try:
        content = _toml().loads(value.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise typer.BadParameter(f"there is no file {value}") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise typer.BadParameter(f"{value} cannot be read: {error}") from error
    names: dict[str, Any] = {}
    for parameter in context.command.params:
        for option in (parameter.name or "", *parameter.opts):
            names[option.lstrip("-").replace("-", "_")] = parameter
    command = context.info_name or ""
    verbs = _verbs(context)
    own = content.pop(command, {}) if isinstance(content.get(command), dict) and command not in names else {}
    entries = {k: v for k, v in content.items() if not (isinstance(v, dict) and k in verbs)}
    defaults = dict(context.default_map or {})
    for key, entry in {**entries, **own}.items():
        plain = key.replace("-", "_")
        if plain not in names or plain == "config":
            close = difflib.get_close_matches(plain, names, n=1)
            hint = (
                f" Did you mean {close[0].replace('_', '-')!r}?" if close else f" It knows: {', '.join(sorted(names))}."
            )
            raise typer.BadParameter(f"{value}: {command} has no option {key!r}.{hint}")
        parameter = names[plain]
        if isinstance(entry, dict):
            entry = [f"{k}={v}" for k, v in entry.items()]
        several = bool(getattr(parameter, "multiple", False))
        if isinstance(entry, list) and not several:
            entry = ",".join(map(str, entry))
        defaults[parameter.name] = (
            [str(v) for v in (entry if isinstance(entry, list) else [entry])] if several else entry
        )
    context.default_map = defaults
    return value


def _verbs(context: typer.Context) -> set[str]:
    parent = context.parent
    return set(getattr(parent.command, "commands", {})) if parent is not None else set()


def _toml() -> Any:
    return optional("tomllib" if sys.version_info >= (3, 11) else "tomli", "cli", "TOML files")


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        rich_help_panel=_RUN,
        is_eager=True,
        callback=apply_config,
        help="TOML file that says what flags say.",
    ),
]


def one_of(flag: str, value: str, allowed: tuple[str, ...]) -> str:
    """A word that must be one of several.

    Raises:
        InputError: another word.
    """
    if value not in allowed:
        raise InputError(f"{flag} {value!r} is not known; allowed are {', '.join(allowed)}")
    return value


def data_options(
    *,
    target: str | None = None,
    drop: str | None = None,
    data_dir: str | None = None,
    download: bool = False,
    image_size: str | None = None,
    channels: int | None = None,
    limit: int | None = None,
    batch_size: int = 256,
    task: str = "auto",
) -> DataOptions:
    """The flags about data, checked."""
    one_of("--task", task, ("auto", "classification", "binary", "regression", "counts"))
    if channels not in (None, 1, 3):
        raise InputError(f"--channels {channels} must be 1 or 3")
    size = parse_size(image_size, "--image-size")
    if size is not None and len(size) not in (1, 2):
        raise InputError(f"--image-size {image_size!r} must be one or two numbers, such as 28x28")
    return DataOptions(
        target=target,
        drop=tuple(name.strip() for name in drop.split(",")) if drop else (),
        folder=data_dir,
        download=download,
        batch_size=batch_size,
        image_size=None if size is None else (size[0], size[-1]),
        channels=channels,
        limit=limit,
        task=task,
    )
