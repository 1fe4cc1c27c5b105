"""Bad input: each kind has its own message, and the model is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aftermap.curvature import STRUCTURES, fit_curvature
from aftermap.errors import DataError, InputError, ShapeError, UnsupportedError
from aftermap.likelihoods import Categorical
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.curvature.layer_cases import normal

FITTABLE = [s.name for s in STRUCTURES.values() if s.name != "kfra" and s.posterior is None]


def net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layers or (nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))).double().eval()


X, Y = normal(5, 3), torch.tensor([0, 1, 1, 0, 1])


def check_refused(
    model: nn.Module,
    data: Any,
    error: type[Exception],
    message: str,
    likelihood: Any = "classification",
    structures: list[str] | None = None,
    **options: Any,
) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.device.type != "meta":
            parameter.grad = torch.ones_like(parameter)
    before = ModelSnapshot.of(model)
    for structure in structures or FITTABLE:
        with pytest.raises(error, match=message):
            fit_curvature(model, data, likelihood, structure=structure, progress=False, **options)
        check_unchanged(model, before)


def with_value(value: float) -> Tensor:
    x = X.clone()
    x[2, 1] = value
    return x


@pytest.mark.parametrize(
    "data, message",
    [
        ([], "the data are empty: not a single batch came"),
        ([(X[:0], Y[:0])], "every batch is empty"),
        ([(X, Y), (with_value(float("nan")), Y)], r"inputs are not finite: nan at index \[2, 1\]"),
        ([(with_value(float("inf")), Y)], r"inputs are not finite: inf at index \[2, 1\]"),
        ([X], "a batch is a torch.Tensor"),
        ([(X,)], "a tuple of 1 elements"),
        ([(X, Y, torch.ones(5), 1)], "a tuple of 4 elements.*unpack="),
        ([{"x": X, "z": Y}], r"keys \['x', 'z'\], none of which names the targets"),
        (["text"], "a batch is a builtins.str"),
        ([("text", Y)], "hold no tensor with a batch dimension"),
        ([(X.numpy(), Y)], r"they are a numpy.ndarray. Pass plain numbers as a tensor, torch.from_numpy\(x\)$"),
        (X, "data must be an iterable of batches.*pass \\[\\(x, y\\)\\]"),
        (3, "data must be an iterable of batches"),
        ([(X, Y, -torch.ones(5))], "weights must be 5 finite numbers that are not negative"),
        ([(X, Y, torch.ones(4))], "weights must be 5 finite numbers.*got shape \\(4,\\)"),
        ([(X, Y, torch.full((5,), torch.nan))], "weights must be 5 finite numbers"),
        ([(X.float(), Y)], "inputs are torch.float32, but the model's parameters are torch.float64"),
        ([(X, None)], "a batch has no targets"),
        ([(X, ["a"] * 5)], "the targets are a list of 5 elements"),
        ([(X, Y), (X, None)], "a batch has no targets"),
    ],
)
def test_bad_data(data: Any, message: str) -> None:
    check_refused(net(), data, DataError, message)


@pytest.mark.parametrize(
    "targets, error, message",
    [
        (torch.tensor([0, 1, 2, 0, 1]), DataError, r"targets\[2\] is 2"),
        (torch.tensor([0, 1, -3, 0, 1]), DataError, r"targets\[2\] is -3"),
        (Y.double(), DataError, "float64"),
        (Y[:4], ShapeError, r"5 examples, but the targets have shape \(4,\)"),
        (torch.zeros(5, 3, dtype=torch.int64), ShapeError, r"\[5, 3\]"),
    ],
)
def test_bad_labels(targets: Tensor, error: type[Exception], message: str) -> None:
    check_refused(net(), [(X, targets)], error, message)


def test_bad_labels_in_a_later_batch() -> None:
    check_refused(net(), [(X, Y), (X, Y + 1)], DataError, r"targets\[1\] is 2")


def test_bad_targets_of_a_regression() -> None:
    check_refused(net(), [(X, normal(5, 3))], ShapeError, r"\[5, 2\]", "regression")
    bad = normal(5, 2)
    bad[3, 1] = torch.inf
    check_refused(net(), [(X, bad)], DataError, r"targets\[3, 1\] is inf", "regression")


def test_lists_and_arrays_of_labels_are_understood() -> None:
    expected = fit_curvature(net(), [(X, Y)], "classification", progress=False).to_dense()
    for targets in (Y.tolist(), Y.numpy(), tuple(Y.tolist())):
        found = fit_curvature(net(), [(X, targets)], "classification", progress=False)
        torch.testing.assert_close(found.to_dense(), expected)


class Add(nn.Module):
    """A function of the inputs and a parameter."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.linear(x))


