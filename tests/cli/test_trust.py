"""A posterior folder from somebody else runs none of its author's code, whatever is done with it."""

from __future__ import annotations

import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aftermap.cli import trust
from aftermap.cli.app import COMMANDS, load_command
from aftermap.cli.models import read_weights
from aftermap.cli.store import load_fitted
from aftermap.errors import DataError, InputError
from tests.cli.common import Files, invoke, words
from tests.faults.sealing import edit

HOSTILE = """
import pathlib
pathlib.Path({marker!r}).write_text("the author's code ran")
from torch import nn


def build():
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
"""


class Runs:
    """What a pickle may hold: a call that is made while it is read."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.write_text, (self.marker, "the pickle ran")


def arguments(files: Files) -> dict[str, list[str]]:
    """What each command that loads a folder needs beside it."""
    return {
        "predict": [str(files.test)],
        "evaluate": ["--test", str(files.test), "--resamples", "0"],
        "report": ["--test", str(files.test), "--no-where"],
        "tune": ["--prior-precision", "3", "--force"],
        "where": ["--test", str(files.test)],
    }


VERBS = ("predict", "evaluate", "report", "tune", "where")


def set_factory(folder: Path, spec: str) -> None:
    edit(folder, lambda config: config["laplace"]["extras"]["model"].update(spec=spec))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "the_code_ran"


@pytest.fixture(params=["in the folder", "a package in the working folder"])
def hostile(
    request: pytest.FixtureRequest, posterior: Path, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, str, Path]:
    """A folder whose network is built by its author's code: the folder, the name of the factory, and its file."""
    code = HOSTILE.format(marker=str(marker))
    if request.param == "in the folder":
        file = tmp_path / "author" / "evil_nets.py"
        file.parent.mkdir()
        spec = f"{file}:build"
    else:
        work = tmp_path / "work"
        (work / "evil_package").mkdir(parents=True)
        (work / "evil_package" / "__init__.py").write_text(code)
        file, spec = work / "evil_package" / "nets.py", "evil_package.nets:build"
        monkeypatch.chdir(work)
        monkeypatch.setattr(sys, "path", list(sys.path))
        for name in [n for n in sys.modules if n.startswith("evil_package")]:
            monkeypatch.delitem(sys.modules, name)
    file.write_text(code)
    set_factory(posterior, spec)
    return posterior, spec, file


def test_every_command_that_loads_a_folder_is_tested(files: Files) -> None:
    commands = {name: load_command(name) for name in COMMANDS}
    loading = {name for name, c in commands.items() if any(p.name == "posterior" for p in c.params)}
    assert loading == set(VERBS) == set(arguments(files))
    for name in loading:
        assert "--trust-code" in {flag for p in commands[name].params for flag in p.opts}


@pytest.mark.parametrize("verb", VERBS)
def test_no_code_of_a_foreign_folder_runs(
    verb: str, hostile: tuple[Path, str, Path], files: Files, marker: Path
) -> None:
    folder, spec, file = hostile
    found = invoke(verb, str(folder), *arguments(files)[verb], code=2)
    assert not marker.exists()
    said = words(found.stderr)
    assert found.stdout == ""
    assert said.startswith("error:")
    for part in (spec, str(file), "--trust-code", f"--model {spec}"):
        assert part in said
    invoke(verb, str(folder), *arguments(files)[verb], "--weights", str(files.weights), code=2)
    assert not marker.exists()
    invoke(verb, str(folder), *arguments(files)[verb], "--trust-code")
    assert marker.exists()


