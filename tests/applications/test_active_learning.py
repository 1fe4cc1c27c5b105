"""The loop over a pool: what it asks for, that it never asks twice, and that it learns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from aftermap.applications import History, JointInformation, active_learning
from aftermap.baselines import Deterministic
from aftermap.errors import DataError, InputError, ShapeError, UnsupportedError
from aftermap.laplace import Laplace
from aftermap.likelihoods import Gaussian
from tests.laplace.problems import generator, normal, trained

NOISE, PRIOR = 0.3, 0.7


class Conjugate:
    """Bayesian linear regression through Laplace: the posterior mean in closed form."""

    def __call__(self, x: Tensor, y: Tensor, generator: torch.Generator | None) -> Laplace:
        features = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
        precision = features.T @ features / NOISE**2 + PRIOR * torch.eye(features.shape[1], dtype=torch.float64)
        mean = torch.linalg.solve(precision, features.T @ y[:, 0] / NOISE**2)
        net = nn.Linear(x.shape[1], 1).double().eval()
        with torch.no_grad():
            net.weight.copy_(mean[None, :-1])
            net.bias.copy_(mean[-1:])
        laplace = Laplace(net, Gaussian(NOISE), structure="full", prior_precision=PRIOR)
        return laplace.fit([(x, y)], progress=False)


class Logistic:
    """Multinomial logistic regression at its mode."""

    def __call__(self, x: Tensor, y: Tensor, generator: torch.Generator | None) -> Laplace:
        net = nn.Linear(x.shape[1], 3).double().eval()
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
        trained(net, [(x, y)], lambda f, t: nn.functional.cross_entropy(f, t, reduction="sum"), decay=PRIOR, steps=50)
        return Laplace(net, "classification", structure="full", prior_precision=PRIOR).fit([(x, y)], progress=False)


def line(count: int = 30) -> tuple[Tensor, Tensor]:
    x = normal(count, 2, seed=3)
    return x, x @ normal(2, 1, seed=4) + NOISE * normal(count, 1, seed=5)


def clusters(count: int = 120) -> tuple[Tensor, Tensor]:
    y = torch.arange(count) % 3
    centres = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]], dtype=torch.float64)
    return centres[y] + normal(count, 2, seed=6), y


@pytest.mark.parametrize("acquisition", ["mutual_information", "variance", "entropy", "expected_information_gain"])
def test_each_round_takes_the_inputs_of_largest_variance(acquisition: str) -> None:
    """Of a linear model all four order the pool alike: by xᵀ P⁻¹ x. Followed by hand, round by round."""
    x, y = line()
    found = active_learning(
        x, y, Conjugate(), acquisition=acquisition, batch=2, budget=9, initial=[4, 7, 1], test=[(x, y)]
    )
    assert found.labels == (3, 5, 7, 9)
    features = torch.cat([x, torch.ones(30, 1, dtype=torch.float64)], 1)
    known = [4, 7, 1]
    while len(known) < 9:
        seen = features[known]
        precision = seen.T @ seen / NOISE**2 + PRIOR * torch.eye(3, dtype=torch.float64)
        spread = (features @ torch.linalg.inv(precision) * features).sum(1)
        spread[known] = -1
        known += spread.argsort(descending=True)[:2].tolist()
    assert found.indices.tolist() == known
    prediction = Conjugate()(x[known], y[known], None).predict(x)
    assert found.metrics["rmse"][-1] == pytest.approx(float((prediction.mean - y).square().mean().sqrt()))
    assert found.metrics["nll"][-1] == pytest.approx(-float(prediction.log_prob(y).mean()))


def test_joint_batches_of_a_linear_model() -> None:
    """A batch of three is what one by one would have chosen: labels of a Gaussian do not move its variances."""
    x, y = line()
    together = active_learning(
        x, y, Conjugate(), acquisition=JointInformation(30), batch=3, budget=9, initial=[4, 7, 1], test=[(x, y)]
    )
    alone = active_learning(
        x, y, Conjugate(), acquisition="expected_information_gain", batch=1, budget=9, initial=[4, 7, 1], test=[(x, y)]
    )
    assert together.indices.tolist() == alone.indices.tolist()
    assert together.acquisition == "JointInformation"


@pytest.mark.parametrize("acquisition", ["mutual_information", "random", JointInformation(20)])
def test_classes(acquisition: object) -> None:
    x, y = clusters()
    asked: list[int] = []

    def oracle(index: Tensor) -> Tensor:
        asked.extend(index.tolist())
        return y[index]

    run = lambda: active_learning(  # noqa: E731
        x,
        oracle,
        Logistic(),
        acquisition=acquisition,
        batch=7,
        budget=30,
        initial=6,
        test=[(x, y)],
        generator=generator(1),
    )
    found = run()
    assert found.labels == (6, 13, 20, 27, 30)
    assert asked == found.indices.tolist()
    assert len(set(asked)) == 30
    assert found.accuracy[-1] > 0.9
    assert found.labels_to(2.0) is None
    assert found.labels_to(0.0) == 6
    asked.clear()
    assert run().indices.tolist() == found.indices.tolist()  # the same generator, the same questions


def test_own_function_and_mappings() -> None:
    """The pool as a mapping of tensors; an acquisition of one's own."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.linear(inputs)

    x, y = line()

    def fit(inputs: dict[str, Tensor], targets: Tensor, generator: torch.Generator | None) -> Deterministic:
        assert set(inputs) == {"inputs"}
        return Deterministic(Named().double(), "regression")

    found = active_learning(
        {"inputs": x},
        y,
        fit,
        acquisition=lambda prediction, generator: torch.arange(len(prediction), dtype=torch.float64),
        batch=2,
        budget=4,
        initial=[0, 1],
        test=[({"inputs": x}, y)],
    )
    assert found.indices.tolist() == [0, 1, 29, 28]


