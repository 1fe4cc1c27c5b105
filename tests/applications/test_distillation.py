"""Distillation: divergences against torch's own, students that can represent their teacher, and what is left untouched."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as td

from aftermap.applications import Distillation, distil, distillation_loss
from aftermap.baselines import Deterministic, Ensemble
from aftermap.errors import DataError, InputError, NumericalError, ShapeError, UnsupportedError
from aftermap.laplace import Laplace
from aftermap.likelihoods import HeteroscedasticGaussian
from aftermap.predictive import Prediction
from aftermap.testing import ModelSnapshot, check_predictor, check_unchanged
from tests.laplace.problems import classes, generator, mlp, normal, regression

LBFGS = functools.partial(
    torch.optim.LBFGS, max_iter=300, tolerance_grad=1e-10, tolerance_change=1e-15, line_search_fn="strong_wolfe"
)


def prediction(kind: str, *shape: int, seed: int = 1) -> Prediction:
    values = normal(*shape, seed=seed)
    mean = {"classification": values.softmax(-1), "binary": values.sigmoid(), "regression": values}[kind]
    parts = mean.abs() + 0.1
    return Prediction(kind, mean, parts, parts, 2 * parts)


def test_divergences_are_those_of_torch() -> None:
    teacher, outputs = prediction("classification", 6, 4), normal(6, 4, seed=2)
    wanted = td.kl_divergence(td.Categorical(probs=teacher.mean), td.Categorical(logits=outputs))
    torch.testing.assert_close(distillation_loss(teacher, outputs), wanted)
    teacher, outputs = prediction("binary", 6, 3), normal(6, 3, seed=2)
    wanted = td.kl_divergence(td.Bernoulli(probs=teacher.mean), td.Bernoulli(logits=outputs)).sum(1)
    torch.testing.assert_close(distillation_loss(teacher, outputs), wanted)
    teacher, outputs = prediction("regression", 6, 3), normal(6, 6, seed=2)
    student = td.Normal(outputs[:, :3], (0.5 * outputs[:, 3:]).exp())
    wanted = td.kl_divergence(td.Normal(teacher.mean, teacher.total.sqrt()), student).sum(1)
    torch.testing.assert_close(distillation_loss(teacher, outputs), wanted)


def test_positions_and_temperature() -> None:
    teacher, outputs = prediction("classification", 6, 5, 4), normal(6, 5, 4, seed=2)
    wanted = td.kl_divergence(td.Categorical(probs=teacher.mean), td.Categorical(logits=outputs)).sum(1)
    torch.testing.assert_close(distillation_loss(teacher, outputs), wanted)
    warm = td.kl_divergence(td.Categorical(logits=teacher.mean.log() / 3), td.Categorical(logits=outputs / 3))
    torch.testing.assert_close(distillation_loss(teacher, outputs, 3.0), 9 * warm.sum(1))
    for temperature in (0.5, 1.0, 4.0):  # the same optimum
        same = distillation_loss(teacher, teacher.mean.log() + 7, temperature)
        torch.testing.assert_close(same, torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-12)
    certain = Prediction("classification", torch.eye(3), *(torch.zeros(3) for _ in range(3)))
    outputs = torch.eye(3).mul(5).requires_grad_()
    loss = distillation_loss(certain, outputs)
    torch.testing.assert_close(loss, -outputs.log_softmax(-1).diagonal())
    assert bool(torch.autograd.grad(loss.sum(), outputs)[0].isfinite().all())


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_student_that_can_represent_its_teacher_becomes_it(temperature: float) -> None:
    teacher = Deterministic(mlp(3, 5, 4, seed=3)[2], "classification")  # a Linear
    x, fresh = normal(40, 5, seed=1), normal(9, 5, seed=2)
    student = nn.Linear(5, 4).double()
    found = distil(teacher, student, [x], epochs=3, optimizer=LBFGS, temperature=temperature, generator=generator())
    torch.testing.assert_close(found.student.predict(fresh).mean, teacher.predict(fresh).mean, rtol=1e-5, atol=1e-6)
    assert found.kl < 1e-10
    assert found.losses[-1] < found.losses[0]
    assert abs(found.entropy_difference) < 1e-6
    assert found.entropy_error < 1e-5


def test_a_heteroscedastic_student_learns_mean_and_total_variance() -> None:
    """The teacher's variance depends on x as exp(linear): a Linear student holds it, and adds nothing of its own."""
    net = nn.Linear(3, 4).double().eval()
    teacher = Deterministic(net, HeteroscedasticGaussian())
    student = nn.Linear(3, 4).double()
    x, fresh = normal(50, 3, seed=1), normal(7, 3, seed=2)
    found = distil(teacher, student, [x], epochs=3, optimizer=LBFGS)
    own, other = teacher.predict(fresh), found.student.predict(fresh)
    torch.testing.assert_close(other.mean, own.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other.total, own.total, rtol=1e-4, atol=1e-5)
    assert float(other.epistemic.abs().max()) == 0


