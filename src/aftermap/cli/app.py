"""The commands and their examples.

A command's module, and with it PyTorch, is imported when the command runs or its own help is asked for: the list of commands,
the version and a wrong name answer at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import aftermap
from aftermap.cli.signals import end_start_up
from aftermap.lazy import lazy_attribute
from aftermap.progress import waiting

__all__ = ["COMMANDS", "EXAMPLES", "Entry", "app", "load_command"]

_START, _BAYES, _USE, _RESEARCH = "Start here", "Make a network Bayesian", "Use it", "Research"
_TRAIN = "--model builtin:lenet --data fashion-mnist --optimizer vogn --epochs 5 -o run/"
_FIT = "--model mypkg.nets:build --weights model.pt --train train.npz --val val.npz -o posterior/"


@dataclass(frozen=True)
class Entry:
    """What the help says about a command before its module is imported.

    Attributes:
        module: The module with the function of the command's name.
        panel: The heading under which the command is listed.
        summary: The first paragraph of the function's docstring, which a test compares.
        example: A line to type.
    """

    module: str
    panel: str
    summary: str
    example: str


COMMANDS = {
    "demo": Entry(
        "aftermap.cli.demo",
        _START,
        "See it at work in a minute: train a small network on handwritten digits, make it Bayesian, test it, write a report.",
        "aftermap demo",
    ),
    "doctor": Entry(
        "aftermap.cli.doctor",
        _START,
        "Look at a network before any work: its layers, how each will be treated, the cost of every structure, and numerical risks.",
        "aftermap doctor --model mypkg.nets:build --weights model.pt",
    ),
    "fit": Entry(
        "aftermap.cli.fit",
        _BAYES,
        "Make a trained network Bayesian: estimate the cost, fit, tune, check, save.",
        f"aftermap fit {_FIT}",
    ),
    "tune": Entry(
        "aftermap.cli.fit",
        _BAYES,
        "Find the prior precision, temperature and noise of a fitted posterior: on held-out data, or on its training data.",
        "aftermap tune posterior/ --val val.npz -o tuned/",
    ),
    "train": Entry(
        "aftermap.cli.train",
        _BAYES,
        "Train a network with a Bayesian optimiser (or Adam), on one process or with torchrun on many.",
        f"torchrun --nproc-per-node 2 -m aftermap train {_TRAIN}",
    ),
    "select": Entry(
        "aftermap.cli.select",
        _BAYES,
        "Train several networks by the evidence and rank them: Occam's razor, without validation data.",
        "aftermap select small=mypkg.nets:small big=mypkg.nets:big --train train.npz",
    ),
    "predict": Entry(
        "aftermap.cli.predict",
        _USE,
        "Predict new inputs, one row for each: prediction, confidence, epistemic, aleatoric, score and flag.",
        "aftermap predict posterior/ new.csv -o scored.csv",
    ),
    "evaluate": Entry(
        "aftermap.cli.evaluate",
        _USE,
        "Compare a posterior with the network alone: accuracy, calibration, detection of unusual data, and a verdict.",
        "aftermap evaluate posterior/ --test test.npz --ood other=ood.npz",
    ),
    "report": Entry(
        "aftermap.cli.report",
        _USE,
        "Write one HTML file: a verdict, the network alone and its Bayesian version, calibration, abstention, unusual data, and layers.",
        "aftermap report posterior/ --test test.npz --ood other=ood.npz",
    ),
    "where": Entry(
        "aftermap.cli.where",
        _USE,
        "Show where in the network the uncertainty arises: exact shares of the predictive variance by layer, which add up to one.",
        "aftermap where posterior/ --test test.npz",
    ),
    "reproduce": Entry(
        "aftermap.cli.reproduce",
        _RESEARCH,
        "Run an experiment from the literature again: its claims with verdicts, and its figures. `list` shows all, `all` runs all.",
        "aftermap reproduce mcinerney2024 --budget small",
    ),
    "bench": Entry(
        "aftermap.cli.reproduce",
        _RESEARCH,
        "Measure time and memory, and compare with other libraries. Arguments go to benchmarks.run: `aftermap bench --quick`.",
        "aftermap bench --quick",
    ),
}
EXAMPLES = {name: entry.example for name, entry in COMMANDS.items()}


def load_command(name: str) -> Any:
    """Returns the command of that name with all its options; its module is imported now."""
    entry = COMMANDS[name]
    # The arguments of experiments and benchmarks are handed on.
    settings = {"allow_extra_args": True, "ignore_unknown_options": True} if entry.panel == _RESEARCH else None
    alone = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_show_locals=False)
    register = alone.command(
        name, epilog=f"Example: `{entry.example}`", rich_help_panel=entry.panel, context_settings=settings
    )
    with waiting("starting"):  # PyTorch alone takes some seconds
        function = lazy_attribute(entry.module, name)
    register(function)
    return typer.main.get_command(alone)


class _Commands(TyperGroup):
    """The group of all commands: their list is made of ``COMMANDS``, and the one that was typed is loaded."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        for name, entry in COMMANDS.items():
            listed = TyperCommand(
                name, help=entry.summary, rich_help_panel=entry.panel, rich_markup_mode=self.rich_markup_mode
            )
            self.add_command(listed)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: Sequence[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, list(args))
        command = None if name is None else load_command(name)
        end_start_up()
        return name, command, rest


app = typer.Typer(
    name="aftermap",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"aftermap {aftermap.__version__}")
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 all went well, 2 bad input, 3 a self-check failed, 4 worse than --baseline, 5 another process ended."
)
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Your network found the MAP. aftermap finds out what it does not know."""
