"""The commands and their examples."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import aftermap
from aftermap.cli.demo import demo
from aftermap.cli.doctor import doctor
from aftermap.cli.evaluate import evaluate
from aftermap.cli.fit import fit, tune
from aftermap.cli.predict import predict
from aftermap.cli.report import report
from aftermap.cli.reproduce import bench, reproduce
from aftermap.cli.select import select
from aftermap.cli.train import train
from aftermap.cli.where import where

__all__ = ["EXAMPLES", "app"]

_START, _BAYES, _USE, _RESEARCH = "Start here", "Make a network Bayesian", "Use it", "Research"
_TRAIN = "--model builtin:lenet --data fashion-mnist --optimizer vogn --epochs 5 -o run/"
_FIT = "--model mypkg.nets:build --weights model.pt --train train.npz --val val.npz -o posterior/"
# Each command with its panel in the help and an example.
_COMMANDS: tuple[tuple[Any, str, str], ...] = (
    (demo, _START, "aftermap demo"),
    (doctor, _START, "aftermap doctor --model mypkg.nets:build --weights model.pt"),
    (fit, _BAYES, f"aftermap fit {_FIT}"),
    (tune, _BAYES, "aftermap tune posterior/ --val val.npz"),
    (train, _BAYES, f"torchrun --nproc-per-node 2 -m aftermap train {_TRAIN}"),
    (select, _BAYES, "aftermap select small=mypkg.nets:small big=mypkg.nets:big --train train.npz"),
    (predict, _USE, "aftermap predict posterior/ new.csv -o scored.csv"),
    (evaluate, _USE, "aftermap evaluate posterior/ --test test.npz --ood other=ood.npz"),
    (report, _USE, "aftermap report posterior/ --test test.npz --ood other=ood.npz"),
    (where, _USE, "aftermap where posterior/ --test test.npz"),
    (reproduce, _RESEARCH, "aftermap reproduce mcinerney2024 --budget small"),
    (bench, _RESEARCH, "aftermap bench --quick"),
)
EXAMPLES = {command.__name__: example for command, _, example in _COMMANDS}

app = typer.Typer(
    name="aftermap",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"aftermap {aftermap.__version__}")
        raise typer.Exit


@app.callback(epilog="Exit codes: 0 good, 2 bad input, 3 a self-check failed, 4 worse than --baseline.")
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Say the version and exit.")
    ] = False,
) -> None:
    """Your network found the MAP. aftermap finds out what it does not know."""


for _command, _panel, _example in _COMMANDS:
    # The arguments of experiments and benchmarks are handed on.
    _settings = {"allow_extra_args": True, "ignore_unknown_options": True} if _panel == _RESEARCH else None
    app.command(_command.__name__, epilog=f"Example: `{_example}`", rich_help_panel=_panel, context_settings=_settings)(
        _command
    )