def test_a_laplace_regression_becomes_one_network() -> None:
    """Total variance of a Laplace posterior, noise included; NLL and entropy within tolerance on fresh data."""
    data = regression()
    net = mlp(1, 8, 1, seed=2)
    optimiser = torch.optim.LBFGS(net.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = sum(((net(x) - y) ** 2).sum() for x, y in data) / 0.18 + 0.5 * sum(
            p.square().sum() for p in net.parameters()
        )
        loss.backward()
        return loss

    optimiser.step(closure)
    laplace = Laplace(net, "regression", structure="full").fit(data, progress=False).tune()
    before = ModelSnapshot.of(net)
    inputs = torch.linspace(-2.5, 2.5, 120, dtype=torch.float64)[:, None]
    student = mlp(1, 16, 2, seed=5)
    test = regression(count=200, seed=11)
    found = distil(laplace, student, [inputs], epochs=2, optimizer=LBFGS, test=test, generator=generator())
    check_unchanged(net, before)
    assert found.keeps(nll=0.02, entropy=0.02)
    assert found.nll == pytest.approx(-float(torch.cat([laplace.predict(x).log_prob(y) for x, y in test]).mean()))
    assert found.kl < 0.01
    check_predictor(found.student, inputs[:5])


def test_binary_and_ensemble() -> None:
    nets = [mlp(3, 5, 2, seed=s) for s in range(4)]
    teacher = Ensemble(nets, "binary")
    student = mlp(3, 12, 2, seed=9)
    x = normal(100, 3, seed=1)
    y = (normal(100, 2, seed=3) > 0).double()
    found = distil(teacher, student, [(x, y)], epochs=1, optimizer=LBFGS, test=[(x, y)])
    assert found.kl < 1e-3
    assert found.keeps(nll=0.01, entropy=0.01)


def test_minibatches_are_repeatable_and_modes_come_back() -> None:
    laplace = Laplace(mlp(), "classification").fit(classes(), progress=False)
    batches = [x for x, _ in classes()]

    def run(seed: int) -> tuple[Distillation, nn.Module]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            student = nn.Sequential(nn.Linear(3, 7), nn.Dropout(0.2), nn.Tanh(), nn.Linear(7, 4)).double()
        student[0].eval()
        state = torch.random.get_rng_state()
        found = distil(laplace, student, batches, epochs=3, generator=generator(seed))
        assert torch.equal(state, torch.random.get_rng_state())
        return found, student

    first, student = run(1)
    again, _ = run(1)
    assert first.losses == again.losses != run(2)[0].losses
    assert [m.training for m in student] == [False, True, True, True]
    assert student.training
    assert all(p.grad is None for p in student.parameters())
    assert first.nll is None
    with pytest.raises(InputError, match="pass labelled data"):
        _ = first.nll_difference


def test_inputs_of_several_tensors() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 4)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.linear(torch.cat([a, b], 1))

    teacher, student = Deterministic(Two().double()), Two().double()
    batches = [({"a": normal(9, 2, seed=k), "b": normal(9, 3, seed=k + 5)}, torch.zeros(9)) for k in range(3)]
    found = distil(teacher, student, batches, epochs=30, optimizer=lambda p: torch.optim.Adam(p, lr=0.05))
    assert found.losses[-1] < 0.2 * found.losses[0]


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"student": nn.Linear(3, 5).double()}, ShapeError, r"shape \[10, 5\], but the teacher needs \[10, 4\]"),
        ({"student": "net"}, InputError, "needs a torch.nn.Module"),
        ({"teacher": nn.Linear(3, 4)}, InputError, r"baselines.Deterministic\(model\)"),
        ({"teacher": Deterministic(nn.Linear(3, 4).double(), "counts")}, UnsupportedError, "'counts' cannot be distilled"),
        ({"teacher": Deterministic(nn.Linear(3, 4).double(), "regression")}, ShapeError, "a mean and a log-variance"),
        ({"teacher": Deterministic(nn.Linear(3, 4).double(), "regression"), "temperature": 2.0}, InputError, "leave it at 1"),
        ({"temperature": 0.0}, InputError, "temperature=0.0 must be a positive"),
        ({"epochs": 0}, InputError, "epochs=0 must be a whole number of at least 1"),
        ({"inputs": []}, DataError, "empty"),
        ({"inputs": torch.ones(3, 3)}, DataError, r"pass \[x\]"),
        ({"inputs": [torch.full((3, 3), torch.nan, dtype=torch.float64)]}, DataError, "not finite"),
        ({"optimizer": "adam"}, InputError, "optimizer must be a torch optimizer"),
        ({"test": [(torch.ones(3, 3, dtype=torch.float64), None)]}, DataError, "no tensor of targets"),
        ({"student": nn.Linear(3, 4).double().requires_grad_(False)}, InputError, "no parameters to train"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=1e308), "epochs": 5}, NumericalError, "smaller learning rate"),
    ],
)  # fmt: skip
def test_bad_input(changes: dict, error: type, message: str) -> None:
    changes = dict(changes)
    teacher = changes.pop("teacher", Deterministic(nn.Linear(3, 4).double()))
    student = changes.pop("student", nn.Linear(3, 4).double())
    inputs = changes.pop("inputs", [normal(10, 3)])
    with pytest.raises(error, match=message):
        distil(teacher, student, inputs, **changes)
