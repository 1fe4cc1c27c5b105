"""Groups of options: what a command is offered, what it gets, and what its help says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from aftermap.cli import options as o
from aftermap.cli.app import COMMANDS, load_command
from aftermap.cli.console import BAD_INPUT
from aftermap.errors import InputError
from tests.cli.common import words


@dataclass(frozen=True)
class Drink:
    """What is drunk."""

    panel: ClassVar[str] = "Drinks"
    name: Annotated[str, o.option("The name of the drink."), o.OneOf(("tea", "milk"))]
    sugar_share: Annotated[float, o.option("The share of sugar."), o.Fraction()] = 0.25
    hot: Annotated[bool, o.option("Serve it hot.")] = False


@dataclass(frozen=True)
class Guest:
    """Who drinks it."""

    panel: ClassVar[str] = "Guests"
    guest: Annotated[str, typer.Argument(help="The name of the guest.")]
    seats: Annotated[int, o.option("The number of seats.", "--seats", "-s", min=1)] = 2


def serve(arguments: list[str], **settings: Any) -> tuple[Any, list[Any]]:
    """The result of a command that takes both groups, and what it got."""
    got: list[Any] = []

    @o.command(**settings)
    def table(guest: Guest, drink: Drink, note: Annotated[str, o.option("A note.")] = "none") -> int:
        """Serve a drink."""
        got.extend((guest, drink, note))
        return 0

    small = typer.Typer()
    small.command()(table)
    return CliRunner().invoke(small, arguments), got


def test_fields_become_options() -> None:
    done, got = serve(["Ada", "--name", "tea", "--sugar-share", "0.5", "--hot", "-s", "3", "--note", "soon"])
    assert done.exit_code == 0
    assert got == [Guest("Ada", 3), Drink("tea", 0.5, True), "soon"]
    assert serve(["Ada", "--name", "milk"])[1] == [Guest("Ada", 2), Drink("milk", 0.25, False), "none"]
    assert serve(["Ada"])[0].exit_code == BAD_INPUT  # a field without a default is required
    assert "No such option" in serve(["Ada", "--name", "tea", "--no-hot"])[0].stderr


def test_other_defaults_and_options_left_out() -> None:
    settings = {"without": ("hot",), "seats": 7, "name": "milk"}
    done, got = serve(["Ada"], **settings)
    assert done.exit_code == 0
    assert got == [Guest("Ada", 7), Drink("milk", 0.25, False), "none"]
    assert "No such option: --hot" in serve(["Ada", "--hot"], **settings)[0].stderr
    assert "--hot" not in serve(["--help"], **settings)[0].stdout


def test_values_are_checked_in_one_place() -> None:
    for arguments, message in (
        (["--name", "coffee"], "--name 'coffee' is not known; allowed are tea, milk"),
        (["--name", "tea", "--sugar-share", "25"], "--sugar-share 25.0 must lie between 0 and 1"),
    ):
        done, got = serve(["Ada", *arguments])
        assert done.exit_code == BAD_INPUT
        assert message in words(done.stderr)
        assert got == []


def test_help_has_panels_and_lists_what_is_allowed() -> None:
    said = words(serve(["--help"])[0].stdout)
    for part in ("Serve a drink.", "Drinks", "Guests", "The name of the drink. One of tea, milk.", "[default: 0.25]"):
        assert part in said


def test_data_are_described_once() -> None:
    described = o.DataOptions(image_size="28", channels=1, limit=5, drop="a, b").format(task="binary")
    assert (described.image_size, described.channels, described.limit) == ((28, 28), 1, 5)
    assert (described.task, described.drop, described.batch_size) == ("binary", ("a", "b"), 256)
    for wrong, message in (
        (o.DataOptions(channels=2), "must be 1 or 3"),
        (o.DataOptions(image_size="1x2x3"), "one or two"),
    ):
        with pytest.raises(InputError, match=message):
            wrong.format()


def test_every_help_text_is_a_sentence() -> None:
    commands = {name: load_command(name) for name in COMMANDS}
    orders = []
    for name, command in commands.items():
        for parameter in command.params:
            text = getattr(parameter, "help", None) or ""
            assert re.fullmatch(r"[A-Z].*\.", text, re.DOTALL), f"{name} {parameter.name}: {text!r}"
        orders.append([p.name for p in command.params if p.name not in ("output", "help")])
    # One order in all commands: what two commands share, both offer in the same order.
    for one in orders:
        for two in orders:
            assert [n for n in one if n in two] == [n for n in two if n in one]
