"""The measures that the experiment on VOGN makes for itself, against cases with a known answer."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from aftermap import metrics
from experiments.framework import ROOT, Results
from experiments.osawa2019 import toy
from experiments.osawa2019.settings import BUDGETS, TRIALS
from experiments.osawa2019.training import Batches, at_entropy, network
from experiments.osawa2019.verdicts import epochs_to, ranking, ratios, verdicts


def test_the_boundary_of_a_plane_is_its_line() -> None:
    line = torch.linspace(-2, 2, 17, dtype=torch.float64)
    x, y = torch.meshgrid(line, line, indexing="ij")
    points = toy.boundary(2 * x - y + 0.3, line)
    assert len(points) > 20
    torch.testing.assert_close(2 * points[:, 0] - points[:, 1], torch.full_like(points[:, 0], -0.3))


def test_two_parallel_boundaries_are_as_far_apart_as_they_are() -> None:
    line = torch.linspace(-2, 2, 41, dtype=torch.float64)
    x, _ = torch.meshgrid(line, line, indexing="ij")
    first, second = (toy.boundary(x - place, line) for place in (0.11, 0.36))
    assert toy._apart(first, second, torch.zeros(1, 2, dtype=torch.float64)) == pytest.approx(0.25, abs=0.02)
    assert toy._apart(first, second, torch.full((1, 2), 9.0, dtype=torch.float64)) == 2 * toy.REACH


@pytest.mark.parametrize("wanted", [0.4, 1.15, 2.0])
def test_predictions_are_tempered_to_an_entropy(wanted: float) -> None:
    p = torch.randn(200, 10, generator=torch.Generator().manual_seed(0)).mul(3).softmax(1)
    power = at_entropy(p, wanted)
    tempered = (power * p.double().log()).softmax(1)
    assert float(metrics.entropy(tempered).mean()) == pytest.approx(wanted, abs=1e-6)


def test_augmented_images_are_shifted_and_reflected_and_nothing_else() -> None:
    rows, columns = torch.meshgrid(torch.arange(1.0, 33), torch.arange(1.0, 33), indexing="ij")
    x = torch.stack([rows, columns, torch.ones(32, 32)]).expand(64, 3, 32, 32).contiguous()
    y = torch.arange(64)
    generator = torch.Generator().manual_seed(0)
    shifts, reflected = set(), set()
    for images, labels in Batches(x, y, 32, generator, augmented=True):
        assert images.shape == (32, 3, 32, 32)
        assert len(set(labels.tolist())) == 32
        for image in images:
            inside = image[2] == 1
            assert 28 * 28 <= int(inside.sum()) <= 32 * 32
            row = torch.arange(32.0)[:, None].expand(32, 32)
            down = (image[0] - row)[inside]
            assert torch.equal(down, down[:1].expand_as(down))
            step = (image[1][:, 1:] - image[1][:, :-1])[inside[:, 1:] & inside[:, :-1]]
            assert torch.equal(step, step[:1].expand_as(step))
            shifts.add(float(down[0]))
            reflected.add(float(step[0]))
    assert reflected == {-1.0, 1.0}
    assert shifts <= {float(k) for k in range(-3, 6)}
    assert len(shifts) == 9


def test_a_network_without_normalisation_has_none() -> None:
    def norms(net: torch.nn.Module) -> int:
        return sum(isinstance(m, torch.nn.BatchNorm2d) for m in net.modules())

    assert norms(network("residual")) == 6
    assert norms(network("residual", norm=False)) == 0
    assert network("residual", norm=False)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_methods_have_as_many_trials_or_none() -> None:
    for part in BUDGETS["stated"].all_pictures():
        assert set(TRIALS[part.network]) == set(part.methods)
    assert {name: {len(trials) for trials in methods.values()} for name, methods in TRIALS.items()} == {
        "lenet": {2},
        "large": {1, 2},
        "wide": {2},
        "residual": {2},
        "continual": {3},
    }


def test_a_setting_without_a_trial_is_the_one_that_was_chosen_with_fewer_images() -> None:
    values = json.loads((ROOT / "experiments" / "osawa2019" / "results.json").read_text(encoding="utf-8"))["values"]
    taken = {method: trials[0] for method, trials in TRIALS["large"].items() if len(trials) == 1}
    assert taken == {method: values[f"lenet/tune_{method}"]["settings"] for method in taken}
    assert set(TRIALS["large"]) - set(taken) == {"adam", "vogn"}


def test_ranks_count_ties_and_epochs_count_from_one() -> None:
    settings = BUDGETS["small"]
    settings = replace(settings, large=replace(settings.large, methods=("adam", "bbb", "dropout", "vogn")))

    def row(nll: float, ece: float, auroc: float, *accuracies: float) -> dict[str, object]:
        return {"nll": nll, "ece": ece, "auroc": auroc, "epochs": [{"accuracy": a} for a in accuracies]}

    values = {
        "large/adam/seed0": row(1.0, 0.1, 0.8),
        "large/bbb/seed0": row(1.2, 0.01, 0.7),
        "large/dropout/seed0": row(1.1, 0.02, 0.9),
        "large/vogn/seed0": row(1.0009, 0.05, 0.85),
    }
    for network_name in ("wide", "residual"):
        for method in ("adam", "dropout", "vogn"):
            values[f"{network_name}/{method}/seed0"] = row(1.0, 0.1, 0.8, 0.1, 0.45, 0.5)
    values["residual/no_norm/seed0"] = row(1.0, 0.1, 0.8, 0.1, 0.2, 0.3)
    results = Results(values, settings)
    found = ranking(results, "large")
    assert [found["LeNet-5", n] for n in ("nll", "ece", "auroc")] == [1, 3, 2]
    assert {found[r, n] for r in ("wide", "residual") for n in ("nll", "ece", "auroc")} == {1}
    assert epochs_to(results, "vogn") == [2.0]
    assert epochs_to(results, "no_norm") == [4.0]


@pytest.mark.parametrize(("reached", "verdict"), [(0.5, "holds"), (0.3, "holds in part")])
def test_an_accuracy_that_is_never_reached_is_not_reached_sooner(reached: float, verdict: str) -> None:
    small = BUDGETS["small"]
    settings = replace(small, lenet=replace(small.lenet, seeds=3), large=replace(small.large, seeds=3))
    values = {}
    for name, seed in itertools.product(("large", "lenet"), range(3)):
        first, last = {"seconds": 1.0, "accuracy": 0.2}, {"seconds": 2.0, "accuracy": reached}
        values[f"{name}/vogn/seed{seed}"] = {"accuracy": 0.5, "nll": 1.0, "deviation": 0.1, "epochs": [first, last]}
        slow = [{"seconds": 9.0, "accuracy": 0.4}]
        values[f"{name}/bbb/seed{seed}"] = {"accuracy": 0.4, "nll": 1.2, "deviation": 0.01, "epochs": slow}
    found = {v.id: v for v in verdicts(Results(values, settings))}["V4"]
    assert found.verdict == verdict
    assert ("never with 3 of 3" in found.ours) == (reached < 0.4)


def test_costs_are_medians_of_rounds() -> None:
    values = {
        "cost/lenet/seed0": {"adam": [1.0, 2.0, 1.0], "vogn_6": [4.0, 8.0, 100.0], "draws": 6},
        "cost/lenet/seed1": {"adam": [1.0, 1.0, 1.0], "vogn_6": [5.0, 5.0, 5.0], "draws": 6},
    }
    assert ratios(Results(values), "lenet") == {"adam": [1.0, 1.0], "vogn_6": [4.0, 5.0]}