@pytest.mark.parametrize(
    "function, error, message",
    [
        (lambda x, y: y / 0.0, InputError, r"outputs are not finite: (nan|inf|-inf) at index"),
        (lambda x, y: (y * 1e200).exp(), InputError, "outputs are not finite"),
        (lambda x, y: y[:, 0], ShapeError, r"returned shape \(3,\) for 3 examples"),
        (lambda x, y: y.mean(0, keepdim=True), ShapeError, r"returned shape \(1, 2\)"),
        (lambda x, y: y.argmax(-1, keepdim=True), ShapeError, "must be floating-point"),
        (lambda x, y: (y, y), ShapeError, "the model returned a tuple of 2 elements"),
        (lambda x, y: None, ShapeError, "the model returned a builtins.NoneType"),
        (lambda x, y: y.detach(), InputError, "depend on none of the selected parameters"),
        (lambda x, y: y - y.mean(0), UnsupportedError, "changes with the other examples of its batch"),
        (lambda x, y: y + 1e-4 * x.sum(), UnsupportedError, "changes with the other examples of its batch"),
        (lambda x, y: y.cumsum(0), UnsupportedError, "changes with the other examples of its batch"),
        (lambda x, y: y.flip(0).cumsum(0).flip(0), UnsupportedError, "changes with the other examples of its batch"),
        (lambda x, y: y.roll(1, 0), UnsupportedError, "changes with the other examples of its batch"),
        (lambda x, y: nn.functional.dropout(y, 0.5), UnsupportedError, "or is random"),
    ],
)
def test_bad_outputs(function: Any, error: type[Exception], message: str) -> None:
    check_refused(Add(function), [(X, Y)], error, message)


def test_outputs_that_become_bad_later() -> None:
    def late(x: Tensor, y: Tensor) -> Tensor:
        return torch.where((x[:, :1] > 50).expand_as(y), torch.nan, 1.0) * y

    check_refused(Add(late), [(X, Y), (X + 100, Y)], InputError, "outputs are not finite")


def test_an_exception_in_the_forward_pass_comes_through() -> None:
    calls = []

    def sometimes(x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        if bool((x > 50).any()):
            raise KeyError("from the user's own code")
        return y

    model = nn.Sequential(Add(sometimes), nn.MultiheadAttention(2, 1).double().out_proj)
    check_refused(model, [(X + 100, Y)], KeyError, "from the user's own code")
    check_refused(model, [(X, Y), (X + 100, Y)], KeyError, "from the user's own code")
    assert calls


def test_an_exception_inside_an_attention_comes_through() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, attn_mask=torch.zeros(7, 7, dtype=x.dtype))[0]

    check_refused(Attending().double(), [(normal(5, 3, 4), Y)], RuntimeError, "size|shape")


@pytest.mark.parametrize(
    "model, message",
    [
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), r"1 \(BatchNorm1d\).*model.eval\(\)"),
        (nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.3)), r"1 \(Dropout\).*model.eval\(\)"),
        (nn.Sequential(nn.Linear(3, 2), nn.AlphaDropout(0.3)), r"1 \(AlphaDropout\)"),
    ],
)
def test_training_mode(model: nn.Module, message: str) -> None:
    check_refused(model.double().train(), [(X, Y)], InputError, message)


