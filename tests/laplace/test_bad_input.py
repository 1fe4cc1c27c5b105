"""What is refused, and what is said then."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aftermap as am
from aftermap.errors import AftermapError, DataError, InputError, NotFittedError, ShapeError, UnsupportedError
from aftermap.laplace import Laplace
from aftermap.models import check_outputs
from aftermap.testing import ModelSnapshot, check_unchanged
from tests.laplace.problems import classes, mlp, normal


def made(**options: object) -> Laplace:
    return Laplace(mlp(), "classification", **options)


@pytest.mark.parametrize("precision", [0.0, -1.0, float("nan"), float("inf"), [1.0, -2.0], {"0": 1.0, "2": 0.0}])
def test_a_prior_precision_that_is_none(precision: object) -> None:
    with pytest.raises(InputError, match="prior precision of .* must be positive and finite"):
        made(prior_precision=precision).fit(classes(), progress=False)
    laplace = made().fit(classes(), progress=False)
    with pytest.raises(InputError, match="must be positive and finite"):
        laplace.with_prior(precision)
    assert {float(v) for v in laplace.prior_precision.values()} == {1.0}


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ([1.0, 2.0, 3.0], r"one number per layer: 2 here \(0, 2\), got shape \(3,\)"),
        ({"0": 1.0}, "no number for 2.weight, 2.bias"),
        ({"0": 1.0, "2": 1.0, "7": 1.0}, "fits nothing: 7"),
        ("strong", "must be a number or numbers, got 'strong'"),
        (
            {"0.weight": 1.0, "0.bias": 2.0, "2": 1.0},
            "form one Kronecker block, which can carry only one prior precision",
        ),
        ({"0": torch.ones(4, 3), "2": 1.0}, r"has shape \(4, 3\); allowed is a number or shape"),
    ],
)
def test_a_prior_precision_of_the_wrong_form(precision: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        made(prior_precision=precision).fit(classes(), progress=False)


class CountedBatches(list[Any]):
    """A list of batches that counts how often it was gone through to its end."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.passes += 1


@pytest.mark.parametrize("structure", ["kron", "ekfac", "kfra", "diagonal", "full", "low_rank", "subset", "hessian"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_precision": {"0": 1.0, "2": 1.0, "7": 1.0}}, "fits nothing: 7"),
        ({"prior_precision": {"0": 1.0}}, "no number for 2.weight, 2.bias"),
        ({"prior_precision": [1.0, 2.0, 3.0]}, "one number per layer: 2 here"),
        ({"prior_precision": {"0": torch.ones(4, 3), "2": 1.0}}, "allowed is a number or shape"),
        ({"prior_mean": {"7.weight": torch.zeros(1)}}, "prior mean names .*7.weight"),
        ({"prior_mean": {"2.weight": torch.zeros(7)}}, "prior mean of 2.weight has shape"),
    ],
)
def test_a_prior_that_fits_no_layer_is_refused_before_the_pass(structure: str, options: Any, message: str) -> None:
    data = CountedBatches(classes())
    with pytest.raises(InputError, match=message):
        made(structure=structure, rank=3, **options).fit(data, progress=False)
    assert data.passes == 0


@pytest.mark.parametrize("structure", ["kron", "ekfac", "kfra", "matrix_free"])
def test_two_precisions_for_a_kronecker_block_are_refused_before_the_pass(structure: str) -> None:
    data = CountedBatches(classes())
    with pytest.raises(InputError, match="form one Kronecker block"):
        made(structure=structure, prior_precision={"0.weight": 1.0, "0.bias": 2.0, "2": 1.0}).fit(data, progress=False)
    assert data.passes == 0
    assert made(structure=structure).fit(data, progress=False).n_data == 60
    assert data.passes > 0


