"""The example runs on a small budget and writes what it promises."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


@pytest.mark.filterwarnings("ignore:.* the network itself is no better than always answering")  # after one epoch
def test_where_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from examples.where import main

    found = main(["--limit", "80", "--epochs", "1", "--out", str(tmp_path)])
    assert found.layer_names == ("conv1", "conv2", "fc1", "fc2", "fc3")
    assert abs(math.fsum(k.predictive_share for k in found.layers) - 1) < 1e-10
    assert json.loads((tmp_path / "where.json").read_text())["n_data"] == 20
    assert {p.stem for p in tmp_path.glob("*.png")} >= {"layers", "filters", "inputs", "saliency", "calibration"}
    assert "drawing one layer raises the training loss" in capsys.readouterr().out
