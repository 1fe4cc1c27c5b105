"""Files of users: the umask is respected whatever program writes, strangers never write, and what was private stays so."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import aftermap as am
from aftermap import writing
from aftermap.posteriors.io import replaced_folder
from aftermap.writing import replaced_file
from tests.cli.common import invoke, make_files

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask, expected", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o664), (0, 0o664)])
def test_a_new_file_has_the_permissions_of_the_umask(tmp_path: Path, mask: int, expected: int) -> None:
    with umask(mask):
        with replaced_file(tmp_path / "a.safetensors") as part:
            assert mode(part) == 0o600
            save_file({"a": torch.zeros(2)}, part)  # It writes a file that only its owner may read.
        with replaced_file(tmp_path / "a.txt") as part:
            part.write_text("done")
    assert [mode(tmp_path / name) for name in ("a.safetensors", "a.txt")] == [expected, expected]
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "a.txt"]


@pytest.mark.parametrize("mask, folder, file", [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600), (0, 0o775, 0o664)])
def test_a_new_folder_has_the_permissions_of_the_umask(tmp_path: Path, mask: int, folder: int, file: int) -> None:
    with umask(mask), replaced_folder(tmp_path / "new", overwrite=False, known=["a.safetensors"]) as place:
        assert mode(place) == 0o700
        save_file({"a": torch.zeros(2)}, place / "a.safetensors")
    assert (mode(tmp_path / "new"), mode(tmp_path / "new" / "a.safetensors")) == (folder, file)


def test_what_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.txt", tmp_path / "old"
    for wanted, expected in ((0o600, 0o600), (0o640, 0o640), (0o666, 0o664)):
        file.write_text("old")
        file.chmod(wanted)
        with umask(0o022), replaced_file(file) as part:
            part.write_text("new")
        assert (file.read_text(), mode(file)) == ("new", expected)
    for wanted in (0o700, 0o750):
        folder.mkdir(exist_ok=True)
        folder.chmod(wanted)
        with umask(0o022), replaced_folder(folder, overwrite=True, known=["a.txt"]) as place:
            (place / "a.txt").write_text("new")
        assert (mode(folder), mode(folder / "a.txt")) == (wanted, wanted & 0o664)


def test_a_body_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("old")
    with pytest.raises(UnicodeEncodeError), replaced_file(file) as part:
        part.write_text("half é", encoding="ascii")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "old")]


def test_a_link_under_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    """Who may write to the folder could lay one there to have another file of the user overwritten."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".a.txt.part").symlink_to(tmp_path / "precious")
    with replaced_file(tmp_path / "a.txt") as part:
        part.write_text("new")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "a.txt").read_text() == "new"
    assert not (tmp_path / "a.txt").is_symlink()


def test_whatever_the_library_and_the_commands_write_can_be_read_as_the_umask_says(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    out = tmp_path / "out"
    with umask(0o027):
        torch.manual_seed(0)
        data = [(torch.randn(12, 2), torch.arange(12) % 3)]
        am.Laplace(nn.Linear(2, 3), "classification").fit(data, checkpoint=out / "kept", every=1).save(out / "saved")
        posterior = str(out / "posterior")
        invoke(*files.fit(out / "posterior", "--structure", "diagonal", "--prior-precision", "3"))
        invoke("predict", posterior, str(files.test), "-o", str(out / "scored.csv"))
        invoke("evaluate", posterior, "--test", str(files.test), "--resamples", "0", "-o", str(out / "results.json"))
    written = sorted(out.rglob("*"))
    names = {p.name for p in written}
    assert {"config.json", "posterior.safetensors", "scored.csv", "results.json"} <= names
    wrong = {str(p.relative_to(out)): oct(mode(p)) for p in written if mode(p) != (0o750 if p.is_dir() else 0o640)}
    assert wrong == {}


# What a kill leaves.


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path: Path) -> None:
    target = tmp_path / "posterior"
    child = os.fork()
    if child == 0:
        with replaced_folder(target, overwrite=True, known=["a.txt"]) as place:
            (place / "a.txt").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [name.endswith(".tmp") for name in os.listdir(tmp_path)] == [True]
    with replaced_folder(target, overwrite=True, known=["a.txt"]) as place:
        (place / "a.txt").write_text("done")
    assert os.listdir(tmp_path) == ["posterior"]


