"""The cost estimate: sizes that follow from the shapes, an order that makes sense, words that people read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aftermap.curvature import fit_curvature
from aftermap.curvature.structures.base import STRUCTURES
from aftermap.laplace import Cost, Laplace, estimate_cost, estimate_costs, rehearsal
from aftermap.laplace import cost as cost_module
from aftermap.laplace.cost import describe_costs
from aftermap.likelihoods import Categorical
from aftermap.linalg import DenseWork
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import classes, mlp, new_classes, normal, seeded, trained, untrained


def by_name(model: nn.Module, data: object) -> dict[tuple[str, str], Cost]:
    return {(c.structure, c.params): c for c in estimate_costs(model, data, Categorical())}  # type: ignore[arg-type]


def test_bytes_hold_the_factors_and_not_much_more() -> None:
    model = mlp(3, 40, 4)
    costs = by_name(model, classes())
    for structure in ("kron", "diagonal", "full"):
        factors = fit_curvature(model, classes(), "classification", structure=structure, progress=False)
        held = sum(t.numel() * t.element_size() for b in factors.blocks for t in b.tensors().values())
        assert held <= costs[structure, "all"].bytes <= 6 * held
        assert costs[structure, "all"].n_params == factors.n_params


def test_the_order_of_costs() -> None:
    costs = by_name(mlp(3, 300, 4), classes())
    assert costs["diagonal", "all"].bytes < costs["kron", "all"].bytes < costs["full", "all"].bytes
    assert costs["kron", "all"].seconds < costs["full", "all"].seconds
    assert costs["kron", "last_layer"].n_params == 300 * 4 + 4
    assert all(c.seconds > 0 for c in costs.values())


@pytest.mark.parametrize("which", ["all", "last_layer"])
def test_the_formulas_for_a_network_that_is_worked_out_by_hand(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token network 4 -> 8 -> 2 without biases: 5 inputs of 3 tokens make 15 · (32 + 16) = 720 multiplications on the way forward.

    Every vector takes as many on the way back, or those of the last layer alone. Half of AᵀA and GᵀG is computed.
    """
    monkeypatch.setattr(cost_module, "_unit", lambda *_: 3.0)  # seconds, a third of them on the way forward
    monkeypatch.setattr(cost_module, "dense_seconds", lambda work: 0.0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False)).double().eval()
    data = [(normal(5, 3, 4), torch.zeros(5, 3, dtype=torch.int64))] * 20
    look = cost_module.FirstLook.at(model, data, None)
    found = {
        c.structure: c for c in cost_module.shape_costs(model, look, Categorical(), subset_size=10) if c.params == which
    }
    vectors = Categorical().columns(2) * 3
    if which == "all":
        back, shared, inner, outer, size = 720, 720, 15 * (16 + 64), 15 * (64 + 4), 48
    else:
        back, shared, inner, outer, size = 15 * 16, 15 * 16, 15 * 64, 15 * 4, 16
    wanted = {
        "kron": (720 + vectors * back + inner / 2 + vectors * outer / 2, inner + 6 * outer),
        "ekfac": (2 * 720 + 3 * vectors * back + inner / 2 + vectors * outer / 2, inner + 6 * outer),
        "diagonal": (720 + 2 * vectors * back, 0),
        "full": (720 + 2 * vectors * back + vectors * 5 * size**2, 5 * 6 * size**2),
        "subset": (720 + 2 * vectors * back * 10 / 100, 5 * 6 * size * min(10 * vectors, size)),
    }
    assert set(found) == (set(wanted) if which == "all" else {"kron"})
    for structure, cost in found.items():
        of_fit, contracted = wanted[structure]
        assert cost.seconds == pytest.approx(20 * of_fit / 720), structure
        of_prediction = 720 + 6 * (back + shared) + contracted
        assert cost.seconds_per_prediction == pytest.approx(of_prediction / 720 / 5), structure
        assert (cost.n_params, cost.n_data, cost.n_rows) == (size, 100, 600)


