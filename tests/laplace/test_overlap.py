"""Validation data that were trained on are told, and a few that are there by chance are not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from aftermap.batches import Batch
from aftermap.errors import StatisticalWarning
from aftermap.laplace import Laplace
from aftermap.laplace.overlap import warn_if_trained_on
from tests.laplace.problems import mlp, normal


def labelled(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, (x[:, 0] > 0).long()


def batch(x: Tensor) -> Batch:
    return Batch(*labelled(x), None, len(x))


@pytest.mark.parametrize(
    ("shared", "told"), [(0, False), (2, False), (3, False), (10, False), (11, True), (20, True)], ids=str
)
def test_more_than_half_of_the_inputs_are_told(shared: int, told: bool) -> None:
    x, other = normal(40, 3), normal(20, 3, seed=5)
    fitted = Laplace(mlp(3, 4, 2), "classification", structure="diagonal").fit([labelled(x)], progress=False).fitted
    validation = [batch(torch.cat([x[:shared], other[shared:]]))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_trained_on(validation, fitted)
    assert [w.category for w in caught] == [StatisticalWarning] * told
    if told:
        assert f"{shared} of 20 validation inputs are among the first 40 training inputs" in str(caught[0].message)


def test_two_inputs_are_too_few_to_tell_of() -> None:
    x = normal(40, 3)
    fitted = Laplace(mlp(3, 4, 2), "classification", structure="diagonal").fit([labelled(x)], progress=False).fitted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_trained_on([batch(x[:2])], fitted)
    with pytest.warns(StatisticalWarning, match="3 of 3 validation inputs"):
        warn_if_trained_on([batch(x[:3])], fitted)
