"""The quality benchmark runs, measures what it says, and its page has no number of its own."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sklearn", reason="the small tasks are tables of scikit-learn")

import aftermap as am
from aftermap.baselines import Deterministic, TemperatureScaling
from benchmarks.quality import methods, run, targets
from benchmarks.quality.datasets import Splits, Table
from benchmarks.quality.identity import register_identity
from benchmarks.quality.kept import KeptOutputs
from benchmarks.quality.measure import Made, hindsight, measure
from benchmarks.quality.page import page_of
from benchmarks.quality.plan import plan_of
from benchmarks.quality.store import carry_over
from benchmarks.quality.summary import Results, tables_of
from benchmarks.quality.tasks import QUICK, TASKS
from benchmarks.quality.training import Prepared, prepare

ROOT = Path(__file__).resolve().parent.parent
NOWHERE = Path("nowhere")


def quick(cache: Path, *more: str) -> dict[str, Any]:
    return run.main(["--quick", "--seeds", "0", "--resplits", "1", "--cache", str(cache), *more])


@pytest.fixture
def wine(tmp_path: Path) -> Prepared:
    return prepare(QUICK["quick_wine"], 0, NOWHERE, tmp_path)


class Fixed(nn.Module):
    """A network whose outputs are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def fixed(task: str, pool: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], outputs: int) -> Prepared:
    return Prepared(QUICK[task], 0, Splits(pool, pool, test, outputs), Fixed(), 0.0, NOWHERE, NOWHERE)


# The table of tasks.


def test_half_of_the_tasks_is_held_out() -> None:
    for regression in (False, True):
        parts = [t.part for t in TASKS.values() if (t.group == "regression") == regression]
        assert parts.count("development") == parts.count("held-out") == len(parts) / 2
        assert len(parts) >= (15 if regression else 14)


def test_tasks_are_of_many_kinds() -> None:
    classifications = [t for t in TASKS.values() if t.group != "regression"]
    assert all(1 <= len(t.data.ood) <= 3 for t in classifications)  # type: ignore[union-attr]
    assert all(t.validation_sizes() for t in TASKS.values())
    for part in ("development", "held-out"):
        own = [t for t in classifications if t.part == part]
        assert {t.group for t in own} == {"image", "table"}
        assert {t.likelihood for t in own} == {"classification", "binary"}
        assert {t.overfitted for t in own} == {True, False}
        assert {"MLP", "Attention", "ConvNet"} <= {type(t.network).__name__ for t in own}


def test_a_validation_set_is_a_part_of_the_pool(wine: Prepared) -> None:
    x, y = wine.splits.pool
    (first, labels), *rest = wine.validation(30, 0)
    assert not rest
    matches = (first[:, None] == x[None]).all(-1)
    assert matches.any(1).all()
    assert len(first.unique(dim=0)) == 30
    torch.testing.assert_close(y[matches.float().argmax(1)], labels)
    torch.testing.assert_close(wine.validation(30, 0)[0][0], first)
    assert not torch.equal(wine.validation(30, 1)[0][0], first)


def test_training_validation_and_test_rows_are_disjoint(wine: Prepared) -> None:
    parts = [wine.splits.train[0], wine.splits.pool[0], wine.splits.test[0]]
    assert len(torch.cat(parts).unique(dim=0)) == sum(map(len, parts))
    torch.testing.assert_close(parts[0].mean(0), torch.zeros(13), atol=1e-5, rtol=0)
    torch.testing.assert_close(wine.ood["scaled"], 3 * parts[2])
    shuffled = wine.ood["shuffled"]
    torch.testing.assert_close(shuffled.sort(0).values, parts[2].sort(0).values)
    assert not torch.equal(shuffled, parts[2])