def test_a_factory_that_is_named_again_runs_and_no_other(
    hostile: tuple[Path, str, Path], files: Files, marker: Path, tmp_path: Path
) -> None:
    folder, spec, _ = hostile
    invoke("predict", str(folder), str(files.test), "--model", files.model)
    assert not marker.exists()
    # What tune saves names the factory that ran, not the one of the author.
    invoke("tune", str(folder), "--prior-precision", "3", "--model", files.model, "-o", str(tmp_path / "tuned"))
    invoke("predict", str(tmp_path / "tuned"), str(files.test))
    assert not marker.exists()
    invoke("predict", str(folder), str(files.test), code=2)
    invoke("predict", str(folder), str(files.test), "--model", spec)
    assert marker.exists()
    marker.unlink()
    sys.modules.pop("evil_package", None)
    invoke("predict", str(folder), str(files.test), code=2)  # the permission was for one command
    assert not marker.exists()


def test_own_folders_are_remembered(files: Files, posterior: Path, tmp_path: Path, marker: Path) -> None:
    nets = tmp_path / "nets.py"
    nets.write_text(HOSTILE.format(marker=str(marker)))
    place = tmp_path / "mine"
    own = Files(files.folder, f"{nets}:build", files.weights, files.train, files.val, files.test, files.ood)
    invoke(*own.fit(place, "--structure", "diagonal", "--no-tune"))
    run = ["predict", str(place), str(files.test)]
    invoke(*run)
    invoke("predict", str(shutil.copytree(place, tmp_path / "copy")), str(files.test))
    invoke(
        "tune", str(place), "--prior-precision", "3", "--force"
    )  # writes another config.json, which is the user's own as well
    invoke(*run)
    nets.write_text(nets.read_text() + "\n# changed\n")
    marker.unlink()
    assert "--trust-code" in words(invoke(*run, code=2).stderr)
    assert not marker.exists()
    invoke(*own.fit(place, "--structure", "diagonal", "--no-tune", "--force"))
    invoke(*run)
    config = place / "config.json"
    config.write_text(config.read_text() + "\n")
    marker.unlink()
    assert "--trust-code" in words(invoke(*run, code=2).stderr)
    assert not marker.exists()


def test_the_memory_is_private(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: Path, posterior: Path
) -> None:
    state = tmp_path / "state" / "aftermap"
    monkeypatch.setenv("AFTERMAP_STATE", str(state))
    with pytest.raises(InputError, match="--trust-code"):
        load_fitted(posterior)  # remembered elsewhere
    trust.remember(files.model, posterior)
    load_fitted(posterior)
    memory = trust.memory_file()
    assert memory.parent == state
    assert state.stat().st_mode & 0o777 == 0o700
    assert memory.stat().st_mode & 0o777 == 0o600
    assert not list(posterior.glob("*trust*"))
    trust.remember(files.model, posterior)
    assert len(memory.read_text().splitlines()) == 1
    memory.chmod(0o622)  # anybody could have added a line
    with pytest.raises(InputError, match="--trust-code"):
        load_fitted(posterior)
    memory.chmod(0o600)
    state.chmod(0o777)  # anybody could have put another file there
    with pytest.raises(InputError, match="--trust-code"):
        load_fitted(posterior)
    state.chmod(0o700)
    load_fitted(posterior)


def test_where_the_memory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AFTERMAP_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert trust.memory_file().parent == tmp_path / "aftermap"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # the specification says to ignore it
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert trust.memory_file().parent == tmp_path / "home" / ".local" / "state" / "aftermap"


