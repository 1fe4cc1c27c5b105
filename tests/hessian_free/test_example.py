"""The coverage between data (H7): one seed in the normal suite, all seeds in the slow one."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "in_between.py"


def test_h7_one_seed_and_its_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "in_between.svg"
    options = ["--seeds", "1", "--queries", "13", "--units", "12", "--figure", str(figure)]
    table = runpy.run_path(str(SCRIPT))["main"](options)
    for method in ("exact Hessian", "full GGN", "Hessian-free"):
        assert table[method]["gap"] >= 0.95, method
    assert table["Hessian-free"]["sd gap"] == pytest.approx(table["exact Hessian"]["sd gap"], rel=0.01)
    for method in ("diagonal GGN", "KFAC", "KFAC, eq. 9", "last layer"):
        assert table[method]["sd gap"] < 0.6 * table["Hessian-free"]["sd gap"], method
    assert "Hessian-free" in capsys.readouterr().out
    assert figure.read_text().startswith("<?xml")


@pytest.mark.slow
def test_h7_the_gap_is_covered_by_full_covariances_only() -> None:
    table = runpy.run_path(str(SCRIPT))["main"](["--seeds", "8"])
    for method in ("exact Hessian", "full GGN", "Hessian-free"):
        assert table[method]["gap"] >= 0.95, method
        assert table[method]["in data"] >= 0.85, method
    for method in ("diagonal GGN", "KFAC", "KFAC, eq. 9", "last layer"):
        assert table[method]["gap"] <= 0.7, method
    for region in ("gap", "in data", "outside"):
        exact, free = (table[m][f"sd {region}"] for m in ("exact Hessian", "Hessian-free"))
        assert free == pytest.approx(exact, rel=0.02), region
