"""All programs as one run: each is told of, a failure does not stop the others, and what is wrong is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults import __main__ as whole
from tests.faults import digits, processes, soak


def test_a_program_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str) -> dict[str, Any]:
        return {"exit_code": int(name in failing), "minutes": 1.0, "processor_minutes": 1.0}

    pages, failing = list[int](), set[str]()
    monkeypatch.setattr(whole, "run_program", run)
    monkeypatch.setattr(whole, "RUN", tmp_path / "run.json")
    monkeypatch.setattr(whole, "write_page", lambda: pages.append(1))
    for code, fails in enumerate(("", "soak")):
        failing.add(fails)
        assert whole.main(["--at-once", "1"]) == code
        told = json.loads((tmp_path / "run.json").read_text())
        assert set(told["programs"]) == set(whole.PROGRAMS)
    assert len(pages) == 2
    for name in whole.PROGRAMS:
        assert Path(whole.__file__).with_name(f"{name}.py").exists(), name


def test_an_exit_code_and_the_time_of_processors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(whole.PROGRAMS, "no_such_program", ())
    told = whole.run_program("no_such_program")
    assert told["exit_code"] == 1
    assert told["processor_minutes"] >= 0


def test_soak_notices_growth_and_other_numbers() -> None:
    good: dict[str, Any] = {
        "growth": {"predict": {"count": 10, "megabytes": 0.1}},
        "threads": {"kron": 0.0},
        "workers": {"fork": 1e-7},
        "copies": {"pickle": {"objects": 2, "other": []}},
    }
    assert soak.wrong(good) == []
    bad = {
        "growth": {"predict": {"count": 10, "megabytes": 7.0}},
        "threads": {"kron": float("nan")},
        "workers": {"fork": 1e-3},
        "copies": {"pickle": {"objects": 2, "other": ["Prior"]}},
    }
    for part, found in bad.items():
        assert len(soak.wrong({**good, part: found})) == 1, part


def test_digits_notice_a_missing_warning() -> None:
    row = {"task": "classes", "count": 12, "structure": "full", "dtype": "torch.float32"}
    assert digits.missed({"rows": [{**row, "found": [(1.0, 1e-6, False), (1e-8, 0.5, True)]}]}) == []
    assert len(digits.missed({"rows": [{**row, "found": [(1.0, 1e-6, False), (1e-8, 0.5, False)]}]})) == 1


def test_shares_are_disjoint_and_some_are_empty() -> None:
    for seed in range(4):
        for world in (1, 2, 4):
            for empty in (False, True):
                parts = processes.shares(seed, world, 9, empty=empty)
                assert len(parts) == world
                assert [i for p in parts for i in range(9)[p]] == list(range(9))
                nothing = any(p.start == p.stop for p in parts)
                assert nothing == (empty and world > 1 and seed % 2 == 1)
