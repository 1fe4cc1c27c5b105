"""A report about hostile data in a real browser: names of classes, columns, files and sets are text and nothing else."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from tests.analysis.browser import absent, browser
from tests.cli.common import invoke

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(absent()), reason=absent() or "a browser is here")]

# Ways out of text, of an attribute, of a script, of JSON in a script, of a comment, of an SVG and of a style.
HOSTILE = (
    "<script>window.pwned=1</script>", "</script><script>window.pwned=1</script>", "\"><img src=x onerror=window.pwned=1>", "' onmouseover='window.pwned=1",
    "<svg/onload=window.pwned=1>", "]]><img src=x onerror=window.pwned=1>", "--><iframe srcdoc='<script>parent.pwned=1</script>'>", "javascript:window.pwned=1",
    "</style><img src=x onerror=window.pwned=1>", "</title><img src=x onerror=window.pwned=1>", "{{ 7*7 }}{% raw %}", "&lt;img src=x&gt;", "$\\frac{1}{0}$", "\u2028window.pwned=1", "%(x)s {0} ${pwned=1}",
    "</textarea><details open ontoggle=window.pwned=1>", "<a href=//x autofocus onfocus=window.pwned=1>",
)  # fmt: skip


def _table(file: Path, headers: list[str], classes: list[str], seed: int, rows: int = 90) -> Path:
    source = random.Random(seed)
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*headers, "label"])
        for row in range(rows):
            kind = row % len(classes)
            numbers = [source.gauss(2.0 * (k % len(classes) == kind), 0.7) for k in range(len(headers))]
            writer.writerow([*(f"{n:.5f}" for n in numbers), classes[kind]])
    return file


@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_that_came_from_a_user_runs(tmp_path: Path, seed: int) -> None:
    strings = random.Random(seed).sample(HOSTILE, len(HOSTILE))
    classes, headers = strings[:3], strings[3:9]
    in_files = [text.replace("/", "∕")[:80] for text in strings[9:12]]
    parts = [_table(tmp_path / f"{name}.csv", headers, classes, n) for n, name in enumerate(in_files)]
    train, val, test = map(str, parts)
    data = ["--model", "builtin:mlp", "--target", "label"]
    run = tmp_path / "run"
    invoke(
        "train",
        *data,
        "--train",
        train,
        "--val",
        val,
        "--epochs",
        "30",
        "--batch-size",
        "30",
        "-o",
        str(run),
        code=None,
    )
    page = tmp_path / "report.html"
    ood = f"{strings[12].replace('=', '≟')}={test}"
    invoke("report", str(run / "posterior"), "--test", test, "--ood", ood, "-o", str(page), code=None)
    with browser(tmp_path / "profile") as window:
        window.open(page)
        assert window.log() == []
        assert window.script("return window.pwned === undefined")
        assert (
            window.script(
                "return document.querySelectorAll('iframe, img[src=\"x\"], details[ontoggle], a[onfocus]').length"
            )
            == 0
        )
        handlers = "return [...document.querySelectorAll('*')].flatMap(e => [...e.attributes]).filter(a => a.name.startsWith('on') || a.value.trim().startsWith('javascript:')).map(a => a.name + a.value)"
        assert window.script(handlers) == []
        said = window.script("return document.body.textContent")
        assert any(name in said for name in classes)
