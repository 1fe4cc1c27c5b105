"""The comparison of methods runs, with a small budget."""

import runpy
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "compare_methods.py"


def test_compare_methods_runs(tmp_path, capsys):
    names = runpy.run_path(str(SCRIPT))
    if not (names["ROOT"] / "fashion-mnist").is_dir():
        pytest.skip("Fashion-MNIST is not here; set AFTERMAP_DATA")
    state = torch.random.get_rng_state()
    try:
        table = names["main"](
            [
                "--quick",
                "--train",
                "300",
                "--test",
                "60",
                "--epochs",
                "1",
                "--methods",
                "MAP;temperature;MC dropout;SWAG",
            ]
        )
    finally:
        torch.random.set_rng_state(state)
    assert list(table.rows) == ["MAP", "temperature", "MC dropout", "SWAG"]
    assert table.rows["MAP"]["accuracy"] == table.rows["temperature"]["accuracy"]
    assert "* best of its column" in capsys.readouterr().out
