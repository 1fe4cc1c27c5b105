"""Mistakes at the terminal: each is found before the work, and named as the user typed it."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from aftermap.cli import demo as demo_module
from aftermap.cli import evaluate as evaluate_module
from aftermap.cli import fit as fit_module
from aftermap.cli import report as report_module
from tests.cli.common import Files, answer, invoke, words


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
        (["--memory", "-1"], "--memory -1 must be a number above 0"),
        (["--seconds", "0"], "--seconds 0 must be a number above 0"),
        (["--prior-precision", "nan"], "--prior-precision nan must be a number above 0"),
        (["--noise", "inf"], "--noise inf must be a number above 0"),
        (["--checkpoint", "sums", "--every", "0"], "Invalid value for '--every'"),  # what follows are typer's words
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

    def refuses(dir: Path) -> None:
        raise OSError(30, "Read-only file system", str(dir))

    if allowed:
        place, message = tmp_path / "notes.txt" / "p", "notes.txt is a file, not a folder"
    else:
        monkeypatch.setattr("aftermap.cli.console.tempfile.TemporaryFile", refuses)
        place, message = tmp_path / "new" / "p", f"the folder {tmp_path} does not allow it (Read-only file system)"
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
        ("garbage", "is not a file of weights: neither torch.save nor numpy.savez wrote it, or it is damaged"),
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
        (
            np.arange(40) % 3 + 1,
            "holds the label 3, but the network has 3 outputs, for the classes 0 to 2: the labels count from 1",
        ),
        (
            np.arange(40) % 4,
            "the label 3, but the network has 3 outputs, for the classes 0 to 2: give the network more outputs",
        ),
        (np.arange(40) % 3 - 1, "holds the label -1; classes count from 0. Leave examples without a label out"),
        (np.eye(3)[np.arange(40) % 3], "--task binary"),
        ((np.arange(40) % 3).astype(np.float32), "class labels are integers"),
    ],
)
def test_labels_of_another_form(files: Files, tmp_path: Path, targets: np.ndarray, message: str) -> None:
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(40, 2)), y=targets)
    command = ["fit", "--model", files.model, "--weights", str(files.weights), "--train", str(tmp_path / "data.npz")]
    said = words(invoke(*command, "-o", str(tmp_path / "p"), code=2).stderr)
    assert message in said
    assert "Categorical" not in said
    assert "alternatives" not in said  # before the cost is estimated
    assert not (tmp_path / "p").exists()


def test_numbers_that_are_not_finite_are_named_by_file_and_place(files: Files, tmp_path: Path) -> None:
    with np.load(files.train) as data:
        x, y = data["x"].copy(), data["y"]
    x[3, 1] = x[5, 0] = np.nan
    np.savez(tmp_path / "data.npz", x=x, y=y)
    command = ["fit", "--model", files.model, "--weights", str(files.weights), "--train", str(tmp_path / "data.npz")]
    said = words(invoke(*command, "-o", str(tmp_path / "p"), code=2).stderr)
    assert f"data.npz: x holds nan at index [3, 1]; 2 of {len(x):,} examples are not finite" in said


def test_tuning_on_held_out_data_that_are_missing(fitted: Path, tmp_path: Path) -> None:
    said = words(invoke("tune", str(fitted), "--method", "validation", "-o", str(tmp_path / "p"), code=2).stderr)
    assert said == "error: --method validation needs held-out data: add --val"


def test_the_result_of_a_grid_is_a_sentence(files: Files, fitted: Path, tmp_path: Path) -> None:
    found = invoke("tune", str(fitted), "--val", str(files.val), "--method", "grid", "-o", str(tmp_path / "p"))
    line = next(line for line in found.stdout.splitlines() if "grid" in line)
    assert line.startswith("negative log-likelihood of ")
    assert len(line) < 200
    assert "[(" not in found.stdout


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


def test_negative_labels_are_refused_before_a_training(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(40, 2)), y=np.arange(40) % 3 - 1)
    command = ["train", "--model", "builtin:mlp", "--train", str(tmp_path / "data.npz"), "-o", str(tmp_path / "run")]
    assert "holds the label -1; classes count from 0" in words(invoke(*command, code=2).stderr)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            np.arange(40) % 3 + 1,
            "holds no example of class 0: are these labels that count from 1? Classes count from 0",
        ),
        (np.where(np.arange(40) % 3 == 2, 5, 0), "holds no example of the classes 1, 2, 3, 4, although there are"),
        ((np.arange(40) % 3).astype(np.float32), "are whole numbers in floating point and are taken as numbers"),
    ],
)
def test_labels_of_another_form_are_told_of_by_a_builtin_network(
    tmp_path: Path, targets: np.ndarray, message: str
) -> None:
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(40, 2)), y=targets)
    command = ["train", "--model", "builtin:mlp", "--train", str(tmp_path / "data.npz"), "--epochs", "1"]
    assert message in words(invoke(*command, "--optimizer", "adam", "-o", str(tmp_path / "run")).stderr)


@pytest.mark.parametrize("command", ["train", "select"])
def test_whole_numbers_with_gaps_are_not_taken_as_classes(tmp_path: Path, command: str) -> None:
    """Prices in a table: a network with an output for each of 400,000 dollars would be trained."""
    rows = "".join(f"{i},{i % 7},{9000 * i + 101}\n" for i in range(45))
    (tmp_path / "houses.csv").write_text("area,rooms,price\n" + rows)
    data = [str(tmp_path / "houses.csv"), "--target", "price"]
    which = ["a=builtin:mlp", "b=builtin:mlp"] if command == "select" else ["--model", "builtin:mlp"]
    common = [command, *which, "--epochs", "1", "-o", str(tmp_path / "out")]
    said = words(invoke(*common, "--train", *data, code=2).stderr)
    assert "are 45 different whole numbers from 101 to 396,101, with gaps. If they are numbers to predict, add" in said
    assert "--task regression" in said
    assert not (tmp_path / "out").exists()
    if command == "train":
        found = invoke(*common, "--train", *data, "--task", "regression", "--optimizer", "adam")
        assert "classes" not in words(found.stderr)


def test_a_class_without_an_example_is_told_of(files: Files, tmp_path: Path) -> None:
    with np.load(files.train) as data:
        x, y = data["x"], data["y"]
    np.savez(tmp_path / "two.npz", x=x[y < 2], y=y[y < 2])
    command = ["fit", "--model", files.model, "--weights", str(files.weights), "--train", str(tmp_path / "two.npz")]
    found = invoke(*command, "--no-tune", "-o", str(tmp_path / "p"))
    assert "two.npz holds no example of class 2, of which the network has an output" in words(found.stderr)


def test_validation_data_that_the_network_does_not_take(files: Files, tmp_path: Path) -> None:
    """Found before the fit, which may take hours."""
    np.savez(tmp_path / "wide.npz", x=np.zeros((9, 5), np.float32), y=np.arange(9) % 3)
    command = ["fit", "--model", files.model, "--weights", str(files.weights), "--train", str(files.train)]
    found = invoke(*command, "--val", str(tmp_path / "wide.npz"), "-o", str(tmp_path / "p"), code=2)
    assert "the model does not take the data" in words(found.stderr)
    assert "wide.npz: a batch of shape [9, 5] made it fail" in words(found.stderr)
    assert "fitted" not in found.stdout


@pytest.fixture
def no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation before a mistake is found makes the test fail."""

    def evaluated(*arguments: object, **options: object) -> None:
        raise AssertionError("the evaluation began before the mistake was found")

    for module in (evaluate_module, report_module, demo_module):
        monkeypatch.setattr(module, "compare_with_map", evaluated)
    monkeypatch.setattr(demo_module, "_network", evaluated)


