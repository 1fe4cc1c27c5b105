"""What commands will take is said before they begin, and follows from what some of their data took, by a clock of the test."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aftermap.baselines import Deterministic
from aftermap.cli import cost
from aftermap.laplace import rehearsal
from aftermap.predictive import PosteriorPredictor
from tests.cli.common import Files, invoke, words

ALONE, EXACT, MARGIN = 0.001, 0.1, 0.02  # seconds of an input


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions take a known time for each input by the clock of the estimates, and nothing else takes any."""
    now = [0.0]

    def ticking(method: Callable[..., Any], each: Callable[[dict[str, Any]], float]) -> Callable[..., Any]:
        def predict(self: Any, x: Any, **options: Any) -> Any:
            before = now[0]
            found = method(self, x, **options)
            now[0] = before + len(found) * each(options)  # pieces of a prediction are not counted twice
            return found

        return predict

    def of_posterior(options: dict[str, Any]) -> float:
        return MARGIN if options.get("kind") == "margin" else EXACT

    monkeypatch.setattr(PosteriorPredictor, "predict", ticking(PosteriorPredictor.predict, of_posterior))
    monkeypatch.setattr(Deterministic, "predict", ticking(Deterministic.predict, lambda options: ALONE))
    for module in (cost, rehearsal):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))


@pytest.mark.usefixtures("slow")
def test_predict_says_what_it_takes_and_the_cheap_way(files: Files, fitted: Path, tmp_path: Path) -> None:
    found = invoke("predict", str(fitted), str(files.test), "-o", str(tmp_path / "p.csv"))
    n = len((tmp_path / "p.csv").read_text(encoding="utf-8").splitlines()) - 1
    said = f"{n:,} inputs: about {n * EXACT:.0f} s, 100 ms each (100 times the network alone); --kind margin takes about {max(1, n * MARGIN):.0f} s"
    assert said in words(found.stderr)
    cheap = invoke("predict", str(fitted), str(files.test), "--kind", "margin", "-o", str(tmp_path / "q.csv"))
    assert f"{n:,} inputs: about {n * MARGIN:.0f} s, 20 ms each (20 times the network alone)" in words(cheap.stderr)
    assert "--kind margin takes" not in words(cheap.stderr)


def test_a_short_prediction_says_nothing(files: Files, fitted: Path, tmp_path: Path) -> None:
    found = invoke("predict", str(fitted), str(files.test), "--limit", "2", "-o", str(tmp_path / "p.csv"))
    assert "about" not in words(found.stderr)


@pytest.mark.usefixtures("slow")
def test_evaluate_counts_both_predictors_and_all_sets(files: Files, fitted: Path) -> None:
    arguments = ("evaluate", str(fitted), "--test", str(files.test), "--ood", str(files.ood), "--limit", "50")
    said = words(invoke(*arguments).stderr)
    found = re.search(r"([\d,]+) inputs: about (\d+) s, of which 1 s for intervals of the scores", said)
    assert found is not None, said
    assert int(found[1]) == 100
    assert int(found[2]) == round(100 * (ALONE + EXACT))


@pytest.mark.usefixtures("slow")
def test_tune_counts_its_check_and_its_thresholds(files: Files, posterior: Path, tmp_path: Path) -> None:
    found = invoke("tune", str(posterior), "--val", str(files.val), "-o", str(tmp_path / "tuned"))
    said = re.search(r"tuning on 80 held-out data, with its check and thresholds: about (\d+) s", words(found.stderr))
    assert said is not None, found.stderr
    assert int(said[1]) >= round(2 * 80 * EXACT)  # each of them is predicted twice, after the tuning
