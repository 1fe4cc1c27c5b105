"""The register is whole, the committed results judge it, and the page on reproduction has no number of its own."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aftermap.cli.reproduce import _has_budgets
from experiments import page
from experiments.framework import NOT_RUN, NOT_TESTABLE, ROOT, Claim, Verdict, claim_table, read_claims

# Letter and number of claims of each document.
REGISTER = {"R": 20, "W": 13, "V": 16, "L": 10, "H": 6, "X": 2, "U": 2, "A": 3}
CLAIMS, RESULTS = read_claims(), page.read_results()


def content(**changes: Any) -> dict[str, Any]:
    """Results as a run writes them."""
    verdict = {"id": "H1", "verdict": "holds", "ours": "0.01", "reason": "", "seeds": 8}
    return {
        "experiment": "mcinerney2024",
        "budget": {"name": "stated"},
        "commit": "abc",
        "torch": "2",
        "seconds": 1234,
        "verdicts": [verdict],
        "figures": {},
        "values": {},
        **changes,
    }


def test_the_register_has_every_claim_once() -> None:
    wanted = [f"{letter}{k}" for letter, count in REGISTER.items() for k in range(1, count + 1)]
    assert len(wanted) == 72
    assert Counter(c.id for c in CLAIMS) == Counter(wanted)
    for claim in CLAIMS:
        assert all((claim.document, claim.place, claim.claim, claim.criterion, claim.experiment)), claim.id


def test_every_claim_is_judged_once_or_not_yet() -> None:
    judged = Counter(v["id"] for content in RESULTS.values() for v in content["verdicts"])
    assert set(judged) <= {c.id for c in CLAIMS}
    assert [id for id, count in judged.items() if count > 1] == []
    for name, content in RESULTS.items():
        own = {c.id for c in CLAIMS if c.experiment == name}
        assert {v["id"] for v in content["verdicts"]} <= own, name


@pytest.mark.parametrize("name", list(RESULTS))
def test_results_are_whole(name: str) -> None:
    content = RESULTS[name]
    assert content["experiment"] == name
    assert content["budget"]["name"] == "stated"
    assert content["seconds"] > 0
    assert content["values"]
    for verdict in content["verdicts"]:
        assert Verdict(**verdict).ours
    for file, caption in content.get("figures", {}).items():
        assert (ROOT / "experiments" / name / file).is_file()
        assert caption
    text = (ROOT / "experiments" / name / "results.json").read_text(encoding="utf-8")
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{name}: {word} is not JSON"))


@pytest.mark.parametrize("name", list(RESULTS))
def test_a_number_that_is_compared_has_three_seeds(name: str) -> None:
    for verdict in RESULTS[name]["verdicts"]:
        judged = verdict["verdict"] not in (NOT_RUN, NOT_TESTABLE)
        assert not judged or verdict["seeds"] == 0 or verdict["seeds"] >= 3, verdict["id"]


@pytest.mark.parametrize("name", list(RESULTS))
def test_the_table_in_the_readme_is_that_of_the_results(name: str) -> None:
    verdicts = [Verdict(**v) for v in RESULTS[name]["verdicts"]]
    table = claim_table([c for c in CLAIMS if c.experiment == name], verdicts)
    assert table in (ROOT / "experiments" / name / "README.md").read_text(encoding="utf-8")


def test_few_claims_are_not_testable_and_results_are_small() -> None:
    verdicts = [v["verdict"] for content in RESULTS.values() for v in content["verdicts"]]
    assert verdicts.count(NOT_TESTABLE) <= 10
    files = [
        f
        for name in RESULTS
        for f in (ROOT / "experiments" / name).glob("*.*")
        if f.suffix in (".json", ".svg", ".png")
    ]
    assert sum(f.stat().st_size for f in files) < 2_000_000


def test_the_committed_page_is_the_generated_one() -> None:
    shown = page.figures_of(RESULTS)
    assert page.PAGE.read_text(encoding="utf-8") == page.page_of(CLAIMS, RESULTS, shown), "python -m experiments.page"
    there = {p.name: p.read_bytes() for p in page.IMAGES.glob("*")}
    assert there == {name: source.read_bytes() for name, source in shown.items()}, "python -m experiments.page"
    assert sum(map(len, there.values())) < 2_000_000
    assert "reproduction.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_page_counts_and_tells() -> None:
    claims = [c for c in CLAIMS if c.id in ("H1", "H2", "X1")]
    text = page.page_of(claims, {"mcinerney2024": content(scale="3 of 10 sets *.")}, {})
    assert "Smaller here: 3 of 10 sets *." in text
    assert "| H1 | Hessian-free Laplace has the variance" in text
    assert "**H2** (abstract): **not run yet**" in text
    assert "- *Here:* 0.01" in text
    assert re.search(r"^\| \*\*all\*\* \| 3 \| 1 \| 0 \| 0 \| 0 \| 2 \|$", text, re.MULTILINE)
    assert "aftermap reproduce mcinerney2024" in text
    assert "1,234 s" in text
    assert "`experiments/redux2021` has no results yet" in text
    for claim in claims:
        assert claim.criterion in text


def test_a_large_figure_is_named_but_not_shown(tmp_path: Path) -> None:
    folder = tmp_path / "experiments" / "mcinerney2024"
    folder.mkdir(parents=True)
    (folder / "small.svg").write_text("<svg/>")
    (folder / "large.png").write_bytes(bytes(page.LARGEST + 1))
    results = {"mcinerney2024": content(figures={"small.svg": "A small one.", "large.png": "A large one."})}
    shown = page.figures_of(results, tmp_path)
    assert list(shown) == ["mcinerney2024-small.svg"]
    text = page.page_of(CLAIMS, results, shown)
    assert "![A small one.](images/reproduction/mcinerney2024-small.svg)" in text
    assert "`experiments/mcinerney2024/large.png`: A large one." in text


def test_a_verdict_must_be_one_of_four_and_have_its_reason() -> None:
    with pytest.raises(ValueError, match="one of four"):
        Verdict("H1", "nearly", "1")
    with pytest.raises(ValueError, match="needs a reason"):
        Verdict("H1", "does not hold", "1")
    assert Verdict.of("H1", [True, False], "1", "the second").verdict == "holds in part"
    assert Verdict.of("H1", [False, False], "1", "both").verdict == "does not hold"
    assert Verdict.of("H1", True, "1", "nothing").reason == ""


def test_a_cell_of_a_table_may_hold_a_bar() -> None:
    claim = replace(CLAIMS[0], claim="a | b")
    assert isinstance(claim, Claim)
    row = claim_table([claim], []).splitlines()[-1]
    assert "a \\| b" in row
    assert row.count(" | ") == 5
    assert "not run yet" in row


def test_all_runs_every_experiment_of_the_register() -> None:
    names = {c.experiment for c in CLAIMS}
    assert names == {name for name in names if _has_budgets(ROOT / "experiments" / name)}
