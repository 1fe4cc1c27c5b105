"""The benchmark of growth: its slopes are slopes, what grows too fast is flagged, and the page is what it measured."""

from __future__ import annotations

import json

import pytest

from benchmarks import growth


@pytest.mark.parametrize("power", [0.0, 1.0, 2.5])
def test_exponents_are_slopes(power: float) -> None:
    sizes = [3, 6, 12, 24]
    # A constant cost at small sizes does not matter: only the upper half is fitted.
    costs = [max(5.0, size**power) if size < 12 else size**power for size in sizes]
    assert growth.exponent(sizes, costs) == pytest.approx(power, abs=1e-9)


def test_what_grows_faster_than_in_theory_is_flagged() -> None:
    row = {"exponent": 1.4, "theory": 1.0, "megabytes": [1.0, 8.0], "memory_exponent": 2.9, "memory_theory": 2.0}
    assert growth.surprises(row) == ["time", "memory"]
    assert growth.surprises({**row, "exponent": 1.2, "memory_exponent": 2.0}) == []


def test_every_job_runs_at_a_small_size() -> None:
    small = growth.Problem(n=6, width=4, depth=1, outputs=3, batch=2)
    for name, job in growth.JOBS.items():
        assert job.make(small)() is not None, name
        assert set(job.memory) <= set(job.time) <= set(growth.AXES)


def test_the_page_shows_what_was_measured() -> None:
    results = json.loads(growth.OUTPUT.read_text(encoding="utf-8"))
    assert growth.table(results) in growth.PAGE.read_text(encoding="utf-8"), (
        "python -m benchmarks.growth writes the page"
    )
    assert {row["job"] for row in results["rows"]} <= {*growth.JOBS, *growth.PEERS}