def test_unseen_classes_are_nowhere_else() -> None:
    whole = Table("wine", 100, 30).load(NOWHERE, 0)
    splits = Table("wine", 60, 30, unseen=(0,), ood=("unseen",)).load(NOWHERE, 0)
    assert splits.outputs == whole.outputs - 1 == 2
    assert len(splits.ood["unseen"]) == 59  # of 178 wines
    assert sum(len(y) for _, y in (splits.train, splits.pool, splits.test)) == 178 - 59


def test_a_network_is_trained_once(wine: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.quality.training.train_network", lambda *_: pytest.fail("trained again"))
    again = prepare(QUICK["quick_wine"], 0, NOWHERE, tmp_path)
    for old, new in zip(wine.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(new, old)
    assert again.seconds == pytest.approx(wine.seconds, abs=0.01)


# What is measured.


def test_hindsight_is_the_best_temperature_on_the_test_data() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(50, 3, generator=generator)
    labels = torch.randint(3, (50,), generator=generator)
    made = fixed("quick_wine", (logits, labels), (logits, labels), 3)
    brute = min(
        float(nn.functional.cross_entropy(logits.double() / math.exp(t / 100), labels)) for t in range(-100, 500)
    )
    assert hindsight(made) == pytest.approx(brute, abs=1e-5)
    best = TemperatureScaling(made.model).fit([(logits, labels)])
    assert measure(Made(lambda x: best.predict(x)), made)["d"] == pytest.approx(0, abs=1e-6)
    assert measure(Made(lambda x: Deterministic(made.model).predict(x)), made)["d"] > 0.1


def test_a_regression_is_compared_with_the_noise_of_the_pool() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 1, generator=generator)
    pool, test = (x, x + 0.5), (x, x + torch.randn(40, 1, generator=generator))
    made = fixed("quick_diabetes", pool, test, 1)
    noisy = Deterministic(made.model, am.likelihoods.Gaussian(0.5))
    row = measure(Made(lambda x: noisy.predict(x)), made)
    assert row["d"] == pytest.approx(0, abs=1e-5)
    assert row["cover95"] == pytest.approx(float(((test[1] - x).abs() <= 1.96 * 0.5).float().mean()), abs=0.02)


def test_one_logit_is_two_classes() -> None:
    logits = torch.tensor([[2.0], [-1.0], [0.5], [-3.0]])
    labels = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    made = fixed("quick_breast_cancer", (logits, labels), (logits, labels), 1)
    row = measure(Made(lambda x: Deterministic(made.model, "binary").predict(x)), made)
    assert row["accuracy"] == 0.75
    assert row["nll"] == pytest.approx(float(nn.functional.binary_cross_entropy_with_logits(logits, labels)))
    assert row["error_auroc"] == 1.0  # the wrong answer is the least sure one


def test_the_identity_is_a_structure_without_data(registered_structures: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x, y = torch.randn(7, 2, dtype=torch.float64), torch.randint(2, (7,))
    la = am.Laplace(model, "classification", structure=register_identity(), prior_precision=2.0).fit([(x, y)])
    point = torch.randn(1, 2, dtype=torch.float64)
    found = la.predict(point).latent_cov
    parameters = list(model.parameters())
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(o, parameters, retain_graph=True)]) for o in model(point)[0]
    ]
    jacobian = torch.stack(rows)
    assert found is not None
    torch.testing.assert_close(found[0], jacobian @ jacobian.T / (7 + 2))
    other = am.Laplace(model, "classification", structure="identity", prior_precision=2.0).fit([(3 * x, 1 - y)])
    torch.testing.assert_close(other.predict(point).latent_cov, found)


@pytest.fixture
def registered_structures() -> Any:
    from aftermap.curvature.structures.base import STRUCTURES

    before = dict(STRUCTURES)
    yield
    STRUCTURES.clear()
    STRUCTURES.update(before)