def test_training_mode_of_attention_and_recurrent_layers() -> None:
    attention = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True).double()
    attention.self_attn.dropout = 0.5
    check_refused(attention, [(normal(5, 3, 4), Y)], InputError, r"self_attn \(MultiheadAttention\)")

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, 2, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0][:, -1]

    check_refused(Last().double(), [(normal(5, 3, 4), Y)], InputError, r"rnn \(GRU\)")


def test_batch_norm_without_running_statistics() -> None:
    model = net(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))
    check_refused(model, [(X, Y)], InputError, "without running statistics")


def test_training_mode_without_consequences_is_allowed() -> None:
    model = net(nn.Linear(3, 4), nn.Dropout(0.0), nn.LayerNorm(4), nn.Linear(4, 2)).train()
    before = ModelSnapshot.of(model)
    assert fit_curvature(model, [(X, Y)], "classification", progress=False).n_data == 5
    check_unchanged(model, before)


def test_nothing_to_fit() -> None:
    check_refused(nn.Flatten(), [(X, Y)], InputError, "has no floating-point parameter")
    frozen = net().requires_grad_(False)
    check_refused(frozen, [(X, Y)], InputError, "every parameter is frozen")
    check_refused(net(), [(X, Y)], InputError, "selects no parameter: nothing matched", params="decoder.*")
    check_refused(net(), [(X, Y)], InputError, "no parameter or module is called 7.weight", params=["7.weight"])
    check_refused(net(), [(X, Y)], InputError, "neither a name nor a regular expression", params="(")


def test_devices() -> None:
    check_refused(net().to("meta"), [(X, Y)], InputError, "meta device and hold no values")
    spread = net()
    spread[0].to("meta")
    check_refused(spread, [(X, Y)], InputError, r"several devices: \['cpu', 'meta'\]")


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"structure": "kfac"},
            "structure='kfac' is not known; allowed are 'diagonal', .*'kron'.*Did you mean 'ekfac'",
        ),
        ({"curvature": "fisher"}, "curvature='fisher' is not known; allowed are 'auto'"),
        ({"approach": "mean"}, "approach='mean' is not known; allowed are 'expand', 'reduce'"),
        ({"samples": 0}, "samples=0 must be a whole number of at least 1"),
        ({"passes": 1.5}, "passes=1.5 must be a whole number"),
        ({"rank": True}, "rank=True must be a whole number"),
        ({"chunk": 0}, "chunk=0 must be"),
        ({"accumulate": torch.int64}, "accumulate=torch.int64 .* floating-point"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    model = net()
    before = ModelSnapshot.of(model)
    with pytest.raises(InputError, match=message):
        fit_curvature(model, [(X, Y)], "classification", progress=False, **options)
    check_unchanged(model, before)


def test_bad_likelihood() -> None:
    check_refused(net(), [(X, Y)], InputError, "likelihood is 'softmax', but must be one of", "softmax")
    check_refused(net(), [(X, Y)], InputError, "You passed the class: call it", Categorical)


def test_a_generator_is_refused_before_it_is_used() -> None:
    batches = ((X, Y) for _ in range(2))
    check_refused(net(), batches, DataError, "reads data more than once, but generator can be read only once")
    assert len(list(batches)) == 2


def test_too_many_parameters_for_a_full_matrix() -> None:
    wide = net(nn.Linear(3, 4000), nn.Linear(4000, 2))
    check_refused(wide, [(X, Y)], InputError, "24,002 parameters would take", structures=["full", "hessian"])


def test_the_model_may_not_change_its_inputs() -> None:
    kept = X.clone()
    check_refused(Add(lambda x, y: x.sub_(1.0)[:, :2] * y), [(X, Y)], InputError, "changes its inputs in place")
    torch.testing.assert_close(X, kept, rtol=0, atol=0)


def test_a_bad_unpack() -> None:
    check_refused(net(), [(X, Y)], DataError, r"unpack= must return \(inputs, targets\)", unpack=lambda batch: batch[0])
