"""The report in a real browser: it runs without an error, the slider works from the keyboard, nothing overflows."""

from __future__ import annotations

import json
import re

import pytest

from aftermap.analysis.report import write_report
from aftermap.evaluation import choose_threshold
from tests.analysis.browser import absent, browser
from tests.analysis.report_cases import EVIL, classification, images, regression

pytestmark = pytest.mark.skipif(bool(absent()), reason=absent() or "a browser is here")


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    bayes, plain, laplace = classification()
    threshold = choose_threshold(laplace.predict(images().reshape(-1, 6)).score("entropy"))
    return write_report(
        tmp_path_factory.mktemp("report") / "report.html",
        bayesian=bayes,
        map=plain,
        images=images(),
        classes=[EVIL, "a very long name of a class that needs_a_break_somewhere_or_else", "c"],
        threshold=threshold,
        where=laplace.where([(images().reshape(-1, 6), None)]),
        settings={"path": "/a/very/long/path" * 12, "name": EVIL},
        title=f"Report {EVIL}",
    )


@pytest.fixture(scope="module")
def regression_page(tmp_path_factory):
    bayes, plain, _ = regression()
    return write_report(tmp_path_factory.mktemp("report") / "r.html", bayesian=bayes, map=plain)


def _shown(window):
    cells = window.script(
        "return [...document.querySelectorAll('[data-show]')].map(e => [e.dataset.show, e.textContent])"
    )
    return dict(cells)


def _place(window):
    return window.script(
        "const c = document.querySelector('.operating-point circle'); return [c.cx.baseVal.value, c.cy.baseVal.value]"
    )


def test_no_error_and_nothing_injected(window, page):
    window.open(page)
    assert window.log() == []
    assert window.script("return document.querySelector('h1').textContent") == f"Report {EVIL}"
    assert window.script("return document.scripts.length") == 2  # the data and the one script
    assert EVIL in window.script("return document.querySelector('.cards').textContent")
    # Nothing is fetched: the page is its own only resource.
    assert (
        window.script("return performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length")
        == 0
    )


def test_the_slider_changes_the_numbers_from_the_keyboard(window, page):
    window.open(page)
    points = json.loads(window.script("return document.getElementById('operating-points').textContent"))
    before, place = _shown(window), _place(window)
    assert before["coverage"] == "80.0\u00a0%"
    window.press("#coverage", "right", "right")
    assert window.script("return document.activeElement.id") == "coverage"
    after = _shown(window)
    assert after["coverage"] == f"{100 * points['coverage'][81]:.1f}\u00a0%"
    assert after["risk"] == f"{100 * points['risk'][81]:.1f}\u00a0%"
    assert after["threshold"] == f"{points['threshold'][81]:.3f}"
    assert after["aside"] == f"{points['n'] - points['answered'][81]} of {points['n']}"
    assert after["outside-0"] == f"{100 * points['outside'][0][81]:.1f}\u00a0%"
    assert before != after
    assert _place(window)[0] > place[0]
    window.press("#coverage", "page up", "end")
    assert _shown(window)["coverage"] == "100.0\u00a0%"
    assert _shown(window)["aside"] == f"0 of {points['n']}"
    spoken = window.script("return document.getElementById('coverage').getAttribute('aria-valuetext')")
    assert spoken.startswith("100 % answered, error rate ")
    assert window.log() == []


def test_the_dot_stays_on_the_curve_and_is_where_the_server_put_it(window, page):
    drawn = [float(v) for v in re.search(r'<circle cx="([\d.]+)" cy="([\d.]+)"', page.read_text()).groups()]
    window.open(page)
    assert _place(window) == pytest.approx(drawn, abs=0.02)
    # The end of the first curve is the last point of the drawing: at 100 % the dot lies on it.
    window.press("#coverage", "end")
    line = window.script(
        "const svg = document.querySelector('#risk-figure svg');"
        "const paths = [...svg.querySelectorAll('[id*=line2d] > path')].filter(p => p.style.stroke.includes('--c0'));"
        "const path = paths.sort((a, b) => b.getTotalLength() - a.getTotalLength())[0];"
        "const end = path.getPointAtLength(path.getTotalLength()); return [end.x, end.y]"
    )
    assert _place(window) == pytest.approx(line, abs=0.1)


@pytest.mark.parametrize("width", [320, 400, 700, 1200])
def test_no_horizontal_overflow(window, page, regression_page, width):
    for path in (page, regression_page):
        window.open(path, width=width)
        wide = window.script(
            "return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg, .skip') && "
            "e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.tagName + '.' + e.className)"
        )
        assert window.script("return document.documentElement.scrollWidth") <= width
        assert wide == []


def _luminance(color):
    parts = [int(c) / 255 for c in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one, other):
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_readable_in_light_and_dark(window, page, dark):
    window.open(page, dark=dark)
    paper = window.script("return getComputedStyle(document.body).backgroundColor")
    assert (_luminance(paper) < 0.1) == dark
    colors = window.script(
        "const found = {}; for (const [name, css, key] of [['text', 'body', 'color'], ['note', '.note', 'color'],"
        "['letters', 'svg.figure text', 'fill'], ['link', '.contents a', 'color'], ['caption', 'figcaption', 'color'],"
        "['right', '.right', 'color'], ['worse', '.mark.worse', 'color'], ['better', '.mark.better', 'color']]) {"
        "const e = document.querySelector(css); if (e) found[name] = getComputedStyle(e)[key]; } return found"
    )
    assert {"text", "note", "letters", "link", "caption"} <= set(colors)
    assert {name: c for name, c in colors.items() if _contrast(c, paper) < 4.5} == {}


def test_print_hides_what_paper_cannot_do(window, page, tmp_path):
    window.open(page, dark=True)
    window.media(dark=True, medium="print")
    hidden = window.script(
        "return ['input[type=range]', '.contents'].map(s => getComputedStyle(document.querySelector(s)).display)"
    )
    assert hidden == ["none", "none"]
    assert _luminance(window.script("return getComputedStyle(document.body).backgroundColor")) > 0.9
    window.media()
    window.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_focus_is_seen(window, page):
    window.open(page)
    window.press("body", "tab")
    assert window.script("return document.activeElement.className") == "skip"
    window.press("#coverage", "left")
    assert window.script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_regression_report_runs(window, regression_page):
    window.open(regression_page, dark=True)
    before = _shown(window)
    window.press("#coverage", "left", "left", "left")
    assert _shown(window)["risk"] != before["risk"]
    assert window.log() == []