@pytest.mark.parametrize("name", ["quick_wine", "quick_breast_cancer"])
def test_kept_outputs_give_what_tuning_and_predicting_give(name: str, tmp_path: Path) -> None:
    made = prepare(QUICK[name], 0, NOWHERE, tmp_path)
    laplace = am.Laplace(made.model, made.likelihood, structure="full").fit(made.train, progress=False)
    kept = KeptOutputs(laplace)
    for split in range(2):
        data = made.validation(30, split)
        found, expected = kept.tune(data), laplace.tune(data).tuning
        assert isinstance(expected, am.laplace.ValidationResult)
        assert (found.width, found.ratio) == (expected.width, expected.ratio)
        assert found.data_scale == pytest.approx(expected.data_scale, rel=1e-4)
        for inputs in (made.test[0], made.ood["scaled"]):
            direct = laplace.predict(inputs)
            torch.testing.assert_close(kept.predict(inputs, found).mean, direct.mean, rtol=1e-3, atol=1e-5)
    # The inputs of a second validation set, and the test inputs, are not passed through the network again.
    laplace.model.register_forward_hook(lambda *_: pytest.fail("a pass through the network"))
    kept.predict(made.test[0], kept.tune(made.validation(30, 1)))


@pytest.mark.parametrize("name", ["quick_diabetes"])
def test_the_dual_form_of_the_full_evidence_is_the_full_one(name: str, tmp_path: Path) -> None:
    made = prepare(QUICK[name], 0, NOWHERE, tmp_path)
    nll = []
    for options in ({"structure": "full"}, {"structure": "subset", "subset_size": 150, "rank": None}):
        laplace = am.Laplace(made.model, "regression", **options).fit(made.train, progress=False)
        laplace.tune(method="evidence", per_layer=False)
        nll.append(-float(laplace.predict(made.test[0]).log_prob(made.test[1]).mean()))
    assert nll[0] == pytest.approx(nll[1], abs=1e-3)


def test_another_library_is_given_up_after_its_time() -> None:
    @methods._at_most(0.05, "laplace-torch")
    def forever() -> None:
        while True:
            pass

    with pytest.raises(methods.Skip, match=r"laplace-torch did not finish within 0\.05 s"):
        forever()
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_the_plan_measures_the_default_call_everywhere() -> None:
    for task in TASKS.values():
        for method in ("network", "fit", "fit_unlabelled"):
            plan = plan_of(task, method)
            assert plan.seeds == ((0,) if task.group == "image" else (0, 1, 2))
            assert plan.resplits >= 2
        assert all(bool(plan_of(task, m).seeds) == (not plan_of(task, m).reason) for m in methods.METHODS)


# A run.


