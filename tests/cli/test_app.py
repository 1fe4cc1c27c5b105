"""The command as a whole: help, suggestions, completion, `python -m aftermap`, checkouts, and the demo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from aftermap.cli.app import EXAMPLES
from tests.cli.common import Files, answer, invoke, words

ROOT = Path(__file__).resolve().parents[2]
VERBS = (
    "demo",
    "doctor",
    "fit",
    "tune",
    "predict",
    "evaluate",
    "report",
    "where",
    "train",
    "select",
    "reproduce",
    "bench",
)
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "100"}


def command(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "aftermap", *arguments]
    return subprocess.run(line, env=ENV, capture_output=True, text=True, timeout=120, check=False, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example(verb: str) -> None:
    said = words(invoke(verb, "--help").stdout)
    assert "Example:" in said
    assert said.replace(" ", "").endswith("Example:" + EXAMPLES[verb].replace(" ", ""))


def test_help_lists_every_command() -> None:
    said = words(invoke("--help").stdout)
    for verb in VERBS:
        assert f" {verb} " in said
    assert "Exit codes: 0 all went well, 2 bad input, 3 a self-check failed, 4 worse" in said
    assert invoke("--version").stdout.startswith("aftermap ")


def test_suggestions() -> None:
    assert "Did you mean 'report'" in words(invoke("raport", code=2).stderr)
    found = words(invoke("fit", "--modle", "x:y", "-o", "p", code=2).stderr)
    assert "No such option: --modle" in found
    assert "--model" in found
    assert "Missing option '--model'" in words(invoke("fit", "-o", "p", code=2).stderr)


def test_completion_knows_the_commands() -> None:
    env = {**ENV, "_AFTERMAP_COMPLETE": "complete_bash", "COMP_WORDS": "aftermap re", "COMP_CWORD": "1"}
    code = "from aftermap.cli.app import app; app(prog_name='aftermap')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert set(done.stdout.split()) == {"report", "reproduce"}


def test_the_module_is_the_command(files: Files, tmp_path: Path) -> None:
    done = command("predict", str(tmp_path / "none"), "new.csv")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: there is no posterior at")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_killed_fit_leaves_nothing(files: Files, tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        arguments = [
            "train",
            "--model",
            "builtin:mlp",
            "--data",
            "toy:blobs",
            "--epochs",
            "100000",
            "-o",
            str(tmp_path / f"run{number}"),
        ]
        running = subprocess.Popen(
            [sys.executable, "-m", "aftermap", *arguments], env=ENV, stderr=subprocess.PIPE, text=True
        )
        place = tmp_path / f"run{number}"
        deadline = time.monotonic() + 60
        while not (place / "checkpoint.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        running.send_signal(number)
        _, said = running.communicate(timeout=60)
        assert running.returncode == 130
        assert "interrupted; nothing half-written is left behind" in said
        assert sorted(p.name for p in place.iterdir()) == ["checkpoint.pt", "history.json"]


# Checkouts


def checkout(folder: Path) -> None:
    (folder / "pyproject.toml").write_text("")
    for name, budgets in (("ritter2018_toy", "BUDGETS = {'small': 1, 'stated': 2}\n"), ("older", "")):
        place = folder / "experiments" / name
        place.mkdir(parents=True)
        (place / "README.md").write_text(f"# A toy regression ({name})\n\n| claim | paper | ours | tolerance |\n")
        (place / "run.py").write_text(
            "import json, pathlib, sys\n"
            f"{budgets}"
            "pathlib.Path(__file__).with_name('seen').write_text(json.dumps(sys.argv[1:]))\n"
            "pathlib.Path(__file__).with_name('results.json').write_text(json.dumps({'arguments': sys.argv[1:]}))\n"
            "sys.exit(1 if 'fail' in sys.argv else 0)\n"
        )


def test_reproduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout(tmp_path)
    monkeypatch.chdir(tmp_path)
    said = words(invoke("reproduce", "list").stdout)
    assert "ritter2018_toy" in said
    assert "A toy regression" in said
    assert "older" in said
    stated = ["--budget", "stated"]
    assert answer("reproduce", "ritter2018/toy", "--quick", "3") == {"arguments": [*stated, "--quick", "3"]}
    assert "exit code 1" in words(invoke("reproduce", "ritter2018_toy", "fail", code=3).stdout)
    assert "Did you mean ritter2018_toy?" in words(invoke("reproduce", "ritter2018/toi", code=2).stderr)
    assert "allowed are stated, small" in words(invoke("reproduce", "all", "--budget", "huge", code=2).stderr)


def test_reproduce_all_runs_what_has_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert answer("reproduce", "all", "--budget", "small", "--data-dir", "data") == {}
    seen = json.loads((tmp_path / "experiments" / "ritter2018_toy" / "seen").read_text())
    assert seen == ["--budget", "small", "--data-dir", str(tmp_path / "data")]
    assert not (tmp_path / "experiments" / "older" / "seen").exists()
    assert set(answer("reproduce", "all")) == {"ritter2018_toy"}
    assert "ritter2018_toy: the experiment ended with" in words(invoke("reproduce", "all", "fail", code=3).stdout)


def test_reproduce_hands_an_older_experiment_its_own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert answer("reproduce", "older", "--images", "3") == {"arguments": ["--images", "3"]}
    assert "older has no --budget" in words(invoke("reproduce", "older", "--budget", "small", code=2).stderr)


def test_without_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("aftermap.__file__", str(tmp_path / "site-packages" / "aftermap" / "__init__.py"))
    for verb, arguments in (("reproduce", ["list"]), ("bench", [])):
        said = words(invoke(verb, *arguments, code=2).stderr)
        assert "is part of the sources of aftermap" in said
        assert "clone the repository of aftermap with git" in said


def test_bench_hands_its_arguments_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("")
    (tmp_path / "benchmarks" / "run.py").write_text(
        "import pathlib, sys\npathlib.Path('seen').write_text(' '.join(sys.argv[1:]))\n"
    )
    monkeypatch.chdir(tmp_path)
    invoke("bench", "--quick", "--only", "curvature")
    assert (tmp_path / "seen").read_text() == "--quick --only curvature"
    (tmp_path / "benchmarks" / "run.py").write_text("import no_such_peer\n")
    assert "`make bench` sets up what they need" in words(invoke("bench", code=3).stdout)


# The demo


def check_demo(place: Path, content: dict[str, object]) -> None:
    assert sorted(p.name for p in place.iterdir()) == ["posterior", "report.html", "results.json"]
    assert set(json.loads((place / "results.json").read_text())["ood"]) == {"rotated", "photographs"}
    assert "digits" in (place / "report.html").read_text(encoding="utf-8")
    assert content["report"] == str(place / "report.html")


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    place, state, threads = tmp_path / "demo", torch.random.get_rng_state(), torch.get_num_threads()
    content = answer("demo", "-o", str(place))
    check_demo(place, content)
    assert content["verdict"]["level"] == "good"
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_num_threads() == threads
    said = words(invoke("demo", "-o", str(place)).stdout)  # again, over the old one
    assert "where the uncertainty sits" in said
    assert f"report: {place}/report.html" in said
    assert "exit code" not in said
    scored = invoke("predict", str(place / "posterior"), "builtin:digits:test").stdout.splitlines()
    assert scored[0] == "prediction,confidence,epistemic,aleatoric,score,flag"
