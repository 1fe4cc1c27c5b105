"""The first example that people see: it runs, shows what the README says, and noise stands out."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sklearn")
README = Path(__file__).resolve().parents[1] / "README.md"


def test_noise_stands_out(capsys: pytest.CaptureFixture[str]) -> None:
    from examples.first_look import main

    prediction, alone = main()
    said = capsys.readouterr().out.splitlines()
    assert float(prediction.epistemic[3:].min()) > float(prediction.epistemic[:3].max())
    assert float(alone[3:].max()) > 0.9  # the network alone is sure of noise
    shown = README.read_text(encoding="utf-8")
    start = said.index("classification of 5 inputs: 10 classes (link auto)")
    assert "\n".join(said[start : start + 3]) in shown
    assert said[start + 8] in shown
