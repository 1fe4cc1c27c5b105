"""The grid over data scale and precision: its numbers, its random draws, its edges and its honesty."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aftermap.batches import Batch
from aftermap.errors import DataError, InputError, NumericalError, StatisticalWarning
from aftermap.laplace import GridResult, Laplace
from aftermap.laplace import grid as module
from aftermap.likelihoods import Gaussian
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import classes, generator, mlp, normal, regression, trained

PRECISIONS, SCALES = [0.1, 1.0, 10.0, 100.0], [0.1, 1.0, 10.0, 100.0]
edges = pytest.mark.filterwarnings("ignore:the best point lies at the edge")


def fitted(structure: str = "kron", **options: object) -> Laplace:
    model = trained(mlp(), classes(), nn.CrossEntropyLoss(reduction="sum"), decay=0.1, steps=40)
    return Laplace(model, "classification", structure=structure, **options).fit(
        classes(), generator=generator(), progress=False
    )


def held_out(count: int = 45) -> list[tuple[Tensor, Tensor]]:
    x, y = (torch.cat(t) for t in zip(*classes(60 + count), strict=True))
    return [(x[60:80], y[60:80]), (x[80:], y[80:])]


def nll(laplace: Laplace, data: list[tuple[Tensor, Tensor]], **options: object) -> float:
    # Without a generator linearised predictions use the draws that they are tuned with.
    sampling = options.get("kind") == "sampling"
    found = [
        laplace.predict(x, generator=generator(0) if sampling else None, **options).log_prob(y)  # type: ignore[arg-type]
        for x, y in data
    ]
    return -float(torch.cat(found).mean())


@edges
@pytest.mark.parametrize("structure", ["kron", "diagonal", "full", "low_rank"])
@pytest.mark.parametrize("kind", ["linearised", "sampling"])
def test_every_number_of_the_table_is_that_of_a_posterior_set_by_hand(structure: str, kind: str) -> None:
    laplace = fitted(structure, temperature=1.5)
    data = held_out()
    laplace.tune(data, kind=kind, samples=20, precisions=PRECISIONS, scales=SCALES)
    result = laplace.tuning
    assert isinstance(result, GridResult)
    assert result.n_data == 45
    assert len(result.table) == 16
    for scale, precision, value in result.table[::5]:
        # Nothing is carried over from one grid point to the next: each is what it is alone.
        alone = fitted(structure, temperature=1.5, data_scale=scale, prior_precision=precision)
        assert value == pytest.approx(nll(alone, data, kind=kind, samples=20), rel=1e-6)
    assert result.nll == min(v for _, _, v in result.table)
    assert nll(laplace, data, kind=kind, samples=20) == pytest.approx(result.nll, rel=1e-6)
    assert laplace.data_scale == result.data_scale
    assert {float(v) for v in laplace.prior_precision.values()} == {result.precision}


def test_a_planted_optimum_is_found() -> None:
    """Validation targets drawn from the predictive of one grid point: the best point is that one or a neighbour."""
    net = nn.Linear(4, 1).double().eval()
    x = normal(3, 4, seed=1)  # fewer data than weights: the prior matters
    laplace = Laplace(net, Gaussian(0.5), prior_precision=10.0).fit([(x, normal(3, 1, seed=2))], progress=False)
    held = 1.5 * normal(4000, 4, seed=3)
    found = laplace.predict(held)
    drawn = found.mean + found.total.sqrt() * normal(4000, 1, seed=4)
    ratios = [10.0 ** (k / 2) for k in range(-2, 7)]
    laplace.tune([(held, drawn)], noise=False, precisions=ratios, scales=[0.25, 0.5, 1.0, 2.0, 4.0])
    assert laplace.data_scale == 1.0
    (precision,) = laplace.prior_precision.values()
    assert float(precision) == pytest.approx(10.0)


@edges
@pytest.mark.parametrize("kind", ["linearised", "sampling"])
def test_common_random_numbers(kind: str) -> None:
    one, two = fitted(), fitted()
    for laplace in (one, two):
        laplace.tune(
            held_out(), kind=kind, link="mc" if kind == "linearised" else "auto", samples=9, precisions=[1, 10]
        )
    assert one.tuning.table == two.tuning.table
    state = torch.get_rng_state()
    fitted().tune(held_out(), kind=kind, samples=9, precisions=[1, 10])
    assert torch.equal(state, torch.get_rng_state())


@edges
def test_the_default_grid_is_in_two_stages_and_never_worse_than_the_network() -> None:
    laplace = fitted()
    data = held_out()
    plain = -float(torch.cat([laplace.predictor.map_prediction(x).log_prob(y) for x, y in data]).mean())
    before = ModelSnapshot.of(laplace.model)
    laplace.tune(data, method="grid")
    check_unchanged(laplace.model, before)
    assert laplace.tuning.nll <= plain + 1e-3
    assert nll(laplace, data) == pytest.approx(laplace.tuning.nll, rel=1e-6)


def test_the_edge_of_the_grid_is_told() -> None:
    laplace = fitted()
    wrong = [(x, laplace.model(x).argmin(1)) for x, _ in held_out()]
    with pytest.warns(StatisticalWarning, match=r"best point lies at the edge of the grid \(precision ratio 1\)"):
        laplace.tune(wrong, precisions=[1.0, 10.0, 100.0], scales=[1.0])
    with pytest.warns(StatisticalWarning, match=r"edge of the grid \(data scale 1\)"):
        laplace.tune(wrong, precisions=[1.0], scales=[1.0, 10.0, 100.0])


def test_the_edge_of_the_default_grid_is_told() -> None:
    """Labels that contradict a confident network: the widest posterior is the best."""
    laplace = fitted()
    wrong = [(3 * x, (laplace.model(x).argmin(1))) for x, _ in held_out()]
    with pytest.warns(StatisticalWarning, match="edge of the grid"):
        laplace.tune(wrong, method="grid")


@edges
def test_noise_of_a_regression_is_fitted_too() -> None:
    data = regression(noise=0.3)
    model = trained(mlp(1, 6, 1), data, lambda f, y: 0.5 * ((y - f) / 0.3).square().sum())
    laplace = Laplace(model, "regression").fit(data, progress=False)
    laplace.tune(regression(noise=0.3, seed=14), precisions=[0.1, 1, 10])
    assert float(laplace.hyperparameters.noise) == pytest.approx(0.3, rel=0.25)
    kept = Laplace(model, Gaussian(0.9)).fit(data, progress=False)
    kept.tune(regression(noise=0.3, seed=14), precisions=[0.1, 1, 10], noise=False)
    assert float(kept.hyperparameters.noise) == 0.9


@edges
def test_factored_damping_is_tuned_with_its_noise() -> None:
    data = regression(noise=0.3)
    model = trained(mlp(1, 6, 1), data, lambda f, y: 0.5 * ((y - f) / 0.3).square().sum())
    laplace = Laplace(model, "regression", damping="factored").fit(data, progress=False)
    laplace.tune(regression(noise=0.3, seed=14), precisions=[0.1, 1, 10])
    assert float(laplace.hyperparameters.noise) == pytest.approx(0.3, rel=0.25)


def test_a_failed_tuning_of_a_regression_keeps_its_noise() -> None:
    laplace = Laplace(mlp(1, 6, 1), Gaussian(0.9)).fit(regression(), progress=False)
    before = laplace.predict(regression()[0][0]).total
    with pytest.raises(DataError, match="data are empty"):
        laplace.tune([])
    assert float(laplace.hyperparameters.noise) == 0.9
    torch.testing.assert_close(laplace.predict(regression()[0][0]).total, before, rtol=0, atol=0)


def test_the_score_of_a_regression_depends_on_the_prior() -> None:
    data = regression(noise=0.3)
    laplace = Laplace(mlp(1, 6, 1), Gaussian(0.3)).fit(data, progress=False)
    held_out = [(x + 0.1, y) for x, y in data]
    laplace.tune(held_out, precisions=[0.1, 10.0], scales=[1.0], noise=False)
    values = [v for _, _, v in laplace.tuning.table]
    assert abs(values[0] - values[1]) > 1e-4


def test_bad_grids_and_data() -> None:
    laplace = fitted()
    with pytest.raises(InputError, match=r"precisions=\[0.0, 1.0\] must be some positive and finite numbers"):
        laplace.tune(held_out(), precisions=[0.0, 1.0])
    with pytest.raises(InputError, match=r"scales=\[\] must be some positive"):
        laplace.tune(held_out(), scales=[])
    with pytest.raises(InputError, match="kind='mc' is not known; allowed are 'linearised', 'sampling'"):
        laplace.tune(held_out(), kind="mc")
    with pytest.raises(InputError, match="kind='margin' is not known; allowed are 'linearised', 'sampling'"):
        laplace.tune(held_out(), kind="margin")
    with pytest.raises(InputError, match="needs validation data"):
        laplace.tune(method="validation")
    with pytest.raises(DataError, match="data are empty"):
        laplace.tune([])
    with pytest.raises(InputError, match="link"):
        laplace.tune(held_out(), link="softmax")


def test_a_failed_tuning_leaves_the_posterior_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    laplace, data = fitted(), held_out()
    before, scale = laplace.predict(data[0][0]).latent_cov, laplace.data_scale
    monkeypatch.setattr(module, "_linearised", lambda *a: torch.full((2, 1), math.inf, dtype=torch.float64))
    with pytest.raises(NumericalError, match="not finite at any of 2 grid points"):
        laplace.tune(data, precisions=[1.0, 2.0], scales=[3.0])
    torch.testing.assert_close(laplace.predict(data[0][0]).latent_cov, before, rtol=0, atol=0)
    assert laplace.data_scale == scale
    assert laplace.tuning is None


def test_a_grid_point_that_is_not_finite_is_never_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    laplace = fitted()
    table = torch.tensor([[math.nan, -math.inf], [3.0, 2.0]], dtype=torch.float64)
    monkeypatch.setattr(module, "_linearised", lambda *a: table)
    laplace.tune(held_out(), precisions=[1.0, 2.0], scales=[1.0, 5.0])
    assert (laplace.tuning.data_scale, laplace.tuning.precision) == (5.0, 10.0)


@pytest.mark.parametrize(("ratio", "scale"), [(1.3, 0.6), (-3.4, 2.2), (-2.0, -0.9)])
def test_two_stages_come_as_near_as_the_steps_of_the_second(
    ratio: float, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bowl over the logarithms of ratio and data scale: the first stage looks at some of the data, the second at all."""
    seen = []

    def stage(_: Any, validation: Any, base: float, ratios: list[float], cs: list[float], *__: Any) -> GridResult:
        table = [(c, r * c, (math.log10(r) - ratio) ** 2 + (math.log10(c) - scale) ** 2) for r in ratios for c in cs]
        seen.append(sum(b.size for b in validation))
        return GridResult(*min(table, key=lambda row: row[2]), table, seen[-1])

    monkeypatch.setattr(module, "_stage", stage)
    batches = [Batch(torch.zeros(200, 1), torch.zeros(200), None, 200) for _ in range(5)]
    found = module.search_grid(None, batches, 1.0)  # type: ignore[arg-type]
    assert seen == [600, 1000]  # five hundred, in whole batches
    assert abs(math.log10(found.precision / found.data_scale) - ratio) <= 0.125 + 1e-9
    assert abs(math.log10(found.data_scale) - scale) <= 0.125 + 1e-9
    only = module.search_grid(None, batches, 1.0, scales=[3.0, 30.0])  # type: ignore[arg-type]
    assert only.data_scale in (3.0, 30.0)
    assert abs(math.log10(only.precision / only.data_scale) - ratio) <= 0.125 + 1e-9
    assert {row[0] for row in only.table} == {3.0, 30.0}