@pytest.mark.usefixtures("no_evaluation")
@pytest.mark.parametrize(
    ("command", "more", "message"),
    [
        ("report", ["--train", "{wide}"], "wide.npz: a batch of shape [9, 5] made it fail"),
        ("report", ["-o", "{folder}"], "is a folder; give the name of a file, such as {folder}/report.html"),
        ("evaluate", ["--ood", "far={wide}"], "wide.npz: a batch of shape [9, 5] made it fail"),
        ("evaluate", ["--baseline", "{text}"], "--baseline {text}: these results are not JSON"),
        ("evaluate", ["--test", "{from1}"], "holds the label 3, but the network has 3 outputs"),
        ("demo", ["-o", "{text}"], "is a file; a posterior is saved as a folder"),
        ("demo", ["-o", "{folder}"], "holds files that do not belong to a saved posterior"),
    ],
)
def test_mistakes_that_are_found_before_an_evaluation(
    files: Files, fitted: Path, tmp_path: Path, command: str, more: list[str], message: str
) -> None:
    with np.load(files.test) as data:
        np.savez(tmp_path / "from1.npz", x=data["x"], y=data["y"] + 1)
    np.savez(tmp_path / "wide.npz", x=np.zeros((9, 5), np.float32), y=np.arange(9) % 3)
    (tmp_path / "text").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    places = {"wide": tmp_path / "wide.npz", "from1": tmp_path / "from1.npz"}
    places |= {name: tmp_path / name for name in ("text", "folder")}
    arguments = [] if command == "demo" else [str(fitted), *([] if "--test" in more else ["--test", str(files.test)])]
    found = invoke(command, *arguments, *(word.format(**places) for word in more), code=2)
    assert message.format(**places) in words(found.stderr)


@pytest.mark.usefixtures("no_work")
def test_a_folder_with_other_files_is_not_replaced_even_by_force(files: Files, tmp_path: Path) -> None:
    """This is found before the fit, which may take hours."""
    (tmp_path / "mine.txt").write_text("mine")
    found = invoke(*files.fit(tmp_path, "--force"), code=2)
    assert "holds files that do not belong to a saved posterior (mine.txt)" in words(found.stderr)


