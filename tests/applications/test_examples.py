"""The examples run, with a small budget; what they print is real."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_active_learning(tmp_path, capsys) -> None:
    names = runpy.run_path(str(EXAMPLES / "active_learning.py"))
    if not (names["ROOT"] / "mnist").is_dir():
        pytest.skip("MNIST is not here; set AFTERMAP_DATA")
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    arguments = ["--quick", "--pool", "150", "--budget", "45", "--batch", "10", "--steps", "15", "--test", "100"]
    runs = names["main"]([*arguments, "--out", str(tmp_path)])
    assert list(runs) == ["mutual_information", "random"]
    first, other = (runs[name][0] for name in runs)
    assert first["labels"] == other["labels"] == [25, 35, 45]
    assert first["indices"][:25] == other["indices"][:25]  # the same beginning
    assert first["indices"] != other["indices"]
    assert len(set(first["indices"])) == 45
    assert (tmp_path / "active_learning.png").stat().st_size > 1000
    assert "labels to 95% accuracy" in capsys.readouterr().out
    assert names["main"]([*arguments, "--out", str(tmp_path)]) == runs  # read back, not run again
    assert json.loads((tmp_path / "random_0.json").read_text()) == other


def test_distil(capsys) -> None:
    names = runpy.run_path(str(EXAMPLES / "distil.py"))
    found = names["main"](
        ["--epochs", "15", "--members", "2", "--training", "10", "--copies", "0", "--validation", "30"]
    )
    assert found["kl"] < 0.5
    assert found["student/accuracy"] > 0.7
    assert "student against mixture" in capsys.readouterr().out


def test_bayesian_optimisation(tmp_path, capsys) -> None:
    names = runpy.run_path(str(EXAMPLES / "bayesian_optimisation.py"))
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    small = ["--function", "forrester", "--evaluations", "10", "--initial", "5", "--seeds", "1", "--hidden", "8"]
    found = names["main"]([*small, "--strategies", "thompson", "random", "--out", str(tmp_path / "regret.png")])
    assert found["thompson"][0] < 1.0
    assert found["thompson"][0] >= -1e-3
    assert (tmp_path / "regret.png").stat().st_size > 1000
    assert "median of best" in capsys.readouterr().out


def test_branin_has_its_minima() -> None:
    names = runpy.run_path(str(EXAMPLES / "bayesian_optimisation.py"))
    for x, y in ((-3.14159265, 12.275), (3.14159265, 2.275), (9.42477796, 2.475)):
        point = torch.tensor([(x + 5) / 15, y / 15], dtype=torch.float64)
        assert float(names["branin"](point)) == pytest.approx(0.397887, abs=1e-5)
