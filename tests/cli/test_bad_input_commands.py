"""Mistakes at the terminal: each is found before the work, and named as the user typed it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from aftermap.cli import fit as fit_module
from tests.cli.common import Files, invoke, words


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that are read before a mistake is found make the test fail."""

    def opened(*arguments: object, **options: object) -> None:
        raise AssertionError("data were read before the mistake was found")

    monkeypatch.setattr(fit_module, "open_parts", opened)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--structure", "krn"], "--structure 'krn' is not known; allowed are auto, diagonal"),
        (["--structure", "matrix_free"], "--structure matrix_free has a posterior that cannot be written to a folder"),
        (["--device", "gpu"], "--device gpu"),
        (["--model", "somewhere.else:build"], "there is no module 'somewhere'"),
        (["--weights", "nowhere.pt"], "--weights: there is no file nowhere.pt"),
    ],
)
def test_fit_finds_mistakes_before_it_reads_data(files: Files, tmp_path: Path, more: list[str], message: str) -> None:
    found = invoke(*files.fit(tmp_path / "p", *more), code=2)
    assert message in words(found.stderr)
    assert found.stdout == ""


@pytest.mark.usefixtures("no_work")
def test_validation_data_that_are_needed(files: Files, tmp_path: Path) -> None:
    command = ["fit", "--model", files.model, "--train", str(files.train), "--method", "validation"]
    found = invoke(*command, "-o", str(tmp_path / "p"), code=2)
    assert "--method validation needs held-out data: add --val" in words(found.stderr)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("allowed", [True, False])
def test_an_output_that_cannot_be_written(
    files: Files, tmp_path: Path, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    if allowed:
        place, message = tmp_path / "notes.txt" / "p", "notes.txt is a file, not a folder"
    else:
        monkeypatch.setattr("aftermap.cli.console.os.access", lambda path, mode: mode == os.R_OK)
        place, message = tmp_path / "new" / "p", f"the folder {tmp_path} does not allow it"
    found = invoke(*files.fit(place), code=2)
    assert "cannot be written" in words(found.stderr)
    assert message in words(found.stderr)
    run = invoke("train", "--model", "builtin:mlp", "--data", "toy:moons", "-o", str(place), code=2)
    assert message in words(run.stderr)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["evaluate", "--baseline", "before.json"], "--baseline before.json: there is no such file"),
        (["evaluate", "-o", "notes.txt/r.json"], "notes.txt is a file, not a folder"),
        (["report", "-o", "notes.txt/r.html"], "notes.txt is a file, not a folder"),
        (["evaluate", "--score", "entropie"], "--score 'entropie' is not known; allowed are auto, either, entropy"),
        (["evaluate", "--kind", "exact"], "--kind 'exact' is not known"),
    ],
)
def test_using_a_posterior_finds_mistakes_before_it_predicts(
    files: Files, fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], message: str
) -> None:
    def worked(*arguments: object, **options: object) -> None:
        raise AssertionError("the work began before the mistake was found")

    monkeypatch.setattr("aftermap.cli.evaluate.evaluate_predictor", worked)
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    found = invoke(command[0], str(fitted), "--test", str(files.test), *command[1:], code=2)
    assert message in words(found.stderr)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("garbage", "is no file of weights: neither torch.save nor numpy.savez wrote it, or it is damaged"),
        ("empty", "is empty"),
        ("model", "holds plain weights, but a pickled Python object"),
    ],
)
def test_files_that_hold_no_weights(files: Files, tmp_path: Path, weights: str, message: str) -> None:
    place = tmp_path / "weights.pt"
    if weights == "model":
        torch.save(nn.Linear(2, 3), place)
        message = message.replace("holds", "does not hold")
    else:
        place.write_bytes(b"" if weights == "empty" else b"no weights at all")
    command = ["fit", "--model", files.model, "--weights", str(place), "--train", str(files.train)]
    found = invoke(*command, "-o", str(tmp_path / "p"), code=2)
    assert message in words(found.stderr)
    assert "weights_only" not in found.stderr
    assert "\x1b" not in found.stderr


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.arange(40) % 3 + 1, "labels that count from 1 are given as targets - 1"),
        (np.arange(40) % 3 - 1, "for examples without a label"),
        (np.eye(3)[np.arange(40) % 3], "--task binary"),
        ((np.arange(40) % 3).astype(np.float32), "class labels are integers"),
    ],
)
def test_labels_of_another_form(files: Files, tmp_path: Path, targets: np.ndarray, message: str) -> None:
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(40, 2)), y=targets)
    command = ["fit", "--model", files.model, "--weights", str(files.weights), "--train", str(tmp_path / "data.npz")]
    assert message in words(invoke(*command, "-o", str(tmp_path / "p"), code=2).stderr)
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[fti]\nstructure = 'kron'\n", "fti"),
        ("structure = 'kron\n", "cannot be read"),
        ("batch-size = 'many'\n", "batch-size"),
        ("structure = 'krn'\n", "'krn' is not known"),
        ("batch_sise = 3\n", "Did you mean 'batch-size'?"),
    ],
)
def test_a_wrong_section_or_value_in_toml(files: Files, tmp_path: Path, toml: str, message: str) -> None:
    place = tmp_path / "settings.toml"
    place.write_text(toml)
    said = words(invoke(*files.fit(tmp_path / "p", "--config", str(place)), code=2).stderr)
    assert message in said
    assert "settings.toml" in said.replace(" ", "")


def test_pixels_that_are_rescaled_are_told_of(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, size=(60, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", x=pixels, y=np.arange(60) % 2)
    command = ["train", "--model", "builtin:mlp", "--train", str(tmp_path / "images.npz"), "--epochs", "1"]
    said = words(invoke(*command, "--optimizer", "adam", "-o", str(tmp_path / "run")).stderr)
    assert "images.npz holds bytes, which are taken as pixels and divided by 255" in said
