"""Every experiment runs at a tiny size, from its data to its verdicts, figures and table."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from experiments.framework import ROOT, _plain, default_data_dir, missing_data, read_claims, run

pytest.importorskip("matplotlib", reason="the figures need it")

CLAIMS = read_claims()
NAMES = sorted({c.experiment for c in CLAIMS if (ROOT / "experiments" / c.experiment / "run.py").is_file()})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_small_budget_runs(name: str, tmp_path: Path) -> None:
    experiment = importlib.import_module(f"experiments.{name}.run")
    missing = missing_data(experiment, default_data_dir())
    if missing:
        pytest.skip(f"{name} needs {', '.join(missing)} in {default_data_dir()}; AFTERMAP_DATA names another folder")
    folders = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "output")]
    line = [sys.executable, "-m", f"experiments.{name}.run", "--budget", "small", *folders]
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "output" / "results.json").read_text(encoding="utf-8"))
    assert {v["id"] for v in content["verdicts"]} == {c.id for c in CLAIMS if c.experiment == name}
    assert content["budget"]["name"] == "small"
    table = (tmp_path / "output" / "README.md").read_text(encoding="utf-8")
    assert all(f"| {v['id']} |" in table for v in content["verdicts"])
    for file in content["figures"]:
        assert (tmp_path / "output" / file).stat().st_size > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_results_are_those_of_the_stated_settings(name: str) -> None:
    experiment = importlib.import_module(f"experiments.{name}.run")
    content = json.loads((ROOT / "experiments" / name / "results.json").read_text(encoding="utf-8"))
    settings = experiment.BUDGETS["stated"]
    assert content["budget"] == {"name": "stated", **_plain(asdict(settings))}
    assert set(content["values"]) == {job.key for job in experiment.jobs(settings, Path("nowhere"))}


@pytest.mark.parametrize("name", NAMES)
def test_data_that_are_not_there_are_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = importlib.import_module(f"experiments.{name}.run")
    wanted = missing_data(experiment, tmp_path)
    assert wanted == list(getattr(experiment, "DATA", ()))
    if not wanted:
        pytest.skip(f"{name} needs no data")
    assert run(experiment, name, ["--budget", "small", "--data-dir", str(tmp_path), "--work", str(tmp_path / "w")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert wanted[0] in said
    assert "AFTERMAP_DATA" in said
