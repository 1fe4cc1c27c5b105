"""Bad input: what was got, what is allowed, how to fix it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftermap.errors import AftermapError, InputError, NumericalWarning, StatisticalWarning, UnsupportedError
from aftermap.optim import IVON, KFAC, OGN, VOGN, NoisyKFAC, Schedule
from tests.optim.problems import classifier

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"n_data": None}, "n_data is missing"),
    ({"n_data": 0}, "n_data=0 must be a positive and finite number. It is the number of training data.*n_data=len"),
    ({"n_data": -3}, "It is the number of training data"),
    ({"n_data": float("nan")}, "It is the number of training data"),
    ({"n_data": "many"}, "It is the number of training data"),
    ({"temperature": 0.0}, "temperature=0.0 must be a positive and finite number"),
    ({"temperature": -1}, "temperature=-1 must be"),
    ({"temperature": "hot"}, "or a schedule such as"),
    ({"prior_precision": -1.0}, "prior_precision=-1.0 must be a finite number of at least 0"),
    ({"prior_precision": float("inf")}, "prior_precision=inf must be a finite number"),
    ({"damping": -1e-3}, "damping=-0.001 must be"),
    ({"prior_precision": 0.0, "damping": 0.0}, "are both 0"),
    ({"prior_mean": float("nan")}, "prior_mean=nan must be a finite number"),
    ({"lr": -1.0}, "lr=-1.0 must be"),
    ({"momentum": 1.0}, "momentum=1.0 must be a finite number of at least 0 and below 1"),
    ({"new_curvature_weight": 0.0}, "new_curvature_weight=0.0 must be a finite number above 0 and of at most 1"),
    ({"new_curvature_weight": 1.5}, "at most 1"),
    ({"mc_samples": 0}, "mc_samples=0 must be a whole number of at least 1"),
    ({"augmentation": 0.0}, "augmentation=0.0 must be a positive and finite number"),
    ({"curvature": "hessian"}, "curvature='hessian' is not known; allowed are 'squares', 'ggn'"),
    ({"curvature": "ggn"}, "needs likelihood="),
    ({"curvature": "reparametrised"}, "needs initial_curvature="),
    ({"reduction": "none"}, "reduction='none' is not known; allowed are 'mean', 'sum'"),
    ({"form": "paper"}, "form='paper' is not known"),
    ({"momentum_form": "nesterov"}, "momentum_form='nesterov' is not known"),
    ({"batch_norm": "frozen"}, "batch_norm='frozen' is not known"),
    ({"initial_curvature": -1.0}, "initial_curvature=-1.0 must be"),
    ({"max_grad_norm": 0.0}, "max_grad_norm=0.0 must be"),
    ({"sample_groups": 2}, "sample_groups=2 does not divide the 1 processes"),
    ({"params": []}, "params is empty"),
    ({"likelihood": "softmax", "curvature": "ggn"}, "likelihood is 'softmax'"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options(options: dict[str, Any], message: str) -> None:
    net, _, _ = classifier()
    with pytest.raises(InputError, match=message):
        VOGN(net, **{"n_data": 11, **options})


@pytest.mark.parametrize("preset", [VOGN, OGN, KFAC, NoisyKFAC])
def test_parameters_instead_of_a_model(preset: Callable[..., Any]) -> None:
    net, _, _ = classifier()
    with pytest.raises(InputError, match="needs the model itself.*got generator"):
        preset(net.parameters(), n_data=11)


@pytest.mark.parametrize("preset", [VOGN, OGN, IVON, KFAC, NoisyKFAC])
def test_n_data_is_needed_by_all(preset: Callable[..., Any]) -> None:
    net, _, _ = classifier()
    with pytest.raises(InputError, match="n_data=len"):
        preset(net)


def test_a_batch_larger_than_the_data() -> None:
    net, x, y = classifier()
    opt = VOGN(net, n_data=10)
    with pytest.raises(InputError, match="holds 11 examples, but n_data=10"):
        opt.step(lambda: F.cross_entropy(net(x), y))


CLOSURES: list[tuple[Callable[[nn.Module, Tensor, Tensor], Any], str]] = [
    (lambda net, x, y: None, "returned NoneType, which holds no loss"),
    (lambda net, x, y: F.cross_entropy(net(x), y).item(), "returned float"),
    (lambda net, x, y: {"output": net(x)}, "returned dict"),
    (lambda net, x, y: F.cross_entropy(net(x), y, reduction="none"), "loss has shape .11,.; reduce it"),
    (lambda net, x, y: F.cross_entropy(net(x), y).detach(), "does not depend on any parameter"),
    (lambda net, x, y: torch.zeros((), dtype=torch.float64, requires_grad=True) * 2, "did not call the model"),
]


@pytest.mark.parametrize(("closure", "message"), CLOSURES)
def test_closures(closure: Callable[[nn.Module, Tensor, Tensor], Any], message: str) -> None:
    net, x, y = classifier()
    opt = VOGN(net, n_data=11)
    before = net[0].weight.detach().clone()
    with pytest.raises(InputError, match=message):
        opt.step(lambda: closure(net, x, y))
    assert torch.equal(net[0].weight, before)
    assert opt.steps == 0


def test_step_without_anything() -> None:
    net, _, _ = classifier()
    with pytest.raises(InputError, match="step.. without a closure uses what was collected"):
        VOGN(net, n_data=11).step()


def test_step_inside_a_block() -> None:
    net, x, y = classifier()
    opt = VOGN(net, n_data=11)
    with opt.sampled_params(train=False), pytest.raises(InputError, match="inside sampled_params"):
        opt.step(lambda: F.cross_entropy(net(x), y))
    assert opt.steps == 0


def test_ggn_needs_the_graph() -> None:
    net, x, y = classifier()
    opt = VOGN(net, n_data=11, curvature="ggn", likelihood="classification")

    def closure() -> Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    with pytest.raises(UnsupportedError, match="return the loss without calling backward"):
        opt.step(closure)
    assert opt.steps == 0


def test_ogn_cannot_reparametrise() -> None:
    net, _, _ = classifier()
    with pytest.raises(InputError, match="OGN draws no weights"):
        OGN(net, n_data=11, curvature="reparametrised")


def test_infinite_gradients_with_a_finite_loss_are_skipped() -> None:
    net, x, y = classifier()
    opt = VOGN(net, lr=0.1, n_data=11)
    opt.step(lambda: F.cross_entropy(net(x), y))
    before = net[2].bias.detach().clone()
    with pytest.warns(NumericalWarning, match="a step was skipped") as seen:
        opt.step(lambda: (net(x) * 0).abs().sqrt().mean())
    assert seen[0].filename == __file__
    assert torch.equal(net[2].bias, before)
    assert opt.skipped_steps == 1


@pytest.mark.parametrize("preset", [VOGN, OGN, IVON, KFAC, NoisyKFAC])
@pytest.mark.parametrize("own_backward", [True, False])
def test_gradients_from_outside_the_closure_are_reported_once(preset: Callable[..., Any], own_backward: bool) -> None:
    nets, opts = [], []
    for _ in range(2):
        net, x, y = classifier()
        nets.append(net)
        opts.append(preset(net, lr=0.01, n_data=11))

    def closure(net: nn.Module) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        if own_backward:
            loss.backward()
        return loss

    (nets[0](x) ** 2).sum().backward()
    left = [p.grad.clone() for p in nets[0].parameters() if p.grad is not None]
    with pytest.warns(StatisticalWarning, match=r"does not use the gradients .* of 4 parameters .0.weight") as seen:
        opts[0].step(lambda: closure(nets[0]))
    assert len(seen) == 1
    assert seen[0].filename == __file__
    for _ in range(2):  # warnings are errors
        opts[0].step(lambda: closure(nets[0]))
    for _ in range(3):
        opts[1].step(lambda: closure(nets[1]))
    torch.testing.assert_close(list(nets[0].parameters()), list(nets[1].parameters()), rtol=0, atol=0)
    torch.testing.assert_close([p.grad for p in nets[0].parameters()], left, rtol=0, atol=0)


def test_gradients_that_the_user_clears_are_not_reported() -> None:
    net, x, y = classifier()
    opt = VOGN(net, lr=0.01, n_data=11)
    (net(x) ** 2).sum().backward()

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    opt.step(closure)  # warnings are errors
    opt.zero_grad(set_to_none=False)
    opt.step(lambda: F.cross_entropy(net(x), y))
    assert opt.steps == 2


@pytest.mark.parametrize("preset", [VOGN, IVON, KFAC])
def test_a_batch_left_out_on_request(preset: Callable[..., Any]) -> None:
    net, x, y = classifier()
    opt = preset(net, lr=0.01, n_data=11)
    opt.step(lambda: F.cross_entropy(net(x), y))
    before = [p.detach().clone() for p in net.parameters()]
    opt.skip_without_loss = True

    def without_a_loss() -> None:
        net(x)

    assert opt.step(without_a_loss) is None
    assert (opt.steps, opt.skipped_steps) == (1, 1)
    torch.testing.assert_close(list(net.parameters()), before, rtol=0, atol=0)
    with pytest.raises(InputError, match="returned NoneType"):  # the loss was there, and is missing
        opt.step(lambda: F.cross_entropy(net(x), y).backward())
    torch.testing.assert_close(list(net.parameters()), before, rtol=0, atol=0)


PRIORS: list[tuple[str, Tensor, str]] = [
    ("nothing", torch.ones(2), "is not trained by this optimiser"),
    ("0.bias", torch.ones(5), "must have a mean and a precision of shape .6,."),
    ("0.bias", torch.zeros(6), "must be finite and above 0"),
]


@pytest.mark.parametrize(("name", "precision", "message"), PRIORS)
def test_priors(name: str, precision: Tensor, message: str) -> None:
    net, _, _ = classifier()
    opt = VOGN(net, n_data=11)
    with pytest.raises(InputError, match=message):
        opt.set_prior({name: torch.zeros_like(precision)}, {name: precision})


SCHEDULES: list[tuple[tuple[Any, ...], str]] = [
    ((0.0, 1.0, 5), "start=0.0 must be a positive and finite number"),
    ((0.1, float("inf"), 5), "stop=inf must be a positive and finite number"),
    ((0.1, 1.0, -1), "steps=-1"),
    ((0.1, 1.0, 5, "step"), "kind='step' is not known"),
]


@pytest.mark.parametrize(("values", "message"), SCHEDULES)
def test_schedules(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Schedule(*values)


def test_schedules_end_where_they_should() -> None:
    for kind in ("linear", "cosine", "geometric"):
        schedule = Schedule(0.1, 2.0, 10, kind)
        assert schedule(0) == pytest.approx(0.1)
        assert schedule(10) == schedule(99) == pytest.approx(2.0)
        assert 0.1 < schedule(4) < 2.0


def test_states_of_other_presets_and_shapes_change_nothing() -> None:
    net, x, y = classifier()
    opt = VOGN(net, lr=0.02, n_data=11)
    opt.step(lambda: F.cross_entropy(net(x), y))
    state = opt.state_dict()
    other = OGN(net, lr=0.5, n_data=11)
    with pytest.raises(InputError, match="saved by VOGN, but this optimiser is OGN"):
        other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.5
    wide = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).to(torch.float64)
    with pytest.raises(
        InputError, match="momentum of parameter 0 has shape .6, 5., but the parameter has shape .7, 5."
    ):
        VOGN(wide, n_data=11).load_state_dict(state)
    newer = {**state, "aftermap": {**state["aftermap"], "version": 99}}
    with pytest.raises(InputError, match="version 99"):
        opt.load_state_dict(newer)


def test_errors_are_ours() -> None:
    assert issubclass(InputError, AftermapError)
    with pytest.raises(ValueError, match="has no parameter that requires a gradient"):
        VOGN(nn.ReLU(), n_data=3)


@pytest.mark.parametrize("preset", [VOGN, IVON, KFAC])
def test_complex_parameters_are_refused(preset: Callable[..., Any]) -> None:
    model = nn.Linear(3, 2)
    model.spectrum = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(UnsupportedError, match="spectrum of the model are complex"):
        preset(model, n_data=8)
    with pytest.raises(UnsupportedError, match="spectrum of the model are complex"):
        preset(model, n_data=8, params=[model.weight, model.spectrum])
    assert preset(model, n_data=8, params=[model.weight]) is not None
