"""The way of a data scientist, first half: doctor and fit, and everything that goes wrong there."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

import aftermap.posteriors.io as posterior_io
from aftermap.cli import console
from aftermap.cli.store import load_fitted
from aftermap.curvature.structures.base import STRUCTURES
from aftermap.evaluation import Threshold
from docs import run_pages
from tests.cli.common import Files, answer, invoke, words


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def left_behind(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


# Doctor


def test_doctor_looks_at_a_network(files: Files) -> None:
    found = invoke("doctor", "--model", files.model, "--weights", str(files.weights), "--train", str(files.train))
    said = words(found.stdout)
    assert "Sequential, classification: 51 parameters in 2 blocks" in said
    for word in ("kron, last layer", "ekfac", "diagonal", "full", "Linear", "200 examples"):
        assert word in said
    content = answer("doctor", "--model", files.model)
    assert content["treatment"]["0.weight"] == {"block": "kron", "rule": "LinearRule", "note": ""}
    assert {c["structure"] for c in content["costs"]} == {"kron", "ekfac", "diagonal", "full", "subset"}


def test_doctor_names_numerical_risks(files: Files, tmp_path: Path) -> None:
    risks = {r["risk"]: r for r in answer("doctor", "--model", files.model, "--train", str(files.train))["risks"]}
    assert set(risks) == {"weak priors"}  # 200 examples with 3 outputs and 51 weights in single precision
    # Kronecker factors lose a prior sooner than the full matrix, whose sums are in double precision.
    assert 1e-12 < risks["weak priors"]["full"] < risks["weak priors"]["kron"] < 1e-2
    said = words(invoke("doctor", "--model", files.model, "--train", str(files.train)).stdout)
    assert "weak priors: in float32 a prior precision below" in said
    lenet = {r["risk"]: r for r in answer("doctor", "--model", "builtin:lenet", "--n-data", "100")["risks"]}
    assert lenet["fewer data than weights"]["parameters"] == 61_706
    (tmp_path / "half.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(3, 2).bfloat16()\n")
    half = {r["risk"]: r for r in answer("doctor", "--model", f"{tmp_path / 'half.py'}:build")["risks"]}
    assert half["half precision"]["dtype"] == "bfloat16"


def test_doctor_guesses_shapes() -> None:
    assert "random inputs of shape 1×28×28" in words(invoke("doctor", "--model", "builtin:lenet").stderr)
    assert "61,706" in words(invoke("doctor", "--model", "builtin:lenet", "--input-shape", "1x28x28").stdout)
    assert "aftermap" in invoke("doctor").stdout
    found = invoke("doctor", "--model", "builtin:lenet", "--input-shape", "1x30x28", code=2)
    assert "takes square images" in words(found.stderr)


# Fit


def test_fit_says_cost_first_and_saves_everything(files: Files, fitted: Path, tmp_path: Path) -> None:
    found = invoke(*files.fit(tmp_path / "p"))
    assert words(found.stderr).startswith("full, 51 parameters: about 1 s and 1 MB (alternatives: kron")
    said = words(found.stdout)
    assert "self-check on validation data passed: accuracy" in said
    assert "an input is flagged if its entropy or its mutual information is larger than on 9" in said
    assert "% of the validation inputs: 5 % false alarms on data like the 80 of val" in said
    assert sorted(contents(fitted)) == [
        "config.json",
        "model.safetensors",
        "posterior.safetensors",
        "reference.safetensors",
    ]
    extras = json.loads((fitted / "config.json").read_text())["laplace"]["extras"]
    assert extras["model"]["spec"] == files.model
    assert extras["task"] == "classification"
    assert Threshold.from_dict(extras["thresholds"]["entropy"]).n_data == 80
    loaded = load_fitted(fitted)
    quantiles = loaded.reference["entropy"]
    assert quantiles.shape == (80,)  # so few are kept as they are
    assert bool((quantiles.diff() >= 0).all())
    threshold = loaded.threshold("entropy")
    assert threshold is not None
    assert threshold.value == float(quantiles[76])  # the 77th of 80: (80 + 1) · 95 % = 76.95
    assert loaded.threshold("nothing") is None


def test_fit_answers_machines(files: Files, tmp_path: Path) -> None:
    content = answer(
        *files.fit(tmp_path / "p", "--structure", "kron", "--params", "last_layer", "--method", "evidence")
    )
    assert (content["structure"], content["n_params"], content["n_data"]) == ("kron", 27, 200)
    assert content["self_check"]["passed"] is True
    assert set(content["thresholds"]) == {"entropy", "mutual_information", "variance", "max_probability", "either"}


def test_fit_without_validation_has_no_threshold(files: Files, tmp_path: Path) -> None:
    place = tmp_path / "p"
    found = invoke(
        "fit", "--model", files.model, "--weights", str(files.weights), "--train", str(files.train), "-o", str(place)
    )
    assert "no threshold for flagging: add --val" in words(found.stdout)
    said = invoke("predict", str(place), str(files.test))
    assert "no threshold is known" in words(said.stderr)
    assert said.stdout.splitlines()[1].endswith(",")  # no flag


def test_a_posterior_that_is_useless_fails_its_check(files: Files, tmp_path: Path) -> None:
    found = invoke(*files.fit(tmp_path / "p", "--structure", "kron", "--prior-precision", "1e-5", "--no-tune"), code=3)
    assert "self-check on validation data FAILED" in words(found.stdout)
    judged = invoke("evaluate", str(tmp_path / "p"), "--test", str(files.test), code=3)
    assert "Worse than the network alone" in words(judged.stdout)


def test_under_torchrun_a_failed_check_ends_with_a_line(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher prints a traceback of its own for every other exit code than 0."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    found = invoke(*files.fit(tmp_path / "p", "--structure", "kron", "--prior-precision", "1e-5", "--no-tune"))
    assert "self-check on validation data FAILED" in words(found.stdout)
    assert "torchrun would bury exit code 3 under a traceback" in words(found.stderr)
    assert (tmp_path / "p" / "config.json").is_file()


@pytest.mark.parametrize(
    "more, message",
    [
        (["--structure", "krn"], "--structure 'krn' is not known; allowed are auto, diagonal, full, kron"),
        (["--task", "sorting"], "--task 'sorting' is not known"),
        (["--device", "toaster"], "--device toaster"),
        (["--false-alarms", "5"], "write 5 % as 0.05"),
        (["--noise", "0.1"], "--noise belongs to a regression"),
        (["--params", "nothing.*", "--structure", "kron"], "selects no parameter"),
        (["--structure", "full", "--memory", "0.000001"], "more than --memory"),
        (["--data", "builtin:iris"], "say which data: --train"),
        (["--target", "y", "--task", "regression"], "targets"),
    ],
)
def test_fit_names_mistakes(files: Files, tmp_path: Path, more: list[str], message: str) -> None:
    found = invoke(*files.fit(tmp_path / "p", *more), code=2)
    assert message in words(found.stderr)
    assert "error:" in found.stderr
    assert not (tmp_path / "p").exists()


def test_fit_needs_data(files: Files, tmp_path: Path) -> None:
    base = ["fit", "--model", files.model, "-o", str(tmp_path / "p")]
    for more, message in (
        ([], "say which data"),
        (
            ["--data", f"{files.train}:train"],
            "is one part of a set, and --data is cut into parts: use --train and --val",
        ),
        (["--data", f"{files.model.rpartition(':')[0]}:batches"], "gives batches, which are not cut into parts"),
        (["--train", str(files.train), "--method", "validation"], "needs held-out data: add --val"),
        (["--data", "builtin:iris", "--val", str(files.val)], "--val goes with --train"),
    ):
        assert message in words(invoke(*base, *more, code=2).stderr)


def test_an_output_that_exists(files: Files, posterior: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(posterior)
    assert "exists; fit does not replace it. Choose another name with -o, or add --force" in words(
        invoke(*files.fit(posterior), code=2).stderr
    )
    assert contents(posterior) == before
    monkeypatch.setattr("aftermap.cli.console._stdin_is_terminal", lambda: True)
    monkeypatch.setattr(type(console._err), "is_terminal", True)
    invoke(*files.fit(posterior), code=2, stdin="n\n")
    assert contents(posterior) == before
    invoke(*files.fit(posterior, "--structure", "diagonal", "--no-tune"), stdin="y\n")
    monkeypatch.undo()
    assert json.loads((posterior / "config.json").read_text())["laplace"]["structure"] == "diagonal"
    invoke(*files.fit(posterior, "--structure", "kron", "--no-tune", "--force"))
    assert json.loads((posterior / "config.json").read_text())["laplace"]["structure"] == "kron"
    (posterior / "mine.txt").write_text("keep me")
    assert "holds files that do not belong" in words(invoke(*files.fit(posterior, "--force"), code=2).stderr)
    assert (posterior / "mine.txt").read_text() == "keep me"


@pytest.mark.parametrize(
    "error, code, message",
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "The disk is full"),
        (KeyboardInterrupt(), 130, "interrupted; nothing half-written"),
        (PermissionError(errno.EACCES, "Permission denied", "config.json"), 2, "config.json: Permission denied"),
    ],
)
def test_nothing_is_lost_when_saving_fails(
    files: Files,
    posterior: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    message: str,
) -> None:
    before = contents(posterior)

    def fails(*args: Any, **kwargs: Any) -> None:
        Path(args[1]).write_bytes(b"half")
        raise error

    monkeypatch.setattr(posterior_io, "save_file", fails)
    for place in (posterior, tmp_path / "new"):
        found = invoke(*files.fit(place, "--force", "--structure", "diagonal", "--no-tune"), code=code)
        assert message in words(found.stderr)
    assert contents(posterior) == before
    assert not (tmp_path / "new").exists()
    assert left_behind(tmp_path) == []


def test_a_toml_file_equals_the_flags(files: Files, tmp_path: Path) -> None:
    flags = answer(
        *files.fit(tmp_path / "a", "--structure", "kron", "--no-tune", "--prior-precision", "2.5", "--batch-size", "33")
    )
    toml = tmp_path / "run.toml"
    toml.write_text(
        f"""
        model = "{files.model}"
        weights = "{files.weights}"
        batch-size = 33
        [fit]
        train = "{files.train}"
        val = "{files.val}"
        structure = "kron"
        tune = false
        prior_precision = 7.0
        [evaluate]
        test = "{files.test}"
        [evaluate.ood]
        far = "{files.ood}"
        """
    )
    found = answer("fit", "--config", str(toml), "-o", str(tmp_path / "b"), "--prior-precision", "2.5")
    assert {k: v for k, v in found.items() if k != "posterior"} == {k: v for k, v in flags.items() if k != "posterior"}
    judged = answer("evaluate", str(tmp_path / "b"), "--config", str(toml), "--resamples", "0")
    assert set(judged["bayesian"]["ood"]) == {"far"}


@pytest.mark.parametrize(
    "text, message",
    [
        ("batch-sise = 3", "fit has no option 'batch-sise'. Did you mean 'batch-size'?"),
        ("batch-size = [", "cannot be read"),
        ("zzz = 1", "It knows: "),
        ('batch-size = "many"', "line 1: batch-size = 'many': "),  # what follows are typer's words
    ],
)
def test_mistakes_in_toml(files: Files, tmp_path: Path, text: str, message: str) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(text)
    found = invoke(*files.fit(tmp_path / "p", "--config", str(toml)), code=2)
    assert message in words(found.stderr)
    assert "there is no file" in words(invoke(*files.fit(tmp_path / "p", "--config", "none.toml"), code=2).stderr)


def test_a_structure_whose_posterior_cannot_be_saved_is_refused_before_the_fit(files: Files, tmp_path: Path) -> None:
    message = words(invoke(*files.fit(tmp_path / "p", "--structure", "matrix_free"), code=2).stderr)
    assert "--structure matrix_free has a posterior that cannot be written to a folder" in message
    assert not (tmp_path / "p").exists()


def test_a_structure_of_the_file_that_makes_the_network(files: Files, tmp_path: Path) -> None:
    before = dict(STRUCTURES)
    page = (run_pages.DOCS / "add_a_structure.md").read_text(encoding="utf-8")
    nets = tmp_path / "own_structure.py"
    nets.write_text(run_pages.blocks_of(page)[0].code + "\n" + Path(files.model.partition(":")[0]).read_text())
    own = Files(files.folder, f"{nets}:build", files.weights, files.train, files.val, files.test, files.ood)
    try:
        content = answer(*own.fit(tmp_path / "p", "--structure", "isotropic", "--method", "evidence"))
        assert content["structure"] == "isotropic"
        STRUCTURES.clear()
        STRUCTURES.update(before)
        invoke("predict", str(tmp_path / "p"), str(files.test))  # the file is run before the folder is read
        assert "isotropic" in STRUCTURES
        message = words(invoke(*own.fit(tmp_path / "q", "--structure", "isotropc"), code=2).stderr)
        assert "--structure 'isotropc' is not known" in message
        assert "isotropic" in message
    finally:
        STRUCTURES.clear()
        STRUCTURES.update(before)