def test_a_run_is_resumed_and_collected(
    tmp_path: Path, registered_structures: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "network,temperature,fit,identity,validation_noise,full_evidence,energy"
    chosen = ("--tasks", "quick_wine,quick_diabetes", "--methods", names, "--output", str(tmp_path))
    first = quick(tmp_path / "cache", *chosen)
    assert first["failed"] == {}
    assert set(first["tasks"]) == {"quick_wine", "quick_diabetes"}
    found = {(row["task"], row["method"], row["n"]) for row in first["rows"]}
    assert {("quick_wine", m, 30) for m in ("temperature", "fit", "identity")} <= found
    assert {("quick_diabetes", *rest) for rest in (("network", 0), ("fit", 30), ("full_evidence", 0))} <= found
    assert "With validation labels: development tasks" in capsys.readouterr().out

    def fail(*_: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(run, "_run_method", fail)
    again = quick(tmp_path / "cache", *chosen)
    stored = json.loads((tmp_path / "quality.json").read_text())
    assert again["rows"] == first["rows"] == stored["rows"]
    assert page_of(stored) == page_of(again)
    # Every row names its commit, and the page those that are not of the file's own.
    assert {row["commit"] for row in stored["rows"]} == {stored["commit"]}
    assert "measured at another commit (" not in page_of(stored)
    stored["rows"][0]["commit"] = "0ld"
    assert f"measured at another commit (0ld) on {stored['rows'][0]['task']}" in page_of(stored)


@pytest.mark.slow
def test_every_method_runs(tmp_path: Path, registered_structures: None) -> None:
    found = quick(tmp_path)
    assert found["failed"] == {}
    measured = {row["method"] for row in found["rows"]} | set(found["skipped"])
    assert measured == set(methods.METHODS)
    absent = {name for name, reasons in found["skipped"].items() if any("no baselines." in why for why in reasons)}
    assert not absent & {"network", "temperature", "fit", "fit_unlabelled", "grid", "identity", "ensemble"}


def test_rows_of_an_older_commit_are_kept_and_told_apart() -> None:
    columns = ["nll", "d"]

    def made(commit: str, task: str = "t", seed: int = 0, **rows: float) -> dict[str, Any]:
        listed = [
            {"task": task, "method": m, "n": 0, "seeds": [seed], "sets": [1], "values": [[v, v / 10]]}
            for m, v in rows.items()
        ]
        return {"commit": commit, "columns": columns, "rows": listed, "tasks": {task: {}}, "skipped": {}, "seeds": [0]}

    now = made("new", network=0.5, temperature=0.4)
    joined = carry_over(now, made("old", network=0.5, temperature=0.3, fit=0.2))
    assert [(row["method"], row.get("commit")) for row in joined["rows"]] == [
        ("network", None),
        ("temperature", None),
        ("fit", "old"),
    ]
    # A second time it is still the row of that commit.
    again = carry_over(now, {**joined, "commit": "later"})
    assert again["rows"][-1]["commit"] == "old"
    # Another network is another task, and so is one of another seed.
    assert carry_over(now, made("old", network=0.6, fit=0.2))["rows"] == now["rows"]
    assert carry_over(now, made("old", seed=1, network=0.5, fit=0.2))["rows"] == now["rows"]
    # A task that was not measured again is still there, with all that was known of it.
    other = made("old", task="u", seed=1, network=0.6, fit=0.2)
    other["skipped"] = {"ensemble": {"too dear": ["t", "u"]}}
    both = carry_over(now, other)
    assert set(both["tasks"]) == {"t", "u"}
    assert both["seeds"] == [0, 1]
    assert both["skipped"] == {"ensemble": {"too dear": ["u"]}}
    assert [(row["task"], row["method"], row.get("commit")) for row in both["rows"][2:]] == [
        ("u", "network", "old"),
        ("u", "fit", "old"),
    ]


def test_rows_from_before_seeds_were_kept_apart_are_of_all_their_seeds() -> None:
    now = {"commit": "new", "columns": ["nll", "d"], "rows": [], "tasks": {}, "skipped": {}, "seeds": []}
    one = {"task": "t", "method": "network", "n": 0, "sets": 1, "values": [0.5, 0.1], "d_by_seed": [0.1]}
    three = {"task": "t", "method": "fit", "n": 30, "sets": 15, "values": [0.5, 0.1], "d_by_seed": [0.1, 0.2, 0.0]}
    three["ood"] = {"far": {"entropy": 0.7}}
    found = carry_over(now, {**now, "commit": "old", "rows": [one, three], "tasks": {"t": {}}})["rows"]
    assert found[0] == {
        "task": "t",
        "method": "network",
        "n": 0,
        "seeds": [0],
        "sets": [1],
        "values": [[0.5, 0.1]],
        "commit": "old",
    }
    assert found[1]["seeds"] == [[0, 1, 2]]
    # The network of one of them is still recognised, and rows of that seed alone are kept beside new ones.
    network = {"task": "t", "method": "network", "n": 0, "sets": 3, "values": [0.5, 0.1], "d_by_seed": [0.2, 0.1, 0.0]}
    grid = {"task": "t", "method": "grid", "n": 30, "sets": 2, "values": [0.5, 0.1], "d_by_seed": [0.1]}
    old = {**now, "commit": "old", "rows": [network, grid, three], "tasks": {"t": {}}}
    for d, kept in ((0.2, ["grid"]), (0.1, [])):
        new = {"task": "t", "method": "network", "n": 0, "seeds": [0], "sets": [1], "values": [[0.4, d]]}
        joined = carry_over({**now, "rows": [new], "tasks": {"t": {}}}, old)
        assert [row["method"] for row in joined["rows"][1:]] == kept
    assert found[1]["ood"] == {"far": {"entropy": [0.7]}}


def test_methods_are_compared_under_the_same_seeds() -> None:
    found = content(one={"d": 0.0, "auroc": 0.7}, two={"d": 0.0, "auroc": 0.7})
    empty = [None] * (len(found["columns"]) - 2)
    base = {"task": "one", "n": 0, "commit": "0"}
    rows = [
        {
            "method": "network",
            "seeds": [0, 1, 2],
            "values": [[v, 0.0, *empty] for v in (0.5, 0.7, 0.9)],
            "sets": [1] * 3,
        },
        {
            "method": "fit_unlabelled",
            "seeds": [0, 2],
            "values": [[v, 0.1, *empty] for v in (0.4, 0.9)],
            "sets": [1] * 2,
        },
        {"method": "ensemble", "seeds": [0], "values": [[0.2, 0.1, *empty]], "sets": [1]},
        {"method": "laplace_torch", "seeds": [[0, 1, 2]], "values": [[0.6, 0.1, *empty]], "sets": [3]},
    ]
    results = Results({**found, "rows": [base | row for row in rows]})
    assert results.value("one", "network", 0, "nll") == pytest.approx(0.7)
    # A difference is one of pairs.
    assert results.over_network("one", "fit_unlabelled", 0, "nll") == pytest.approx(-0.05)
    assert results.over_network("one", "ensemble", 0, "nll") == pytest.approx(-0.3)
    assert results.over_network("one", "laplace_torch", 0, "nll") == pytest.approx(-0.1)
    # A table is one of the seeds that all its methods have.
    table = results.among("network", "fit_unlabelled", "ensemble", "laplace_torch")
    assert table.value("one", "network", 0, "nll") == pytest.approx(0.5)
    assert table.value("one", "fit_unlabelled", 0, "nll") == pytest.approx(0.4)
    assert table.row("one", "laplace_torch") is None


def test_numbers_of_another_commit_are_marked() -> None:
    found = content(one={"d": 0.0, "auroc": 0.7}, two={"d": 0.0, "auroc": 0.7})
    assert "am.fit with labels †" not in page_of(found)
    for row in found["rows"]:
        if row["task"] == "one" and row["method"] == "fit":
            row["commit"] = "0ld"
    page = page_of(found)
    before, after = page.split("## With validation labels: held-out tasks")
    assert "| am.fit with labels † |" in before.split("## With validation labels: development tasks")[1]
    assert "| am.fit with labels † |" not in after.split("\n## ")[0]
    assert "| one † |" in page
    target = next(line for line in page.splitlines() if line.startswith("| 30 labels, d: at most +0 on average"))
    assert target.endswith("| yes: +0.0 † | yes: +0.0 |")
    assert "measured at another commit (0ld) on one" in page


def test_a_failure_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ArithmeticError("no luck")

    broken = methods.Method("broken", methods.ALL, fail)
    monkeypatch.setitem(methods.METHODS, "network", broken)
    found = quick(tmp_path, "--tasks", "quick_wine", "--methods", "network")
    assert found["failed"] == {"quick_wine 0 network": "ArithmeticError: no luck"}
    assert "no luck" in page_of(found)


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="pass --data-dir, or set AFTERMAP_DATA"):
        run.main(["--tasks", "mnist2k_mlp", "--data-dir", str(tmp_path / "none"), "--cache", str(tmp_path)])
    with pytest.raises(SystemExit, match="t10k-images-idx3-ubyte.gz is not there"):
        run.main(["--tasks", "mnist2k_mlp", "--data-dir", str(tmp_path), "--cache", str(tmp_path)])
    with pytest.raises(SystemExit):
        run.main(["--tasks", "mnist", "--cache", str(tmp_path)])
    assert "unknown tasks mnist; there are mnist2k_mlp" in capsys.readouterr().err


def content(**values: dict[str, float]) -> dict[str, Any]:
    """Results with one task of each half, whose network has an NLL of .5 and whose default call has the given d."""
    facts = {
        "group": "table",
        "about": "",
        "likelihood": "classification",
        "overfitted": False,
        "parameters": 1,
        "train": 1,
        "pool": 1,
        "test": 1,
    }
    rows: list[dict[str, Any]] = []
    for name, numbers in values.items():
        rows.append(
            {
                "task": name,
                "method": "network",
                "n": 0,
                "seeds": [0],
                "sets": [1],
                "values": [[0.5, 0.0]],
                "ood": {"far": {"entropy": [0.5]}},
            }
        )
        for n in (30, 300, 1000):
            area = {"far": {"entropy": [numbers["auroc"]]}}
            fit = {"task": name, "method": "fit", "n": n, "seeds": [0], "sets": [3], "ood": area}
            rows.append(fit | {"values": [[0.5, numbers["d"]]]})
    tasks = {
        name: facts | {"part": part, "ood": {"far": 9}, "training_seconds": [1.0]}
        for name, part in zip(values, ("development", "held-out"), strict=True)
    }
    columns = [
        "nll",
        "d",
        "accuracy",
        "rmse",
        "ece",
        "error_auroc",
        "cover50",
        "cover90",
        "cover95",
        "seconds",
        "ms_per_input",
    ]
    for row in rows:
        row["values"][0] += [None] * (len(columns) - 2)
    return {"tasks": tasks, "rows": rows, "columns": columns, "commit": "0", "seeds": [0], "skipped": {}, "failed": {}}


def test_targets_are_judged_for_each_half() -> None:
    table = targets.targets_table(Results(content(one={"d": 0.0005, "auroc": 0.7}, two={"d": 0.006, "auroc": 0.4})))
    cells = {row[0]: row[1:] for row in table.rows}
    assert cells["300 and 1,000 labels, d: at most +1 on average"] == ("yes: +0.5", "**no**: +6.0")
    assert cells["300 and 1,000 labels, d: at most +5 everywhere"] == ("yes: +0.5 (one)", "**no**: +6.0 (two)")
    assert cells["30 labels, d: at most +0 on average"] == ("**no**: +0.5", "**no**: +6.0")
    assert cells["labels, OOD on tables: at least +10 on average"] == ("yes: +20.0", "**no**: −10.0")
    assert cells["labels, OOD: at least −5 everywhere"] == ("yes: +20.0 (one, far)", "**no**: −10.0 (two, far)")
    assert not any("regression" in words for words in cells)  # nothing was measured there


def test_tables_have_a_cell_for_every_column() -> None:
    found = tables_of(content(one={"d": 0.0, "auroc": 0.7}, two={"d": 0.0, "auroc": 0.7}))
    assert {t.title for t in found} >= {"The classifications", "With validation labels: held-out tasks"}
    for table in found:
        assert {len(row) for row in table.rows} == {len(table.header)}


def test_the_page_says_what_is_not_on_it() -> None:
    page = page_of(content(one={"d": 0.0, "auroc": 0.7}, two={"d": 0.0, "auroc": 0.7}))
    assert f"{len(TASKS)} of {len(TASKS)} tasks: mnist2k_mlp" in page
    assert "- temperature scaling: not run on any task" in page
    assert "- network: not run" not in page
    assert "3 to 3; with fewer than 5 it is noisy" in page


# The stored results.


def test_the_page_is_the_one_that_the_stored_results_give() -> None:
    stored = ROOT / "benchmarks" / "results" / "quality.json"
    assert stored.stat().st_size < 300_000
    assert (ROOT / "docs" / "quality.md").read_text(encoding="utf-8") == page_of(json.loads(stored.read_text()))
