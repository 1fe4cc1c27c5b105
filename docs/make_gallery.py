"""Writes gallery.md: every example and every experiment, with its picture.

python -m docs.make_gallery
"""

from __future__ import annotations

import ast
from pathlib import Path

from docs.run_pages import DOCS

__all__ = ["PAGE", "page"]

ROOT = DOCS.parent
PAGE = DOCS / "gallery.md"
# The pictures that examples draw, or that show what they do.
PICTURES = {
    "compare_methods": "comparison.png",
    "in_between": "gap.svg",
    "occams_razor": "evidence.svg",
    "report": "report.png",
    "train_vogn": "train_vogn_fashion.png",
    "vogn_toy": "moons.png",
    "where": "filters.png",
}
HEAD = """# Gallery

This page shows every example and experiment of the repository with a picture. Each example is a program that you can run as it is; `--help` lists what you can change. Experiments test what
the literature claims, and their verdicts are on the page [what was reproduced](reproduction.md). `python -m docs.make_gallery` writes this page."""


def page() -> str:
    """Returns the page: pictures beside what they show, and how to make them."""
    parts = [HEAD, "## Examples"]
    examples = sorted((ROOT / "examples").glob("*.py"))
    shown = [path for path in examples if path.stem in PICTURES]
    parts.append(_table([(PICTURES[p.stem], _first_sentence(p), f"python examples/{p.name}") for p in shown]))
    parts.append("Without a picture:")
    parts.append("\n".join(f"- `{p.stem}`: {_first_sentence(p)}" for p in examples if p not in shown))
    parts.append("## Experiments")
    rows = []
    for run in sorted((ROOT / "experiments").glob("*/run.py")):
        name = run.parent.name
        pictures = sorted((DOCS / "images" / "reproduction").glob(f"{name}-*"))
        if pictures and (title := _constant(run, "TITLE")):
            rows.append(
                (f"reproduction/{pictures[0].name}", f"{title}.".replace("..", "."), f"aftermap reproduce {name}")
            )
    parts.append(_table(rows))
    return "\n\n".join(parts) + "\n"


def _table(rows: list[tuple[str, str, str]]) -> str:
    lines = ["| | |", "|---|---|"]
    for picture, words, command in rows:
        alt = words.replace("|", "").replace("[", "").replace("]", "")
        lines.append(f"| ![{alt}](images/{picture}) | {words}<br>`{command}` |")
    return "\n".join(lines)


def _first_sentence(path: Path) -> str:
    return str(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))).splitlines()[0]


def _constant(path: Path, name: str) -> str:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return str(ast.literal_eval(node.value))
    return ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
