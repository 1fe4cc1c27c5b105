from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from aftermap.errors import InputError, UnsupportedError
from aftermap.params import flatten, named_parameters, select, swapped, unflatten


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), nn.Linear(4, 5))


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


ALL = ["0.weight", "0.bias", "2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias", "3.weight", "3.bias"]


@pytest.mark.parametrize(
    "selection, expected",
    [
        ("all", ALL),
        ("last_layer", ["3.weight", "3.bias"]),
        ("2.0.bias", ["2.0.bias"]),
        ("2", ["2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"]),
        (["3.bias", "0"], ["0.weight", "0.bias", "3.bias"]),
        (r".*bias", ["0.bias", "2.0.bias", "2.1.bias", "3.bias"]),
        (r"2\..*weight", ["2.0.weight", "2.1.weight"]),
        (lambda name, p: p.dim() == 1 and name.startswith("2"), ["2.0.bias", "2.1.weight", "2.1.bias"]),
    ],
)
def test_selection(selection: object, expected: list[str]) -> None:
    assert select(net(), selection) == expected  # type: ignore[arg-type]


def test_frozen_parameters() -> None:
    model = net()
    model[0].requires_grad_(False)
    assert select(model) == ALL[2:]
    assert select(model, ["0.weight"]) == ["0.weight"]
    model.requires_grad_(False)
    with pytest.raises(InputError, match="every parameter is frozen"):
        select(model)
    assert select(model, "last_layer") == ["3.weight", "3.bias"]


def test_tied_parameters_appear_once_and_answer_to_all_names() -> None:
    assert select(tied()) == ["0.weight", "0.bias", "2.bias"]
    assert select(tied(), ["2.weight"]) == ["0.weight"]
    assert select(tied(), "last_layer") == ["0.weight", "2.bias"]
    assert list(named_parameters(tied())) == ["0.weight", "0.bias", "2.bias"]


@pytest.mark.parametrize(
    "selection, message",
    [
        (["4.weight"], "no parameter or module is called 4.weight. This model has: 0.weight"),
        ("x+", "'x\\+' selects no parameter: nothing matched"),
        ("(", "neither a name nor a regular expression"),
        ([], "selects no parameter"),
        (lambda name, p: False, "the given function selects no parameter"),
    ],
)
def test_bad_selection(selection: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        select(net(), selection)  # type: ignore[arg-type]


def test_a_model_without_parameters() -> None:
    with pytest.raises(InputError, match="ReLU has no floating-point parameter"):
        select(nn.ReLU())


def test_long_lists_are_shortened() -> None:
    deep = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    with pytest.raises(InputError, match=r"… \(32 more\)"):
        select(deep, "nothing")


def test_flatten_and_unflatten() -> None:
    params = {n: p.detach() for n, p in net().named_parameters()}
    names = ["3.bias", "0.weight"]
    vector = flatten(params, names)
    assert vector.shape == (11,)
    back = unflatten(vector, params, names)
    assert list(back) == names
    for name in names:
        torch.testing.assert_close(back[name], params[name])
    several = torch.stack([vector, 2 * vector], 1)
    torch.testing.assert_close(unflatten(several, params, names)["0.weight"][1], 2 * params["0.weight"])
    torch.testing.assert_close(flatten(unflatten(flatten(params), params)), flatten(params))
    with pytest.raises(InputError, match="length 12 does not fit parameters with 11 entries"):
        unflatten(torch.zeros(12), params, names)


def test_complex_parameters_are_refused_and_not_left_out_silently() -> None:
    model = net()
    model.spectrum = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UnsupportedError, match="spectrum of the model are complex.*view_as_real"):
        select(model)
    assert select(model, "3") == ["3.weight", "3.bias"]
    model.spectrum.requires_grad_(False)
    assert "spectrum" not in select(model)


def test_empty_parameters_are_left_out() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that it has nothing to initialise.
        model = nn.Sequential(nn.Linear(2, 0), nn.Linear(0, 3))
    assert select(model) == ["1.bias"]


def test_swapped_gives_the_old_values_back() -> None:
    model = net()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    seven = torch.full((5,), 7.0)

    def body() -> None:
        with swapped(model, {"3.bias": seven}):
            torch.testing.assert_close(model[3].bias.detach(), seven)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        body()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0)
    with pytest.raises(InputError, match="no parameter called 9"), swapped(model, {"9": torch.zeros(1)}):
        pass
    with pytest.raises(InputError, match=r"shape \(5,\), but \(4,\)"), swapped(model, {"3.bias": torch.zeros(4)}):
        pass


def test_swapped_keeps_dtype_and_identity() -> None:
    model = net()
    kept = model[3].bias
    with swapped(model, {"3.bias": torch.zeros(5, dtype=torch.float64)}):
        assert model[3].bias is kept
        assert kept.dtype == torch.float32


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = net()
    with pytest.raises(InputError, match=r"made inside torch.inference_mode\(\)"):
        select(model)