def test_dense_work_is_measured_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of two matrices of the measured width takes a quarter of a second here, a decomposition of any width as well."""
    clock = Clock()
    clock.step = 0.25
    monkeypatch.setattr(rehearsal, "time", clock)
    for measured in (rehearsal._products_per_second, rehearsal._decomposition_costs):
        measured.cache_clear()
    try:
        width = rehearsal._LARGE_MATRIX
        assert rehearsal.dense_seconds(DenseWork(10 * width**3)) == pytest.approx(10 * 0.25)
        small = rehearsal._SMALL_MATRIX
        assert rehearsal.dense_seconds(DenseWork(0.0, (small, small))) == pytest.approx(2 * 0.25)
        assert rehearsal.dense_seconds(DenseWork()) == 0
    finally:
        for measured in (rehearsal._products_per_second, rehearsal._decomposition_costs):
            measured.cache_clear()


def test_time_grows_with_the_number_of_batches() -> None:
    model, (x, y) = mlp(3, 64, 4), classes()[0]
    one, many = (by_name(model, [(x, y)] * n)["diagonal", "all"].seconds for n in (1, 1000))
    assert many > 50 * one


def test_the_model_is_unchanged() -> None:
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 2, groups=1), nn.BatchNorm2d(3), nn.ReLU(True), nn.Flatten(), nn.Linear(18, 4)
        )
    )
    model[0].weight.requires_grad_(False)
    before = ModelSnapshot.of(model)
    costs = by_name(model, [(normal(5, 2, 3, 4), torch.arange(5) % 4)])
    check_unchanged(model, before)
    assert costs["kron", "all"].n_params == sum(p.numel() for p in model.parameters()) - model[0].weight.numel()


@pytest.mark.parametrize(
    ("seconds", "size", "words"),
    [
        (0.2, 3e6, "about 1 s and 3 MB"),
        (75.0, 5e9, "about 75 s and 4.7 GB"),
        (600.0, 2**20, "about 10 min and 1 MB"),
        (20_000.0, 2**31, "about 5.6 h and 2.0 GB"),
    ],
)
def test_words(seconds: float, size: float, words: str) -> None:
    cost = Cost("kron", "all", 61_706, seconds, size)
    assert str(cost) == f"kron, 61,706 parameters: {words}"
    other = Cost("kron", "last_layer", 85, 1.0, 2**20)
    assert str(other).startswith("kron of the last layer, 85 parameters")
    assert describe_costs(cost, [cost, other]).endswith("(alternatives: kron last_layer 1 s 1 MB)")


class Clock:
    """Stands for the module `time` in the rehearsal: its clock goes on only when a network is called."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step = 0.0  # what passes between two looks at the clock

    def perf_counter(self) -> float:
        self.now += self.step
        return self.now


class Slow(nn.Module):
    """A network whose forward pass takes a thousandth of a second, and as much more for every example."""

    def __init__(self, net: nn.Module, clock: Clock):
        super().__init__()
        self.net, self.clock = net, clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += 1e-3 + 1e-3 * len(x)
        return self.net(x)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal", "full", "subset"])
