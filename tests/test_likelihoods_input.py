"""Likelihoods: bad input with its message, words, configurations, repr."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from aftermap.errors import AftermapError, DataError, InputError, ShapeError, UnsupportedError
from aftermap.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    likelihood_from_config,
    parse_likelihood,
)
from tests.likelihood_cases import BUILT_IN, NOISE, make_data

each = pytest.mark.parametrize("name", BUILT_IN)

nan = math.nan
BAD = [
    (
        Categorical(),
        torch.zeros(3, 4),
        torch.tensor([0, 4, 1]),
        DataError,
        r"targets\[1\] is 4, but must be in",
    ),
    (Categorical(), torch.zeros(3, 4), torch.tensor([0, 1, -2]), DataError, r"targets\[2\] is -2.*= -100"),
    (Categorical(), torch.zeros(3, 4), torch.zeros(3), DataError, r"integers .*got torch.float32; use"),
    (Categorical(), torch.zeros(3, 4), torch.zeros(3, 4).long(), ShapeError, r"\[3, 4\].*of shape \[3\]"),
    (
        Categorical(),
        torch.zeros(3, 1),
        torch.zeros(3).long(),
        ShapeError,
        r"at least 2 are needed.*Bernoulli",
    ),
    (Categorical([1, 2]), torch.zeros(3, 4), torch.zeros(3).long(), ShapeError, "2 values, but .* 4 classes"),
    (Categorical(), torch.zeros(4), torch.zeros(4).long(), ShapeError, r"\[N, ..., C\], got \[4\]"),
    (
        Categorical(),
        torch.zeros(3, 4).long(),
        torch.zeros(3).long(),
        DataError,
        "floating point, got torch.int64",
    ),
    (Categorical(), torch.full((3, 4), nan), torch.zeros(3).long(), DataError, r"outputs\[0, 0\] is nan"),
    (Bernoulli(), torch.zeros(3, 2), torch.full((3, 2), 1.5), DataError, r"targets\[0, 0\] is 1.5.*\[0, 1\]"),
    (Bernoulli(), torch.zeros(3, 2), torch.full((3, 2), nan), DataError, r"targets\[0, 0\] is nan"),
    (Bernoulli(), torch.zeros(3, 2), torch.zeros(3), ShapeError, r"\[3\], but .* targets of shape \[3, 2\]"),
    (Bernoulli(), torch.zeros(3), torch.zeros(3), ShapeError, r"unsqueeze\(-1\)"),
    (Gaussian(), torch.zeros(3, 1), torch.zeros(4), ShapeError, r"\[3, 1\] or \[3\]"),
    (Gaussian(), torch.zeros(3, 2), torch.full((3, 2), nan), DataError, "must be a finite number"),
    (
        Gaussian(),
        torch.zeros(3, 2),
        torch.zeros(3, 2).cfloat(),
        DataError,
        "real numbers, got torch.complex64",
    ),
    (
        Gaussian(NOISE),
        torch.zeros(3, 2),
        torch.zeros(3, 2),
        ShapeError,
        "noise has 4 values, but outputs have 2",
    ),
    (HeteroscedasticGaussian(), torch.zeros(3, 5), torch.zeros(3, 2), ShapeError, "5 values .* even number"),
    (
        HeteroscedasticGaussian(),
        torch.zeros(3, 4),
        torch.zeros(3, 4),
        ShapeError,
        r"targets of shape \[3, 2\]",
    ),
    (BUILT_IN["natural"], torch.zeros(3, 4), torch.zeros(3, 2), DataError, "must be negative .*softplus"),
    (Poisson(), torch.zeros(3, 2), torch.tensor([[0, 1], [2, -3], [4, 5]]), DataError, r"\[1, 1\] is -3"),
    (Poisson(), torch.zeros(3, 2), torch.full((3, 2), 0.5), DataError, "whole number of 0 or more"),
]


@pytest.mark.parametrize("likelihood, outputs, targets, error, match", BAD)
def test_check_names_what_is_wrong(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, error: type[AftermapError], match: str
) -> None:
    with pytest.raises(error, match=match):
        likelihood.check(outputs, targets)


@pytest.mark.parametrize("likelihood", [Gaussian(), Bernoulli(), Poisson()], ids=repr)
def test_targets_are_never_broadcast(likelihood: Likelihood) -> None:
    """[N] against [N, C] would silently broadcast to a wrong loss."""
    with pytest.raises(ShapeError, match="targets have shape"):
        likelihood.nll(torch.zeros(3, 3), torch.zeros(3))
    with pytest.raises(ShapeError, match="targets have shape"):
        likelihood.gradient(torch.zeros(3, 2), torch.zeros(3, 1))


@pytest.mark.parametrize(
    "build, match",
    [
        (lambda: Gaussian(0.0), "positive and finite, got 0.0"),
        (lambda: Gaussian(-1), "positive and finite"),
        (lambda: Gaussian(torch.ones(2, 3)), r"shape \[2, 3\]"),
        (lambda: Gaussian("small"), "number or a tensor"),
        (lambda: Gaussian(True), "one number"),
        (lambda: Categorical([1.0, -1.0]), "non-negative numbers"),
        (lambda: Categorical(torch.ones(2, 3)), r"shape \[2, 3\]"),
        (lambda: Categorical(ignore_index=0.5), "must be an integer"),
        (lambda: HeteroscedasticGaussian("log"), "one of 'mean_log_variance', 'natural'"),
    ],
)
def test_bad_settings_are_refused(build: object, match: str) -> None:
    assert callable(build)
    with pytest.raises(InputError, match=match):
        build()


def test_words_and_objects_are_parsed() -> None:
    kinds = {"classification": Categorical, "binary": Bernoulli, "regression": Gaussian, "counts": Poisson}
    for word, cls in kinds.items():
        assert type(parse_likelihood(word)) is cls
        assert parse_likelihood(word).kind == word
    own = Gaussian(0.1)
    assert parse_likelihood(own) is own
    assert HeteroscedasticGaussian().kind == "regression"


@pytest.mark.parametrize("spec", ["softmax", None, 3, ["regression"]])
def test_an_unknown_word_lists_what_is_allowed(spec: object) -> None:
    with pytest.raises(InputError, match=r'"classification" \(Categorical\).*"counts" \(Poisson\)'):
        parse_likelihood(spec)


def test_a_class_instead_of_an_object_is_explained() -> None:
    with pytest.raises(InputError, match=r"call it, Poisson\(\)"):
        parse_likelihood(Poisson)


@each
def test_config_survives_json(name: str) -> None:
    likelihood = BUILT_IN[name]
    again = likelihood_from_config(json.loads(json.dumps(likelihood.config())))
    assert type(again) is type(likelihood)
    assert again.config() == likelihood.config()
    assert repr(again) == repr(likelihood)
    outputs, targets = make_data(name, (5, 3))
    assert_close(again.nll(outputs, targets), likelihood.nll(outputs, targets), rtol=0, atol=0)


@pytest.mark.parametrize("bad", [0, 0.0, -1.0, math.nan, math.inf, True, "1", None, torch.tensor(2.0)], ids=repr)
@pytest.mark.parametrize("cls", [Categorical, Bernoulli])
def test_bad_temperatures_are_refused(cls: type[Likelihood], bad: object) -> None:
    with pytest.raises(InputError, match=rf"{cls.__name__}: temperature must be one positive and finite number.*got"):
        cls(temperature=bad)  # type: ignore[call-arg]


def test_a_temperature_of_one_is_not_spoken_of() -> None:
    # Files that older versions wrote, and files that they should read, have none.
    assert "temperature" not in Categorical().config()
    assert repr(Bernoulli()) == "Bernoulli()"
    assert repr(Bernoulli(temperature=2)) == "Bernoulli(temperature=2.0)"
    assert likelihood_from_config({"name": "bernoulli"}).temperature == 1.0  # type: ignore[attr-defined]


def test_bad_configs_are_refused() -> None:
    with pytest.raises(InputError, match="'MyOwn', but only 'categorical'.*pass the object itself"):
        likelihood_from_config({"name": "MyOwn"})
    with pytest.raises(InputError, match=r"unknown settings \['sigma'\]; it knows \['noise'\]"):
        likelihood_from_config({"name": "gaussian", "sigma": 1.0})


def test_likelihoods_are_immutable_and_show_themselves() -> None:
    assert repr(Categorical([1, 2])) == "Categorical(weight=[1.0, 2.0], ignore_index=-100)"
    assert repr(HeteroscedasticGaussian("natural")) == "HeteroscedasticGaussian(parametrisation='natural')"
    assert repr(Poisson()) == "Poisson()"
    assert "... 50 values]" in repr(Gaussian(torch.ones(50)))
    with pytest.raises(AttributeError, match="noise"):
        Gaussian().noise = 2.0  # type: ignore[misc]
    mine = torch.ones(3)
    likelihood = Categorical(mine)
    mine[0] = 7.0
    assert likelihood.config()["weight"] == [1.0, 1.0, 1.0]


def test_a_likelihood_of_your_own_says_what_it_lacks() -> None:
    class Own(Likelihood):
        check = nll = gradient = hessian_root = sample_gradient = mean = lambda self, *args: None

    assert Own().kind == "custom"
    assert Own().columns(7) == 7
    assert repr(Own()) == "Own()"
    with pytest.raises(UnsupportedError, match="Own has no variance"):
        Own().variance(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="abstract"):
        Likelihood()  # type: ignore[abstract]


def test_classes_in_two_possible_dimensions_are_refused() -> None:
    """[N, C, H, W] and [N, H, W, C] cannot be told apart where C = H = W, and cross_entropy reads the first."""
    outputs, targets = torch.zeros(2, 4, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long)
    with pytest.raises(ShapeError, match=r"outputs of shape \[2, 4, 4, 4\] are ambiguous.*outputs.flatten\(1, -2\)"):
        Categorical().check(outputs, targets)
    # What the message advises is accepted, and so are shapes that tell the classes from the positions.
    Categorical().check(outputs.flatten(1, -2), targets.flatten(1))
    Categorical().check(torch.zeros(2, 4, 4, 3), targets)
    Categorical().check(torch.zeros(4, 4, 4), torch.zeros(4, 4, dtype=torch.long))