def test_history() -> None:
    found = History("random", (5, 10, 15), torch.arange(15), {"accuracy": (0.5, 0.9, 0.8), "nll": (3.0, 1.0, 0.5)})
    assert found.labels_to(0.85) == 10
    assert found.labels_to(0.7, "nll") == 15
    assert found.to_dict()["indices"] == list(range(15))
    with pytest.raises(InputError, match="no metric 'rmse'; it has 'accuracy', 'nll'"):
        found.labels_to(0.7, "rmse")


def run(**changes: object) -> History:
    x, y = line()
    options = {"batch": 2, "budget": 6, "initial": 2, "test": [(x, y)]}
    return active_learning(x, changes.pop("oracle", y), changes.pop("fit", Conjugate()), **{**options, **changes})


class TwiceTheSame:
    def select(self, predictor: object, inputs: object, count: int, generator: object) -> Tensor:
        return torch.zeros(count, dtype=torch.long)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"acquisition": "bald"}, InputError, "acquisition='bald' is not known"),
        ({"acquisition": TwiceTheSame()}, InputError, "must give 2 different positions below 28"),
        ({"acquisition": JointInformation(), "fit": lambda x, y, g: Deterministic(nn.Linear(2, 1).double(), "regression")},
         UnsupportedError, "Deterministic has none"),
        ({"acquisition": lambda p, g: p.mean}, ShapeError, r"gave shape \[28, 1\] for 28 inputs"),
        ({"budget": 31}, InputError, "must lie between 2 and 30"),
        ({"budget": 1}, InputError, "also the 2 initial ones"),
        ({"batch": 0}, InputError, "batch=0 must be a whole number of at least 1"),
        ({"initial": 0}, InputError, "initial=0 must lie between 1"),
        ({"initial": [1, 1]}, InputError, "initial holds an index twice"),
        ({"initial": [1, 30]}, InputError, "indices from 1 to 30, the pool has 30"),
        ({"initial": [0.5]}, InputError, "initial must be a number of labels, or indices"),
        ({"oracle": torch.ones(7)}, ShapeError, r"shape \[7\], but the pool has 30"),
        ({"oracle": lambda i: torch.ones(1)}, DataError, r"asked for 2 labels, and gave shape \[1\]"),
        ({"oracle": "labels"}, InputError, "got str"),
        ({"fit": lambda x, y, g: nn.Linear(2, 1)}, InputError, r"baselines.Deterministic\(model\)"),
    ],
)  # fmt: skip
def test_bad_input(changes: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        run(**changes)
