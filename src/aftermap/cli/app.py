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

EXAMPLES = {
    "demo": "aftermap demo",
    "doctor": "aftermap doctor --model mypkg.nets:build --weights model.pt",
    "fit": "aftermap fit --model mypkg.nets:build --weights model.pt --train train.npz --val val.npz -o posterior/",
    "tune": "aftermap tune posterior/ --val val.npz",
    "predict": "aftermap predict posterior/ new.csv -o scored.csv",
    "evaluate": "aftermap evaluate posterior/ --test test.npz --ood other=ood.npz",
    "report": "aftermap report posterior/ --test test.npz --ood other=ood.npz",
    "where": "aftermap where posterior/ --test test.npz",
    "train": "torchrun --nproc-per-node 2 -m aftermap train --model builtin:lenet --data fashion-mnist --optimizer vogn --epochs 5 -o run/",
    "select": "aftermap select small=mypkg.nets:small big=mypkg.nets:big --train train.npz",
    "reproduce": "aftermap reproduce ritter2018/toy",
    "bench": "aftermap bench --quick",
}
_PANELS = {
    "demo": "Start here",
    "doctor": "Start here",
    "fit": "Make a network Bayesian",
    "tune": "Make a network Bayesian",
    "train": "Make a network Bayesian",
    "select": "Make a network Bayesian",
    "predict": "Use it",
    "evaluate": "Use it",
    "report": "Use it",
    "where": "Use it",
    "reproduce": "Research",
    "bench": "Research",
}
_PASSING = {"allow_extra_args": True, "ignore_unknown_options": True}

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
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Say the version.")
    ] = False,
) -> None:
    """Your network found the MAP. aftermap finds out what it does not know."""


def _register(command: Any, **settings: Any) -> None:
    name = command.__name__
    app.command(name, epilog=f"Example: `{EXAMPLES[name]}`", rich_help_panel=_PANELS[name], **settings)(command)


_COMMANDS: tuple[Any, ...] = (demo, doctor, fit, tune, train, select, predict, evaluate, report, where)
for _command in _COMMANDS:
    _register(_command)
for _command in (reproduce, bench):
    _register(_command, context_settings=_PASSING)