@pytest.mark.parametrize("name", ["data_scale", "temperature"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "warm"])
def test_scales(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{name}={value!r} must be a positive"):
        made(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structure": "dense"}, "structure='dense' is not known; allowed are 'diagonal', .*'kron', .*'matrix_free'"),
        ({"structure": "kronn", "params": am.laplace.Subnetwork(3)}, "structure='kronn' .* is not possible"),
        ({"curvature": "fisher"}, "curvature='fisher' is not known; allowed are 'auto'"),
        ({"structure": "low_rank", "curvature": "sampled"}, "curvature='sampled' has no meaning"),
        ({"structure": "matrix_free", "curvature": "empirical"}, "curvature='empirical' has no meaning"),
        ({"damping": "none"}, "damping='none' is not known; allowed are 'exact'"),
        ({"structure": "full", "damping": "pi"}, "structure='full' has none: use damping='exact'"),
        ({"structure": "ekfac", "damping": "factored"}, "structure='ekfac' has none: use damping='exact'"),
        ({"structure": "matrix_free", "damping": "factored"}, "structure='matrix_free' has none"),
        ({"structure": "low_rank", "rank": 0}, "rank=0 must be a whole number"),
        ({"structure": "subset", "subset_size": 0.5}, "subset_size=0.5 must be a whole number"),
        ({"prior_precision": -1.0}, "the prior precision of all layers must be positive and finite, got -1"),
        ({"prior_precision": {"0": 1.0, "2": 0.0}}, "the prior precision of 2 must be positive and finite, got 0"),
        ({"prior_precision": "strong"}, "the prior precision of all layers must be a number or numbers, got 'strong'"),
        ({"prior_mean": float("nan")}, "the prior mean of all parameters must be finite"),
        ({"prior_mean": {"0.weight": torch.tensor([math.inf])}}, "the prior mean of 0.weight must be finite"),
    ],
)
def test_options_are_refused_before_there_are_data(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"approach": "mean"}, "approach='mean' is not known"),
        ({"params": "decoder"}, "params='decoder' selects no parameter"),
        ({"params": ["3"]}, "no parameter or module is called 3"),
        ({"prior_mean": {"7.weight": torch.zeros(1)}}, "prior mean names .*7.weight"),
    ],
)
def test_options(options: dict[str, object], message: str) -> None:
    laplace = made(**options)
    before = ModelSnapshot.of(laplace.model)
    with pytest.raises(InputError, match=message):
        laplace.fit(classes(), progress=False)
    check_unchanged(laplace.model, before)


def test_unknown_likelihood() -> None:
    with pytest.raises(InputError, match="softmax"):
        Laplace(mlp(), "softmax")


def test_a_full_posterior_over_fifty_thousand_parameters() -> None:
    model = mlp(3, 7000, 4)
    message = r"full matrix over 56,004 parameters would take 23.4 GiB; the limit is 20,000. Use structure='kron'"
    with pytest.raises(InputError, match=message):
        Laplace(model, "classification", structure="full").fit(classes(), progress=False)


def test_data() -> None:
    x, y = classes()[0]
    with pytest.raises(DataError, match="data are empty"):
        made().fit([], progress=False)
    with pytest.raises(DataError, match="iterable of batches"):
        made().fit(x, progress=False)
    bad = x.clone()
    bad[2, 1] = float("nan")
    with pytest.raises(DataError, match="not finite|NaN"):
        made().fit([(bad, y)], progress=False)
    with pytest.raises(DataError, match="float32.*float64"):
        made().fit([(x.float(), y)], progress=False)
    with pytest.raises(AftermapError, match="must be in 0 ... 3"):
        made().fit([(x, y + 9)], progress=False)
    with pytest.raises(
        DataError, match="a fit with structure='kron' reads data more than once, but .* can be read only once"
    ):
        made().fit(iter(classes()), progress=False)


@pytest.mark.parametrize("params", ["all", "last_layer"])
def test_inputs_that_the_model_rejects(params: str) -> None:
    laplace = made(params=params)
    with pytest.raises(InputError, match=r"the model does not accept inputs of shape \(5, 7\): mat1"):
        laplace.fit([(normal(5, 7), torch.arange(5) % 4)], progress=False)
    with pytest.raises(NotFittedError, match="has not been fitted"):
        laplace.predict(normal(5, 3))


@pytest.mark.parametrize("params", ["all", "last_layer"])
def test_a_one_shot_iterator_is_refused_in_the_same_words(params: str) -> None:
    with pytest.raises(
        DataError, match="a fit with structure='kron' reads data more than once, but .* can be read only once"
    ):
        made(params=params).fit((b for b in classes()), progress=False)


