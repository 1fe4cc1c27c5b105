"""Docstrings for the site: what Sphinx would understand and Markdown does not becomes Markdown.

Formulas (``.. math::`` and ``:math:`x```) become formulas between dollars, which the site renders; simple tables (``====``) and
examples (``>>>``) are shown as they are written, other roles (``:meth:`x```) as code; shapes such as [N, C] are no links, and the
star of a symbol such as θ* is no emphasis.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

__all__ = ["Docstrings", "as_markdown"]

_MATH = re.compile(r"^( *)\.\. math::(?: +(\S.*)\n?|\n((?:\1 +\S.*\n?|\n(?=\1 +\S))+))", re.MULTILINE)
_GAP = re.compile(r" *\\q?quad *$")
_ENVIRONMENT = re.compile(r"\\begin\{(\w+)\}.*?\\end\{\1\}", re.DOTALL)
_TABLE = re.compile(r"^( *)=+(?: +=+)+\n(?:.*\n)+?\1=+(?: +=+)+\n(?:.*\n)+?\1=+(?: +=+)+$", re.MULTILINE)
_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*|\n\1 +\S.*)*", re.MULTILINE)
# What is shown as it is: fenced code, code in a line, formulas.
_VERBATIM = re.compile(r"(^ *```.*?^ *```|``.+?``|`[^`\n]*`|^ *\$\$.*?\$\$$|\$[^$\n]+\$)", re.DOTALL | re.MULTILINE)
_MATH_ROLE = re.compile(r":math:`([^`]*)`")
_ROLE = re.compile(r":(?:meth|class|func|attr|mod):`([^`]*)`")
# The star of a symbol (θ*, v*, J_*), which is no emphasis.
_STAR = re.compile(r"((?<![^\W_])[^\W\d_]|_)\*(?!\*)")


def as_markdown(text: str) -> str:
    r"""The same docstring in Markdown.

    >>> print(as_markdown("One line.\n\n.. math::\n    a &= b \\\\\n    c &= d\n\nSee :meth:`fit` [N], :math:`x_[1]`."))
    One line.
    <BLANKLINE>
    $$
    \begin{aligned}
    a &= b \\
    c &= d
    \end{aligned}
    $$
    <BLANKLINE>
    See `fit` \[N], $x_[1]$.
    >>> print(as_markdown("From θ* to v* by J_*, *all* of them."))
    From θ\* to v\* by J_\*, *all* of them.
    >>> print(as_markdown(".. math::\n    a = b, \\quad\n    c = d"))
    $$
    \begin{gathered}
    a = b, \\
    c = d
    \end{gathered}
    $$
    <BLANKLINE>
    """

    def formula(match: re.Match[str]) -> str:
        indent, lines = match[1], (match[2] or match[3]).strip().split("\n")
        # Several lines, or aligned ones, as Sphinx understands them; those of a matrix inside do not count.
        outside = _ENVIRONMENT.sub("", "\n".join(lines))
        if "\\\\" in outside or "&" in outside:
            lines = ["\\begin{aligned}", *lines, "\\end{aligned}"]
        elif any(_GAP.search(line) for line in lines[:-1]):
            # One below the other where the source has a new line after a gap: side by side they would be too wide.
            lines = [_GAP.sub(r" \\\\", line) for line in lines[:-1]] + lines[-1:]
            lines = ["\\begin{gathered}", *lines, "\\end{gathered}"]
        return "\n".join(indent + line.strip() for line in ("$$", *lines, "$$")) + "\n"

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}```text\n{match[0]}\n{match[1]}```"

    def example(match: re.Match[str]) -> str:
        return f"{match[1]}```pycon\n{match[0]}\n{match[1]}```"

    text = _EXAMPLE.sub(example, _TABLE.sub(table, _MATH.sub(formula, text)))
    text = _ROLE.sub(r"`\1`", _MATH_ROLE.sub(r"$\1$", text))
    parts = _VERBATIM.split(text)
    return "".join(part if i % 2 else _STAR.sub(r"\1\\*", part.replace("[", "\\[")) for i, part in enumerate(parts))


class Docstrings(Extension):
    """Rewrites every docstring that is shown."""

    def on_instance(self, *, obj: Any, **rest: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
