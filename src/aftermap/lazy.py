"""Names that are looked up when they are used: optional packages, and methods that lead to units further right.

Units import only to their left. Two conveniences need the other direction: `la.where(loader)` starts the
analysis, and `results.report(path)` writes the report. They go through `lazy_attribute`, which imports at the moment
of the call, so that importing a unit never imports what stands to its right. A test lists the places that do so.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from aftermap.errors import UnsupportedError

__all__ = ["lazy_attribute", "optional"]


def lazy_attribute(module: str, name: str) -> Any:
    """Imports a module now, and returns one of its attributes.

    >>> lazy_attribute("aftermap.errors", "InputError").__name__
    'InputError'
    """
    return getattr(import_module(module), name)


def optional(module: str, extra: str, purpose: str) -> ModuleType:
    """Imports an optional package now.

    Args:
        module: The module that is imported, for instance "matplotlib.figure".
        extra: The extra of aftermap that installs it.
        purpose: The thing that needs it, which is the subject of the error's sentence.

    Raises:
        UnsupportedError: The module is not installed; the message says how to install it.

    >>> optional("json", "plot", "figures").__name__
    'json'
    >>> optional("no_such_package", "plot", "figures")
    Traceback (most recent call last):
    aftermap.errors.UnsupportedError: figures need no_such_package, which is not installed: pip install 'aftermap[plot]'
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise
        package = module.split(".")[0]
        raise UnsupportedError(
            f"{purpose} need {package}, which is not installed: pip install 'aftermap[{extra}]'"
        ) from error
