"""The training examples that a network takes for most like an input: neighbours in the features before its last layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aftermap import checks
from aftermap.baselines.features import FeatureReader
from aftermap.batches import Unpack, iterate
from aftermap.errors import DataError
from aftermap.models import check_device

__all__ = ["Neighbours", "nearest_examples"]


@dataclass(frozen=True)
class Neighbours:
    """The nearest training examples of some inputs.

    Attributes:
        indices: The places of the neighbours in the training data, nearest first [T, k].
        distances: The Euclidean distances in the features [T, k].
        typical: The median distance of a training example to its own nearest neighbour, over at most 500 of them: the
            yardstick for `distances`.
        inputs: The neighbours themselves [T, k, ...]; None where inputs are not single tensors of one shape.
        targets: The targets of the neighbours [T, k, ...]; None where there are none.
    """

    indices: Tensor
    distances: Tensor
    typical: float
    inputs: Tensor | None
    targets: Tensor | None


def nearest_examples(
    model: nn.Module,
    train: Iterable[Any],
    inputs: Any,
    *,
    count: int = 3,
    layer: str | None = None,
    unpack: Unpack | None = None,
) -> Neighbours:
    """Finds the training examples that are nearest to each input, as the network sees them.

    Args:
        model: The network; nothing of it changes.
        train: The batches of the training data.
        inputs: A batch of inputs [T, ...].
        count: The number of neighbours of each input.
        layer: The name of the module whose input the features are. None takes the last layer.
        unpack: A function that turns a batch of another form into (inputs, targets).

    Returns:
        Neighbours, nearest first.

    Raises:
        DataError: The training data hold fewer examples than neighbours are asked for.
        UnsupportedError: The network has no last layer with a weight matrix.

    >>> net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> train = [(torch.arange(5.0)[:, None], torch.arange(5.0)[:, None])]
    >>> nearest_examples(net, train, torch.tensor([[2.9]]), count=1).indices
    tensor([[3]])
    """
    checks.count("count", count)
    device, dtype = check_device(model)
    (asked,) = iterate([(inputs, None)], device=device, dtype=dtype)
    features: list[Tensor] = []
    examples: list[Any] = []
    targets: list[Any] = []
    reader: FeatureReader | None = None
    for batch in iterate(train, device=device, dtype=dtype, unpack=unpack):
        reader = reader or FeatureReader(model, layer, batch)
        features.append(reader.read(batch).features)
        examples.append(batch.inputs.detach().cpu() if isinstance(batch.inputs, Tensor) else None)
        targets.append(batch.targets.detach().cpu() if isinstance(batch.targets, Tensor) else None)
    if reader is None or sum(map(len, features)) < count:
        raise DataError(f"the training data hold {sum(map(len, features))} examples, fewer than the {count} neighbours")
    known = torch.cat(features)
    distances, indices = torch.cdist(reader.read(asked).features, known).topk(count, largest=False)
    return Neighbours(
        indices,
        distances,
        _typical_distance(known),
        _rows(examples, indices),
        _rows(targets, indices),
    )


def _typical_distance(features: Tensor, most: int = 500) -> float:
    if len(features) < 2:
        return 0.0
    some = torch.linspace(0, len(features) - 1, min(most, len(features))).long()
    between = torch.cdist(features[some], features)
    between[torch.arange(len(some)), some] = torch.inf
    return float(between.amin(1).median())


def _rows(parts: list[Any], indices: Tensor) -> Tensor | None:
    """Returns the chosen rows of tensors of one shape, or None where there are no such tensors."""
    if any(part is None for part in parts) or len({part.shape[1:] for part in parts}) != 1:
        return None
    return torch.cat(parts)[indices]
