"""The way of a data scientist, second half: evaluate, report, where, tune and predict."""

from __future__ import annotations

import csv
import html
import json
import math
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from aftermap.cli.report import _sentence
from aftermap.cli.sources import DataFormat, open_source
from aftermap.cli.store import load_fitted, save_fitted
from aftermap.errors import StatisticalWarning
from aftermap.evaluation import Results
from aftermap.laplace.saving import read_extras
from tests.cli.common import Files, answer, invoke, words
from tests.faults.sealing import edit

# Evaluate, report, where, tune


def test_evaluate_compares_and_judges(files: Files, fitted: Path, tmp_path: Path) -> None:
    run = ["evaluate", str(fitted), "--test", str(files.test), "--ood", f"far={files.ood}", "--resamples", "20"]
    results = tmp_path / "results.json"
    said = words(invoke(*run, "-o", str(results), "--baseline", "map").stdout)
    for word in (
        "MAP Bayesian",
        "Accuracy",
        "Negative log-likelihood",
        "ECE",
        "AUROC, far",
        "FPR95, far",
        "at 80 % coverage",
    ):
        assert word in said
    assert "Time per 1,000 inputs" in said
    assert "An input is flagged if its entropy or its mutual information is larger than on 9" in said
    assert "5 % false alarms on data like the validation data" in said
    assert "far: the outputs vary more here than on the test inputs (ratio of the median variances" in said
    assert "not worse than the baseline map" in said
    assert Results.from_json(results).name == "Bayesian"
    again = answer(*run, "--baseline", str(results))
    assert again["baseline"] == f"not worse than the baseline {results}"
    assert again["bayesian"]["metrics"] == json.loads(results.read_text())["metrics"]  # the same seed, the same numbers


