"""The examples run, with a small budget, and show what they say."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> Any:
    pytest.importorskip({"mapie_conformal": "mapie", "huggingface_lora": "peft", "lightning_vogn": "lightning"}[name])
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](list(arguments))


@pytest.mark.slow
def test_conformal_intervals_cover(capsys: pytest.CaptureFixture[str]) -> None:
    results = run("mapie_conformal", "--repeats", "3")
    assert "coverage" in capsys.readouterr().out
    for scores in results.values():
        for coverage, _, width in scores.values():
            assert 0.84 < coverage < 0.96  # 0.9 on average; three test sets of at least 133 leave this much room
            assert width > 0


# After three epochs the networks are not sure enough of themselves, and validation wants no posterior at all: a true warning.
@pytest.mark.filterwarnings("ignore:the best point lies at the edge of the grid")
def test_an_adapter_and_its_posterior_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    results = run("huggingface_lora", "--epochs", "3")
    assert "posterior" in capsys.readouterr().out
    assert results["loaded_differs"] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The '(train|val)_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:the best point lies at the edge of the grid")
def test_vogn_trains_under_lightning(capsys: pytest.CaptureFixture[str]) -> None:
    results = run("lightning_vogn", "--epochs", "3")
    assert "saved in vogn/" in capsys.readouterr().out
    assert results["vogn, posterior"] < 1.5  # chance is 2.3 nats
