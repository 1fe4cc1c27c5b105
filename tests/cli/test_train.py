"""Training: killed and taken up again, on one process and on two, and what comes out of it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tqdm import tqdm
from typer.testing import CliRunner

import aftermap.cli.training as training
from aftermap.cli.app import app
from aftermap.cli.console import Reporter
from aftermap.cli.store import load_fitted
from aftermap.cli.training import CHECKPOINT, HISTORY, RATES
from aftermap.data import builtin, part_of, toy
from aftermap.optim import TrainedPosterior
from tests.cli.common import answer, invoke, words
from tests.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
BASE = ["train", "--model", "builtin:mlp", "--data", "toy:blobs", "--epochs", "3", "--batch-size", "50"]
WIDE = ["--prior-precision", "1", "--lr", "0.01"]


def same(one: Path, two: Path, tolerance: float = 0.0) -> None:
    a, b = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def attempt(*arguments: str) -> Any:
    """A run with so few steps that its self-check may fail."""
    found = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert found.exit_code in (0, 3), found.stderr
    return found


class Killed(BaseException):
    """Nothing catches it, like a signal."""


def test_killed_in_the_last_write_it_leaves_the_whole_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [*BASE, "--optimizer", "adam", "--checkpoint-seconds", "0", "-o", str(tmp_path / "run")]
    real, writes = training.replaced_file, list[Path]()

    def killed(file: Path) -> Any:
        writes.append(file)
        if file.name == HISTORY and sum(w.name == HISTORY for w in writes) == 24:  # One after each step.
            raise Killed
        return real(file)

    monkeypatch.setattr(training, "replaced_file", killed)
    with pytest.raises(Killed):
        attempt(*command)
    monkeypatch.undo()
    attempt(*command)
    assert len(json.loads((tmp_path / "run" / HISTORY).read_text())) == 3


@pytest.mark.parametrize("left", [[f".{HISTORY}.part"], [HISTORY], [HISTORY, f".{CHECKPOINT}.part"]])
def test_killed_in_the_first_write_it_begins_anew(tmp_path: Path, left: list[str]) -> None:
    place = tmp_path / "run"
    place.mkdir()
    for name in left:
        if name == HISTORY:
            (place / name).write_text("[]")
        else:
            (place / name).mkdir()
            (place / name / "half").write_text("[")
    attempt(*BASE, "--optimizer", "adam", "-o", str(place))
    assert sorted(p.name for p in place.iterdir()) == [CHECKPOINT, HISTORY, "model.safetensors"]


@pytest.mark.parametrize(
    "optimizer", [o if o in ("vogn", "adam") else pytest.param(o, marks=pytest.mark.slow) for o in RATES]
)
def test_killed_and_restarted_it_ends_where_it_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    command = [*BASE, "--optimizer", optimizer, "--checkpoint-seconds", "0", "--samples", "4"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = attempt(*command, "-o", str(whole), "--json")
    step = training._step
    taken: list[int] = []

    def dies(*args: Any) -> float:
        taken.append(1)
        if len(taken) == 12:  # in the middle of the second epoch
            raise Killed
        return step(*args)

    monkeypatch.setattr(training, "_step", dies)
    with pytest.raises(Killed):
        invoke(*command, "-o", str(broken))
    monkeypatch.undo()
    assert [p.name for p in broken.iterdir() if p.name.startswith(".")] == []
    assert not (broken / "model.safetensors").exists()
    found = invoke(*command, "-o", str(broken), code=done.exit_code)
    assert "continues at step 11 of 24" in words(found.stderr)
    same(whole, broken)
    assert json.loads(done.stdout)["steps"] == 24
    histories = [json.loads((place / "history.json").read_text()) for place in (whole, broken)]
    assert len(histories[0]) == 3
    assert histories[0] == histories[1]  # The loss of an epoch is that of all its steps, also of those before the kill.


def test_a_bayesian_run_ends_with_a_posterior(tmp_path: Path) -> None:
    place = tmp_path / "run"
    content = answer(*BASE, *WIDE, "--epochs", "12", "--optimizer", "vogn", "-o", str(place))
    assert content["self_check"]["passed"] is True
    assert content["history"][0]["loss"] > content["history"][-1]["loss"]
    assert all(entry["validation_loss"] > 0 for entry in content["history"])
    assert 0.9 < content["history"][-1]["validation_accuracy"] <= 1.0
    said = words(invoke(*BASE, "--optimizer", "adam", "-o", str(tmp_path / "other")).stderr)
    assert re.search(r"epoch 3/3: loss [\d.]+, validation loss [\d.]+, validation accuracy [\d.]+", said)
    fitted = load_fitted(place / "posterior")
    assert isinstance(fitted.predictor, TrainedPosterior)
    assert fitted.predict_options("auto", 8) == {"kind": "sampling", "samples": 8}
    assert fitted.threshold("entropy") is not None
    said = words(invoke("evaluate", str(place / "posterior"), "--samples", "16", "--resamples", "0").stdout)
    assert "Bayesian" in said
    shares = answer("where", str(place / "posterior"))["predictive share"]
    assert sum(shares) == pytest.approx(1.0, abs=1e-6)
    assert fitted.predictor.output_temperature == pytest.approx(fitted.predictor.likelihood.config()["temperature"])
    folder = str(place / "posterior")
    assert "was made by training with VOGN" in words(invoke("tune", folder, code=2).stderr)
    again = answer("tune", folder, "--val", "toy:blobs:validation", "--samples", "32", "-o", str(tmp_path / "tuned"))
    assert again["output_temperature"] == pytest.approx(fitted.predictor.output_temperature)
    finished = invoke(*BASE, *WIDE, "--epochs", "12", "--optimizer", "vogn", "-o", str(place))
    assert "is finished" in words(finished.stderr)


def test_adam_says_how_to_go_on(tmp_path: Path) -> None:
    place = tmp_path / "run"
    said = words(invoke(*BASE, "--optimizer", "adam", "-o", str(place)).stdout)
    assert "aftermap fit --model builtin:mlp --weights" in said
    assert not (place / "posterior").exists()


def test_a_suggested_command_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "R & D"
    folder.mkdir()
    rows = "".join(f"{i % 7 / 3},{i % 11 / 5},{i % 3}.5\n" for i in range(60))
    (folder / "my table.csv").write_text("a b,c,the price\n" + rows)
    data = ["--data", str(folder / "my table.csv"), "--target", "the price", "--task", "regression", "--limit", "50"]
    place = folder / "run"
    said = invoke("train", "--model", "builtin:mlp", *data, "--epochs", "1", "--optimizer", "adam", "-o", str(place))
    assert "trained 1 epoch with adam" in said.stdout
    (line,) = [line for line in said.stdout.splitlines() if line.strip().startswith("aftermap fit")]
    words_of_line = shlex.split(line)
    assert words_of_line[:6] == [
        "aftermap",
        "fit",
        "--model",
        "builtin:mlp",
        "--weights",
        str(place / "model.safetensors"),
    ]
    assert {*zip(data[::2], data[1::2], strict=True)} <= {*itertools.pairwise(words_of_line)}
    output = folder / "posterior"
    done = invoke(*words_of_line[1:-1], str(output), code=None)
    assert f"next: aftermap report '{output}' --test DATA" in done.stdout


def test_folders_and_settings(tmp_path: Path) -> None:
    place = tmp_path / "run"
    command = [*BASE, "--optimizer", "adam", "-o", str(place)]
    invoke(*command)
    found = invoke(*command, "--lr", "0.5", code=2)
    assert "holds a run with other settings (lr: 0.001 there, 0.5 now)" in words(found.stderr)
    invoke(*command, "--lr", "0.5", "--force")
    (place / CHECKPOINT).write_bytes(b"torn")
    assert "is damaged" in words(invoke(*command, code=2).stderr)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    found = invoke(*BASE, "-o", str(tmp_path / "mine"), code=2)
    assert "is not a run that can be continued" in words(found.stderr)
    assert "is a file" in words(invoke(*BASE, "-o", str(tmp_path / "mine" / "thesis.txt"), code=2).stderr)


@pytest.mark.parametrize(
    "more, message",
    [
        (["--optimizer", "sgd"], "--optimizer 'sgd' is not known; allowed are vogn"),
        (["--noise", "2"], "--noise belongs to a regression"),
        (["--lr", "1e30", "--optimizer", "adam"], "lower --lr"),
        (["--model", "builtin:lenet"], "for tables use builtin:mlp"),
    ],
)
def test_mistakes(tmp_path: Path, more: list[str], message: str) -> None:
    assert message in words(invoke(*BASE, *more, "-o", str(tmp_path / "run"), code=2).stderr)


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "run"
    command = [*BASE, "--optimizer", "adam", "--checkpoint-seconds", "0", "-o", str(place)]
    real, calls = torch.save, []

    def fills(content: Any, file: Any, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            Path(file).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(content, file, *args)

    monkeypatch.setattr(torch, "save", fills)
    assert "The disk is full" in words(invoke(*command, code=2).stderr)
    monkeypatch.undo()
    assert sorted(p.name for p in place.iterdir()) == [CHECKPOINT, "history.json"]
    assert "continues at step 2 of 24" in words(invoke(*command).stderr)


def train_regression(place: Path, *more: str) -> TrainedPosterior:
    """The posterior after a few steps on x³ + N(0, 9), x in [-4, 4]."""
    attempt("train", "--model", "builtin:mlp", "--data", "toy:cubic", "--epochs", "60", "-o", str(place), *more)
    predictor = load_fitted(place / "posterior").predictor
    assert isinstance(predictor, TrainedPosterior)
    return predictor


def test_intervals_of_a_regression_hold_what_they_promise(tmp_path: Path) -> None:
    trained = train_regression(tmp_path / "run")
    noise = trained.likelihood.config()["noise"]
    assert noise == pytest.approx(3, rel=0.25)
    test = part_of(toy("cubic", 600), "test")
    found = trained.predict(test.inputs, samples=32, generator=torch.Generator().manual_seed(0))
    inside = (found.mean[:, 0] - test.targets.reshape(-1)).abs() < 1.96 * found.total[:, 0].sqrt()
    assert 0.88 <= float(inside.double().mean()) <= 0.99
    kept = train_regression(tmp_path / "kept", "--noise", "7")
    assert kept.likelihood.config()["noise"] == 7
    half = train_regression(tmp_path / "half", "--no-tune")
    assert half.likelihood.config()["noise"] == pytest.approx(11, rel=0.3)  # half the deviation of x³


def test_every_output_of_a_regression_has_its_own_noise(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2, generator=generator)
    y = torch.stack([1000 * (x[:, 0] + x[:, 1]), x[:, 0]], 1) + torch.tensor([200.0, 0.1]) * torch.randn(
        300, 2, generator=generator
    )
    np.savez(tmp_path / "two.npz", x=x.numpy(), y=y.numpy())
    command = ["train", "--model", "builtin:mlp", "--data", str(tmp_path / "two.npz"), "--epochs", "60"]
    found = attempt(*command, "-o", str(tmp_path / "run"))
    assert "in training the noise is taken as" in words(found.stderr)
    noise = load_fitted(tmp_path / "run" / "posterior").predictor.likelihood.config()["noise"]
    # The error of the network adds to the noise.
    assert 170 < noise[0] < 400
    assert 0.085 < noise[1] < 0.2
    again = invoke(*command, "-o", str(tmp_path / "run"))
    assert "is finished" in words(again.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", list(RATES))
def test_usual_rates_learn_a_regression(tmp_path: Path, optimizer: str) -> None:
    command = ["train", "--model", "builtin:mlp", "--data", "toy:cubic", "--optimizer", optimizer]
    attempt(*command, "-o", str(tmp_path / "run"))
    history = json.loads((tmp_path / "run" / HISTORY).read_text())
    assert history[-1]["validation_rmse"] < 11  # The targets have a deviation of 22, their noise one of 3.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["breast_cancer", "wine"])
@pytest.mark.parametrize("optimizer", ["vogn", "ivon", "ogn"])
def test_tuning_does_not_harm_classes(tmp_path: Path, name: str, optimizer: str) -> None:
    command = ["train", "--model", "builtin:mlp", "--data", f"builtin:{name}", "--optimizer", optimizer]
    test = part_of(builtin(name), "test")
    nll = {}
    for tuned in ("--no-tune", "--tune"):
        attempt(*command, tuned, "-o", str(tmp_path / tuned))
        fitted = load_fitted(tmp_path / tuned / "posterior")
        options = fitted.predict_options("auto", 32)
        found = fitted.predictor.predict(test.inputs, generator=torch.Generator().manual_seed(0), **options)
        nll[tuned] = float(-found.log_prob(test.targets).mean())
    assert nll["--tune"] < nll["--no-tune"] + 0.05


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
    ]
    done = subprocess.run(
        [*launch, "-m", "aftermap", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["vogn", "adam"])
def test_two_processes_equal_one(tmp_path: Path, optimizer: str) -> None:
    command = [*BASE, *WIDE, "--epochs", "12", "--optimizer", optimizer]
    invoke(*command, "-o", str(tmp_path / "one"))
    done = torchrun(*command, "-o", str(tmp_path / "two"))
    assert "on 2 processes" in done.stderr
    assert done.stdout.count("trained 12 epochs") == 1  # one process speaks
    same(tmp_path / "one", tmp_path / "two", 2e-5)


@pytest.mark.slow
def test_a_fit_on_two_processes_equals_one(tmp_path: Path) -> None:
    invoke(*BASE, "--optimizer", "adam", "-o", str(tmp_path / "run"))
    weights = str(tmp_path / "run" / "model.safetensors")
    command = [
        "fit",
        "--model",
        "builtin:mlp",
        "--weights",
        weights,
        "--data",
        "toy:blobs",
        "--structure",
        "kron",
        "--method",
        "evidence",
    ]
    invoke(*command, "-o", str(tmp_path / "one"))
    done = torchrun(*command, "-o", str(tmp_path / "two"))
    assert done.stdout.count("saved in") == 1
    one, two = (load_fitted(tmp_path / n).predictor for n in ("one", "two"))
    assert one.factors.n_data == two.factors.n_data == 360
    a, b = one.posterior.marginal_variance(), two.posterior.marginal_variance()
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-7)


@pytest.mark.slow
def test_a_first_run_on_a_small_table_passes_its_own_check(tmp_path: Path) -> None:
    found = invoke("train", "--model", "builtin:mlp", "--data", "builtin:wine", "-o", str(tmp_path / "run"))
    assert "self-check on validation data passed" in words(found.stdout)
    assert "trained 500 epochs" in words(found.stdout)  # of one batch each
    assert len(re.findall(r"epoch \d+/500", words(found.stderr))) == 20


def test_a_failed_check_says_what_to_try(tmp_path: Path) -> None:
    command = [*BASE, "--epochs", "26", "--optimizer", "vogn", "--temperature", "30", "--no-tune", "--drop", "nothing"]
    found = invoke(*command, "-o", str(tmp_path / "run"), code=3)
    said = words(found.stdout)
    assert re.findall(r"epoch (\d+)/26", words(found.stderr)) == [str(n) for n in range(2, 27, 2)]
    assert "self-check on validation data FAILED" in said
    weights = tmp_path / "run" / "model.safetensors"
    again = f"aftermap fit --model builtin:mlp --weights {weights} --data toy:blobs --drop nothing -o posterior/"
    assert again.replace(" ", "") in said.replace(" ", "")


def test_a_run_without_draws_predicts_by_its_linear_model(tmp_path: Path) -> None:
    attempt(*BASE, "--optimizer", "ogn", "--epochs", "1", "-o", str(tmp_path / "run"))
    fitted = load_fitted(tmp_path / "run" / "posterior")
    assert fitted.predict_options("auto", 8) == {"kind": "linearised", "samples": 8}


def test_a_run_from_before_the_temperature_could_be_chosen_goes_on(tmp_path: Path) -> None:
    command = [*BASE, "--optimizer", "adam", "-o", str(tmp_path / "run")]
    invoke(*command)
    place = tmp_path / "run" / CHECKPOINT
    content = torch.load(place, weights_only=True)
    del content["recipe"]["temperature"]
    torch.save(content, place)
    assert "temperature: 1.0 there, 0.1 now" in words(invoke(*command, code=2).stderr)
    assert "is finished" in words(invoke(*command, "--temperature", "1").stderr)


def test_a_sentence_does_not_run_into_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tqdm(total=3, file=sys.stderr, desc="training") as bar:
        bar.update()
        Reporter().note("epoch 1/3: loss 2")
    said = capsys.readouterr().err
    before, _, after = said.partition("epoch 1/3: loss 2\n")
    assert before.endswith("\r")  # the line of the bar was wiped
    assert "training:" in before
    assert "training:" in after


def test_a_run_has_one_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    def shown(items: Any, *, description: str, total: int) -> Any:
        seen.append((description, total))
        return items

    monkeypatch.setattr(training, "progress", shown)
    invoke(*BASE, "--optimizer", "adam", "-o", str(tmp_path / "run"))
    assert seen == [("training", 24)]