def test_training_mode_and_layers_without_rules() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 4)).double()
    with pytest.raises(InputError, match=r"training mode: 1 \(Dropout\).*model.eval\(\)"):
        Laplace(model, "classification").fit(classes(), progress=False)
    odd = nn.Sequential(nn.Bilinear(3, 3, 4)).double().eval()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = odd[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x, x)

    with pytest.raises(UnsupportedError, match="strict=True"):
        Laplace(Twice().eval(), "classification", strict=True).fit(classes(), progress=False)
    laplace = Laplace(Twice().eval(), "classification").fit(classes(), progress=False)
    assert laplace.predict(classes()[0][0]).mean.shape == (20, 4)


def test_an_indefinite_hessian_is_refused_with_its_remedies() -> None:
    laplace = made(structure="hessian", prior_precision=1e-3)
    with pytest.warns(UserWarning, match="indefinite"), pytest.raises(ArithmeticError, match="not positive definite"):
        laplace.fit(classes(), progress=False)


def test_samples() -> None:
    laplace = made().fit(classes(), progress=False)
    for count in (0, -1, 1.5):
        with pytest.raises(InputError, match="whole number of at least 1"):
            laplace.sample(count)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="whole number of at least 1"):
            laplace.predict(classes()[0][0], link="mc", samples=count)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=rf"^samples={count} must be a whole number of at least 1"):
            laplace.predict(classes()[0][0], kind="sampling", samples=count)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="whole number of at least 1"):
            laplace.function_samples(normal(2, 3), count)  # type: ignore[arg-type]


def test_the_network_stands_first() -> None:
    for call in (
        lambda: Laplace("classification", nn.Linear(2, 3)),
        lambda: am.fit("classification", nn.Linear(2, 3), []),
    ):
        with pytest.raises(InputError, match=r"the network, a torch.nn.Module, stands first: .*; got 'classification'"):
            call()


def test_what_stands_in_the_place_of_the_network() -> None:
    for model, message in (
        (nn.Linear, r"got the class Linear itself: call it, Linear\(...\), and give it its trained weights$"),
        (nn.Linear(2, 3).state_dict(), r"got a collections.OrderedDict, perhaps weights: .* its load_state_dict$"),
        (lambda x: x, r"got a builtins.function$"),
    ):
        with pytest.raises(InputError, match=message):
            am.fit(model, classes())  # type: ignore[arg-type]


def test_the_network_stands_second_where_a_folder_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"stands second: load\(folder, model\); got '.*posterior'"):
        am.load(mlp(), str(tmp_path / "posterior"))  # type: ignore[arg-type]


def test_a_fit_looks_at_the_parameters_first() -> None:
    with torch.inference_mode():
        made_inside = mlp()
    for model, message in (
        (nn.Softmax(-1), "Softmax has no floating-point parameter, so there is nothing to be uncertain about"),
        (made_inside, "was made inside torch.inference_mode"),
    ):
        with pytest.raises(InputError, match=message):
            am.fit(model, classes())


def test_a_single_example_needs_a_batch_dimension() -> None:
    with pytest.raises(ShapeError, match=r"for a single example the first, x\[None\]$"):
        check_outputs(nn.Linear(4, 3)(torch.ones(4)), size=4)


def test_bytes_that_a_network_cannot_multiply_come_with_advice() -> None:
    x, y = torch.zeros(6, 2, dtype=torch.uint8), torch.arange(6) % 3
    laplace = Laplace(nn.Linear(2, 3), "classification").fit([(x.float(), y)])
    with pytest.raises(InputError, match=r"pass pixels as in training, such as x.float\(\) / 255"):
        laplace.predict(x)


def test_plain_numbers_come_with_advice() -> None:
    laplace = Laplace(nn.Linear(2, 3), "classification").fit([(torch.randn(6, 2), torch.arange(6) % 3)])
    with pytest.raises(DataError, match=r"torch.tensor\(x\)"):
        laplace.predict([[1.0, 2.0]])
