"""The table of options: every constructor is covered by it, and old words still mean what they meant."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from aftermap.errors import InputError
from aftermap.optim import IVON, KFAC, OGN, VOGN, NoisyKFAC, Schedule
from aftermap.optim.options import OPTIONS
from aftermap.optim.vogn import DiagonalOptimizer
from tests.optim.problems import classifier

ALL = [VOGN, OGN, IVON, KFAC, NoisyKFAC]
OTHERS = {"self", "model", "params", "generator"}


@pytest.mark.parametrize("optimizer", ALL)
def test_every_argument_is_an_option_and_documented(optimizer: Any) -> None:
    arguments = [name for name in inspect.signature(optimizer.__init__).parameters if name not in OTHERS]
    assert set(arguments) - {"weight_decay"} <= set(OPTIONS)  # which is another way to say prior_precision
    documentation = inspect.getdoc(optimizer)
    assert documentation is not None
    assert all(f"{name}: " in documentation for name in arguments)


@pytest.mark.parametrize("optimizer", ALL)
def test_arguments_arrive_in_groups_or_settings(optimizer: Any) -> None:
    values: dict[str, Any] = {
        "lr": 0.25,
        "momentum": 0.5,
        "new_curvature_weight": 0.125,
        "prior_precision": 3.0,
        "prior_mean": 0.5,
        "damping": 0.75,
        "n_data": 12.0,
        "mc_samples": 3,
        "augmentation": 2.0,
        "reduction": "sum",
        "momentum_form": "normalised",
        "max_grad_norm": 7.0,
        "batch_norm": "variational",
        "initial_curvature": 0.3,
        "form": "published",
        "clip_radius": 2.0,
        "rescale_lr": False,
        "damping_form": "pi",
        "factor_every": 2,
        "inverse_every": 4,
    }
    arguments = inspect.signature(optimizer.__init__).parameters
    passed = {name: value for name, value in values.items() if name in arguments}
    net, _, _ = classifier()
    opt = optimizer(net, **passed)
    for name, value in passed.items():
        assert (opt.param_groups[0][name] if OPTIONS[name].per_group else getattr(opt.settings, name)) == value, name
    assert opt.settings.sampling == (optimizer not in (OGN, KFAC))


def test_an_unknown_option_of_a_new_optimiser() -> None:
    net, _, _ = classifier()
    with pytest.raises(InputError, match="has no setting dampling; allowed are lr, momentum.*Did you mean damping"):
        DiagonalOptimizer(net, None, {"n_data": 3, "dampling": 0.1}, None)


def test_numbers_of_other_types_become_plain_ones() -> None:
    net, _, _ = classifier()
    opt = VOGN(net, lr=np.float32(0.25), n_data=np.int64(12), mc_samples=np.int64(2))
    assert [type(v) for v in (opt.param_groups[0]["lr"], opt.settings.n_data, opt.settings.mc_samples)] == [
        float,
        float,
        int,
    ]
    assert type(Schedule(1.0, 2.0, np.int64(3)).config()["steps"]) is int


def stepped(opt: Any, net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        opt.step(lambda: F.cross_entropy(net(x), y))
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_old_words_mean_what_they_meant() -> None:
    ends = []
    for form in ("published", "poster", "consistent"):
        net, x, y = classifier()
        seed = torch.Generator().manual_seed(1)
        if form == "poster":
            with pytest.warns(DeprecationWarning, match="form='poster' is now called 'published'") as seen:
                opt = VOGN(net, lr=0.02, n_data=11, temperature=0.5, form=form, generator=seed)
            assert seen[0].filename == __file__
        else:
            opt = VOGN(net, lr=0.02, n_data=11, temperature=0.5, form=form, generator=seed)
        ends.append(stepped(opt, net, x, y))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])
    ends = []
    for damping_form in ("pi", "factored", "exact"):
        net, x, y = classifier()
        ends.append(stepped(KFAC(net, lr=0.02, n_data=11, damping_form=damping_form), net, x, y))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (IVON, {"clip_radius": 0.0}, "clip_radius=0.0 must be a positive number"),
        (IVON, {"rescale_lr": 1}, "rescale_lr=1 must be True or False"),
        (KFAC, {"damping_form": "ritter"}, "damping_form='ritter' is not known; allowed are 'exact', 'pi'"),
        (KFAC, {"factor_every": 0}, "factor_every=0 must be a whole number of at least 1"),
        (NoisyKFAC, {"inverse_every": 2.5}, "inverse_every=2.5 must be a whole number"),
    ],
)
def test_options_of_single_optimisers(optimizer: Any, options: dict[str, Any], message: str) -> None:
    net, _, _ = classifier()
    with pytest.raises(InputError, match=message):
        optimizer(net, n_data=11, **options)


@pytest.mark.parametrize("optimizer", ALL)
def test_a_weight_decay_is_a_prior_precision(optimizer: Any) -> None:
    """The step of a decay of λ is that of δ = λN, with augmentation λρN, in every group that does not say another one."""
    augmented = {} if optimizer in (OGN, KFAC) else {"augmentation": 2.0}
    one = optimizer(nn.Linear(3, 2), n_data=50, weight_decay=0.02, **augmented)
    assert one.param_groups[0]["prior_precision"] == pytest.approx(0.02 * 50 * augmented.get("augmentation", 1.0))
    assert "weight_decay" not in one.param_groups[0]
    model = nn.Linear(3, 2)
    own = optimizer(model, n_data=50, params=[{"params": list(model.parameters()), "weight_decay": 0.1}])
    assert own.param_groups[0]["prior_precision"] == pytest.approx(5.0)
    x, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    steps = []
    for options in ({"weight_decay": 0.1}, {"prior_precision": 5.0}):
        net = nn.Linear(3, 2)
        with torch.no_grad():
            net.weight.copy_(torch.arange(6.0).reshape(2, 3))
            net.bias.zero_()
        opt = optimizer(net, n_data=50, lr=0.1, **options)
        opt.step(lambda net=net: F.cross_entropy(net(x), y))
        steps.append([p.detach().clone() for p in net.parameters()])
    torch.testing.assert_close(steps[0], steps[1], rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", ALL)
def test_a_decay_that_is_said_twice_or_is_none(optimizer: Any) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(
        InputError, match="say the same thing: a decay of λ is a prior precision of λN, here 1. Give one of them"
    ):
        optimizer(model, n_data=50, weight_decay=0.02, prior_precision=3.0)
    with pytest.raises(
        InputError, match="weight_decay=-1.*A weight decay of λ on a mean loss is a prior precision of λN"
    ):
        optimizer(model, n_data=50, weight_decay=-1.0)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1, "prior_precision": 1.0}]
    with pytest.raises(InputError, match="a group of parameters has weight_decay and prior_precision"):
        optimizer(model, n_data=5, params=groups)


def test_the_number_of_data_may_be_the_data_set() -> None:
    data = TensorDataset(torch.zeros(7, 3))
    for given in (7, data, DataLoader(data, batch_size=2), torch.zeros(7, 3), list(range(7))):
        assert VOGN(nn.Linear(3, 2), n_data=given).settings.n_data == 7.0
    for wrong in ("seven", [], torch.tensor(float("nan"))):
        with pytest.raises(InputError, match="n_data"):
            VOGN(nn.Linear(3, 2), n_data=wrong)


@pytest.mark.parametrize("kind", ["linear", "cosine", "geometric"])
def test_a_schedule_ends_where_it_is_said_to(kind: str) -> None:
    schedule = Schedule(0.1, 2.0, 8, kind)
    assert [schedule(step) for step in (0, 8, 9, 100)] == pytest.approx([0.1, 2.0, 2.0, 2.0])
    assert [Schedule(0.1, 2.0, 0, kind)(step) for step in (0, 1, 5)] == pytest.approx([2.0] * 3)
