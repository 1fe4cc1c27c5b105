"""A TOML file that says what the flags say; a flag on the command line wins."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any

import typer

from aftermap.late import optional

__all__ = ["apply_config"]


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
