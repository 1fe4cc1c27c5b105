"""Selection by evidence: closed forms of linear models, Occam's razor on networks, and the table."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from aftermap.errors import DataError, InputError, StatisticalWarning
from aftermap.laplace.selection import Ranking, select
from tests.laplace.problems import generator, normal

quiet = pytest.mark.filterwarnings("ignore:.*candidates are not at a mode")


class Polynomial(nn.Module):
    """A linear model of powers of its input."""

    def __init__(self, degree: int):
        super().__init__()
        self.degree, self.out = degree, nn.Linear(degree, 1).double()

    def features(self, x: Tensor) -> Tensor:
        return torch.cat([x**k for k in range(1, self.degree + 1)], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.features(x))


def cubic(count: int = 40, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    x = 2 * torch.rand(count, 1, generator=generator(seed), dtype=torch.float64) - 1
    return [(x, x - 2 * x**3 + 0.1 * normal(count, 1, seed=seed + 1))]


def best_evidence(degree: int) -> float:
    """max over τ and σ of log N(y; 0, σ²I + ΦΦᵀ/τ), by L-BFGS."""
    x, y = cubic()[0]
    phi = torch.cat([Polynomial(degree).features(x), torch.ones_like(x)], 1)
    logs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([logs], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        cov = (2 * logs[1]).exp() * torch.eye(len(x), dtype=x.dtype) + phi @ phi.T * (-logs[0]).exp()
        value = 0.5 * (y[:, 0] @ torch.linalg.solve(cov, y[:, 0]) + torch.logdet(cov) + len(x) * math.log(2 * math.pi))
        optimiser.zero_grad()
        value.backward()
        return value

    optimiser.step(loss)
    return -float(loss().detach())


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    factories = {f"degree {d}": (lambda d=d: Polynomial(d)) for d in (1, 3, 6)}
    return select(
        factories,
        cubic(),
        "regression",
        test=cubic(200, seed=7),
        generator=generator(),
        epochs=800,
        lr=0.1,
        frequency=100,
        progress=False,
    )


@quiet
def test_linear_models_are_ranked_as_in_closed_form(ranking: Ranking) -> None:
    truth = {f"degree {d}": best_evidence(d) for d in (1, 3, 6)}
    assert ranking.names == sorted(truth, key=lambda n: -truth[n])
    assert ranking.names[-1] == "degree 1"
    for name, value in ranking.evidences.items():
        assert value == pytest.approx(truth[name], abs=0.3)


def test_what_a_ranking_tells(ranking: Ranking) -> None:
    assert len(ranking) == 3
    assert ranking["degree 1"].n_params == 2
    assert sum(ranking.probabilities.values()) == pytest.approx(1.0)
    assert next(iter(ranking.probabilities)) == ranking.best.name
    assert ranking["degree 1"].test_log_likelihood < ranking.best.test_log_likelihood
    lines = str(ranking).splitlines()
    assert len(lines) == 4
    assert lines[0].split()[:3] == ["model", "log", "evidence"]
    assert "test log-lik." in lines[0]
    assert lines[1].startswith(ranking.best.name)
    assert [row["name"] for row in ranking.table] == ranking.names
    assert ranking.table[0]["difference"] == 0.0
    prediction = ranking.best.training.laplace.predict(cubic()[0][0])
    assert prediction.mean.shape == (40, 1)
    with pytest.raises(InputError, match="there is no candidate 'degree 2'; there are 'degree"):
        ranking["degree 2"]


def tanh(depth: int, width: int = 30) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(1, width), nn.Tanh()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 1)).double()


def slides(count: int = 120, seed: int = 0, gap: bool = True) -> list[tuple[Tensor, Tensor]]:
    """y = x sin 6x + 0.1 ε on [−1, 1] without (−.25, .35)."""
    x = 2 * torch.rand(count, 1, generator=generator(seed), dtype=torch.float64) - 1
    if gap:
        x = x[(x[:, 0] < -0.25) | (x[:, 0] > 0.35)]
    return [(x, x * torch.sin(6 * x) + 0.1 * normal(len(x), 1, seed=seed + 1))]


@quiet
def test_occams_razor_small() -> None:
    """A straight line is too simple, a network of one hidden layer is right; the test data agree."""
    found = select(
        {"line": lambda: nn.Linear(1, 1).double(), "one hidden layer": lambda: tanh(1, 10)},
        slides(70),
        "regression",
        test=slides(150, seed=5),
        generator=generator(3),
        epochs=600,
        lr=0.03,
        frequency=100,
        progress=False,
    )
    assert found.names == ["one hidden layer", "line"]
    assert found.best.test_log_likelihood > found["line"].test_log_likelihood
    assert found.best.training.best.noise < 0.2 < 0.3 < found["line"].training.best.noise


@pytest.mark.slow
@quiet
def test_the_slides_one_five_and_twenty_layers() -> None:
    found = select(
        {str(depth): (lambda depth=depth: tanh(depth)) for depth in (1, 5, 20)},
        slides(),
        "regression",
        test=slides(500, seed=9),
        generator=generator(0),
        restarts=2,
        epochs=4800,
        lr=1e-2,
        frequency=400,
        progress=False,
    )
    assert found.names == ["1", "5", "20"]
    assert found["5"].log_evidence - found["20"].log_evidence > 20
    # The test data agree, up to the tie of one and five.
    test = {c.name: c.test_log_likelihood for c in found.candidates}
    assert test["20"] < min(test["1"], test["5"]) - 0.3
    assert found["1"].training.best.noise == pytest.approx(0.1, rel=0.3)


@quiet
def test_restarts_keep_the_best_and_a_generator_makes_it_repeatable() -> None:
    options = {"epochs": 60, "lr": 0.05, "frequency": 20, "restarts": 2, "progress": False}
    state = torch.random.get_rng_state()
    one = select({"a": lambda: tanh(1, 4)}, slides(40), "regression", generator=generator(1), **options)
    two = select({"a": lambda: tanh(1, 4)}, slides(40), "regression", generator=generator(1), **options)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert one.best.restarts == two.best.restarts
    assert len(set(one.best.restarts)) == 2
    assert one.best.log_evidence == max(one.best.restarts)


def test_one_warning_for_all_that_are_not_at_a_mode() -> None:
    with pytest.warns(StatisticalWarning, match="2 of 2 candidates are not at a mode") as seen:
        found = select(
            {"a": lambda: tanh(1, 4), "b": lambda: tanh(1, 5)},
            slides(40),
            "regression",
            generator=generator(2),
            epochs=3,
            lr=1e-3,
            progress=False,
        )
    assert len([w for w in seen if issubclass(w.category, StatisticalWarning)]) == 1
    assert not found.best.stationary
    assert "test log-lik." not in str(found)


def test_bad_input() -> None:
    data = cubic()
    with pytest.raises(InputError, match="select needs candidates"):
        select({}, data, "regression")
    with pytest.raises(InputError, match="the candidate 'a' is a Linear; pass a function that makes a fresh network"):
        select({"a": nn.Linear(1, 1)}, data, "regression")
    with pytest.raises(InputError, match="the candidate 'a' made a int; it must make an nn.Module"):
        select({"a": lambda: 3}, data, "regression")  # type: ignore[dict-item,return-value]
    with pytest.raises(InputError, match="restarts=0 must be a whole number"):
        select({"a": lambda: Polynomial(1)}, data, "regression", restarts=0)
    with pytest.raises(DataError, match="one-shot iterator"):
        select({"a": lambda: Polynomial(1)}, iter(data), "regression")
