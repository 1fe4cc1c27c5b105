"""Unusual data of every form that a user may hand to `evaluate`, and what is said about others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from aftermap.baselines import Deterministic
from aftermap.errors import AftermapError
from aftermap.evaluation import evaluate

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
DATA = [(X, torch.arange(12) % 3)]


def predictor() -> Deterministic:
    net = nn.Linear(3, 3)
    with torch.no_grad():
        net.weight.copy_(torch.eye(3))
        net.bias.zero_()
    return Deterministic(net.eval())


def test_a_tensor_of_unusual_inputs_is_enough() -> None:
    one, other = (evaluate(predictor(), DATA, ood={"far": far}, n_resamples=0) for far in (5 * X, [(5 * X, None)]))
    assert one["far/entropy/auroc"] == other["far/entropy/auroc"]


@pytest.mark.parametrize(
    ("ood", "message"),
    [
        (5 * X, "ood is a torch.Tensor, but must be a mapping from names to data"),
        ([(5 * X, None)], "ood is a list of 1 elements, but must be a mapping from names to data"),
        ({"far": (X, X)}, "the OOD set 'far' is a tuple of 2 elements; pass a tensor of inputs"),
        ({"far": X[:, :2]}, "shape"),
        ({"far": "ood.npz"}, "the OOD set 'far' is a builtins.str; pass a tensor of inputs"),
    ],
)
def test_unusual_data_of_another_form(ood: Any, message: str) -> None:
    with pytest.raises((AftermapError, RuntimeError), match=message):
        evaluate(predictor(), DATA, ood=ood, n_resamples=0)


def test_a_network_is_no_predictor() -> None:
    with pytest.raises(AftermapError, match="for a plain network use aftermap.baselines.Deterministic"):
        evaluate(nn.Linear(3, 3), DATA)  # type: ignore[arg-type]
