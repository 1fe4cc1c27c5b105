"""A prediction as a container: length, slices, joining, devices, arrays and its repr."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from aftermap.errors import InputError, ShapeError, UnsupportedError
from aftermap.likelihoods import Categorical, Gaussian
from aftermap.predictive.links import gaussian_prediction, samples_prediction
from aftermap.predictive.prediction import Prediction

F64 = torch.float64
WEIGHTS = torch.tensor([1.0, 2.0, 4.0], dtype=F64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def latent_prediction(n: int = 6) -> Prediction:
    mean = torch.randn(6, 4, generator=seeded(), dtype=F64)[:n]
    cov = torch.eye(4, dtype=F64).expand(n, 4, 4)
    return gaussian_prediction(Categorical(), mean, cov, link="mc", samples=9, generator=seeded())


def mixture(weights: Tensor | None = WEIGHTS) -> Prediction:
    f = torch.randn(3, 6, 5, 2, generator=seeded(), dtype=F64)
    return samples_prediction(Gaussian(), f, weights=weights)


def check_equal(one: Prediction, other: Prediction) -> None:
    assert (one.kind, one.link) == (other.kind, other.link)
    tables = one.to_numpy(), other.to_numpy()
    assert tables[0].keys() == tables[1].keys()
    for name, values in tables[0].items():
        np.testing.assert_array_equal(values, tables[1][name], err_msg=name)


@pytest.mark.parametrize("make", [latent_prediction, mixture])
def test_slices_join_to_the_whole(make) -> None:
    whole = make()
    assert len(whole) == 6
    check_equal(Prediction.concatenate([whole[:1], whole[1:4], whole[4:]]), whole)
    check_equal(Prediction.concatenate([whole[i] for i in range(6)]), whole)
    check_equal(Prediction.concatenate([whole]), whole)


@pytest.mark.parametrize("make", [latent_prediction, mixture])
def test_every_kind_of_index(make) -> None:
    whole = make()
    mask = torch.tensor([True, False, True, False, False, True])
    for index in (mask, [0, 2, 5], torch.tensor([0, 2, 5]), mask.numpy()):
        check_equal(whole[index], Prediction.concatenate([whole[0], whole[2], whole[5]]))
    check_equal(whole[-1], whole[5:])
    check_equal(whole[-2], whole[4:5])
    assert whole[2].mean.shape[0] == 1


def test_iteration_ends() -> None:
    assert len(list(latent_prediction())) == 6


def test_indices_that_do_not_exist() -> None:
    with pytest.raises(IndexError, match="index 6 is out of range for 6 examples"):
        latent_prediction()[6]
    with pytest.raises(InputError, match="index the examples only"):
        latent_prediction()[:, 0]


def test_slicing_predicts_the_same_as_predicting_a_slice() -> None:
    part = gaussian_prediction(
        Categorical(),
        latent_prediction().latent_mean[:2],
        torch.eye(4, dtype=F64).expand(2, 4, 4),
        link="mc",
        samples=9,
        generator=seeded(),
    )
    for name, values in part.to_numpy().items():
        expected = latent_prediction()[:2].to_numpy()[name]
        assert values == pytest.approx(expected, rel=1e-12), name


def test_a_field_that_one_part_lacks_is_left_out() -> None:
    whole = latent_prediction()
    bare = Prediction(whole.kind, whole.mean, whole.epistemic, whole.aleatoric, whole.total, link="mc")
    for parts in ([whole, bare], [bare, whole]):
        joined = Prediction.concatenate(parts)
        assert joined.samples is None
        assert joined.latent_cov is None
        assert_close(joined.mean, torch.cat([whole.mean, whole.mean]))


def test_what_does_not_join() -> None:
    with pytest.raises(InputError, match="at least one prediction"):
        Prediction.concatenate([])
    with pytest.raises(InputError, match="predictions of one kind, got classification, regression"):
        Prediction.concatenate([latent_prediction(), mixture()])
    whole = latent_prediction()
    plain = Prediction(whole.kind, whole.mean, whole.epistemic, whole.aleatoric, whole.total, link="map")
    with pytest.raises(InputError, match="predictions of one link, got map, mc"):
        Prediction.concatenate([whole, plain])
    for other in (mixture(None), mixture(WEIGHTS.flip(0))):
        with pytest.raises(InputError, match="the mixture weights of the predictions differ"):
            Prediction.concatenate([mixture(), other])
    narrow = samples_prediction(Gaussian(), torch.zeros(3, 6, 3, 2, dtype=F64))
    with pytest.raises(ShapeError, match=r"mean of shapes \[6, 5, 2\], \[6, 3, 2\] do not join"):
        Prediction.concatenate([mixture(None), narrow])


def test_arrays() -> None:
    arrays = latent_prediction().to_numpy()
    assert set(arrays) == {
        "mean", "epistemic", "aleatoric", "total", "latent_mean", "latent_cov", "latent_var", "samples"
    }  # fmt: skip
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
    half = Prediction("regression", *(torch.ones(3, 2, dtype=torch.bfloat16) for _ in range(4)))
    assert half.to_numpy()["mean"].dtype == np.float32


def test_arrays_of_a_prediction_with_a_graph() -> None:
    mean = torch.zeros(3, 2, dtype=F64, requires_grad=True)
    pred = gaussian_prediction(Gaussian(), mean, latent_var=torch.ones(3, 2, dtype=F64))
    assert pred.mean.requires_grad
    assert not pred.detach().mean.requires_grad
    np.testing.assert_array_equal(pred.to_numpy()["mean"], np.zeros((3, 2)))


def test_cpu_and_repr() -> None:
    whole = mixture()
    check_equal(whole.cpu(), whole)
    assert repr(whole) == (
        "Prediction(kind='regression', link='samples', mean=[6, 5, 2], epistemic=[6, 5, 2], aleatoric=[6, 5, 2], "
        "total=[6, 5, 2], samples=[3, 6, 5, 2], sample_variance=[3, 6, 5, 2], weights=[3])"
    )


def test_it_is_frozen() -> None:
    with pytest.raises(AttributeError, match="cannot assign to field 'mean'"):
        latent_prediction().mean = torch.zeros(2, 2)  # type: ignore[misc]


def test_bad_construction() -> None:
    with pytest.raises(InputError, match="kind is 'classes', but must be one of 'classification', 'binary'"):
        Prediction("classes", *(torch.ones(3, 2) for _ in range(4)))
    with pytest.raises(ShapeError, match=r"mean must have shape \[N, ..., D\], got \[3\]"):
        Prediction("regression", *(torch.ones(3) for _ in range(4)))


def test_a_likelihood_of_ones_own_has_moments_only() -> None:
    custom = Prediction("custom", *(torch.ones(3, 2, dtype=F64) for _ in range(4)))
    lower, upper = custom.interval(noise=False)
    assert_close(upper - lower, torch.full((3, 2), 2 * 1.959963984540054, dtype=F64))
    for call in (custom.distribution, lambda: custom.log_prob(torch.ones(3, 2))):
        with pytest.raises(UnsupportedError, match="but this is custom"):
            call()