@pytest.mark.parametrize("seconds", [0.0, 1e6])
def test_the_estimate_is_what_the_fit_takes(structure: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whole batches where there is time for them, and otherwise by a line through smaller pieces."""
    clock = Clock()
    monkeypatch.setattr(rehearsal, "time", clock)
    monkeypatch.setattr(rehearsal, "dense_seconds", lambda work: 0.0)
    monkeypatch.setattr(rehearsal, "_LEAST", seconds)
    monkeypatch.setattr(rehearsal, "_SHARE", 1e-9)
    model = Slow(mlp(), clock).eval()
    data = [classes()[1]] * 50
    laplace = Laplace(model, "classification", structure=structure, subset_size=30)
    estimate = estimate_cost(laplace, data, tuned=False)
    start = clock.now
    laplace.fit(data, progress=False)
    assert estimate.seconds == pytest.approx(clock.now - start, rel=0.05)
    assert estimate.n_data == 2000
    start = clock.now
    laplace.predict(data[0][0])
    assert estimate.seconds_per_prediction == pytest.approx((clock.now - start) / 40, rel=0.4)


class Recurrent(nn.Module):
    """A gated recurrent layer, for which there is no rule, and a head on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(3, 4, batch_first=True)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


@pytest.mark.parametrize(("model", "rehearsed"), [(mlp(), False), (Recurrent().double().eval(), True)])
def test_a_short_fit_is_rehearsed_where_shapes_say_nothing(
    model: nn.Module, rehearsed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Cost("kron", "all", 1, 100.0, 1.0)
    monkeypatch.setattr(cost_module, "_by_rehearsal", lambda *_: found)
    x, y = classes()[0]
    data = [(x[:, None].expand(-1, 5, -1) if rehearsed else x, y)]
    look = cost_module.FirstLook.at(model, data, None)
    shapes = Cost("kron", "all", 1, 0.01, 1.0)
    cost = cost_module.rehearsed_cost(Laplace(model, "classification"), look, shapes)
    assert cost is (found if rehearsed else shapes)


def test_what_goes_before_every_pass_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanczos iterations pass often over the data: the two single examples that go before each pass stand for nothing."""
    clock = Clock()
    monkeypatch.setattr(rehearsal, "time", clock)
    monkeypatch.setattr(rehearsal, "_LEAST", 1e6)
    monkeypatch.setattr(rehearsal, "_MOST", 1e6)
    x, y = classes()[1]
    data = [(x[:4], y[:4])] * 3
    laplace = Laplace(Slow(mlp(), clock).eval(), "classification", structure="low_rank", rank=5)
    estimate = estimate_cost(laplace, data, tuned=False)
    start = clock.now
    laplace.fit(data, progress=False, generator=torch.Generator().manual_seed(0))
    assert estimate.seconds == pytest.approx(clock.now - start, rel=0.2)


def test_the_search_for_the_effective_dimension_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(rehearsal, "time", clock)
    monkeypatch.setattr(rehearsal, "_LEAST", 1e6)
    monkeypatch.setattr(rehearsal, "_MOST", 1e6)
    model = Slow(trained(mlp(), classes(), nn.CrossEntropyLoss(reduction="sum")), clock).eval()
    x, y = (torch.cat(parts) for parts in zip(*[classes()[1]] * 10, strict=True))
    data = [(x[:200], y[:200]), (x[200:], y[200:])]
    laplace = Laplace(model, "classification")
    estimate = estimate_cost(laplace, data)
    laplace.fit(data, progress=False)
    start = clock.now
    laplace.tune()
    assert estimate.seconds_of_tuning == pytest.approx(clock.now - start, rel=0.5)


def test_the_time_in_which_batches_come_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in (rehearsal, cost_module):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(rehearsal, "dense_seconds", lambda work: 0.0)
    monkeypatch.setattr(rehearsal, "_LEAST", 1e6)
    monkeypatch.setattr(rehearsal, "_MOST", 1e6)

    class Disk(list):  # type: ignore[type-arg]
        """Batches that take half a second each to come."""

        def __iter__(self):  # type: ignore[no-untyped-def]
            for batch in super().__iter__():
                clock.now += 0.5
                yield batch

    data = Disk([classes()[1]] * 20)
    laplace = Laplace(Slow(mlp(), clock).eval(), "classification", structure="diagonal")
    estimate = estimate_cost(laplace, data, tuned=False)
    start = clock.now
    laplace.fit(data, progress=False)
    assert estimate.seconds == pytest.approx(clock.now - start, rel=0.1)


@untrained
@pytest.mark.parametrize("validation", [None, 40])
def test_the_tuning_is_rehearsed(validation: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(rehearsal, "time", clock)
    monkeypatch.setattr(rehearsal, "_LEAST", 1e6)
    monkeypatch.setattr(rehearsal, "_MOST", 1e6)
    data = [classes()[1]] * 3
    laplace = Laplace(Slow(mlp(), clock).eval(), "classification", structure="full")
    estimate = estimate_cost(laplace, data, validation=validation)
    laplace.fit(data, progress=False)
    start = clock.now
    laplace.tune(None if validation is None else [new_classes(40)[0]])
    assert estimate.seconds_of_tuning == pytest.approx(clock.now - start, rel=0.5)
    after = estimate.seconds_of_tuning + 10 * estimate.seconds_per_prediction
    assert estimate.total(10) == pytest.approx(estimate.seconds + after)


def test_large_decompositions_are_counted_and_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(rehearsal, "decomposition_seconds", lambda widths: found.extend(widths) or 1000.0 * len(widths))
    cost = estimate_cost(Laplace(mlp(3, 130, 4), "classification"), classes(), tuned=False)
    assert set(found) == {130, 131}  # outputs of the first layer, inputs of the second with the bias
    assert 2000 <= cost.seconds < 2100


@pytest.mark.parametrize("structure", sorted(set(STRUCTURES) - {"hessian"}))  # that of few data need not be positive
def test_every_structure_is_rehearsed_and_nothing_is_changed(structure: str) -> None:
    model = trained(mlp(), classes(), nn.CrossEntropyLoss(reduction="sum"))
    before, state = ModelSnapshot.of(model), torch.get_rng_state()
    laplace = Laplace(model, "classification", structure=structure, rank=3)
    cost = estimate_cost(laplace, classes(), tuned=structure != "matrix_free", validation=40)
    check_unchanged(model, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert laplace._fitted is None
    assert (cost.structure, cost.n_params, cost.n_data) == (structure, 44, 60)
    assert cost.seconds > 0
    assert cost.seconds_per_prediction > 0
    assert cost.bytes > 0
