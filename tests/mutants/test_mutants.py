"""The program that makes errors makes the errors that it says: each is one change, and those that are written out still fit the source."""

from __future__ import annotations

import ast
import json
import random

from tests.mutants.__main__ import (
    EQUIVALENT,
    RESULTS,
    ROOT,
    SOURCE,
    TESTS,
    _note_deleted,
    _sampled,
    all_mutations,
    by_hand,
    summary,
)
from tests.mutants.mutations import BY_HAND, mutate, mutations_of

CORE = ("curvature", "posteriors", "predictive", "laplace", "optim", "hessian_free", "metrics", "likelihoods")
WITHOUT_ARITHMETIC = {"predictive/display.py", "laplace/display.py"}  # Words and tables.


def test_every_error_by_hand_fits_the_source_once() -> None:
    for mutation in by_hand():
        source = (SOURCE / mutation.file).read_text()
        ast.parse(mutate(source, mutation))
        assert mutation.file in TESTS
        assert mutation.line > 0


def test_mutants_are_valid_differ_and_are_found_again_by_name() -> None:
    every = {m.name: m for m in all_mutations()}
    assert len(every) == len(all_mutations())
    for mutation in random.Random(0).sample(sorted(every.values(), key=lambda m: m.name), 60):
        source = (SOURCE / mutation.file).read_text()
        changed = mutate(source, mutation)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutation.name
    known = {*every, *(m.name for m in by_hand())}
    assert set(json.loads(EQUIVALENT.read_text())) <= known, "an explanation is of a mutant that is there no more"


def test_a_larger_sample_contains_the_smaller_one_and_all_files_have_tests() -> None:
    every = all_mutations()
    small, large = _sampled(every, 40, 3), _sampled(every, 80, 3)
    assert large[:40] == small
    assert {m.name for m in _sampled(every, len(every), 3)} == {m.name for m in every}
    core = [p for package in CORE for p in (SOURCE / package).rglob("*.py")]
    missing = {p.relative_to(SOURCE).as_posix() for p in core} - set(TESTS) - WITHOUT_ARITHMETIC
    assert [f for f in sorted(missing) if mutations_of((SOURCE / f).read_text(), f)] == []
    assert [t for tests in TESTS.values() for t in tests if not (ROOT / t).exists()] == []


def test_the_summary_counts_what_was_drawn_and_does_not_hide_what_survived_at_first() -> None:
    def entry(result: str, operator: str = "limit", sample: int = 0, **more: bool) -> dict[str, object]:
        return {"result": result, "operator": operator, "seconds": 2.0, "sample": sample, **more}

    by_hand_entry = entry("found", BY_HAND)
    del by_hand_entry["sample"]
    told = {
        "a": entry("found"), "b": entry("found by time"), "c": entry("found", survived_at_first=True), "d": entry("survived"),
        "e": by_hand_entry, "f": entry("deleted", "number", 1), "g": entry("found", "number", 1),
    }  # fmt: skip
    counted = summary({"mutants": told})
    assert (counted["tried"], counted["found"], counted["found_at_first"], counted["deleted"]) == (6, 4, 3, 1)
    assert (counted["share"], counted["share_at_first"]) == (0.8, 0.6)
    assert counted["survivors"] == ["d"]
    assert counted["by_operator"] == {"limit": [3, 4, 0], "number": [1, 2, 1], BY_HAND: [1, 1, 0]}
    shares = {seed: (e["tried"], e["share_at_first"], e["share"]) for seed, e in counted["samples"].items()}
    assert shares == {0: (4, 0.5, 0.75), 1: (2, 1.0, 1.0)}


def test_survivors_whose_code_is_gone_are_noted_as_deleted() -> None:
    (kept, *_) = all_mutations()
    told = {
        kept.name: {"result": "survived", "operator": kept.operator, "before": kept.before},
        "x": {"result": "survived", "operator": "limit", "before": "a < b"},
        "y": {"result": "found", "operator": "limit", "before": "a < b"},
        "z": {"result": "survived", "operator": BY_HAND, "before": "a < b"},
    }
    _note_deleted({"mutants": told}, all_mutations())
    assert [entry["result"] for entry in told.values()] == ["survived", "deleted", "found", "survived"]


def test_the_results_name_the_sample_that_each_mutant_is_of() -> None:
    results = json.loads(RESULTS.read_text())
    drawn = {name: entry for name, entry in results["mutants"].items() if entry["operator"] != BY_HAND}
    assert all(isinstance(entry["sample"], int) for entry in drawn.values())
    assert set(json.loads(EQUIVALENT.read_text())) <= {n for n, e in drawn.items() if e["result"] == "survived"}
