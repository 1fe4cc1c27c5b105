"""Whatever a folder says about its network and its data, none of its author's code runs."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

from tests.cli.common import Files, invoke, make_files, words
from tests.faults.sealing import edit

CODE = "import pathlib\npathlib.Path({marker!r}).write_text('it ran')\n\n\ndef build():\n    pass\n\n\ntest = train = build\n"
VERBS = ("predict", "evaluate", "report", "tune", "where")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that is full of code under every name that a folder may use."""
    place, marker = tmp_path / "work", str(tmp_path / "marker")
    (place / "package").mkdir(parents=True)
    names = ["evil.py", "toy.py", "builtin.py", "package/__init__.py", "package/nets.py", "mlp.py", "x.py", "a b.py"]
    for name in names:
        (place / name).write_text(CODE.format(marker=marker))
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])
    monkeypatch.setenv("AFTERMAP_STATE", str(tmp_path / "state"))
    return place


def specs(work: Path, count: int) -> list[str]:
    """Some that were thought of, and some by chance."""
    known = [
        "evil.py:build", "evil:build", "./evil.py:build", f"{work}/evil.py:build", f"{work / 'package' / '..' / 'evil.py'}:build",
        "package:build", "package.nets:build", "os:system", "subprocess:call", "builtins:exec", "builtins:eval", "sys:exit", "toy:test", "toy:build",
        "builtin:../x", "builtin:evil:build", "builtin:", "builtin:\nevil:build", "builtin", "builtin.py:build", " builtin:mlp", "builtin :mlp",
        "BUILTIN:mlp", "evil:build\n", "\nevil:build", "evil\x00:build", "evil.py:build\x1b[2J", "evil:build;package:build", "evil:__dict__", "evil:",
        ":build", ":", "", "evil", "..:build", "../other/evil.py:build", "~/evil.py:build", "$HOME/evil.py:build", "a b.py:build", "http://x/evil.py:build",
        "file:///evil.py:build", "x" * 5000 + ".py:build", "evil.py:" + "b" * 3000, "évil:build", "evil。py:build", "%65vil:build",
    ]  # fmt: skip
    chance = Random(0)
    parts = [
        "evil",
        "builtin",
        "mlp",
        ":",
        "::",
        ".py",
        "/",
        "..",
        "\n",
        "package",
        ".nets",
        "build",
        " ",
        "toy",
        "test",
        "\t",
        "os",
        "system",
    ]
    return known + ["".join(chance.choices(parts, k=chance.randrange(2, 7))) for _ in range(count)]


def arguments(verb: str, files: Files) -> list[str]:
    return {
        "predict": [str(files.test)],
        "evaluate": ["--test", str(files.test), "--resamples", "0"],
        "report": ["--test", str(files.test), "--no-where"],
        "tune": ["--prior-precision", "3", "--force"],
        "where": ["--test", str(files.test)],
    }[verb]


@pytest.fixture
def posterior(files: Files, tmp_path: Path) -> Path:
    invoke(*files.fit(tmp_path / "posterior", "--structure", "diagonal", "--no-tune"))
    return tmp_path / "posterior"


def test_no_network_that_a_folder_names_runs_code(files: Files, posterior: Path, work: Path, tmp_path: Path) -> None:
    for number, spec in enumerate(specs(work, 10)):
        edit(posterior, lambda config, spec=spec: config["laplace"]["extras"]["model"].update(spec=spec))  # type: ignore[misc]
        verb = VERBS[number % len(VERBS)]
        found = invoke(verb, str(posterior), *arguments(verb, files), code=2)
        assert not (tmp_path / "marker").exists(), spec
        said = words(found.stderr)
        assert said.startswith("error:"), spec
        assert str(posterior) in said.replace(" ", "") or str(posterior) in said, spec
        assert found.stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_no_command_runs_code_under_any_name(
    verb: str, files: Files, posterior: Path, work: Path, tmp_path: Path
) -> None:
    for spec in specs(work, 60):
        edit(posterior, lambda config, spec=spec: config["laplace"]["extras"]["model"].update(spec=spec))  # type: ignore[misc]
        found = invoke(verb, str(posterior), *arguments(verb, files), code=2)
        assert not (tmp_path / "marker").exists(), spec
        assert words(found.stderr).startswith("error:"), spec
        assert "Traceback" not in found.stderr, spec


def test_no_data_that_a_folder_names_run_code(files: Files, posterior: Path, work: Path, tmp_path: Path) -> None:
    """`evaluate` and `report` look for the test part of the training data where no --test is given."""
    for number, spec in enumerate(specs(work, 10)):
        edit(posterior, lambda config, spec=spec: config["laplace"]["extras"]["data"].update(train=spec))  # type: ignore[misc]
        verb = ("evaluate", "report", "where")[number % 3]
        found = invoke(verb, str(posterior), "--model", files.model, code=2)
        assert not (tmp_path / "marker").exists(), spec
        assert words(found.stderr).startswith("error:"), spec


def test_the_marker_would_appear(files: Files, posterior: Path, work: Path, tmp_path: Path) -> None:
    edit(posterior, lambda config: config["laplace"]["extras"]["model"].update(spec="evil:build"))
    invoke("predict", str(posterior), str(files.test), "--trust-code", code=2)
    assert (tmp_path / "marker").exists()