@pytest.mark.parametrize("before", [True, False])
def test_what_a_library_laid_beside_a_file_goes_with_the_next_write(tmp_path: Path, before: bool) -> None:
    """safetensors 0.8 writes to a neighbour with a random name, which stays where the process is killed before it is moved."""
    target = tmp_path / "weights.safetensors"
    if before:
        target.write_text("old")
    child = os.fork()
    if child == 0:
        with replaced_file(target) as part:
            part.with_name(".tmpA1b2C3").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert {p.name for p in tmp_path.iterdir()} == {".weights.safetensors.part"} | ({target.name} if before else set())
    with replaced_file(target) as part:
        part.write_text("new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(target.name, "new")]


def test_what_an_earlier_version_left_goes_too(tmp_path: Path) -> None:
    (tmp_path / ".a.txt.part").write_text("half")
    with replaced_file(tmp_path / "a.txt") as part:
        part.write_text("new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "new")]


def test_what_somebody_is_writing_stays(tmp_path: Path) -> None:
    target = tmp_path / "posterior"
    with replaced_folder(target, overwrite=True, known=["a.txt"]) as first:
        (first / "a.txt").write_text("first")
        with replaced_folder(target, overwrite=True, known=["a.txt"]) as second:
            (second / "a.txt").write_text("second")
        assert (target / "a.txt").read_text() == "second"
    assert (target / "a.txt").read_text() == "first"
    assert os.listdir(tmp_path) == ["posterior"]


def test_only_abandoned_folders_of_the_same_target_are_deleted(tmp_path: Path) -> None:
    number = "0123456789abcdef" * 2
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    names = [f".other.{number}.tmp", f".posterior.{number}.old", f"posterior.{number}.tmp", ".posterior.1.tmp"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / f".posterior.{number}.tmp").symlink_to(elsewhere)
    (tmp_path / f".posterior.{number[::-1]}.tmp").write_text("a file")
    before = sorted(os.listdir(tmp_path))
    with replaced_folder(tmp_path / "posterior", overwrite=True, known=["a.txt"]) as place:
        (place / "a.txt").write_text("done")
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "posterior"])


def test_without_locks_nothing_of_others_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / f".posterior.{'0' * 32}.tmp"
    left.mkdir()
    for locks in (None, SimpleNamespace(flock=_no_locks, LOCK_EX=1, LOCK_NB=2)):
        monkeypatch.setattr(writing, "fcntl", locks)
        with replaced_folder(tmp_path / "posterior", overwrite=True, known=["a.txt"]) as place:
            (place / "a.txt").write_text("done")
        assert sorted(os.listdir(tmp_path)) == [left.name, "posterior"]


def _no_locks(*_: int) -> None:
    raise OSError(95, "Operation not supported")


def test_a_folder_that_was_taken_for_an_abandoned_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process comes between the folder and its lock."""
    real, calls = writing.fcntl.flock, list[int]()

    def meanwhile(handle: int, how: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            for folder in tmp_path.iterdir():
                folder.rmdir()
        real(handle, how)

    monkeypatch.setattr(writing, "fcntl", SimpleNamespace(flock=meanwhile, LOCK_EX=2, LOCK_NB=4))
    with replaced_folder(tmp_path / "posterior", overwrite=True, known=["a.txt"]) as place:
        (place / "a.txt").write_text("done")
    assert os.listdir(tmp_path) == ["posterior"]
    assert len(calls) == 2
