"""Writes the notebooks from the tutorials: the same words, code and printed outputs, cell by cell.

    python -m docs.make_notebooks

The tutorials are the one source. Their code is run by the tests, so what a notebook holds runs as well.
"""

from __future__ import annotations

import json
import re
from typing import Any

from docs.run_pages import DOCS, FENCE

__all__ = ["FOLDER", "TUTORIALS", "cells_of", "notebook"]

FOLDER = DOCS.parent / "notebooks"
TUTORIALS = ("classification", "regression", "training", "where")


def cells_of(text: str) -> list[dict[str, Any]]:
    r"""Returns the cells of a page: words, and code with what it printed.

    >>> [cell["cell_type"] for cell in cells_of("# A page\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n")]
    ['markdown', 'code']
    """
    cells: list[dict[str, Any]] = []
    start = 0
    for match in FENCE.finditer(text):
        _add_words(cells, text[start : match.start()])
        printed = match["output"]
        outputs = [] if printed is None else [{"name": "stdout", "output_type": "stream", "text": _lines(printed)}]
        cells.append(
            {
                "cell_type": "code",
                "execution_count": None,
                "id": f"cell-{len(cells)}",
                "metadata": {},
                "outputs": outputs,
                "source": _lines(match["code"].rstrip("\n")),
            }
        )
        start = match.end()
    _add_words(cells, text[start:])
    return cells


def _add_words(cells: list[dict[str, Any]], text: str) -> None:
    if text.strip():
        source = _lines(_from_folder(text.strip()))
        cells.append({"cell_type": "markdown", "id": f"cell-{len(cells)}", "metadata": {}, "source": source})


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _from_folder(text: str) -> str:
    """Makes links of a tutorial hold from the folder of the notebooks."""
    return re.sub(
        r"\]\((?!https?:|#)((?:\.\./)?)([^)]+)\)", lambda m: f"](../docs/{'' if m[1] else 'tutorials/'}{m[2]})", text
    )


def notebook(name: str) -> str:
    """Returns the text of the notebook of a tutorial."""
    page = (DOCS / "tutorials" / f"{name}.md").read_text(encoding="utf-8")
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {
        "cells": cells_of(page),
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for tutorial in TUTORIALS:
        (FOLDER / f"{tutorial}.ipynb").write_text(notebook(tutorial), encoding="utf-8")
