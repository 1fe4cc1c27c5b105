"""A figure inside a page: SVG whose colours and letters follow the page, light or dark, on screen and on paper."""

from __future__ import annotations

import re
import warnings
from html import escape
from typing import Any

from aftermap.analysis.figures.style import CATEGORIES, INK, save_svg

__all__ = ["inline_svg", "plot_box"]

_ID = re.compile(r'\b(id|xlink:href|href)="(#?)([^"]+)"')
_URL = re.compile(r"url\(#([^)]+)\)")
_STYLE = re.compile(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", re.DOTALL)
_META = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_FONT = re.compile(r"font: (?:(\w+) )?([\d.]+)px [^;\"]*|font-family: [^;\"]*;? ?")  # Both ways to write it are met.
_ROOT = re.compile(r"<svg\b[^>]*?viewBox=\"([^\"]+)\"[^>]*>", re.DOTALL)


def inline_svg(ax: Any, key: str, description: str) -> str:
    """Returns the figure of an Axes, or a Figure, as text for a page.

    Names inside the picture get a prefix, so that several pictures on one page do not mix up their parts; the palette becomes
    CSS variables (--c0, --c1, …, --ink, --paper), and letters take the font of the page.

    Args:
        ax: The Axes of the figure, or the Figure itself.
        key: The prefix of the names inside, different for every picture on a page.
        description: The content of the picture in words, for those who do not see it.

    Returns:
        SVG text, trusted: every user-given text in it is escaped.

    >>> from aftermap.analysis.figures import axes
    >>> inline_svg(axes(), "f1", "an <empty> figure")[:60]
    '<svg class="figure" role="img" aria-label="an &lt;empty&gt; '
    """
    with warnings.catch_warnings():
        # A letter that matplotlib's font lacks is set by the browser, which has others.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        text = save_svg(ax if hasattr(ax, "savefig") else ax.figure)
    text = _META.sub("", _STYLE.sub("", text))
    text = _ID.sub(lambda m: f'{m[1]}="{m[2]}{key}-{m[3]}"' if m[1] == "id" or m[2] else m[0], text)
    text = _URL.sub(lambda m: f"url(#{key}-{m[1]})", text)
    text = _FONT.sub(_page_font, text)
    for i, color in enumerate(CATEGORIES):
        text = re.sub(color, f"var(--c{i})", text, flags=re.IGNORECASE)
    text = re.sub(INK, "var(--ink)", text, flags=re.IGNORECASE)
    text = re.sub("#ffffff", "var(--paper)", text, flags=re.IGNORECASE)
    root = _ROOT.search(text)
    assert root is not None, "matplotlib writes an svg element with a viewBox"
    head = (
        f'<svg class="figure" role="img" aria-label="{escape(description)}" viewBox="{root[1]}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return head + text[root.end() :].rstrip()


def _page_font(match: re.Match[str]) -> str:
    """Returns size and weight without the family, which is the page's."""
    size = "" if match[2] is None else f"font-size: {match[2]}px"
    return f"font-weight: bold; {size}" if match[1] == "bold" else size


def plot_box(ax: Any) -> tuple[float, float, float, float]:
    """Returns where the plotting area lies in the picture: left, top, width and height, in units of its viewBox.

    It is known once the figure has been drawn, so ask after a first `inline_svg`.
    """
    place, figure = ax.get_position(), ax.figure
    across, up = 72 * figure.get_figwidth(), 72 * figure.get_figheight()
    return place.x0 * across, (1 - place.y1) * up, place.width * across, place.height * up
