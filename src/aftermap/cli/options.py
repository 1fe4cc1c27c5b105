"""The options of the commands in groups, the decorator that makes a command of a function that takes groups, and TOML files.

A group is a frozen dataclass whose fields are options. A command names the groups that it takes; `command` spreads their fields over
its signature, so that an option has one name, one help text and one check wherever it is offered.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_origin

import torch
import typer
from typer.models import OptionInfo

from aftermap.cli.console import Reporter, guarded
from aftermap.cli.models import check_device
from aftermap.cli.sources import DataFormat, parse_size
from aftermap.cli.store import Fitted, load_fitted
from aftermap.distributed import launched_rank
from aftermap.errors import InputError
from aftermap.evaluation.reference import FLAG_SCORES
from aftermap.predictive.predictor import KINDS

__all__ = [
    "FACTORY",
    "DataOptions",
    "Fraction",
    "ModelOptions",
    "OneOf",
    "Positive",
    "PredictiveOptions",
    "RunOptions",
    "SavedPosterior",
    "Task",
    "TestData",
    "TrainData",
    "Weights",
    "apply_config",
    "command",
    "option",
    "where_said",
]


def option(help: str, *flags: str, **settings: Any) -> OptionInfo:
    """Returns an option of a command; without flags it is called like its field: `data_dir` is --data-dir."""
    info: OptionInfo = typer.Option(*flags, help=help, **settings)
    return info


@dataclass(frozen=True)
class OneOf:
    """An option that must be one of several words, which its help lists."""

    allowed: tuple[str, ...]

    @property
    def help(self) -> str:
        """What the help text of the option says about it."""
        return f" One of {', '.join(self.allowed)}."

    def check(self, flag: str, value: str) -> None:
        """Refuses another word."""
        if value not in self.allowed:
            raise InputError(f"{flag} {value!r} is not known; allowed are {', '.join(self.allowed)}")


@dataclass(frozen=True)
class Fraction:
    """An option that must lie between 0 and 1."""

    help: ClassVar[str] = ""

    def check(self, flag: str, value: float) -> None:
        """Refuses another number."""
        if not 0 < value < 1:
            raise InputError(f"{flag} {value} must lie between 0 and 1; write 5 % as 0.05")


@dataclass(frozen=True)
class Positive:
    """An option that must be finite and above 0, where it is given."""

    help: ClassVar[str] = ""

    def check(self, flag: str, value: float | None) -> None:
        """Refuses another number."""
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{flag} {value:g} must be a number above 0")


def command(
    *, without: Collection[str] = (), by_all: bool = False, **defaults: Any
) -> Callable[[Callable[..., int | None]], Any]:
    """Makes a command of a function whose arguments are groups of options, and single options.

    Args:
        without: The names of options in these groups that mean nothing to this command; they keep their default.
        by_all: Whether all processes that torchrun starts work together; else the first does everything and the others end.
        **defaults: Other defaults than those of the groups, by the names of the options.
    """

    def decorate(function: Callable[..., int | None]) -> Any:
        arguments = inspect.signature(function, eval_str=True).parameters
        groups: dict[str, Any] = {name: a.annotation for name, a in arguments.items() if is_dataclass(a.annotation)}
        offered: list[inspect.Parameter] = []
        for name, argument in arguments.items():
            group = groups.get(name)
            members = [argument] if group is None else inspect.signature(group, eval_str=True).parameters.values()
            offered += [_offered(p, getattr(group, "panel", None), defaults) for p in members if p.name not in without]

        def run(**values: Any) -> int | None:
            if launched_rank() and not by_all:
                return None
            for parameter in offered:
                for restriction in get_args(parameter.annotation)[2:]:
                    try:
                        restriction.check(_flag(parameter), values[parameter.name])
                    except InputError as error:
                        raise InputError(f"{error}{where_said(parameter.name, values[parameter.name])}") from None
            for name, group in groups.items():
                members = [field.name for field in fields(group) if field.name in values]
                values[name] = group(**{member: values.pop(member) for member in members})
            return function(**values)

        entry: Any = guarded(run)
        entry.__name__, entry.__doc__, entry.__annotations__ = function.__name__, function.__doc__, {}
        entry.__signature__ = inspect.Signature(offered)
        return entry

    return decorate


def _offered(parameter: inspect.Parameter, panel: str | None, defaults: Mapping[str, Any]) -> inspect.Parameter:
    """Returns a parameter as typer reads it: with its flag, its panel, its default, and a help text that says what is allowed."""
    annotation = parameter.annotation
    if get_origin(annotation) is Annotated:
        kind, info, *restrictions = get_args(annotation)
        if isinstance(info, OptionInfo):
            info = copy(info)
            # In an annotation typer keeps the first flag of an option as its default.
            info.default = _flag(parameter) if info.default is ... else info.default
            info.rich_help_panel = panel
            info.help = (info.help or "") + "".join(r.help for r in restrictions)
        annotation = Annotated[(kind, info, *restrictions)]
    default = defaults.get(parameter.name, parameter.default)
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag(parameter: inspect.Parameter) -> str:
    return "--" + parameter.name.replace("_", "-")


# The options that a TOML file has set: each with its value, and where it stands.
_from_file: dict[str, tuple[Any, str]] = {}


def where_said(name: str, value: Any) -> str:
    """Says where in a TOML file an option has this value, for messages; nothing where it was typed."""
    entry, where = _from_file.get(name, (None, ""))
    return f" ({where})" if where and entry == value else ""


def apply_config(context: typer.Context, value: Path | None) -> Path | None:
    """Makes the entries of a TOML file the defaults of the command's options.

    Keys are the long names of the flags (``batch-size = 64`` or ``batch_size = 64``); those in a table with the name of the
    command (``[fit]``) are for it alone. A flag that may be given several times is a list; ``[ood]`` may be a table.
    """
    _from_file.clear()
    if value is None or context.resilient_parsing:
        return value
    try:
        text = value.read_text(encoding="utf-8")
        content = tomllib.loads(text)
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
    for_command = content.pop(command, {}) if isinstance(content.get(command), dict) and command not in names else {}
    entries = {k: v for k, v in content.items() if not (isinstance(v, dict) and k in verbs)}
    defaults = dict(context.default_map or {})
    for key, entry in {**entries, **for_command}.items():
        plain, where = key.replace("-", "_"), _place(value, text, key)
        if plain not in names or plain == "config":
            known = {verb.replace("-", "_"): f"[{verb}]" for verb in verbs} if isinstance(entry, dict) else {}
            known |= {} if known else {name: repr(name.replace("_", "-")) for name in names}
            close = difflib.get_close_matches(plain, known, n=1)
            hint = f" Did you mean {known[close[0]]}?" if close else f" It knows: {', '.join(sorted(known.values()))}."
            what = f"there is no command {key!r}" if isinstance(entry, dict) else f"{command} has no option {key!r}"
            raise typer.BadParameter(f"{where}: {what}.{hint}")
        parameter = names[plain]
        if isinstance(entry, dict):
            entry = [f"{k}={v}" for k, v in entry.items()]
        several = bool(getattr(parameter, "multiple", False))
        if isinstance(entry, list) and not several:
            entry = ",".join(map(str, entry))
        entry = [str(v) for v in (entry if isinstance(entry, list) else [entry])] if several else entry
        try:
            parameter.process_value(context, entry)
        except typer.BadParameter as error:
            raise typer.BadParameter(f"{where}: {key} = {entry!r}: {error.message}") from error
        defaults[parameter.name] = entry
        _from_file[parameter.name] = (entry, where)
    context.default_map = defaults
    return value


def _place(file: Path, text: str, key: str) -> str:
    """Returns the file and the line of a key or of a table."""
    start = re.compile(rf"""\s*\[?\s*["']?{re.escape(key)}["']?\s*(=|\])""")
    line = next((n for n, content in enumerate(text.splitlines(), 1) if start.match(content)), None)
    return str(file) if line is None else f"{file}, line {line}"


def _verbs(context: typer.Context) -> set[str]:
    parent = context.parent
    return set(getattr(parent.command, "commands", {})) if parent is not None else set()


_SPEC = "an npz, csv or idx file, a folder of images, builtin:digits, fashion-mnist, or pkg.module:loader"
Weights = Annotated[
    Path | None,
    option(
        "The file with the network's weights: safetensors, npz, or a checkpoint of torch.save, which is read without "
        "running code."
    ),
]
Task = Annotated[
    str,
    option("What the targets are."),
    OneOf(("auto", "classification", "binary", "regression", "counts")),
]
FACTORY = "pkg.module:factory, or builtin:mlp|cnn|lenet|resnet20"


@dataclass(frozen=True)
class ModelOptions:
    """The network that a command works on."""

    panel: ClassVar[str] = "Model"
    model: Annotated[str, option(f"How to build the network: {FACTORY}.", metavar="SPEC")]
    weights: Weights = None
    task: Task = "auto"


@dataclass(frozen=True)
class SavedPosterior:
    """The folder of a posterior, and how its network is built where the folder's own word is not taken."""

    panel: ClassVar[str] = "Model"
    posterior: Annotated[Path, typer.Argument(metavar="POSTERIOR", help="The folder that fit or train has written.")]
    model: Annotated[
        str | None,
        option(f"How to build the network, if not as the folder says: {FACTORY}.", metavar="SPEC"),
    ] = None
    weights: Weights = None
    trust_code: Annotated[
        bool,
        option(
            "Run the code that the folder names to build its network, although the folder may come from somebody else."
        ),
    ] = False

    def load(self, device: torch.device) -> Fitted:
        """Loads the posterior with its network."""
        return load_fitted(
            self.posterior, model=self.model, weights=self.weights, device=device, trust_code=self.trust_code
        )


@dataclass(frozen=True)
class TrainData:
    """The data of a command that fits or trains."""

    panel: ClassVar[str] = "Data"
    train: Annotated[str | None, option(f"The training data: {_SPEC}.", metavar="DATA")] = None
    val: Annotated[
        str | None,
        option(
            "Held-out data. The posterior is tuned and checked on them, and the thresholds for flags are chosen.",
            metavar="DATA",
        ),
    ] = None
    data: Annotated[
        str | None,
        option(
            "One data set that is split into training, validation and test data, instead of --train.", metavar="DATA"
        ),
    ] = None


@dataclass(frozen=True)
class TestData:
    """The data of a command that tests."""

    __test__: ClassVar[bool] = False  # no test of pytest's
    panel: ClassVar[str] = "Data"
    test: Annotated[
        str | None,
        option("The test data, by default the test part of the set that was trained on.", metavar="DATA"),
    ] = None
    ood: Annotated[
        list[str] | None,
        option("Data that should look unusual. The option may be given several times.", metavar="NAME=DATA"),
    ] = None


@dataclass(frozen=True)
class DataOptions:
    """How data are read."""

    panel: ClassVar[str] = "Data"
    target: Annotated[str | None, option("The column of a csv with the targets: its name or its number.")] = None
    drop: Annotated[
        str | None,
        option(
            "The columns of a csv to leave out of the inputs, by name or number. A posterior of a csv remembers its inputs by name.",
            metavar="A,B",
        ),
    ] = None
    data_dir: Annotated[
        str | None,
        option("The folder of named data sets [~/.cache/aftermap].", envvar="AFTERMAP_DATA"),
    ] = None
    download: Annotated[bool, option("Fetch a named data set that is not there.")] = False
    image_size: Annotated[str | None, option("The size to which images of a folder are resized.", metavar="HxW")] = None
    channels: Annotated[
        int | None, option("The number of channels of the images in a folder: 1 (grey) or 3 (colour).")
    ] = None
    limit: Annotated[
        int | None, option("The largest number of examples to use of each set; the first ones are taken.", min=1)
    ] = None
    batch_size: Annotated[int, option("The number of examples per batch.", min=1)] = 256

    def format(self, *, task: str = "auto") -> DataFormat:
        """Returns the checked options.

        Raises:
            InputError: A size or a number of channels that no image has.
        """
        if self.channels not in (None, 1, 3):
            raise InputError(f"--channels {self.channels} must be 1 or 3")
        size = parse_size(self.image_size, "--image-size")
        if size is not None and len(size) not in (1, 2):
            raise InputError(f"--image-size {self.image_size!r} must be one or two numbers, such as 28x28")
        return DataFormat(
            target=self.target,
            drop=tuple(name.strip() for name in self.drop.split(",")) if self.drop else (),
            folder=self.data_dir,
            download=self.download,
            batch_size=self.batch_size,
            image_size=None if size is None else (size[0], size[-1]),
            channels=self.channels,
            limit=self.limit,
            task=task,
        )


@dataclass(frozen=True)
class PredictiveOptions:
    """How a posterior predicts, and by which score it flags."""

    panel: ClassVar[str] = "Predictive"
    kind: Annotated[
        str,
        option(
            "How predictions are computed. auto takes what suits the posterior; margin is a cheaper way for classes."
        ),
        OneOf(("auto", *KINDS)),
    ] = "auto"
    samples: Annotated[int, option("The number of draws that the predictive averages over.", min=2)] = 100
    score: Annotated[
        str,
        option(
            "The score by which inputs are flagged. auto takes either (the larger rank of entropy and mutual information) for classes, "
            "entropy if there were too few validation data for that, and variance for numbers."
        ),
        OneOf(("auto", *FLAG_SCORES)),
    ] = "auto"


@dataclass(frozen=True)
class RunOptions:
    """How a command runs, and what it says."""

    panel: ClassVar[str] = "Running"
    seed: Annotated[int, option("The seed of every random draw in this command.", min=0)] = 0
    device: Annotated[str, option("The device to compute on: cpu, cuda, cuda:1, mps or auto.")] = "cpu"
    force: Annotated[bool, option("Replace the output if it exists.")] = False
    as_json: Annotated[
        bool, option("Write one JSON value to standard output, and messages to standard error.", "--json")
    ] = False
    config: Annotated[
        Path | None,
        option(
            "A TOML file with options. An option on the command line wins over the file.",
            is_eager=True,
            callback=apply_config,
        ),
    ] = None

    @property
    def reporter(self) -> Reporter:
        """What says the results."""
        return Reporter(self.as_json)

    def checked_device(self) -> torch.device:
        """Returns the device to compute on, checked.

        Raises:
            InputError: There is none of that name.
        """
        return check_device(self.device)

    def generator(self) -> torch.Generator:
        """Returns a generator with the seed."""
        return torch.Generator().manual_seed(self.seed)
