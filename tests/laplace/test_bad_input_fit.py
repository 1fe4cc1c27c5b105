"""What `aftermap.fit` and `Laplace.fit` say about arguments in the wrong place and data of the wrong form."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import aftermap as am
from aftermap.errors import AftermapError, DataError, InputError
from aftermap.laplace import Laplace
from aftermap.likelihoods import Categorical, Gaussian
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import classes, mlp, normal, regression, untrained

QUIET: dict[str, Any] = {"verbose": False, "structure": "diagonal"}


def of(laplace: Laplace) -> tuple[str, float]:
    return laplace.likelihood.kind, laplace.n_data


@pytest.mark.filterwarnings("ignore::aftermap.errors.StatisticalWarning")  # the networks are not trained
def test_the_likelihood_stands_second_and_may_be_left_out() -> None:
    train, held_out = classes(), classes(seed=9)
    expected = ("classification", float(sum(len(y) for _, y in train)))
    for arguments in (
        ("classification", train),
        (Categorical(), train, held_out),
        (None, train, held_out),
        (train,),
        (train, held_out),
    ):
        assert of(am.fit(mlp(), *arguments, **QUIET)) == expected
    assert of(am.fit(mlp(), train, held_out, likelihood="classification", **QUIET)) == expected
    assert of(am.fit(mlp(), "classification", train_loader=train, val_loader=held_out, **QUIET)) == expected
    assert of(am.fit(mlp(), train_loader=train, **QUIET)) == expected
    numbers = regression()
    assert of(am.fit(mlp(1, 6, 1), Gaussian(0.5), numbers, **QUIET))[0] == "regression"
    # Validation data that can be gone through only once are enough for tuning and for the check.
    assert am.fit(mlp(), train, iter(held_out), **QUIET).report.check.n_data == sum(len(y) for _, y in held_out)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_validation_inputs_that_the_network_does_not_take(kind: str) -> None:
    data = classes() if kind == "classification" else [(normal(30, 3), normal(30, 4, seed=1))]
    wide = [(normal(9, 5, seed=2), data[0][1][:9])]
    laplace = am.Laplace(mlp(), kind).fit(data)
    with pytest.raises(InputError, match=r"the model does not accept inputs of shape \(\d+, 5\)"):
        laplace.tune(wide)


@untrained
def test_the_old_order_is_taken_with_a_warning() -> None:
    with pytest.warns(
        DeprecationWarning,
        match="the likelihood stands second now.*fit\\(model, likelihood, train_loader, val_loader\\)",
    ):
        laplace = am.fit(mlp(), classes(), None, "classification", **QUIET)
    assert laplace.likelihood.kind == "classification"


@pytest.mark.parametrize(
    ("outputs", "targets", "kind"),
    [
        (4, torch.arange(8) % 4, "classification"),
        (4, (torch.arange(8) % 4).to(torch.uint8), "classification"),
        (1, torch.arange(8) % 2, "binary"),
        (1, torch.linspace(-1, 1, 8), "regression"),
        (2, torch.linspace(-1, 1, 16).reshape(8, 2), "regression"),
    ],
)
@pytest.mark.filterwarnings("ignore:8 training examples say little")
def test_the_likelihood_is_found_by_the_targets_and_said(
    outputs: int, targets: torch.Tensor, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = targets.double() if targets.is_floating_point() else targets
    laplace = am.fit(mlp(3, 5, outputs), [(normal(8, 3), wanted)], verbose=True, structure="diagonal")
    assert laplace.likelihood.kind == kind
    said = f"likelihood: {kind}, inferred from the targets"
    assert said in capsys.readouterr().err
    assert said in str(laplace.report)


@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        (1, torch.arange(8), 'one output: say likelihood="regression", likelihood="counts" or likelihood="binary"'),
        (
            1,
            (torch.arange(8) % 2).double(),
            'zeros and ones in torch.float64.*say likelihood="binary".*or likelihood="regression"',
        ),
        (
            4,
            (torch.arange(8) % 4).double(),
            r"whole numbers in torch.float64.*class labels are integers \(y.long\(\)\)",
        ),
        (4, nn.functional.one_hot(torch.arange(8) % 4), r"one-hot labels are given as class indices, y.argmax\(-1\)"),
        (4, nn.functional.one_hot(torch.arange(8) % 4).double(), r"One-hot labels are given as class indices"),
    ],
)
def test_targets_that_could_mean_several_things(outputs: int, targets: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        am.fit(mlp(3, 5, outputs), [(normal(8, 3), targets)], verbose=False)


X, Y = normal(8, 3), torch.arange(8) % 4


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        (
            (classes(), "regression"),
            {},
            "'regression' stands where data are expected; the order is fit(model, likelihood, train_loader, val_loader)",
        ),
        (("classification",), {}, "fit needs the training data: fit(model, likelihood, train_loader, val_loader)"),
        ((), {}, "fit needs the training data"),
        (
            ("classification", classes()),
            {"likelihood": "binary"},
            "the likelihood is given twice, as 'classification' and as likelihood='binary'",
        ),
        ((classes(),), {"train_loader": classes()}, "train_loader is given twice"),
        ((classes(), classes()), {"val_loader": classes()}, "val_loader is given twice"),
        ((classes(), classes(), classes(), classes()), {}, "at most three arguments"),
        (((X, Y),), {}, "it is a tuple of 2 elements. For two tensors pass [(x, y)]"),
        ((X,), {}, "For two tensors pass [(x, y)]"),
        (({"x": X, "y": Y},), {}, "a list of (x, y)), but it is a builtins.dict"),
        (
            (TensorDataset(X, Y),),
            {},
            "which gives single examples; batches are needed: DataLoader(data, batch_size=256)",
        ),
        (("clasification", classes()), {}, "likelihood is 'clasification', but must be one of"),
    ],
)
def test_arguments_in_the_wrong_place(arguments: tuple[Any, ...], named: dict[str, Any], message: str) -> None:
    model = mlp()
    before = ModelSnapshot.of(model)
    with pytest.raises(AftermapError, match=re.escape(message)):
        am.fit(model, *arguments, **named, verbose=False)
    check_unchanged(model, before)


@pytest.mark.parametrize("data", [(X, Y), X, {"x": X, "y": Y}, TensorDataset(X, Y), "train.npz"])
def test_data_that_are_no_batches(data: Any) -> None:
    with pytest.raises(DataError, match="batches"):
        Laplace(mlp(), "classification").fit(data, progress=False)


def test_a_loader_of_a_data_set_is_what_the_message_advises() -> None:
    laplace = Laplace(mlp(), "classification").fit(DataLoader(TensorDataset(X, Y), batch_size=3), progress=False)
    assert laplace.n_data == 8


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"features": X, "y": Y}, "the model does not accept inputs with the keys features of shape"),
        ({"input": X, "klass": Y}, "none of which names the targets"),
        ((X.float(), Y), "the inputs are torch.float32, but the model's parameters are torch.float64"),
        ((X, Y + 1), "must be in 0 ... 3.*labels that count from 1 are given as targets - 1"),
        ((X, Y - 1), r"must be in 0 ... 3.*without a label use Categorical\(ignore_index=-1\)"),
        ((X, nn.functional.one_hot(Y)), "targets"),
        ((X, Y.double()), r"must be integers \(class indices\), got torch.float64; use targets.long\(\)"),
    ],
)
def test_batches_with_wrong_inputs_or_labels(batch: Any, message: str) -> None:
    model = mlp()
    before = ModelSnapshot.of(model)
    for call in (
        lambda: am.fit(model, "classification", [batch], verbose=False),
        lambda: Laplace(model, "classification").fit([batch], progress=False),
    ):
        with pytest.raises(AftermapError, match=message):
            call()
    check_unchanged(model, before)
