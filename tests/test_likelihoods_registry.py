"""The task that targets and outputs show, where nobody said it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aftermap.errors import InputError
from aftermap.likelihoods.registry import infer_task

ZEROS_AND_ONES = torch.tensor([0, 1, 1, 0])
NUMBERS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize(
    ("targets", "outputs", "task"),
    [
        (ZEROS_AND_ONES, torch.zeros(4, 1), "binary"),
        (ZEROS_AND_ONES, torch.zeros(4), "binary"),
        (ZEROS_AND_ONES[:, None], torch.zeros(4, 1), "binary"),
        (ZEROS_AND_ONES.bool(), torch.zeros(4, 1), "binary"),
        (ZEROS_AND_ONES, torch.zeros(4, 2), "classification"),
        (torch.tensor([0, 2, 1, 1]), torch.zeros(4, 3), "classification"),
        (torch.tensor([[0, 1], [2, 1]]), torch.zeros(2, 2, 3), "classification"),
        (NUMBERS, torch.zeros(4, 1), "regression"),
        (NUMBERS.view(2, 2), torch.zeros(2, 2), "regression"),
        (2 * NUMBERS.view(2, 2).round(), torch.zeros(2, 2), "regression"),
    ],
)
def test_the_task_follows_from_targets_and_outputs(targets: Tensor, outputs: Tensor, task: str) -> None:
    assert infer_task(targets, outputs) == task


@pytest.mark.parametrize(
    ("targets", "outputs", "message"),
    [
        (None, torch.zeros(4, 1), "no targets"),
        (torch.tensor([0, 2, 1, 5]), torch.zeros(4, 1), "whole numbers and the network has one output.*counts"),
        (
            ZEROS_AND_ONES.double(),
            torch.zeros(4, 1),
            "zeros and ones in torch.float64, which could be labels or numbers",
        ),
        (
            ZEROS_AND_ONES.double(),
            torch.zeros(4, 2),
            "zeros and ones in torch.float64, which could be labels or numbers",
        ),
        (torch.tensor([0.0, 2.0, 1.0, 1.0]), torch.zeros(4, 3), r"class labels are integers \(y.long"),
        (torch.eye(3).long(), torch.zeros(3, 3), "one-hot labels are given as class indices"),
    ],
)
def test_what_could_mean_several_things_is_refused(targets: Tensor | None, outputs: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        infer_task(targets, outputs)