@pytest.mark.filterwarnings("default:.*cannot be written:UserWarning")
def test_a_fit_ends_well_where_nothing_can_be_remembered(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AFTERMAP_STATE", str(tmp_path / "file" / "state"))
    place = tmp_path / "p"
    found = invoke(*files.fit(place, "--structure", "diagonal", "--no-tune"))
    assert "later commands will ask for --model or --trust-code" in words(found.stderr)
    invoke("predict", str(place), str(files.test), code=2)
    invoke("predict", str(place), str(files.test), "--model", files.model)


def test_a_factory_that_is_not_there(files: Files, posterior: Path) -> None:
    set_factory(posterior, "gone.nets:build")
    said = words(invoke("predict", str(posterior), str(files.test), code=2).stderr)
    assert "gone.nets:build, which is not found" in said
    set_factory(posterior, "no_colon")
    assert "no_colon, which is not found" in words(invoke("predict", str(posterior), str(files.test), code=2).stderr)
    edit(posterior, lambda config: config["laplace"]["extras"].update(model=["not", "a", "table"]))
    with pytest.raises(DataError, match="extras.model should be an object, got a list of 3"):
        load_fitted(posterior)


def test_files_are_found_without_running_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for place in ("bomb", "plain/deep"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "nets.py").write_text("raise RuntimeError('it ran')\n")
    (tmp_path / "bomb" / "__init__.py").write_text("raise RuntimeError('it ran')\n")
    assert trust.find_factory_file("bomb.nets:build") == tmp_path / "bomb" / "nets.py"
    assert trust.find_factory_file("bomb:build") == tmp_path / "bomb" / "__init__.py"
    assert trust.find_factory_file("plain.deep.nets:build") == tmp_path / "plain" / "deep" / "nets.py"
    assert trust.find_factory_file("bomb/nets.py:build") == tmp_path / "bomb" / "nets.py"
    for absent in (
        "bomb.nets.more:build",
        "plain.deep:build",
        "plain:build",
        "bomb.none:build",
        "..:build",
        "sys:exit",
    ):
        assert trust.find_factory_file(absent) is None, absent


def test_training_data_that_a_folder_names_are_no_code(
    hostile: tuple[Path, str, Path], files: Files, marker: Path
) -> None:
    folder, spec, _ = hostile
    for named in (spec, spec + ":train", f"builtin:{spec}", f"toy:{spec}:train"):
        edit(folder, lambda config, named=named: config["laplace"]["extras"]["data"].update(train=named))  # type: ignore[misc]
        invoke("evaluate", str(folder), "--model", files.model, code=2)
        assert not marker.exists()


def test_pickled_weights_run_nothing(files: Files, posterior: Path, marker: Path, tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.pt"
    torch.save({"state_dict": Runs(marker)}, bomb)
    plain = tmp_path / "bomb.npz"
    plain.write_bytes(pickle.dumps(Runs(marker)))
    for file in (bomb, plain):
        with pytest.raises(InputError, match="does not hold plain weights|is not a file of weights"):
            read_weights(file)
        invoke("predict", str(posterior), str(files.test), "--weights", str(file), code=2)
        for name in ("model.safetensors", "posterior.safetensors", "reference.safetensors"):
            folder = Path(shutil.copytree(posterior, tmp_path / f"{file.suffix}{name}"))
            shutil.copy(file, folder / name)
            invoke("predict", str(folder), str(files.test), "--model", files.model, code=2)
    assert not marker.exists()
    torch.load(bomb, weights_only=False)
    assert marker.exists()  # the bomb is one


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": "x"}, "extras.seed should be a whole number"),
        ({"thresholds": {"entropy": {"value": 1}}}, "extras.thresholds.entropy lacks score, false_alarm_rate"),
        ({"thresholds": [1]}, "extras.thresholds should be an object or null, got a list of 1"),
        ({"data": {"classes": "abc"}}, "extras.data.classes should be a list or null, got the text 'abc'"),
        ({"data": {"image_size": [28]}}, "extras.data.image_size should be a list of 2 or null"),
        ({"model": {"spec": "a\nb:c"}}, "extras.model.spec should be one line, such as builtin:cnn"),
        (
            {"model": {"spec": "builtin:mlp", "options": {"shape": [2**40], "outputs": 3}}},
            "the network of .* cannot be built",
        ),
        (
            {"model": {"spec": "builtin:mlp", "options": {"shape": [2]}}},
            "the network of .* cannot be built: outputs=None",
        ),
    ],
)
def test_extras_that_are_wrong(posterior: Path, change: dict[str, Any], message: str) -> None:
    edit(posterior, lambda config: config["laplace"]["extras"].update(change))
    with pytest.raises(InputError, match=message) as found:
        load_fitted(posterior)
    assert str(posterior) in str(found.value)
