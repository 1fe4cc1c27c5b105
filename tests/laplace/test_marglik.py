"""Training by evidence: linear models in closed form, modes, history, early stopping and bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from aftermap.errors import DataError, InputError, NumericalError, ShapeError, StatisticalWarning
from aftermap.laplace import marglik
from aftermap.laplace.marglik import train_by_evidence
from aftermap.likelihoods import Gaussian
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import classes, mlp, normal, regression, seeded

quiet = pytest.mark.filterwarnings("ignore:the network is not at a mode")


def linear_data(count: int = 30) -> tuple[Tensor, Tensor]:
    x = normal(count, 4, seed=1)
    return x, x @ normal(4, 1, seed=2) + 0.5 + 0.4 * normal(count, 1, seed=3)


def closed_form(x: Tensor, y: Tensor, precision: Tensor, noise: Tensor) -> Tensor:
    """log N(y; 0, σ² I + X Xᵀ/τ) with a column of ones."""
    features = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    cov = noise**2 * torch.eye(len(x), dtype=x.dtype) + features @ features.T / precision
    return -0.5 * (y[:, 0] @ torch.linalg.solve(cov, y[:, 0]) + torch.logdet(cov) + len(x) * math.log(2 * math.pi))


@pytest.mark.parametrize("structure", ["auto", "full"])
def test_a_linear_model_equals_the_closed_form(structure: str) -> None:
    x, y = linear_data()
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 1)))
    found = train_by_evidence(
        net, [(x, y)], "regression", epochs=600, lr=0.1, frequency=50, structure=structure, progress=False
    )
    (precision,) = found.best.precision.values()
    logs = torch.tensor([precision, found.best.noise], dtype=torch.float64).log().requires_grad_()
    value = closed_form(x, y, logs[0].exp(), logs[1].exp())
    assert found.log_evidence == pytest.approx(float(value.detach()), abs=1e-3)
    # And no other precision or noise has a larger evidence.
    (slope,) = torch.autograd.grad(value, logs)
    assert float(slope.abs().max()) < 0.05
    assert found.stationarity.stationary
    assert found.stationarity.gain < 1e-3
    assert float(found.laplace.log_evidence()) == pytest.approx(found.log_evidence, abs=1e-9)
    assert found.best.temperature == 1.0


@quiet
def test_modes_are_right() -> None:
    class Watched(nn.Linear):
        seen: list[bool]

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled() or not self.training:
                self.seen.append(self.training)
            return super().forward(x)

    def build() -> nn.Module:
        net = nn.Sequential(Watched(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 4))
        net[0].seen = []
        return net

    net = seeded(build)
    net.eval()
    batches = classes()
    before = net[1].running_mean.clone()
    found = train_by_evidence(net, batches, "classification", epochs=4, frequency=2, structure="kron", progress=False)
    assert found.model is net
    assert not any(m.training for m in net.modules())
    seen = net[0].seen
    assert seen[:4] == [True] * 4  # two epochs of two batches
    assert not any(seen[4 : seen.index(True, 4)])  # then the curvature
    assert sum(seen) == 8
    assert not torch.equal(net[1].running_mean, before)
    assert all(p.grad is None for p in net.parameters())


@quiet
def test_the_best_evidence_comes_back() -> None:
    found = train_by_evidence(
        mlp(1, 6, 1), regression(), "regression", epochs=60, lr=0.05, burn_in=15, frequency=10, progress=False
    )
    assert [r.epoch for r in found.history] == [20, 30, 40, 50, 60]
    assert len(found.losses) == 60
    assert found.best.log_evidence == max(r.log_evidence for r in found.history)
    # Weights, precisions and noise are those of the best record.
    assert float(found.laplace.log_evidence()) == pytest.approx(found.log_evidence, abs=1e-9)
    fitted = type(found.laplace)(
        found.model,
        Gaussian(found.best.noise),
        structure="low_rank",
        rank=19,
        prior_precision=dict(found.best.precision),
    ).fit(regression(), progress=False)
    assert float(fitted.log_evidence()) == pytest.approx(found.log_evidence, abs=1e-6)
    curves = found.curves
    assert set(curves) == {
        "epoch",
        "train_loss",
        "log_evidence",
        "effective_parameters",
        "temperature",
        "noise",
        "precision: 0",
        "precision: 2",
    }
    assert {len(v) for v in curves.values()} == {5}
    assert curves["epoch"][0] == 20.0
    assert found.laplace.predict(regression()[0][0]).mean.shape == (20, 1)


@quiet
def test_patience_ends_training() -> None:
    # Without learning the evidence never rises after the first looks settle.
    found = train_by_evidence(
        mlp(), classes(), "classification", epochs=200, lr=1e-12, frequency=1, patience=3, progress=False
    )
    assert len(found.history) == len(found.losses) < 20
    last = [r.log_evidence for r in found.history]
    assert max(last) - last[-4] < 2e-3


@quiet
def test_one_precision_for_all_and_fixed_noise() -> None:
    found = train_by_evidence(
        mlp(1, 6, 1), regression(), Gaussian(0.3), epochs=20, frequency=10, prior="scalar", noise=False, progress=False
    )
    assert len(set(found.best.precision.values())) == 1
    assert found.best.noise == 0.3
    classifier = train_by_evidence(mlp(), classes(), "classification", epochs=3, structure="kron", progress=False)
    assert classifier.best.noise is None
    assert "noise" not in classifier.curves


@quiet
def test_a_power_of_two_is_every_datum_twice() -> None:
    options = {"epochs": 30, "frequency": 10, "structure": "full", "progress": False}
    twice = [(x, y, torch.full((len(x),), 2.0, dtype=torch.float64)) for x, y in classes()]
    one = train_by_evidence(mlp(), twice, "classification", **options)
    two = train_by_evidence(mlp(), classes(), "classification", likelihood_power=2.0, **options)
    assert one.log_evidence == pytest.approx(two.log_evidence, rel=1e-9)
    torch.testing.assert_close(one.model[0].weight, two.model[0].weight)
    assert two.laplace.likelihood_weight == 2.0
    assert two.best.temperature == 0.5


@quiet
def test_an_optimiser_of_your_own() -> None:
    made = []

    def factory(parameters: object) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=0.3))  # type: ignore[arg-type]
        return made[0]

    found = train_by_evidence(mlp(), classes(), "classification", epochs=40, optimizer=factory, progress=False)
    assert len(made) == 1
    assert found.losses[-1] < 0.7 * found.losses[0]


def test_a_warning_away_from_a_mode() -> None:
    with pytest.warns(StatisticalWarning, match="not at a mode, so its evidence is not to be trusted"):
        found = train_by_evidence(mlp(), classes(), "classification", epochs=1, progress=False)
    assert not found.stationarity.stationary


def test_after_an_error_the_model_is_as_before() -> None:
    model = mlp(1, 6, 1)
    before = ModelSnapshot.of(model)
    with pytest.raises(NumericalError, match=r"training diverged. Lower lr="):
        train_by_evidence(
            model,
            regression(),
            "regression",
            epochs=50,
            optimizer=lambda p: torch.optim.SGD(p, lr=1e12),
            progress=False,
        )
    check_unchanged(model, before)
    classifier = mlp()
    before = ModelSnapshot.of(classifier)
    with pytest.raises((DataError, ShapeError)):
        train_by_evidence(classifier, [(normal(5, 3), torch.full((5,), 9))], "classification", epochs=2, progress=False)
    check_unchanged(classifier, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs=0 must be a whole number of at least 1"),
        ({"frequency": 1.5}, "frequency=1.5 must be a whole number"),
        ({"hyper_steps": -1}, "hyper_steps=-1 must be"),
        ({"patience": 0}, "patience=0 must be"),
        ({"burn_in": -1}, "burn_in=-1 must be a whole number of at least 0"),
        ({"lr": 0.0}, "lr=0.0 must be a positive and finite number"),
        ({"likelihood_power": math.inf}, "likelihood_power=inf must be a positive"),
        ({"prior_precision": -2.0}, "prior_precision=-2.0 must be a positive"),
        ({"prior": "horseshoe"}, "prior='horseshoe' is not known; allowed are 'layerwise', 'scalar'"),
        ({"structure": "krn"}, "structure='krn' is not known"),
    ],
)
def test_bad_numbers(options: dict[str, object], message: str) -> None:
    model = mlp()
    before = ModelSnapshot.of(model)
    with pytest.raises(InputError, match=message):
        train_by_evidence(model, classes(), "classification", progress=False, **{"epochs": 1, **options})  # type: ignore[arg-type]
    check_unchanged(model, before)


def test_bad_data() -> None:
    with pytest.raises(DataError, match="one-shot list_iterator, but training goes through it 500 times"):
        train_by_evidence(mlp(), iter(classes()), "classification", progress=False)
    with pytest.raises(DataError, match="the data are empty"):
        train_by_evidence(mlp(), [], "classification", progress=False)


@quiet
def test_an_epoch_is_a_step_down_the_mean_loss_with_the_prior_in_it() -> None:
    """Plain descent on (σ²/Σw) Σ w nll + ½ (σ² τ / (p N)) ‖θ‖², where N counts weights; a second batch starts where the first ended."""
    model = mlp(1, 3, 2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    x, y = normal(7, 1, seed=1), normal(7, 2, seed=2)
    weight = torch.linspace(0.5, 2.0, 7, dtype=torch.float64)
    data = [(x[:3], y[:3], weight[:3]), (x[3:], y[3:], weight[3:])]
    noise, power, precision, lr = 0.5, 1.7, 2.5, 0.05
    found = train_by_evidence(
        model, data, Gaussian(noise), epochs=1, lr=99.0, optimizer=lambda p: torch.optim.SGD(p, lr), structure="full",
        prior_precision=precision, likelihood_power=power, hyper_steps=1, progress=False,
    )  # fmt: skip
    expected = mlp(1, 3, 2)
    parameters = list(expected.parameters())
    total = 0.0
    for xs, ys, ws in data:
        losses = 0.5 * ((ys - expected(xs)) / noise).square().sum(1) + 2 * math.log(noise * math.sqrt(2 * math.pi))
        total += float((ws * losses).sum().detach())
        decay = sum(p.square().sum() for p in parameters)
        loss = noise**2 * ((ws * losses).sum() / ws.sum() + 0.5 * precision / (power * weight.sum()) * decay)
        slopes = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, slope in zip(parameters, slopes, strict=True):
                p -= lr * slope
    for name, p in expected.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), p.detach())
        assert not torch.equal(p, before[name])
    assert found.losses == [pytest.approx(total / float(weight.sum()))]
    assert found.best.temperature == pytest.approx(1 / power)
    assert found.best.effective_parameters == pytest.approx(
        sum(found.laplace.posterior.effective_parameters().values())
    )
    assert found.best.noise == pytest.approx(float(found.laplace.hyperparameters.noise))
    assert (found.best.epoch, len(found.history)) == (1, 1)


@quiet
@pytest.mark.parametrize(("inputs", "count", "structure"), [(2, 9, "full"), (3, 3, "low_rank"), (3, 4, "kron")])
def test_small_networks_and_few_data_have_the_exact_matrix(
    inputs: int, count: int, structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to twelve parameters here, or twelve data times outputs."""
    monkeypatch.setattr(marglik, "_SMALL", 12)
    x, y = normal(count, inputs, seed=1), torch.arange(count) % 4
    found = train_by_evidence(
        nn.Linear(inputs, 4).double(), [(x[:1], y[:1]), (x[1:], y[1:])], "classification", epochs=1, progress=False
    )
    assert found.laplace.structure == structure
    if structure == "low_rank":
        assert found.laplace.rank == 12
