"""`predict` takes tensors, arrays, tables and batches, in pieces of its own, and gives the same answers for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from aftermap.baselines import MCDropout
from aftermap.batches import input_batches, is_batches
from aftermap.errors import AftermapError, DataError, UnsupportedError
from aftermap.laplace import Laplace
from aftermap.predictive import predictor as module
from tests.laplace.problems import classes, mlp, normal, regression

X = normal(11, 3, seed=4)


class Table:
    """A table of pandas or polars, as far as it is looked at."""

    def __init__(self, columns: dict[str, Any]):
        self._columns = columns

    @property
    def columns(self) -> list[str]:
        return list(self._columns)

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]

    def to_numpy(self) -> Any:
        return np.stack(list(self._columns.values()), 1)


@pytest.fixture(scope="module")
def laplace() -> Laplace:
    return Laplace(mlp(), "classification").fit(classes(), progress=False)


def mean(laplace: Laplace, x: Any, **options: Any) -> Tensor:
    return laplace.predict(x, generator=torch.Generator().manual_seed(0), **options).mean


def generated() -> Iterator[Tensor]:
    yield from X.split(5)


FORMS: dict[str, Any] = {
    "array": X.numpy(),
    "array in single precision": X.numpy().astype(np.float32),
    "array in another order": np.asfortranarray(X.numpy()),
    "array in the other byte order": X.numpy().astype(">f8"),
    "array that may only be read": np.frombuffer(X.numpy().tobytes()).reshape(11, 3),
    "table": Table({c: X[:, i].numpy() for i, c in enumerate("abc")}),
    "list of batches": [(X[:4], torch.zeros(4)), (X[4:], torch.zeros(7))],
    "list of labelled mappings": [{"input": X[:4], "y": torch.zeros(4)}, {"input": X[4:], "y": torch.zeros(7)}],
    "DataLoader with targets": DataLoader(TensorDataset(X, torch.zeros(11)), batch_size=4),
    "DataLoader without": DataLoader(TensorDataset(X), batch_size=4),
    "batches of arrays": [(X[:4].numpy(), None), (X[4:].numpy(), None)],
    "batches with another batch": [(X[:4], torch.zeros(4), torch.ones(4)), (X[4:], torch.zeros(7), torch.ones(7))],
}


def test_an_array_that_may_only_be_read_is_left_alone(laplace: Laplace) -> None:
    read_only = FORMS["array that may only be read"]
    mean(laplace, read_only)
    assert not read_only.flags.writeable


def test_forms_that_are_not_understood_come_with_advice(laplace: Laplace) -> None:
    with pytest.raises(
        DataError, match=r"a torch.*TensorDataset. Pass it in batches, torch.utils.data.DataLoader\(data, batch_size="
    ):
        laplace.predict(TensorDataset(X))
    with pytest.raises(
        AftermapError, match=r"Whole numbers are taken as tokens: pass quantities in floating point, x.float\(\)"
    ):
        laplace.predict(np.ones((3, 3), int))


@pytest.mark.parametrize("kind", ["linearised", "sampling"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_answers(laplace: Laplace, form: str, kind: str) -> None:
    expected, found = (mean(laplace, x, kind=kind, samples=7) for x in (X, FORMS[form]))
    tolerance = 1e-6 if "single" in form else 1e-12
    assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_generator_of_inputs_alone(laplace: Laplace) -> None:
    assert_close(mean(laplace, generated()), mean(laplace, X))


@pytest.mark.parametrize("options", [{}, {"link": "mc", "samples": 8}, {"kind": "sampling", "samples": 5}])
def test_pieces_change_nothing(laplace: Laplace, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mean(laplace, X, **options)
    monkeypatch.setattr(module, "_PIECE", 4)
    assert_close(mean(laplace, X, **options), whole, rtol=1e-12, atol=1e-12)
    numbers = Laplace(mlp(1, 6, 1), "regression").fit(regression(), progress=False)
    x = normal(9, 1)
    in_pieces = numbers.predict(x, **options)
    monkeypatch.undo()
    if not options:
        assert_close(in_pieces.total, numbers.predict(x).total, rtol=1e-12, atol=1e-12)
    # Gradients in the inputs are kept, and a local draw is each input's own.
    monkeypatch.setattr(module, "_PIECE", 4)
    free = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(laplace.predict(free, link="probit", differentiable=True).mean[:, 0].sum(), free)
    assert bool(gradient.abs().amin() > 0)
    twice = torch.cat([X[:4], X[:4]])
    local = laplace.predict(twice, kind="sampling", local=True, samples=3).samples
    assert local is not None
    assert not torch.equal(local[:, :4], local[:, 4:])


def test_a_bar_over_pieces(
    laplace: Laplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_PIECE", 4)
    laplace.predict(X, progress=True)
    assert "predicting:   0%|          | 0/3" in capsys.readouterr().err
    laplace.predict(X, progress=False)
    laplace.predict(X[:4], progress=True)
    assert capsys.readouterr().err == ""


def test_whole_numbers_stay_what_they_are() -> None:
    table = Table({"a": np.arange(3), "b": np.array([True, False, True])})
    from aftermap.batches import unpack_inputs

    assert unpack_inputs(table, torch.float32).inputs.tolist() == [[0.0, 1.0], [1.0, 0.0], [2.0, 1.0]]
    assert unpack_inputs(np.arange(3)[:, None], torch.float32).inputs.dtype == torch.int64
    assert (
        unpack_inputs((np.zeros((2, 1)), {"mask": np.ones(2)}), torch.float32).inputs[1]["mask"].dtype == torch.float32
    )


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (Table({"a": np.array([1.0]), "name": np.array(["n1"])}), "the columns name of the table hold no numbers"),
        (Table({}), "the table has no column"),
        (np.array([["a"]]), "an array of <U1, which are not numbers"),
        (np.array([[1.0, np.nan, 2.0]]), "the inputs are not finite: nan at index"),
        (X[:0], "the inputs hold no example"),
        ([], "no tensor with a batch dimension"),
        (iter(()), "the inputs hold no example"),
        ("new.csv", "no tensor with a batch dimension"),
        (X.float(), "the inputs are torch.float32, but the model's parameters are torch.float64"),
        (normal(4, 2), "does not accept inputs of shape"),
        ([(normal(4, 2), None)], "does not accept inputs of shape"),
    ],
)
def test_inputs_that_cannot_be_predicted(laplace: Laplace, x: Any, message: str) -> None:
    with pytest.raises(AftermapError, match=message):
        laplace.predict(x)


def test_what_counts_as_batches() -> None:
    assert is_batches(DataLoader(TensorDataset(X)))
    assert is_batches([(X, None)])
    assert is_batches(iter([X]))
    assert not any(map(is_batches, (X, X.numpy(), (X, X), [X, X], {"x": X}, Table({"a": X[:, 0].numpy()}), [])))
    assert [type(x) for x in input_batches([(X, X), [X], X, {"input": X}, {"input": X, "y": X}])] == [
        Tensor,
        list,
        Tensor,
        dict,
        dict,
    ]
    # Inputs and targets, with weights or without, are one batch of inputs; one tensor and four are inputs alone.
    counts = [len(x) for x in input_batches([(X,), (X, X), (X, X, X), (X, X, X, X)])]
    assert counts == [1, len(X), len(X), 4]
    with pytest.raises(DataError, match="unpack= must return"):
        list(input_batches([X], lambda batch: batch))


def test_baselines_take_arrays() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)).double().eval()
    dropped = MCDropout(net)
    seeds = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert_close(dropped.predict(X.numpy(), generator=seeds[0]).mean, dropped.predict(X, generator=seeds[1]).mean)


@pytest.mark.parametrize("most", [0, 3000, 10**9])
def test_many_inputs_keep_samples_and_covariances_only_up_to_a_size(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, net = torch.randn(40, 2), nn.Linear(2, 5).eval()
    la = Laplace(net, "classification").fit([(x, torch.arange(40) % 5)])
    options: dict[str, Any] = {"samples": 20, "generator": torch.Generator().manual_seed(1)}
    whole = la.predict(x, **options)
    monkeypatch.setattr(module, "_PIECE", 4)  # 20 samples of 4 inputs take 1,600 bytes, their covariances 400
    monkeypatch.setattr(module, "_MOST_SAMPLE_BYTES", most)
    options["generator"].manual_seed(1)
    found = la.predict(x, **options)
    for name in ("mean", "epistemic", "aleatoric", "total", "latent_mean", "latent_var"):
        assert_close(getattr(found, name), getattr(whole, name))
    assert (found.samples is None) == (found.latent_cov is None) == (most < 10**9)
    assert_close(found.score("variance"), whole.score("variance"))
    if found.samples is None:
        with pytest.raises(UnsupportedError, match="fewer inputs at a time"):
            found.interval()
    else:
        assert_close(found.interval()[0], whole.interval()[0])


def test_the_samples_of_a_regression_are_kept_whatever_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, net = torch.randn(40, 2), nn.Linear(2, 1).eval()
    la = Laplace(net, "regression").fit([(x, x[:, :1])])
    monkeypatch.setattr(module, "_PIECE", 4)
    monkeypatch.setattr(module, "_MOST_SAMPLE_BYTES", 0)
    assert la.predict(x, kind="sampling", samples=20).samples is not None
    assert la.predict(x).latent_cov is not None
