"""Writes reference/cli.md, the page with every command and its options, from the commands themselves.

python docs/command_reference.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aftermap.cli.app import COMMANDS, EXAMPLES, load_command

PAGE = Path(__file__).parent / "reference" / "cli.md"
HEAD = """# Commands

All commands with their options. [The guide](../how_to/command_line.md) explains how they go together. `aftermap COMMAND --help` says the same in a terminal.
This page is written by `python docs/command_reference.py`."""


def page() -> str:
    """Returns the page: one section per command, and in it one table per group of options."""
    parts = [HEAD, "| command | what it does |\n|---|---|"]
    commands = {name: load_command(name) for name in COMMANDS}
    rows = [f"| [`{name}`](#{name}) | {_paragraphs(command)[0]} |" for name, command in commands.items()]
    parts[-1] += "\n" + "\n".join(rows)
    for name, command in commands.items():
        parts.append(f"## {name}")
        parts += _paragraphs(command)
        parts.append(f"```\n{EXAMPLES[name]}\n```")
        for panel, options in _panels(command).items():
            parts.append("\n".join([f"| {panel} | |", "|---|---|", *(_row(option) for option in options)]))
    return "\n\n".join(parts) + "\n"


def _paragraphs(command: Any) -> list[str]:
    return [" ".join(text.split()) for text in str(command.help).split("\n\n")]


def _panels(command: Any) -> dict[str, list[Any]]:
    panels: dict[str, list[Any]] = {}
    for option in command.params:
        if getattr(option, "help", None) and "--help" not in option.opts and not getattr(option, "hidden", False):
            is_argument = option.param_type_name == "argument"
            name = "Arguments" if is_argument else getattr(option, "rich_help_panel", None) or "Options"
            panels.setdefault(name, []).append(option)
    return panels


def _row(option: Any) -> str:
    names = [option.metavar or option.name.upper()] if option.param_type_name == "argument" else [*option.opts]
    names += option.secondary_opts
    value = f" {option.metavar}" if option.metavar and option.param_type_name != "argument" else ""
    said = " ".join(str(option.help).split())
    default = option.default
    if option.required:
        said += " Required."
    elif isinstance(default, str | int | float) and not isinstance(default, bool) and default != "":
        said += f" Default: {default}."
    flags = ", ".join(f"`{name}{value}`" for name in names)
    return f"| {_cell(flags)} | {_cell(said)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
