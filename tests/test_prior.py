"""What a user may give as a prior, and what each mistake is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aftermap.errors import InputError, NumericalError, ShapeError
from aftermap.posteriors import GaussianPosterior, Prior, precision_from_weight_decay
from tests.posteriors.cases import made, mean_of, normal, posterior_of

LAYERS = {"a": ["a.weight", "a.bias"], "b.c": ["b.c.weight"], "gain": ["gain"]}
SHAPES: dict[str, tuple[int, ...]] = {"a.weight": (3, 2), "a.bias": (3,), "b.c.weight": (4, 5), "gain": ()}


def read(precision: Any, mean: Any = 0.0) -> Prior:
    return Prior.make(precision, mean, LAYERS, SHAPES)


def numbers(precision: Any) -> dict[str, Any]:
    return {n: v.tolist() for n, v in read(precision).precision.items()}


@pytest.mark.parametrize("given", [2.0, 2, torch.tensor(2.0), torch.tensor(2, dtype=torch.int64)])
def test_one_number(given: Any) -> None:
    assert numbers(given) == dict.fromkeys(SHAPES, 2.0)
    assert {v.dtype for v in read(given).precision.values()} == {torch.float64}


@pytest.mark.parametrize("given", [[1.0, 2.0, 3.0], (1, 2, 3), torch.tensor([1.0, 2.0, 3.0])])
def test_one_per_layer(given: Any) -> None:
    assert numbers(given) == {"a.weight": 1.0, "a.bias": 1.0, "b.c.weight": 2.0, "gain": 3.0}


def test_mapping_of_layers_names_and_patterns() -> None:
    given = {"a": 1.0, "a.bias": 2.0, r"b\..*": 3.0, "gain": 4.0, r".*": 9.0}
    assert numbers(given) == {"a.weight": 1.0, "a.bias": 2.0, "b.c.weight": 3.0, "gain": 4.0}


def test_a_name_beats_its_layer_which_beats_a_longer_pattern() -> None:
    given = {"a": 1.0, r"a\.(weight|bias)(|never this)": 5.0, "a.weight": 2.0, ".*": 7.0}
    assert numbers(given) == {"a.weight": 2.0, "a.bias": 1.0, "b.c.weight": 7.0, "gain": 7.0}


def test_tensors_per_parameter() -> None:
    each = normal(3, 2).square() + 0.1
    prior = read({"a.weight": each, ".*": 1.0})
    torch.testing.assert_close(prior.precision["a.weight"], each)
    vector = prior.vector(["a.bias", "a.weight"])
    torch.testing.assert_close(vector, torch.cat([torch.ones(3, dtype=torch.float64), each.flatten()]))
    assert not prior.is_scalar(["a.weight"])
    assert prior.is_scalar(["a.bias", "gain"])


def test_prior_mean_by_name_and_energy() -> None:
    params = {n: normal(*s, seed=i) for i, (n, s) in enumerate(SHAPES.items())}
    prior = read([1.0, 2.0, 3.0], {"a.weight": params["a.weight"], "gain": torch.tensor(0.5)})
    gain = float(params["gain"]) - 0.5
    wanted = 0.5 * (
        float(params["a.bias"].square().sum()) + 2 * float(params["b.c.weight"].square().sum()) + 3 * gain**2
    )
    assert float(prior.energy(params)) == pytest.approx(wanted, rel=1e-12)
    assert prior.squared_distance(params, ["a.weight", "gain"]) == pytest.approx(gain**2, rel=1e-12)


def test_gradients_reach_every_form() -> None:
    one = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    layers = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    read(one).vector(list(SHAPES)).sum().backward()
    read(layers).vector(list(SHAPES)).sum().backward()
    assert one.grad is not None
    assert layers.grad is not None
    assert float(one.grad) == 30.0
    assert layers.grad.tolist() == [9.0, 20.0, 1.0]


@pytest.mark.parametrize(
    "given, message",
    [
        (0.0, r"the prior precision of a.weight must be positive and finite, got 0\. It is 1/variance.*such as 1e-6"),
        (-1.0, r"must be positive and finite, got -1"),
        (float("inf"), r"must be positive and finite, got inf"),
        (float("nan"), r"must be positive and finite, got nan"),
        ([1.0, 2.0, 0.0], r"the prior precision of gain must be positive"),
        ([1.0, 2.0], r"must have one number per layer: 3 here \(a, b.c, gain\), got shape \(2,\)"),
        ([[1.0, 2.0, 3.0]], r"one number per layer: 3 here .* got shape \(1, 3\)"),
        ({"a": 1.0}, r"no number for b.c.weight, gain; fits nothing: none\. Layers are a, b.c, gain"),
        ({".*": 1.0, "typo": 2.0}, r"no number for none; fits nothing: typo"),
        ({".*": 1.0, "*.weight": 2.0}, r"fits nothing: \*\.weight"),
        (
            {".*": 1.0, "a.weight": torch.ones(2, 3)},
            r"precision of a.weight has shape \(2, 3\); allowed .* shape \(3, 2\)",
        ),
        ("auto", r"the prior precision must be a number or numbers, got 'auto'"),
        ({".*": "big"}, r"the prior precision of '\.\*' must be a number or numbers, got 'big'"),
        (None, r"the prior precision must be a number or numbers, got None"),
    ],
)
def test_bad_precisions(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(given)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"other": torch.zeros(3)}, r"the prior mean names \['other'\], which are not among the selected parameters"),
        ({"a.bias": torch.zeros(2)}, r"the prior mean of a.bias has shape \(2,\); allowed is a number or shape \(3,\)"),
        (float("nan"), r"the prior mean of a.weight must be finite"),
        ("zero", r"the prior mean must be a number or numbers, got 'zero'"),
    ],
)
def test_bad_means(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(1.0, given)


def test_many_names_are_cut_short() -> None:
    shapes = {f"layer{i}.weight": (2, 3) for i in range(9)}
    layers = {n.partition(".")[0]: [n] for n in shapes}
    with pytest.raises(InputError, match=r"layer5.weight, … \(3 more\); fits nothing"):
        Prior.make({}, 0.0, layers, shapes)


def test_weight_decay() -> None:
    assert precision_from_weight_decay(5e-4, 50_000) == pytest.approx(25.0)
    with pytest.raises(InputError, match="weight decay must not be negative and n_data at least 1, got -1 and 0"):
        precision_from_weight_decay(-1, 0)


def test_a_kronecker_block_carries_one_number() -> None:
    shapes = made("kron")[1].shapes
    with pytest.raises(InputError, match=r"0.weight, 0.bias form one Kronecker block, .* only one prior precision"):
        posterior_of("kron", {"0.weight": torch.ones(shapes["0.weight"]), ".*": 1.0})
    with pytest.raises(InputError, match=r"one number per layer, or structure='diagonal', 'full' or 'low_rank'"):
        posterior_of("kron", {r".*weight": 1.0, r".*bias": 2.0})


def test_a_network_of_one_layer_has_one_layer() -> None:
    posterior = posterior_of("kron one layer", [0.9])
    assert [list(names) for names in posterior.layers.values()] == [["weight", "bias"]]


@pytest.mark.parametrize("case", ["kron", "ekfac", "diagonal", "full", "low_rank"])
def test_with_prior_reads_what_the_constructor_reads(case: str) -> None:
    for given in (2.0, [2.0, 3.0], {"0": 2.0, r"2\..*": 3.0}):
        changed = posterior_of(case, 0.7).with_prior(given, scale=1.9)
        fresh = posterior_of(case, given, scale=1.9)
        torch.testing.assert_close(changed.to_dense(), fresh.to_dense(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), torch.ones(2)])
def test_bad_scales(scale: Any) -> None:
    message = "the scale of the curvature must be one positive and finite number"
    with pytest.raises(InputError, match=message):
        posterior_of("kron", scale=scale)
    with pytest.raises(InputError, match=message):
        posterior_of("kron").with_prior(scale=scale)


def test_a_mean_that_does_not_fit() -> None:
    model, factors = made("kron")
    mean = mean_of(model)
    with pytest.raises(ShapeError, match=r"the mean of 0.bias has shape \(6,\); the curvature is over shape \(5,\)"):
        GaussianPosterior.from_factors(factors, {**mean, "0.bias": torch.zeros(6)})
    with pytest.raises(InputError, match="the mean has no value for 2.bias"):
        GaussianPosterior.from_factors(factors, {n: v for n, v in mean.items() if n != "2.bias"})


@pytest.mark.parametrize("count", [0, -2, 1.5])
def test_bad_numbers_of_samples(count: Any) -> None:
    with pytest.raises(InputError, match="must be a whole number of at least 1"):
        posterior_of("kron").sample(count)


def test_log_prob_names_what_is_missing() -> None:
    posterior = posterior_of("kron")
    with pytest.raises(InputError, match="missing are 2.weight, 2.bias"):
        posterior.log_prob({n: v for n, v in posterior.mean.items() if n.startswith("0")})


def test_numerical_errors_are_not_input_errors() -> None:
    assert not issubclass(NumericalError, InputError)