def on_grid(*nlls: float) -> GridResult:
    """A result with these losses at data scales 1, 2, 3, …"""
    table = [(float(c), 1.0, nll) for c, nll in enumerate(nlls, 1)]
    scale, precision, least = min(table, key=lambda row: row[2])
    return GridResult(scale, precision, least, table, 9)


@pytest.mark.parametrize("nll", [0.0, 3.0, 1000.0, -1000.0])
def test_a_grid_is_flat_where_losses_differ_by_rounding_of_their_size(nll: float) -> None:
    """A billionth of 1 + |loss|, whatever the sign of the loss, of which one point alone cannot say anything."""
    rounding = 1e-9 * (1 + abs(nll))
    assert module._is_flat(on_grid(nll, nll))
    assert module._is_flat(on_grid(nll + 0.4 * rounding, nll, nll + 0.5 * rounding))
    assert not module._is_flat(on_grid(nll, nll + 0.5 * rounding, nll + 2 * rounding))
    assert not module._is_flat(on_grid(nll))


def test_the_edge_of_a_grid_is_its_first_and_last_point() -> None:
    def said(scale: float, precision: float, scales: list[float], least: float = 0.5, most: float = 8.0) -> list[str]:
        result = GridResult(scale, precision, 1.0, [], 9)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module._warn_at_edge(result, scales, (least, most))
        return [str(w.message).partition("(")[2].partition(")")[0] for w in caught]

    scales = [4.0, 1.0, 2.0]
    assert said(2.0, 2.0 * 2.0, scales) == []
    assert said(1.0, 2.0, scales) == ["data scale 1"]
    assert said(4.0, 8.0, scales) == ["data scale 4"]
    assert said(2.0, 2.0 * 0.5, scales) == ["precision ratio 0.5"]
    assert said(2.0, 2.0 * 8.0, scales) == ["precision ratio 8"]
    assert said(1.0, 0.5, scales) == ["data scale 1, precision ratio 0.5"]
    assert said(2.0, 2.0 * 7.9, scales) == said(2.0, 2.0 * 0.51, scales) == []
    assert said(1.0, 2.0, [1.0, 4.0]) == []  # Of two points each is an edge.
    # The ratio is computed, and may have been rounded to the inner side of the edge.
    assert said(2.0, 2.0 * math.nextafter(0.1, 1), scales, least=0.1) == ["precision ratio 0.1"]
    assert said(2.0, 2.0 * math.nextafter(0.3, 0), scales, most=0.3) == ["precision ratio 0.3"]
