"""Docstrings for the site: what Sphinx would understand and Markdown does not becomes a plain block.

Formulas (``.. math::``), simple tables (``====``) and examples (``>>>``) are shown as they are written, roles (``:meth:`x```)
as code, and shapes such as [N, C] are no links.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

__all__ = ["Docstrings", "as_markdown"]

_MATH = re.compile(r"^( *)\.\. math::\n((?:\1 +\S.*\n?|\n(?=\1 +\S))+)", re.MULTILINE)
_TABLE = re.compile(r"^( *)=+(?: +=+)+\n(?:.*\n)+?\1=+(?: +=+)+\n(?:.*\n)+?\1=+(?: +=+)+$", re.MULTILINE)
_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*|\n\1 +\S.*)*", re.MULTILINE)
_CODE = re.compile(r"(^ *```.*?^ *```|``.+?``|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
_ROLE = re.compile(r":(?:meth|class|func|attr|mod):`([^`]*)`")


def as_markdown(text: str) -> str:
    r"""The same docstring in Markdown.

    >>> as_markdown("One line.\n\n.. math::\n    a = b\n\nSee :meth:`fit` [N].")
    'One line.\n\n```text\na = b\n```\n\nSee `fit` \\[N].'
    """

    def formula(match: re.Match[str]) -> str:
        indent, lines = match[1], match[2].rstrip("\n").split("\n")
        shown = "\n".join(indent + line.strip() for line in lines)
        return f"{indent}```text\n{shown}\n{indent}```\n"

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}```text\n{match[0]}\n{match[1]}```"

    def example(match: re.Match[str]) -> str:
        return f"{match[1]}```pycon\n{match[0]}\n{match[1]}```"

    found = _ROLE.sub(r"`\1`", _EXAMPLE.sub(example, _TABLE.sub(table, _MATH.sub(formula, text))))
    parts = _CODE.split(found)
    return "".join(part if i % 2 else part.replace("[", "\\[") for i, part in enumerate(parts))


class Docstrings(Extension):
    """Rewrites every docstring that is shown."""

    def on_instance(self, *, obj: Any, **rest: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
