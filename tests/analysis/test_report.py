"""The report says what the results say, is one well-formed and accessible page, and survives any name."""

from __future__ import annotations

import itertools
import json
import math
import re
import runpy
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

from aftermap.analysis.figures import regression_band
from aftermap.analysis.report import comparison, definition, render_report, score_notes, verdict, write_report
from aftermap.analysis.report.definitions import written
from aftermap.analysis.report.selective import column, operating_points
from aftermap.errors import DataError, InputError, ShapeError
from aftermap.evaluation import Metric, Results, choose_threshold
from aftermap.metrics import accuracy_at_coverage, risk_coverage
from tests.analysis.report_cases import EVIL, classification, images, regression

_VOID = {"meta", "input", "img", "br", "link"}


class Page(HTMLParser):
    """Tags with their attributes, texts by tag, and whether every tag is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.append((self.open[-1], data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [found for name, found in self.tags if name == tag]

    def text(self) -> str:
        words = " ".join(data for tag, data in self.texts if tag not in ("style", "script"))
        return re.sub(r"\s+", " ", words)


@pytest.fixture(scope="module")
def text():
    bayes, plain, laplace = classification()
    return render_report(
        bayesian=bayes,
        map=plain,
        images=images(),
        classes=[EVIL, "b", "c"],
        where=laplace.where([(images().reshape(-1, 6), None)]),
        settings={EVIL: EVIL, "list": [1, 2.5, None], "flag": True},
        title=f"Report {EVIL}",
        figures={f"A band {EVIL}": regression_band([0.0, 1.0], [0.0, 1.0], [0.1, 0.1])},
        notes=[f"Tuning: nothing to give {EVIL}."],
    )


def test_the_page_is_well_formed_and_stands_alone(text):
    page = Page(text)
    assert page.open == []
    assert text.startswith("<!doctype html>")
    assert page.all("html")[0]["lang"] == "en"
    addresses = [
        v for _, found in page.tags for k, v in found.items() if k in ("src", "href", "xlink:href", "action") and v
    ]
    assert addresses
    assert all(a.startswith(("#", "data:")) for a in addresses)
    assert set(re.findall(r"https?://[\w./-]+", text)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in text
    assert "url(http" not in text
    assert not page.all("link")
    assert not page.all("iframe")


def test_headings_names_and_alternatives(text):
    page = Page(text)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    ids = [found["id"] for _, found in page.tags if "id" in found]
    assert len(ids) == len(set(ids))
    inside = [a["href"][1:] for a in page.all("a")]
    named = [f["aria-labelledby"] for _, f in page.tags if "aria-labelledby" in f]
    described = [f["aria-describedby"] for _, f in page.tags if "aria-describedby" in f]
    pieces = re.findall(r"url\(#([^)]+)\)", text) + re.findall(r'xlink:href="#([^"]+)"', text)
    assert set(inside + named + described + pieces) <= set(ids)
    assert all(found.get("aria-label") for found in page.all("svg"))
    assert all(found.get("alt") for found in page.all("img"))
    assert len(page.all("img")) == 12
    assert {found["for"] for found in page.all("label")} == {"coverage"}
    assert all("scope" in found for found in page.all("th"))


def test_user_given_names_never_become_markup(text):
    page = Page(text)
    assert len(page.all("script")) == 2
    assert EVIL not in text
    # Titles, OOD sets, classes, settings, captions and legends show the name as it is.
    assert page.text().count(EVIL) > 8
    assert f"Tuning: nothing to give {EVIL}." in page.text()
    assert any(tag == "text" and EVIL in data for tag, data in page.texts)


def test_the_security_policy_allows_only_the_one_script(text):
    import base64
    import hashlib

    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(m["content"] for m in Page(text).all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_the_table_says_what_the_results_say(text):
    bayes, plain, _ = classification()
    words = Page(text).text()
    for name in ("accuracy", "nll", "ece", "brier", "accuracy_at_80", f"{EVIL}/entropy/auroc", f"{EVIL}/entropy/fpr95"):
        meaning = definition(name)
        for results in (plain, bayes):
            assert written(results[name], meaning.form) in words.replace(" %", "\u00a0%")
        assert meaning.label in words
        assert meaning.meaning in words
    assert "Time per 1,000 inputs" in words
    for fact in ("aftermap", "torch", "numpy", "data_hash"):
        assert str(bayes.provenance[fact]) in words
    assert "seed of the evaluation 0" in words


def test_marks_do_not_rely_on_colour(text):
    page = Page(text)
    classes = [found["class"].split() for found in page.all("td") if "mark" in (found.get("class") or "")]
    marks = {name for found in classes for name in found} - {"mark"}
    assert marks <= {"better", "worse", "same"}
    assert marks
    for mark in marks:
        assert mark in page.text()


def test_operating_points_are_those_of_the_metrics():
    bayes, plain, _ = classification()
    points = operating_points(bayes, {"MAP": plain})
    scores, wrong = column(bayes, "entropy"), 1 - column(bayes, "correct")
    curve = risk_coverage(scores, wrong)
    for percent in (1, 37, 80, 100):
        k = math.ceil(percent * len(scores) / 100 - 1e-9)
        assert points.answered[percent - 1] == k
        assert points.risk[percent - 1] == pytest.approx(float(curve.risk[k - 1]))
        assert points.threshold[percent - 1] == float(curve.thresholds[k - 1])
        other = accuracy_at_coverage(column(plain, "entropy"), 1 - column(plain, "correct"), coverage=percent / 100)
        assert points.others["MAP"][percent - 1] == pytest.approx(1 - other)
    assert 1 - points.risk[79] == pytest.approx(bayes["accuracy_at_80"])
    aside = (column(bayes, "entropy", EVIL) > points.threshold[79]).mean()
    assert points.outside[EVIL][79] == pytest.approx(float(aside))
    assert points.caught[99] == pytest.approx(0.0, abs=1e-12)


def test_the_data_of_the_slider_are_json(text):
    found = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)[1]
    content = json.loads(found)
    assert {len(content[k]) for k in ("coverage", "risk", "threshold", "caught", "answered")} == {100}


def test_results_without_a_table_still_make_a_report():
    bayes, plain, _ = classification()
    bare = [replace(r, table={}) for r in (bayes, plain)]
    page = Page(render_report(bayesian=bare[0], map=bare[1]))
    assert page.open == []
    assert "Abstention" in page.text()
    assert "Most uncertain inputs" not in page.text()
    points = operating_points(bare[0])
    assert all(math.isnan(t) for t in points.threshold)
    assert points.risk[79] == pytest.approx(operating_points(bayes).risk[79], abs=0.02)


def test_a_single_evaluation_makes_a_report():
    bayes = replace(classification()[0], attacks={}, ood={})
    page = Page(render_report(bayesian=bayes))
    assert page.open == []
    assert "Change" not in [data.strip() for tag, data in page.texts if tag == "th"]
    assert verdict(bayes).level == "alone"


def test_saved_results_make_the_same_report():
    small = replace(classification()[0], attacks={}, ood={})
    assert render_report(bayesian=Results.from_json(small.to_json())) == render_report(bayesian=small)


def test_a_regression_report():
    bayes, plain, _laplace = regression()
    band = regression_band([0.0, 1.0], [0.0, 1.0], [0.1, 0.1])
    text = render_report(
        bayesian=bayes, map=plain, figures={"The band": band}, threshold=choose_threshold(torch.rand(99))
    )
    words = Page(text).text()
    for phrase in (
        "Inside the 95 % interval",
        "Width of the 95 % interval",
        "Root mean squared error",
        "promised share",
    ):
        assert phrase in words.replace("\u00a0", " ")
    assert written(bayes["rmse"], "number") in words
    assert "says" in words
    assert "was" in words
    assert "The band" in words
    assert "Accuracy" not in words


def test_results_write_their_own_report(tmp_path):
    path = _results(**BASE).report(tmp_path / "report.html", map=_results("map", **BASE), title="Mine")
    assert path == tmp_path / "report.html"
    assert "<h1>Mine</h1>" in path.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_a_report_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    bayes = _results(**BASE)
    path = tmp_path / "report.html"
    path.write_text("old", encoding="utf-8")

    def full(self, *_, **__):
        self.touch()
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space left"):
        write_report(path, bayesian=bayes)
    monkeypatch.undo()
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_templates_and_assets_are_in_the_package():
    root = resources.files("aftermap.analysis.report")
    assert {p.name for p in (root / "templates").iterdir()} >= {"report.html.j2", "parts.html.j2"}
    assert {p.name for p in (root / "assets").iterdir()} >= {"report.css", "report.js"}


# The verdict


def _results(name="x", kind="classification", **metrics):
    return Results(name, kind, 1000, {k: Metric(v, v, v) for k, v in metrics.items()})


BASE = {"accuracy": 0.95, "nll": 0.20, "ece": 0.03, "signed_calibration_error": 0.02}


def _judged(epistemic, confidence, kind="classification", seconds=1.0, **ood):
    table = {"set": ["test"] * 3, "index": [0, 1, 2], "epistemic": epistemic, "aleatoric": [0.2] * 3}
    if kind == "classification":
        table["confidence"] = confidence
    metrics = {k: Metric(v, v, v) for k, v in BASE.items()}
    areas = {"far": {score: {"auroc": Metric(v, v - 0.02, v + 0.02)} for score, v in ood.items()}} if ood else {}
    return Results("x", kind, 3, metrics, areas, table=table, provenance={"seconds_per_1000": seconds})


@pytest.mark.parametrize(
    "shares, words",
    [
        ((0.95, 1.0), "Its intervals are too wide: 95.0\u00a0% of the targets lie inside the 50\u00a0% interval."),
        ((0.45, 0.7), "Its intervals are too narrow: 70.0\u00a0% of the targets lie inside the 95\u00a0% interval."),
        ((0.55, 0.97), ""),
    ],
)
def test_the_verdict_names_intervals_that_are_off(shares, words):
    metrics = {"nll": Metric(1.0, 1.0, 1.0)}
    metrics |= {f"coverage_{level}": Metric(s, s, s) for level, s in zip((0.5, 0.95), shares, strict=True)}
    said = verdict(Results("la", "regression", 400, metrics), Results("map", "regression", 400, metrics)).text
    assert (words in said) if words else ("Its intervals" not in said)


def test_a_posterior_that_changes_no_number_adds_nothing():
    alone = _judged([0.0] * 3, [0.9, 0.8, 0.7], seconds=1.0)
    for epistemic, confidence, nothing in (
        ([1e-5] * 3, [0.9, 0.8001, 0.7], True),
        ([1e-5, 1e-5, 0.01], [0.9, 0.8, 0.7], False),
        ([1e-5] * 3, [0.9, 0.79, 0.7], False),
    ):
        found = verdict(_judged(epistemic, confidence, seconds=44.0), alone)
        assert (found.level == "nothing") is nothing
        assert found.headline.startswith("Adds nothing") is nothing
        assert ("takes 44 times as long" in found.headline) is nothing
    numbers = _judged([0.0] * 3, None, kind="regression")
    assert verdict(_judged([1e-8] * 3, None, kind="regression"), numbers).level == "nothing"
    assert verdict(_judged([1e-3] * 3, None, kind="regression"), numbers).level == "same"


def test_a_score_that_detects_far_better_is_named():
    said = score_notes(_judged([0.1] * 3, [0.9] * 3, entropy=0.7, mutual_information=0.95, variance=0.72))
    assert len(said) == 1
    assert "far: the mutual information finds these inputs far better (AUROC 0.950) than the entropy" in said[0]
    assert "--score mutual_information" in said[0]
    assert score_notes(_judged([0.1] * 3, [0.9] * 3, entropy=0.7, mutual_information=0.73)) == []
    assert score_notes(_judged([0.1] * 3, [0.9] * 3)) == []


@pytest.mark.parametrize(
    ("change", "level", "problem"),
    [
        ({}, "same", None),
        ({"ece": 0.01}, "good", None),
        ({"ece": 0.01, "nll": 0.225}, "same", None),  # better in one thing and worse in another
        ({"accuracy": 0.935}, "same", None),
        ({"accuracy": 0.92}, "worse", "accuracy 95.0\u00a0% → 92.0\u00a0%"),
        ({"nll": 0.225}, "same", None),
        ({"nll": 0.26}, "worse", "negative log-likelihood 0.200 → 0.260"),
        ({"nll": float("nan")}, "worse", "negative log-likelihood 0.200 → –"),
        ({"nll": float("inf")}, "worse", "negative log-likelihood 0.200 → ∞"),
        ({"signed_calibration_error": -0.15}, "worse", "confidence 15.0\u00a0% below accuracy"),
        ({"signed_calibration_error": -0.15, "nll": 0.19}, "good", None),  # a better likelihood is an improvement
    ],
)
def test_the_level_of_a_verdict(change, level, problem):
    found = verdict(_results("la", **{**BASE, **change}), _results("map", **BASE))
    assert found.level == level
    assert found.problems == (() if problem is None else (problem,))
    if problem:
        assert found.headline == f"Worse than the network alone: {problem}."


def test_the_words_of_a_verdict():
    threshold = choose_threshold(torch.linspace(0, 1, 99))
    found = verdict(_results("la", **{**BASE, "ece": 0.01}), _results("map", **BASE), threshold=threshold)
    assert found.headline == "Better calibrated, at the same accuracy."
    assert found.text.replace("\u00a0", " ") == (
        "Calibration error 3.0 % → 1.0 %, accuracy unchanged at 95.0 %, negative log-likelihood unchanged at 0.200. "
        "An input is flagged if its entropy is above 0.959: 5 % false alarms on data like the validation data."
    )
    same = verdict(_results("la", **BASE), _results("map", **BASE))
    assert same.headline.startswith("As good as the network alone")
    assert same.level == "same"
    few = verdict(_results(**BASE), threshold=choose_threshold(torch.ones(3)))
    assert "Too few validation data (3)" in few.text
    assert few.level == "alone"


def test_a_fall_that_may_be_chance_is_not_worse():
    # 25 of 1000 answers lost, but 400 changed sides: less than two standard errors.
    plain = np.ones(1000, bool)
    plain[:190] = False
    bayes = np.roll(plain, 215)
    bayes[500:525] = False
    tables = [{"set": ["test"] * 1000, "correct": c.tolist()} for c in (bayes, plain)]
    numbers = [float(c.mean()) for c in (bayes, plain)]
    results = [
        replace(_results(n, accuracy=a), table=t) for n, a, t in zip(("la", "map"), numbers, tables, strict=True)
    ]
    assert numbers[1] - numbers[0] == pytest.approx(0.025)
    assert verdict(*results).level == "same"
    assert comparison(*results)[0].mark == "same"
    assert verdict(*[replace(r, table={}) for r in results]).level == "worse"


def test_marks_need_more_than_chance():
    def results(name, low, value, high):
        return replace(_results(name), metrics={"ece": Metric(value, low, high)}, provenance={"n_resamples": 9})

    far = comparison(results("la", 0.01, 0.02, 0.03), results("map", 0.05, 0.06, 0.07))
    near = comparison(results("la", 0.01, 0.02, 0.03), results("map", 0.02, 0.025, 0.03))
    assert [far[0].mark, near[0].mark] == ["better", "same"]
    unknown = [replace(_results(n, mce=v), provenance={"n_resamples": 9}) for n, v in (("la", 0.1), ("map", 0.3))]
    assert comparison(*unknown, names=["mce"])[0].mark == ""
    inside = [_results(n, kind="regression", **{"coverage_0.95": v}) for n, v in (("la", 0.94), ("map", 0.99))]
    assert comparison(*inside)[0].mark == "better"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bayesian": {}}, InputError, "bayesian must be Results, as evaluate"),
        ({"map": 3}, InputError, "map must be Results"),
        ({"map": "regression"}, InputError, "one evaluation is of a classification, the other of a regression"),
        ({"map": "other data"}, InputError, "belong to different data"),
        ({"images": torch.zeros(5, 1, 2, 3)}, ShapeError, "one image per test input: got 5 for 120"),
        ({"images": torch.zeros(120, 6)}, ShapeError, r"images must have shape \[N, H, W\]"),
        ({"images": torch.full((120, 2, 3), math.nan)}, DataError, "not finite"),
        ({"classes": ["a"]}, InputError, "there are 1 names of classes"),
        ({"where": {}}, InputError, "where must be the result of where"),
    ],
)
def test_bad_input_is_refused(change, error, message):
    bayes, plain, _ = classification()
    if change.get("map") == "regression":
        change = {"map": regression()[0]}
    elif change.get("map") == "other data":
        change = {"map": replace(plain, provenance={**plain.provenance, "data_hash": "another"})}
    with pytest.raises(error, match=message):
        render_report(**{"bayesian": bayes, **change})


def test_bad_paths_are_refused(tmp_path):
    bayes = _results(**BASE)
    with pytest.raises(DataError, match="does not exist; make it first"):
        write_report(tmp_path / "no" / "report.html", bayesian=bayes)
    with pytest.raises(DataError, match="is a folder; give the name of a file"):
        write_report(tmp_path, bayesian=bayes)


@pytest.mark.slow
def test_the_example_writes_a_report(tmp_path, capsys):
    script = Path(__file__).parents[2] / "examples" / "report.py"
    state = torch.random.get_rng_state()
    try:
        path = runpy.run_path(str(script))["main"](["--epochs", "60", "--output", str(tmp_path / "report.html")])
    finally:
        torch.random.set_rng_state(state)
    page = Page(path.read_text(encoding="utf-8"))
    assert page.open == []
    assert len(page.all("img")) == 12
    assert "Where in the network the uncertainty sits" in page.text()
    assert "AUROC of unusual data: turned digits" in capsys.readouterr().out