def test_validation_labels_of_another_type(files: Files, tmp_path: Path) -> None:
    with np.load(files.val) as data:
        np.savez(tmp_path / "floats.npz", x=data["x"], y=data["y"].astype(np.float32))
    command = ["fit", "--model", files.model, "--weights", str(files.weights), "--train", str(files.train)]
    found = invoke(*command, "--val", str(tmp_path / "floats.npz"), "-o", str(tmp_path / "p"), code=2)
    said = words(found.stderr)
    assert "floats.npz are float32, but classes are needed: whole numbers from 0, saved as integers" in said
    assert "fitted" not in found.stdout


def test_a_file_of_networks_that_is_not_there(files: Files, tmp_path: Path) -> None:
    command = ["fit", "--model", "nowhere.py:build", "--train", str(files.train), "-o", str(tmp_path / "p")]
    assert words(invoke(*command, code=2).stderr) == "error: --model 'nowhere.py:build': there is no file nowhere.py"


def test_training_says_which_noise_it_assumes(tmp_path: Path) -> None:
    command = ["train", "--model", "builtin:mlp", "--train", "toy:cubic", "--epochs", "1", "--optimizer", "adam"]
    said = words(invoke(*command, "-o", str(tmp_path / "a")).stderr)
    assert "half the standard deviation of the targets, since there is no --noise" in said
    given = words(invoke(*command, "--noise", "3", "-o", str(tmp_path / "b")).stderr)
    assert "half the standard deviation" not in given


def test_a_network_of_double_precision(files: Files, tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(2, 3).double()\n")
    command = ["fit", "--model", f"{tmp_path / 'double.py'}:build", "--train", str(files.train)]
    said = words(invoke(*command, "-o", str(tmp_path / "p"), code=2).stderr)
    assert "the network's weights are torch.float64, but data are read as torch.float32" in said
    assert "mat1" not in said


def test_an_unknown_device_is_answered_in_one_sentence(files: Files, tmp_path: Path) -> None:
    said = words(invoke(*files.fit(tmp_path / "p", "--device", "gpu"), code=2).stderr)
    assert said == "error: --device gpu is not known; use cpu, cuda, cuda:1, mps or auto"


def test_candidates_are_arguments_or_options(files: Files, tmp_path: Path) -> None:
    options = ["--train", str(files.train), "--epochs", "2"]
    nets = files.model.rpartition(":")[0]
    specs = [f"small={nets}:ready", f"large={nets}:build"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ways = (specs, ["--model", specs[0], "--model", specs[1]], [specs[0], "--model", specs[1]])
        found = [answer("select", *way, *options)["probabilities"] for way in ways]
    assert found[0] == found[1] == found[2]
    assert set(found[0]) == {"small", "large"}
    said = words(invoke("select", "--train", str(files.train), code=2).stderr)
    assert "which networks are to be compared?" in said


def test_an_identifier_in_new_data_where_the_training_data_had_no_columns(
    files: Files, fitted: Path, tmp_path: Path
) -> None:
    (tmp_path / "new.csv").write_text("customer,a,b\nc0,0.5,1.0\nc1,2.0,-1.0\n")
    command = ["predict", str(fitted), str(tmp_path / "new.csv"), "-o", str(tmp_path / "scored.csv")]
    said = words(invoke(*command, code=2).stderr)
    assert said.endswith("leave the column out with --drop")
    invoke(*command, "--drop", "customer")
    lines = (tmp_path / "scored.csv").read_text().splitlines()
    assert lines[0].startswith("customer,prediction")
    assert [line.partition(",")[0] for line in lines[1:]] == ["c0", "c1"]


def test_test_data_with_an_identifier_where_the_training_data_had_no_columns(fitted: Path, tmp_path: Path) -> None:
    rows = [f"c{i},{i % 5 - 2},{i % 7 - 3},{i % 3}" for i in range(30)]
    (tmp_path / "test.csv").write_text("\n".join(["customer,a,b,label", *rows]) + "\n")
    options = ["--test", str(tmp_path / "test.csv"), "--target", "label", "--drop", "customer"]
    assert answer("where", str(fitted), *options)["layer"] == ["0", "2"]


def test_new_inputs_in_bytes_are_told_of(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 1, 4, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(60) % 2)
    run = ["train", "--model", "builtin:mlp", "--train", str(tmp_path / "data.npz"), "--epochs", "1"]
    invoke(*run, "-o", str(tmp_path / "run"))
    np.savez(tmp_path / "new.npz", x=np.zeros((3, 4, 4), dtype=np.uint8))
    found = invoke("predict", str(tmp_path / "run" / "posterior"), str(tmp_path / "new.npz"))
    assert "new.npz holds bytes, which are taken as pixels and divided by 255" in words(found.stderr)


def test_random_inputs_of_a_shape_that_was_said(files: Files) -> None:
    said = words(invoke("doctor", "--model", files.model, "--input-shape", "2").stderr)
    assert "no data: random inputs of shape 2" in said
    assert "--input-shape" not in said