def test_worse_than_a_baseline(files: Files, fitted: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    run = ["evaluate", str(fitted), "--test", str(files.test), "--resamples", "0"]
    invoke(*run, "-o", str(results))
    content = json.loads(results.read_text())
    content["metrics"]["nll"] = dict.fromkeys(("value", "lower", "upper"), 0.001)
    results.write_text(json.dumps(content))
    assert "worse than the baseline" in words(invoke(*run, "--baseline", str(results), code=4).stdout)
    content["provenance"]["data_hash"] = "sha256:0"
    results.write_text(json.dumps(content))
    assert "evaluated on other data" in words(invoke(*run, "--baseline", str(results), code=2).stderr)
    assert "there is no such file" in words(invoke(*run, "--baseline", "none.json", code=2).stderr)


def test_evaluate_names_mistakes(files: Files, fitted: Path, tmp_path: Path) -> None:
    assert "say which data to test on" in words(invoke("evaluate", str(fitted), code=2).stderr)
    assert "there is no posterior at" in words(
        invoke("evaluate", str(tmp_path / "none"), "--test", str(files.test), code=2).stderr
    )
    np.savez(tmp_path / "wide.npz", x=np.zeros((3, 5), np.float32), y=np.zeros(3, np.int64))
    assert "a batch of shape [3, 5] made it fail" in words(
        invoke("evaluate", str(fitted), "--test", str(tmp_path / "wide.npz"), code=2).stderr
    )
    found = invoke("evaluate", str(fitted), "--test", str(files.test), "--ood", f"wide={tmp_path / 'wide.npz'}", code=2)
    assert "wide.npz: a batch of shape [3, 5] made it fail" in words(found.stderr)


def test_report_is_one_file(files: Files, posterior: Path, tmp_path: Path) -> None:
    place = tmp_path / "deep" / "mine.html"
    found = invoke("report", str(posterior), "--test", str(files.test), "--ood", f"far={files.ood}", "-o", str(place))
    assert f"report written to {place}".replace("\n", "") in words(found.stdout) or "report written to" in words(
        found.stdout
    )
    text = place.read_text(encoding="utf-8")
    assert text.lstrip().lower().startswith("<!doctype html>")
    assert "far" in text
    assert "Inputs are ordered by the larger of two ranks" in text
    assert "far: the outputs vary more here than on the test inputs" in text
    assert "larger than on 9" in text
    extras = read_extras(posterior)
    for said in (
        r"Tuning: negative log-likelihood of \d+ validation labels: \S+ by the network alone, \S+ with a temperature, \S+ with the posterior too",
        "Check on validation data: accuracy",
    ):
        assert re.search(said, text)
    assert html.escape(re.sub(r"(?<![\w-])-(?=\d)", "−", extras["tuning"])) in text
    assert html.escape(extras["self_check"]["message"].replace(" -> ", " → ")) in text
    assert "exists; report does not replace it" in words(
        invoke("report", str(posterior), "--test", str(files.test), "-o", str(place), code=2).stderr
    )


def test_what_a_terminal_said_is_a_sentence_of_the_report() -> None:
    assert _sentence("Check", "error 1.4 -> 1.3") == "Check: error 1.4 → 1.3."
    assert _sentence("Tuning", "variance times 1.94.") == "Tuning: variance times 1.94."
    assert (
        _sentence("Tuning", "a leave-one-out change of -3.5 ± 7.4") == "Tuning: a leave-one-out change of −3.5 ± 7.4."
    )


def test_where_adds_up(files: Files, fitted: Path, tmp_path: Path) -> None:
    content = answer("where", str(fitted), "--test", str(files.test))
    cross = content.get("cross share", [0.0])
    assert sum(content["predictive share"]) + sum(cross) == pytest.approx(1.0, abs=1e-6)
    for level in ("filter", "weight", "class", "input"):
        assert invoke("where", str(fitted), "--test", str(files.test), "--level", level, "--top", "3").stdout
    invoke("where", str(fitted), "--test", str(files.test), "-o", str(tmp_path / "where.json"))
    assert "layer" in json.loads((tmp_path / "where.json").read_text())
    said = words(invoke("where", str(fitted), "--test", str(files.test)).stdout)
    assert "In this posterior layers depend on each other." in said
    assert all(0 <= float(share) <= 100 for share in re.findall(r"(-?[\d.]+)%", said))
    assert "--level 'pixel' is not known" in words(invoke("where", str(fitted), "--level", "pixel", code=2).stderr)


def test_tune_replaces_the_prior(files: Files, posterior: Path, tmp_path: Path) -> None:
    content = answer("tune", str(posterior), "--prior-precision", "3.5", "-o", str(tmp_path / "tuned"))
    assert set(content["prior_precision"].values()) == {3.5}
    assert content["thresholds"] is None  # they belonged to the old prior
    assert load_fitted(tmp_path / "tuned").threshold("entropy") is None
    assert load_fitted(posterior).threshold("entropy") is not None
    refused = words(invoke("tune", str(posterior), "--val", str(files.val), code=2).stderr)
    assert "holds a prior and thresholds that were chosen on validation data; tune does not replace it" in refused
    said = words(invoke("tune", str(posterior), "--val", str(files.val), "--force").stdout)
    assert "prior precision" in said
    assert "self-check on validation data passed" in said
    assert load_fitted(posterior).threshold("entropy") is not None
    by_evidence = answer("tune", str(posterior), "--method", "evidence", "--force")
    fixed = answer("tune", str(posterior), "--prior-precision", "50")  # nothing is left that validation data chose
    assert by_evidence["log_evidence"] > fixed["log_evidence"]


def test_tune_without_labels_takes_the_rule_of_fit_or_says_which_it_takes(
    files: Files, posterior: Path, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default", StatisticalWarning)
        found = invoke("tune", str(posterior), "-o", str(tmp_path / "alone"))
    assert "'evidence' takes the place of 'self_consistent'" in words(found.stderr)
    found = invoke("tune", str(posterior), "--train", str(files.train), "-o", str(tmp_path / "with"))
    assert "without held-out labels: the covariance is" in words(found.stdout)
    assert "self-check on training data" in words(found.stdout)


# Predict


def test_predict_by_another_score(files: Files, fitted: Path) -> None:
    content = answer("predict", str(fitted), str(files.ood), "--score", "entropy")
    threshold = load_fitted(fitted).threshold("entropy")
    assert threshold is not None
    rows = content["rows"]
    parts = zip(rows["epistemic"], rows["aleatoric"], strict=True)
    assert rows["score"] == pytest.approx([e + a for e, a in parts], abs=1e-6)
    assert rows["flag"] == [int(value > threshold.value) for value in rows["score"]]
    assert content["score"] == "entropy"
    said = words(invoke("predict", str(fitted), str(files.ood), "--kind", "sampling").stderr)
    assert "the thresholds were chosen with --kind linearised; with --kind sampling the rate" in said


@pytest.mark.parametrize("command", ["predict", "evaluate", "report"])
def test_unknown_scores_are_refused_before_any_work(files: Files, fitted: Path, command: str) -> None:
    data = [str(files.ood)] if command == "predict" else ["--test", str(files.test)]
    said = words(invoke(command, str(fitted), *data, "--score", "entropie", code=2).stderr)
    assert "--score 'entropie' is not known; allowed are auto, either, entropy, mutual_information" in said


def test_a_folder_of_an_older_version_flags_by_entropy(files: Files, fitted: Path, tmp_path: Path) -> None:
    new = load_fitted(fitted)
    levels = torch.linspace(0, 1, 201, dtype=torch.float64)
    old = {s: torch.quantile(v, levels) for s, v in new.reference.items() if s != "positions"}
    thresholds = {s: t for s, t in new.extras["thresholds"].items() if s != "either"}
    place = save_fitted(new.predictor, tmp_path / "old", {**new.extras, "thresholds": thresholds}, old, overwrite=False)
    assert answer("predict", str(place), str(files.ood))["score"] == "entropy"
    said = words(invoke("evaluate", str(place), "--test", str(files.test), "--ood", f"far={files.ood}").stdout)
    assert "An input is flagged if its entropy is above" in said
    refused = invoke("predict", str(place), str(files.ood), "--score", "either", code=2)
    assert "this folder holds no scores of any, or those of an older version" in words(refused.stderr)
    invoke("tune", str(place), "--val", str(files.val), "--force")
    assert answer("predict", str(place), str(files.ood))["score"] == "either"


def test_few_validation_data_flag_by_entropy(files: Files, posterior: Path) -> None:
    said = words(
        invoke(
            "tune", str(posterior), "--prior-precision", "1", "--val", str(files.val), "--limit", "30", "--force"
        ).stdout
    )
    assert "an input is flagged if its entropy is above" in said
    assert "5 % false alarms on data like the 30 of val" in said
    said = words(
        invoke(
            "tune", str(posterior), "--prior-precision", "1", "--val", str(files.val), "--limit", "9", "--force"
        ).stdout
    )
    assert "nothing will be flagged: the 9 of val are too few to promise 5 % false alarms" in said
    said = words(invoke("predict", str(posterior), str(files.ood)).stderr)
    assert "0 of 50 flagged" in said
    assert "There were too few validation data to flag anything" in said


def test_predict_writes_a_row_per_input(files: Files, fitted: Path, tmp_path: Path) -> None:
    place = tmp_path / "scored.csv"
    found = invoke("predict", str(fitted), str(files.ood), "-o", str(place))
    rows = list(csv.DictReader(place.read_text().splitlines()))
    assert list(rows[0]) == ["prediction", "confidence", "epistemic", "aleatoric", "score", "flag"]
    assert len(rows) == 50
    loaded = load_fitted(fitted)
    for row in rows:
        assert row["prediction"] in ("0", "1", "2")
    assert f"{sum(r['flag'] == '1' for r in rows)} of 50 flagged" in words(found.stdout)
    assert "An input is flagged if its entropy or its mutual information is larger than on" in words(found.stdout)
    with np.load(files.ood) as arrays:
        x = torch.from_numpy(arrays["x"])
    options = loaded.predict_options("auto", 100)
    expected = loaded.predictor.predict(x, **options, generator=torch.Generator().manual_seed(0))
    assert [float(r["confidence"]) for r in rows] == pytest.approx(expected.confidence.tolist(), abs=1e-5)
    with np.load(files.val) as arrays:
        held_out = loaded.predictor.predict(
            torch.from_numpy(arrays["x"]), **options, generator=torch.Generator().manual_seed(0)
        )
    by_hand = [
        max(
            (held_out.score(kind) < expected.score(kind)[i]).double().mean().item()
            for kind in ("entropy", "mutual_information")
        )
        for i in range(50)
    ]
    assert [float(r["score"]) for r in rows] == pytest.approx(by_hand, abs=1e-6)
    limit = loaded.threshold("either")
    assert limit is not None
    assert [r["flag"] for r in rows] == [str(int(value > limit.value)) for value in by_hand]
    assert 10 < sum(int(r["flag"]) for r in rows) <= 50
    assert "exists; predict does not replace it" in words(
        invoke("predict", str(fitted), str(files.ood), "-o", str(place), code=2).stderr
    )
    invoke("predict", str(fitted), str(files.ood), "-o", str(tmp_path / "scored.json"), "--score", "mutual_information")
    assert json.loads((tmp_path / "scored.json").read_text())["flag"][0] in (0, 1)
    assert "written as .csv or .json" in words(
        invoke("predict", str(fitted), str(files.ood), "-o", "x.xls", code=2).stderr
    )


def test_tables_from_training_to_prediction(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(120, 2))
    words_of = np.where(x[:, 0] + x[:, 1] > 0, "big", "small")
    lines = [
        "id,a,b,kind",
        *(f"n{i},{a:.3f},{b:.3f},{k}" for i, ((a, b), k) in enumerate(zip(x, words_of, strict=True))),
    ]
    train, val, new = tmp_path / "train.csv", tmp_path / "val.csv", tmp_path / "new.csv"
    train.write_text("\n".join(lines[:81]))
    val.write_text("\n".join([lines[0], *lines[81:]]))
    table = ["--target", "kind", "--drop", "id"]
    invoke(
        "train",
        "--model",
        "builtin:mlp",
        "--train",
        str(train),
        "--val",
        str(val),
        "-o",
        str(tmp_path / "run"),
        "--optimizer",
        "adam",
        "--epochs",
        "8",
        "--batch-size",
        "16",
        *table,
    )
    weights = str(tmp_path / "run" / "model.safetensors")
    invoke(
        "fit",
        "--model",
        "builtin:mlp",
        "--weights",
        weights,
        "--train",
        str(train),
        "--val",
        str(val),
        "-o",
        str(tmp_path / "p"),
        "--params",
        "last_layer",
        "--structure",
        "kron",
        "--method",
        "evidence",
        *table,
    )
    # Other order of columns, words in a column that is no input, no targets.
    new.write_text("b,name,a\n2.0,first,2.0\n-2.0,second,-2.0\n")
    found = invoke("predict", str(tmp_path / "p"), str(new), "--keep", "name")
    rows = list(csv.DictReader(found.stdout.splitlines()))
    assert [(r["name"], r["prediction"]) for r in rows] == [("first", "big"), ("second", "small")]
    # Columns that are no inputs come along by themselves, also the target where it is there; inputs where they are asked for.
    new.write_text("id,b,a,kind,score\nn7,2.0,2.0,big,9\nn8,-2.0,-2.0,small,7\n")
    rows = list(csv.DictReader(invoke("predict", str(tmp_path / "p"), str(new), "--keep", "a").stdout.splitlines()))
    assert list(rows[0])[:5] == ["id", "kind", "score_of_data", "a", "prediction"]
    assert [(r["id"], r["score_of_data"], r["a"]) for r in rows] == [("n7", "9", "2.0"), ("n8", "7", "-2.0")]
    assert "has no column 'nme'" in words(
        invoke("predict", str(tmp_path / "p"), str(new), "--keep", "nme", code=2).stderr
    )
    new.write_text("a,b\n1.0,2.0\n3.0,unknown\n")
    found = invoke("predict", str(tmp_path / "p"), str(new), code=2)
    assert "row 3, column 'b': 'unknown' is not a finite number" in words(found.stderr)
    val.write_text("id,a,b,kind\nn1,1.0,2.0,huge\n")
    found = invoke("evaluate", str(tmp_path / "p"), "--test", str(val), code=2)
    assert "the class 'huge' is not one of big, small" in words(found.stderr)


def test_regression_has_intervals(tmp_path: Path) -> None:
    run = ["--model", "builtin:mlp", "--data", "toy:cubic"]
    invoke("train", *run, "-o", str(tmp_path / "run"), "--optimizer", "adam", "--epochs", "6", "--lr", "0.01")
    weights = str(tmp_path / "run" / "model.safetensors")
    content = answer("fit", *run, "--weights", weights, "-o", str(tmp_path / "p"), "--structure", "kron")
    assert content["task"] == "regression"
    assert 1.0 < content["noise"] < 20.0  # the problem has 3, and the network is hardly trained
    assert set(content["thresholds"]) == {"entropy", "mutual_information", "variance"}
    rows = list(csv.DictReader(invoke("predict", str(tmp_path / "p"), "toy:cubic").stdout.splitlines()))
    numbers = ["prediction", "sd", "lower_95", "upper_95", "epistemic_sd", "noise_sd"]
    assert list(rows[0]) == [*numbers, "score", "flag"]
    for row in rows:
        mean, sd, lower, upper, epistemic, noise = (float(row[n]) for n in numbers)
        assert (lower, upper) == pytest.approx((mean - 1.96 * sd, mean + 1.96 * sd), abs=2e-3 * sd)
        assert epistemic**2 + noise**2 == pytest.approx(sd**2, rel=1e-3)
        assert noise == pytest.approx(content["noise"], rel=1e-3)
        assert float(row["score"]) == pytest.approx(0.5 * math.log1p((epistemic / noise) ** 2), rel=1e-3)
    assert load_fitted(tmp_path / "p").score_name("auto") == "mutual_information"
    refused = invoke("evaluate", str(tmp_path / "p"), "--score", "max_probability", code=2)
    assert "--score max_probability is not defined for the task regression" in words(refused.stderr)
    said = words(invoke("evaluate", str(tmp_path / "p")).stdout)
    assert "An input is flagged if its mutual information is above" in said
    assert "Root mean squared error" in said
    assert "95 % interval" in said


def test_a_posterior_without_its_network(files: Files, posterior: Path, tmp_path: Path) -> None:
    edit(posterior, lambda config: config["laplace"]["extras"]["model"].update(spec="gone.nets:build"))
    assert "gone.nets:build, which is not found" in words(
        invoke("predict", str(posterior), str(files.test), code=2).stderr
    )
    assert "there is no module 'gone'" in words(
        invoke("predict", str(posterior), str(files.test), "--trust-code", code=2).stderr
    )
    invoke("predict", str(posterior), str(files.test), "--model", files.model, "-o", str(tmp_path / "a.csv"))
    (posterior / "model.safetensors").unlink()
    assert "model.safetensors is missing" in words(
        invoke("predict", str(posterior), str(files.test), "--model", files.model, code=2).stderr
    )
    invoke(
        "predict",
        str(posterior),
        str(files.test),
        "--model",
        files.model,
        "--weights",
        str(files.weights),
        "-o",
        str(tmp_path / "b.csv"),
    )
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()


# Select


def test_select_ranks_by_evidence(files: Files, tmp_path: Path) -> None:
    place = files.model.removesuffix(":build")
    data = [
        "--train",
        str(files.train),
        "--test",
        str(files.test),
        "--epochs",
        "20",
        "--structure",
        "kron",
        "--lr",
        "0.05",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few epochs do not end at a mode
        content = answer(
            "select", f"wide={place}:build", f"{place}:ready", *data, "-o", str(tmp_path / "best.safetensors")
        )
    assert {row["name"] for row in content["table"]} == {"wide", "ready"}
    evidences = [row["log_evidence"] for row in content["table"]]
    assert evidences == sorted(evidences, reverse=True)
    assert content["best"] == content["table"][0]["name"]
    assert sum(content["probabilities"].values()) == pytest.approx(1.0)
    assert load_file(tmp_path / "best.safetensors")
    assert "two candidates are called 'build'" in words(
        invoke("select", files.model, files.model, *data, code=2).stderr
    )
    assert "say which data" in words(invoke("select", files.model, code=2).stderr)


def test_select_of_one_network_compares_nothing(files: Files) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = invoke("select", files.model, "--train", str(files.train), "--epochs", "1", "--structure", "kron")
    assert "build alone is no comparison: name a second network" in words(found.stdout)
    assert "the data prefer" not in found.stdout


def test_images_of_a_folder_have_their_names(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    for i in range(40):
        place = tmp_path / "images" / ("dark" if i % 2 else "light")
        place.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 120, size=(4, 4)) + (0 if i % 2 else 120)
        image.fromarray(pixels.astype(np.uint8)).save(place / f"{i:02}.png")
    run = ["--model", "builtin:mlp", "--data", str(tmp_path / "images")]
    invoke("train", *run, "-o", str(tmp_path / "run"), "--optimizer", "adam", "--epochs", "20", "--batch-size", "8")
    weights = ["--weights", str(tmp_path / "run" / "model.safetensors")]
    invoke(
        "fit",
        *run,
        *weights,
        "-o",
        str(tmp_path / "p"),
        "--structure",
        "diagonal",
        "--prior-precision",
        "100",
        "--no-tune",
    )
    new = tmp_path / "images" / "dark"
    rows = list(csv.DictReader(invoke("predict", str(tmp_path / "p"), str(new)).stdout.splitlines()))
    assert [r["file"] for r in rows] == [f"{i:02}.png" for i in range(1, 40, 2)]
    assert {r["prediction"] for r in rows} == {"dark"}


@pytest.mark.parametrize("form", ["npz", "csv", "own parts"])
def test_one_file_is_cut_into_parts_that_never_overlap(files: Files, tmp_path: Path, form: str) -> None:
    with np.load(files.train) as arrays:
        x, y = arrays["x"], arrays["y"]
    place = tmp_path / ("all.csv" if form == "csv" else "all.npz")
    if form == "csv":
        place.write_text("\n".join(["a,b,kind", *(f"{a:.5f},{b:.5f},{k}" for (a, b), k in zip(x, y, strict=True))]))
    elif form == "npz":
        np.savez(place, x=x, y=y)
    else:
        np.savez(place, x_train=x[:150], y_train=y[:150], x_test=x[150:], y_test=y[150:])
    parts = {
        p: open_source(f"{place}:{p}", "test", DataFormat(target="kind")).examples
        for p in ("train", "validation", "test")
    }
    sizes = {p: len(e) for p, e in parts.items() if e is not None}
    assert sizes == {
        "train": 120,
        "validation": 30 if form == "own parts" else 40,
        "test": 50 if form == "own parts" else 40,
    }
    every = torch.cat([e.inputs for e in parts.values() if e is not None])
    assert len(every.unique(dim=0)) == len(every) == 200
    target = ["--target", "kind"] if form == "csv" else []
    command = ["fit", "--model", files.model, "--weights", str(files.weights), "--data", str(place), *target]
    content = answer(*command, "-o", str(tmp_path / "p"), "--structure", "kron")
    assert content["n_data"] == sizes["train"]
    assert content["thresholds"]["entropy"]["n_data"] == sizes["validation"]
    judged = answer("evaluate", str(tmp_path / "p"))  # on the test part of the same file
    assert judged["bayesian"]["n_data"] == sizes["test"]
